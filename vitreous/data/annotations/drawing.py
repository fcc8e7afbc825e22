"""Class maps as pictures: colours of classes, maps laid over images, and files of them.

K classes, H and W pixels.
"""

from __future__ import annotations

import colorsys
import io

import numpy as np
from PIL import Image

from vitreous.data.annotations.painted import BACKGROUND_CLASS
from vitreous.data.annotations.target import IGNORE_INDEX

GOLDEN_RATIO = 0.618034  # of a turn from the hue of a class to that of the next: no two of few classes are alike
IGNORE_PIXEL_VALUE = 255  # in a file of a class map: IGNORE
CLASS_MAP_OPACITY = 0.55  # of the colour of a class over an image


def create_class_colours(classes: tuple[str, ...]) -> np.ndarray:
    """Return (K, 3) uint8, a colour for each class by its position; black for the background."""
    rows = []
    for number, name in enumerate(classes):
        light = (0.95, 0.7, 0.85)[number // 8 % 3]
        colour = colorsys.hsv_to_rgb((0.55 + GOLDEN_RATIO * number) % 1, 0.75, light)
        rows.append((0, 0, 0) if name == BACKGROUND_CLASS else tuple(round(255 * part) for part in colour))
    return np.array(rows, np.uint8).reshape(len(classes), 3)


def overlay_class_map(image: Image.Image, classes: np.ndarray, colours: np.ndarray) -> Image.Image:
    """Lay a class map (H, W) int over an image of that size, in the colours (K, 3) of the classes.

    Black classes and pixels that are IGNORE stay as the image has them. Returns an RGB image.
    """
    pixels = np.asarray(image.convert("RGB"), np.float32)
    shades = np.concatenate([colours, np.zeros((1, 3), np.uint8)])[classes]  # IGNORE is the last
    strength = CLASS_MAP_OPACITY * shades.any(-1, keepdims=True)
    return Image.fromarray(np.rint(pixels * (1 - strength) + shades * strength).astype(np.uint8))


def tile_middle_planes(volume: np.ndarray, fill: float = 0) -> np.ndarray:
    """Return (..., D, H, W) as (..., h, w): the planes in the middle of each of the three axes side by side, `fill`
    below those that are less high."""
    d, h, w = volume.shape[-3:]
    planes = (volume[..., d // 2, :, :], volume[..., h // 2, :], volume[..., w // 2])
    height = max(plane.shape[-2] for plane in planes)
    rest = [(0, 0)] * (volume.ndim - 3)
    filled = [np.pad(p, [*rest, (0, height - p.shape[-2]), (0, 0)], constant_values=fill) for p in planes]
    return np.concatenate(filled, -1)


def class_map_to_image(classes: np.ndarray, colours: np.ndarray, palette: bool = True) -> Image.Image:
    """Return a class map (H, W) int as a picture whose pixels are the numbers of the classes, NOBODY for IGNORE.

    Of at most 255 classes it has 8 bits and the colours (K, 3) as its `palette`, or is grey; of more, 16 bits.
    """
    if len(colours) > IGNORE_PIXEL_VALUE:
        return Image.fromarray(np.where(classes == IGNORE_INDEX, 65535, classes).astype(np.uint16))
    picture = Image.fromarray(np.where(classes == IGNORE_INDEX, IGNORE_PIXEL_VALUE, classes).astype(np.uint8))
    if not palette:
        return picture
    picture.putpalette(np.concatenate([colours, np.full((256 - len(colours), 3), 255, np.uint8)]).tobytes())
    return picture


def encode_png(picture: Image.Image) -> bytes:
    """Return a picture as the bytes of a PNG file."""
    buffer = io.BytesIO()
    picture.save(buffer, "PNG")
    return buffer.getvalue()
