"""Decode image files for training, evaluation and prediction.

Before a pixel is decoded, a file must be a regular file of a known format whose header gives at most `MAX_PIXELS`. The
result is upright (EXIF), at 8 bits, composited over white.
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

from vitreous.data.decoding.gate import MAX_PIXELS, kind, lacks_rows, refuse_costly, too_large
from vitreous.data.decoding.heif import heif_format, open_formats, readable_formats
from vitreous.data.decoding.npy import MAGIC, npy_size, read_npy
from vitreous.data.decoding.tiff import PHOTOMETRIC, RGB, TIFF, count_samples, dtype_of_tags, read_tags, size_of_tags
from vitreous.errors import DataError, printable

FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF")  # read everywhere; AVIF and HEIF where `heif.is_readable`
SUFFIXES = frozenset(
    [".jpg", ".jpeg", ".jpe", ".jfif", ".png", ".webp", ".gif", ".bmp", ".tif", ".tiff", ".npy"]
    + [".avif", ".heic", ".heif", ".hif"]
)
MAX_BYTES = 512 * 2**20
BACKGROUND = 255  # white: shows where an image is transparent
MODES = {1: "L", 3: "RGB"}  # channels of the model -> mode of the decoded image


def decode(
    raw: bytes | np.ndarray | Image.Image | str | os.PathLike[str], channels: int = 3, name: str | None = None
) -> Image.Image:
    """Decode a path, a file's bytes, a Pillow image, or pixels (H, W[, C]) uint8 to an upright 8-bit Pillow image.

    Its mode is `RGB` for 3 channels and `L` for 1. EXIF orientation is applied; 16-bit greys are scaled by 1/257;
    palette and alpha are composited over white; CMYK becomes RGB; of an animation the first frame is taken. The content
    decides the format, not the name.
    Raises DataError, with `name` or the path and the reason, for anything else: not a regular file, not an image, a
    format outside `FORMATS`, AVIF and HEIF (HEIF with the extra `heif`), truncated or corrupt data, more than
    `MAX_PIXELS`, floating-point pixels, LAB.
    """
    if channels not in MODES:
        raise DataError(f"files decode to 1 or 3 channels, the model takes {channels}")
    if isinstance(raw, np.ndarray):
        name = name or "pixels"
        return flatten(from_pixels(raw, name), MODES[channels], name)
    name = name or ("image" if isinstance(raw, (bytes, Image.Image)) else printable(raw))
    content = b""
    try:
        if isinstance(raw, Image.Image):  # perhaps of a file that is not read yet
            return flatten(upright(raw), MODES[channels], name)
        content = raw if isinstance(raw, bytes) else read_regular(raw)
        refuse_costly(content, name)
        if content.startswith(MAGIC):
            return flatten(from_npy(content, name, channels), MODES[channels], name)
        if content.startswith(TIFF):
            refuse_bands(content, name, channels)
        with silence(), Image.open(io.BytesIO(content), formats=open_formats(content, name, FORMATS)) as image:
            if image.width * image.height > MAX_PIXELS:
                raise too_large(name, image.width, image.height)
            load_whole(image, content)
            return flatten(upright(image), MODES[channels], name)
    except (DataError, MemoryError):
        raise
    except Image.DecompressionBombError:
        raise DataError(f"{name}: more than {MAX_PIXELS:,} pixels", "scale it down") from None
    except Exception as error:  # what Pillow raises for broken files is not listed
        if not isinstance(error, UnidentifiedImageError):
            problem = reason(error)
        elif heif_format(content):
            problem = "damaged, or cut short"
        else:
            problem = f", but {kind(content)}" if kind(content) else ""
            known = ", ".join((*FORMATS, *readable_formats()))
            raise DataError(f"{name}: not an image of a known format{problem}", f"known are {known}") from None
        raise DataError(f"{name}: cannot be read as an image ({problem})", "mend or remove the file") from None


def from_pixels(pixels: np.ndarray, name: str) -> Image.Image:
    """Convert pixels (H, W[, C]) uint8 to a Pillow image. Raises DataError for other shapes and dtypes."""
    if pixels.ndim not in (2, 3):
        problem = f"pixels of {pixels.ndim} axes are no picture, perhaps a clip"
        raise DataError(f"{name}: {problem}", "use a model that takes clips")
    try:
        return Image.fromarray(pixels)
    except (TypeError, ValueError):
        problem = f"pixels of {pixels.dtype}, {' x '.join(map(str, pixels.shape))}"
        raise DataError(f"{name}: {problem}, are no picture", "uint8 of 1, 3 or 4 channels is") from None


def from_npy(content: bytes, name: str, channels: int) -> Image.Image:
    """Convert a .npy file to a Pillow image. Raises DataError unless it is a grey or RGB image of uint8."""
    array = read_npy(content, name)
    if array.dtype != np.uint8 or len(array) not in MODES:
        raise other_bands(name, len(array), array.dtype.name, channels)
    return Image.fromarray(np.ascontiguousarray(array[0] if len(array) == 1 else np.moveaxis(array, 0, -1)))


def refuse_bands(content: bytes, name: str, channels: int) -> None:
    """Raise DataError for a TIFF whose samples are bands, not colours. A fourth band beside 8-bit RGB passes: Pillow
    leaves it out. Raises what Pillow raises for a damaged header."""
    tags = read_tags(content)
    bands = count_samples(tags)
    dtype = dtype_of_tags(tags, name) if bands else ""
    if bands and not (bands == 4 and dtype == "uint8" and tags.get(PHOTOMETRIC, (0,))[0] == RGB):
        raise other_bands(name, bands, dtype, channels)


def other_bands(name: str, bands: int, dtype: str, channels: int) -> DataError:
    """The error for a file of bands where a model takes colours of so many `channels`."""
    taken = f"{channels} of uint8 ({'grey' if channels == 1 else 'RGB'})"
    problem = f"{name}: {describe_bands(bands, dtype)}, the model takes {taken}"
    return DataError(problem, "train a model on such files, or save the bands that this one takes")


def describe_bands(bands: int, dtype: str) -> str:
    """`5 bands of uint16`."""
    return f"{bands} band{'' if bands == 1 else 's'} of {dtype}"


def upright_size(content: bytes, name: str, most: int = MAX_PIXELS) -> tuple[int, int]:
    """Read the upright (width, height) of an image from its header; (0, 0) where it cannot be read.

    Raises DataError for more than `most` pixels: a server accepts fewer than training does.
    """
    refuse_costly(content, name, most)
    (height, width), turned = size_of_bands(content, name), False
    try:
        if not width:
            with silence(), Image.open(io.BytesIO(content), formats=open_formats(content, name, FORMATS)) as image:
                width, height = image.size
                turned = orientation(image) >= 5
    except Exception:  # `decode` raises a precise error
        return 0, 0
    if width * height > most:
        raise too_large(name, width, height, most)
    return (height, width) if turned else (width, height)


def size_of_bands(content: bytes, name: str) -> tuple[int, int]:
    """The upright (height, width) of a TIFF or .npy file from its header, however many bands it has; (0, 0) for other
    files, and where it cannot be read."""
    try:
        if content.startswith(MAGIC):
            return npy_size(content, name)
        return size_of_tags(read_tags(content)) if content.startswith(TIFF) else (0, 0)
    except Exception:  # what Pillow raises for a damaged header is not listed
        return 0, 0


def decode_reduced(content: bytes, channels: int, name: str, most: int) -> Image.Image:
    """Decode a JPEG at 1/2, 1/4 or 1/8, whichever has at most `most` pixels; the image is otherwise that of `decode`.

    Raises DataError where 1/8 still has more, and as `decode` does.
    """
    try:
        with silence(), Image.open(io.BytesIO(content), formats=("JPEG",)) as image:
            width, height = image.size
            factor = next((f for f in (1, 2, 4, 8) if -(-width // f) * -(-height // f) <= most), 0)
            if not factor:
                raise too_large(name, width, height, 64 * most)
            image.draft(image.mode, (width // factor, height // factor))
            image.load()
            return flatten(upright(image), MODES[channels], name)
    except (DataError, MemoryError):
        raise
    except Exception as error:  # what Pillow raises for broken files is not listed
        raise DataError(f"{name}: cannot be read as an image ({reason(error)})", "mend or remove the file") from None


@contextmanager
def silence() -> Iterator[None]:
    """Suppress warnings in all threads while any thread is inside: `warnings.catch_warnings` is not thread-safe."""
    with _muting:
        if not _inside:
            _muted.append(warnings.catch_warnings())
            _muted[0].__enter__()
            warnings.simplefilter("ignore")
        _inside.append(None)
    try:
        yield
    finally:
        with _muting:
            _inside.pop()
            if not _inside:
                _muted.pop().__exit__(None, None, None)


_muting, _inside, _muted = Lock(), list[None](), list[warnings.catch_warnings]()


def read_regular(path: str | os.PathLike[str]) -> bytes:
    """Read the bytes of a regular file. Raises DataError, with the path and the reason."""
    try:
        with open_regular(path) as file:
            return file.read(os.fstat(file.fileno()).st_size)  # a file that grows meanwhile has no end
    except OSError as error:
        raise DataError(f"{printable(path)}: cannot be read ({reason(error)})", "mend or remove the file") from None


def open_regular(path: str | os.PathLike[str]):
    """Open a regular file for reading, never waiting for a pipe or a device.

    Raises OSError, and DataError for other kinds of files, empty files, and more than MAX_BYTES.
    """
    descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode):
        problem = "not a regular file"
    elif 0 < status.st_size <= MAX_BYTES:
        return os.fdopen(descriptor, "rb")
    else:
        problem = f"larger than {MAX_BYTES >> 20} MiB" if status.st_size else "empty file"
    os.close(descriptor)
    raise DataError(f"{printable(path)}: {problem}")


def load_whole(image: ImageFile.ImageFile, content: bytes) -> None:
    """Load an image. Raises ValueError for a TIFF or PNG with missing rows, which Pillow would leave black."""
    if image.format == "TIFF":
        ends = [tile.extents[2:] for tile in image.tile if tile.extents]
        if any(max((end[axis] for end in ends), default=0) < image.size[axis] for axis in (0, 1)):
            raise ValueError("strips are missing")
    image.load()
    if image.format == "PNG":
        last = image.crop((0, image.height - 1, image.width, image.height)).tobytes()
        if (content[28] or not any(last)) and lacks_rows(content):  # unpacked again only where there is reason to
            raise ValueError("rows are missing")


def upright(image: Image.Image) -> Image.Image:
    """Copy an image, applying its EXIF orientation."""
    turn = _TURNS.get(orientation(image))
    return image.copy() if turn is None else image.transpose(turn)


def orientation(image: Image.Image) -> int:
    """Read the EXIF orientation, 1 to 8; 1 where it cannot be read."""
    try:
        orientation = image.getexif().get(0x0112, 1)
        return orientation if orientation in _TURNS else 1
    except Exception:  # a damaged tag does not make the image unreadable
        return 1


#: EXIF's orientation -> what undoes it
_TURNS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}


def flatten(image: Image.Image, mode: str, name: str) -> Image.Image:
    """Convert a decoded frame to 8-bit `RGB` or `L`. Raises DataError for pixels without a stated range."""
    if image.mode in ("F", "LAB"):
        raise DataError(f"{name}: pixels of mode {image.mode} have no stated range", "convert it to 8 or 16 bits")
    if image.mode.startswith("I"):  # 16-bit grey; Pillow's own conversion would clip at 255
        values = np.asarray(image)
        if values.min() < 0 or values.max() > 65535:
            raise DataError(f"{name}: 32-bit pixels have no stated range", "convert it to 8 or 16 bits")
        image = Image.fromarray(((values.astype(np.uint32) + 128) // 257).astype(np.uint8))
    if image.has_transparency_data:
        picture = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", picture.size, (BACKGROUND,) * 3 + (255,)), picture)
    return image if image.mode == mode else image.convert(mode)


def reason(error: Exception) -> str:
    """Shorten an exception of Pillow or of the system to one line."""
    if isinstance(error, UnidentifiedImageError):  # its text names an object in memory
        return "not an image of a known format"
    text = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return text.splitlines()[0][:120] if text else type(error).__name__


def is_image(path: Path) -> bool:
    """Whether a file name has an image suffix and is not hidden."""
    return path.suffix.lower() in SUFFIXES and not path.name.startswith(".")
