"""Pictures stored as numpy's .npy: numpy reads the header, which is judged before anything else; no objects."""

from __future__ import annotations

import io
import math
from typing import NamedTuple

import numpy as np
from numpy.lib import format as numpy_format

from vitreous.data.decoding.gate import MAX_PIXELS
from vitreous.errors import DataError

MAGIC = b"\x93NUMPY"
MAX_HEADER = 2048  # bytes of text, which numpy parses as Python's; an array of numbers needs about 100
MAX_CHANNELS = 1024
DTYPES = ("uint8", "uint16", "int16", "float32")
SHAPES = "store it as (H, W), (H, W, C) or (C, H, W), with fewer channels than rows and columns"


class Header(NamedTuple):
    """Of a .npy file: dtype, shape, whether the first axis varies fastest, and the byte at which the numbers begin."""

    dtype: np.dtype
    shape: tuple[int, ...]
    fortran: bool
    begin: int


def parse_header(content: bytes) -> Header:
    """The header at the beginning of a .npy file of any numbers. Raises ValueError for a damaged one."""
    file = io.BytesIO(content)
    try:
        version = numpy_format.read_magic(file)
        readers = {(1, 0): numpy_format.read_array_header_1_0, (2, 0): numpy_format.read_array_header_2_0}
        shape, fortran, dtype = readers[version](file, max_header_size=MAX_HEADER)
    except Exception as error:  # text that is no Python leaves numpy with whatever Python's parser raises
        raise ValueError(f"a damaged .npy header ({type(error).__name__})") from None
    if any(side < 0 for side in shape):
        raise ValueError("a damaged .npy header (a side below 0)")
    return Header(dtype, shape, fortran, file.tell())


def read_header(content: bytes, name: str) -> Header:
    """The header of a .npy file that holds a picture.

    Raises DataError for a damaged header, for numbers that are not in `DTYPES`, and for a file that is shorter or
    longer than its header says.
    """
    try:
        header = parse_header(content)
    except ValueError:
        raise DataError(f"{name}: a damaged .npy header", "save it again with numpy.save") from None
    if header.dtype.name not in DTYPES:
        raise DataError(f"{name}: numbers of type {header.dtype.str}", f"known are {', '.join(DTYPES)}")
    stored, expected = len(content) - header.begin, math.prod(header.shape) * header.dtype.itemsize
    if stored != expected:
        raise DataError(f"{name}: {stored:,} bytes of numbers where {expected:,} were announced", "save it again")
    return header


def picture_axes(shape: tuple[int, ...], name: str) -> tuple[int, int, int]:
    """Which axes of a picture of that shape are (channels, height, width); -1 where it has no axis of channels.

    Of three axes the smaller outer one is the channels. Raises DataError where that cannot be told, and for a side of 0
    or too many numbers.
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
    header = read_header(content, name)
    axis = picture_axes(header.shape, name)[0]
    return 1 if axis < 0 else header.shape[axis], header.dtype.name


def read_npy(content: bytes, name: str) -> np.ndarray:
    """The bytes of a .npy file -> (C, H, W) of its dtype, without a copy. Raises DataError."""
    dtype, shape, fortran, begin = read_header(content, name)
    axes = picture_axes(shape, name)
    array = np.frombuffer(content, dtype, offset=begin).reshape(shape, order="F" if fortran else "C")
    return array[None] if axes[0] < 0 else array.transpose(axes)


def read_npy_colours(content: bytes, name: str) -> np.ndarray:
    """A .npy file -> (H, W) or (H, W, 3) uint8. Raises DataError unless it is a grey or RGB picture of 8 bits."""
    array = read_npy(content, name)
    if array.dtype != np.uint8 or len(array) not in (1, 3):
        raise DataError(
            f"{name}: {len(array)} channels of {array.dtype.name}, not a grey or RGB picture of uint8",
            "the model takes no others",
        )
    return np.ascontiguousarray(array[0] if len(array) == 1 else np.moveaxis(array, 0, -1))
