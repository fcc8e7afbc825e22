"""Augmentation: transforms of one picture at a time, each with its own key; small pictures as whole batches of tensors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import Literal

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor

from vitreous.data.crops import FILTERS, InceptionCrop, SimpleCrop, window
from vitreous.data.keys import seeded, uniform
from vitreous.data.preprocess import IMAGENET, Preprocess, to_tensor
from vitreous.data.randaugment import BIG_VISION, TIMM, RandAugment, three
from vitreous.errors import UsageError

WHOLE = (1.0, 1.0)  # a crop that takes the whole picture


@dataclass(frozen=True)
class Augment:
    """What may happen to a training picture; the defaults do nothing.

    `crop` and `ratio`: area share and aspect ratio of a random crop, scaled to the model's size. `crop_style`: torchvision's
    (log-uniform aspect, uniform area); `inception`, as TensorFlow draws it (arXiv:2010.11929 and big_vision, with crop 0.05 1
    and ratio 0.75 1.33); `simple` moves by up to four reflected pixels (DeiT III, arXiv:2204.07118). `crop_filter`: `aliased`
    is bilinear without antialiasing, as big_vision has it, and goes with the latter two styles; None is bicubic for files
    and bilinear in memory. `shift`: random translation by whole pixels, at most that share of the side. `rotate` in degrees
    and `zoom` as a share are drawn from [-x, x]; `border` says what comes in from outside. `flip` and `erase` are
    probabilities; with `erase_noise` the hole is noise of ImageNet's mean and deviation, as DeiT's (arXiv:2012.12877), not grey.

    `rand_layers` operations of RandAugment at `rand_magnitude`. `rand_style`: torchvision's; `big_vision`: 16 operations, always
    applied (arXiv:2106.10270, arXiv:2205.01580); `timm`: 15, each with probability 1/2, at the magnitude + N(0, `rand_spread`)
    within 0 and 10 (DeiT's rand-m9-mstd0.5-inc1: 2 layers, 9, 0.5), turns and shears read with `crop_filter`. `three`: one of
    grey, solarised, blurred (3-Augment, arXiv:2204.07118). `jitter`: brightness, contrast and saturation, factors within
    1 +- x; timm leaves it out beside RandAugment, whatever DeiT's options say.

    `mixup` and `cutmix` are the alphas of their Beta distributions; 0 switches off; of two that are on, each batch takes one by
    chance. `mix_probability`: the share of the batches that are mixed. Raises UsageError for what cannot be done or meant.
    """

    crop: tuple[float, float] = WHOLE
    ratio: tuple[float, float] = (3 / 4, 4 / 3)
    crop_style: Literal["torchvision", "inception", "simple"] = "torchvision"
    crop_filter: Literal["bicubic", "bilinear", "aliased"] | None = None
    shift: float = 0.0
    rotate: float = 0.0
    zoom: float = 0.0
    border: Literal["reflection", "zeros"] = "reflection"
    flip: float = 0.0
    rand_layers: int = 0
    rand_magnitude: int = 9
    rand_style: Literal["torchvision", "big_vision", "timm"] = "torchvision"
    rand_spread: float = 0.0
    three: bool = False
    jitter: tuple[float, float, float] = (0.0, 0.0, 0.0)
    erase: float = 0.0
    erase_noise: bool = False
    mixup: float = 0.0
    cutmix: float = 0.0
    mix_probability: float = 1.0

    def __post_init__(self) -> None:
        for name in ("flip", "erase", "mix_probability"):
            if not 0 <= getattr(self, name) <= 1:
                raise UsageError(f"{name} is a probability, not {getattr(self, name)}")
        if not 0 < self.crop[0] <= self.crop[1] <= 1 or not 0 < self.ratio[0] <= self.ratio[1]:
            raise UsageError(
                f"a crop of area {self.crop} and ratio {self.ratio} is none", "areas are above 0 and at most 1, low before high"
            )
        if self.crop_style == "simple" and self.crop != WHOLE:
            raise UsageError(f"a simple crop takes no area {self.crop}", "use crop 1 1, or crop_style torchvision or inception")
        if self.crop_filter == "aliased" and self.crop_style == "torchvision":
            raise UsageError("torchvision's crop always antialiases", "use crop_filter bilinear, or crop_style inception")
        if self.rand_spread and self.rand_style != "timm":
            raise UsageError(f"rand_spread is timm's, {self.rand_style} has none", "use rand_style timm, or rand_spread 0")
        if self.rand_style == "torchvision" and self.rand_magnitude > 30:
            raise UsageError(f"torchvision's RandAugment has magnitudes up to 30, not {self.rand_magnitude}")
        if min(self.rand_layers, self.rand_magnitude, self.rand_spread, *self.jitter) < 0:
            raise UsageError("layers, magnitude and spread of RandAugment, and jitter, are not below 0")

    def picture(self, picture: Image.Image, preprocess: Preprocess, sample_key: int) -> Tensor:
        """A decoded picture -> (C, *image) uint8: the path of files, run where they are decoded."""
        with seeded(sample_key):
            if self.crop == WHOLE and self.crop_style != "simple":
                picture = preprocess.fitted(picture)
            return pipeline(self, preprocess.image)(picture)

    def batch(self, pixels: Tensor, keys: np.ndarray) -> Tensor:
        """(B, C, H, W) uint8 and (B,) keys -> (B, C, H, W) float32 in 0..255: the path of pictures kept in memory.

        One affine map per picture, drawn from its key, read bilinearly (or as `crop_filter` says); then the pixel operations.
        """
        if not len(pixels):
            return pixels.float()
        size = (pixels.shape[-2], pixels.shape[-1])
        if self.crop_style == "simple":
            pixels = windows(pixels, keys)
        bicubic = self.crop != WHOLE and self.crop_filter == "bicubic"
        batch = warp(pixels.float(), self.maps(keys, size), self.border, "bicubic" if bicubic else "bilinear")
        if late := [*paint(self), *holes(self)]:
            operations = v2().Compose(late)
            for row, sample_key in enumerate(keys):
                with seeded(int(sample_key)):
                    batch[row] = operations(batch[row].round().to(torch.uint8))
        return batch

    def maps(self, keys: np.ndarray, size: tuple[int, int]) -> Tensor:
        """(B,) keys -> (B, 2, 3): from output to input coordinates in [-1, 1], as `F.affine_grid` takes them.

        For one picture: a crop of random area, ratio and place, then a turn, a zoom, a shift by whole pixels, a mirror.
        """
        u = uniform(keys, 9)
        height, width = size
        wide, tall = self.shares(u[:, 0], u[:, 1], height / width)
        x, y = (1 - wide) * (2 * u[:, 2] - 1), (1 - tall) * (2 * u[:, 3] - 1)
        x, y = x + shifts(u[:, 4], self.shift, width), y + shifts(u[:, 5], self.shift, height)
        angle = np.radians(self.rotate) * (2 * u[:, 6] - 1)
        zoom = 1 + self.zoom * (2 * u[:, 7] - 1)
        mirror = np.where(u[:, 8] < self.flip, -1.0, 1.0)
        cos, sin = np.cos(angle) / zoom, np.sin(angle) / zoom
        rows = [[mirror * wide * cos, wide * sin * height / width, x], [-mirror * tall * sin * width / height, tall * cos, y]]
        return torch.from_numpy(np.stack([np.stack(row, -1) for row in rows], 1)).float()

    def shares(self, u: np.ndarray, v: np.ndarray, upright: float) -> tuple[np.ndarray, np.ndarray]:
        """(B,) draws of area and aspect, and height / width of the picture -> (B,) shares of its width and height."""
        if self.crop == WHOLE:
            return np.ones_like(u), np.ones_like(u)
        if self.crop_style == "inception":
            ratio = (self.ratio[0] + (self.ratio[1] - self.ratio[0]) * v) * upright
            most = np.minimum(np.minimum(np.sqrt(self.crop[1] / ratio), 1), 1 / ratio)
            least = np.sqrt(self.crop[0] / ratio)
            tall = least + (most - least) * u
            fits = least <= most
            return np.where(fits, tall * ratio, 1), np.where(fits, tall, 1)
        area = self.crop[0] + (self.crop[1] - self.crop[0]) * u
        low, high = np.log(self.ratio)
        ratio = np.exp(low + (high - low) * v) * upright
        return np.minimum(np.sqrt(area * ratio), 1), np.minimum(np.sqrt(area / ratio), 1)

    def mix(self, images: Tensor, labels: Tensor, classes: int, seed: int, batch: int, apart: int = 1) -> tuple[Tensor, Tensor]:
        """(B, C, *image), (B,) or (B, classes) labels -> images and (B, classes) soft labels, where the batch is mixed; else unchanged.

        Each picture is mixed with the one `apart` places before it, which must be the number of repeats where pictures stand
        several times in a row. MixUp (arXiv:1710.09412) adds them up, CutMix (arXiv:1905.04899) puts a box of the one into the
        other; labels are mixed by the same share. big_vision takes the larger of the two shares for the picture itself: with
        the roles in all pairs exchanged, that is the same set of mixtures.
        """
        if not (self.mixup or self.cutmix) or len(images) < 2:
            return images, labels
        both = self.mixup > 0 and self.cutmix > 0
        with seeded(seed, batch):
            if self.mix_probability < 1 and float(torch.rand(())) >= self.mix_probability:
                return images, labels
            cut = self.cutmix > 0 and (not both or bool(torch.rand(()) < 0.5))
            alpha = torch.tensor([self.cutmix if cut else self.mixup])
            share = float(torch.distributions.Beta(alpha, alpha).sample())
            box, share = cut_box(share, images.shape[-2], images.shape[-1]) if cut else (None, share)
        targets = labels if labels.ndim == 2 else F.one_hot(labels, classes)
        return mixed(images, share, apart, box), mixed(targets.float(), share, apart)


def cut_box(share: float, height: int, width: int) -> tuple[tuple[slice, slice], float]:
    """The box that CutMix exchanges, 1 - share of the picture before it is cut at the sides, and the share that is then left."""
    column, row = int(torch.randint(width, (1,))), int(torch.randint(height, (1,)))
    half = 0.5 * (1 - share) ** 0.5
    rows = slice(max(row - int(half * height), 0), min(row + int(half * height), height))
    columns = slice(max(column - int(half * width), 0), min(column + int(half * width), width))
    return (rows, columns), 1 - (rows.stop - rows.start) * (columns.stop - columns.start) / (width * height)


def mixed(values: Tensor, share: float, apart: int, box: tuple[slice, slice] | None = None) -> Tensor:
    """(B, ...) -> (B, ...): `share` of each value and the rest of the one `apart` before it; or its box alone, where one is given."""
    others = values.roll(apart, 0)
    if box is None:
        return others.mul_(1 - share).add_(values.mul(share))
    result = values.clone()
    result[..., box[0], box[1]] = others[..., box[0], box[1]]
    return result


def shifts(u: np.ndarray, share: float, length: int) -> np.ndarray:
    """(B,) draws in [0, 1) -> shifts by whole pixels, at most `share` of the side, in coordinates where the side is 2 long."""
    reach = round(share * length)
    return (np.floor(u * (2 * reach + 1)) - reach) * 2 / length


def warp(images: Tensor, maps: Tensor, border: str, mode: str = "bilinear") -> Tensor:
    """(B, C, H, W) float in 0..255 and (B, 2, 3) maps -> (B, C, H, W), read at the mapped places."""
    grid = F.affine_grid(maps, list(images.shape), align_corners=False)
    read = F.grid_sample(images, grid, mode=mode, padding_mode=border, align_corners=False)
    return read.clamp_(0, 255) if mode == "bicubic" else read


def windows(images: Tensor, keys: np.ndarray) -> Tensor:
    """(B, C, H, W) -> (B, C, H, W): simple crops of pictures that have the model's size already.

    for image, key in zip(images, keys): image[:, window(H, H, u)][:, :, window(W, W, v)], with u and v drawn from the key
    """
    height, width = images.shape[-2:]
    u = uniform(keys, 11)
    rows, columns = torch.from_numpy(window(height, height, u[:, 9])), torch.from_numpy(window(width, width, u[:, 10]))
    batch, channel = torch.arange(len(images)), torch.arange(images.shape[1])
    return images[batch[:, None, None, None], channel[None, :, None, None], rows[:, None, :, None], columns[:, None, None, :]]


def v2():
    """torchvision.transforms.v2, imported when first needed: it takes seconds."""
    from torchvision.transforms import v2 as module

    return module


@cache
def pipeline(augment: Augment, image: tuple[int, int]):
    """Picture -> (C, *image) uint8, as torchvision's transforms."""
    steps, modes = crops(augment, image), v2().InterpolationMode
    if augment.rotate or augment.shift or augment.zoom:
        shift = (augment.shift, augment.shift) if augment.shift else None
        zoom = (1 - augment.zoom, 1 + augment.zoom) if augment.zoom else None
        steps.append(v2().RandomAffine((-augment.rotate, augment.rotate), shift, zoom, interpolation=modes.BILINEAR))
    if augment.flip:
        steps.append(v2().RandomHorizontalFlip(augment.flip))
    return v2().Compose([*steps, *paint(augment), to_tensor, *holes(augment)])


def crops(augment: Augment, image: tuple[int, int]) -> list:
    """The crop of a file, if there is one: picture -> picture of (height, width) `image`."""
    filter = augment.crop_filter or "bicubic"
    if augment.crop_style == "simple":
        return [SimpleCrop(image, filter)]
    if augment.crop == WHOLE:
        return []
    if augment.crop_style == "inception":
        return [InceptionCrop(image, augment.crop, augment.ratio, filter)]
    return [v2().RandomResizedCrop(image, augment.crop, augment.ratio, interpolation=v2().InterpolationMode(filter))]


def paint(augment: Augment) -> list:
    """RandAugment, 3-Augment, jitter, as far as they are on: each takes Pillow's pictures and (C, H, W) uint8 alike."""
    steps, layers, magnitude = [], augment.rand_layers, augment.rand_magnitude
    if layers and augment.rand_style == "torchvision":
        steps.append(v2().RandAugment(layers, magnitude, fill=128))
    elif layers and augment.rand_style == "big_vision":
        steps.append(partial(either, RandAugment(BIG_VISION, layers, magnitude, Image.Resampling.NEAREST)))
    elif layers:
        filter = FILTERS[augment.crop_filter or "bicubic"]
        steps.append(partial(either, RandAugment(TIMM, layers, magnitude, filter, 0.5, augment.rand_spread, 10)))
    if augment.three:
        steps.append(partial(either, three))
    if any(augment.jitter):
        steps.append(v2().ColorJitter(*augment.jitter))
    return steps


def holes(augment: Augment) -> list:
    """Random erasing of (C, H, W) uint8, if it is on."""
    if not augment.erase:
        return []
    if not augment.erase_noise:
        return [v2().RandomErasing(augment.erase, value=128)]
    return [partial(noisy, v2().RandomErasing(augment.erase, scale=(0.02, 1 / 3), ratio=(0.3, 1 / 0.3), value=0))]


def noisy(eraser: Callable[[Tensor], Tensor], image: Tensor) -> Tensor:
    """(C, H, W) uint8 with normal noise where `eraser` would set 0."""
    kept = eraser(torch.ones(1, *image.shape[1:], dtype=torch.bool))
    if kept.all():
        return image
    mean, std = (torch.tensor(values)[:, None, None] for values in IMAGENET)
    if len(image) != len(mean):
        mean, std = mean.mean(), std.mean()
    noise = (mean + std * torch.randn(image.shape)) * 255
    return torch.where(kept, image, noise.round().clamp(0, 255).to(torch.uint8))


def either(operation: Callable[[Image.Image], Image.Image], image: Image.Image | Tensor) -> Image.Image | Tensor:
    """An operation on Pillow's pictures, done to a (C, H, W) uint8 as well: 1 channel is a grey picture, 3 are RGB."""
    if isinstance(image, Image.Image):
        return operation(image)
    array = image.permute(1, 2, 0).numpy()
    return to_tensor(operation(Image.fromarray(array[..., 0] if array.shape[-1] == 1 else array)))
