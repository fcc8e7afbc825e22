"""Draw class maps: class colours, overlays on images, and image files.

In shapes, K is classes, and H and W are the height and width of the image.
"""

from __future__ import annotations

import colorsys
import io

import numpy as np
from PIL import Image

from vitreous.data.annotations.painted import BACKGROUND_CLASS
from vitreous.data.annotations.target import IGNORE_INDEX

GOLDEN_RATIO = 0.618034  # hue step between consecutive classes, in turns, which keeps the hues of few classes distinct
IGNORE_PIXEL_VALUE = 255  # value of ignored pixels in an 8-bit class map file
CLASS_MAP_OPACITY = 0.55  # opacity of a class colour over an image


def create_class_colours(classes: tuple[str, ...]) -> np.ndarray:
    """Create a distinct colour for each class, (K, 3) uint8; the background class is black."""
    colours = []
    for index, name in enumerate(classes):
        light = (0.95, 0.7, 0.85)[index // 8 % 3]
        colour = colorsys.hsv_to_rgb((0.55 + GOLDEN_RATIO * index) % 1, 0.75, light)
        colours.append((0, 0, 0) if name == BACKGROUND_CLASS else tuple(round(255 * channel) for channel in colour))
    return np.array(colours, np.uint8).reshape(len(classes), 3)


def overlay_class_map(image: Image.Image, classes: np.ndarray, colours: np.ndarray) -> Image.Image:
    """Overlay a class map (H, W) int on an image of that size, in the class colours (K, 3).

    Pixels of black classes, and ignored pixels, are unchanged. Returns an RGB image.
    """
    pixels = np.asarray(image.convert("RGB"), np.float32)
    shades = np.concatenate([colours, np.zeros((1, 3), np.uint8)])[classes]  # IGNORE_INDEX, -1, is the last entry
    strength = CLASS_MAP_OPACITY * shades.any(-1, keepdims=True)
    return Image.fromarray(np.rint(pixels * (1 - strength) + shades * strength).astype(np.uint8))


def tile_middle_planes(volume: np.ndarray, fill: float = 0) -> np.ndarray:
    """Tile the three central planes of a volume, one per axis, side by side: (..., D, H, W) -> (..., h, w). Lower
    planes are padded with `fill` at the bottom."""
    d, h, w = volume.shape[-3:]
    planes = (volume[..., d // 2, :, :], volume[..., h // 2, :], volume[..., w // 2])
    height = max(plane.shape[-2] for plane in planes)
    leading_padding = [(0, 0)] * (volume.ndim - 3)
    filled = [np.pad(p, [*leading_padding, (0, height - p.shape[-2]), (0, 0)], constant_values=fill) for p in planes]
    return np.concatenate(filled, -1)


def class_map_to_image(classes: np.ndarray, colours: np.ndarray, palette: bool = True) -> Image.Image:
    """Convert a class map (H, W) int to an image whose pixels are class indices.

    For at most 255 classes, the image has 8 bits, and the class colours (K, 3) as its palette if `palette`; ignored
    pixels are IGNORE_PIXEL_VALUE. For more classes it has 16 bits, and ignored pixels are 65535.
    """
    if len(colours) > IGNORE_PIXEL_VALUE:
        return Image.fromarray(np.where(classes == IGNORE_INDEX, 65535, classes).astype(np.uint16))
    image = Image.fromarray(np.where(classes == IGNORE_INDEX, IGNORE_PIXEL_VALUE, classes).astype(np.uint8))
    if not palette:
        return image
    image.putpalette(np.concatenate([colours, np.full((256 - len(colours), 3), 255, np.uint8)]).tobytes())
    return image


def encode_png(image: Image.Image) -> bytes:
    """Encode an image as PNG bytes."""
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    return buffer.getvalue()
