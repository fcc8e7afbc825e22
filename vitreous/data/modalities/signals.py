"""The modality of signals: one-dimensional arrays, such as electrocardiograms."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import ClassVar, Literal

from vitreous.data.layouts.volumes import SUFFIXES_BY_AXES
from vitreous.data.modalities.volumes import VolumePreprocess


@dataclass(frozen=True)
class SignalPreprocess(VolumePreprocess):
    """Preprocessing of signals (C, L) float32, which are read, standardised, cropped and resized like volumes."""

    noun: ClassVar[str] = "signals"
    axes: ClassVar[int] = 1
    axis_names: ClassVar[str] = "L"
    unit: ClassVar[str] = "numbers"
    suffixes: ClassVar[frozenset[str]] = SUFFIXES_BY_AXES[1]
    array_axes: ClassVar[int | None] = 1

    _: KW_ONLY
    name: Literal["signals"] = "signals"
