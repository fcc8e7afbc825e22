"""Volumes: three-dimensional arrays, such as scans; the base of `signals.py`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
from PIL import Image

from vitreous.data.decoding.volumes import read_volume, read_volume_form
from vitreous.data.layouts.volumes import SUFFIXES_BY_AXES, detect_folder_axes, no_arrays_error, open_array_folder
from vitreous.data.modalities.base import Preprocess, RawSample, SampleForm
from vitreous.data.split import Data


@dataclass(frozen=True)
class VolumePreprocess(Preprocess):
    """Volumes (C, D, H, W) float32, from values of any type.

    With `standardise` = `each`, every channel of every volume is standardised to mean 0 and std 1 separately
    (`decoding.volumes.standardise_channels`); with `data`, values are unchanged, and `mean` and `std` are those of the
    training data. `fit` = `crop`: a volume of another size than `image` is centre-cropped or zero-padded; `squash`: it
    is scaled.
    """

    noun: ClassVar[str] = "volumes"
    axes: ClassVar[int] = 3
    axis_names: ClassVar[str] = "D, H, W"
    unit: ClassVar[str] = "voxels"
    suffixes: ClassVar[frozenset[str]] = SUFFIXES_BY_AXES[3]
    array_axes: ClassVar[int | None] = 3

    _: KW_ONLY
    fit: Literal["crop", "squash"] = "crop"
    standardise: Literal["each", "data"] = "each"
    name: Literal["volumes"] = "volumes"

    @classmethod
    def open_folder(cls, folder: Path, split_seed: int, is_asked: bool = False) -> Data | None:
        """Open the classes of volumes in a folder with only volumes or, if `is_asked`, with other files too; None for
        any other folder. Raises DataError as `layouts.volumes.open_array_folder`, and if `is_asked` but there are no
        such files."""
        if is_asked and not detect_folder_axes(folder, cls.axes):
            raise no_arrays_error(str(folder), cls.axes)
        return (
            open_array_folder(folder, split_seed, cls.axes)
            if is_asked or detect_folder_axes(folder) == cls.axes
            else None
        )

    @classmethod
    def read_form(cls, raw: RawSample, name: str, channels: int | None, requested: Mapping[str, str]) -> SampleForm:
        """Return channels and size, from the header. Raises DataError."""
        count, size = read_volume_form(raw, name, cls.axes)  # type: ignore[arg-type]
        return SampleForm(size, count, cls(size, count, *cls.default_moments(count)))

    @classmethod
    def default_moments(cls, channels: int) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Return mean 0 and std 1."""
        return (0.0,) * channels, (1.0,) * channels

    @property
    def summary(self) -> str:
        """`crop` or `squash`."""
        return self.fit

    @property
    def is_standardised(self) -> bool:
        """Whether `standardise` is `each`."""
        return self.standardise == "each"

    @property
    def measures_moments(self) -> bool:
        """Whether file values are used unchanged."""
        return self.standardise == "data"

    def shares_moments(self, weights: Preprocess | None) -> bool:
        """Return whether weights were trained with the same number of channels and standardisation."""
        has_same_standardisation = isinstance(weights, VolumePreprocess) and weights.standardise == self.standardise
        return has_same_standardisation and super().shares_moments(weights)

    def with_moments(self, weights: Preprocess) -> VolumePreprocess:
        """Return the preprocessing with the `mean`, `std` and standardisation of weights."""
        preprocess = super().with_moments(weights)
        return (
            replace(preprocess, standardise=weights.standardise)
            if isinstance(weights, VolumePreprocess)
            else preprocess
        )

    def decode(self, raw: RawSample, name: str | None = None) -> np.ndarray:
        """Decode a file, its bytes, or values (*sizes[, C]) to (C, *sizes) float32. Raises DataError."""
        values: Any = np.asarray(raw) if isinstance(raw, Image.Image) else raw
        return read_volume(values, self.channels, name, self.axes, self.standardise == "each")

    def open_view(self, raw: RawSample, name: str, exact: bool, as_region: bool) -> np.ndarray:
        """Open a sample for augmentation: decoded, and scaled to `image` if `fit` is `squash`."""
        decoded = self.decode(raw, name)
        return self.to_array(decoded) if self.fit == "squash" else decoded

    def to_array(self, decoded: Any) -> np.ndarray:
        """Fit (C, *sizes) float32 of any size to (C, *image)."""
        return (resize_linear if self.fit == "squash" else crop_or_pad)(decoded, self.image)


def crop_or_pad(volume: np.ndarray, size: tuple[int, ...]) -> np.ndarray:
    """Centre-crop or zero-pad each axis: (C, *image) -> (C, *size)."""
    result, target_slices, source_slices = np.zeros((len(volume), *size), volume.dtype), [slice(None)], [slice(None)]
    for target_length, source_length in zip(size, volume.shape[1:], strict=True):
        common_length = min(target_length, source_length)
        target_slices.append(
            slice((target_length - common_length) // 2, (target_length - common_length) // 2 + common_length)
        )
        source_slices.append(
            slice((source_length - common_length) // 2, (source_length - common_length) // 2 + common_length)
        )
    result[tuple(target_slices)] = volume[tuple(source_slices)]
    return result


def resize_linear(volume: np.ndarray, size: tuple[int, ...]) -> np.ndarray:
    """Resize (C, *image) float32 to (C, *size), linearly along each axis, with antialiasing.

    out[i] = sum_j w_ij in[j] / sum_j w_ij,  w_ij = max(0, 1 - |j + 1/2 - (i + 1/2) r| / max(1, r)),  r = own / size
    """
    for axis, target_length in enumerate(size, 1):
        ratio = volume.shape[axis] / target_length
        if ratio != 1:
            positions, voxels = (np.arange(target_length) + 0.5) * ratio, np.arange(volume.shape[axis]) + 0.5
            weights = np.maximum(0, 1 - np.abs(voxels - positions[:, None]) / max(1, ratio))
            weights = (weights / weights.sum(1, keepdims=True)).astype(np.float32)
            volume = np.moveaxis(np.tensordot(weights, volume, (1, axis)), 0, axis)
    return np.ascontiguousarray(volume)
