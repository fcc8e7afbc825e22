"""RandAugment (arXiv:1909.13719) as big_vision and as timm do it, and the three operations of DeiT III, on Pillow's
pictures.

An operation takes a picture, a level and the filter that turns and shears read with. Levels are magnitude / 10; the
sign is the direction of what has one. What comes in from outside is the grey 128.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from PIL import Image, ImageEnhance, ImageFilter, ImageOps

GREY = 128
SIDE = 224  # pixels: the side that big_vision's counts of pixels are meant for

Operation = Callable[[Image.Image, float, Image.Resampling], Image.Image]


def moved(picture: Image.Image, matrix: tuple[float, ...], filter: Image.Resampling) -> Image.Image:
    """The picture read at matrix @ (x, y, 1), rows first."""
    return picture.transform(picture.size, Image.Transform.AFFINE, matrix, resample=filter, fillcolor=grey(picture))


def grey(picture: Image.Image) -> int | tuple[int, ...]:
    """The filling grey, in the picture's mode."""
    return (GREY,) * len(picture.getbands()) if len(picture.getbands()) > 1 else GREY


def solarize_add(picture: Image.Image, amount: int) -> Image.Image:
    """Values below 128 made brighter by `amount`, at most 255."""
    table = [min(255, value + amount) if value < 128 else value for value in range(256)]
    return picture.point(table * len(picture.getbands()))


def posterize(picture: Image.Image, bits: int) -> Image.Image:
    """The highest `bits` of every value, 0 to 8; none is black, which Pillow 13 refuses and timm's recipes draw."""
    mask = 256 - 2 ** (8 - bits)
    return picture.point([value & mask for value in range(256)] * len(picture.getbands()))


def cutout(picture: Image.Image, half: int) -> Image.Image:
    """A grey square of 2 * half pixels, its centre anywhere in the picture (arXiv:1708.04552)."""
    if not half:
        return picture
    row, column = (int(torch.randint(side, ())) for side in (picture.height, picture.width))
    pixels = np.array(picture)
    pixels[max(row - half, 0) : row + half, max(column - half, 0) : column + half] = GREY
    return Image.fromarray(pixels)


def enhance(kind: type, factor: Callable[[float], float]) -> Operation:
    """Pillow's enhancers, as far as `factor` of the level says; 1 changes nothing."""
    return lambda picture, level, filter: kind(picture).enhance(factor(level))


def shift(picture: Image.Image, level: float, filter: Image.Resampling, share: float, axis: int) -> Image.Image:
    """Moved by level * share of the width (axis 0) or height (axis 1)."""
    pixels = level * share * picture.size[axis]
    return moved(picture, (1, 0, pixels, 0, 1, 0) if axis == 0 else (1, 0, 0, 0, 1, pixels), filter)


def _increasing(level: float) -> float:
    """timm's: the further from 1, the stronger, and never below 0.1."""
    return max(0.1, 1.0 + level * 0.9)


def _from_dull(level: float) -> float:
    """TensorFlow's: 0.1 at level 0, 1.9 at level 1."""
    return abs(level) * 1.8 + 0.1


#: what timm and big_vision do alike
SHARED: dict[str, Operation] = {
    "AutoContrast": lambda picture, level, filter: ImageOps.autocontrast(picture),
    "Equalize": lambda picture, level, filter: ImageOps.equalize(picture),
    "Invert": lambda picture, level, filter: ImageOps.invert(picture),
    "Rotate": lambda picture, level, filter: picture.rotate(level * 30, resample=filter, fillcolor=grey(picture)),  # type: ignore[arg-type]
    "ShearX": lambda picture, level, filter: moved(picture, (1, level * 0.3, 0, 0, 1, 0), filter),
    "ShearY": lambda picture, level, filter: moved(picture, (1, 0, 0, level * 0.3, 1, 0), filter),
}

#: timm's 15 "increasing" operations: the higher the level, the further from the picture
TIMM: dict[str, Operation] = {
    **SHARED,
    "Posterize": lambda picture, level, filter: posterize(picture, 4 - int(abs(level) * 4)),
    "Solarize": lambda picture, level, filter: ImageOps.solarize(picture, 256 - min(256, int(abs(level) * 256))),
    "SolarizeAdd": lambda picture, level, filter: solarize_add(picture, min(128, int(abs(level) * 110))),
    "Color": enhance(ImageEnhance.Color, _increasing),
    "Contrast": enhance(ImageEnhance.Contrast, _increasing),
    "Brightness": enhance(ImageEnhance.Brightness, _increasing),
    "Sharpness": enhance(ImageEnhance.Sharpness, _increasing),
    "TranslateX": partial(shift, share=0.45, axis=0),
    "TranslateY": partial(shift, share=0.45, axis=1),
}

#: big_vision's 16. Contrast turns about the mean grey of the picture; big_vision's own takes one value for all pictures
#: of a size, by mistake. Its 100 pixels of translation and 40 of cutout hold at 224 pixels, and here the same share at
#: any side. Nought bits of posterize keep one, as TensorFlow's shift does.
BIG_VISION: dict[str, Operation] = {
    **SHARED,
    "Posterize": lambda picture, level, filter: posterize(picture, min(8, max(1, int(abs(level) * 4)))),
    "Solarize": lambda picture, level, filter: ImageOps.solarize(picture, int(abs(level) * 256)),
    "SolarizeAdd": lambda picture, level, filter: solarize_add(picture, int(abs(level) * 110)),
    "Color": enhance(ImageEnhance.Color, _from_dull),
    "Contrast": enhance(ImageEnhance.Contrast, _from_dull),
    "Brightness": enhance(ImageEnhance.Brightness, _from_dull),
    "Sharpness": enhance(ImageEnhance.Sharpness, _from_dull),
    "TranslateX": partial(shift, share=100 / SIDE, axis=0),
    "TranslateY": partial(shift, share=100 / SIDE, axis=1),
    "Cutout": lambda picture, level, filter: cutout(picture, int(abs(level) * 40 * min(picture.size) / SIDE)),
}


@dataclass(frozen=True)
class RandAugment:
    """`layers` operations in a row, each drawn from all of `operations` and in either direction.

    An operation happens with `probability`, at `magnitude` + N(0, `spread`), not below 0 and not above `highest`.
    Draws from torch's generator.
    """

    operations: dict[str, Operation]
    layers: int
    magnitude: float
    filter: Image.Resampling
    probability: float = 1.0
    spread: float = 0.0
    highest: float = float("inf")

    def __call__(self, picture: Image.Image) -> Image.Image:
        choices = list(self.operations.values())
        for _ in range(self.layers):
            which, happens, side = torch.rand(3).tolist()
            level = min(max(self.magnitude + self.spread * float(torch.randn(())), 0.0), self.highest) / 10
            if happens < self.probability:
                picture = choices[int(which * len(choices))](picture, level if side < 0.5 else -level, self.filter)
        return picture


def three(picture: Image.Image) -> Image.Image:
    """3-Augment (DeiT III, arXiv:2204.07118): grey, solarised, or blurred by 0.1 to 2 pixels, one as likely as the
    other."""
    which, radius = torch.rand(2).tolist()
    if which < 1 / 3:
        return picture.convert("L").convert(picture.mode)
    if which < 2 / 3:
        return ImageOps.solarize(picture)
    return picture.filter(ImageFilter.GaussianBlur(0.1 + 1.9 * radius))
