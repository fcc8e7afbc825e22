"""Headers and values of TIFF and GeoTIFF files: bands, dtype, size, nodata value, georeference.

A sample, in the terms of TIFF, is one of the values of a pixel. Bands are samples that are not colours. Their values
are read with tifffile (extra `data`), which needs imagecodecs (extra `geotiff`) for LZW, Zstandard and other
compressions. `tags` are the tags of the first page, by number.
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
#: (bits per sample, sample format) of a TIFF -> dtype
TIFF_DTYPES = {
    **{(8, 1): "uint8", (16, 1): "uint16", (32, 1): "uint32", (64, 1): "uint64"},
    **{(8, 2): "int8", (16, 2): "int16", (32, 2): "int32", (64, 2): "int64"},
    **{(16, 3): "float16", (32, 3): "float32", (64, 3): "float64"},
}
PILLOW_DTYPES = ("uint8", "uint16", "int16", "float32")  # dtypes of grey pages that Pillow reads
# numbers of tags of TIFF 6.0
WIDTH_TAG, HEIGHT_TAG, BITS_TAG, PHOTOMETRIC_TAG = 256, 257, 258, 262
ORIENTATION_TAG, SAMPLES_TAG, EXTRA_SAMPLES_TAG, SAMPLE_FORMAT_TAG = 274, 277, 338, 339
#: tags of GeoTIFF 1.1: pixel scale, tie points, transformation, and the key directory with its numeric and text values
GEO_TAGS = (33550, 33922, 34264, 34735, 34736, 34737)
SHORT_TYPE, ASCII_TYPE, DOUBLE_TYPE = 3, 2, 12  # types of the values of a tag
TAG_TYPES = {34735: SHORT_TYPE, 34737: ASCII_TYPE}  # tag of GEO_TAGS -> type of its values; DOUBLE_TYPE for others
NODATA_TAG = 42113  # GDAL's tag with the nodata value as text
GREY_PHOTOMETRIC = (0, 1)  # values of PhotometricInterpretation for grey: 0 is white, or 0 is black
RGB_PHOTOMETRIC = 2  # value of PhotometricInterpretation for RGB
NO_COMPRESSION, DEFLATE_COMPRESSIONS = 1, (8, 32946)  # values of Compression
#: value of Compression -> name, for lossless compressions that need imagecodecs
TIFF_CODECS = {5: "LZW", 32773: "PackBits", 34887: "LERC", 34925: "LZMA", 50000: "Zstandard"}
FLOATING_PREDICTOR = 3  # value of Predictor for floating-point values
SAVE_TIFF_HINT = "save it as .npy, or as a TIFF without compression or with deflate"

TiffTags = dict[int, tuple[Any, ...]]


@dataclass(frozen=True)
class TiffForm:
    """The form of an image in a TIFF, from its header.

    `size` is (height, width) of the upright image, `bands` the number of bands, 0 for an image with colours or grey,
    and `dtype` that of its values; it may be empty for colours.
    """

    size: tuple[int, int]
    bands: int
    dtype: str


def read_tiff_tags(raw: bytes) -> TiffTags:
    """Read the tags of the first page of a TIFF that this module uses, each as a tuple. Raises Pillow's exceptions for
    a damaged file."""
    ifd = TiffImagePlugin.ImageFileDirectory_v2(raw[:16] if raw[2] == 43 else raw[:8])
    file = io.BytesIO(raw)
    file.seek(ifd.next)
    ifd.load(file)
    used_tags = (
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
    tags = {tag: ifd[tag] for tag in used_tags if tag in ifd}
    return {tag: value if isinstance(value, tuple) else (value,) for tag, value in tags.items()}


def get_tiff_size(tags: TiffTags) -> tuple[int, int]:
    """Return (height, width) of the upright image from tags; (0, 0) if the tags are missing."""
    height, width = int(tags.get(HEIGHT_TAG, (0,))[0]), int(tags.get(WIDTH_TAG, (0,))[0])
    return (width, height) if int(tags.get(ORIENTATION_TAG, (1,))[0]) >= 5 else (height, width)


def get_tiff_dtype(tags: TiffTags, name: str) -> str:
    """Return the dtype of the values from tags. Raises DataError if it is not supported, or differs between samples."""
    sample_types = {
        (int(bits), int(sample_format))
        for bits in tags.get(BITS_TAG, (1,))
        for sample_format in tags.get(SAMPLE_FORMAT_TAG, (1,))
    }
    return check_tiff_dtype(TIFF_DTYPES.get(sample_types.pop(), "") if len(sample_types) == 1 else "", name)


def check_tiff_dtype(dtype: str, name: str) -> str:
    """Return a dtype unchanged. Raises DataError if it is not in `TIFF_DTYPES`."""
    if dtype not in TIFF_DTYPES.values():
        problem = f"a TIFF whose dtype is {dtype or 'unknown'}, which is not supported"
        raise DataError(f"{name}: {problem}", f"convert it to one of {', '.join(TIFF_DTYPES.values())}")
    return dtype


def count_tiff_bands(tags: TiffTags) -> int:
    """Return the number of samples per pixel from tags, if they are bands; 0 if they are colours or grey.

    All samples are bands if one is an extra sample of an undefined meaning, that is, not transparency.
    """
    count, extra_samples = int(tags.get(SAMPLES_TAG, (1,))[0]), tags.get(EXTRA_SAMPLES_TAG, ())
    has_grey_samples = count > 1 and tags.get(PHOTOMETRIC_TAG, GREY_PHOTOMETRIC)[0] in GREY_PHOTOMETRIC
    return count if count > 4 or (has_grey_samples and not extra_samples) or (count > 1 and 0 in extra_samples) else 0


def has_wide_samples(tags: TiffTags) -> bool:
    """Return whether a pixel has several samples of more than 8 bits, which Pillow would truncate to 8 bits."""
    return int(tags.get(SAMPLES_TAG, (1,))[0]) > 1 and max(tags.get(BITS_TAG, (1,))) > 8


def read_tiff_form(raw: bytes, name: str) -> TiffForm:
    """Read the form of the image in a TIFF from the headers of its pages.

    Several grey pages of one size are bands, and so is a single grey page whose values are not 8-bit or 16-bit unsigned
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
    """Count the pages of a TIFF that can be bands of one image. Returns 1 if pages differ in size or mode, or if there
    are more than MAX_BANDS."""
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
    """Return the nodata value, which marks pixels without data, from GDAL's tag; None if the tag is missing or not a
    number."""
    text = tags.get(NODATA_TAG, ("",))[0]
    try:
        return float(text.decode("ascii") if isinstance(text, bytes) else text.strip("\0 "))
    except (ValueError, AttributeError):
        return None


def read_georeference(raw: bytes | str | os.PathLike[str]) -> TiffTags | None:
    """Read the tags of a GeoTIFF, a path or a file's bytes, that map its pixels to the Earth; None for other files and
    damaged headers."""
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
    """Encode a class map as the bytes of a GeoTIFF with deflate compression. `georeference` are tags of
    `read_georeference`. The index of ignored pixels becomes the nodata value."""
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
    """Read the samples of the first page of a TIFF as (C, H, W), with tifffile. Raises ImportError if tifffile is not
    installed, and DataError for unsupported and damaged files."""
    import tifffile

    logging.getLogger("tifffile").disabled = True  # the DataError reports it
    with tifffile.TiffFile(io.BytesIO(raw)) as file:
        page: Any = file.pages[0]
        if page.axes not in ("YX", "YXS", "SYX"):
            raise DataError(f"{name}: a TIFF with the axes {page.axes} is not supported", SAVE_TIFF_HINT)
        if page.size > MAX_PIXELS:
            raise too_large_error(name, page.imagewidth, page.imagelength)
        check_tiff_dtype(page.dtype.name if page.dtype else "", name)
        if page.tags.valueof(ORIENTATION_TAG, 1) != 1:
            problem = f"a TIFF of {page.samplesperpixel} samples per pixel that is not stored upright"
            raise DataError(f"{name}: {problem}", "rotate it, and save it without an orientation tag")
        check_tiff_complete(page, raw, name)
        array = page.asarray(maxworkers=1)
    return array[None] if page.axes == "YX" else np.moveaxis(array, -1, 0) if page.axes == "YXS" else array


def check_tiff_complete(page: Any, raw: bytes, name: str) -> None:
    """Raise DataError if strips or tiles of a page are missing, truncated or too many, or their compression is not
    supported. `page` is a page of tifffile, `raw` the bytes of the file."""
    size, count = math.prod(page.chunks), math.prod(page.chunked)
    check_tiff_codec(page, name)
    segments = list(zip(page.dataoffsets, page.databytecounts, strict=True))
    # GDAL writes 0 for a strip or tile without data (SPARSE_OK), which tifffile fills with the nodata value
    is_inside = all(start == length == 0 or 0 < length <= len(raw) - start for start, length in segments)
    if size > MAX_PIXELS or len(segments) != count or not is_inside or not any(length for _, length in segments):
        raise DataError(f"{name}: a TIFF with missing strips", "fix or delete the file")
    num_sparse = sum(not length for _, length in segments)
    if page.compression in TIFF_CODECS:
        return  # tifffile rejects a strip or tile that decodes to too few values
    if page.compression == NO_COMPRESSION:
        stored = sum(length for _, length in segments)
    else:
        max_bytes = size * page.dtype.itemsize
        stored = sum(
            count_inflated_bytes(raw[start : start + length], max_bytes) for start, length in segments if length
        )
    stored += num_sparse * size * page.dtype.itemsize
    if stored < page.nbytes:
        problem = f"{stored:,} bytes of data, but the header states {page.nbytes:,}"
        raise DataError(f"{name}: {problem}", "fix or delete the file")


def check_tiff_codec(page: Any, name: str) -> None:
    """Raise DataError for a page whose compression or predictor is not supported, or needs imagecodecs, which is not
    installed."""
    compression, predictor = int(page.keyframe.compression), int(page.keyframe.predictor)
    if compression not in (NO_COMPRESSION, *DEFLATE_COMPRESSIONS, *TIFF_CODECS):
        raise DataError(f"{name}: a TIFF with the unsupported compression {compression}", SAVE_TIFF_HINT)
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
    """Load the decoders of imagecodecs, which it otherwise loads on first use. Sandboxed processes call this before
    they lose access to files."""
    if has_imagecodecs():
        import imagecodecs

        for codec in ("lzw", "packbits", "lerc", "lzma", "zstd", "zlib", "deflate", "delta", "floatpred", "packints"):
            getattr(imagecodecs, f"{codec}_decode", None)


def count_inflated_bytes(segment: bytes, max_bytes: int) -> int:
    """Decompress a deflated strip or tile and return its number of bytes. Raises ValueError for damaged data, and for
    more than `max_bytes`."""
    stream = zlib.decompressobj()
    try:
        length = len(stream.decompress(segment, max_bytes + 1))
    except zlib.error as error:
        raise ValueError(f"deflate: {error}") from None
    if length > max_bytes or not stream.eof:
        raise ValueError("deflate: a strip is cut short or too long")
    return length
