"""What every kind of weights file shares: the description of a tensor, opening a file, and refusing one."""

from __future__ import annotations

import math
import os
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, NoReturn

from vitreous.errors import WeightsError

MAX_TENSORS = 5_000  # of a file; the largest models here have 2,000, and looking at more takes longer than 0.1 s
MAX_TENSOR_NAME_LENGTH = 512  # characters


#: torch's name of a dtype -> bytes of an element; what a model's weights may be stored as
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
SUPPORTED_FILES_HINT = "safetensors, npz and PyTorch files (.pt, .pth, .bin) are read"


@dataclass(frozen=True)
class TensorInfo:
    """One tensor of a file, as its header has it; `dtype` is torch's name."""

    shape: tuple[int, ...]
    dtype: str

    @property
    def elements(self) -> int:
        """How many numbers it holds."""
        return math.prod(self.shape)

    @property
    def bytes(self) -> int:
        """The memory it takes."""
        return self.elements * DTYPE_BYTES[self.dtype]


def open_regular_file(path: Path) -> BinaryIO:
    """A regular file, open for reading. Raises WeightsError for none, a folder, a pipe or a device, without waiting for
    one."""
    try:
        number = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
    except FileNotFoundError:
        raise WeightsError(f"no weights at {path}", f"name a file: {SUPPORTED_FILES_HINT}") from None
    except (OSError, ValueError) as error:
        raise WeightsError(f"{path} cannot be opened ({error})") from None
    if stat.S_ISREG(os.fstat(number).st_mode):
        return os.fdopen(number, "rb")
    os.close(number)
    reject_weights_file(
        path, "is not a file of weights but a folder, a pipe or a device", f"name a file: {SUPPORTED_FILES_HINT}"
    )


def reject_weights_file(path: Path, reason: str, hint: str = "") -> NoReturn:
    """Raise WeightsError: this file is not read, and why."""
    raise WeightsError(f"{path} {reason}", hint)


def sanitise_name(name: str) -> str:
    """A name from a foreign file as it may be printed: one line, ASCII, not long."""
    return ascii(name[:MAX_TENSOR_NAME_LENGTH])[1:-1] if len(name) <= 80 else ascii(name[:77])[1:-1] + "..."


def check_tensor_infos(path: Path, entries: dict[str, TensorInfo]) -> dict[str, TensorInfo]:
    """The same entries. Raises WeightsError for none, too many, empty tensors, and names that are none."""
    if not entries:
        reject_weights_file(path, "holds no tensors", "save a model's state dict")
    if len(entries) > MAX_TENSORS:
        reject_weights_file(
            path, f"holds {len(entries):,} tensors, more than {MAX_TENSORS:,}", SAVE_WITHOUT_OPTIMIZER_HINT
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
                f"has a tensor named '{sanitise_name(name)}', which is no name",
                "rename it and save the file again",
            )
        if 0 in entry.shape:
            reject_weights_file(
                path,
                f"has the tensor {sanitise_name(name)} without elements, {entry.shape}",
                "leave it out and save the file again",
            )
    return entries
