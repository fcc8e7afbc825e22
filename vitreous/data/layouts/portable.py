"""Splits that single data sets need: pixels behind a header of a few words (GTSRB), and pixels in HDF5 (PCAM)."""

from __future__ import annotations

import io
import os
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from PIL import Image

from vitreous.data.decoding.decode import read_regular, reason
from vitreous.data.decoding.gate import MAX_PIXELS
from vitreous.data.split import Files
from vitreous.errors import DataError


@dataclass(frozen=True)
class Portables(Files):
    """Files of 8-bit colours as plain pixels (PPM, P6), which is no format of photographs."""

    def raw(self, sample: int) -> np.ndarray:
        """(H, W, 3) uint8. Raises DataError for anything but such a file, whole."""
        try:
            with Image.open(io.BytesIO(read_regular(self.path(sample))), formats=("PPM",)) as image:
                if image.mode != "RGB" or image.width * image.height > MAX_PIXELS:
                    raise ValueError("other pixels, or too many")
                return np.asarray(image)
        except (OSError, SyntaxError, ValueError, Image.DecompressionBombError):
            raise DataError(f"{self.name(sample)}: not a whole PPM file of 8-bit colours", "fetch it again") from None


@dataclass(frozen=True, eq=False)
class Patches:
    """Images of one array (n, H, W, C) uint8 in an HDF5 file."""

    path: str
    key: str
    _open: dict[int, Any] = field(default_factory=dict)  # process -> its own handle: HDF5's do not survive a fork

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_open": {}}

    def pixels(self) -> Any:
        """The array, opened once in each process. Raises DataError."""
        import h5py

        if os.getpid() not in self._open:
            try:
                self._open[os.getpid()] = h5py.File(self.path, "r")[self.key]
            except (OSError, KeyError) as error:
                raise DataError(f"{self.path}: cannot be read as HDF5 ({reason(error)})", "fetch it again") from None
        return self._open[os.getpid()]

    def read(self, row: int) -> np.ndarray:
        """(H, W, C) uint8. Raises DataError where it cannot be read."""
        try:
            return np.asarray(self.pixels()[row])
        except (OSError, ValueError, IndexError) as error:
            raise DataError(f"{self.name(row)}: cannot be read ({reason(error)})", "fetch the file again") from None

    def name(self, row: int) -> str:
        return f"{self.path}, row {row}"

    def update(self, digest: Any, rows: np.ndarray) -> None:
        """Feed name, shape and rows (n,): the pixels of hundreds of thousands are not read for this."""
        digest.update(f"{os.path.basename(self.path)} {self.pixels().shape}\n".encode())
        digest.update(rows.astype(np.int64).tobytes())
