"""Random crops of files: torchvision's, Inception's as in TensorFlow, and DeiT III's simple crop.

A crop is drawn from the size of an image before its pixels are decoded, so that only the crop is decoded. Pixels stay
at 8 bits; torch's antialiased filter for bytes takes a quarter of the time of Pillow's.
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

from vitreous.data.decoding.regions import LazyImage, PixelBox
from vitreous.data.modalities.native import NativePreprocess
from vitreous.data.modalities.planar import PlanarPreprocess

MAX_CROP_ATTEMPTS = {"torchvision": 10, "inception": 100}  # attempts to draw a box that fits
SIMPLE_CROP_PADDING = 4  # pixels that a simple crop reflects at each edge
BICUBIC, BILINEAR = Image.Resampling.BICUBIC, Image.Resampling.BILINEAR
RESAMPLING_FILTERS = {"bicubic": BICUBIC, "bilinear": BILINEAR, "aliased": BILINEAR}


@dataclass(frozen=True)
class AreaCrop:
    """torchvision's box of random area, aspect and position, resized to `image` (height, width) (arXiv:1409.4842).

    The area is uniform in `area` (shares of the image), the aspect ratio, width / height, log-uniform in `ratio`. Uses
    the same draws from torch's generator as torchvision's RandomResizedCrop.
    """

    image: tuple[int, int]
    area: tuple[float, float]
    ratio: tuple[float, float]
    filter: str

    def __call__(self, image: Image.Image | LazyImage) -> Tensor:
        """Crop an image to (C, *image) uint8. Raises DataError."""
        return crop_and_resize(image, self.draw_box(*image.size), self.image, self.filter)

    @cached_property
    def log_ratio(self) -> list[float]:
        """Logarithms of `ratio`, rounded as in torchvision."""
        return torch.log(torch.tensor(self.ratio)).tolist()

    def draw_box(self, width: int, height: int) -> PixelBox:
        """Draw a box; if none fits, return the largest central one with a valid aspect."""
        for _ in range(MAX_CROP_ATTEMPTS["torchvision"]):
            area = width * height * torch.empty(1).uniform_(*self.area).item()
            ratio = torch.exp(torch.empty(1).uniform_(*self.log_ratio)).item()
            box_width, box_height = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
            if 0 < box_width <= width and 0 < box_height <= height:
                top, left = (int(torch.randint(spare + 1, (1,))) for spare in (height - box_height, width - box_width))
                return left, top, left + box_width, top + box_height
        box_width, box_height = width, height
        if width / height < self.ratio[0]:
            box_height = round(width / self.ratio[0])
        elif width / height > self.ratio[1]:
            box_width = round(height * self.ratio[1])
        left, top = (width - box_width) // 2, (height - box_height) // 2
        return left, top, left + box_width, top + box_height


class InceptionCrop(AreaCrop):
    """TensorFlow's distorted bounding box, resized to `image` (arXiv:1409.4842).

    The aspect ratio is uniform in `ratio`; then the height is uniform among those with the area in `area` and the box
    inside. Small areas are more likely than in torchvision's crop. Draws from torch's generator.
    """

    def draw_box(self, width: int, height: int) -> PixelBox:
        """Draw a box; if none fits, return the whole image."""
        low, high = (share * width * height for share in self.area)
        for _ in range(MAX_CROP_ATTEMPTS["inception"]):
            ratio = self.ratio[0] + (self.ratio[1] - self.ratio[0]) * float(torch.rand(()))
            max_height = min(round((high / ratio) ** 0.5), height, int(width / ratio))
            min_height = min(round((low / ratio) ** 0.5), max_height)
            box_height = min_height + int(torch.randint(max_height - min_height + 1, ()))
            box_width = round(box_height * ratio)
            if box_width and low <= box_width * box_height <= high and box_width <= width:
                left, top = (int(torch.randint(spare + 1, ())) for spare in (width - box_width, height - box_height))
                return left, top, left + box_width, top + box_height
        return 0, 0, width, height


@dataclass(frozen=True)
class SimpleCrop:
    """Resize to cover `image`, reflect four pixels at each edge, and crop a window of `image` (arXiv:2204.07118)."""

    image: tuple[int, int]
    filter: str

    def __call__(self, image: Image.Image | LazyImage) -> Tensor:
        """Crop an image to (C, *image) uint8. Raises DataError."""
        (width, height), (target_height, target_width) = image.size, self.image
        scale = max(target_height / height, target_width / width)
        size = (max(target_height, round(height * scale)), max(target_width, round(width * scale)))
        pixels = crop_and_resize(image, (0, 0, width, height), size, self.filter)
        row_indices, column_indices = (
            simple_crop_indices(target, length, float(torch.rand(())))
            for target, length in zip(self.image, size, strict=True)
        )
        return pixels[:, torch.from_numpy(row_indices)][:, :, torch.from_numpy(column_indices)]


@dataclass(frozen=True)
class NativeAspectCrop:
    """A crop that keeps approximately the aspect ratio of an image, resized to a random number of patches (NaViT,
    arXiv:2307.06304): area and position as drawn by `crop`, None for the whole image.

    The box is drawn on a square with the image's longer side, which is then compressed to the image; the crop's `ratio`
    is relative to the image's. The number of patches is uniform from `fewest` to `preprocess.tokens`.
    """

    crop: AreaCrop | None
    preprocess: NativePreprocess
    fewest: int = 0

    def __call__(self, image: Image.Image | LazyImage) -> Image.Image | Tensor:
        """Crop an image to (C, height, width) uint8, or to a Pillow image if no crop is needed. Raises DataError."""
        max_tokens = self.preprocess.tokens
        tokens = int(torch.randint(self.fewest, max_tokens + 1, ())) if 0 < self.fewest < max_tokens else max_tokens
        preprocess = replace(self.preprocess, tokens=tokens)
        if self.crop is None:
            return fit_to_model_size(preprocess, image)
        box = map_square_box_to_image(self.crop.draw_box(max(image.size), max(image.size)), image.size)
        plane = preprocess.choose_plane((box[2] - box[0], box[3] - box[1]))
        return crop_and_resize(image, box, plane, self.crop.filter)


def map_square_box_to_image(box: PixelBox, size: tuple[int, int]) -> PixelBox:
    """Map a box on a square with the longer side of an image of (width, height) to integer pixels of the image, at
    least one along each axis."""
    starts, ends = (
        [round(edge * length / max(size)) for edge, length in zip(edges, size, strict=True)]
        for edges in (box[:2], box[2:])
    )
    starts = [min(start, length - 1) for start, length in zip(starts, size, strict=True)]
    return starts[0], starts[1], max(starts[0] + 1, ends[0]), max(starts[1] + 1, ends[1])


def fit_to_model_size(preprocess: PlanarPreprocess, image: Image.Image | LazyImage) -> Image.Image:
    """Resize an image to the model's size."""
    return preprocess.fit_image(image if isinstance(image, Image.Image) else image.decode_full())


def crop_and_resize(source: Image.Image | LazyImage, box: PixelBox, size: tuple[int, int], filter: str) -> Tensor:
    """Resize a box of an image to (C, *size) uint8. `aliased` samples four neighbours regardless of the scale, like
    `tf.image.resize`. Raises DataError."""
    aliased = filter == "aliased"
    if isinstance(source, Image.Image):
        pixels = np.array(source.crop(box))
        pixels = pixels if pixels.ndim == 3 else pixels[..., None]
    else:
        pixels = source.decode_region(box, None if aliased else size)
    if aliased:
        pixels = np.array(resize_with_pillow(array_to_pillow(pixels), size, filter)).reshape(*size, -1)
    image = torch.from_numpy(pixels[None]).permute(0, 3, 1, 2)
    return image[0] if image.shape[2:] == size else F.interpolate(image, size, mode=filter, antialias=True)[0]


def resize_with_pillow(image: Image.Image, size: tuple[int, int], filter: str) -> Image.Image:
    """Resize an image to (height, width) with Pillow."""
    height, width = size
    if filter == "aliased":
        full_box = (0, 0, image.width, image.height)
        return image.transform((width, height), Image.Transform.EXTENT, full_box, resample=RESAMPLING_FILTERS[filter])
    return image.resize((width, height), RESAMPLING_FILTERS[filter])


def array_to_pillow(pixels: np.ndarray) -> Image.Image:
    """Convert (H, W, C) uint8 to a Pillow image, grey for 1 channel and RGB for 3."""
    return Image.fromarray(pixels[..., 0] if pixels.shape[-1] == 1 else pixels)


def simple_crop_indices(target_length: int, length: int, u: float | np.ndarray) -> np.ndarray:
    """Return the source indices along an axis of a simple crop, (..., target), from draws in [0, 1) of shape (...)."""
    reflected = np.pad(np.arange(length), SIMPLE_CROP_PADDING, "reflect")
    start = np.floor(np.asarray(u) * (length + 2 * SIMPLE_CROP_PADDING - target_length + 1)).astype(np.int64)
    return reflected[start[..., None] + np.arange(target_length)]
