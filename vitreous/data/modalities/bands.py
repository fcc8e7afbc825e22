"""The modality of images with any number of channels, or more than 8 bits per value, such as multispectral and thermal
images.

Each channel is decoded to a PIL image of one band.
"""

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

#: dtype of the files -> `Preprocess.peak`
PEAK_VALUES = {"uint8": 255.0, "uint16": 65535.0, "int16": 32767.0, "float32": 1.0}


@dataclass(frozen=True)
class BandPreprocess(StillPreprocess):
    """Preprocessing of images whose channels are read unchanged from the file.

    `numbers` is the dtype of the files. Void pixels, which have no data, get the channel's mean. `mean` and `std` are
    shares of the dtype's maximum.
    """

    may_be_void: ClassVar[bool] = True

    _: KW_ONLY
    numbers: Literal["uint8", "uint16", "int16", "float32"] = "uint8"
    name: Literal["bands"] = "bands"

    @classmethod
    def read_form(cls, raw: RawSample, name: str, channels: int | None, requested: Mapping[str, str]) -> SampleForm:
        """Read the form of an image that is read by band. Raises DataError for an unreadable file, and for an 8-bit
        colour image."""
        assert isinstance(raw, (bytes, np.ndarray)), "a split returns bytes or pixels"
        if (form := find_band_form(raw, name, requested.get("numbers"))) is None:
            raise DataError(f"{name}: a colour image is not read by band", "omit --preprocess.name")
        return form

    @property
    def peak(self) -> float:
        """The maximum value of the files' dtype; 1 for floats."""
        return PEAK_VALUES[self.numbers]

    @property
    def array_dtype(self) -> np.dtype:
        """uint8 for 8-bit values, else float32."""
        return np.dtype(np.uint8 if self.numbers == "uint8" else np.float32)

    @property
    def form_settings(self) -> dict[str, str]:
        """The setting `numbers`, which decides how a file is read."""
        return {"numbers": self.numbers}

    @property
    def value_type(self) -> str:
        """The dtype of the values in files."""
        return self.numbers

    @property
    def measures_moments(self) -> bool:
        """True, since there are no published statistics for these channels."""
        return True

    def shares_moments(self, weights: Preprocess | None) -> bool:
        """Return whether `weights`, the preprocessing of pre-trained weights, has the same channels and dtype."""
        return (
            isinstance(weights, BandPreprocess) and super().shares_moments(weights) and weights.numbers == self.numbers
        )

    def cast_pixels(self, pixels: np.ndarray) -> np.ndarray:
        """Convert pixels (B, H, W[, C]) of any dtype to float32 if `numbers` is `float32`; otherwise return them
        unchanged, since a conversion to integers could lose information."""
        return pixels.astype(np.float32) if self.numbers == "float32" else pixels

    def decode(self, raw: RawSample, name: str | None = None) -> Bands:
        """Decode a file, its bytes, or pixels (H, W[, C]) to one PIL image per channel. Raises DataError for an
        unreadable file or another dtype or number of channels."""
        pixels = np.asarray(raw) if isinstance(raw, Image.Image) else raw
        fill = [value * self.peak for value in self.mean] if len(self.mean) == self.channels else None
        return read_bands(pixels, self.channels, self.numbers, name, fill)  # type: ignore[arg-type]


def find_band_form(raw: bytes | np.ndarray, name: str, dtype_name: str | None = None) -> SampleForm | None:
    """Read the form of an image, a file's bytes or pixels (H, W[, C]), that is read by band; None for 8-bit colour
    images.

    If `dtype_name` is passed, the image must have this dtype and is read by band even if it is a colour image. Raises
    DataError for an unreadable file.
    """
    channel_form = detect_channel_form(raw, name) if dtype_name is None else (len(read_channels(raw, name)), dtype_name)
    if channel_form is None:
        return None
    count, dtype = channel_form
    band = read_bands(raw, count, dtype, name)[0]
    size, moments = (band.height, band.width), BandPreprocess.default_moments(count)
    return SampleForm(size, count, BandPreprocess(size, count, *moments, numbers=dtype))  # type: ignore[arg-type]
