"""Random crops of files: torchvision's, Inception's as TensorFlow draws it, and DeiT III's simple crop.

A crop is drawn from the size of an image alone, before its pixels are decoded, so that only the crop has to be. Pixels
stay at 8 bits; torch's antialiased filter for bytes takes a quarter of the time of Pillow's.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor

from vitreous.data.decoding.regions import Box, Regions
from vitreous.data.modalities.native import NativePreprocess
from vitreous.data.modalities.planar import PlanarPreprocess

ATTEMPTS = {"torchvision": 10, "inception": 100}  # of drawing a box that fits
BORDER = 4  # pixels that a simple crop reflects at every side
BICUBIC, BILINEAR = Image.Resampling.BICUBIC, Image.Resampling.BILINEAR
FILTERS = {"bicubic": BICUBIC, "bilinear": BILINEAR, "aliased": BILINEAR}


@dataclass(frozen=True)
class AreaCrop:
    """torchvision's box of random area, aspect and place, scaled to `image` (height, width) (arXiv:1409.4842).

    The area is uniform in `area` (shares of the image), the aspect ratio, width / height, log-uniform in `ratio`. Draws
    from torch's generator what torchvision's RandomResizedCrop draws.
    """

    image: tuple[int, int]
    area: tuple[float, float]
    ratio: tuple[float, float]
    filter: str

    def __call__(self, picture: Image.Image | Regions) -> Tensor:
        """Crop an image to (C, *image) uint8. Raises DataError."""
        return shown(picture, self.box(*picture.size), self.image, self.filter)

    @cached_property
    def logarithms(self) -> list[float]:
        """Logarithms of `ratio`, as torchvision rounds them."""
        return torch.log(torch.tensor(self.ratio)).tolist()

    def box(self, width: int, height: int) -> Box:
        """Draw a box; where none fits, the largest in the middle that keeps the aspect."""
        for _ in range(ATTEMPTS["torchvision"]):
            area = width * height * torch.empty(1).uniform_(*self.area).item()
            ratio = torch.exp(torch.empty(1).uniform_(*self.logarithms)).item()
            wide, tall = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
            if 0 < wide <= width and 0 < tall <= height:
                top, left = (int(torch.randint(spare + 1, (1,))) for spare in (height - tall, width - wide))
                return left, top, left + wide, top + tall
        wide, tall = width, height
        if width / height < self.ratio[0]:
            tall = round(width / self.ratio[0])
        elif width / height > self.ratio[1]:
            wide = round(height * self.ratio[1])
        left, top = (width - wide) // 2, (height - tall) // 2
        return left, top, left + wide, top + tall


class InceptionCrop(AreaCrop):
    """TensorFlow's distorted bounding box, scaled to `image` (arXiv:1409.4842).

    The aspect ratio is uniform in `ratio`; then the height among those that keep the area in `area` and the box inside:
    small areas are likelier than in torchvision's crop. Draws from torch's generator.
    """

    def box(self, width: int, height: int) -> Box:
        """Draw a box; where none fits, the whole image."""
        low, high = (share * width * height for share in self.area)
        for _ in range(ATTEMPTS["inception"]):
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
    """The image scaled to cover `image`, four pixels reflected at each side, and a window of `image` cut out
    (arXiv:2204.07118)."""

    image: tuple[int, int]
    filter: str

    def __call__(self, picture: Image.Image | Regions) -> Tensor:
        """Crop an image to (C, *image) uint8. Raises DataError."""
        (width, height), (tall, wide) = picture.size, self.image
        scale = max(tall / height, wide / width)
        size = (max(tall, round(height * scale)), max(wide, round(width * scale)))
        pixels = shown(picture, (0, 0, width, height), size, self.filter)
        rows, columns = (
            window(target, side, float(torch.rand(()))) for target, side in zip(self.image, size, strict=True)
        )
        return pixels[:, torch.from_numpy(rows)][:, :, torch.from_numpy(columns)]


@dataclass(frozen=True)
class OwnAspectCrop:
    """A crop that keeps about the aspect ratio of an image, scaled to a random number of patches (NaViT,
    arXiv:2307.06304): of area and place as `crop` draws them, None for all of the image.

    The box is drawn on a square as long as the image's longer side, which is then squeezed to the image: the crop's
    `ratio` is a factor of the image's own. Patches are drawn evenly from `fewest` to `preprocess.tokens`.
    """

    crop: AreaCrop | None
    preprocess: NativePreprocess
    fewest: int = 0

    def __call__(self, picture: Image.Image | Regions) -> Image.Image | Tensor:
        """Crop an image to (C, height, width) uint8, or to a Pillow image where there is nothing to cut off. Raises
        DataError."""
        most = self.preprocess.tokens
        tokens = int(torch.randint(self.fewest, most + 1, ())) if 0 < self.fewest < most else most
        preprocess = replace(self.preprocess, tokens=tokens)
        if self.crop is None:
            return fitted(preprocess, picture)
        box = squeezed(self.crop.box(max(picture.size), max(picture.size)), picture.size)
        plane = preprocess.plane_of((box[2] - box[0], box[3] - box[1]))
        return shown(picture, box, plane, self.crop.filter)


def squeezed(box: Box, size: tuple[int, int]) -> Box:
    """A box on a square as long as the longer side of an image of (width, height) -> on the image, of whole pixels, at
    least one along each side."""
    starts, ends = (
        [round(edge * side / max(size)) for edge, side in zip(edges, size, strict=True)] for edges in (box[:2], box[2:])
    )
    starts = [min(start, side - 1) for start, side in zip(starts, size, strict=True)]
    return starts[0], starts[1], max(starts[0] + 1, ends[0]), max(starts[1] + 1, ends[1])


def fitted(preprocess: PlanarPreprocess, picture: Image.Image | Regions) -> Image.Image:
    """Scale an image to the model's size."""
    return preprocess.fit_image(picture if isinstance(picture, Image.Image) else picture.whole())


def shown(picture: Image.Image | Regions, box: Box, size: tuple[int, int], filter: str) -> Tensor:
    """Scale a box of an image to (C, *size) uint8. `aliased` reads four neighbours however much it shrinks, as
    `tf.image.resize` does. Raises DataError."""
    aliased = filter == "aliased"
    if isinstance(picture, Image.Image):
        pixels = np.array(picture.crop(box))
        pixels = pixels if pixels.ndim == 3 else pixels[..., None]
    else:
        pixels = picture.region(box, None if aliased else size)
    if aliased:
        pixels = np.array(scaled(to_picture(pixels), size, filter)).reshape(*size, -1)
    image = torch.from_numpy(pixels[None]).permute(0, 3, 1, 2)
    return image[0] if image.shape[2:] == size else F.interpolate(image, size, mode=filter, antialias=True)[0]


def scaled(picture: Image.Image, size: tuple[int, int], filter: str) -> Image.Image:
    """Scale an image to (height, width) with Pillow."""
    height, width = size
    if filter == "aliased":
        whole = (0, 0, picture.width, picture.height)
        return picture.transform((width, height), Image.Transform.EXTENT, whole, resample=FILTERS[filter])
    return picture.resize((width, height), FILTERS[filter])


def to_picture(pixels: np.ndarray) -> Image.Image:
    """Convert (H, W, C) uint8 to a Pillow image, grey for 1 channel and RGB for 3."""
    return Image.fromarray(pixels[..., 0] if pixels.shape[-1] == 1 else pixels)


def window(target: int, side: int, u: float | np.ndarray) -> np.ndarray:
    """The positions along a side that a simple crop shows, (..., target), from draws in [0, 1) of shape (...)."""
    reflected = np.pad(np.arange(side), BORDER, "reflect")
    start = np.floor(np.asarray(u) * (side + 2 * BORDER - target + 1)).astype(np.int64)
    return reflected[start[..., None] + np.arange(target)]
