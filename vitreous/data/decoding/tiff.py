"""Headers and samples of TIFF and GeoTIFF files: bands, dtype, size, nodata value, georeference.

Bands are the samples of a pixel that are not colours. Reading their values needs tifffile (extra `data`), and for LZW,
Zstandard and other compressions also imagecodecs (extra `geotiff`).
"""

from __future__ import annotations

import io
import logging
import math
import os
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, TiffImagePlugin

from vitreous.data.decoding.gate import MAX_PIXELS, too_large_error
from vitreous.data.decoding.npy import MAX_BANDS
from vitreous.errors import DataError, install_hint

TIFF_SIGNATURES = (b"II*\0", b"MM\0*", b"II+\0", b"MM\0+")
#: (bits, sample format) of a TIFF -> dtype
TIFF_DTYPES = {
    **{(8, 1): "uint8", (16, 1): "uint16", (32, 1): "uint32", (64, 1): "uint64"},
    **{(8, 2): "int8", (16, 2): "int16", (32, 2): "int32", (64, 2): "int64"},
    **{(16, 3): "float16", (32, 3): "float32", (64, 3): "float64"},
}
PILLOW_DTYPES = ("uint8", "uint16", "int16", "float32")  # dtypes of grey pages that Pillow reads
# tags of TIFF 6.0
WIDTH_TAG, HEIGHT_TAG, BITS_TAG, PHOTOMETRIC_TAG, ORIENTATION_TAG, SAMPLES_TAG, EXTRA_SAMPLES_TAG, SAMPLE_FORMAT_TAG = (
    256,
    257,
    258,
    262,
    274,
    277,
    338,
    339,
)
#: tags of GeoTIFF 1.1: pixel scale, tie points, transformation, and the key directory with its numeric and text values
GEO_TAGS = (33550, 33922, 34264, 34735, 34736, 34737)
SHORT_TYPE, ASCII_TYPE, DOUBLE_TYPE = 3, 2, 12  # types of tags
TAG_TYPES = {34735: SHORT_TYPE, 34737: ASCII_TYPE}  # of GEO_TAGS; the others are DOUBLE
NODATA_TAG = 42113  # GDAL's tag of the nodata value, as text
GREY_PHOTOMETRIC = (0, 1)  # PhotometricInterpretation: white is 0, black is 0
RGB_PHOTOMETRIC = 2  # PhotometricInterpretation
NO_COMPRESSION, DEFLATE_COMPRESSIONS = 1, (8, 32946)  # Compression
#: Compression -> name, for those that imagecodecs decodes losslessly
TIFF_CODECS = {5: "LZW", 32773: "PackBits", 34887: "LERC", 34925: "LZMA", 50000: "Zstandard"}
FLOATING_PREDICTOR = 3
SAVE_TIFF_HINT = "save it as .npy, or as a TIFF without compression or with deflate"

TiffTags = dict[int, tuple[Any, ...]]


@dataclass(frozen=True)
class TiffForm:
    """The header of a TIFF: upright (height, width) `size`, `bands`, 0 for colours, and the `dtype` of its values."""

    size: tuple[int, int]
    bands: int
    dtype: str


def read_tiff_tags(raw: bytes) -> TiffTags:
    """Read the tags of the first page, each as a tuple. Raises Pillow's exceptions for a damaged file."""
    ifd = TiffImagePlugin.ImageFileDirectory_v2(raw[:16] if raw[2] == 43 else raw[:8])
    file = io.BytesIO(raw)
    file.seek(ifd.next)
    ifd.load(file)
    known_tags = (
        WIDTH_TAG,
        HEIGHT_TAG,
        BITS_TAG,
        PHOTOMETRIC_TAG,
        ORIENTATION_TAG,
        SAMPLES_TAG,
        EXTRA_SAMPLES_TAG,
        SAMPLE_FORMAT_TAG,
        NODATA_TAG,
        *GEO_TAGS,
    )
    tags = {tag: ifd[tag] for tag in known_tags if tag in ifd}
    return {tag: value if isinstance(value, tuple) else (value,) for tag, value in tags.items()}


def get_tiff_size(tags: TiffTags) -> tuple[int, int]:
    """Return the upright (height, width) from tags; (0, 0) without them."""
    height, width = int(tags.get(HEIGHT_TAG, (0,))[0]), int(tags.get(WIDTH_TAG, (0,))[0])
    return (width, height) if int(tags.get(ORIENTATION_TAG, (1,))[0]) >= 5 else (height, width)


def get_tiff_dtype(tags: TiffTags, name: str) -> str:
    """Return the dtype from tags. Raises DataError if it is not in `TIFF_DTYPES`."""
    pairs = {
        (int(bits), int(sample_format))
        for bits in tags.get(BITS_TAG, (1,))
        for sample_format in tags.get(SAMPLE_FORMAT_TAG, (1,))
    }
    return check_tiff_dtype(TIFF_DTYPES.get(pairs.pop(), "") if len(pairs) == 1 else "", name)


def check_tiff_dtype(dtype: str, name: str) -> str:
    """Return a dtype. Raises DataError if it is not in `TIFF_DTYPES`."""
    if dtype not in TIFF_DTYPES.values():
        problem = f"a TIFF with values that are not {', '.join(TIFF_DTYPES.values())}"
        raise DataError(f"{name}: {problem}", "convert it to one of those")
    return dtype


def count_tiff_bands(tags: TiffTags) -> int:
    """Return the samples per pixel of a TIFF with these tags if they are bands; 0 if they are colours.

    An extra sample makes all of them bands, unless it is transparency.
    """
    count, extra = int(tags.get(SAMPLES_TAG, (1,))[0]), tags.get(EXTRA_SAMPLES_TAG, ())
    greys = count > 1 and tags.get(PHOTOMETRIC_TAG, GREY_PHOTOMETRIC)[0] in GREY_PHOTOMETRIC
    return count if count > 4 or (greys and not extra) or (count > 1 and 0 in extra) else 0


def has_wide_samples(tags: TiffTags) -> bool:
    """Return whether a pixel has several samples of more than 8 bits, which Pillow would truncate."""
    return int(tags.get(SAMPLES_TAG, (1,))[0]) > 1 and max(tags.get(BITS_TAG, (1,))) > 8


def read_tiff_form(raw: bytes, name: str) -> TiffForm:
    """Read the form of a TIFF from its headers.

    Grey pages of one size are bands, and so is a single grey page whose values are not 8-bit or 16-bit unsigned
    integers. Raises DataError for bands of an unsupported dtype, and Pillow's exceptions for a damaged file.
    """
    tags = read_tiff_tags(raw)
    size, bands = get_tiff_size(tags), count_tiff_bands(tags)
    bits, photometric = tags.get(BITS_TAG, (1,)), tags.get(PHOTOMETRIC_TAG, GREY_PHOTOMETRIC)[0]
    if bands:
        return TiffForm(size, bands, get_tiff_dtype(tags, name))
    if int(tags.get(SAMPLES_TAG, (1,))[0]) > 1:
        dtype = TIFF_DTYPES.get((int(bits[0]), int(tags.get(SAMPLE_FORMAT_TAG, (1,))[0])), "")
        is_colour = dtype in ("", "uint8", "uint16")
        return TiffForm(size, 0 if is_colour else int(tags[SAMPLES_TAG][0]), dtype)
    if photometric not in GREY_PHOTOMETRIC or bits in ((1,), (2,), (4,)):
        return TiffForm(size, 0, "")
    dtype = get_tiff_dtype(tags, name)
    if dtype not in PILLOW_DTYPES:
        return TiffForm(size, 1, dtype)
    count = count_tiff_pages(raw)
    return TiffForm(size, 0 if count == 1 and dtype in ("uint8", "uint16") else count, dtype)


def count_tiff_pages(raw: bytes) -> int:
    """Count the pages of a TIFF if all have one size and mode, else 1. Reads at most MAX_BANDS headers."""
    with Image.open(io.BytesIO(raw), formats=("TIFF",)) as image:
        first_page = (image.size, image.mode)
        for count in range(1, MAX_BANDS + 1):
            try:
                image.seek(count)
            except EOFError:
                return count
            if (image.size, image.mode) != first_page:
                break
    return 1


def read_nodata_tag(tags: TiffTags) -> float | None:
    """Return the nodata value of GDAL's tag; None if there is none, or if it is not a number."""
    text = tags.get(NODATA_TAG, ("",))[0]
    try:
        return float(text.decode("ascii") if isinstance(text, bytes) else text.strip("\0 "))
    except (ValueError, AttributeError):
        return None


def read_georeference(raw: bytes | str | os.PathLike[str]) -> TiffTags | None:
    """Return the georeferencing tags of a GeoTIFF, a path or a file's bytes; None for other files."""
    try:
        if not isinstance(raw, bytes):
            with open(raw, "rb") as file:
                if file.read(4) not in TIFF_SIGNATURES:
                    return None
            raw = Path(raw).read_bytes()
        tags = read_tiff_tags(raw) if raw.startswith(TIFF_SIGNATURES) else {}
    except Exception:  # Pillow's exceptions for a damaged header are undocumented
        return None
    geo_tags = {tag: tags[tag] for tag in GEO_TAGS if tag in tags}
    return geo_tags or None


def encode_geotiff(class_map: Image.Image, georeference: TiffTags) -> bytes:
    """Encode a class map as a GeoTIFF with deflate compression, with ignored pixels as nodata."""
    tags = TiffImagePlugin.ImageFileDirectory_v2()
    for tag, values in georeference.items():
        tags.tagtype[tag] = TAG_TYPES.get(tag, DOUBLE_TYPE)
        tags[tag] = values[0] if tags.tagtype[tag] == ASCII_TYPE else values
    tags.tagtype[NODATA_TAG] = ASCII_TYPE
    tags[NODATA_TAG] = "65535" if class_map.mode.startswith("I") else "255"
    file = io.BytesIO()
    class_map.save(file, "TIFF", compression="tiff_adobe_deflate", tiffinfo=tags)
    return file.getvalue()


def read_tiff_samples(raw: bytes, name: str) -> np.ndarray:
    """Read the first page of a TIFF as (C, H, W), with tifffile. Raises ImportError and DataError."""
    import tifffile

    logging.getLogger("tifffile").disabled = True  # the DataError reports it
    with tifffile.TiffFile(io.BytesIO(raw)) as file:
        page: Any = file.pages[0]
        if page.axes not in ("YX", "YXS", "SYX"):
            raise DataError(f"{name}: a TIFF with the axes {page.axes}", SAVE_TIFF_HINT)
        if page.size > MAX_PIXELS:
            raise too_large_error(name, page.imagewidth, page.imagelength)
        check_tiff_dtype(page.dtype.name if page.dtype else "", name)
        if page.tags.valueof(ORIENTATION_TAG, 1) != 1:
            raise DataError(f"{name}: a TIFF of {page.samplesperpixel} samples that is not upright", "rotate it")
        check_tiff_complete(page, raw, name)
        array = page.asarray(maxworkers=1)
    return array[None] if page.axes == "YX" else np.moveaxis(array, -1, 0) if page.axes == "YXS" else array


def check_tiff_complete(page: Any, raw: bytes, name: str) -> None:
    """Raise DataError for a page with missing, truncated or surplus strips or tiles, and for an unsupported
    compression."""
    size, count = math.prod(page.chunks), math.prod(page.chunked)
    check_tiff_codec(page, name)
    segments = list(zip(page.dataoffsets, page.databytecounts, strict=True))
    # GDAL writes 0 for a strip or tile without data (SPARSE_OK), which tifffile fills with the nodata value
    is_inside = all(start == length == 0 or 0 < length <= len(raw) - start for start, length in segments)
    if size > MAX_PIXELS or len(segments) != count or not is_inside or not any(length for _, length in segments):
        raise DataError(f"{name}: a TIFF with missing strips", "fix or delete the file")
    sparse = sum(not length for _, length in segments)
    if page.compression in TIFF_CODECS:
        return  # tifffile rejects a strip or tile that decodes to too few values
    if page.compression == NO_COMPRESSION:
        stored = sum(length for _, length in segments)
    else:
        max_bytes = size * page.dtype.itemsize
        stored = sum(
            count_inflated_bytes(raw[start : start + length], max_bytes) for start, length in segments if length
        )
    stored += sparse * size * page.dtype.itemsize
    if stored < page.nbytes:
        problem = f"{stored:,} bytes of data, but the header states {page.nbytes:,}"
        raise DataError(f"{name}: {problem}", "fix or delete the file")


def check_tiff_codec(page: Any, name: str) -> None:
    """Raise DataError for an unsupported compression or predictor, or one that needs the missing imagecodecs."""
    compression, predictor = int(page.keyframe.compression), int(page.keyframe.predictor)
    if compression not in (NO_COMPRESSION, *DEFLATE_COMPRESSIONS, *TIFF_CODECS):
        raise DataError(f"{name}: a TIFF compressed by method {compression}", SAVE_TIFF_HINT)
    codec_name = TIFF_CODECS.get(compression, "")
    if not codec_name and predictor == FLOATING_PREDICTOR:
        codec_name = "the floating-point predictor"
    if codec_name and not has_imagecodecs():
        problem = f"a TIFF with {codec_name} compression" if compression in TIFF_CODECS else f"a TIFF with {codec_name}"
        raise DataError(f"{name}: {problem} needs imagecodecs ({install_hint('geotiff')})", f"or {SAVE_TIFF_HINT}")


def has_imagecodecs() -> bool:
    """Return whether imagecodecs is installed."""
    try:
        import imagecodecs  # noqa: F401
    except ImportError:
        return False
    return True


def preload_tiff_codecs() -> None:
    """Preload imagecodecs' decoders, which are otherwise loaded on first use, for a process that may not open files
    later."""
    if has_imagecodecs():
        import imagecodecs

        for codec in ("lzw", "packbits", "lerc", "lzma", "zstd", "zlib", "deflate", "delta", "floatpred", "packints"):
            getattr(imagecodecs, f"{codec}_decode", None)


def count_inflated_bytes(segment: bytes, max_bytes: int) -> int:
    """Count the bytes of a deflated strip or tile. Raises ValueError for a damaged one, and for more than
    `max_bytes`."""
    stream = zlib.decompressobj()
    try:
        length = len(stream.decompress(segment, max_bytes + 1))
    except zlib.error as error:
        raise ValueError(f"deflate: {error}") from None
    if length > max_bytes or not stream.eof:
        raise ValueError("deflate: a strip is cut short or too long")
    return length
