"""Images of any number of channels, and of more than 8 bits: multispectral TIFF, .npy, 16-bit greys.

Such an image is a tuple of Pillow images, one per channel, of mode L (8 bits) or F (any other): crops, resampling and
mirroring are applied to each of them by the code for photographs; colour augmentation is not applied.
"""

from __future__ import annotations

import io
import logging
import math
import os
import zlib
from collections.abc import Callable
from typing import Any

import numpy as np
from PIL import Image, ImageOps, TiffImagePlugin, UnidentifiedImageError

from vitreous.data.decoding.decode import FORMATS, read_regular, reason, silence
from vitreous.data.decoding.gate import MAX_PIXELS, refuse_costly, too_large
from vitreous.data.decoding.heif import open_formats
from vitreous.data.decoding.npy import MAGIC, MAX_CHANNELS, read_npy
from vitreous.errors import DataError, UsageError, printable

Bands = tuple[Image.Image, ...]
#: input of preprocessing and augmentation; an array is a volume, (C, D, H, W) float32
Picture = Image.Image | Bands | np.ndarray


def bands_of(picture: Picture) -> Bands:
    """The Pillow images of a picture, one or one for each channel. Raises UsageError for a volume, which has none."""
    if isinstance(picture, np.ndarray):
        raise UsageError("a volume has no views of pictures", "use --recipe segment, whose views are of volumes")
    return picture if isinstance(picture, tuple) else (picture,)


TIFF = (b"II*\0", b"MM\0*", b"II+\0", b"MM\0+")
# bits and sample format of a TIFF -> dtype
NUMBERS = {(8, 1): "uint8", (16, 1): "uint16", (16, 2): "int16", (32, 3): "float32"}
BITS, PHOTOMETRIC, ORIENTATION, SAMPLES, EXTRA, FORMAT = 258, 262, 274, 277, 338, 339  # tags of TIFF 6.0
COLOURS = ((1, "uint8"), (3, "uint8"))  # channels and dtype of arrays that are ordinary images
GREY = (0, 1)  # PhotometricInterpretation: white is 0, black is 0
PLAIN, DEFLATE = 1, (8, 32946)  # Compression
SAVE = "save it as .npy, or as a TIFF without compression or with deflate"


def channel_form(raw: bytes | np.ndarray, name: str) -> tuple[int, str] | None:
    """Channels and dtype of an image that must be read channel by channel; None for grey, RGB and all else that Pillow
    reads at 8 bits, 16-bit greys among them.

    Read by channel are pixels (H, W[, C]) of other dtypes or channel counts, TIFF files whose samples are not colours,
    and TIFF files of several grey pages of one size. Raises DataError for a damaged or unsupported file.
    """
    if isinstance(raw, bytes) and raw.startswith(TIFF):
        return tiff_form(raw, name)
    if isinstance(raw, np.ndarray):
        form = (1 if raw.ndim == 2 else raw.shape[2], raw.dtype.name)
    elif raw.startswith(MAGIC):
        array = read_npy(raw, name)
        form = (len(array), array.dtype.name)
    else:
        return None
    return None if form in COLOURS else form


def read_bands(
    raw: bytes | np.ndarray | str | os.PathLike[str], channels: int, numbers: str, name: str | None = None
) -> Bands:
    """Read a path, a file's bytes, or pixels (H, W[, C]) as one Pillow image per channel, mode L for uint8, else F.

    Raises DataError for unreadable files, another number of channels or dtype than `numbers`, and non-finite values.
    """
    name = name or (printable(raw) if isinstance(raw, (str, os.PathLike)) else "image")
    array = read_channels(raw if isinstance(raw, (bytes, np.ndarray)) else read_regular(raw), name)
    if array.dtype.name != numbers or len(array) != channels:
        actual = f"{len(array)} channels of {array.dtype.name}, the model takes {channels} of {numbers}"
        raise DataError(f"{name}: {actual}", "keep one kind of files in a data set")
    if bad := 0 if numbers != "float32" else array.size - np.count_nonzero(np.isfinite(array)):
        raise DataError(f"{name}: {bad:,} of its values are NaN or infinite", "mend or remove the file")
    dtype = np.uint8 if numbers == "uint8" else np.float32
    return tuple(Image.fromarray(np.ascontiguousarray(band, dtype=dtype)) for band in array)


def read_channels(raw: bytes | np.ndarray, name: str) -> np.ndarray:
    """Read a file's bytes or pixels (H, W[, C]) as (C, H, W) of their dtype, in native byte order. Raises DataError."""
    if isinstance(raw, np.ndarray):
        return raw[None] if raw.ndim == 2 else np.moveaxis(raw, -1, 0)
    if raw.startswith(MAGIC):
        array = read_npy(raw, name)
    elif raw.startswith(TIFF) and beyond_pillow(call_reader(read_tags, raw, name)):
        array = call_reader(read_samples, raw, name)
    else:
        array = call_reader(read_pages, raw, name)
    return array.astype(array.dtype.newbyteorder("="), copy=False)


def call_reader(read: Callable[[bytes, str], Any], raw: bytes, name: str) -> Any:
    """Call `read(raw, name)`. Raises DataError for any exception, as readers do not list what they raise."""
    try:
        refuse_costly(raw, name)
        with silence():
            return read(raw, name)
    except (DataError, MemoryError):
        raise
    except UnidentifiedImageError:
        raise DataError(f"{name}: not an image of a known format", SAVE) from None
    except ImportError:
        problem = "a TIFF like this needs tifffile, which is not installed"
        raise DataError(f"{name}: {problem}", "pip install 'vitreous[data]'") from None
    except Exception as error:
        raise DataError(f"{name}: cannot be read as an image ({reason(error)})", "mend or remove the file") from None


def read_tags(raw: bytes, name: str = "") -> dict[int, tuple[int, ...]]:
    """Read the first page's tags that are named above, where present."""
    ifd = TiffImagePlugin.ImageFileDirectory_v2(raw[:16] if raw[2] == 43 else raw[:8])
    file = io.BytesIO(raw)
    file.seek(ifd.next)
    ifd.load(file)
    tags = {tag: ifd[tag] for tag in (BITS, PHOTOMETRIC, SAMPLES, EXTRA, FORMAT) if tag in ifd}
    return {tag: tuple(map(int, value)) if isinstance(value, tuple) else (int(value),) for tag, value in tags.items()}


def dtype_of_tags(tags: dict[int, tuple[int, ...]], name: str) -> str:
    """The dtype that tags describe. Raises DataError for one that is not in `NUMBERS`."""
    pairs = {(bits, kind) for bits in tags.get(BITS, (1,)) for kind in tags.get(FORMAT, (1,))}
    return check_numbers(NUMBERS.get(pairs.pop(), "") if len(pairs) == 1 else "", name)


def check_numbers(dtype: str, name: str) -> str:
    """Return a dtype. Raises DataError for one that is not in `NUMBERS`."""
    if dtype not in NUMBERS.values():
        problem = f"a TIFF of numbers that are not {', '.join(NUMBERS.values())}"
        raise DataError(f"{name}: {problem}", "convert it to one of those")
    return dtype


def count_samples(tags: dict[int, tuple[int, ...]]) -> int:
    """The samples per pixel of a TIFF with these tags if they are channels; 0 if they are colours.

    A sample besides the colours makes all of them channels, unless it is transparency.
    """
    count, extra = tags.get(SAMPLES, (1,))[0], tags.get(EXTRA, ())
    greys = count > 1 and tags.get(PHOTOMETRIC, GREY)[0] in GREY
    return count if count > 4 or (greys and not extra) or (count > 1 and 0 in extra) else 0


def beyond_pillow(tags: dict[int, tuple[int, ...]]) -> bool:
    """Whether samples are channels, or colours of more than 8 bits, which Pillow would truncate."""
    return bool(count_samples(tags)) or (tags.get(SAMPLES, (1,))[0] > 1 and max(tags.get(BITS, (1,))) > 8)


def tiff_form(raw: bytes, name: str) -> tuple[int, str] | None:
    """Return what `channel_form` does, for the bytes of a TIFF."""
    tags = call_reader(read_tags, raw, name)
    count = count_samples(tags)
    if not count:
        if tags.get(SAMPLES, (1,))[0] > 1 or tags.get(PHOTOMETRIC, GREY)[0] not in GREY or tags.get(BITS, (1,)) == (1,):
            return None
        count = call_reader(count_pages, raw, name)
        if count == 1:
            return None
    return count, dtype_of_tags(tags, name)


def count_pages(raw: bytes, name: str) -> int:
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


def read_pages(raw: bytes, name: str) -> np.ndarray:
    """Read with Pillow, upright, as (C, H, W): pages of one size, or the channels of one. Raises DataError."""
    tiff = raw.startswith(TIFF)
    count, parts = count_pages(raw, name) if tiff else 1, []
    with Image.open(io.BytesIO(raw), formats=open_formats(raw, name, FORMATS)) as image:
        if image.width * image.height * count > MAX_PIXELS:
            raise too_large(name, image.width, image.height)
        for page in range(count):
            image.seek(page)
            image.load()
            parts.append(np.asarray(ImageOps.exif_transpose(image)))
    if tiff and parts[0].dtype == np.int32:  # Pillow's only mode for signed numbers
        parts = [part.astype(dtype_of_tags(read_tags(raw), name)) for part in parts]
    return np.stack(parts) if parts[0].ndim == 2 else np.moveaxis(parts[0], -1, 0)


def read_samples(raw: bytes, name: str) -> np.ndarray:
    """Read a TIFF of several samples per pixel as (C, H, W), with tifffile. Raises ImportError and DataError."""
    import tifffile

    logging.getLogger("tifffile").disabled = True  # the DataError reports it
    with tifffile.TiffFile(io.BytesIO(raw)) as file:
        page: Any = file.pages[0]
        if page.axes not in ("YXS", "SYX"):
            raise DataError(f"{name}: a TIFF with the axes {page.axes}", SAVE)
        if page.size > MAX_PIXELS:
            raise too_large(name, page.imagewidth, page.imagelength)
        check_numbers(page.dtype.name if page.dtype else "", name)
        if page.tags.valueof(ORIENTATION, 1) != 1:
            raise DataError(f"{name}: a TIFF of {page.samplesperpixel} samples that does not stand upright", "turn it")
        check_complete(page, raw, name)
        array = page.asarray(maxworkers=1)
    return np.moveaxis(array, -1, 0) if page.axes == "YXS" else array


def check_complete(page: Any, raw: bytes, name: str) -> None:
    """Raise DataError for a page with missing, truncated or surplus strips or tiles."""
    size, count = math.prod(page.chunks), math.prod(page.chunked)
    if page.compression not in (PLAIN, *DEFLATE):
        raise DataError(f"{name}: a TIFF compressed by method {int(page.compression)}", SAVE)
    places = list(zip(page.dataoffsets, page.databytecounts, strict=True))
    if size > MAX_PIXELS or len(places) != count or not all(0 < length <= len(raw) - start for start, length in places):
        raise DataError(f"{name}: a TIFF whose strips are not all there", "mend or remove the file")
    if page.compression == PLAIN:
        stored = sum(length for _, length in places)
    else:
        most = size * page.dtype.itemsize
        stored = sum(inflated_length(raw[start : start + length], most) for start, length in places)
    if stored < page.nbytes:
        problem = f"{stored:,} bytes of numbers where {page.nbytes:,} were announced"
        raise DataError(f"{name}: {problem}", "mend or remove the file")


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
