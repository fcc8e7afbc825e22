"""Images with any number of channels, or more than 8 bits, read by band: multispectral, thermal."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass
from typing import ClassVar, Literal

import numpy as np
from PIL import Image

from vitreous.data.decoding.spectral import Bands, detect_channel_form, read_bands, read_channels
from vitreous.data.modalities.base import Preprocess, RawSample, SampleForm
from vitreous.data.modalities.planar import StillPreprocess
from vitreous.errors import DataError

PEAK_VALUES = {"uint8": 255.0, "uint16": 65535.0, "int16": 32767.0, "float32": 1.0}


@dataclass(frozen=True)
class BandPreprocess(StillPreprocess):
    """Images whose channels are read unchanged from the file; `numbers` is their dtype; pixels without data are void.
    `mean` and `std` are in units of the dtype's maximum."""

    may_be_void: ClassVar[bool] = True

    _: KW_ONLY
    numbers: Literal["uint8", "uint16", "int16", "float32"] = "uint8"
    name: Literal["bands"] = "bands"

    @classmethod
    def read_form(cls, raw: RawSample, name: str, channels: int | None, requested: Mapping[str, str]) -> SampleForm:
        """Return the form of an image that is read by band. Raises DataError, also for other images."""
        assert isinstance(raw, (bytes, np.ndarray)), "a split returns bytes or pixels"
        if (form := find_band_form(raw, name, requested.get("numbers"))) is None:
            raise DataError(f"{name}: an image with colours", "omit --preprocess.name")
        return form

    @property
    def peak(self) -> float:
        """The maximum of the dtype, 1 for floats."""
        return PEAK_VALUES[self.numbers]

    @property
    def array_dtype(self) -> np.dtype:
        """uint8 for 8-bit values, else float32."""
        return np.dtype(np.uint8 if self.numbers == "uint8" else np.float32)

    @property
    def form_settings(self) -> dict[str, str]:
        """The dtype of the values."""
        return {"numbers": self.numbers}

    @property
    def value_type(self) -> str:
        """The dtype of the values in files."""
        return self.numbers

    @property
    def measures_moments(self) -> bool:
        """True: there are no published statistics for these channels."""
        return True

    def shares_moments(self, weights: Preprocess | None) -> bool:
        """Return whether weights were trained on the same number of channels and dtype."""
        return (
            isinstance(weights, BandPreprocess) and super().shares_moments(weights) and weights.numbers == self.numbers
        )

    def cast_pixels(self, pixels: np.ndarray) -> np.ndarray:
        """Convert pixels (B, H, W[, C]) of any dtype to float32 if `numbers` is; otherwise unchanged."""
        return pixels.astype(np.float32) if self.numbers == "float32" else pixels

    def decode(self, raw: RawSample, name: str | None = None) -> Bands:
        """Decode a file, its bytes, or pixels (H, W[, C]) to a Pillow image for each channel. Raises DataError."""
        pixels = np.asarray(raw) if isinstance(raw, Image.Image) else raw
        fill = [value * self.peak for value in self.mean] if len(self.mean) == self.channels else None
        return read_bands(pixels, self.channels, self.numbers, name, fill)  # type: ignore[arg-type]


def find_band_form(raw: bytes | np.ndarray, name: str, dtype_name: str | None = None) -> SampleForm | None:
    """Return the form of an image, a file's bytes or pixels (H, W[, C]), that must be read by band, or is requested to
    be, as `dtype_name`; None for images with colours. Raises DataError."""
    info = detect_channel_form(raw, name) if dtype_name is None else (len(read_channels(raw, name)), dtype_name)
    if info is None:
        return None
    count, dtype = info
    band = read_bands(raw, count, dtype, name)[0]
    size, moments = (band.height, band.width), BandPreprocess.default_moments(count)
    return SampleForm(size, count, BandPreprocess(size, count, *moments, numbers=dtype))  # type: ignore[arg-type]
