"""Thumbnails for pages: the model's input images as RGB, downscaled, as data URIs."""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence

import numpy as np
from PIL import Image

from vitreous.inference.image_grid import write_gif

MAX_PAGE_IMAGE_SIDE = 224  # maximum height and width in pixels of an image on a page
FRAME_MILLISECONDS = 150  # duration of a frame of a map over time
MIN_MAP_SIDE = 112  # minimum longer side in pixels of an image under an attention map, for a smooth map
ATTENTION_COLORMAP = "plasma"  # matplotlib colour map of attention over images, perceptually uniform
ATTENTION_OPACITIES = (0.3, 0.75)  # opacity of the smallest and the largest attention over an image
ATTENTION_PERCENTILES = (1, 99)  # percentiles of an attention map that the colours span
MIN_MAP_CONTRAST = 0.1  # minimum colour span, relative to the upper percentile
MIN_SMOOTH_SIDE = 64  # smaller images are shown with square pixels


def enlarge_pixels(image: Image.Image, min_side: int) -> Image.Image:
    """Enlarge an image by nearest-neighbour until its longer side has at least `min_side` pixels."""
    factor = -(-min_side // max(image.size))
    return image.resize((image.width * factor, image.height * factor), Image.Resampling.NEAREST)


def encode_gif(frames: Sequence[Image.Image]) -> bytes:
    """Encode images of equal size as an animated GIF that repeats forever."""
    write_gif(buffer := io.BytesIO(), frames, FRAME_MILLISECONDS)
    return buffer.getvalue()


def shrink_image(image: Image.Image, max_side: int = MAX_PAGE_IMAGE_SIDE) -> Image.Image:
    """Downscale an image to at most `max_side` pixels per side, keeping its aspect ratio."""
    scale = max_side / max(image.size)
    width, height = (max(1, round(length * scale)) for length in image.size)
    return image.resize((width, height)) if scale < 1 else image


def scale_attention_map(weights: np.ndarray) -> np.ndarray:
    """Scale nonnegative attention of any shape to [0, 1] from its 1st to its 99th percentile, to limit the effect of
    outliers. The range is at least a tenth of the upper end: uniform attention shows no contrast."""
    low, high = np.percentile(weights, ATTENTION_PERCENTILES)
    high = high if high > 0 else max(float(weights.max()), 1e-30)
    return ((weights - low) / max(high - low, MIN_MAP_CONTRAST * high)).clip(0, 1)


def overlay_heat_map(image: Image.Image, weights: np.ndarray) -> Image.Image:
    """Overlay attention (h, w) in [0, 1] on the grey image. Colours go from dark blue to yellow with uniform lightness
    steps; opacity grows with the value."""
    from matplotlib import colormaps

    weight_image = Image.fromarray((weights * 255).astype(np.uint8)).resize(image.size, Image.Resampling.BICUBIC)
    values = np.asarray(weight_image)
    colours = colormaps[ATTENTION_COLORMAP](values)[..., :3] * 255
    low, high = ATTENTION_OPACITIES
    opacity = low + (high - low) * values[..., None] / 255
    grey = np.asarray(image.convert("L"), np.float32)[..., None]
    return Image.fromarray(((1 - opacity) * grey + opacity * colours).round().astype(np.uint8))


def encode_data_uri(image: Image.Image) -> str:
    """Encode an image as a data URI: PNG if it is small, else JPEG."""
    buffer = io.BytesIO()
    is_small = max(image.size) < MIN_SMOOTH_SIDE
    image.save(buffer, "PNG") if is_small else image.save(buffer, "JPEG", quality=85)
    return f"data:image/{'png' if is_small else 'jpeg'};base64,{base64.b64encode(buffer.getvalue()).decode()}"
