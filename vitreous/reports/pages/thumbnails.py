"""Pictures on pages: what a model sees as RGB, made small, as a data URI."""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence

import numpy as np
from PIL import Image

from vitreous.inference.image_grid import write_gif

MAX_PAGE_IMAGE_SIDE = 224  # pixels of an image on a page, at most
FRAME_MILLISECONDS = 150  # milliseconds that a frame of a map over time is shown
MIN_MAP_SIDE = 112  # pixels that an image under a map of attention has at least, so that the map is smooth
ATTENTION_COLORMAP = "plasma"  # matplotlib's colours of attention over images, perceptually uniform
ATTENTION_OPACITIES = (0.3, 0.75)  # of the smallest and the largest attention over an image
ATTENTION_PERCENTILES = (1, 99)  # of a map of attention, that colours span
MIN_MAP_CONTRAST = 0.1  # of the upper percentile, that colours span at least
MIN_SMOOTH_SIDE = 64  # below which an image is shown with its pixels as squares


def enlarge_pixels(image: Image.Image, side: int) -> Image.Image:
    """An image whose longer side has at least `side` pixels, each of its pixels a square."""
    times = -(-side // max(image.size))
    return image.resize((image.width * times, image.height * times), Image.Resampling.NEAREST)


def encode_gif(frames: Sequence[Image.Image]) -> bytes:
    """Images of one size as an animated GIF that goes on without end."""
    write_gif(buffer := io.BytesIO(), frames, FRAME_MILLISECONDS)
    return buffer.getvalue()


def shrink_image(image: Image.Image, side: int = MAX_PAGE_IMAGE_SIDE) -> Image.Image:
    """Return an image of at most `side` pixels along a side, its aspect kept."""
    share = side / max(image.size)
    width, height = (max(1, round(length * share)) for length in image.size)
    return image.resize((width, height)) if share < 1 else image


def scale_attention_map(weights: np.ndarray) -> np.ndarray:
    """Scale nonnegative attention of any shape to [0, 1] from its 1st to its 99th percentile, so that outliers hide
    nothing. The range is at least a tenth of the upper end: uniform attention shows no contrast."""
    low, high = np.percentile(weights, ATTENTION_PERCENTILES)
    high = high if high > 0 else max(float(weights.max()), 1e-30)
    return ((weights - low) / max(high - low, MIN_MAP_CONTRAST * high)).clip(0, 1)


def overlay_heat_map(image: Image.Image, weights: np.ndarray) -> Image.Image:
    """Overlay attention (h, w) in [0, 1] on the grey image, in colours from dark blue to yellow that rise evenly in
    lightness and are more opaque the larger the value."""
    from matplotlib import colormaps

    light = Image.fromarray((weights * 255).astype(np.uint8)).resize(image.size, Image.Resampling.BICUBIC)
    values = np.asarray(light)
    colours = colormaps[ATTENTION_COLORMAP](values)[..., :3] * 255
    low, high = ATTENTION_OPACITIES
    opacity = low + (high - low) * values[..., None] / 255
    grey = np.asarray(image.convert("L"), np.float32)[..., None]
    return Image.fromarray(((1 - opacity) * grey + opacity * colours).round().astype(np.uint8))


def encode_data_uri(image: Image.Image) -> str:
    """Encode an image as a data URI: PNG where it is small, else JPEG."""
    buffer = io.BytesIO()
    small = max(image.size) < MIN_SMOOTH_SIDE
    image.save(buffer, "PNG") if small else image.save(buffer, "JPEG", quality=85)
    return f"data:image/{'png' if small else 'jpeg'};base64,{base64.b64encode(buffer.getvalue()).decode()}"
