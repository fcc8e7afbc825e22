"""Volumes, arrays of three axes, from .npy, .npz, TIFF stacks and NIfTI; signals, of one axis, from .npy, .npz, text.

A volume is (C, D, H, W) float32, its axes in the order in which the file has them; a signal is (C, L) float32. Shapes
are read from the header, and judged before memory is taken for voxels: a few bytes may promise any number of them.
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
VOLUME_ONLY_SUFFIXES = frozenset(VOLUME_SUFFIXES[:3])  # endings of files that are no pictures
TEXT_SUFFIX = ".csv"
SIGNAL_SUFFIXES = (TEXT_SUFFIX, ".npz", ".npy")  # endings of files that may hold a signal
ARRAY_NOUNS = {1: "signal", 3: "volume"}  # axes -> what an array of so many is called
MAX_VOXELS = 2**28  # numbers of a volume: 1 GiB as float32
MAX_VOLUME_CHANNELS = 64
MAX_CLASS_NUMBER = 65_535  # the largest number in a mask
CLASS_NUMBER_TOLERANCE = 1e-3  # that a class number stored as a float may differ from a whole number
CLIP_PERCENTILES = (0.5, 99.5)  # that values are clipped to
GZIP_MAGIC, ZIP_MAGIC = b"\x1f\x8b", b"PK\x03\x04"
NIFTI_HEADER_BYTES = 544  # bytes that hold the header of a NIfTI file of either version
MAX_TRAILING_BYTES = 2**16  # bytes that may follow the voxels of a NIfTI file
VOXEL_DTYPE_KINDS = "biuf"  # kinds of numpy's dtypes that voxels may have
PAGE_AXES = ("Z", "Q", "I", "T")  # tifffile's names of the axis of pages
SAVE_VOLUME_HINT = "save it as .npy, or as NIfTI"


def parse_number_table(content: bytes) -> np.ndarray:
    """The bytes of a table in UTF-8 as (rows, columns) float64; a first line that has a word in it is a header, and
    empty lines stand for nothing. Raises ValueError, with the line, for anything else."""
    lines = [(number, line.strip()) for number, line in enumerate(content.decode("utf-8-sig").splitlines(), 1)]
    rows = [(number, [cell.strip('"') for cell in split_cells(line)]) for number, line in lines if line]
    if rows and any(cell and not can_parse_float(cell) for cell in rows[0][1]):
        del rows[0]
    if not rows:
        raise ValueError("no numbers")
    for number, row in rows:
        if len(row) != len(rows[0][1]):
            raise ValueError(f"line {number}: {len(row)} cells, {len(rows[0][1])} in the lines before")
        if wrong := [cell for cell in row if not can_parse_float(cell)]:
            raise ValueError(f"line {number}: {wrong[0][:40] or 'an empty cell'} is no number")
    return np.array([[float(cell) for cell in row] for _, row in rows])


def split_cells(line: str) -> list[str]:
    """The cells of a line: between commas, semicolons or tabs where it has any, else between spaces."""
    mark = next((mark for mark in ",;\t" if mark in line), None)
    return [cell.strip() for cell in line.split(mark)]


def can_parse_float(cell: str) -> bool:
    """Whether a cell holds a number."""
    try:
        float(cell)
    except ValueError:
        return False
    return True


RawVolume = bytes | np.ndarray | str | os.PathLike[str]


@dataclass(frozen=True)
class VolumeFile:
    """A volume or signal whose header has been read: `shape` (*sides) or (*sides, C), `dtype` as stored, and what reads
    it; sides are (D, H, W) or (L,).

    `header`: nibabel's, of a NIfTI file.
    """

    shape: tuple[int, ...]
    dtype: np.dtype
    read: Callable[[], np.ndarray]
    header: Any = None


def read_volume(
    raw: RawVolume, channels: int, name: str | None = None, axes: int = 3, standardise: bool = True
) -> np.ndarray:
    """Read a path, a file's bytes, or voxels (D, H, W[, C]) as (C, D, H, W) float32; a signal, of one axis, as (C, L).
    With `standardise` each channel is brought to mean 0 and deviation 1, else its values are those of the file.

    Raises DataError for files that cannot be read, another number of channels, and values that are not finite.
    """
    name = name or get_display_name(raw, axes)
    file = open_volume(raw, name, axes)
    count = count_channels(file.shape, axes)
    if count != channels:
        actual = f"{count} channel{'s' * (count > 1)}, the model takes {channels}"
        raise DataError(f"{name}: {actual}", "keep one kind of files in a data set")
    with np.errstate(over="ignore"):  # too large for float32: not finite
        voxels = call_volume_reader(file.read, name, axes).astype(np.float32)
    check_finite_values(voxels, name)
    voxels = np.ascontiguousarray(np.moveaxis(voxels, -1, 0)) if voxels.ndim > axes else voxels[None]
    return standardise_channels(voxels) if standardise else voxels


def read_label_volume(raw: RawVolume, name: str | None = None) -> np.ndarray:
    """Read a path, a file's bytes, or voxels (D, H, W) as (D, H, W) int32. Numbers may be stored as floats, and differ
    from whole numbers by ROUNDING, as a scale factor in the header leaves them.

    Raises DataError for files that cannot be read, several channels, and values that are no whole numbers from 0 on.
    """
    name = name or get_display_name(raw)
    file = open_volume(raw, name)
    if len(file.shape) != 3:
        raise DataError(f"{name}: a mask of {file.shape[3]} channels", "give one volume of class numbers")
    values = call_volume_reader(file.read, name)
    check_finite_values(values, name)
    low, high = values.min().item(), values.max().item()
    fraction = values[np.abs(np.rint(values) - values) > CLASS_NUMBER_TOLERANCE][:1] if values.dtype.kind == "f" else ()
    for wrong in (
        *fraction,
        *([low] if low < -CLASS_NUMBER_TOLERANCE else []),
        *([high] if high > MAX_CLASS_NUMBER + CLASS_NUMBER_TOLERANCE else []),
    ):
        raise DataError(f"{name}: {wrong:g} is no class", "classes are whole numbers from 0 on")
    return np.ascontiguousarray(np.rint(values) if values.dtype.kind == "f" else values, dtype=np.int32)


def read_volume_form(raw: RawVolume, name: str | None = None, axes: int = 3) -> tuple[int, tuple[int, ...]]:
    """Channels and (D, H, W) of a volume, or (L,) of a signal, from its header. Raises DataError."""
    shape = open_volume(raw, name or get_display_name(raw, axes), axes).shape
    return count_channels(shape, axes), shape[:axes]


def count_array_axes(raw: RawVolume) -> int | None:
    """The axes of the array in a file, by its header; None for a file that cannot be read or that holds none."""
    for axes in ARRAY_NOUNS:
        with suppress(DataError):
            return len(open_volume(raw, "", axes).shape)
    return None


def read_nifti_header(raw: RawVolume) -> Any:
    """A copy of nibabel's header of a NIfTI file, which says where in the body it lies; None for any other file."""
    if isinstance(raw, np.ndarray):
        return None
    header = open_volume(raw, get_display_name(raw)).header
    return None if header is None else header.copy()


def standardise_channels(volume: np.ndarray) -> np.ndarray:
    """(C, D, H, W) float32 -> the same, each channel clipped to its `CLIP_PERCENTILES`, less its mean, over its
    deviation.

    Numbers of MRI have no fixed range, and a few voxels may be far above all others. A channel that never changes is 0.
    A signal (C, L) is not clipped: its peaks may be what it is about.
    """
    for channel in volume:
        if channel.ndim > 1:
            low, high = np.percentile(channel, CLIP_PERCENTILES)
            np.clip(channel, low, high, out=channel)
        mean, deviation = channel.mean(dtype=np.float64), channel.std(dtype=np.float64)
        channel -= np.float32(mean)
        channel /= np.float32(deviation if deviation > 1e-7 * max(abs(mean), 1e-30) else 1.0)
    return volume


def open_volume(raw: RawVolume, name: str, axes: int = 3) -> VolumeFile:
    """Read the header of a volume, or of a signal, of one axis. The content decides the format, not the name. Raises
    DataError for other files, damaged headers, and shapes and types that no volume has."""
    if isinstance(raw, np.ndarray):
        file = VolumeFile(raw.shape, raw.dtype, lambda: raw)
    else:
        content = raw if isinstance(raw, bytes) else read_input_file(raw)
        if not content:
            raise DataError(f"{name}: empty file", "remove it")
        readers = ((NPY_MAGIC, open_npy), (ZIP_MAGIC, open_npz), *((mark, open_tiff) for mark in TIFF_SIGNATURES))
        reader = next((reader for mark, reader in readers if content.startswith(mark)), None)
        if reader is None and not (content.startswith(GZIP_MAGIC) or is_nifti(content)):
            if axes != 1:
                known = "known are NIfTI, .npy, .npz and TIFF"
                raise DataError(f"{name}: not a volume of a known format", known)
            reader = open_text_table
        file = call_volume_reader(lambda: (reader or open_nifti)(content, name), name, axes)
    if axes == 1 and len(file.shape) == 2 and file.shape[0] < file.shape[1]:  # channels first
        across = file
        file = VolumeFile(across.shape[::-1], across.dtype, lambda: across.read().T)
    check_volume_shape(file.shape, name, axes)
    if file.dtype.kind not in VOXEL_DTYPE_KINDS:
        raise DataError(f"{name}: voxels of type {file.dtype}", "integers and floats can be read")
    return file


def check_volume_shape(shape: tuple[int, ...], name: str, axes: int = 3) -> None:
    """Raise DataError for a shape that is not (D, H, W) or (D, H, W, C), of a signal (L,) or (L, C), and for too many
    numbers."""
    sides, kind = " x ".join(map(str, shape)) or "no axes", ARRAY_NOUNS[axes]
    if len(shape) not in (axes, axes + 1) or min(shape) < 1:
        stored = "(length) or (channels, length)" if axes == 1 else "(D, H, W) or (D, H, W, C)"
        raise DataError(f"{name}: an array of {sides} is no {kind}", f"store it as {stored}")
    if math.prod(shape) > MAX_VOXELS:
        raise DataError(f"{name}: a {kind} of {sides}", f"at most {MAX_VOXELS:,} numbers are read: cut or shrink it")
    if count_channels(shape, axes) > MAX_VOLUME_CHANNELS:
        problem = f"{shape[axes]} channels ({sides}), more than {MAX_VOLUME_CHANNELS}"
        hint = "if the last axis is time, store one moment a file" if axes == 3 else "store fewer channels a file"
        raise DataError(f"{name}: {problem}", hint)


def check_finite_values(values: np.ndarray, name: str) -> None:
    """Raise DataError for values (D, H, W[, C]) that are NaN or infinite."""
    if bad := values.size - np.count_nonzero(np.isfinite(values)) if values.dtype.kind == "f" else 0:
        raise DataError(f"{name}: {bad:,} of its values are NaN or infinite", "mend or remove the file")


def count_channels(shape: tuple[int, ...], axes: int = 3) -> int:
    """Channels of (*sides) or (*sides, C), where there are so many `axes` of sides."""
    return shape[axes] if len(shape) == axes + 1 else 1


def call_volume_reader(read: Callable[[], Any], name: str, axes: int = 3) -> Any:
    """Call `read`. Raises DataError for any exception, as readers do not list what they raise."""
    try:
        with suppress_warnings():
            return read()
    except (DataError, MemoryError):
        raise
    except ImportError as error:
        extra = "volumes" if error.name == "nibabel" else "data"
        problem = f"a file like this needs {error.name}, which is not installed"
        raise DataError(f"{name}: {problem}", install_hint(extra)) from None
    except Exception as error:
        problem = f"{name}: cannot be read as a {ARRAY_NOUNS[axes]} ({describe_exception(error)})"
        raise DataError(problem, "mend or remove the file") from None


def open_text_table(content: bytes, name: str) -> VolumeFile:
    """Read a table of numbers as (rows, columns), or as (rows,) where there is one column."""
    values = parse_number_table(content)
    values = values[:, 0] if values.shape[1] == 1 else values
    return VolumeFile(values.shape, values.dtype, lambda: values)


def open_npy(content: bytes, name: str) -> VolumeFile:
    """Read the header of a .npy file."""
    file = io.BytesIO(content)
    shape, fortran, dtype = read_npy_header(file, name)
    return VolumeFile(shape, dtype, lambda: array_from_bytes(content[file.tell() :], shape, dtype, fortran))


def open_npz(content: bytes, name: str) -> VolumeFile:
    """Read the header of the one array in a .npz file. Raises DataError for several."""
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        members = [member for member in archive.infolist() if member.filename.endswith(".npy")]
        if len(members) != 1:
            raise DataError(f"{name}: {len(members)} arrays, where a volume is one", "save each into a file of its own")
        with archive.open(members[0]) as file:
            shape, fortran, dtype = read_npy_header(file, name)

    def read() -> np.ndarray:
        with zipfile.ZipFile(io.BytesIO(content)) as archive, archive.open(members[0]) as file:
            read_npy_header(file, name)
            return array_from_bytes(file.read(math.prod(shape) * dtype.itemsize + 1), shape, dtype, fortran)

    return VolumeFile(shape, dtype, read)


def open_tiff(content: bytes, name: str) -> VolumeFile:
    """Read the headers of the pages of a TIFF: (pages, H, W[, C]). Raises DataError for pages that differ."""
    import logging

    import tifffile

    logging.getLogger("tifffile").disabled = True  # the DataError reports it
    with tifffile.TiffFile(io.BytesIO(content)) as file:
        series: Any = file.series
        if len(series) != 1:
            raise DataError(f"{name}: a TIFF of {len(series)} kinds of pages", "give all pages one size and type")
        axes, shape, dtype = series[0].axes, tuple(series[0].shape), series[0].dtype
    if axes[:1] not in PAGE_AXES or axes[1:] not in ("YX", "YXS"):
        raise DataError(f"{name}: a TIFF with the axes {axes} is no stack of pages", SAVE_VOLUME_HINT)

    def read() -> np.ndarray:
        with tifffile.TiffFile(io.BytesIO(content)) as file:
            one: Any = file.series[0]
            if one.dataoffset is not None:  # all pages in one piece
                if len(content) < one.dataoffset + one.nbytes:
                    raise ValueError("voxels are missing")
            else:
                for page in one.pages:
                    check_tiff_complete(page, content, name)
            return one.asarray(maxworkers=1)

    return VolumeFile(shape, dtype, read)


def open_nifti(content: bytes, name: str) -> VolumeFile:
    """Read the header of a NIfTI file of either version, compressed or not. Raises DataError."""
    import nibabel

    packed = content.startswith(GZIP_MAGIC)
    head = inflate_gzip(content, NIFTI_HEADER_BYTES) if packed else content[:NIFTI_HEADER_BYTES]
    if not is_nifti(head):
        raise DataError(f"{name}: not a volume of a known format", "known are NIfTI, .npy, .npz and TIFF")
    kind = nibabel.Nifti2Header if head[4:7] == b"n+2" else nibabel.Nifti1Header
    header: Any = kind.from_fileobj(io.BytesIO(head), check=False)
    shape, dtype, start = tuple(map(int, header.get_data_shape())), header.get_data_dtype(), header.get_data_offset()
    slope, inter = header.get_slope_inter()
    if start < header.sizeof_hdr:
        raise ValueError("voxels inside the header")
    shape = shape[:3] + shape[4:] if len(shape) == 5 and shape[3] == 1 else shape  # vectors are on the fifth axis
    shape = shape[:3] if len(shape) == 4 and shape[3] == 1 else shape

    def read() -> np.ndarray:
        end = start + math.prod(shape) * dtype.itemsize
        whole = inflate_gzip(content, end + MAX_TRAILING_BYTES, whole=True) if packed else content
        values = array_from_bytes(whole[start:end], shape, dtype, fortran=True)
        if (slope, inter) in ((None, None), (1.0, 0.0)):
            return values
        return values * np.float64(slope) + np.float64(inter or 0.0)

    return VolumeFile(shape, dtype, read, header)


def is_nifti(head: bytes) -> bool:
    """Whether bytes begin as a NIfTI file that holds its voxels does."""
    return head[344:348] == b"n+1\0" or head[4:8] == b"n+2\0"


def inflate_gzip(content: bytes, most: int, whole: bool = False) -> bytes:
    """The first `most` bytes of a gzip file of one member or several. With `whole` it must end before. Raises
    ValueError for one that is damaged or cut short."""
    parts, rest, room = [], content, most
    while rest and room:
        stream = zlib.decompressobj(31)
        try:
            parts.append(stream.decompress(rest, room))
        except zlib.error as error:
            raise ValueError(f"gzip: {error}") from None
        room -= len(parts[-1])
        if not stream.eof:
            if whole:
                raise ValueError("gzip: more bytes than its header says" if not room else "gzip: cut short")
            break
        rest = stream.unused_data.lstrip(b"\0")
    return b"".join(parts)


def array_from_bytes(content: bytes, shape: tuple[int, ...], dtype: np.dtype, fortran: bool) -> np.ndarray:
    """Bytes as an array (D, H, W[, C]) of `shape`, in native byte order. Raises ValueError for too few or too many."""
    if len(content) != (expected := math.prod(shape) * dtype.itemsize):
        raise ValueError(f"{len(content):,} bytes of voxels where {expected:,} were announced")
    array = np.frombuffer(content, dtype).reshape(shape, order="F" if fortran else "C")
    return array.astype(dtype.newbyteorder("="), copy=False)


def get_display_name(raw: RawVolume, axes: int = 3) -> str:
    """What a message calls a volume or a signal."""
    return escape_unprintable(raw) if isinstance(raw, (str, os.PathLike)) else ARRAY_NOUNS[axes]


def strip_volume_suffix(path: Path) -> Path:
    """A path without the ending of a volume, `a` for `a.nii.gz`."""
    return path.with_suffix("").with_suffix("") if path.name.lower().endswith(".nii.gz") else path.with_suffix("")
