"""The modality of volumes: three-dimensional arrays, such as medical scans. `signals.py` derives from it."""

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
    """Preprocessing of volumes (C, D, H, W) float32, from files of any numeric dtype.

    `standardise`: `each` scales each channel of each volume to mean 0 and std 1
    (`decoding.volumes.standardise_channels`); `data` keeps the values, and `mean` and `std` are measured on the
    training data. `fit`: `crop` centre-crops or zero-pads volumes whose size is not `image`; `squash` resizes them.
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
        """Open a folder of the layout CLASS/FILE or SPLIT/CLASS/FILE with volumes.

        Returns None if the folder has other files too. With `is_asked`, the user has requested this modality: other
        files are ignored, and missing volumes raise DataError. Raises DataError for an invalid layout, as
        `layouts.volumes.open_array_folder`.
        """
        if is_asked and not detect_folder_axes(folder, cls.axes):
            raise no_arrays_error(str(folder), cls.axes)
        return (
            open_array_folder(folder, split_seed, cls.axes)
            if is_asked or detect_folder_axes(folder) == cls.axes
            else None
        )

    @classmethod
    def read_form(cls, raw: RawSample, name: str, channels: int | None, requested: Mapping[str, str]) -> SampleForm:
        """Read channels and size from the header of a file. Raises DataError for an unreadable file."""
        count, size = read_volume_form(raw, name, cls.axes)  # type: ignore[arg-type]
        return SampleForm(size, count, cls(size, count, *cls.default_moments(count)))

    @classmethod
    def default_moments(cls, channels: int) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Return a mean of 0 and a std of 1 for each channel."""
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
        """Whether `standardise` is `data`, so that `mean` and `std` are measured on the training data."""
        return self.standardise == "data"

    def shares_moments(self, weights: Preprocess | None) -> bool:
        """Return whether `weights`, the preprocessing of pre-trained weights, has the same channels and
        standardisation."""
        has_same_standardisation = isinstance(weights, VolumePreprocess) and weights.standardise == self.standardise
        return has_same_standardisation and super().shares_moments(weights)

    def with_moments(self, weights: Preprocess) -> VolumePreprocess:
        """Return this preprocessing with `mean`, `std` and `standardise` from `weights`, the preprocessing of
        pre-trained weights."""
        preprocess = super().with_moments(weights)
        return (
            replace(preprocess, standardise=weights.standardise)
            if isinstance(weights, VolumePreprocess)
            else preprocess
        )

    def decode(self, raw: RawSample, name: str | None = None) -> np.ndarray:
        """Decode a file, its bytes, or values (*sizes[, C]) to (C, *sizes) float32. Raises DataError for an unreadable
        file."""
        values: Any = np.asarray(raw) if isinstance(raw, Image.Image) else raw
        return read_volume(values, self.channels, name, self.axes, self.standardise == "each")

    def open_view(self, raw: RawSample, name: str, exact: bool, as_region: bool) -> np.ndarray:
        """Decode a sample for augmentation, (C, *sizes) float32; if `fit` is `squash`, resize it to `image` first."""
        decoded = self.decode(raw, name)
        return self.to_array(decoded) if self.fit == "squash" else decoded

    def to_array(self, decoded: Any) -> np.ndarray:
        """Crop and pad, or resize, a sample (C, *sizes) float32 to (C, *image), as `fit` selects."""
        return (resize_linear if self.fit == "squash" else crop_or_pad)(decoded, self.image)


def crop_or_pad(volume: np.ndarray, size: tuple[int, ...]) -> np.ndarray:
    """Centre-crop or zero-pad each axis of a volume: (C, *sizes) -> (C, *size)."""
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
    """Resize a volume (C, *sizes) float32 to (C, *size), linearly along each axis, with antialiasing.

    out[i] = sum_j w_ij in[j] / sum_j w_ij,  w_ij = max(0, 1 - |j + 1/2 - (i + 1/2) r| / max(1, r)),  r = sizes / size
    """
    for axis, target_length in enumerate(size, 1):
        ratio = volume.shape[axis] / target_length
        if ratio != 1:
            positions, voxels = (np.arange(target_length) + 0.5) * ratio, np.arange(volume.shape[axis]) + 0.5
            weights = np.maximum(0, 1 - np.abs(voxels - positions[:, None]) / max(1, ratio))
            weights = (weights / weights.sum(1, keepdims=True)).astype(np.float32)
            volume = np.moveaxis(np.tensordot(weights, volume, (1, axis)), 0, axis)
    return np.ascontiguousarray(volume)
