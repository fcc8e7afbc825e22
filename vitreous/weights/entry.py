"""Shared code of the weights file readers: the description of a tensor, opening a file, and rejecting an invalid
file."""

from __future__ import annotations

import math
import os
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, NoReturn

from vitreous.errors import WeightsError

MAX_TENSORS = 5_000  # tensors of a file; the largest models have 2,000, and checking more takes longer than 0.1 s
MAX_TENSOR_NAME_LENGTH = 512  # characters


#: torch's name of a dtype -> bytes per element; supported dtypes of weights
DTYPE_BYTES = {
    "float64": 8,
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "int64": 8,
    "int32": 4,
    "int16": 2,
    "int8": 1,
    "uint8": 1,
    "bool": 1,
}
FLOATING_DTYPES = ("float32", "float16", "bfloat16", "float64")
DOWNLOAD_AGAIN_HINT = "download or save it again"
SAVE_AGAIN_HINT = "save it again"
SAVE_WITHOUT_OPTIMIZER_HINT = "save the model without its optimizer"
SUPPORTED_FILES_HINT = "supported files are safetensors, npz and PyTorch (.pt, .pth, .bin)"


class UnsupportedModelError(WeightsError):
    """Weights of a model that this package does not implement; timm or transformers may build it."""


@dataclass(frozen=True)
class TensorInfo:
    """Shape and dtype of a tensor in a file, from the header; `dtype` is torch's name, such as "bfloat16"."""

    shape: tuple[int, ...]
    dtype: str

    @property
    def elements(self) -> int:
        """Return the number of elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Return the size in bytes."""
        return self.elements * DTYPE_BYTES[self.dtype]


def open_regular_file(path: Path) -> BinaryIO:
    """Open a regular file for reading, without blocking on a pipe or device. Raises WeightsError for a missing file,
    and for a folder, a pipe or a device."""
    try:
        descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
    except FileNotFoundError:
        raise WeightsError(f"no weights at {path}", f"use a file: {SUPPORTED_FILES_HINT}") from None
    except (OSError, ValueError) as error:
        raise WeightsError(f"{path} cannot be opened ({error})") from None
    if stat.S_ISREG(os.fstat(descriptor).st_mode):
        return os.fdopen(descriptor, "rb")
    os.close(descriptor)
    reject_weights_file(
        path, "is a folder, a pipe or a device, not a weights file", f"use a file: {SUPPORTED_FILES_HINT}"
    )


def reject_weights_file(path: Path, reason: str, hint: str = "") -> NoReturn:
    """Raise WeightsError with the message `PATH reason`, such as "model.pt is empty"."""
    raise WeightsError(f"{path} {reason}", hint)


def sanitise_name(name: str) -> str:
    """Sanitise a name from a foreign file for printing: one line, ASCII, at most 80 characters before escapes."""
    return ascii(name[:MAX_TENSOR_NAME_LENGTH])[1:-1] if len(name) <= 80 else ascii(name[:77])[1:-1] + "..."


def check_tensor_infos(path: Path, entries: dict[str, TensorInfo]) -> dict[str, TensorInfo]:
    """Check the tensors of a file by name, and return them. Raises WeightsError if there are none or too many, and for
    empty tensors and invalid names."""
    if not entries:
        reject_weights_file(path, "contains no tensors", "save a model's state dict")
    if len(entries) > MAX_TENSORS:
        reject_weights_file(
            path, f"contains {len(entries):,} tensors, more than {MAX_TENSORS:,}", SAVE_WITHOUT_OPTIMIZER_HINT
        )
    for name, entry in entries.items():
        if (
            not name
            or len(name) > MAX_TENSOR_NAME_LENGTH
            or not name.isprintable()
            or ".." in name
            or name[0] in "/\\"
            or name[1:2] == ":"
        ):
            reject_weights_file(
                path,
                f"has a tensor named '{sanitise_name(name)}', which is not a valid name",
                "rename it and save the file again",
            )
        if 0 in entry.shape:
            reject_weights_file(
                path,
                f"has the tensor {sanitise_name(name)} without elements, {entry.shape}",
                "remove it and save the file again",
            )
    return entries
