"""Decode image files to 8-bit grey or RGB for training, evaluation and prediction.

Before decoding, the file is checked: it must be a regular file of a supported format, with at most `MAX_PIXELS` pixels
according to its header. The decoded image is rotated upright (EXIF) and composited over white.
"""

from __future__ import annotations

import io
import os
import stat
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Lock

import numpy as np
from PIL import Image, ImageFile, UnidentifiedImageError

from vitreous.data.decoding.gate import (
    MAX_PIXELS,
    check_decoding_cost,
    has_missing_png_rows,
    identify_file_format,
    too_large_error,
)
from vitreous.data.decoding.heif import detect_heif_format, list_readable_formats, select_pillow_formats
from vitreous.data.decoding.npy import NPY_MAGIC, read_npy, read_npy_size
from vitreous.data.decoding.tiff import (
    PHOTOMETRIC_TAG,
    RGB_PHOTOMETRIC,
    TIFF_SIGNATURES,
    count_tiff_bands,
    get_tiff_dtype,
    get_tiff_size,
    read_tiff_tags,
)
from vitreous.errors import DataError, escape_unprintable

#: Pillow's names of the formats that are always readable; for AVIF and HEIF, see `heif.is_format_readable`
IMAGE_FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF")
IMAGE_FILE_SUFFIXES = frozenset(
    [".jpg", ".jpeg", ".jpe", ".jfif", ".png", ".webp", ".gif", ".bmp", ".tif", ".tiff", ".npy"]
    + [".avif", ".heic", ".heif", ".hif"]
)
MAX_FILE_BYTES = 512 * 2**20  # maximum bytes of an input file
TRANSPARENCY_FILL = 255  # white, the background of transparent images
PILLOW_MODES = {1: "L", 3: "RGB"}  # channels of the model -> mode of the decoded image


def decode_to_pillow(
    raw: bytes | np.ndarray | Image.Image | str | os.PathLike[str], channels: int = 3, name: str | None = None
) -> Image.Image:
    """Decode a path, a file's bytes, a PIL image, or pixels (H, W[, C]) uint8 to an upright 8-bit PIL image.

    The mode of the result is `RGB` for 3 `channels` and `L` for 1. The EXIF orientation is applied. 16-bit grey values
    are scaled by 1/257, transparent images are composited over white, and CMYK is converted to RGB. Of an animation,
    the first frame is used. The format of a file is determined by its content, not by its name.

    Raises DataError, with `name` or the path and the reason, for other files: not a regular file, not an image, an
    unsupported format (AVIF and HEIF may need an extra), truncated or damaged data, more than `MAX_PIXELS` pixels,
    floating-point pixels, LAB.
    """
    if channels not in PILLOW_MODES:
        raise DataError(f"files decode to 1 or 3 channels, but the model expects {channels}")
    if isinstance(raw, np.ndarray):
        name = name or "pixels"
        return convert_to_8bit(pixels_to_image(raw, name), PILLOW_MODES[channels], name)
    name = name or ("image" if isinstance(raw, (bytes, Image.Image)) else escape_unprintable(raw))
    content = b""
    try:
        if isinstance(raw, Image.Image):  # Pillow may read the file of an opened image only now
            return convert_to_8bit(apply_exif_orientation(raw), PILLOW_MODES[channels], name)
        content = raw if isinstance(raw, bytes) else read_input_file(raw)
        check_decoding_cost(content, name)
        if content.startswith(NPY_MAGIC):
            return convert_to_8bit(npy_to_image(content, name, channels), PILLOW_MODES[channels], name)
        if content.startswith(TIFF_SIGNATURES):
            reject_tiff_bands(content, name, channels)
        with (
            suppress_warnings(),
            Image.open(io.BytesIO(content), formats=select_pillow_formats(content, name, IMAGE_FORMATS)) as image,
        ):
            if image.width * image.height > MAX_PIXELS:
                raise too_large_error(name, image.width, image.height)
            load_complete_image(image, content)
            return convert_to_8bit(apply_exif_orientation(image), PILLOW_MODES[channels], name)
    except (DataError, MemoryError):
        raise
    except Image.DecompressionBombError:
        raise DataError(f"{name}: more than {MAX_PIXELS:,} pixels", "scale it down") from None
    except Exception as error:  # Pillow's exceptions for broken files are undocumented
        if not isinstance(error, UnidentifiedImageError):
            problem = describe_exception(error)
        elif detect_heif_format(content):
            problem = "damaged, or cut short"
        else:
            problem = f", but {identify_file_format(content)}" if identify_file_format(content) else ""
            known_formats = ", ".join((*IMAGE_FORMATS, *list_readable_formats()))
            raise DataError(f"{name}: not an image of a known format{problem}", f"use one of {known_formats}") from None
        raise DataError(f"{name}: cannot be read as an image ({problem})", "fix or delete the file") from None


def pixels_to_image(pixels: np.ndarray, name: str) -> Image.Image:
    """Convert pixels (H, W[, C]) uint8 to a PIL image. Raises DataError for other shapes and dtypes."""
    if pixels.ndim not in (2, 3):
        problem = f"pixels with {pixels.ndim} axes are not an image"
        raise DataError(f"{name}: {problem}", "use (H, W) or (H, W, C), or a model for clips")
    try:
        return Image.fromarray(pixels)
    except (TypeError, ValueError):
        problem = f"pixels of {pixels.dtype}, {' x '.join(map(str, pixels.shape))}"
        raise DataError(f"{name}: {problem}, are not an image", "use uint8 with 1, 3 or 4 channels") from None


def npy_to_image(content: bytes, name: str, channels: int) -> Image.Image:
    """Convert the bytes of a .npy file to a PIL image. Raises DataError unless it is a grey or RGB image of uint8.
    `channels` are those that the model expects, for the message."""
    array = read_npy(content, name)
    if array.dtype != np.uint8 or len(array) not in PILLOW_MODES:
        raise band_mismatch_error(name, len(array), array.dtype.name, channels)
    return Image.fromarray(np.ascontiguousarray(array[0] if len(array) == 1 else np.moveaxis(array, 0, -1)))


def reject_tiff_bands(content: bytes, name: str, channels: int) -> None:
    """Raise DataError for a TIFF whose values are bands, not colours. Four bands of uint8 that begin with RGB are
    accepted, since Pillow ignores the fourth. Raises Pillow's exceptions for a damaged header."""
    tags = read_tiff_tags(content)
    bands = count_tiff_bands(tags)
    dtype = get_tiff_dtype(tags, name) if bands else ""
    if bands and not (bands == 4 and dtype == "uint8" and tags.get(PHOTOMETRIC_TAG, (0,))[0] == RGB_PHOTOMETRIC):
        raise band_mismatch_error(name, bands, dtype, channels)


def band_mismatch_error(name: str, bands: int, dtype: str, channels: int) -> DataError:
    """Create the error for a file with `bands` bands of `dtype`, for a model that expects grey or RGB images."""
    expected = f"{channels} of uint8 ({'grey' if channels == 1 else 'RGB'})"
    problem = f"{name}: {describe_bands(bands, dtype)}, but the model expects {expected}"
    return DataError(problem, "train a model on such files, or save the bands that this model expects")


def describe_bands(bands: int, dtype: str) -> str:
    """Format a number of bands and their dtype for messages, such as `5 bands of uint16`."""
    return f"{bands} band{'' if bands == 1 else 's'} of {dtype}"


def read_upright_size(content: bytes, name: str, max_pixels: int = MAX_PIXELS) -> tuple[int, int]:
    """Read the size (width, height) of an image from its header, upright by EXIF; (0, 0) if it cannot be read.

    Raises DataError for more than `max_pixels` pixels, and for files that are too expensive to decode.
    """
    check_decoding_cost(content, name, max_pixels)
    (height, width), is_transposed = read_band_image_size(content, name), False
    try:
        if not width:
            with (
                suppress_warnings(),
                Image.open(io.BytesIO(content), formats=select_pillow_formats(content, name, IMAGE_FORMATS)) as image,
            ):
                width, height = image.size
                is_transposed = read_exif_orientation(image) >= 5
    except Exception:  # `decode_to_pillow` raises a precise error
        return 0, 0
    if width * height > max_pixels:
        raise too_large_error(name, width, height, max_pixels)
    return (height, width) if is_transposed else (width, height)


def read_band_image_size(content: bytes, name: str) -> tuple[int, int]:
    """Read the size (height, width) of a TIFF or .npy file from its header, upright, for any number of bands. Returns
    (0, 0) for other files, and if the size cannot be read."""
    try:
        if content.startswith(NPY_MAGIC):
            return read_npy_size(content, name)
        return get_tiff_size(read_tiff_tags(content)) if content.startswith(TIFF_SIGNATURES) else (0, 0)
    except Exception:  # Pillow's exceptions for a damaged header are undocumented
        return 0, 0


def decode_jpeg_reduced(content: bytes, channels: int, name: str, max_pixels: int) -> Image.Image:
    """Decode a JPEG at reduced size: at the largest of 1, 1/2, 1/4 and 1/8 with at most `max_pixels` pixels.

    The result is converted as by `decode_to_pillow`. Raises DataError if the image has more pixels at 1/8, and for a
    damaged file.
    """
    try:
        with suppress_warnings(), Image.open(io.BytesIO(content), formats=("JPEG",)) as image:
            width, height = image.size
            factor = next((f for f in (1, 2, 4, 8) if -(-width // f) * -(-height // f) <= max_pixels), 0)
            if not factor:
                raise too_large_error(name, width, height, 64 * max_pixels)
            image.draft(image.mode, (width // factor, height // factor))
            image.load()
            return convert_to_8bit(apply_exif_orientation(image), PILLOW_MODES[channels], name)
    except (DataError, MemoryError):
        raise
    except Exception as error:  # Pillow's exceptions for broken files are undocumented
        raise DataError(
            f"{name}: cannot be read as an image ({describe_exception(error)})", "fix or delete the file"
        ) from None


@contextmanager
def suppress_warnings() -> Iterator[None]:
    """Suppress warnings inside a `with` block, in all threads until the last thread leaves such a block.

    `warnings.catch_warnings` changes global state, so that concurrent use in several threads could disable warnings
    permanently.
    """
    with _warnings_lock:
        if not _active_blocks:
            _warning_filters.append(warnings.catch_warnings())
            _warning_filters[0].__enter__()
            warnings.simplefilter("ignore")
        _active_blocks.append(None)
    try:
        yield
    finally:
        with _warnings_lock:
            _active_blocks.pop()
            if not _active_blocks:
                _warning_filters.pop().__exit__(None, None, None)


_warnings_lock, _active_blocks, _warning_filters = Lock(), list[None](), list[warnings.catch_warnings]()


def read_input_file(path: str | os.PathLike[str]) -> bytes:
    """Read the bytes of a regular file. Raises DataError, with the path and the reason, for files that cannot be read
    or are too large."""
    try:
        with open_input_file(path) as file:
            return file.read(os.fstat(file.fileno()).st_size)  # limited to this size, since a file may grow without end
    except OSError as error:
        raise DataError(
            f"{escape_unprintable(path)}: cannot be read ({describe_exception(error)})", "fix or delete the file"
        ) from None


def open_input_file(path: str | os.PathLike[str]):
    """Open a regular file for reading bytes. Pipes and devices, which could block, are rejected.

    Raises DataError for files that are not regular, empty, or larger than MAX_FILE_BYTES, and OSError if the file
    cannot be opened.
    """
    descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode):
        problem = "not a regular file"
    elif 0 < status.st_size <= MAX_FILE_BYTES:
        return os.fdopen(descriptor, "rb")
    else:
        problem = f"larger than {MAX_FILE_BYTES >> 20} MiB" if status.st_size else "empty file"
    os.close(descriptor)
    raise DataError(f"{escape_unprintable(path)}: {problem}")


def load_complete_image(image: ImageFile.ImageFile, content: bytes) -> None:
    """Load the pixels of an opened image, whose file is `content`. Raises ValueError for a TIFF or PNG with missing
    rows, which Pillow leaves black without an error."""
    if image.format == "TIFF":
        ends = [tile.extents[2:] for tile in image.tile if tile.extents]
        if any(max((end[axis] for end in ends), default=0) < image.size[axis] for axis in (0, 1)):
            raise ValueError("strips are missing")
    image.load()
    if image.format == "PNG":
        last_row = image.crop((0, image.height - 1, image.width, image.height)).tobytes()
        # only an interlaced PNG and one with a black last row can have missing rows, and are unpacked a second time
        if (content[28] or not any(last_row)) and has_missing_png_rows(content):
            raise ValueError("rows are missing")


def apply_exif_orientation(image: Image.Image) -> Image.Image:
    """Return a copy of an image that is rotated and mirrored upright, by its EXIF orientation."""
    transpose = _ORIENTATION_TRANSPOSES.get(read_exif_orientation(image))
    return image.copy() if transpose is None else image.transpose(transpose)


def read_exif_orientation(image: Image.Image) -> int:
    """Read the EXIF orientation, 1 to 8; 1 if it cannot be read."""
    try:
        orientation = image.getexif().get(0x0112, 1)
        return orientation if orientation in _ORIENTATION_TRANSPOSES else 1
    except Exception:  # a damaged tag does not make the image unreadable
        return 1


#: EXIF orientation -> operation of Pillow that makes the image upright
_ORIENTATION_TRANSPOSES = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}


def convert_to_8bit(image: Image.Image, mode: str, name: str) -> Image.Image:
    """Convert a decoded image to the 8-bit mode `RGB` or `L`. Raises DataError for pixels whose range of values is not
    defined: floating-point, LAB, and 32-bit integers outside 0 to 65535."""
    if image.mode in ("F", "LAB"):
        raise DataError(f"{name}: pixels of mode {image.mode} have no stated range", "convert it to 8 or 16 bits")
    if image.mode.startswith("I"):  # 16-bit grey; Pillow's conversion would clip at 255
        values = np.asarray(image)
        if values.min() < 0 or values.max() > 65535:
            raise DataError(f"{name}: 32-bit integer pixels have no stated range", "convert it to 8 or 16 bits")
        image = Image.fromarray(((values.astype(np.uint32) + 128) // 257).astype(np.uint8))
    if image.has_transparency_data:
        rgba_image = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", rgba_image.size, (TRANSPARENCY_FILL,) * 3 + (255,)), rgba_image)
    return image if image.mode == mode else image.convert(mode)


def describe_exception(error: Exception) -> str:
    """Return the text of an exception of Pillow or of the system, shortened to one line."""
    if isinstance(error, UnidentifiedImageError):  # its text contains an object's address
        return "not an image of a known format"
    text = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return text.splitlines()[0][:120] if text else type(error).__name__


def is_image_file(path: Path) -> bool:
    """Return whether a path has the suffix of an image and is not a hidden file."""
    return path.suffix.lower() in IMAGE_FILE_SUFFIXES and not path.name.startswith(".")
