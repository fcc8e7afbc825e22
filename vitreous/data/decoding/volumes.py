"""Read volumes (three axes) from .npy, .npz, TIFF stacks and NIfTI, and signals (one axis) from .npy, .npz and text.

A volume is (C, D, H, W) float32 with the axes in the order of the file; a signal is (C, L) float32. Shapes contain
`*sizes` for (D, H, W) or (L,). They are read from the header and checked before memory is allocated, since a damaged
header can contain any number of voxels.
"""

from __future__ import annotations

import io
import math
import os
import zipfile
import zlib
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from vitreous.data.decoding.decode import describe_exception, read_input_file, suppress_warnings
from vitreous.data.decoding.npy import NPY_MAGIC, read_npy_header
from vitreous.data.decoding.tiff import TIFF_SIGNATURES, check_tiff_complete
from vitreous.errors import DataError, escape_unprintable, install_hint

VOLUME_SUFFIXES = (".nii", ".nii.gz", ".npz", ".npy", ".tif", ".tiff")
VOLUME_ONLY_SUFFIXES = frozenset(VOLUME_SUFFIXES[:3])  # suffixes of volumes that are never suffixes of images
TEXT_SUFFIX = ".csv"  # of a signal as a table of numbers
SIGNAL_SUFFIXES = (TEXT_SUFFIX, ".npz", ".npy")  # suffixes of files that may contain a signal
ARRAY_NOUNS = {1: "signal", 3: "volume"}  # number of axes -> noun in messages
MAX_VOXELS = 2**28  # maximum values of a volume: 1 GiB as float32
MAX_VOLUME_CHANNELS = 64  # maximum channels of a volume or signal
MAX_CLASS_NUMBER = 65_535  # the largest class index in a mask
CLASS_NUMBER_TOLERANCE = 1e-3  # maximum rounding error of class indices that are stored as floats
CLIP_PERCENTILES = (0.5, 99.5)  # percentiles to which values are clipped before they are standardised
GZIP_MAGIC, ZIP_MAGIC = b"\x1f\x8b", b"PK\x03\x04"
NIFTI_HEADER_BYTES = 544  # bytes at the start of a NIfTI file that contain its header, for versions 1 and 2
MAX_TRAILING_BYTES = 2**16  # maximum bytes after the voxels of a NIfTI file
VOXEL_DTYPE_KINDS = "biuf"  # supported dtype kinds, as in numpy: booleans, integers, floats
PAGE_AXES = ("Z", "Q", "I", "T")  # tifffile's names of the page axis
SAVE_VOLUME_HINT = "save it as .npy, or as NIfTI"


def parse_number_table(content: bytes) -> np.ndarray:
    """Parse a table of numbers, text in UTF-8, to an array (rows, columns) float64.

    If a cell of the first line is not a number, that line is the header and is skipped, as are empty lines. Raises
    ValueError, with the line number, for other cells that are not numbers, and for lines of different lengths.
    """
    lines = [
        (line_number, line.strip()) for line_number, line in enumerate(content.decode("utf-8-sig").splitlines(), 1)
    ]
    rows = [(line_number, [cell.strip('"') for cell in split_cells(line)]) for line_number, line in lines if line]
    if rows and any(cell and not can_parse_float(cell) for cell in rows[0][1]):
        del rows[0]
    if not rows:
        raise ValueError("no numbers")
    for line_number, row in rows:
        if len(row) != len(rows[0][1]):
            raise ValueError(f"line {line_number}: {len(row)} cells, but {len(rows[0][1])} in the lines before")
        if invalid_cells := [cell for cell in row if not can_parse_float(cell)]:
            raise ValueError(f"line {line_number}: {invalid_cells[0][:40] or 'an empty cell'} is not a number")
    return np.array([[float(cell) for cell in row] for _, row in rows])


def split_cells(line: str) -> list[str]:
    """Split a line into cells at commas; if it has none, at semicolons, else at tabs, else at spaces."""
    delimiter = next((delimiter for delimiter in ",;\t" if delimiter in line), None)
    return [cell.strip() for cell in line.split(delimiter)]


def can_parse_float(cell: str) -> bool:
    """Return whether the text of a cell is a number."""
    try:
        float(cell)
    except ValueError:
        return False
    return True


RawVolume = bytes | np.ndarray | str | os.PathLike[str]


@dataclass(frozen=True)
class VolumeFile:
    """A volume or signal with a parsed header, and a function that reads its values.

    `shape` is (*sizes) or (*sizes, C), `dtype` that of the stored values. `read` returns the array of this shape, which
    need not be of this dtype. `header` is nibabel's header of a NIfTI file, None for other files.
    """

    shape: tuple[int, ...]
    dtype: np.dtype
    read: Callable[[], np.ndarray]
    header: Any = None


def read_volume(
    raw: RawVolume, channels: int, name: str | None = None, axes: int = 3, standardise: bool = True
) -> np.ndarray:
    """Read a volume, `axes` = 3, as (C, D, H, W) float32, or a signal, `axes` = 1, as (C, L) float32.

    `raw` is a path, a file's bytes, or an array (*sizes[, C]). With `standardise`, each channel is scaled to mean 0 and
    std 1 (`standardise_channels`); otherwise values are unchanged. Raises DataError for unreadable files, for a number
    of channels other than `channels`, and for values that are NaN or infinite.
    """
    name = name or get_display_name(raw, axes)
    file = open_volume(raw, name, axes)
    count = count_channels(file.shape, axes)
    if count != channels:
        actual = f"{count} channel{'s' * (count > 1)}, but the model expects {channels}"
        raise DataError(f"{name}: {actual}", "use files with that number of channels")
    with np.errstate(over="ignore"):  # values too large for float32 become non-finite
        voxels = call_volume_reader(file.read, name, axes).astype(np.float32)
    check_finite_values(voxels, name)
    voxels = np.ascontiguousarray(np.moveaxis(voxels, -1, 0)) if voxels.ndim > axes else voxels[None]
    return standardise_channels(voxels) if standardise else voxels


def read_label_volume(raw: RawVolume, name: str | None = None) -> np.ndarray:
    """Read a class map, a path, a file's bytes or voxels (D, H, W), as class indices (D, H, W) int32.

    Class indices may be stored as floats, with differences from integers of up to CLASS_NUMBER_TOLERANCE, since scale
    factors in headers cause rounding errors. Raises DataError for unreadable files, for several channels, and for
    values that are not integers from 0 to MAX_CLASS_NUMBER.
    """
    name = name or get_display_name(raw)
    file = open_volume(raw, name)
    if len(file.shape) != 3:
        raise DataError(f"{name}: a mask of {file.shape[3]} channels instead of one", "use one volume of class indices")
    values = call_volume_reader(file.read, name)
    check_finite_values(values, name)
    low, high = values.min().item(), values.max().item()
    first_fraction = (
        values[np.abs(np.rint(values) - values) > CLASS_NUMBER_TOLERANCE][:1] if values.dtype.kind == "f" else ()
    )
    for invalid_value in (
        *first_fraction,
        *([low] if low < -CLASS_NUMBER_TOLERANCE else []),
        *([high] if high > MAX_CLASS_NUMBER + CLASS_NUMBER_TOLERANCE else []),
    ):
        hint = f"use integers from 0 to {MAX_CLASS_NUMBER:,}"
        raise DataError(f"{name}: {invalid_value:g} is not a class index", hint)
    return np.ascontiguousarray(np.rint(values) if values.dtype.kind == "f" else values, dtype=np.int32)


def read_volume_form(raw: RawVolume, name: str | None = None, axes: int = 3) -> tuple[int, tuple[int, ...]]:
    """Read the number of channels and the sizes of a volume (D, H, W) or a signal (L,) from its header. Raises
    DataError for an unreadable file."""
    shape = open_volume(raw, name or get_display_name(raw, axes), axes).shape
    return count_channels(shape, axes), shape[:axes]


def count_array_axes(raw: RawVolume) -> int | None:
    """Read the number of axes of the array in a file, channels included, from its header; None if the file cannot be
    read as a signal or volume."""
    for axes in ARRAY_NOUNS:
        with suppress(DataError):
            return len(open_volume(raw, "", axes).shape)
    return None


def read_nifti_header(raw: RawVolume) -> Any:
    """Read nibabel's header of a NIfTI file, which defines the coordinates of its voxels in the patient; None for other
    files. Raises DataError for an unreadable file."""
    if isinstance(raw, np.ndarray):
        return None
    header = open_volume(raw, get_display_name(raw)).header
    return None if header is None else header.copy()


def standardise_channels(volume: np.ndarray) -> np.ndarray:
    """Scale each channel of a volume (C, D, H, W) or a signal (C, L), float32, to mean 0 and std 1, in place.

    Channels of a volume are first clipped to `CLIP_PERCENTILES`, since MRI values have no fixed range and a few voxels
    may be far above all others. A signal is not clipped, since its peaks may be relevant. A constant channel becomes 0.
    """
    for channel in volume:
        if channel.ndim > 1:
            low, high = np.percentile(channel, CLIP_PERCENTILES)
            np.clip(channel, low, high, out=channel)
        mean, std = channel.mean(dtype=np.float64), channel.std(dtype=np.float64)
        channel -= np.float32(mean)
        channel /= np.float32(std if std > 1e-7 * max(abs(mean), 1e-30) else 1.0)
    return volume


def open_volume(raw: RawVolume, name: str, axes: int = 3) -> VolumeFile:
    """Read the header of a volume, `axes` = 3, or a signal, `axes` = 1. The format of a file is determined by its
    content, not by its name. Raises DataError for other files, damaged headers, and unsupported shapes and dtypes."""
    if isinstance(raw, np.ndarray):
        file = VolumeFile(raw.shape, raw.dtype, lambda: raw)
    else:
        content = raw if isinstance(raw, bytes) else read_input_file(raw)
        if not content:
            raise DataError(f"{name}: empty file", "delete it")
        readers = (
            (NPY_MAGIC, open_npy),
            (ZIP_MAGIC, open_npz),
            *((signature, open_tiff) for signature in TIFF_SIGNATURES),
        )
        reader = next((reader for signature, reader in readers if content.startswith(signature)), None)
        if reader is None and not (content.startswith(GZIP_MAGIC) or is_nifti(content)):
            if axes != 1:
                hint = "use NIfTI, .npy, .npz or TIFF"
                raise DataError(f"{name}: not a volume of a known format", hint)
            reader = open_text_table
        file = call_volume_reader(lambda: (reader or open_nifti)(content, name), name, axes)
    if axes == 1 and len(file.shape) == 2 and file.shape[0] < file.shape[1]:  # a signal (C, L)
        channels_first = file
        file = VolumeFile(channels_first.shape[::-1], channels_first.dtype, lambda: channels_first.read().T)
    check_volume_shape(file.shape, name, axes)
    if file.dtype.kind not in VOXEL_DTYPE_KINDS:
        raise DataError(f"{name}: unsupported voxel dtype {file.dtype}", "use integers or floats")
    return file


def check_volume_shape(shape: tuple[int, ...], name: str, axes: int = 3) -> None:
    """Raise DataError for a shape that is not (*sizes) or (*sizes, C), for more than MAX_VOXELS values, and for more
    than MAX_VOLUME_CHANNELS channels."""
    size_text, noun = " x ".join(map(str, shape)) or "no axes", ARRAY_NOUNS[axes]
    if len(shape) not in (axes, axes + 1) or min(shape) < 1:
        valid_shapes = "(length) or (channels, length)" if axes == 1 else "(D, H, W) or (D, H, W, C)"
        raise DataError(f"{name}: an array of {size_text} is not a {noun}", f"store it as {valid_shapes}")
    if math.prod(shape) > MAX_VOXELS:
        problem = f"a {noun} of {size_text} has more than {MAX_VOXELS:,} values"
        raise DataError(f"{name}: {problem}", "crop or downsample it")
    if count_channels(shape, axes) > MAX_VOLUME_CHANNELS:
        problem = f"{shape[axes]} channels ({size_text}), more than {MAX_VOLUME_CHANNELS}"
        hint = "if the last axis is time, store one step per file" if axes == 3 else "store fewer channels per file"
        raise DataError(f"{name}: {problem}", hint)


def check_finite_values(values: np.ndarray, name: str) -> None:
    """Raise DataError if values of an array (*sizes[, C]) are NaN or infinite."""
    if num_invalid := values.size - np.count_nonzero(np.isfinite(values)) if values.dtype.kind == "f" else 0:
        raise DataError(f"{name}: {num_invalid:,} of its values are NaN or infinite", "fix or delete the file")


def count_channels(shape: tuple[int, ...], axes: int = 3) -> int:
    """Return the number of channels of an array of the shape (*sizes) or (*sizes, C), where there are `axes` sizes."""
    return shape[axes] if len(shape) == axes + 1 else 1


def call_volume_reader(read: Callable[[], Any], name: str, axes: int = 3) -> Any:
    """Call `read` and return its result. All exceptions are raised as DataError, since the exceptions of readers are
    undocumented."""
    try:
        with suppress_warnings():
            return read()
    except (DataError, MemoryError):
        raise
    except ImportError as error:
        extra = "volumes" if error.name == "nibabel" else "data"
        problem = f"this file needs {error.name}, which is not installed"
        raise DataError(f"{name}: {problem}", install_hint(extra)) from None
    except Exception as error:
        problem = f"{name}: cannot be read as a {ARRAY_NOUNS[axes]} ({describe_exception(error)})"
        raise DataError(problem, "fix or delete the file") from None


def open_text_table(content: bytes, name: str) -> VolumeFile:
    """Read a table of numbers as a signal (rows, columns), or (rows,) if it has a single column. Raises ValueError for
    an invalid table."""
    values = parse_number_table(content)
    values = values[:, 0] if values.shape[1] == 1 else values
    return VolumeFile(values.shape, values.dtype, lambda: values)


def open_npy(content: bytes, name: str) -> VolumeFile:
    """Read the header of a .npy file. Raises DataError for a damaged header."""
    file = io.BytesIO(content)
    shape, fortran, dtype = read_npy_header(file, name)
    return VolumeFile(shape, dtype, lambda: array_from_bytes(content[file.tell() :], shape, dtype, fortran))


def open_npz(content: bytes, name: str) -> VolumeFile:
    """Read the header of the array in a .npz file. Raises DataError unless the file has exactly one array."""
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        members = [member for member in archive.infolist() if member.filename.endswith(".npy")]
        if len(members) != 1:
            raise DataError(f"{name}: {len(members)} arrays instead of one", "save each to a separate file")
        with archive.open(members[0]) as file:
            shape, fortran, dtype = read_npy_header(file, name)

    def read_array() -> np.ndarray:
        with zipfile.ZipFile(io.BytesIO(content)) as archive, archive.open(members[0]) as file:
            read_npy_header(file, name)
            return array_from_bytes(file.read(math.prod(shape) * dtype.itemsize + 1), shape, dtype, fortran)

    return VolumeFile(shape, dtype, read_array)


def open_tiff(content: bytes, name: str) -> VolumeFile:
    """Read the headers of a TIFF whose pages are the slices of a volume, (pages, H, W[, C]). Raises DataError for pages
    of different sizes or dtypes, and for other axes."""
    import logging

    import tifffile

    logging.getLogger("tifffile").disabled = True  # the DataError reports it
    with tifffile.TiffFile(io.BytesIO(content)) as file:
        series: Any = file.series
        if len(series) != 1:
            problem = f"a TIFF with pages of {len(series)} sizes or dtypes"
            raise DataError(f"{name}: {problem}", "use one size and dtype for all pages")
        axes, shape, dtype = series[0].axes, tuple(series[0].shape), series[0].dtype
    if axes[:1] not in PAGE_AXES or axes[1:] not in ("YX", "YXS"):
        raise DataError(f"{name}: a TIFF with the axes {axes} is not a stack of pages", SAVE_VOLUME_HINT)

    def read_array() -> np.ndarray:
        with tifffile.TiffFile(io.BytesIO(content)) as file:
            page_series: Any = file.series[0]
            if page_series.dataoffset is not None:  # all pages are contiguous
                if len(content) < page_series.dataoffset + page_series.nbytes:
                    raise ValueError("voxels are missing")
            else:
                for page in page_series.pages:
                    check_tiff_complete(page, content, name)
            return page_series.asarray(maxworkers=1)

    return VolumeFile(shape, dtype, read_array)


def open_nifti(content: bytes, name: str) -> VolumeFile:
    """Read the header of a NIfTI file of version 1 or 2, with or without gzip compression. Raises DataError for other
    files, and ValueError for a damaged header."""
    import nibabel

    is_compressed = content.startswith(GZIP_MAGIC)
    header_bytes = inflate_gzip(content, NIFTI_HEADER_BYTES) if is_compressed else content[:NIFTI_HEADER_BYTES]
    if not is_nifti(header_bytes):
        raise DataError(f"{name}: not a volume of a known format", "use NIfTI, .npy, .npz or TIFF")
    header_class = nibabel.Nifti2Header if header_bytes[4:7] == b"n+2" else nibabel.Nifti1Header
    header: Any = header_class.from_fileobj(io.BytesIO(header_bytes), check=False)
    shape, dtype, start = tuple(map(int, header.get_data_shape())), header.get_data_dtype(), header.get_data_offset()
    slope, inter = header.get_slope_inter()
    if start < header.sizeof_hdr:
        raise ValueError("voxels inside the header")
    # components of vectors are on the fifth axis
    shape = shape[:3] + shape[4:] if len(shape) == 5 and shape[3] == 1 else shape
    shape = shape[:3] if len(shape) == 4 and shape[3] == 1 else shape

    def read_array() -> np.ndarray:
        end = start + math.prod(shape) * dtype.itemsize
        file_bytes = (
            inflate_gzip(content, end + MAX_TRAILING_BYTES, require_complete=True) if is_compressed else content
        )
        values = array_from_bytes(file_bytes[start:end], shape, dtype, fortran=True)
        if (slope, inter) in ((None, None), (1.0, 0.0)):
            return values
        return values * np.float64(slope) + np.float64(inter or 0.0)

    return VolumeFile(shape, dtype, read_array, header)


def is_nifti(header_bytes: bytes) -> bool:
    """Return whether bytes begin like a NIfTI file that contains header and voxels."""
    return header_bytes[344:348] == b"n+1\0" or header_bytes[4:8] == b"n+2\0"


def inflate_gzip(content: bytes, max_bytes: int, require_complete: bool = False) -> bytes:
    """Decompress a gzip file with one or more members, up to `max_bytes` bytes. Raises ValueError for a damaged file.

    With `require_complete`, also raises ValueError for a truncated file, and for one with more than `max_bytes` bytes.
    """
    chunks, compressed, bytes_left = [], content, max_bytes
    while compressed and bytes_left:
        stream = zlib.decompressobj(31)
        try:
            chunks.append(stream.decompress(compressed, bytes_left))
        except zlib.error as error:
            raise ValueError(f"gzip: {error}") from None
        bytes_left -= len(chunks[-1])
        if not stream.eof:
            if require_complete:
                raise ValueError("gzip: more bytes than its header states" if not bytes_left else "gzip: cut short")
            break
        compressed = stream.unused_data.lstrip(b"\0")
    return b"".join(chunks)


def array_from_bytes(content: bytes, shape: tuple[int, ...], dtype: np.dtype, fortran: bool) -> np.ndarray:
    """Convert bytes to an array of `shape` (*sizes[, C]) and `dtype`, in native byte order. `fortran` selects Fortran
    order. Raises ValueError if the number of bytes does not match the shape."""
    if len(content) != (expected := math.prod(shape) * dtype.itemsize):
        raise ValueError(f"{len(content):,} bytes of voxels, but the header states {expected:,}")
    array = np.frombuffer(content, dtype).reshape(shape, order="F" if fortran else "C")
    return array.astype(dtype.newbyteorder("="), copy=False)


def get_display_name(raw: RawVolume, axes: int = 3) -> str:
    """Return the name of a sample for messages: its path, or `volume` or `signal` for bytes and arrays."""
    return escape_unprintable(raw) if isinstance(raw, (str, os.PathLike)) else ARRAY_NOUNS[axes]


def strip_volume_suffix(path: Path) -> Path:
    """Return a path without the suffix of a volume, such as `a` for `a.nii.gz`."""
    return path.with_suffix("").with_suffix("") if path.name.lower().endswith(".nii.gz") else path.with_suffix("")
