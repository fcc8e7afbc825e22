"""Class maps as pictures: colours of classes, maps laid over images, and files of them.

K classes, H and W pixels.
"""

from __future__ import annotations

import colorsys
import io

import numpy as np
from PIL import Image

from vitreous.data.annotations.painted import BACKGROUND
from vitreous.data.annotations.target import IGNORE

GOLDEN = 0.618034  # of a turn from the hue of a class to that of the next: no two of few classes are alike
NOBODY = 255  # in a file of a class map: IGNORE
STRENGTH = 0.55  # of the colour of a class over an image


def class_colours(classes: tuple[str, ...]) -> np.ndarray:
    """Return (K, 3) uint8, a colour for each class by its position; black for the background."""
    rows = []
    for number, name in enumerate(classes):
        light = (0.95, 0.7, 0.85)[number // 8 % 3]
        colour = colorsys.hsv_to_rgb((0.55 + GOLDEN * number) % 1, 0.75, light)
        rows.append((0, 0, 0) if name == BACKGROUND else tuple(round(255 * part) for part in colour))
    return np.array(rows, np.uint8).reshape(len(classes), 3)


def lay_over(image: Image.Image, classes: np.ndarray, colours: np.ndarray) -> Image.Image:
    """Lay a class map (H, W) int over an image of that size, in the colours (K, 3) of the classes.

    Black classes and pixels that are IGNORE stay as the image has them. Returns an RGB image.
    """
    pixels = np.asarray(image.convert("RGB"), np.float32)
    shades = np.concatenate([colours, np.zeros((1, 3), np.uint8)])[classes]  # IGNORE is the last
    strength = STRENGTH * shades.any(-1, keepdims=True)
    return Image.fromarray(np.rint(pixels * (1 - strength) + shades * strength).astype(np.uint8))


def middle_planes(volume: np.ndarray, fill: float = 0) -> np.ndarray:
    """Return (..., D, H, W) as (..., h, w): the planes in the middle of each of the three axes side by side, `fill`
    below those that are less high."""
    d, h, w = volume.shape[-3:]
    planes = (volume[..., d // 2, :, :], volume[..., h // 2, :], volume[..., w // 2])
    height = max(plane.shape[-2] for plane in planes)
    rest = [(0, 0)] * (volume.ndim - 3)
    filled = [np.pad(p, [*rest, (0, height - p.shape[-2]), (0, 0)], constant_values=fill) for p in planes]
    return np.concatenate(filled, -1)


def picture_of_map(classes: np.ndarray, colours: np.ndarray, palette: bool = True) -> Image.Image:
    """Return a class map (H, W) int as a picture whose pixels are the numbers of the classes, NOBODY for IGNORE.

    Of at most 255 classes it has 8 bits and the colours (K, 3) as its `palette`, or is grey; of more, 16 bits.
    """
    if len(colours) > NOBODY:
        return Image.fromarray(np.where(classes == IGNORE, 65535, classes).astype(np.uint16))
    picture = Image.fromarray(np.where(classes == IGNORE, NOBODY, classes).astype(np.uint8))
    if not palette:
        return picture
    picture.putpalette(np.concatenate([colours, np.full((256 - len(colours), 3), 255, np.uint8)]).tobytes())
    return picture


def png_of(picture: Image.Image) -> bytes:
    """Return a picture as the bytes of a PNG file."""
    buffer = io.BytesIO()
    picture.save(buffer, "PNG")
    return buffer.getvalue()
