"""A signal as a picture."""

from __future__ import annotations

import numpy as np
from PIL import Image, ImageDraw

WIDTH, HEIGHT, INK = 224, 112, (20, 60, 140)


def draw_curve(signal: np.ndarray) -> Image.Image:
    """A signal (L,) drawn from its least value, at the bottom, to its greatest: an RGB image of WIDTH x HEIGHT."""
    low, high = float(signal.min()), float(signal.max())
    down = (HEIGHT - 3) * (high - signal.astype(np.float64)) / max(high - low, 1e-9) + 1
    across = np.linspace(1, WIDTH - 2, len(signal))
    image = Image.new("RGB", (WIDTH, HEIGHT), "white")
    ImageDraw.Draw(image).line(list(zip(across.tolist(), down.tolist(), strict=True)), fill=INK)
    return image
