"""Images with any number of bands or more than 8 bits: multispectral TIFF and GeoTIFF, .npy, 16-bit greys.

Such an image is a tuple of Pillow images, one per band, of mode L (8 bits) or F (any other). Cropping, resampling and
mirroring are applied to each band by the code for photos; colour augmentation is not applied.

A pixel is void if any band is NaN, infinite, or equal to the nodata value of a GeoTIFF; if that value is 0, all bands
must be 0. Void pixels are ignored in class maps, and filled with the mean of their band.
"""

from __future__ import annotations

import io
import os
from collections.abc import Callable, Iterable, Sequence
from functools import reduce
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError

from vitreous.data.decoding.decode import (
    IMAGE_FORMATS,
    describe_bands,
    describe_exception,
    read_input_file,
    suppress_warnings,
)
from vitreous.data.decoding.gate import MAX_PIXELS, check_decoding_cost, too_large_error
from vitreous.data.decoding.heif import select_pillow_formats
from vitreous.data.decoding.npy import NPY_MAGIC, read_npy
from vitreous.data.decoding.tiff import (
    PILLOW_DTYPES,
    SAMPLES_TAG,
    SAVE_TIFF_HINT,
    TIFF_SIGNATURES,
    count_tiff_pages,
    get_tiff_dtype,
    has_wide_samples,
    read_nodata_tag,
    read_tiff_form,
    read_tiff_samples,
    read_tiff_tags,
)
from vitreous.errors import DataError, EmptyImageError, UsageError, escape_unprintable, install_hint

COLOUR_FORMS = ((1, "uint8"), (3, "uint8"))  # bands and dtype of arrays that are ordinary images
MODEL_DTYPES = ("uint8", "uint16", "int16", "float32")  # dtypes of model inputs; others are converted to float32


BAND_SUFFIXES = (".tif", ".tiff", ".npy")  # suffixes of files that may be read by band
NO_DATA_REASON = "no pixel has data"


class Bands(tuple[Image.Image, ...]):
    """The bands of an image, one Pillow image each. `is_void` (H, W) bool: pixels without data, None if all have
    data."""

    is_void: np.ndarray | None

    def __new__(cls, bands: Iterable[Image.Image], void: np.ndarray | None = None) -> Bands:
        """Combine bands of equal size."""
        instance = super().__new__(cls, bands)
        instance.is_void = void
        return instance

    def __getnewargs__(self) -> tuple[Any, ...]:
        """Return the arguments of `__new__` for pickle."""
        return tuple(self), self.is_void


#: input of preprocessing and augmentation; an array is a volume, (C, D, H, W) float32
DecodedSample = Image.Image | tuple[Image.Image, ...] | np.ndarray


def list_bands(sample: DecodedSample) -> tuple[Image.Image, ...]:
    """Return the Pillow images of a sample, one or one for each band. Raises UsageError for a volume."""
    if isinstance(sample, np.ndarray):
        raise UsageError("image augmentations do not apply to volumes", "use --recipe segment, which supports volumes")
    return sample if isinstance(sample, tuple) else (sample,)


def get_void_mask(sample: DecodedSample) -> np.ndarray | None:
    """Return the void pixels of an image, (H, W) bool; None if all have data."""
    return sample.is_void if isinstance(sample, Bands) else None


def detect_channel_form(raw: bytes | np.ndarray, name: str) -> tuple[int, str] | None:
    """Return bands and dtype, one of `MODEL_DTYPES`, of an image that must be read by band; None for images that Pillow
    reads at 8 bits (grey, RGB), including 16-bit greys.

    Read by band are pixels (H, W[, C]) of other dtypes or band counts, TIFF files whose samples are not colours, TIFF
    files with several grey pages of one size, and grey TIFF files with signed or floating-point values. Raises
    DataError for a damaged or unsupported file.
    """
    if isinstance(raw, bytes) and raw.startswith(TIFF_SIGNATURES):
        tiff_form = call_reader(read_tiff_form, raw, name)
        return (tiff_form.bands, choose_model_dtype(tiff_form.dtype)) if tiff_form.bands else None
    if isinstance(raw, np.ndarray):
        form = (1 if raw.ndim == 2 else raw.shape[2], raw.dtype.name)
    elif raw.startswith(NPY_MAGIC):
        array = read_npy(raw, name)
        form = (len(array), choose_model_dtype(array.dtype.name))
    else:
        return None
    return None if form in COLOUR_FORMS else form


def choose_model_dtype(dtype: str) -> str:
    """Return the dtype, one of `MODEL_DTYPES`, that values of a stored dtype are converted to."""
    return dtype if dtype in MODEL_DTYPES else "float32"


def read_bands(
    raw: bytes | np.ndarray | str | os.PathLike[str],
    channels: int,
    dtype_name: str,
    name: str | None = None,
    fill: Sequence[float] | None = None,
) -> Bands:
    """Read a path, a file's bytes, or pixels (H, W[, C]) as one Pillow image per band, mode L for uint8, else F.

    Void pixels get the values `fill` (C,), by default the mean of the other pixels of each band. Raises DataError for
    unreadable files and for band counts or dtypes that differ from `dtype_name`, and EmptyImageError if no pixel has
    data.
    """
    name = name or (escape_unprintable(raw) if isinstance(raw, (str, os.PathLike)) else "image")
    array, void = read_band_values(raw if isinstance(raw, (bytes, np.ndarray)) else read_input_file(raw), name)
    if array.dtype.name != dtype_name or len(array) != channels:
        expected = describe_bands(channels, dtype_name)
        problem = f"{name}: {describe_bands(len(array), array.dtype.name)}, but the model expects {expected}"
        raise DataError(problem, f"use files of {expected}, or train a model on these files")
    if void is not None and void.all():
        raise EmptyImageError(f"{name}: {NO_DATA_REASON}", "delete the file")
    dtype = np.uint8 if dtype_name == "uint8" else np.float32
    values = [np.ascontiguousarray(band, dtype=dtype) for band in array]
    if void is not None:
        values = [
            fill_void(band, void, None if fill is None else fill[band_index]) for band_index, band in enumerate(values)
        ]
    return Bands((Image.fromarray(band) for band in values), void)


def fill_void(band: np.ndarray, void: np.ndarray, value: float | None) -> np.ndarray:
    """Copy a band (H, W) with `value` at the pixels `void` (H, W) bool; None uses the mean of the others."""
    if value is None:
        value = float(band[~void].mean(dtype=np.float64))
    return np.where(void, np.asarray(round(value) if band.dtype == np.uint8 else value, band.dtype), band)


def read_void_mask(path: Path) -> np.ndarray | None:
    """Read the void pixels of an image file, (H, W) bool; None if all have data. Raises DataError."""
    if not path.name.lower().endswith(BAND_SUFFIXES):
        return None
    return decode_void_mask(read_input_file(path), escape_unprintable(path))


def decode_void_mask(raw: bytes | np.ndarray, name: str) -> np.ndarray | None:
    """Decode the void pixels of a file's bytes or pixels (H, W[, C]), (H, W) bool; None if all have data, or if the
    image is not read by band. Raises DataError."""
    form = detect_channel_form(raw, name)
    if form is None or (form[1] != "float32" and find_nodata_value(raw, name) is None):
        return None  # decided without the values: none of them can be void
    return read_band_values(raw, name)[1]


def read_band_values(raw: bytes | np.ndarray, name: str) -> tuple[np.ndarray, np.ndarray | None]:
    """Read a file's bytes or pixels (H, W[, C]) as (C, H, W) of a dtype in `MODEL_DTYPES`, and the void pixels (H, W)
    bool, None if all have data. Raises DataError."""
    array = read_channels(raw, name)
    with np.errstate(over="ignore"):  # values beyond float32 become infinite: void pixels
        values = array.astype(choose_model_dtype(array.dtype.name), copy=False)
    return values, compute_void_mask(array, values, find_nodata_value(raw, name))


def find_nodata_value(raw: bytes | np.ndarray, name: str) -> float | None:
    """Return the nodata value of a TIFF's bytes; None for other files, for pixels (H, W[, C]), and if there is none.
    Raises DataError."""
    if isinstance(raw, np.ndarray) or not raw.startswith(TIFF_SIGNATURES):
        return None
    return read_nodata_tag(call_reader(lambda raw, name: read_tiff_tags(raw), raw, name))


def compute_void_mask(stored: np.ndarray, values: np.ndarray, nodata: float | None) -> np.ndarray | None:
    """Compute the void pixels (H, W) bool of a stored image (C, H, W) with the converted `values`; None if all have
    data."""
    void = np.zeros(stored.shape[1:], bool)
    if values.dtype.kind == "f":
        for band in values:  # by band: reductions over the first axis take five times as long
            void |= ~np.isfinite(band)
    if nodata is not None and (value := cast_nodata(nodata, stored.dtype)) is not None:
        if nodata == 0:
            void |= reduce(np.logical_and, (band == value for band in stored))
        else:
            for band in stored:
                void |= band == value
    return void if void.any() else None


def cast_nodata(nodata: float, dtype: np.dtype) -> Any:
    """Convert a nodata value to a dtype; None if it is not representable, and for non-finite values, which are void in
    any case."""
    if not np.isfinite(nodata):
        return None
    if dtype.kind == "f":
        with np.errstate(over="ignore"):
            return dtype.type(nodata)
    limits = np.iinfo(dtype)
    return dtype.type(int(nodata)) if nodata.is_integer() and limits.min <= nodata <= limits.max else None


def read_channels(raw: bytes | np.ndarray, name: str) -> np.ndarray:
    """Read a file's bytes or pixels (H, W[, C]) as (C, H, W) of their dtype, in native byte order. Raises DataError."""
    if isinstance(raw, np.ndarray):
        return raw[None] if raw.ndim == 2 else np.moveaxis(raw, -1, 0)
    if raw.startswith(NPY_MAGIC):
        array = read_npy(raw, name)
    elif raw.startswith(TIFF_SIGNATURES) and call_reader(needs_tifffile, raw, name):
        array = call_reader(read_tiff_samples, raw, name)
    else:
        array = call_reader(read_pillow_pages, raw, name)
    return array.astype(array.dtype.newbyteorder("="), copy=False)


def needs_tifffile(raw: bytes, name: str) -> bool:
    """Return whether a TIFF must be read with tifffile: several samples that Pillow cannot read or would truncate, or
    greys of a dtype that Pillow lacks."""
    tags, form = read_tiff_tags(raw), read_tiff_form(raw, name)
    has_samples = int(tags.get(SAMPLES_TAG, (1,))[0]) > 1
    return (
        (has_samples and bool(form.bands))
        or has_wide_samples(tags)
        or (form.bands == 1 and form.dtype not in PILLOW_DTYPES)
    )


def call_reader(read: Callable[[bytes, str], Any], raw: bytes, name: str) -> Any:
    """Call `read(raw, name)`, and raise DataError for any exception, since readers' exceptions are undocumented."""
    try:
        check_decoding_cost(raw, name)
        with suppress_warnings():
            return read(raw, name)
    except (DataError, MemoryError):
        raise
    except UnidentifiedImageError:
        raise DataError(f"{name}: not an image of a known format", SAVE_TIFF_HINT) from None
    except ImportError:
        problem = "this TIFF needs tifffile, which is not installed"
        raise DataError(f"{name}: {problem}", install_hint("data")) from None
    except Exception as error:
        raise DataError(
            f"{name}: cannot be read as an image ({describe_exception(error)})", "fix or delete the file"
        ) from None


def read_pillow_pages(raw: bytes, name: str) -> np.ndarray:
    """Read with Pillow, upright, as (C, H, W): pages of one size, or the channels of one page. Raises DataError."""
    tiff = raw.startswith(TIFF_SIGNATURES)
    count, page_arrays = count_tiff_pages(raw) if tiff else 1, []
    with Image.open(io.BytesIO(raw), formats=select_pillow_formats(raw, name, IMAGE_FORMATS)) as image:
        if image.width * image.height * count > MAX_PIXELS:
            raise too_large_error(name, image.width, image.height)
        for page in range(count):
            image.seek(page)
            image.load()
            page_arrays.append(np.asarray(ImageOps.exif_transpose(image)))
    if tiff and page_arrays[0].dtype == np.int32:  # Pillow's only mode for signed integers
        page_arrays = [array.astype(get_tiff_dtype(read_tiff_tags(raw), name)) for array in page_arrays]
    return np.stack(page_arrays) if page_arrays[0].ndim == 2 else np.moveaxis(page_arrays[0], -1, 0)
