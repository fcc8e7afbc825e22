"""Random crops of files that torchvision does not have: Inception's, as TensorFlow draws it, and DeiT III's simple crop."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from PIL import Image

ATTEMPTS = 100  # of drawing a box that fits, before the whole picture is taken
BORDER = 4  # pixels that a simple crop reflects at every side

FILTERS = {"bicubic": Image.Resampling.BICUBIC, "bilinear": Image.Resampling.BILINEAR, "aliased": Image.Resampling.BILINEAR}


def scaled(picture: Image.Image, size: tuple[int, int], filter: str) -> Image.Image:
    """The picture at (height, width). `aliased` reads four neighbours however much it shrinks, as `tf.image.resize` does."""
    height, width = size
    if filter == "aliased":
        whole = (0, 0, picture.width, picture.height)
        return picture.transform((width, height), Image.Transform.EXTENT, whole, resample=FILTERS[filter])
    return picture.resize((width, height), FILTERS[filter])


@dataclass(frozen=True)
class InceptionCrop:
    """A box of random aspect, height and place, scaled to `image` (arXiv:1409.4842, as TensorFlow's distorted bounding box).

    The aspect ratio, width / height, is uniform in `ratio`; then the height among those that keep the area in `area` (shares
    of the picture) and the box inside: small areas are likelier than in torchvision's crop. Draws from torch's generator.
    """

    image: tuple[int, int]
    area: tuple[float, float]
    ratio: tuple[float, float]
    filter: str

    def __call__(self, picture: Image.Image) -> Image.Image:
        return scaled(picture.crop(self.box(*picture.size)), self.image, self.filter)

    def box(self, width: int, height: int) -> tuple[int, int, int, int]:
        """Left, top, right, bottom. The whole picture where `ATTEMPTS` draws found none."""
        low, high = (share * width * height for share in self.area)
        for _ in range(ATTEMPTS):
            ratio = self.ratio[0] + (self.ratio[1] - self.ratio[0]) * float(torch.rand(()))
            most = min(round((high / ratio) ** 0.5), height, int(width / ratio))
            least = min(round((low / ratio) ** 0.5), most)
            tall = least + int(torch.randint(most - least + 1, ()))
            wide = round(tall * ratio)
            if wide and low <= wide * tall <= high and wide <= width:
                left, top = (int(torch.randint(spare + 1, ())) for spare in (width - wide, height - tall))
                return left, top, left + wide, top + tall
        return 0, 0, width, height


@dataclass(frozen=True)
class SimpleCrop:
    """The picture scaled to cover `image`, four pixels reflected at each side, and a window of `image` cut out (arXiv:2204.07118)."""

    image: tuple[int, int]
    filter: str

    def __call__(self, picture: Image.Image) -> Image.Image:
        height, width = self.image
        scale = max(height / picture.height, width / picture.width)
        size = (max(height, round(picture.height * scale)), max(width, round(picture.width * scale)))
        if size != (picture.height, picture.width):
            picture = scaled(picture, size, self.filter)
        rows, columns = (window(target, side, float(torch.rand(()))) for target, side in zip(self.image, size, strict=True))
        return Image.fromarray(np.asarray(picture)[rows][:, columns])


def window(target: int, side: int, u: float | np.ndarray) -> np.ndarray:
    """Draws in [0, 1) -> (..., target): the positions along a side that a simple crop shows."""
    reflected = np.pad(np.arange(side), BORDER, "reflect")
    start = np.floor(np.asarray(u) * (side + 2 * BORDER - target + 1)).astype(np.int64)
    return reflected[start[..., None] + np.arange(target)]
