"""Pictures of any number of channels, and of numbers beyond 8 bits: multispectral TIFF, .npy, 16-bit greys.

Such a picture is a tuple of Pillow's, one for each channel, of mode L (8 bits) or F (any other): every crop, resampling
and mirror is done to each of them alike, by the same code as a photograph's, and nothing that is made for colours is
done at all.

C channels, H and W image.
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
from vitreous.data.decoding.npy import MAGIC, MAX_CHANNELS, npy_form, read_npy
from vitreous.errors import DataError, printable

Bands = tuple[Image.Image, ...]
Picture = Image.Image | Bands  # what a model's preprocessing and augmentation take

TIFF = (b"II*\0", b"MM\0*", b"II+\0", b"MM\0+")
# of a TIFF's bits and sample format
NUMBERS = {(8, 1): "uint8", (16, 1): "uint16", (16, 2): "int16", (32, 3): "float32"}
BITS, PHOTOMETRIC, ORIENTATION, SAMPLES, EXTRA, FORMAT = 258, 262, 274, 277, 338, 339  # tags of TIFF 6.0
COLOURS = ((1, "uint8"), (3, "uint8"))  # channels and dtype of an array that is a picture like any other
GREY = (0, 1)  # PhotometricInterpretation: white is 0, black is 0
PLAIN, DEFLATE = 1, (8, 32946)  # Compression
SAVE = "save it as .npy, or as a TIFF without compression or with deflate"


def channel_form(raw: bytes | np.ndarray, name: str) -> tuple[int, str] | None:
    """Channels and dtype of a picture that has to be read channel by channel; None for grey, RGB and all else that
    Pillow shows at 8 bits, 16-bit greys among them.

    Read by channel are arrays of other numbers or channels, TIFF files with samples that are no colours, and TIFF files
    with several grey pages of one size. Raises DataError for a damaged or unsupported file.
    """
    if isinstance(raw, bytes) and raw.startswith(TIFF):
        return tiff_form(raw, name)
    if isinstance(raw, np.ndarray):
        form = (1 if raw.ndim == 2 else raw.shape[2], raw.dtype.name)
    else:
        form = npy_form(raw, name) if raw.startswith(MAGIC) else COLOURS[0]
    return None if form in COLOURS else form


def read_bands(
    raw: bytes | np.ndarray | str | os.PathLike[str], channels: int, numbers: str, name: str | None = None
) -> Bands:
    """A file, its bytes, or pixels (H, W[, C]) -> one Pillow picture a channel, mode L for `numbers` uint8, else F.

    Raises DataError, with the name, for what cannot be read, another number of channels, another dtype than `numbers`,
    and for values that are no finite numbers.
    """
    name = name or (printable(raw) if isinstance(raw, (str, os.PathLike)) else "image")
    array = read_channels(raw if isinstance(raw, (bytes, np.ndarray)) else read_regular(raw), name)
    if array.dtype.name != numbers or len(array) != channels:
        actual = f"{len(array)} channels of {array.dtype.name}, the model takes {channels} of {numbers}"
        raise DataError(f"{name}: {actual}", "keep one kind of files in a data set")
    if numbers == "float32" and not np.isfinite(array).all():
        raise DataError(
            f"{name}: {np.count_nonzero(~np.isfinite(array)):,} of its values are NaN or infinite",
            "mend or remove the file",
        )
    dtype = np.uint8 if numbers == "uint8" else np.float32
    return tuple(Image.fromarray(np.ascontiguousarray(band, dtype=dtype)) for band in array)


def read_channels(raw: bytes | np.ndarray, name: str) -> np.ndarray:
    """What is stored -> (C, H, W) of its own dtype, in the machine's byte order. Raises DataError."""
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
    """`read(raw, name)`. Raises DataError for any exception: what readers raise for damaged files is not listed."""
    try:
        refuse_costly(raw, name)
        with silence():
            return read(raw, name)
    except (DataError, MemoryError):
        raise
    except UnidentifiedImageError:
        raise DataError(f"{name}: not an image of a known format", SAVE) from None
    except ImportError:
        raise DataError(
            f"{name}: a TIFF like this needs tifffile, which is not installed", "pip install 'vitreous[data]'"
        ) from None
    except Exception as error:
        raise DataError(f"{name}: cannot be read as an image ({reason(error)})", "mend or remove the file") from None


def read_tags(raw: bytes, name: str = "") -> dict[int, tuple[int, ...]]:
    """The tags above of a TIFF's first page, as far as they are there."""
    ifd = TiffImagePlugin.ImageFileDirectory_v2(raw[:16] if raw[2] == 43 else raw[:8])
    file = io.BytesIO(raw)
    file.seek(ifd.next)
    ifd.load(file)
    tags = {tag: ifd[tag] for tag in (BITS, PHOTOMETRIC, SAMPLES, EXTRA, FORMAT) if tag in ifd}
    return {tag: tuple(map(int, value)) if isinstance(value, tuple) else (int(value),) for tag, value in tags.items()}


def dtype_of_tags(tags: dict[int, tuple[int, ...]], name: str) -> str:
    """The dtype that tags describe. Raises DataError for one that is not in `NUMBERS`."""
    bits, kinds = set(tags.get(BITS, (1,))), set(tags.get(FORMAT, (1,)))
    if len(bits) > 1 or len(kinds) > 1 or (pair := (bits.pop(), kinds.pop())) not in NUMBERS:
        raise unsupported_numbers(name)
    return NUMBERS[pair]


def unsupported_numbers(name: str) -> DataError:
    """The refusal of numbers that are not in `NUMBERS`."""
    return DataError(
        f"{name}: a TIFF of numbers that are not {', '.join(NUMBERS.values())}", "convert it to one of those"
    )


def count_samples(tags: dict[int, tuple[int, ...]]) -> int:
    """The samples of a pixel of a TIFF with these tags if they are channels; 0 if they are colours.

    A sample beside the colours makes all of them channels, unless it is transparency.
    """
    count, extra = tags.get(SAMPLES, (1,))[0], tags.get(EXTRA, ())
    greys = count > 1 and tags.get(PHOTOMETRIC, GREY)[0] in GREY
    return count if count > 4 or (greys and not extra) or (count > 1 and 0 in extra) else 0


def beyond_pillow(tags: dict[int, tuple[int, ...]]) -> bool:
    """Whether a TIFF with these tags has samples that are channels, or colours of more than 8 bits, which Pillow would
    cut off."""
    return bool(count_samples(tags)) or (tags.get(SAMPLES, (1,))[0] > 1 and max(tags.get(BITS, (1,))) > 8)


def tiff_form(raw: bytes, name: str) -> tuple[int, str] | None:
    """The same as `channel_form` for the bytes of a TIFF."""
    tags = call_reader(read_tags, raw, name)
    if count := count_samples(tags):
        return count, dtype_of_tags(tags, name)
    if tags.get(SAMPLES, (1,))[0] > 1 or tags.get(PHOTOMETRIC, GREY)[0] not in GREY or tags.get(BITS, (1,)) == (1,):
        return None
    count = call_reader(count_pages, raw, name)
    return (count, dtype_of_tags(tags, name)) if count > 1 else None


def count_pages(raw: bytes, name: str) -> int:
    """The number of pages of a TIFF if all have one size and mode, else 1. Reads MAX_CHANNELS headers at most."""
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
    """A file that Pillow reads, upright -> (C, H, W): its alike pages, or the channels of its only one."""
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
    """A TIFF of several samples a pixel -> (C, H, W), by tifffile. Raises ImportError without it, and DataError."""
    import tifffile

    logging.getLogger("tifffile").disabled = True  # what it would say is said by the DataError
    with tifffile.TiffFile(io.BytesIO(raw)) as file:
        page: Any = file.pages[0]
        if page.axes not in ("YXS", "SYX"):
            raise DataError(f"{name}: a TIFF with the axes {page.axes}", SAVE)
        if page.size > MAX_PIXELS:
            raise too_large(name, page.imagewidth, page.imagelength)
        if page.dtype is None or page.dtype.name not in NUMBERS.values():
            raise unsupported_numbers(name)
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
    whole = [
        length
        if page.compression == PLAIN
        else inflated_length(raw[start : start + length], size * page.dtype.itemsize)
        for start, length in places
    ]
    if sum(whole) < page.nbytes:
        raise DataError(
            f"{name}: {sum(whole):,} bytes of numbers where {page.nbytes:,} were announced", "mend or remove the file"
        )


def inflated_length(segment: bytes, most: int) -> int:
    """The bytes of a deflated strip or tile. Raises ValueError for a damaged one, and for more than `most` bytes."""
    stream = zlib.decompressobj()
    try:
        length = len(stream.decompress(segment, most + 1))
    except zlib.error as error:
        raise ValueError(f"deflate: {error}") from None
    if length > most or not stream.eof:
        raise ValueError("deflate: a strip that is cut short, or longer than the picture has it")
    return length
