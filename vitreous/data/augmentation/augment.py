"""Augment training images for classification: image files one by one, cached images as batches.

Each image has a random key, which determines its transform regardless of the batch.
"""

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

from vitreous.data.augmentation.batch_transforms import (
    apply_simple_crops,
    draw_imagenet_noise,
    erase_random_boxes,
    shift_and_mirror,
)
from vitreous.data.augmentation.crops import (
    RESAMPLING_FILTERS,
    AreaCrop,
    InceptionCrop,
    NativeAspectCrop,
    SimpleCrop,
    array_to_pillow,
    fit_to_model_size,
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

FULL_AREA = (1.0, 1.0)  # value of `Augment.crop` without random crops
FRAME_KEY = 0x7AE5  # key component for the choice of frames, so that it is independent of the crop


class ViewAugmentation(Protocol):
    """Interface of augmentations: an image and its random key determine one view (`Augment`) or several
    (`MultiCrop`)."""

    takes_regions: ClassVar[bool]  # whether `augment_image` accepts a `LazyImage` and decodes only the region it needs

    def augment_image(self, image: DecodedSample | LazyImage, preprocess: Any, sample_key: int) -> Tensor:
        """Augment an image of any size to one entry of a batch: a tensor whose shape is the same for every sample."""
        ...

    def augment_batch(self, pixels: Tensor, keys: np.ndarray) -> Tensor:
        """Augment cached images (B, C, *image), which have the model's input size, with (B,) uint64 keys, to the B
        entries of a batch, (B, ...)."""
        ...

    def unpack_batch(self, entries: Tensor, preprocess: Any) -> dict[str, Tensor]:
        """Convert the B entries of a batch, (B, ...), to a dictionary of tensors with B as first axis, for the
        model."""
        ...


@dataclass(frozen=True)
class Augment:
    """Settings for augmenting a training image to one view. With the defaults, images are not changed.

    Random crops, resized to the model's input size: `crop` is the range of the crop's share of the image, `ratio` the
    range of its aspect ratio. `crop_style` selects their distribution:

    - `torchvision`: uniform area, log-uniform aspect ratio
    - `inception`: as in TensorFlow (used by arXiv:2010.11929 and big_vision with crop 0.05 1 and ratio 0.75 1.33)
    - `simple`: a shift by up to four pixels, filled by reflection (DeiT III, arXiv:2204.07118)

    `crop_filter` is the resampling filter. `aliased` is bilinear without antialiasing, as in big_vision, and needs the
    style `inception` or `simple`. None selects bicubic for files and bilinear for cached images.

    Geometry: `shift` is the maximum translation, by integer pixels, as a share of height and width. A rotation in
    degrees and a change of scale are drawn from [-x, x], where x is `rotate` or `zoom`. `border` selects the fill
    outside the image. `flip` is the probability of mirroring. `erase` is the probability of erasing a random box, which
    is filled with grey or, with `erase_noise`, with noise of ImageNet's mean and std, as in DeiT (arXiv:2012.12877).

    RandAugment: `rand_layers` operations at `rand_magnitude`, 0 for none. `rand_style` selects the operations:

    - `torchvision`: the operations of torchvision's RandAugment
    - `big_vision`: 16 operations, always applied (arXiv:2106.10270, arXiv:2205.01580)
    - `timm`: 15 operations, each applied with probability 1/2, at `rand_magnitude` + N(0, `rand_spread`) within 0 and
      10. Rotations and shears use `crop_filter`. DeiT's rand-m9-mstd0.5-inc1 is 2 layers, magnitude 9, spread 0.5.

    Other colour changes: `three` applies one of grey, solarisation and blur (3-Augment, arXiv:2204.07118). `trivial`
    applies one of 14 operations at a random magnitude (TrivialAugment, arXiv:2103.10158, wide space, by torchvision).
    `jitter` are the strengths x of brightness, contrast and saturation, whose factors are within 1 +- x. If RandAugment
    is on, timm omits jitter, even if it is set as in DeiT's options.

    Mixing of images and labels: `mixup` and `cutmix` are the alphas of their Beta distributions, 0 for none. If both
    are set, each batch draws one of them. `mix_probability` is the share of batches that are mixed.

    For images at native aspect ratio (`NativePreprocess`), `ratio` is relative to the aspect ratio of the image. Each
    crop is resized to a number of tokens that is uniform from `fewest_tokens` to the preprocessing's `tokens` (NaViT,
    arXiv:2307.06304); 0 always selects the maximum.

    Raises UsageError for values out of range and incompatible settings.
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
                raise UsageError(f"{name} {getattr(self, name)} is out of range", "use a probability from 0 to 1")
        if not 0 < self.crop[0] <= self.crop[1] <= 1 or not 0 < self.ratio[0] <= self.ratio[1]:
            problem = f"invalid crop: area {self.crop}, ratio {self.ratio}"
            raise UsageError(problem, "use areas above 0 and at most 1, ratios above 0, the lower one first")
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
            problem = f"rand_magnitude {self.rand_magnitude} exceeds 30, the maximum of rand_style torchvision"
            raise UsageError(problem, "use a magnitude from 0 to 30")
        if min(self.rand_layers, self.rand_magnitude, self.rand_spread, *self.jitter, self.fewest_tokens) < 0:
            raise UsageError(
                "rand_layers, rand_magnitude, rand_spread, jitter or fewest_tokens is below 0",
                "use values of at least 0",
            )

    def without_colour_transforms(self) -> Augment:
        """Return the settings without colour transforms and erasing, which apply only to 8-bit grey and RGB images."""
        return replace(
            self, rand_layers=0, three=False, trivial=False, jitter=(0.0, 0.0, 0.0), erase=0.0, erase_noise=False
        )

    def augment_image(
        self, image: DecodedSample | LazyImage | Clip, preprocess: PlanarPreprocess, sample_key: int
    ) -> Tensor:
        """Augment one image or clip to (C, *image), in the data-loading worker that decodes it.

        All bands of an image that is read by band get the same transform, and so do all frames of a clip, which are
        chosen at random. The result is uint8, or float32 for bands of Pillow's mode F. Raises DataError if the image
        cannot be decoded.
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
        """Augment cached images (B, C, H, W) of the model's input size by their (B,) keys, to the same shape.

        Without crops, rotation and zoom, uint8 images are shifted by integer pixels and stay uint8. Otherwise, an
        affine map per image is sampled bilinearly (or bicubically, by `crop_filter`) to float32 in 0..255. Colour
        transforms and random erasing follow.
        """
        if not len(pixels):
            return pixels
        size = (pixels.shape[-2], pixels.shape[-1])
        if self.crop_style == "simple":
            pixels = apply_simple_crops(pixels, keys)
        if self.crop == FULL_AREA and not self.rotate and not self.zoom and pixels.dtype == torch.uint8:
            batch = self.shift_batch(pixels, keys)
        else:
            is_bicubic = self.crop != FULL_AREA and self.crop_filter == "bicubic"
            grid = F.affine_grid(self.draw_affine_maps(keys, size), list(pixels.shape), align_corners=False)
            mode = "bicubic" if is_bicubic else "bilinear"
            batch = F.grid_sample(pixels.float(), grid, mode=mode, padding_mode=self.border, align_corners=False)
            if is_bicubic and pixels.dtype == torch.uint8:
                batch.clamp_(0, 255)
        if colour_transforms := create_colour_transforms(self):
            transform = import_transforms_v2().Compose(colour_transforms)
            for index, sample_key in enumerate(keys):
                with fork_torch_rng(int(sample_key)):
                    image = batch[index] if batch.dtype == torch.uint8 else batch[index].round().to(torch.uint8)
                    batch[index] = transform(image)
        return erase_random_boxes(batch, keys, self.erase, self.erase_noise) if self.erase else batch

    def unpack_batch(self, entries: Tensor, preprocess: PlanarPreprocess) -> dict[str, Tensor]:
        """Return the batch {"images": entries}, of shape (B, C, *image)."""
        return {"images": entries}

    def shift_batch(self, pixels: Tensor, keys: np.ndarray) -> Tensor:
        """Shift and mirror images (B, C, H, W) uint8 by (B,) keys: the maps of `draw_affine_maps` without crop,
        rotation and zoom, applied without interpolation."""
        u = draw_uniform(keys, 9)
        x, y = (draw_pixel_shifts(u[:, 4 + axis], self.shift, pixels.shape[3 - axis]) for axis in (0, 1))
        return shift_and_mirror(pixels, x, y, u[:, 8] < self.flip, self.border)

    def draw_affine_maps(self, keys: np.ndarray, size: tuple[int, int]) -> Tensor:
        """Draw an affine map for each of (B,) keys: (B, 2, 3) float32, from coordinates of the result to coordinates of
        the image, both in [-1, 1] (`F.affine_grid`). `size` is (height, width).

        A map combines a crop of random area, aspect ratio and position with rotation, zoom, integer shift and
        mirroring.
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
        """Draw the sizes of crops, as shares of the width and of the height of the image, (B,) each. `u` and `v` (B,)
        in [0, 1) select area and aspect ratio; `height_to_width` is height / width of the image."""
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
        """Apply MixUp or CutMix to a batch: images (B, C, *image), and labels (B,) or (B, classes) -> soft labels
        (B, classes) float32. Returns images and labels unchanged if mixing is off or not drawn for this batch.

        Each image is mixed with the image `offset` positions before it; if the batch contains consecutive repeats of an
        image, `offset` must be their number. MixUp (arXiv:1710.09412) averages two images, CutMix (arXiv:1905.04899)
        inserts a box of the second into the first. Labels are mixed by the same share. Random numbers are drawn from
        `seed` and `batch`, the index of the batch.

        In big_vision, the first image of a pair always has the larger share. The distribution of mixtures is the same.
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
    """Draw the box of CutMix, (rows, columns), and return it with the share of the image outside it. The box has an
    area of 1 - `share` of the image before it is clipped to the image."""
    column, row = int(torch.randint(width, (1,))), int(torch.randint(height, (1,)))
    half = 0.5 * (1 - share) ** 0.5
    rows = slice(max(row - int(half * height), 0), min(row + int(half * height), height))
    columns = slice(max(column - int(half * width), 0), min(column + int(half * width), width))
    return (rows, columns), 1 - (rows.stop - rows.start) * (columns.stop - columns.start) / (width * height)


def mix_with_roll(values: Tensor, share: float, offset: int, box: tuple[slice, slice] | None = None) -> Tensor:
    """Average each of B values, (B, ...), with the value `offset` positions before it, which gets the weight 1 -
    `share`. If `box` (rows, columns) is passed, replace these pixels by those of the other image instead."""
    rolled = values.roll(offset, 0)
    if box is None:
        return rolled.mul_(1 - share).add_(values.mul(share))
    result = values.clone()
    result[..., box[0], box[1]] = rolled[..., box[0], box[1]]
    return result


def draw_pixel_shifts(u: np.ndarray, share: float, length: int) -> np.ndarray:
    """Convert random numbers (B,) in [0, 1) to shifts by integer pixels, (B,) int64, of at most +- `share` of
    `length`."""
    max_shift = round(share * length)
    return np.floor(u * (2 * max_shift + 1)).astype(np.int64) - max_shift


def import_transforms_v2():
    """Import torchvision.transforms.v2 and return the module. The import takes seconds, so it is done on first use."""
    from torchvision.transforms import v2 as module

    return module


@cache
def compose_file_transform(
    augment: Augment, preprocess: PlanarPreprocess
) -> Callable[[Image.Image | LazyImage], Tensor]:
    """Compose the random transform from an opened image file to (C, *image) uint8. Cropped tensors are converted to
    PIL images only if a later transform needs them."""
    crop: Callable[[Any], Any] | None = create_random_crop(augment, preprocess.plane)
    if not preprocess.stacks:
        crop = NativeAspectCrop(crop, preprocess, augment.fewest_tokens)  # type: ignore[arg-type]  # `Run` rejects simple crops
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
    """Create the random crop of an image file to the size `image` (height, width); None if random crops are off."""
    filter = augment.crop_filter or "bicubic"
    if augment.crop_style == "simple":
        return SimpleCrop(image, filter)
    if augment.crop == FULL_AREA:
        return None
    crop = InceptionCrop if augment.crop_style == "inception" else AreaCrop
    return crop(image, augment.crop, augment.ratio, filter)


def tensor_to_pillow(image: Image.Image | Tensor) -> Image.Image:
    """Convert a tensor (C, H, W) uint8 to a PIL image; return a PIL image unchanged."""
    return image if isinstance(image, Image.Image) else array_to_pillow(image.permute(1, 2, 0).numpy())


def image_to_uint8_tensor(image: Image.Image | Tensor) -> Tensor:
    """Convert a PIL image or tensor to a contiguous tensor (C, H, W) uint8. numpy takes half the time of torch."""
    return (
        image_to_tensor(image)
        if isinstance(image, Image.Image)
        else torch.from_numpy(np.ascontiguousarray(image.numpy()))
    )


def flip_horizontally_at_random(image: Image.Image | Tensor, probability: float) -> Image.Image | Tensor:
    """Mirror a PIL image or tensor (C, H, W) with `probability`, with the random number of torchvision's
    RandomHorizontalFlip."""
    if torch.rand(1) >= probability:
        return image
    return image.flip(-1) if isinstance(image, Tensor) else image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)


def create_affine_transforms(augment: Augment) -> list:
    """Return the transform for rotation, shift and zoom of a PIL image as a list; empty if all are off."""
    if not (augment.rotate or augment.shift or augment.zoom):
        return []
    shift = (augment.shift, augment.shift) if augment.shift else None
    zoom = (1 - augment.zoom, 1 + augment.zoom) if augment.zoom else None
    angles, bilinear = (-augment.rotate, augment.rotate), import_transforms_v2().InterpolationMode.BILINEAR
    return [import_transforms_v2().RandomAffine(angles, shift, zoom, interpolation=bilinear)]


def create_colour_transforms(augment: Augment) -> list:
    """Return those of RandAugment, 3-Augment, TrivialAugment and colour jitter that are on, as a list of transforms of
    PIL images and tensors (C, H, W) uint8."""
    steps, layers, magnitude = [], augment.rand_layers, augment.rand_magnitude
    if layers and augment.rand_style == "torchvision":
        steps.append(import_transforms_v2().RandAugment(layers, magnitude, fill=128))
    elif layers and augment.rand_style == "big_vision":
        rand_augment = RandAugment(BIG_VISION_OPERATIONS, layers, magnitude, Image.Resampling.NEAREST)
        steps.append(partial(apply_to_image_or_tensor, rand_augment))
    elif layers:
        filter = RESAMPLING_FILTERS[augment.crop_filter or "bicubic"]
        rand_augment = RandAugment(
            TIMM_OPERATIONS, layers, magnitude, filter, probability=0.5, spread=augment.rand_spread, highest=10
        )
        steps.append(partial(apply_to_image_or_tensor, rand_augment))
    if augment.three:
        steps.append(partial(apply_to_image_or_tensor, apply_three_augment))
    if augment.trivial:
        steps.append(import_transforms_v2().TrivialAugmentWide(fill=128))
    if any(augment.jitter):
        steps.append(import_transforms_v2().ColorJitter(*augment.jitter))
    return steps


def create_erasing_transforms(augment: Augment) -> list:
    """Return random erasing of tensors (C, H, W) uint8 as a list of one transform; empty if it is off."""
    if not augment.erase:
        return []
    if not augment.erase_noise:
        return [import_transforms_v2().RandomErasing(augment.erase, value=128)]
    eraser = import_transforms_v2().RandomErasing(augment.erase, scale=(0.02, 1 / 3), ratio=(0.3, 1 / 0.3), value=0)
    return [partial(erase_with_noise, eraser)]


def erase_with_noise(eraser: Callable[[Tensor], Tensor], image: Tensor) -> Tensor:
    """Fill a random box of an image (C, H, W) uint8 with normal noise. `eraser` sets the box of a tensor to 0."""
    is_kept = eraser(torch.ones(1, *image.shape[1:], dtype=torch.bool))
    return image if is_kept.all() else torch.where(is_kept, image, draw_imagenet_noise(image.shape).to(torch.uint8))


def apply_to_image_or_tensor(
    operation: Callable[[Image.Image], Image.Image], image: Image.Image | Tensor
) -> Image.Image | Tensor:
    """Apply an operation for PIL images to a PIL image, or to a tensor (C, H, W) uint8: 1 channel is grey, 3 are
    RGB."""
    if isinstance(image, Image.Image):
        return operation(image)
    return image_to_tensor(operation(tensor_to_pillow(image)))
