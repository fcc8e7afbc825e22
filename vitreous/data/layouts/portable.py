"""Splits that single data sets need: pixels behind a header of a few words (GTSRB), and pixels in HDF5 (PCAM)."""

from __future__ import annotations

import io
import os
from dataclasses import dataclass, field, replace
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

    def raw(self, sample: int) -> np.ndarray:  # type: ignore[override]
        """(H, W, 3) uint8. Raises DataError for anything but such a file, whole."""
        try:
            with Image.open(io.BytesIO(read_regular(self.paths[sample])), formats=("PPM",)) as image:
                if image.mode != "RGB" or image.width * image.height > MAX_PIXELS:
                    raise ValueError("other pixels, or too many")
                return np.asarray(image)
        except (OSError, SyntaxError, ValueError, Image.DecompressionBombError):
            raise DataError(f"{self.name(sample)}: not a whole PPM file of 8-bit colours", "fetch it again") from None

    def take(self, rows: np.ndarray, labels: np.ndarray | None = None) -> Portables:
        files = super().take(rows, labels)
        return Portables(files.paths, files.labels)


@dataclass(frozen=True, eq=False)
class Patches:
    """Pictures of one array (n, H, W, C) uint8 in an HDF5 file. `rows`, (n,) int64: which of them."""

    path: str
    key: str
    labels: np.ndarray
    rows: np.ndarray
    _open: dict[int, Any] = field(default_factory=dict)  # process -> its own handle: HDF5's do not survive a fork

    def __len__(self) -> int:
        return len(self.rows)

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

    def raw(self, sample: int) -> np.ndarray:
        """(H, W, C) uint8. Raises DataError where it cannot be read."""
        try:
            return np.asarray(self.pixels()[int(self.rows[sample])])
        except (OSError, ValueError, IndexError) as error:
            raise DataError(f"{self.name(sample)}: cannot be read ({reason(error)})", "fetch the file again") from None

    def name(self, sample: int) -> str:
        return f"{self.path}, row {self.rows[sample]}"

    def take(self, rows: np.ndarray, labels: np.ndarray | None = None) -> Patches:
        return replace(self, rows=self.rows[rows], labels=self.labels[rows] if labels is None else labels, _open={})

    def update(self, digest: Any) -> None:
        """Name, shape and rows: the pixels of hundreds of thousands are not read for this."""
        digest.update(
            f"{os.path.basename(self.path)} {self.pixels().shape}\n".encode() + self.rows.astype(np.int64).tobytes()
        )
