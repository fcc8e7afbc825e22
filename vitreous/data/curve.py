"""Draw a signal as an image."""

from __future__ import annotations

import numpy as np
from PIL import Image, ImageDraw

CURVE_WIDTH, CURVE_HEIGHT, CURVE_COLOUR = 224, 112, (20, 60, 140)


def draw_signal_curve(signal: np.ndarray) -> Image.Image:
    """Draw a signal (L,) as a curve, from its minimum at the bottom to its maximum at the top, in an RGB image of
    `CURVE_WIDTH` x `CURVE_HEIGHT` pixels."""
    low, high = float(signal.min()), float(signal.max())
    down = (CURVE_HEIGHT - 3) * (high - signal.astype(np.float64)) / max(high - low, 1e-9) + 1
    across = np.linspace(1, CURVE_WIDTH - 2, len(signal))
    image = Image.new("RGB", (CURVE_WIDTH, CURVE_HEIGHT), "white")
    ImageDraw.Draw(image).line(list(zip(across.tolist(), down.tolist(), strict=True)), fill=CURVE_COLOUR)
    return image
