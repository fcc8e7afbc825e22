"""Read the class indices or colours in mask files (images and .npy arrays), and describe problems with them in notes.

Indices may be stored as integers of any width, as integral floating-point numbers, or as grey RGB images. NaN is an
ignored pixel. Lossy compression (JPEG, lossy WebP) changes class indices, so that `describe_lossy_masks` returns a
note.
"""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np
from PIL import Image

from vitreous.data.decoding.decode import describe_exception, open_input_file, read_input_file
from vitreous.data.decoding.gate import MAX_PIXELS
from vitreous.data.decoding.npy import NPY_MAGIC, read_npy_header
from vitreous.data.decoding.spectral import read_channels
from vitreous.data.decoding.tiff import (
    GREY_PHOTOMETRIC,
    PHOTOMETRIC_TAG,
    SAMPLES_TAG,
    TIFF_SIGNATURES,
    read_nodata_tag,
    read_tiff_form,
    read_tiff_tags,
)
from vitreous.errors import DataError, escape_unprintable

VOID_VALUE = 255  # value of ignored pixels in an index map
NUMBER_MODES = ("1", "L", "P", "I", "I;16", "I;16B", "I;16L", "I;16N")  # Pillow modes with one integer per pixel
PILLOW_MASK_DTYPES = ("uint8", "uint16", "int16", "int32", "float32")  # dtypes of TIFF masks that Pillow reads
CLASS_ROUNDING_TOLERANCE = 1e-3  # maximum distance of a floating-point value from an integer
LOSSY_WHITE_THRESHOLD = 127  # larger values of a lossy black-and-white mask are white
MAX_COMPRESSION_ERROR = 40  # change by lossy compression that most pixels do not exceed
MAX_SMEARED_SHARE = 0.05  # maximum share of pixels, at edges, that exceed it
MAX_PROBED_LOSSY_MASKS = 50  # number of lossy masks that are inspected
MAX_LISTED_CLASS_NUMBERS = 8  # number of class indices that a message lists
SAVE_MASK_HINT = "save it as a PNG file of class indices"


def read_mask(path: Path) -> np.ndarray:
    """Read a mask file: values (H, W) int32, which are indices for an image with a palette, or colours (H, W, C) uint8.
    Raises DataError if the file cannot be read."""
    content, name = read_input_file(path), escape_unprintable(path)
    if content.startswith(NPY_MAGIC):
        return read_npy_mask(content, name)
    if content.startswith(TIFF_SIGNATURES) and (values := read_tiff_mask(content, name)) is not None:
        return values
    try:
        with Image.open(io.BytesIO(content)) as image:
            if image.mode in NUMBER_MODES:
                return np.asarray(image).astype(np.int32) * (VOID_VALUE if image.mode == "1" else 1)
            values = np.asarray(image if image.mode == "F" else image.convert("RGB"))
    except Exception as error:
        raise DataError(
            f"{name} is not a readable mask ({describe_exception(error)})", "restore or delete it"
        ) from None
    return to_class_indices(values, name) if values.dtype.kind == "f" else values


def read_tiff_mask(content: bytes, name: str) -> np.ndarray | None:
    """Read the values (H, W) int32 of a mask that a GIS program has written: a TIFF of one band with a nodata value, or
    with a dtype that Pillow does not read. Returns None for other files. A nodata value that cannot be a class index
    becomes `VOID_VALUE`. Raises DataError, with `name`, for values that are not class indices."""
    try:
        tags = read_tiff_tags(content)
        photometric, nodata, dtype = (
            tags.get(PHOTOMETRIC_TAG, GREY_PHOTOMETRIC)[0],
            read_nodata_tag(tags),
            read_tiff_form(content, name).dtype,
        )
    except Exception:  # the caller reports damaged files
        return None
    is_grey = int(tags.get(SAMPLES_TAG, (1,))[0]) == 1 and photometric in GREY_PHOTOMETRIC
    if not is_grey or (nodata is None and dtype in ("", *PILLOW_MASK_DTYPES)):
        return None
    values = read_channels(content, name)
    if len(values) != 1:
        return None
    float_values = values[0].astype(np.float64)
    if nodata is not None and not 0 <= nodata < VOID_VALUE:
        float_values[float_values == nodata] = VOID_VALUE
    return to_class_indices(float_values, name)


def read_npy_mask(content: bytes, name: str) -> np.ndarray:
    """Read the indices (H, W) int32 or colours (H, W, 3) uint8 in the bytes of a .npy file. Raises DataError, with
    `name`, for other shapes and dtypes, and for damaged files."""
    file = io.BytesIO(content)
    shape, fortran, dtype = read_npy_header(file, name)
    if dtype.kind not in "buif":
        raise DataError(f"{name}: values of type {dtype.str} are not class indices", "save the mask as integers")
    if len(content) - file.tell() != math.prod(shape) * dtype.itemsize or not 0 < math.prod(shape) <= 3 * MAX_PIXELS:
        raise DataError(f"{name}: the .npy file is damaged or has the wrong size", "save it again with numpy.save")
    values = np.frombuffer(content, dtype, offset=file.tell()).reshape(shape, order="F" if fortran else "C")
    colours = len(shape) == 3 and shape[-1] == 3 and dtype == np.uint8
    if len(shape) == 3 and 1 in (shape[0], shape[-1]):
        values = values[0] if shape[0] == 1 else values[..., 0]
    elif len(shape) != 2 and not colours:
        hint = "save it as (H, W) class indices; for class scores (K, H, W), save their argmax over classes"
        raise DataError(f"{name}: an array of {' x '.join(map(str, shape))} is not a mask", hint)
    if dtype.kind == "b":
        return values.astype(np.int32) * VOID_VALUE
    return values if colours else to_class_indices(values, name)


def to_class_indices(values: np.ndarray, name: str) -> np.ndarray:
    """Convert numbers of any dtype, (H, W), to int32; NaN becomes `VOID_VALUE`. Raises DataError, with `name`, for
    fractions and for values that are too large."""
    float_values = values.astype(np.float64)
    float_values[np.isnan(float_values)] = VOID_VALUE
    rounded = np.round(np.nan_to_num(float_values, posinf=0.5, neginf=0.5))  # infinity is rejected below
    if (is_fraction := ~(np.abs(float_values - rounded) <= CLASS_ROUNDING_TOLERANCE)).any():
        problem = f"{name}: the floating-point value {float_values[is_fraction][0]:g} is not a class index"
        raise DataError(problem, SAVE_MASK_HINT)
    if np.abs(rounded).max(initial=0) >= 1 << 31:
        raise DataError(f"{name}: the value {np.abs(rounded).max():g} is too large for a class index", SAVE_MASK_HINT)
    return rounded.astype(np.int32)


def to_numbers_if_grey(mask: np.ndarray) -> np.ndarray:
    """Convert a mask that is stored as a grey RGB image, (H, W, 3) uint8 with equal channels, to indices (H, W) int32.
    Other masks are unchanged."""
    if mask.ndim != 3 or mask.shape[-1] != 3 or mask.dtype != np.uint8:
        return mask
    grey = (mask[..., 0] == mask[..., 1]).all() and (mask[..., 0] == mask[..., 2]).all()
    return mask[..., 0].astype(np.int32) if grey else mask


def is_lossy(path: Path) -> bool:
    """Return whether a file has a lossy format, by its first bytes: JPEG, JPEG 2000, lossy WebP, AVIF or HEIC. False if
    the file cannot be read."""
    try:
        with open_input_file(path) as file:
            head = file.read(16)
    except (OSError, DataError):
        return False
    is_lossy_webp = head[:4] == b"RIFF" and head[8:12] == b"WEBP" and head[12:16] != b"VP8L"
    return is_lossy_webp or head[:3] == b"\xff\xd8\xff" or head[4:8] in (b"ftyp", b"jP  ")


def are_lossy_binary(mask_paths: Sequence[Path]) -> bool:
    """Return whether lossy masks are black and white except for compression errors, by inspecting the first
    `MAX_PROBED_LOSSY_MASKS` of them. Raises DataError for an unreadable mask."""
    darkest, brightest, grey_shares = VOID_VALUE, 0, []
    for path in mask_paths[:MAX_PROBED_LOSSY_MASKS]:
        values = to_numbers_if_grey(read_mask(path))
        if values.ndim != 2:
            return False
        darkest, brightest = min(darkest, int(values.min())), max(brightest, int(values.max()))
        grey_shares.append(
            float(((values > MAX_COMPRESSION_ERROR) & (values < VOID_VALUE - MAX_COMPRESSION_ERROR)).mean())
        )
    return (
        bool(grey_shares)
        and darkest <= MAX_COMPRESSION_ERROR
        and brightest >= VOID_VALUE - MAX_COMPRESSION_ERROR
        and float(np.mean(grey_shares)) <= MAX_SMEARED_SHARE
    )


def describe_lossy_masks(mask_paths: Sequence[Path], count: int, binary: bool) -> str:
    """Return the note about lossy masks. `count` is the number of distinct values; `binary` masks are black and
    white."""
    if binary:
        text = f"{len(mask_paths):,} masks are lossy files: values above {LOSSY_WHITE_THRESHOLD} are read as white"
    else:
        text = f"{len(mask_paths):,} masks are lossy files, whose compression changes class indices: {count} values"
    return f"{text}; save masks as PNG; the first is {escape_unprintable(mask_paths[0])}"


def describe_class_gaps(values: set[int]) -> str:
    """Return the note about unused indices between the class indices `values`, with the index that probably marks
    ignored pixels, if any; empty if there are no gaps."""
    class_indices = sorted(values)
    gaps = [(low, high) for low, high in pairwise(class_indices) if high > low + 1]
    if not gaps:
        return ""
    unused = sum(high - low - 1 for low, high in gaps)
    index_list = ", ".join(map(str, class_indices[:MAX_LISTED_CLASS_NUMBERS])) + (
        ", …" if len(class_indices) > MAX_LISTED_CLASS_NUMBERS else ""
    )
    text = f"masks have the class indices {index_list}: {unused:,} unused indices become classes without pixels"
    if len(gaps) == 1 and gaps[0][1] == class_indices[-1]:
        return f"{text}; if {class_indices[-1]} marks ignored pixels, use --ignore-index {class_indices[-1]}"
    return f"{text}; number the classes from 0 without gaps"
