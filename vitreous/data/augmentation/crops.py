"""Random crops of image files: torchvision's, Inception's as in TensorFlow, and DeiT III's simple crop.

A crop is drawn from the size of an image before its pixels are decoded, so that only the cropped region is decoded.
Pixels stay uint8: torch's antialiased filter for uint8 takes a quarter of the time of Pillow's.
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

MAX_CROP_ATTEMPTS = {"torchvision": 10, "inception": 100}  # attempts to draw a box that is inside the image
SIMPLE_CROP_PADDING = 4  # pixels by which a simple crop pads each edge, by reflection
BICUBIC, BILINEAR = Image.Resampling.BICUBIC, Image.Resampling.BILINEAR
RESAMPLING_FILTERS = {"bicubic": BICUBIC, "bilinear": BILINEAR, "aliased": BILINEAR}


@dataclass(frozen=True)
class AreaCrop:
    """Crop of random area, aspect ratio and position, resized to `image` (height, width): torchvision's
    RandomResizedCrop (arXiv:1409.4842).

    `area` is the range of the crop's share of the image, uniform; `ratio` the range of width / height, log-uniform.
    Random numbers are drawn from torch's generator in the same order as in torchvision. `filter` is a key of
    `RESAMPLING_FILTERS`.
    """

    image: tuple[int, int]
    area: tuple[float, float]
    ratio: tuple[float, float]
    filter: str

    def __call__(self, image: Image.Image | LazyImage) -> Tensor:
        """Crop an image at random and resize it to (C, *image) uint8. Raises DataError if it cannot be decoded."""
        return crop_and_resize(image, self.draw_box(*image.size), self.image, self.filter)

    @cached_property
    def log_ratio(self) -> list[float]:
        """The logarithms of `ratio`, in float32 as in torchvision."""
        return torch.log(torch.tensor(self.ratio)).tolist()

    def draw_box(self, width: int, height: int) -> PixelBox:
        """Draw a box inside an image of `width` x `height` pixels. After ten failed attempts, return the largest
        centred box with an aspect ratio in `ratio`."""
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
    """Crop of random area, aspect ratio and position, resized to `image` (height, width): TensorFlow's
    `sample_distorted_bounding_box` (arXiv:1409.4842).

    The aspect ratio is uniform in `ratio`. The height is uniform among all heights with which the area is in `area` and
    the box is inside the image. Small areas are therefore more likely than in torchvision's crop. Random numbers are
    drawn from torch's generator.
    """

    def draw_box(self, width: int, height: int) -> PixelBox:
        """Draw a box inside an image of `width` x `height` pixels. After 100 failed attempts, return the box of the
        complete image."""
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
    """DeiT III's simple crop (arXiv:2204.07118): resize an image to cover `image` (height, width), pad it by four
    reflected pixels at each edge, and crop `image` at a random position."""

    image: tuple[int, int]
    filter: str

    def __call__(self, image: Image.Image | LazyImage) -> Tensor:
        """Crop an image at random and resize it to (C, *image) uint8. Raises DataError if it cannot be decoded."""
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
    """Crop at approximately the aspect ratio of the image, resized to a random number of patches (NaViT,
    arXiv:2307.06304).

    `crop` draws a box on a square with the longer side of the image, and the box is scaled to the image. The `ratio` of
    `crop` is therefore relative to the aspect ratio of the image. If `crop` is None, the complete image is used. The
    number of patches is uniform from `fewest` to `preprocess.tokens`; if `fewest` is 0, it is always the maximum.
    """

    crop: AreaCrop | None
    preprocess: NativePreprocess
    fewest: int = 0

    def __call__(self, image: Image.Image | LazyImage) -> Image.Image | Tensor:
        """Crop an image at random and resize it to (C, height, width) uint8. Returns a PIL image if `crop` is None.
        Raises DataError if the image cannot be decoded."""
        max_tokens = self.preprocess.tokens
        tokens = int(torch.randint(self.fewest, max_tokens + 1, ())) if 0 < self.fewest < max_tokens else max_tokens
        preprocess = replace(self.preprocess, tokens=tokens)
        if self.crop is None:
            return fit_to_model_size(preprocess, image)
        box = map_square_box_to_image(self.crop.draw_box(max(image.size), max(image.size)), image.size)
        plane = preprocess.choose_plane((box[2] - box[0], box[3] - box[1]))
        return crop_and_resize(image, box, plane, self.crop.filter)


def map_square_box_to_image(box: PixelBox, size: tuple[int, int]) -> PixelBox:
    """Scale a box on a square, whose side is the longer side of an image, to pixels of the image. `size` is (width,
    height) of the image. The result has at least one pixel along each axis."""
    starts, ends = (
        [round(edge * length / max(size)) for edge, length in zip(edges, size, strict=True)]
        for edges in (box[:2], box[2:])
    )
    starts = [min(start, length - 1) for start, length in zip(starts, size, strict=True)]
    return starts[0], starts[1], max(starts[0] + 1, ends[0]), max(starts[1] + 1, ends[1])


def fit_to_model_size(preprocess: PlanarPreprocess, image: Image.Image | LazyImage) -> Image.Image:
    """Fit a complete image to the model's input size, as at evaluation. Raises DataError if it cannot be decoded."""
    return preprocess.fit_image(image if isinstance(image, Image.Image) else image.decode_full())


def crop_and_resize(source: Image.Image | LazyImage, box: PixelBox, size: tuple[int, int], filter: str) -> Tensor:
    """Resize a box of an image to (C, *size) uint8. The filter `aliased` interpolates between four pixels regardless of
    the scale, like `tf.image.resize`. Raises DataError if the image cannot be decoded."""
    is_aliased = filter == "aliased"
    if isinstance(source, Image.Image):
        pixels = np.array(source.crop(box))
        pixels = pixels if pixels.ndim == 3 else pixels[..., None]
    else:
        pixels = source.decode_region(box, None if is_aliased else size)
    if is_aliased:
        pixels = np.array(resize_with_pillow(array_to_pillow(pixels), size, filter)).reshape(*size, -1)
    image = torch.from_numpy(pixels[None]).permute(0, 3, 1, 2)
    return image[0] if image.shape[2:] == size else F.interpolate(image, size, mode=filter, antialias=True)[0]


def resize_with_pillow(image: Image.Image, size: tuple[int, int], filter: str) -> Image.Image:
    """Resize a PIL image to (height, width) with a filter of `RESAMPLING_FILTERS`; `aliased` does not antialias."""
    height, width = size
    if filter == "aliased":
        full_box = (0, 0, image.width, image.height)
        return image.transform((width, height), Image.Transform.EXTENT, full_box, resample=RESAMPLING_FILTERS[filter])
    return image.resize((width, height), RESAMPLING_FILTERS[filter])


def array_to_pillow(pixels: np.ndarray) -> Image.Image:
    """Convert pixels (H, W, C) uint8 to a PIL image, grey for 1 channel and RGB for 3."""
    return Image.fromarray(pixels[..., 0] if pixels.shape[-1] == 1 else pixels)


def simple_crop_indices(target_length: int, length: int, u: float | np.ndarray) -> np.ndarray:
    """Return the indices of the pixels that a simple crop takes along one axis: (..., target_length) int64.

    `length` is the axis length of the resized image before padding; `u`, of shape (...) in [0, 1), selects the
    position.
    """
    reflected = np.pad(np.arange(length), SIMPLE_CROP_PADDING, "reflect")
    start = np.floor(np.asarray(u) * (length + 2 * SIMPLE_CROP_PADDING - target_length + 1)).astype(np.int64)
    return reflected[start[..., None] + np.arange(target_length)]
