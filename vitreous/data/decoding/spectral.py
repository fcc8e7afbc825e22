"""Read images with any number of bands or more than 8 bits: multispectral TIFF and GeoTIFF, .npy, 16-bit grey.

Such an image is decoded to a tuple of PIL images, one per band, of mode L for uint8 or F for other dtypes. Cropping,
resizing and mirroring are applied to each band by the code for colour images. Colour augmentation is not applied.

A pixel is void, that is, without data, if any band is NaN, infinite, or equal to the nodata value of a GeoTIFF. If the
nodata value is 0, a pixel is void only if all bands are 0. In class maps, void pixels are ignored. In images, they are
filled with the mean of their band.
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

COLOUR_FORMS = ((1, "uint8"), (3, "uint8"))  # bands and dtype of arrays that are grey or RGB images
MODEL_DTYPES = ("uint8", "uint16", "int16", "float32")  # dtypes of decoded bands; others are converted to float32
BAND_SUFFIXES = (".tif", ".tiff", ".npy")  # suffixes of files that may be read by band
NO_DATA_REASON = "no pixel has data"


class Bands(tuple[Image.Image, ...]):
    """The bands of an image, a tuple of PIL images. `is_void` (H, W) bool marks the pixels without data; None if all
    pixels have data."""

    is_void: np.ndarray | None

    def __new__(cls, bands: Iterable[Image.Image], void: np.ndarray | None = None) -> Bands:
        """Create an image from bands of equal size; `void` (H, W) bool becomes `is_void`."""
        instance = super().__new__(cls, bands)
        instance.is_void = void
        return instance

    def __getnewargs__(self) -> tuple[Any, ...]:
        """Return the arguments of `__new__`, which pickle stores."""
        return tuple(self), self.is_void


#: input of preprocessing and augmentation: an image, the bands of an image, or a volume or signal (C, *sizes) float32
DecodedSample = Image.Image | tuple[Image.Image, ...] | np.ndarray


def list_bands(sample: DecodedSample) -> tuple[Image.Image, ...]:
    """Return the PIL images of a sample: one for a colour image, or one per band. Raises UsageError for a volume."""
    if isinstance(sample, np.ndarray):
        raise UsageError("image augmentations do not apply to volumes", "use --recipe segment, which supports volumes")
    return sample if isinstance(sample, tuple) else (sample,)


def get_void_mask(sample: DecodedSample) -> np.ndarray | None:
    """Return the mask of the void pixels of an image, (H, W) bool; None if all pixels have data."""
    return sample.is_void if isinstance(sample, Bands) else None


def detect_channel_form(raw: bytes | np.ndarray, name: str) -> tuple[int, str] | None:
    """Return the number of bands and the dtype of an image that must be read by band; None for an image that Pillow
    reads as 8-bit grey or RGB.

    The following images are read by band:

    - pixels (H, W[, C]) and .npy files, unless they are grey or RGB of uint8
    - TIFF files whose samples are not colours
    - TIFF files with several grey pages of one size
    - TIFF files with one grey page of signed or floating-point values

    The dtype is one of `MODEL_DTYPES` for files, and that of the array for pixels. Raises DataError for a damaged or
    unsupported file.
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
    """Return the dtype, one of `MODEL_DTYPES`, to which values of the dtype of a file are converted."""
    return dtype if dtype in MODEL_DTYPES else "float32"


def read_bands(
    raw: bytes | np.ndarray | str | os.PathLike[str],
    channels: int,
    dtype_name: str,
    name: str | None = None,
    fill: Sequence[float] | None = None,
) -> Bands:
    """Read a path, a file's bytes, or pixels (H, W[, C]) as one PIL image per band, of mode L for uint8, else F.

    `channels` and `dtype_name` are the number of bands and the dtype that the model expects. Void pixels get the values
    `fill`, one per band, by default the mean of the other pixels of the band. Raises DataError for an unreadable file
    and for other bands or dtypes, and EmptyImageError if no pixel has data.
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
    """Return a copy of a band (H, W) in which the pixels `void` (H, W) bool are `value`, or if it is None, the mean of
    the other pixels."""
    if value is None:
        value = float(band[~void].mean(dtype=np.float64))
    return np.where(void, np.asarray(round(value) if band.dtype == np.uint8 else value, band.dtype), band)


def read_void_mask(path: Path) -> np.ndarray | None:
    """Read the mask of the void pixels of an image file, (H, W) bool; None if all pixels have data. Raises DataError
    for an unreadable file."""
    if not path.name.lower().endswith(BAND_SUFFIXES):
        return None
    return decode_void_mask(read_input_file(path), escape_unprintable(path))


def decode_void_mask(raw: bytes | np.ndarray, name: str) -> np.ndarray | None:
    """Decode the mask of the void pixels of an image, a file's bytes or pixels (H, W[, C]): (H, W) bool. Returns None
    if all pixels have data, or if the image is not read by band. Raises DataError for an unreadable file."""
    form = detect_channel_form(raw, name)
    if form is None or (form[1] != "float32" and find_nodata_value(raw, name) is None):
        return None  # integers without a nodata value cannot be void, so they need not be decoded
    return read_band_values(raw, name)[1]


def read_band_values(raw: bytes | np.ndarray, name: str) -> tuple[np.ndarray, np.ndarray | None]:
    """Read a file's bytes or pixels (H, W[, C]) as bands (C, H, W) of a dtype in `MODEL_DTYPES`.

    Also returns the mask of the void pixels (H, W) bool, None if all pixels have data. Raises DataError for an
    unreadable file."""
    array = read_channels(raw, name)
    with np.errstate(over="ignore"):  # values too large for float32 become infinite, and their pixels void
        values = array.astype(choose_model_dtype(array.dtype.name), copy=False)
    return values, compute_void_mask(array, values, find_nodata_value(raw, name))


def find_nodata_value(raw: bytes | np.ndarray, name: str) -> float | None:
    """Return the nodata value in the bytes of a TIFF; None if it has none, for other files, and for pixels (H, W[, C]).
    Raises DataError for a damaged file."""
    if isinstance(raw, np.ndarray) or not raw.startswith(TIFF_SIGNATURES):
        return None
    return read_nodata_tag(call_reader(lambda raw, name: read_tiff_tags(raw), raw, name))


def compute_void_mask(stored: np.ndarray, values: np.ndarray, nodata: float | None) -> np.ndarray | None:
    """Compute the mask of the void pixels of an image: (H, W) bool, or None if all pixels have data.

    `stored` (C, H, W) are the values of the file, `values` (C, H, W) the same in a dtype of `MODEL_DTYPES`. `nodata` is
    the nodata value of the file, None if it has none.
    """
    void = np.zeros(stored.shape[1:], bool)
    if values.dtype.kind == "f":
        for band in values:  # band by band, since a reduction over the first axis takes five times as long
            void |= ~np.isfinite(band)
    if nodata is not None and (value := cast_nodata(nodata, stored.dtype)) is not None:
        if nodata == 0:
            void |= reduce(np.logical_and, (band == value for band in stored))
        else:
            for band in stored:
                void |= band == value
    return void if void.any() else None


def cast_nodata(nodata: float, dtype: np.dtype) -> Any:
    """Convert a nodata value to the dtype of the file. Returns None if the dtype cannot represent it, and for NaN and
    infinity, which are void in any case."""
    if not np.isfinite(nodata):
        return None
    if dtype.kind == "f":
        with np.errstate(over="ignore"):
            return dtype.type(nodata)
    limits = np.iinfo(dtype)
    return dtype.type(int(nodata)) if nodata.is_integer() and limits.min <= nodata <= limits.max else None


def read_channels(raw: bytes | np.ndarray, name: str) -> np.ndarray:
    """Read a file's bytes or pixels (H, W[, C]) as (C, H, W) of the stored dtype, in native byte order. Raises
    DataError for an unreadable file."""
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
    """Return whether a TIFF must be read with tifffile: it has several samples per pixel that Pillow cannot read or
    would truncate, or grey values of a dtype that Pillow does not support. Raises DataError for an unsupported
    dtype."""
    tags, form = read_tiff_tags(raw), read_tiff_form(raw, name)
    has_several_samples = int(tags.get(SAMPLES_TAG, (1,))[0]) > 1
    return (
        (has_several_samples and bool(form.bands))
        or has_wide_samples(tags)
        or (form.bands == 1 and form.dtype not in PILLOW_DTYPES)
    )


def call_reader(read: Callable[[bytes, str], Any], raw: bytes, name: str) -> Any:
    """Check the decoding cost of a file, call `read(raw, name)` and return its result. All exceptions are raised as
    DataError, since the exceptions of readers are undocumented."""
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
    """Read an image with Pillow as (C, H, W), upright. C are the pages of a TIFF with several grey pages of one size,
    or the channels of a single page. Raises DataError for more than MAX_PIXELS values."""
    is_tiff = raw.startswith(TIFF_SIGNATURES)
    count, page_arrays = count_tiff_pages(raw) if is_tiff else 1, []
    with Image.open(io.BytesIO(raw), formats=select_pillow_formats(raw, name, IMAGE_FORMATS)) as image:
        if image.width * image.height * count > MAX_PIXELS:
            raise too_large_error(name, image.width, image.height)
        for page in range(count):
            image.seek(page)
            image.load()
            page_arrays.append(np.asarray(ImageOps.exif_transpose(image)))
    if is_tiff and page_arrays[0].dtype == np.int32:  # Pillow decodes all signed integers to int32
        page_arrays = [array.astype(get_tiff_dtype(read_tiff_tags(raw), name)) for array in page_arrays]
    return np.stack(page_arrays) if page_arrays[0].ndim == 2 else np.moveaxis(page_arrays[0], -1, 0)
