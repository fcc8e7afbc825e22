"""Read images in .npy files. The header is checked before the array is read, and arrays of Python objects are
rejected."""

from __future__ import annotations

import io
import math
from typing import Any

import numpy as np
from numpy.lib import format as numpy_format

from vitreous.data.decoding.gate import MAX_PIXELS
from vitreous.errors import DataError

NPY_MAGIC = b"\x93NUMPY"
MAX_NPY_HEADER_SIZE = 2048  # maximum bytes of a header, which numpy parses as Python; numeric arrays need about 100
MAX_BANDS = 1024  # maximum channels of an image
# supported dtypes
NPY_DTYPES = (
    *("uint8", "uint16", "int16", "float32"),
    *("int8", "uint32", "int32", "uint64", "int64", "float16", "float64"),  # converted to float32
)
NPY_SHAPES_HINT = "store it as (H, W), (H, W, C) or (C, H, W), with fewer channels than rows and columns"
NPY_HEADER_ATTEMPTS = 10  # attempts to parse a header, see `parse_npy_header`
# version of the format -> function of numpy that parses the header
NPY_HEADER_READERS = {(1, 0): numpy_format.read_array_header_1_0, (2, 0): numpy_format.read_array_header_2_0}


def read_npy(content: bytes, name: str) -> np.ndarray:
    """Convert the bytes of a .npy file to an image (C, H, W) of the file's dtype, without a copy.

    Raises DataError for a damaged header, a dtype outside `NPY_DTYPES`, a file whose length differs from its header,
    and a shape that is not an image.
    """
    file = io.BytesIO(content)
    shape, fortran, dtype = read_npy_header(file, name)
    if dtype.name not in NPY_DTYPES:
        raise DataError(f"{name}: the dtype {dtype.str} is not supported", f"use one of {', '.join(NPY_DTYPES)}")
    stored, expected = len(content) - file.tell(), math.prod(shape) * dtype.itemsize
    if stored != expected:
        raise DataError(f"{name}: {stored:,} bytes of data, but the header states {expected:,}", "save it again")
    axes = infer_image_axes(shape, name)
    array = np.frombuffer(content, dtype, offset=file.tell()).reshape(shape, order="F" if fortran else "C")
    return array[None] if axes[0] < 0 else array.transpose(axes)


def read_npy_size(content: bytes, name: str) -> tuple[int, int]:
    """Read (height, width) of the image in a .npy file from its header. Raises DataError for a damaged header, and for
    a shape that is not an image."""
    shape = read_npy_header(io.BytesIO(content), name)[0]
    _, height_axis, width_axis = infer_image_axes(shape, name)
    return shape[height_axis], shape[width_axis]


def read_npy_header(file: Any, name: str) -> tuple[tuple[int, ...], bool, np.dtype]:
    """Read the header of an opened .npy file: shape, whether the order is Fortran's, dtype. Afterwards, the file
    position is at the first value. Raises DataError for a damaged header."""
    damaged_error = DataError(f"{name}: a damaged .npy header", "save it again with numpy.save")
    try:
        shape, fortran, dtype = parse_npy_header(file)
    except Exception:  # Python's parser raises several types for other text
        raise damaged_error from None
    if any(length < 0 for length in shape):
        raise damaged_error
    return shape, fortran, dtype


def parse_npy_header(file: Any, attempts: int = NPY_HEADER_ATTEMPTS) -> tuple[tuple[int, ...], bool, np.dtype]:
    """Parse the header of an opened .npy file: shape, whether the order is Fortran's, dtype.

    A SystemError is retried up to `attempts` times: CPython 3.11 may raise it for a valid header if several threads
    parse at once (python/cpython#106905).
    """
    start = file.tell()
    try:
        return NPY_HEADER_READERS[numpy_format.read_magic(file)](file, max_header_size=MAX_NPY_HEADER_SIZE)
    except SystemError:
        if attempts == 1:
            raise
    file.seek(start)
    return parse_npy_header(file, attempts - 1)


def infer_image_axes(shape: tuple[int, ...], name: str) -> tuple[int, int, int]:
    """Infer which axes of an image array are (channels, height, width); channels is -1 for an array of two axes.

    Of three axes, the first or the last is the channel axis: the shorter of the two, if it is also shorter than the
    middle axis. Otherwise, raises DataError. Also raises DataError for an empty axis and for too many values.
    """
    if len(shape) == 2:
        axes = (-1, 0, 1)
    elif len(shape) == 3 and shape[0] != shape[2] and min(shape[0], shape[2]) < shape[1]:
        axes = (0, 1, 2) if shape[0] < shape[2] else (2, 0, 1)
    else:
        raise DataError(
            f"{name}: the channel axis of {shape} is ambiguous", f"{NPY_SHAPES_HINT}; for volumes, add --axes 3"
        )
    if not 0 < math.prod(shape) <= MAX_PIXELS or (len(shape) == 3 and shape[axes[0]] > MAX_BANDS):
        raise DataError(
            f"{name}: unsupported image shape {' x '.join(map(str, shape))}",
            f"use at most {MAX_PIXELS:,} values in {MAX_BANDS} channels",
        )
    return axes
