"""Headers and samples of TIFF and GeoTIFF files: bands, dtype, size, nodata value, georeference.

Bands are the samples of a pixel that are not colours. Reading their values needs tifffile (extra `data`), and for LZW,
Zstandard and other compressions imagecodecs too (extra `geotiff`).
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

from vitreous.data.decoding.gate import MAX_PIXELS, too_large
from vitreous.data.decoding.npy import MAX_CHANNELS
from vitreous.errors import DataError, install_hint

TIFF = (b"II*\0", b"MM\0*", b"II+\0", b"MM\0+")
#: (bits, sample format) of a TIFF -> dtype of its values
DTYPES = {
    **{(8, 1): "uint8", (16, 1): "uint16", (32, 1): "uint32", (64, 1): "uint64"},
    **{(8, 2): "int8", (16, 2): "int16", (32, 2): "int32", (64, 2): "int64"},
    **{(16, 3): "float16", (32, 3): "float32", (64, 3): "float64"},
}
PILLOW_DTYPES = ("uint8", "uint16", "int16", "float32")  # of grey pages that Pillow reads
# tags of TIFF 6.0
WIDTH, HEIGHT, BITS, PHOTOMETRIC, ORIENTATION, SAMPLES, EXTRA, FORMAT = 256, 257, 258, 262, 274, 277, 338, 339
#: tags of GeoTIFF 1.1: pixel scale, tie points, transformation, and the directory of keys with its numbers and texts
GEO_TAGS = (33550, 33922, 34264, 34735, 34736, 34737)
SHORT, ASCII, DOUBLE = 3, 2, 12  # types of tags
TAG_TYPES = {34735: SHORT, 34737: ASCII}  # of GEO_TAGS; the others are DOUBLE
NODATA = 42113  # GDAL's tag of the value that marks pixels without data, as text
GREY = (0, 1)  # PhotometricInterpretation: white is 0, black is 0
RGB = 2  # PhotometricInterpretation
PLAIN, DEFLATE = 1, (8, 32946)  # Compression
#: Compression -> its name, where imagecodecs reads it without loss
CODECS = {5: "LZW", 32773: "PackBits", 34887: "LERC", 34925: "LZMA", 50000: "Zstandard"}
FLOATING_PREDICTOR = 3
SAVE = "save it as .npy, or as a TIFF without compression or with deflate"

Tags = dict[int, tuple[Any, ...]]


@dataclass(frozen=True)
class TiffForm:
    """What the header of a TIFF states: (height, width) `size` upright, `bands`, 0 where samples are colours, and the
    `dtype` of its values."""

    size: tuple[int, int]
    bands: int
    dtype: str


def read_tags(raw: bytes) -> Tags:
    """Read the tags of the first page, each as a tuple. Raises what Pillow raises for a damaged file."""
    ifd = TiffImagePlugin.ImageFileDirectory_v2(raw[:16] if raw[2] == 43 else raw[:8])
    file = io.BytesIO(raw)
    file.seek(ifd.next)
    ifd.load(file)
    named = (WIDTH, HEIGHT, BITS, PHOTOMETRIC, ORIENTATION, SAMPLES, EXTRA, FORMAT, NODATA, *GEO_TAGS)
    tags = {tag: ifd[tag] for tag in named if tag in ifd}
    return {tag: value if isinstance(value, tuple) else (value,) for tag, value in tags.items()}


def size_of_tags(tags: Tags) -> tuple[int, int]:
    """The upright (height, width) that tags state; (0, 0) without them."""
    height, width = int(tags.get(HEIGHT, (0,))[0]), int(tags.get(WIDTH, (0,))[0])
    return (width, height) if int(tags.get(ORIENTATION, (1,))[0]) >= 5 else (height, width)


def dtype_of_tags(tags: Tags, name: str) -> str:
    """The dtype that tags describe. Raises DataError for one that is not in `DTYPES`."""
    pairs = {(int(bits), int(kind)) for bits in tags.get(BITS, (1,)) for kind in tags.get(FORMAT, (1,))}
    return check_dtype(DTYPES.get(pairs.pop(), "") if len(pairs) == 1 else "", name)


def check_dtype(dtype: str, name: str) -> str:
    """Return a dtype. Raises DataError for one that is not in `DTYPES`."""
    if dtype not in DTYPES.values():
        problem = f"a TIFF of numbers that are not {', '.join(DTYPES.values())}"
        raise DataError(f"{name}: {problem}", "convert it to one of those")
    return dtype


def count_samples(tags: Tags) -> int:
    """The samples per pixel of a TIFF with these tags if they are bands; 0 if they are colours.

    A sample besides the colours makes all of them bands, unless it is transparency.
    """
    count, extra = int(tags.get(SAMPLES, (1,))[0]), tags.get(EXTRA, ())
    greys = count > 1 and tags.get(PHOTOMETRIC, GREY)[0] in GREY
    return count if count > 4 or (greys and not extra) or (count > 1 and 0 in extra) else 0


def has_wide_samples(tags: Tags) -> bool:
    """Whether a pixel has several samples of more than 8 bits, which Pillow would truncate."""
    return int(tags.get(SAMPLES, (1,))[0]) > 1 and max(tags.get(BITS, (1,))) > 8


def read_form(raw: bytes, name: str) -> TiffForm:
    """Read the form of a TIFF from its headers. Grey pages of one size are bands, and so is a single grey page whose
    values are not 8-bit or 16-bit unsigned integers. Raises DataError for bands of an unknown dtype, and what Pillow
    raises for a damaged file."""
    tags = read_tags(raw)
    size, bands = size_of_tags(tags), count_samples(tags)
    bits, photometric = tags.get(BITS, (1,)), tags.get(PHOTOMETRIC, GREY)[0]
    if bands:
        return TiffForm(size, bands, dtype_of_tags(tags, name))
    if int(tags.get(SAMPLES, (1,))[0]) > 1:
        dtype = DTYPES.get((int(bits[0]), int(tags.get(FORMAT, (1,))[0])), "")
        is_colour = dtype in ("", "uint8", "uint16")
        return TiffForm(size, 0 if is_colour else int(tags[SAMPLES][0]), dtype)
    if photometric not in GREY or bits in ((1,), (2,), (4,)):
        return TiffForm(size, 0, "")
    dtype = dtype_of_tags(tags, name)
    if dtype not in PILLOW_DTYPES:
        return TiffForm(size, 1, dtype)
    count = count_pages(raw)
    return TiffForm(size, 0 if count == 1 and dtype in ("uint8", "uint16") else count, dtype)


def count_pages(raw: bytes) -> int:
    """Count the pages of a TIFF if all have one size and mode, else 1. Reads MAX_CHANNELS headers at most."""
    with Image.open(io.BytesIO(raw), formats=("TIFF",)) as image:
        first = (image.size, image.mode)
        for count in range(1, MAX_CHANNELS + 1):
            try:
                image.seek(count)
            except EOFError:
                return count
            if (image.size, image.mode) != first:
                break
    return 1


def read_nodata(tags: Tags) -> float | None:
    """The value that marks pixels without data, by GDAL's tag; None where there is none, or no number."""
    text = tags.get(NODATA, ("",))[0]
    try:
        return float(text.decode("ascii") if isinstance(text, bytes) else text.strip("\0 "))
    except (ValueError, AttributeError):
        return None


def read_georeference(raw: bytes | str | os.PathLike[str]) -> Tags | None:
    """The tags of a GeoTIFF, a path or a file's bytes, that state where it lies; None for other files."""
    try:
        if not isinstance(raw, bytes):
            with open(raw, "rb") as file:
                if file.read(4) not in TIFF:
                    return None
            raw = Path(raw).read_bytes()
        tags = read_tags(raw) if raw.startswith(TIFF) else {}
    except Exception:  # what Pillow raises for a damaged header is not listed
        return None
    own = {tag: tags[tag] for tag in GEO_TAGS if tag in tags}
    return own or None


def geotiff_of(picture: Image.Image, georeference: Tags) -> bytes:
    """A class map as the bytes of a GeoTIFF with deflate compression, whose pixels without a class are nodata."""
    tags = TiffImagePlugin.ImageFileDirectory_v2()
    for tag, values in georeference.items():
        tags.tagtype[tag] = TAG_TYPES.get(tag, DOUBLE)
        tags[tag] = values[0] if tags.tagtype[tag] == ASCII else values
    tags.tagtype[NODATA] = ASCII
    tags[NODATA] = "65535" if picture.mode.startswith("I") else "255"
    file = io.BytesIO()
    picture.save(file, "TIFF", compression="tiff_adobe_deflate", tiffinfo=tags)
    return file.getvalue()


def read_samples(raw: bytes, name: str) -> np.ndarray:
    """Read the first page of a TIFF as (C, H, W), with tifffile. Raises ImportError and DataError."""
    import tifffile

    logging.getLogger("tifffile").disabled = True  # the DataError reports it
    with tifffile.TiffFile(io.BytesIO(raw)) as file:
        page: Any = file.pages[0]
        if page.axes not in ("YX", "YXS", "SYX"):
            raise DataError(f"{name}: a TIFF with the axes {page.axes}", SAVE)
        if page.size > MAX_PIXELS:
            raise too_large(name, page.imagewidth, page.imagelength)
        check_dtype(page.dtype.name if page.dtype else "", name)
        if page.tags.valueof(ORIENTATION, 1) != 1:
            raise DataError(f"{name}: a TIFF of {page.samplesperpixel} samples that does not stand upright", "turn it")
        check_complete(page, raw, name)
        array = page.asarray(maxworkers=1)
    return array[None] if page.axes == "YX" else np.moveaxis(array, -1, 0) if page.axes == "YXS" else array


def check_complete(page: Any, raw: bytes, name: str) -> None:
    """Raise DataError for a page with missing, truncated or surplus strips or tiles, and for a compression that cannot
    be read here."""
    size, count = math.prod(page.chunks), math.prod(page.chunked)
    check_codec(page, name)
    places = list(zip(page.dataoffsets, page.databytecounts, strict=True))
    # GDAL writes 0 for a strip or tile without data (SPARSE_OK), which tifffile fills with the nodata value
    inside = all(start == length == 0 or 0 < length <= len(raw) - start for start, length in places)
    if size > MAX_PIXELS or len(places) != count or not inside or not any(length for _, length in places):
        raise DataError(f"{name}: a TIFF whose strips are not all there", "mend or remove the file")
    sparse = sum(not length for _, length in places)
    if page.compression in CODECS:
        return  # tifffile refuses a strip or tile that decodes to too few values
    if page.compression == PLAIN:
        stored = sum(length for _, length in places)
    else:
        most = size * page.dtype.itemsize
        stored = sum(inflated_length(raw[start : start + length], most) for start, length in places if length)
    stored += sparse * size * page.dtype.itemsize
    if stored < page.nbytes:
        problem = f"{stored:,} bytes of numbers where {page.nbytes:,} were announced"
        raise DataError(f"{name}: {problem}", "mend or remove the file")


def check_codec(page: Any, name: str) -> None:
    """Raise DataError for a compression or predictor that is not read, or not without imagecodecs."""
    compression, predictor = int(page.keyframe.compression), int(page.keyframe.predictor)
    if compression not in (PLAIN, *DEFLATE, *CODECS):
        raise DataError(f"{name}: a TIFF compressed by method {compression}", SAVE)
    needed = CODECS.get(compression, "")
    if not needed and predictor == FLOATING_PREDICTOR:
        needed = "the floating-point predictor"
    if needed and not has_imagecodecs():
        problem = f"a TIFF with {needed} compression" if compression in CODECS else f"a TIFF with {needed}"
        raise DataError(f"{name}: {problem} needs imagecodecs ({install_hint('geotiff')})", f"or {SAVE}")


def has_imagecodecs() -> bool:
    """Whether imagecodecs is installed."""
    try:
        import imagecodecs  # noqa: F401
    except ImportError:
        return False
    return True


def load_codecs() -> None:
    """Load the decoders that imagecodecs otherwise loads when it first needs them, for a process that may open no file
    later."""
    if has_imagecodecs():
        import imagecodecs

        for codec in ("lzw", "packbits", "lerc", "lzma", "zstd", "zlib", "deflate", "delta", "floatpred", "packints"):
            getattr(imagecodecs, f"{codec}_decode", None)


def inflated_length(segment: bytes, most: int) -> int:
    """Count the bytes of a deflated strip or tile. Raises ValueError for a damaged one, and for more than `most`."""
    stream = zlib.decompressobj()
    try:
        length = len(stream.decompress(segment, most + 1))
    except zlib.error as error:
        raise ValueError(f"deflate: {error}") from None
    if length > most or not stream.eof:
        raise ValueError("deflate: a strip that is cut short, or longer than the picture has it")
    return length
