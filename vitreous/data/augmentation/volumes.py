"""Augment volumes and signals, and volumes together with their class maps.

In shapes, `*image` is the model's input size: (D, H, W) of a volume, (L,) of a signal.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from vitreous.data.annotations.target import IGNORE_INDEX, Target
from vitreous.data.decoding.regions import LazyImage
from vitreous.data.decoding.spectral import DecodedSample
from vitreous.data.keys import draw_uniform, fork_torch_rng
from vitreous.data.modalities.base import Preprocess
from vitreous.errors import UsageError

VOLUME_VIEW_DRAWS = 19  # random numbers per view
ROTATION_PLANES = ((1, 2), (0, 2), (0, 1))  # pairs of axes (D, H, W): the plane of each of the three rotations


@dataclass(frozen=True)
class VolumeViews:
    """Settings for augmenting a volume, with or without a class map, or a signal to one view: scaled, rotated, cropped,
    flipped, with changed intensities.

    Geometry: `scale` is the range of the factor of each axis, log-uniform. The volume is rotated about each axis by an
    angle in [-`rotate`, `rotate`] degrees. A crop of the model's input size is taken at a uniform random position, and
    moved along each axis by up to +- `translate` of its length. Outside the volume, values are its mirror image or 0
    (`border`), and classes are IGNORE. `flip` are the probabilities for the three axes. They are 0 by default, since
    scans share an orientation and positions are informative. The last one applies to a signal.

    Intensities, which `Preprocess` has standardised, are multiplied by a factor within 1 +- `contrast` and shifted
    within +- `shift`. Before that, gamma is changed: values are scaled to [0, 1] by the minimum and maximum of the
    view, raised to a power from 1 / (1 + `gamma`) to 1 + `gamma`, and scaled back. Finally, Gaussian noise with a std
    in [0, `noise`] is added. Raises UsageError for values out of range.
    """

    takes_regions: ClassVar[bool] = False

    scale: tuple[float, float] = (0.8, 1.25)
    rotate: float = 15.0
    flip: tuple[float, float, float] = (0.0, 0.0, 0.0)
    contrast: float = 0.2
    shift: float = 0.2
    gamma: float = 0.3
    noise: float = 0.1
    translate: float = 0.0
    border: Literal["reflection", "zeros"] = "reflection"
    name: Literal["volumes"] = "volumes"

    def __post_init__(self) -> None:
        if not 0 < self.scale[0] <= self.scale[1]:
            raise UsageError(f"invalid scale {self.scale}", "use factors above 0, the lower one first")
        if not all(0 <= p <= 1 for p in self.flip) or not 0 <= self.contrast < 1:
            problem = f"flip {self.flip} or contrast {self.contrast} is out of range"
            raise UsageError(problem, "use flip probabilities from 0 to 1, and a contrast of at least 0 and below 1")
        if min(self.rotate, self.shift, self.gamma, self.noise, self.translate) < 0:
            raise UsageError("rotate, shift, gamma, noise or translate is below 0", "use values of at least 0")

    def augment_scene(
        self, image: DecodedSample, target: Target, preprocess: Preprocess, sample_key: int
    ) -> dict[str, Tensor]:
        """Draw a random view of a volume (C, D, H, W) and of the class map of `target`, determined by `sample_key`:
        `images` (C, *image) float32 and `classes` (*image) int32, the class index of each voxel or IGNORE. Raises
        UsageError for an image that is not a volume."""
        if not isinstance(image, np.ndarray):
            raise UsageError("volume views need volumes", "omit --views.name")
        draws = draw_uniform(np.array([sample_key], np.uint64), VOLUME_VIEW_DRAWS)[0]
        positions = self.compute_sample_positions(image.shape[1:], preprocess.image, draws)
        flips = self.choose_flip_axes(draws)
        values = self.jitter_intensities(sample_volume_linear(image, positions, self.border), draws[12:16], sample_key)
        classes = torch.from_numpy(sample_classes_nearest(target.class_map(), positions))
        return {"images": values.flip(flips).contiguous(), "classes": classes.flip(flips).contiguous()}

    def choose_flip_axes(self, draws: np.ndarray) -> list[int]:
        """Return the negative indices of the axes along which a view is flipped. `draws` (n,) are
        `VOLUME_VIEW_DRAWS` random numbers in [0, 1)."""
        return [axis - 3 for axis in range(3) if draws[9 + axis] < self.flip[axis]]

    def compute_sample_positions(
        self, volume_size: tuple[int, ...], image: tuple[int, ...], draws: np.ndarray
    ) -> np.ndarray:
        """Compute where in the volume each voxel of a view is sampled: (3, *image) float64, coordinates in voxels.

        `volume_size` and `image` are the sizes (D, H, W) of volume and view. Coordinates are 0 at the outer face of the
        first voxel of an axis. `draws` (n,) are `VOLUME_VIEW_DRAWS` random numbers in [0, 1). For voxel i and rotation
        R:

            position = centre + R ((i + 1/2 - image / 2) / factor)
        """
        low, high = map(math.log, self.scale)
        factors = np.exp(low + (high - low) * draws[:3])
        crop_size = np.array(image) / factors
        centre = self.draw_centre(volume_size, crop_size, draws)
        axes = [(np.arange(n) + 0.5 - n / 2) / factor for n, factor in zip(image, factors, strict=True)]
        offsets = np.stack(np.meshgrid(*axes, indexing="ij"))
        for angle, (first_axis, second_axis) in zip(
            (2 * draws[6:9] - 1) * math.radians(self.rotate), ROTATION_PLANES, strict=True
        ):
            if angle:
                a, b = offsets[first_axis].copy(), offsets[second_axis].copy()
                offsets[first_axis] = math.cos(angle) * a - math.sin(angle) * b
                offsets[second_axis] = math.sin(angle) * a + math.cos(angle) * b
        return offsets + centre[:, None, None, None]

    def draw_centre(self, volume_size: tuple[int, ...], crop_size: np.ndarray, draws: np.ndarray) -> np.ndarray:
        """Draw the centre of a crop of `crop_size` (3,), in voxels, for a volume of the size (D, H, W): (3,)
        float64. `draws` (n,) are `VOLUME_VIEW_DRAWS` random numbers in [0, 1)."""
        margins = np.array(volume_size) - crop_size
        unshifted = np.minimum(0.0, margins) + np.abs(margins) * draws[3:6] + crop_size / 2
        return unshifted + self.translate * crop_size * (2 * draws[16:] - 1)

    def jitter_intensities(self, values: Tensor, draws: np.ndarray, sample_key: int) -> Tensor:
        """Change gamma, contrast and level of a view (C, *image) float32, and add noise. `draws` (4,) are random
        numbers in [0, 1); the noise is drawn from `sample_key`."""
        signed = 2 * draws - 1
        low, high = values.min(), values.max()
        if self.gamma and high > low:
            power = math.exp(math.log(1 + self.gamma) * signed[2])
            values = ((values - low) / (high - low)).pow(power) * (high - low) + low
        values = values * (1 + self.contrast * signed[0]) + self.shift * signed[1]
        if self.noise:
            with fork_torch_rng(sample_key):
                values = values + torch.randn(values.shape) * (self.noise * draws[3])
        return values

    def collate(self, scenes: list[dict[str, Tensor]], preprocess: Preprocess) -> dict[str, Tensor]:
        """Stack B results of `augment_scene` to a batch: `images` (B, C, *image) and `classes` (B, *image) int32. B may
        be 0."""
        if scenes:
            return {name: torch.stack([scene[name] for scene in scenes]) for name in scenes[0]}
        images = torch.empty(0, preprocess.channels, *preprocess.image)
        return {"images": images, "classes": torch.empty(0, *preprocess.image, dtype=torch.int32)}

    def augment_image(self, image: DecodedSample | LazyImage, preprocess: Preprocess, sample_key: int) -> Tensor:
        """Draw a random view of a volume (C, D, H, W) or a signal (C, L) of any size without annotations: (C, *image)
        float32. Raises UsageError for other images."""
        if not isinstance(image, np.ndarray):
            raise UsageError("volume views need volumes or signals", "omit --views.name")
        return self.draw_view(image, preprocess.image, sample_key)

    def draw_view(self, values: np.ndarray, size: tuple[int, ...], sample_key: int) -> Tensor:
        """Draw a view of the size `size` of a volume (C, D, H, W) or a signal (C, L): (C, *size) float32. Without scale
        and rotation, it is cropped at integer voxels, without interpolation."""
        leading_axes = (1,) * (3 - len(size))  # a signal is processed as a volume (C, 1, 1, L)
        volume, image = values.reshape(len(values), *leading_axes, *values.shape[1:]), leading_axes + size
        draws = draw_uniform(np.array([sample_key], np.uint64), VOLUME_VIEW_DRAWS)[0]
        if self.scale == (1.0, 1.0) and not self.rotate:
            crop_size = np.array(image)
            start = np.floor(self.draw_centre(volume.shape[1:], crop_size, draws) - crop_size / 2 + 0.5)
            view = crop_volume(volume, start.astype(np.int64), image, self.border)
        else:
            view = sample_volume_linear(
                volume, self.compute_sample_positions(volume.shape[1:], image, draws), self.border
            )
        view = self.jitter_intensities(view.flip(self.choose_flip_axes(draws)), draws[12:16], sample_key)
        return view.reshape(len(view), *size).contiguous()

    def augment_batch(self, pixels: Tensor, keys: np.ndarray) -> Tensor:
        """Draw a random view of each sample of a batch (B, C, *image), with (B,) keys: (B, C, *image) float32."""
        size = tuple(pixels.shape[2:])
        views = [self.draw_view(image.numpy(), size, key) for image, key in zip(pixels, keys.tolist(), strict=True)]
        return torch.stack(views) if views else pixels

    def unpack_batch(self, entries: Tensor, preprocess: Preprocess) -> dict[str, Tensor]:
        """Return the batch {"images": entries}, of shape (B, C, *image)."""
        return {"images": entries}


def crop_volume(volume: np.ndarray, start: np.ndarray, image: tuple[int, ...], border: str) -> Tensor:
    """Crop a volume (C, D, H, W) float32 to (C, *image), beginning at voxel `start` (3,) int64, which may be outside.
    Outside the volume, values are its mirror image, or 0 if `border` is `zeros`."""
    for axis, (axis_start, crop_length) in enumerate(zip(start.tolist(), image, strict=True), 1):
        length = volume.shape[axis]
        indices = np.arange(axis_start, axis_start + crop_length)
        if border == "reflection":
            reflected = indices % (2 * length)
            volume = volume.take(np.minimum(reflected, 2 * length - 1 - reflected), axis)
            continue
        volume = volume.take(np.clip(indices, 0, length - 1), axis)
        outside_index = (slice(None),) * axis + ((indices < 0) | (indices >= length),)
        volume[outside_index] = 0
    return torch.from_numpy(np.ascontiguousarray(volume))


def sample_volume_linear(volume: np.ndarray, positions: np.ndarray, border: str = "reflection") -> Tensor:
    """Sample a volume (C, D, H, W) float32 at `positions` (3, *image), in voxels, by linear interpolation: (C, *image)
    float32. Outside the volume, values are its mirror image, or 0 if `border` is `zeros`."""
    lengths = np.array(volume.shape[1:], np.float64)[:, None, None, None]
    grid = torch.from_numpy(np.moveaxis(2 * positions / lengths - 1, 0, -1)[..., ::-1].astype(np.float32))
    source = torch.from_numpy(volume)[None]
    return F.grid_sample(source, grid[None], "bilinear", border, align_corners=False)[0]


def sample_classes_nearest(classes: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """Sample a class map (D, H, W) int32 at `positions` (3, *image), in voxels, by nearest neighbour: (*image) int32.
    Outside the volume, the class is IGNORE."""
    voxels = np.floor(positions).astype(np.int64)
    lengths = np.array(classes.shape)[:, None, None, None]
    is_inside = ((voxels >= 0) & (voxels < lengths)).all(0)
    nearest_classes = classes[tuple(np.clip(voxels, 0, lengths - 1))]
    return np.where(is_inside, nearest_classes, IGNORE_INDEX).astype(np.int32)
