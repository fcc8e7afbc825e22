"""Augment volumes and signals, and volumes together with their class maps."""

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
ROTATION_PLANES = ((1, 2), (0, 2), (0, 1))  # the axes of the plane in which each angle rotates


@dataclass(frozen=True)
class VolumeViews:
    """One view of a volume and of its class map, or of a signal: scaled, rotated, cropped, flipped, with changed
    intensities.

    `scale`: the range of the factor of each axis, log-uniform. `rotate`: degrees; the volume is rotated about each axis
    by an angle from [-rotate, rotate]. Then a crop of the model's size is taken at a uniform random position, shifted
    by up to `translate` of each length. Outside the volume, `border` selects its mirror image or 0; the class map is
    IGNORE. `flip`: the probability for each axis, 0 by default since scans share an orientation and positions are
    informative; a signal is reversed by the last one. Values, standardised by `Preprocess`, are multiplied by a factor
    within 1 +- `contrast`, shifted within +- `shift`, and raised to a power within 1 / (1 + `gamma`) and 1 + `gamma`
    between the minimum and maximum of the view; Gaussian noise has a std from [0, `noise`]. Raises UsageError for
    values out of range.
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
            raise UsageError("flip must be a probability for each axis, and contrast from 0 to below 1")
        if min(self.rotate, self.shift, self.gamma, self.noise, self.translate) < 0:
            raise UsageError("rotate, shift, gamma, noise and translate must be at least 0")

    def augment_scene(
        self, image: DecodedSample, target: Target, preprocess: Preprocess, sample_key: int
    ) -> dict[str, Tensor]:
        """Draw a view: `images` (C, *image) float32 and `classes` (*image) int32, the class of each voxel or IGNORE.
        `target` has a class map. Raises UsageError for an image that is not a volume."""
        if not isinstance(image, np.ndarray):
            raise UsageError("volume views need volumes", "omit --views.name")
        draws = draw_uniform(np.array([sample_key], np.uint64), VOLUME_VIEW_DRAWS)[0]
        positions = self.compute_sample_positions(image.shape[1:], preprocess.image, draws)
        flips = self.choose_flip_axes(draws)
        values = self.jitter_intensities(sample_volume_linear(image, positions, self.border), draws[12:16], sample_key)
        classes = torch.from_numpy(sample_classes_nearest(target.class_map(), positions))
        return {"images": values.flip(flips).contiguous(), "classes": classes.flip(flips).contiguous()}

    def choose_flip_axes(self, draws: np.ndarray) -> list[int]:
        """Return the axes, from the last, along which a view is mirrored, from (19,) random
        numbers."""
        return [axis - 3 for axis in range(3) if draws[9 + axis] < self.flip[axis]]

    def compute_sample_positions(
        self, volume_size: tuple[int, ...], image: tuple[int, ...], draws: np.ndarray
    ) -> np.ndarray:
        """Return (3, *image) float64: for each voxel of a view of `image`, its position in a volume of (D, H, W)
        `volume_size`, in voxels; the volume extends from 0 to its lengths. `draws`: `VOLUME_VIEW_DRAWS` numbers in [0,
        1).

            place of voxel i = centre + R ((i + 1/2 - image / 2) / factor), for each axis
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
        """Return (3,) float64, the centre of a crop of `crop_size` (3,) in a volume of (D, H, W) `volume_size`."""
        margins = np.array(volume_size) - crop_size
        unshifted = np.minimum(0.0, margins) + np.abs(margins) * draws[3:6] + crop_size / 2
        return unshifted + self.translate * crop_size * (2 * draws[16:] - 1)

    def jitter_intensities(self, values: Tensor, draws: np.ndarray, sample_key: int) -> Tensor:
        """Jitter contrast, level and gamma of (C, *image) float32, and add noise; `draws` are four numbers in [0,
        1)."""
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
        """Stack B views of `augment_scene`: `images` (B, C, *image) and `classes` (B, *image) int32; B may be 0."""
        if scenes:
            return {name: torch.stack([scene[name] for scene in scenes]) for name in scenes[0]}
        images = torch.empty(0, preprocess.channels, *preprocess.image)
        return {"images": images, "classes": torch.empty(0, *preprocess.image, dtype=torch.int32)}

    def augment_image(self, image: DecodedSample | LazyImage, preprocess: Preprocess, sample_key: int) -> Tensor:
        """Draw a view of a volume (C, D, H, W) or a signal (C, L) without annotations, of any size: (C, *image)
        float32. Without scale and rotation, it is cropped at integer voxels. Raises UsageError for other images."""
        if not isinstance(image, np.ndarray):
            raise UsageError("volume views need volumes or signals", "omit --views.name")
        return self.draw_view(image, preprocess.image, sample_key)

    def draw_view(self, values: np.ndarray, size: tuple[int, ...], sample_key: int) -> Tensor:
        """Draw a view of a volume (C, D, H, W) or a signal (C, L): (C, *size) float32."""
        lift = (1,) * (3 - len(size))  # a signal is a volume with one row
        volume, image = values.reshape(len(values), *lift, *values.shape[1:]), lift + size
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
        """Draw a view of each of (B, C, *image) images by (B,) keys."""
        size = tuple(pixels.shape[2:])
        views = [self.draw_view(image.numpy(), size, key) for image, key in zip(pixels, keys.tolist(), strict=True)]
        return torch.stack(views) if views else pixels

    def unpack_batch(self, entries: Tensor, preprocess: Preprocess) -> dict[str, Tensor]:
        """Return (B, C, *image) as `images`."""
        return {"images": entries}


def crop_volume(volume: np.ndarray, start: np.ndarray, image: tuple[int, ...], border: str) -> Tensor:
    """Crop (C, D, H, W) float32 to (C, *image) from voxel `start` (3,); outside the volume is its mirror image, or 0 if
    `border` is `zeros`."""
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
    """Sample (C, D, H, W) float32 at positions (3, *image) by linear interpolation -> (C, *image) float32; mirrored
    outside, or 0 if `border` is `zeros`."""
    lengths = np.array(volume.shape[1:], np.float64)[:, None, None, None]
    grid = torch.from_numpy(np.moveaxis(2 * positions / lengths - 1, 0, -1)[..., ::-1].astype(np.float32))
    source = torch.from_numpy(volume)[None]
    return F.grid_sample(source, grid[None], "bilinear", border, align_corners=False)[0]


def sample_classes_nearest(classes: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """Sample a (D, H, W) int32 class map at positions (3, *image) by nearest neighbour -> (*image) int32, IGNORE
    outside."""
    voxels = np.floor(positions).astype(np.int64)
    lengths = np.array(classes.shape)[:, None, None, None]
    is_inside = ((voxels >= 0) & (voxels < lengths)).all(0)
    picked = classes[tuple(np.clip(voxels, 0, lengths - 1))]
    return np.where(is_inside, picked, IGNORE_INDEX).astype(np.int32)
