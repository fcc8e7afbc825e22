"""Volumes: arrays of three axes, such as scans; what `signals.py` builds on."""

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
    """Volumes (C, D, H, W) float32, of values of any type.

    With `standardise` = `each` every channel of every one is brought to mean 0 and standard deviation 1 by itself
    (`decoding.volumes.standardised`); with `data` values stay, and `mean` and `std` are those of the training data.
    `fit` = `crop`: one of another size than `image` is cut or filled up with 0 around its middle; `squash`: it is
    scaled to it.
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
        """The classes of volumes in a folder that holds such alone, or, if `is_asked`, beside others; None for any
        other folder. Raises DataError as `layouts.volumes.arrays`, and where it `is_asked` and has no such files."""
        if is_asked and not detect_folder_axes(folder, cls.axes):
            raise no_arrays_error(str(folder), cls.axes)
        return (
            open_array_folder(folder, split_seed, cls.axes)
            if is_asked or detect_folder_axes(folder) == cls.axes
            else None
        )

    @classmethod
    def read_form(cls, raw: RawSample, name: str, channels: int | None, asked: Mapping[str, str]) -> SampleForm:
        """Channels and sides, from the header. Raises DataError."""
        count, size = read_volume_form(raw, name, cls.axes)  # type: ignore[arg-type]
        return SampleForm(size, count, cls(size, count, *cls.default_moments(count)))

    @classmethod
    def default_moments(cls, channels: int) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Mean 0 and standard deviation 1."""
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
        """Whether values stay as they are in the file."""
        return self.standardise == "data"

    def shares_moments(self, weights: Preprocess | None) -> bool:
        """Whether weights were trained on as many channels, standardised alike."""
        same = isinstance(weights, VolumePreprocess) and weights.standardise == self.standardise
        return same and super().shares_moments(weights)

    def with_moments(self, weights: Preprocess) -> VolumePreprocess:
        """The same with the `mean` and `std` of weights, and their rule of standardisation."""
        own = super().with_moments(weights)
        return replace(own, standardise=weights.standardise) if isinstance(weights, VolumePreprocess) else own

    def decode(self, raw: RawSample, name: str | None = None) -> np.ndarray:
        """A file, its bytes, or values (*sides[, C]) -> (C, *sides) float32. Raises DataError."""
        values: Any = np.asarray(raw) if isinstance(raw, Image.Image) else raw
        return read_volume(values, self.channels, name, self.axes, self.standardise == "each")

    def open_view(self, raw: RawSample, name: str, exact: bool, as_region: bool) -> np.ndarray:
        """What augmentation draws a view from: the decoded sample, scaled to `image` where `fit` is `squash`."""
        decoded = self.decode(raw, name)
        return self.to_array(decoded) if self.fit == "squash" else decoded

    def to_array(self, decoded: Any) -> np.ndarray:
        """(C, *sides) float32 of any size -> (C, *image)."""
        return (resize_linear if self.fit == "squash" else crop_or_pad)(decoded, self.image)


def crop_or_pad(volume: np.ndarray, size: tuple[int, ...]) -> np.ndarray:
    """(C, *image) -> (C, *size): the middle of a volume, or the volume in the middle of zeros, along each axis."""
    out, to, of = np.zeros((len(volume), *size), volume.dtype), [slice(None)], [slice(None)]
    for wanted, own in zip(size, volume.shape[1:], strict=True):
        both = min(wanted, own)
        to.append(slice((wanted - both) // 2, (wanted - both) // 2 + both))
        of.append(slice((own - both) // 2, (own - both) // 2 + both))
    out[tuple(to)] = volume[tuple(of)]
    return out


def resize_linear(volume: np.ndarray, size: tuple[int, ...]) -> np.ndarray:
    """(C, *image) float32 -> (C, *size), linear along each axis, and averaged over as many voxels as become one.

    out[i] = sum_j w_ij in[j] / sum_j w_ij,  w_ij = max(0, 1 - |j + 1/2 - (i + 1/2) r| / max(1, r)),  r = own / size
    """
    for axis, wanted in enumerate(size, 1):
        ratio = volume.shape[axis] / wanted
        if ratio != 1:
            places, voxels = (np.arange(wanted) + 0.5) * ratio, np.arange(volume.shape[axis]) + 0.5
            weights = np.maximum(0, 1 - np.abs(voxels - places[:, None]) / max(1, ratio))
            weights = (weights / weights.sum(1, keepdims=True)).astype(np.float32)
            volume = np.moveaxis(np.tensordot(weights, volume, (1, axis)), 0, axis)
    return np.ascontiguousarray(volume)
