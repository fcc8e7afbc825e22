"""Pictures stored as numpy's .npy: the header is read as text and judged before anything else is; nothing in one can be
an object."""

from __future__ import annotations

import math
import re
import struct

import numpy as np

from vitreous.data.decoding.gate import MAX_PIXELS
from vitreous.errors import DataError

MAGIC = b"\x93NUMPY"
MAX_HEADER = 10_000  # bytes, numpy's own limit
MAX_CHANNELS = 1024
#: numpy's header: the text of a dict, its keys in this order
HEADER = re.compile(
    r"\{'descr': '([<>|=]?\w{1,9})', 'fortran_order': (True|False), "
    r"'shape': \((\d{1,9}(?:, ?\d{1,9}){0,7},?|)\),? *\} *\n?"
)
DTYPES = {
    "|u1": "uint8",
    "<u2": "uint16",
    ">u2": "uint16",
    "<i2": "int16",
    ">i2": "int16",
    "<f4": "float32",
    ">f4": "float32",
}
SHAPES = "store it as (H, W), (H, W, C) or (C, H, W), with fewer channels than rows and columns"


def described(content: bytes, name: str) -> tuple[np.dtype, tuple[int, ...], bool, int]:
    """The bytes of a .npy file -> dtype, shape, whether it is stored column by column, and where its numbers begin.

    Raises DataError for a damaged header, for numbers that are not uint8, uint16, int16 or float32, and for a file that
    is shorter or longer than its header says.
    """
    version = content[6:7]
    form = {b"\1": "<H", b"\2": "<I", b"\3": "<I"}.get(version)
    begin = 8 + struct.calcsize(form) if form else 0
    length = struct.unpack_from(form, content, 8)[0] if form and len(content) >= begin else MAX_HEADER + 1
    header = None
    if length <= MAX_HEADER:
        header = HEADER.fullmatch(content[begin : begin + length].decode("latin-1"))
    if header is None:
        raise DataError(f"{name}: a damaged .npy header", "save it again with numpy.save")
    descr, fortran, numbers = header.groups()
    if descr not in DTYPES:
        raise DataError(f"{name}: numbers of type {descr}", f"known are {', '.join(dict.fromkeys(DTYPES.values()))}")
    dtype, shape = np.dtype(descr), tuple(int(number) for number in numbers.split(",") if number.strip())
    stored = len(content) - begin - length
    if (wanted := math.prod(shape) * dtype.itemsize) != stored:
        raise DataError(f"{name}: {stored:,} bytes of numbers where {wanted:,} were announced", "save it again")
    return dtype, shape, fortran == "True", begin + length


def layout(shape: tuple[int, ...], name: str) -> tuple[int, int, int]:
    """Which axes of a picture of that shape are (channels, height, width); -1 stands for channels that are not there.

    Of three axes the smaller outer one is the channels. Raises DataError where that cannot be told, or a side is none
    or too many.
    """
    if len(shape) == 2:
        axes = (-1, 0, 1)
    elif len(shape) == 3 and shape[0] != shape[2] and min(shape[0], shape[2]) < shape[1]:
        axes = (0, 1, 2) if shape[0] < shape[2] else (2, 0, 1)
    else:
        raise DataError(f"{name}: which axis of {shape} is channels cannot be told", SHAPES)
    if not 0 < math.prod(shape) <= MAX_PIXELS or (len(shape) == 3 and shape[axes[0]] > MAX_CHANNELS):
        raise DataError(
            f"{name}: a picture of {' x '.join(map(str, shape))}",
            f"at most {MAX_PIXELS:,} numbers in {MAX_CHANNELS} channels",
        )
    return axes


def npy_form(content: bytes, name: str) -> tuple[int, str]:
    """Channels and dtype of the picture in a .npy file, from its header. Raises DataError."""
    dtype, shape, _, _ = described(content, name)
    axis = layout(shape, name)[0]
    return 1 if axis < 0 else shape[axis], dtype.name


def colours(content: bytes, name: str) -> np.ndarray:
    """The bytes of a .npy file that is a grey or RGB picture -> (H, W) or (H, W, 3) uint8. Raises DataError for any
    other."""
    array = read_npy(content, name)
    if array.dtype != np.uint8 or len(array) not in (1, 3):
        raise DataError(
            f"{name}: {len(array)} channels of {array.dtype.name}, not a grey or RGB picture of uint8",
            "the model takes no others",
        )
    return np.ascontiguousarray(array[0] if len(array) == 1 else np.moveaxis(array, 0, -1))


def read_npy(content: bytes, name: str) -> np.ndarray:
    """The bytes of a .npy file -> (C, H, W) of its dtype, without a copy. Raises DataError."""
    dtype, shape, fortran, begin = described(content, name)
    axes = layout(shape, name)
    array = np.frombuffer(content, dtype, offset=begin).reshape(shape, order="F" if fortran else "C")
    return array[None] if axes[0] < 0 else array.transpose(axes)
