"""Augment training images: files one at a time, cached images as whole batches, each with a separate random key."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, partial, reduce
from typing import Any, ClassVar, Literal, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor

from vitreous.data.augmentation.crops import (
    RESAMPLING_FILTERS,
    AreaCrop,
    InceptionCrop,
    NativeAspectCrop,
    SimpleCrop,
    array_to_pillow,
    fit_to_model_size,
)
from vitreous.data.augmentation.moves import (
    apply_simple_crops,
    draw_imagenet_noise,
    erase_random_boxes,
    shift_and_mirror,
)
from vitreous.data.augmentation.randaugment import (
    BIG_VISION_OPERATIONS,
    TIMM_OPERATIONS,
    RandAugment,
    apply_three_augment,
)
from vitreous.data.decoding.clip import Clip
from vitreous.data.decoding.decode import PILLOW_MODES
from vitreous.data.decoding.regions import LazyImage
from vitreous.data.decoding.spectral import DecodedSample, list_bands
from vitreous.data.keys import derive_key, draw_uniform, fork_torch_rng
from vitreous.data.modalities.base import image_to_tensor
from vitreous.data.modalities.clips import ClipPreprocess
from vitreous.data.modalities.planar import PlanarPreprocess
from vitreous.errors import UsageError

FULL_AREA = (1.0, 1.0)  # area range of a crop that covers the whole image
FRAME_KEY = 0x7AE5  # key component for frames of a clip, so that frames and crops are drawn independently


class ViewAugmentation(Protocol):
    """Augmentation of a training image: one view (`Augment`) or several (`MultiCrop`), determined by its key."""

    takes_regions: ClassVar[bool]  # whether `picture` accepts a `LazyImage`, to decode only the required region

    def augment_image(self, image: DecodedSample | LazyImage, preprocess: Any, sample_key: int) -> Tensor:
        """Augment an image of any size to its entry of a batch, a tensor of the same shape for every sample."""
        ...

    def augment_batch(self, pixels: Tensor, keys: np.ndarray) -> Tensor:
        """Augment cached (B, C, *image) images with (B,) uint64 keys to B batch entries."""
        ...

    def unpack_batch(self, entries: Tensor, preprocess: Any) -> dict[str, Tensor]:
        """Convert B batch entries, (B, ...), to a batch, samples first."""
        ...


@dataclass(frozen=True)
class Augment:
    """Random transforms of a training image; the defaults change nothing.

    `crop` and `ratio`: area share and aspect ratio of a random crop, scaled to the model's size. `crop_style`:
    torchvision's (log-uniform aspect, uniform area); `inception`, as in TensorFlow (arXiv:2010.11929 and big_vision,
    with crop 0.05 1 and ratio 0.75 1.33); `simple` shifts by up to four reflected pixels (DeiT III, arXiv:2204.07118).
    `crop_filter`: `aliased` is bilinear without antialiasing, as in big_vision, for the latter two styles; None is
    bicubic for files and bilinear for cached images. `shift`: random translation by integer pixels, at most that share
    of height and width. `rotate` in degrees and `zoom` as a share are drawn from [-x, x]; `border` selects the fill
    outside the image. `flip` and `erase` are probabilities; with `erase_noise` the erased box is noise with ImageNet's
    mean and std, as in DeiT (arXiv:2012.12877), not grey.

    `rand_layers` operations of RandAugment at `rand_magnitude`. `rand_style`: torchvision's; `big_vision`: 16
    operations, always applied (arXiv:2106.10270, arXiv:2205.01580); `timm`: 15, each with probability 1/2, at the
    magnitude + N(0, `rand_spread`) within 0 and 10 (DeiT's rand-m9-mstd0.5-inc1: 2 layers, 9, 0.5), rotations and
    shears resampled with `crop_filter`. `three`: one of grey, solarised, blurred (3-Augment,
    arXiv:2204.07118). `trivial`: one of 14 operations at a random magnitude (TrivialAugment, arXiv:2103.10158, its wide
    space, by torchvision). `jitter`: brightness, contrast and saturation, factors within 1 +- x; timm omits it with
    RandAugment, even if DeiT's options set it.

    `mixup` and `cutmix` are the alphas of their Beta distributions, 0 disables them; if both are on, each batch draws
    one. `mix_probability`: the share of batches that are mixed.

    For images at native aspect ratio (`NativePreprocess`), `ratio` is the factor between the aspect ratio of a crop and
    of the image, and each crop is scaled to a number of tokens drawn from `fewest_tokens` (0: always the maximum) to
    its `tokens` (NaViT, arXiv:2307.06304).

    Raises UsageError for values out of range and incompatible options.
    """

    takes_regions: ClassVar[bool] = True

    crop: tuple[float, float] = FULL_AREA
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
    trivial: bool = False
    jitter: tuple[float, float, float] = (0.0, 0.0, 0.0)
    erase: float = 0.0
    erase_noise: bool = False
    mixup: float = 0.0
    cutmix: float = 0.0
    mix_probability: float = 1.0
    fewest_tokens: int = 0
    name: Literal["augment"] = "augment"

    def __post_init__(self) -> None:
        for name in ("flip", "erase", "mix_probability"):
            if not 0 <= getattr(self, name) <= 1:
                raise UsageError(f"{name} is a probability, not {getattr(self, name)}")
        if not 0 < self.crop[0] <= self.crop[1] <= 1 or not 0 < self.ratio[0] <= self.ratio[1]:
            problem = f"invalid crop: area {self.crop}, ratio {self.ratio}"
            raise UsageError(problem, "areas are above 0 and at most 1, low before high")
        if self.crop_style == "simple" and self.crop != FULL_AREA:
            hint = "use crop 1 1, or crop_style torchvision or inception"
            raise UsageError(f"crop_style simple does not support the area {self.crop}", hint)
        if self.crop_filter == "aliased" and self.crop_style == "torchvision":
            hint = "use crop_filter bilinear, or crop_style inception"
            raise UsageError("torchvision's crop always antialiases", hint)
        if self.rand_spread and self.rand_style != "timm":
            hint = "use rand_style timm, or rand_spread 0"
            raise UsageError(f"rand_spread is not supported by rand_style {self.rand_style}", hint)
        if self.rand_style == "torchvision" and self.rand_magnitude > 30:
            raise UsageError(f"torchvision's RandAugment has magnitudes up to 30, not {self.rand_magnitude}")
        if min(self.rand_layers, self.rand_magnitude, self.rand_spread, *self.jitter, self.fewest_tokens) < 0:
            raise UsageError("layers, magnitude and spread of RandAugment, jitter and fewest_tokens must be at least 0")

    def without_colour_transforms(self) -> Augment:
        """Remove colour transforms and those that fill with grey, for images that are read by band."""
        return replace(
            self, rand_layers=0, three=False, trivial=False, jitter=(0.0, 0.0, 0.0), erase=0.0, erase_noise=False
        )

    def augment_image(
        self, image: DecodedSample | LazyImage | Clip, preprocess: PlanarPreprocess, sample_key: int
    ) -> Tensor:
        """Augment the image of a file to (C, *image) uint8, in the process that decodes it. Raises DataError.

        Images with several Pillow channels get the same transform in each; mode F becomes float32. Likewise for the
        frames of a clip, which are sampled randomly.
        """
        if isinstance(image, Clip):
            draws = draw_uniform(np.array([derive_key(sample_key, FRAME_KEY)], np.uint64), preprocess.image[0])[0]
            assert isinstance(preprocess, ClipPreprocess)
            frame_indices = preprocess.choose_frame_numbers(len(image), draws)
            frames, mode = image.read_frames(frame_indices), PILLOW_MODES[preprocess.channels]
            images = [Image.fromarray(frame).convert(mode) for frame in frames]
            return torch.stack([self.augment_image(frame, preprocess, sample_key) for frame in images], 1)
        if isinstance(image, (tuple, np.ndarray)):
            return torch.cat([self.augment_image(band, preprocess, sample_key) for band in list_bands(image)])
        with fork_torch_rng(sample_key):
            return compose_file_transform(self, preprocess)(image)

    def augment_batch(self, pixels: Tensor, keys: np.ndarray) -> Tensor:
        """Augment cached images by their (B,) keys: (B, C, H, W) uint8 -> (B, C, H, W) in 0..255.

        Shifts by integer pixels stay uint8. Otherwise one affine map per image, drawn from its key, is sampled
        bilinearly (or by `crop_filter`) to float32. Pixel operations and random erasing follow.
        """
        if not len(pixels):
            return pixels
        size = (pixels.shape[-2], pixels.shape[-1])
        if self.crop_style == "simple":
            pixels = apply_simple_crops(pixels, keys)
        if self.crop == FULL_AREA and not self.rotate and not self.zoom and pixels.dtype == torch.uint8:
            batch = self.shift_batch(pixels, keys)
        else:
            bicubic = self.crop != FULL_AREA and self.crop_filter == "bicubic"
            grid = F.affine_grid(self.draw_affine_maps(keys, size), list(pixels.shape), align_corners=False)
            mode = "bicubic" if bicubic else "bilinear"
            batch = F.grid_sample(pixels.float(), grid, mode=mode, padding_mode=self.border, align_corners=False)
            if bicubic and pixels.dtype == torch.uint8:
                batch.clamp_(0, 255)
        if layers := create_colour_transforms(self):
            operations = import_transforms_v2().Compose(layers)
            for index, sample_key in enumerate(keys):
                with fork_torch_rng(int(sample_key)):
                    image = batch[index] if batch.dtype == torch.uint8 else batch[index].round().to(torch.uint8)
                    batch[index] = operations(image)
        return erase_random_boxes(batch, keys, self.erase, self.erase_noise) if self.erase else batch

    def unpack_batch(self, entries: Tensor, preprocess: PlanarPreprocess) -> dict[str, Tensor]:
        """Return (B, C, *image) as `images`."""
        return {"images": entries}

    def shift_batch(self, pixels: Tensor, keys: np.ndarray) -> Tensor:
        """Shift and mirror (B, C, H, W) uint8 by (B,) keys, like `draw_affine_maps` for integer shifts."""
        u = draw_uniform(keys, 9)
        x, y = (draw_pixel_shifts(u[:, 4 + axis], self.shift, pixels.shape[3 - axis]) for axis in (0, 1))
        return shift_and_mirror(pixels, x, y, u[:, 8] < self.flip, self.border)

    def draw_affine_maps(self, keys: np.ndarray, size: tuple[int, int]) -> Tensor:
        """Draw affine maps by (B,) keys, (B, 2, 3) float32, from output to input coordinates in [-1, 1]
        (`F.affine_grid`).

        For each image: a crop of random area, ratio and position, then rotation, zoom, integer shift, mirroring.
        """
        u = draw_uniform(keys, 9)
        height, width = size
        width_share, height_share = self.draw_crop_shares(u[:, 0], u[:, 1], height / width)
        x, y = (1 - width_share) * (2 * u[:, 2] - 1), (1 - height_share) * (2 * u[:, 3] - 1)
        x = x + draw_pixel_shifts(u[:, 4], self.shift, width) * 2 / width
        y = y + draw_pixel_shifts(u[:, 5], self.shift, height) * 2 / height
        angle = np.radians(self.rotate) * (2 * u[:, 6] - 1)
        zoom = 1 + self.zoom * (2 * u[:, 7] - 1)
        mirror = np.where(u[:, 8] < self.flip, -1.0, 1.0)
        cos, sin = np.cos(angle) / zoom, np.sin(angle) / zoom
        rows = [
            [mirror * width_share * cos, width_share * sin * height / width, x],
            [-mirror * height_share * sin * width / height, height_share * cos, y],
        ]
        return torch.from_numpy(np.stack([np.stack(row, -1) for row in rows], 1)).float()

    def draw_crop_shares(self, u: np.ndarray, v: np.ndarray, height_to_width: float) -> tuple[np.ndarray, np.ndarray]:
        """Return a crop's (B,) shares of width and height, from (B,) draws of area and aspect, and height / width."""
        if self.crop == FULL_AREA:
            return np.ones_like(u), np.ones_like(u)
        if self.crop_style == "inception":
            ratio = (self.ratio[0] + (self.ratio[1] - self.ratio[0]) * v) * height_to_width
            max_share = np.minimum(np.minimum(np.sqrt(self.crop[1] / ratio), 1), 1 / ratio)
            min_share = np.sqrt(self.crop[0] / ratio)
            height_share = min_share + (max_share - min_share) * u
            is_valid = min_share <= max_share
            return np.where(is_valid, height_share * ratio, 1), np.where(is_valid, height_share, 1)
        area = self.crop[0] + (self.crop[1] - self.crop[0]) * u
        low, high = np.log(self.ratio)
        ratio = np.exp(low + (high - low) * v) * height_to_width
        return np.minimum(np.sqrt(area * ratio), 1), np.minimum(np.sqrt(area / ratio), 1)

    def mix_batch(
        self, images: Tensor, labels: Tensor, classes: int, seed: int, batch: int, offset: int = 1
    ) -> tuple[Tensor, Tensor]:
        """Mix (B, C, *image) and (B,) or (B, classes) labels to images and (B, classes) soft labels, or return them
        unchanged.

        Each image is mixed with the one `offset` positions before it, which must be the number of repeats if images are
        repeated consecutively. MixUp (arXiv:1710.09412) adds them, CutMix (arXiv:1905.04899) inserts a box of one into
        the other; labels are mixed by the same share. big_vision uses the larger of the two shares for the image; with
        roles exchanged in all pairs, that is the same set of mixtures.
        """
        if not (self.mixup or self.cutmix) or len(images) < 2:
            return images, labels
        has_both = self.mixup > 0 and self.cutmix > 0
        with fork_torch_rng(seed, batch):
            if self.mix_probability < 1 and float(torch.rand(())) >= self.mix_probability:
                return images, labels
            use_cutmix = self.cutmix > 0 and (not has_both or bool(torch.rand(()) < 0.5))
            alpha = torch.tensor([self.cutmix if use_cutmix else self.mixup])
            share = float(torch.distributions.Beta(alpha, alpha).sample())
            box, share = draw_cutmix_box(share, images.shape[-2], images.shape[-1]) if use_cutmix else (None, share)
        targets = labels if labels.ndim == 2 else F.one_hot(labels, classes)
        return mix_with_roll(images, share, offset, box), mix_with_roll(targets.float(), share, offset)


def draw_cutmix_box(share: float, height: int, width: int) -> tuple[tuple[slice, slice], float]:
    """Draw CutMix's box, 1 - share of the image before clipping to the image, and return the actual share outside
    it."""
    column, row = int(torch.randint(width, (1,))), int(torch.randint(height, (1,)))
    half = 0.5 * (1 - share) ** 0.5
    rows = slice(max(row - int(half * height), 0), min(row + int(half * height), height))
    columns = slice(max(column - int(half * width), 0), min(column + int(half * width), width))
    return (rows, columns), 1 - (rows.stop - rows.start) * (columns.stop - columns.start) / (width * height)


def mix_with_roll(values: Tensor, share: float, offset: int, box: tuple[slice, slice] | None = None) -> Tensor:
    """Mix `share` of each of (B, ...) values with the one `offset` positions before it, or replace `box`, if passed."""
    rolled = values.roll(offset, 0)
    if box is None:
        return rolled.mul_(1 - share).add_(values.mul(share))
    result = values.clone()
    result[..., box[0], box[1]] = rolled[..., box[0], box[1]]
    return result


def draw_pixel_shifts(u: np.ndarray, share: float, length: int) -> np.ndarray:
    """Convert (B,) draws in [0, 1) to integer shifts, (B,) int64, at most `share` of the length."""
    max_shift = round(share * length)
    return np.floor(u * (2 * max_shift + 1)).astype(np.int64) - max_shift


def import_transforms_v2():
    """Import torchvision.transforms.v2 on first use, which takes seconds."""
    from torchvision.transforms import v2 as module

    return module


@cache
def compose_file_transform(
    augment: Augment, preprocess: PlanarPreprocess
) -> Callable[[Image.Image | LazyImage], Tensor]:
    """Compose the transform of a file's image to (C, *image) uint8. Crops become Pillow images only if needed."""
    crop: Callable[[Any], Any] | None = create_random_crop(augment, preprocess.plane)
    if not preprocess.stacks:
        crop = NativeAspectCrop(crop, preprocess, augment.fewest_tokens)  # type: ignore[arg-type]  # Run rejects simple crops here
    operations: list[Callable[[Any], Any]] = [crop or partial(fit_to_model_size, preprocess)]
    affine_transforms, colour_transforms = create_affine_transforms(augment), create_colour_transforms(augment)
    if affine_transforms or colour_transforms:
        operations.append(tensor_to_pillow)
    operations += affine_transforms
    if augment.flip:
        operations.append(partial(flip_horizontally_at_random, probability=augment.flip))
    operations += [*colour_transforms, image_to_uint8_tensor, *create_erasing_transforms(augment)]
    return lambda image: reduce(lambda result, operation: operation(result), operations, image)


def create_random_crop(augment: Augment, image: tuple[int, int]) -> AreaCrop | InceptionCrop | SimpleCrop | None:
    """Create the random crop of a file to (height, width) `image`, if enabled."""
    filter = augment.crop_filter or "bicubic"
    if augment.crop_style == "simple":
        return SimpleCrop(image, filter)
    if augment.crop == FULL_AREA:
        return None
    crop = InceptionCrop if augment.crop_style == "inception" else AreaCrop
    return crop(image, augment.crop, augment.ratio, filter)


def tensor_to_pillow(image: Image.Image | Tensor) -> Image.Image:
    """Convert (C, H, W) uint8 to a Pillow image."""
    return image if isinstance(image, Image.Image) else array_to_pillow(image.permute(1, 2, 0).numpy())


def image_to_uint8_tensor(image: Image.Image | Tensor) -> Tensor:
    """Convert an image to contiguous (C, H, W) uint8 with numpy, in half the time of torch."""
    return (
        image_to_tensor(image)
        if isinstance(image, Image.Image)
        else torch.from_numpy(np.ascontiguousarray(image.numpy()))
    )


def flip_horizontally_at_random(image: Image.Image | Tensor, probability: float) -> Image.Image | Tensor:
    """Mirror a (C, H, W) or Pillow image with a probability, drawn as torchvision's RandomHorizontalFlip does."""
    if torch.rand(1) >= probability:
        return image
    return image.flip(-1) if isinstance(image, Tensor) else image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)


def create_affine_transforms(augment: Augment) -> list:
    """Create rotation, shift and zoom of a file's image, if any is enabled."""
    if not (augment.rotate or augment.shift or augment.zoom):
        return []
    shift = (augment.shift, augment.shift) if augment.shift else None
    zoom = (1 - augment.zoom, 1 + augment.zoom) if augment.zoom else None
    angles, bilinear = (-augment.rotate, augment.rotate), import_transforms_v2().InterpolationMode.BILINEAR
    return [import_transforms_v2().RandomAffine(angles, shift, zoom, interpolation=bilinear)]


def create_colour_transforms(augment: Augment) -> list:
    """Create RandAugment, 3-Augment, TrivialAugment and jitter, if enabled, for Pillow images and (C, H, W) uint8."""
    steps, layers, magnitude = [], augment.rand_layers, augment.rand_magnitude
    if layers and augment.rand_style == "torchvision":
        steps.append(import_transforms_v2().RandAugment(layers, magnitude, fill=128))
    elif layers and augment.rand_style == "big_vision":
        steps.append(
            partial(
                apply_to_image_or_tensor,
                RandAugment(BIG_VISION_OPERATIONS, layers, magnitude, Image.Resampling.NEAREST),
            )
        )
    elif layers:
        filter = RESAMPLING_FILTERS[augment.crop_filter or "bicubic"]
        steps.append(
            partial(
                apply_to_image_or_tensor,
                RandAugment(
                    TIMM_OPERATIONS,
                    layers,
                    magnitude=magnitude,
                    filter=filter,
                    probability=0.5,
                    spread=augment.rand_spread,
                    highest=10,
                ),
            )
        )
    if augment.three:
        steps.append(partial(apply_to_image_or_tensor, apply_three_augment))
    if augment.trivial:
        steps.append(import_transforms_v2().TrivialAugmentWide(fill=128))
    if any(augment.jitter):
        steps.append(import_transforms_v2().ColorJitter(*augment.jitter))
    return steps


def create_erasing_transforms(augment: Augment) -> list:
    """Create random erasing of (C, H, W) uint8, if enabled."""
    if not augment.erase:
        return []
    if not augment.erase_noise:
        return [import_transforms_v2().RandomErasing(augment.erase, value=128)]
    return [
        partial(
            erase_with_noise,
            import_transforms_v2().RandomErasing(augment.erase, scale=(0.02, 1 / 3), ratio=(0.3, 1 / 0.3), value=0),
        )
    ]


def erase_with_noise(eraser: Callable[[Tensor], Tensor], image: Tensor) -> Tensor:
    """Fill the box of (C, H, W) uint8 that `eraser` sets to 0 with normal noise."""
    keep = eraser(torch.ones(1, *image.shape[1:], dtype=torch.bool))
    return image if keep.all() else torch.where(keep, image, draw_imagenet_noise(image.shape).to(torch.uint8))


def apply_to_image_or_tensor(
    operation: Callable[[Image.Image], Image.Image], image: Image.Image | Tensor
) -> Image.Image | Tensor:
    """Apply an operation on Pillow images to a (C, H, W) uint8 tensor too: 1 channel is grey, 3 are RGB."""
    if isinstance(image, Image.Image):
        return operation(image)
    return image_to_tensor(operation(tensor_to_pillow(image)))
