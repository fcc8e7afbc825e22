"""RandAugment (arXiv:1909.13719) as in big_vision and timm, and 3-Augment, on PIL images.

An operation is a function of an image, a level, and the resampling filter for rotations and shears. The level is
magnitude / 10; its sign is the direction of operations that have one. Pixels outside the image are filled with grey,
128.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from PIL import Image, ImageEnhance, ImageFilter, ImageOps

FILL_VALUE = 128  # grey value of pixels outside the image
BIG_VISION_SIDE = 224  # image size to which big_vision's pixel counts refer

Operation = Callable[[Image.Image, float, Image.Resampling], Image.Image]


def apply_affine(image: Image.Image, matrix: tuple[float, ...], filter: Image.Resampling) -> Image.Image:
    """Apply an affine transform: each pixel (x, y) of the result is sampled from the image at matrix @ (x, y, 1).
    `matrix` is the 2 x 3 matrix, row by row."""
    return image.transform(
        image.size, Image.Transform.AFFINE, matrix, resample=filter, fillcolor=get_fill_colour(image)
    )


def get_fill_colour(image: Image.Image) -> int | tuple[int, ...]:
    """Return the grey that fills pixels outside the image, in the image's mode."""
    return (FILL_VALUE,) * len(image.getbands()) if len(image.getbands()) > 1 else FILL_VALUE


def solarize_add(image: Image.Image, amount: int) -> Image.Image:
    """Add `amount` to all values below 128, and limit the results to 255."""
    table = [min(255, value + amount) if value < 128 else value for value in range(256)]
    return image.point(table * len(image.getbands()))


def posterize_image(image: Image.Image, bits: int) -> Image.Image:
    """Keep the highest `bits` bits of every value, 0 to 8; 0 makes the image black. timm's recipes draw 0, which
    `ImageOps.posterize` of Pillow 13 rejects."""
    mask = 256 - 2 ** (8 - bits)
    return image.point([value & mask for value in range(256)] * len(image.getbands()))


def erase_square(image: Image.Image, half_side: int) -> Image.Image:
    """Fill a square with a side of 2 * half_side pixels with grey (Cutout, arXiv:1708.04552). Its centre is uniform in
    the image."""
    if not half_side:
        return image
    row, column = (int(torch.randint(length, ())) for length in (image.height, image.width))
    pixels = np.array(image)
    pixels[max(row - half_side, 0) : row + half_side, max(column - half_side, 0) : column + half_side] = FILL_VALUE
    return Image.fromarray(pixels)


def create_enhancer_operation(enhancer: type, factor: Callable[[float], float]) -> Operation:
    """Create an operation from a Pillow enhancer. `factor` maps the level to the enhancement factor; 1 is the original
    image."""
    return lambda image, level, filter: enhancer(image).enhance(factor(level))


def translate_image(image: Image.Image, level: float, filter: Image.Resampling, share: float, axis: int) -> Image.Image:
    """Shift an image by level * share of its width (axis 0) or height (axis 1)."""
    pixels = level * share * image.size[axis]
    return apply_affine(image, (1, 0, pixels, 0, 1, 0) if axis == 0 else (1, 0, 0, 0, 1, pixels), filter)


LevelMapping = Callable[[float], int]


def create_operations(
    factor: Callable[[float], float],
    translation: float,
    bits: LevelMapping,
    threshold: LevelMapping,
    amount: LevelMapping,
) -> dict[str, Operation]:
    """Create the 15 operations that timm and big_vision have in common, by name, with the strengths of either.

    `translation` is the shift at level 1, as a share of width or height. The other parameters map the level to a
    strength: `factor` of the enhancers, `bits` that Posterize keeps, `threshold` of Solarize, `amount` of SolarizeAdd.
    """
    enhancers = (ImageEnhance.Color, ImageEnhance.Contrast, ImageEnhance.Brightness, ImageEnhance.Sharpness)
    return {
        "AutoContrast": lambda image, level, filter: ImageOps.autocontrast(image),
        "Equalize": lambda image, level, filter: ImageOps.equalize(image),
        "Invert": lambda image, level, filter: ImageOps.invert(image),
        "Rotate": lambda image, level, filter: image.rotate(level * 30, filter, fillcolor=get_fill_colour(image)),
        "ShearX": lambda image, level, filter: apply_affine(image, (1, level * 0.3, 0, 0, 1, 0), filter),
        "ShearY": lambda image, level, filter: apply_affine(image, (1, 0, 0, level * 0.3, 1, 0), filter),
        "Posterize": lambda image, level, filter: posterize_image(image, bits(abs(level))),
        "Solarize": lambda image, level, filter: ImageOps.solarize(image, threshold(abs(level))),
        "SolarizeAdd": lambda image, level, filter: solarize_add(image, amount(abs(level))),
        **{enhancer.__name__: create_enhancer_operation(enhancer, factor) for enhancer in enhancers},
        "TranslateX": partial(translate_image, share=translation, axis=0),
        "TranslateY": partial(translate_image, share=translation, axis=1),
    }


#: timm's 15 "increasing" operations, whose strength grows with the level; enhancement factors are at least 0.1
TIMM_OPERATIONS = create_operations(
    factor=lambda level: max(0.1, 1.0 + level * 0.9),
    translation=0.45,
    bits=lambda level: 4 - int(level * 4),
    threshold=lambda level: 256 - min(256, int(level * 256)),
    amount=lambda level: min(128, int(level * 110)),
)

#: big_vision's 16 operations. Contrast is relative to the mean grey of the image; big_vision by mistake uses the same
#: value for all images of a size. Its translation by 100 pixels and its cutout of 40 pixels are for images of 224
#: pixels; here, they are scaled with the image size. Posterize keeps at least one bit, as in TensorFlow.
BIG_VISION_OPERATIONS = create_operations(
    factor=lambda level: abs(level) * 1.8 + 0.1,
    translation=100 / BIG_VISION_SIDE,
    bits=lambda level: min(8, max(1, int(level * 4))),
    threshold=lambda level: int(level * 256),
    amount=lambda level: int(level * 110),
)
BIG_VISION_OPERATIONS["Cutout"] = lambda image, level, filter: erase_square(
    image, int(abs(level) * 40 * min(image.size) / BIG_VISION_SIDE)
)


@dataclass(frozen=True)
class RandAugment:
    """Apply `layers` random operations in sequence (RandAugment).

    Each operation is drawn uniformly from `operations` and applied with `probability`, at a magnitude of `magnitude` +
    N(0, `spread`), clipped to 0 .. `highest`. The sign of the level is random. Random numbers are drawn from torch's
    generator. `filter` is the resampling filter for rotations and shears.
    """

    operations: dict[str, Operation]
    layers: int
    magnitude: float
    filter: Image.Resampling
    probability: float = 1.0
    spread: float = 0.0
    highest: float = float("inf")

    def __call__(self, image: Image.Image) -> Image.Image:
        """Draw the operations and apply them to an image."""
        choices = list(self.operations.values())
        for _ in range(self.layers):
            choice_draw, apply_draw, sign_draw = torch.rand(3).tolist()
            level = min(max(self.magnitude + self.spread * float(torch.randn(())), 0.0), self.highest) / 10
            if apply_draw < self.probability:
                image = choices[int(choice_draw * len(choices))](
                    image, level if sign_draw < 0.5 else -level, self.filter
                )
        return image


def apply_three_augment(image: Image.Image) -> Image.Image:
    """Apply 3-Augment (DeiT III, arXiv:2204.07118): convert an image to grey, solarise it, or blur it with a std of 0.1
    to 2 pixels, each with probability 1/3."""
    choice, radius = torch.rand(2).tolist()
    if choice < 1 / 3:
        return image.convert("L").convert(image.mode)
    if choice < 2 / 3:
        return ImageOps.solarize(image)
    return image.filter(ImageFilter.GaussianBlur(0.1 + 1.9 * radius))
