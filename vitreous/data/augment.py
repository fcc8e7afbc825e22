"""Augmentation: torchvision's transforms, each sample with its own key; small pictures as whole batches of tensors."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Literal

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor

from vitreous.data.keys import seeded, uniform
from vitreous.data.preprocess import Preprocess, to_tensor

WHOLE = (1.0, 1.0)  # a crop that takes the whole picture


@dataclass(frozen=True)
class Augment:
    """What may happen to a training picture; the defaults do nothing.

    `crop` and `ratio`: area share and aspect ratio of a random resized crop. `shift`: random translation by
    whole pixels, at most that share of the side. `rotate` in degrees and `zoom` as a share are drawn from [-x, x]; `border`
    says what comes in from outside. `rand_layers` and `rand_magnitude`: RandAugment.
    `flip` and `erase` are probabilities. `mixup` and `cutmix` are the alphas of their Beta distributions; 0 switches off; of
    two that are on, each batch takes one by chance.
    """

    crop: tuple[float, float] = WHOLE
    ratio: tuple[float, float] = (3 / 4, 4 / 3)
    shift: float = 0.0
    rotate: float = 0.0
    zoom: float = 0.0
    border: Literal["reflection", "zeros"] = "reflection"
    flip: float = 0.0
    rand_layers: int = 0
    rand_magnitude: int = 9
    erase: float = 0.0
    mixup: float = 0.0
    cutmix: float = 0.0

    def picture(self, picture: Image.Image, preprocess: Preprocess, sample_key: int) -> Tensor:
        """A decoded picture -> (C, *image) uint8: the path of files, run where they are decoded."""
        with seeded(sample_key):
            if self.crop == WHOLE:
                picture = preprocess.fitted(picture)
            return pipeline(self, preprocess.image)(picture)

    def batch(self, pixels: Tensor, keys: np.ndarray) -> Tensor:
        """(B, C, H, W) uint8 and (B,) keys -> (B, C, H, W) float32 in 0..255: the path of pictures kept in memory.

        One affine map per picture, drawn from its key, read bilinearly; then the pixel operations.
        """
        batch = warp(pixels.float(), self.maps(keys, (pixels.shape[-2], pixels.shape[-1])), self.border)
        if self.rand_layers or self.erase:
            late = v2().Compose(pixel_operations(self))
            for row, sample_key in enumerate(keys):
                with seeded(int(sample_key)):
                    batch[row] = late(batch[row].round().to(torch.uint8))
        return batch

    def maps(self, keys: np.ndarray, size: tuple[int, int]) -> Tensor:
        """(B,) keys -> (B, 2, 3): from output to input coordinates in [-1, 1], as `F.affine_grid` takes them.

        For one picture: a crop of random area, ratio and place, then a turn, a zoom, a shift by whole pixels, a mirror.
        """
        u = uniform(keys, 9)
        height, width = size
        area = self.crop[0] + (self.crop[1] - self.crop[0]) * u[:, 0]
        low, high = np.log(self.ratio)
        ratio = np.exp(low + (high - low) * u[:, 1]) * height / width
        wide, tall = np.minimum(np.sqrt(area * ratio), 1), np.minimum(np.sqrt(area / ratio), 1)  # shares of the sides
        if self.crop == WHOLE:
            wide, tall = np.ones_like(wide), np.ones_like(tall)
        x, y = (1 - wide) * (2 * u[:, 2] - 1), (1 - tall) * (2 * u[:, 3] - 1)
        x, y = x + shifts(u[:, 4], self.shift, width), y + shifts(u[:, 5], self.shift, height)
        angle = np.radians(self.rotate) * (2 * u[:, 6] - 1)
        zoom = 1 + self.zoom * (2 * u[:, 7] - 1)
        mirror = np.where(u[:, 8] < self.flip, -1.0, 1.0)
        cos, sin = np.cos(angle) / zoom, np.sin(angle) / zoom
        rows = [[mirror * wide * cos, wide * sin * height / width, x], [-mirror * tall * sin * width / height, tall * cos, y]]
        return torch.from_numpy(np.stack([np.stack(row, -1) for row in rows], 1)).float()

    def mix(self, images: Tensor, labels: Tensor, classes: int, seed: int, batch: int) -> tuple[Tensor, Tensor]:
        """(B, C, *image), (B,) labels -> images and (B, classes) soft labels, where MixUp or CutMix is on; else unchanged."""
        if not (self.mixup or self.cutmix) or len(images) < 2:
            return images, labels
        both = self.mixup > 0 and self.cutmix > 0
        with seeded(seed, batch):
            cut = self.cutmix > 0 and (not both or bool(torch.rand(()) < 0.5))
            mixer = v2().CutMix(alpha=self.cutmix, num_classes=classes) if cut else v2().MixUp(alpha=self.mixup, num_classes=classes)
            return mixer(images, labels)


def shifts(u: np.ndarray, share: float, length: int) -> np.ndarray:
    """(B,) draws in [0, 1) -> shifts by whole pixels, at most `share` of the side, in coordinates where the side is 2 long."""
    reach = round(share * length)
    return (np.floor(u * (2 * reach + 1)) - reach) * 2 / length


def warp(images: Tensor, maps: Tensor, border: str) -> Tensor:
    """(B, C, H, W) float and (B, 2, 3) maps -> (B, C, H, W), read bilinearly at the mapped places."""
    grid = F.affine_grid(maps, list(images.shape), align_corners=False)
    return F.grid_sample(images, grid, mode="bilinear", padding_mode=border, align_corners=False)


def v2():
    """torchvision.transforms.v2, imported when first needed: it takes seconds."""
    from torchvision.transforms import v2 as module

    return module


@cache
def pipeline(augment: Augment, image: tuple[int, int]):
    """Picture -> (C, *image) uint8, as torchvision's transforms."""
    steps, bicubic = [], v2().InterpolationMode.BICUBIC
    if augment.crop != WHOLE:
        steps.append(v2().RandomResizedCrop(image, augment.crop, augment.ratio, interpolation=bicubic))
    if augment.rotate or augment.shift or augment.zoom:
        shift = (augment.shift, augment.shift) if augment.shift else None
        zoom = (1 - augment.zoom, 1 + augment.zoom) if augment.zoom else None
        steps.append(v2().RandomAffine((-augment.rotate, augment.rotate), shift, zoom, interpolation=v2().InterpolationMode.BILINEAR))
    if augment.flip:
        steps.append(v2().RandomHorizontalFlip(augment.flip))
    return v2().Compose([*steps, *pixel_operations(augment)[:1], to_tensor, *pixel_operations(augment)[1:]])


def pixel_operations(augment: Augment) -> list:
    """RandAugment, then erasing: an identity stands for what is off."""
    identity = v2().Identity()
    randaugment = v2().RandAugment(augment.rand_layers, augment.rand_magnitude, fill=128) if augment.rand_layers else identity
    return [randaugment, v2().RandomErasing(augment.erase, value=128) if augment.erase else identity]
