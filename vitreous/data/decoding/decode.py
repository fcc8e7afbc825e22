"""The one way from a file to pixels, used by training, evaluation and prediction alike.

A file passes two gates before a pixel is decoded: it must be a regular file of a known format, and its header must not
promise more pixels than `MAX_PIXELS`. Then it comes out upright (EXIF), at 8 bits, over a stated background.
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
from vitreous.data.decoding.npy import MAGIC, read_npy_colours
from vitreous.errors import DataError, printable

FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF")  # read everywhere; AVIF and HEIF where `heif.is_readable`
SUFFIXES = frozenset(
    [".jpg", ".jpeg", ".png", ".webp", ".gif", ".bmp", ".tif", ".tiff", ".npy", ".avif", ".heic", ".heif", ".hif"]
)
MAX_BYTES = 512 * 2**20
BACKGROUND = 255  # white: what shows where a picture is transparent
MODES = {1: "L", 3: "RGB"}  # channels of the model -> mode of the decoded picture


def decode(
    raw: bytes | np.ndarray | Image.Image | str | os.PathLike[str], channels: int = 3, name: str | None = None
) -> Image.Image:
    """A file, its bytes, a picture of Pillow, or pixels (H, W[, C]) uint8, as an upright 8-bit picture.

    Its mode is `RGB` for 3 channels and `L` for 1.

    EXIF orientation is applied; 16-bit greys are scaled by 1/257; palette and alpha are laid over white; CMYK becomes
    RGB; of an animation the first frame is taken. The content decides the format, not the name.
    Raises DataError, with `name` or the path and the reason, for anything else: not a regular file, not an image, a
    format outside `FORMATS`, AVIF and HEIF (HEIF with the extra `heif`), truncated or corrupt data, more than
    `MAX_PIXELS`, floating-point pixels, LAB.
    """
    if channels not in MODES:
        raise DataError(f"files decode to 1 or 3 channels, the model takes {channels}")
    if isinstance(raw, np.ndarray):
        if raw.ndim not in (2, 3):
            raise DataError(
                f"{name or 'pixels'}: pixels of {raw.ndim} axes are no picture, perhaps a clip",
                "use a model that takes clips",
            )
        try:
            image = Image.fromarray(raw)
        except (TypeError, ValueError):
            problem = f"pixels of {raw.dtype}, {' x '.join(map(str, raw.shape))}"
            raise DataError(
                f"{name or 'pixels'}: {problem}, are no picture", "uint8 of 1, 3 or 4 channels is"
            ) from None
        return flatten(image, MODES[channels], name or "pixels")
    if isinstance(raw, Image.Image):
        return decode_picture(raw, MODES[channels], name or "image")
    name = name or ("image" if isinstance(raw, bytes) else printable(raw))
    try:
        content = raw if isinstance(raw, bytes) else read_regular(raw)
        refuse_costly(content, name)
        if content.startswith(MAGIC):
            return decode(read_npy_colours(content, name), channels, name)
        with silence(), Image.open(io.BytesIO(content), formats=open_formats(content, name, FORMATS)) as image:
            if image.width * image.height > MAX_PIXELS:
                raise too_large(name, image.width, image.height)
            load_whole(image, content)
            return flatten(upright(image), MODES[channels], name)
    except (DataError, MemoryError):
        raise
    except UnidentifiedImageError:
        if heif_format(content):
            raise DataError(
                f"{name}: cannot be read as an image (damaged, or cut short)", "mend or remove the file"
            ) from None
        problem, known = (
            f", but {format_name}" if (format_name := kind(content)) else "",
            ", ".join((*FORMATS, *readable_formats())),
        )
        raise DataError(f"{name}: not an image of a known format{problem}", f"known are {known}") from None
    except Image.DecompressionBombError:
        raise DataError(f"{name}: more than {MAX_PIXELS:,} pixels", "scale it down") from None
    except Exception as error:  # Pillow's readers leave a broken file with whatever they stumbled over
        raise DataError(f"{name}: cannot be read as an image ({reason(error)})", "mend or remove the file") from None


def decode_picture(image: Image.Image, mode: str, name: str) -> Image.Image:
    """A picture of Pillow, perhaps of a file that is not read yet -> the same as `decode` makes of its file. Raises
    DataError."""
    try:
        return flatten(upright(image), mode, name)
    except (DataError, MemoryError):
        raise
    except Exception as error:  # as above
        raise DataError(f"{name}: cannot be read as an image ({reason(error)})", "mend or remove the file") from None


def upright_size(content: bytes, name: str, most: int = MAX_PIXELS) -> tuple[int, int]:
    """(width, height) of a picture, turned as EXIF asks, from its header; 0 x 0 where it is none that can be read.

    Raises DataError for more than `most` pixels: a server bears less than training does.
    """
    refuse_costly(content, name, most)
    try:
        with silence(), Image.open(io.BytesIO(content), formats=open_formats(content, name, FORMATS)) as image:
            width, height = image.size
            turned = orientation(image) >= 5
    except Exception:  # whatever it is, decoding says it better
        return 0, 0
    if width * height > most:
        raise too_large(name, width, height, most)
    return (height, width) if turned else (width, height)


@contextmanager
def silence() -> Iterator[None]:
    """No warnings from any thread while one of them is in here: Python's own way of muting is not made for threads."""
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
    """The bytes of a regular file. Raises DataError, with the path and the reason, where that cannot be."""
    try:
        with open_regular(path) as file:
            return file.read(os.fstat(file.fileno()).st_size)  # a file that grows meanwhile has no end
    except OSError as error:
        raise DataError(f"{printable(path)}: cannot be read ({reason(error)})", "mend or remove the file") from None


def open_regular(path: str | os.PathLike[str]):
    """Open a file for reading without ever waiting on a pipe or a device; refuse what is not a regular file."""
    descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
    status = os.fstat(descriptor)
    if stat.S_ISREG(status.st_mode) and 0 < status.st_size <= MAX_BYTES:
        return os.fdopen(descriptor, "rb")
    os.close(descriptor)
    if not stat.S_ISREG(status.st_mode):
        raise DataError(f"{printable(path)}: not a regular file")
    raise DataError(
        f"{printable(path)}: " + ("empty file" if not status.st_size else f"larger than {MAX_BYTES >> 20} MiB")
    )


def load_whole(image: ImageFile.ImageFile, content: bytes) -> None:
    """Load an image. Raises ValueError for a TIFF or a PNG that ends before the picture does: Pillow would leave the
    rest black."""
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
    """A copy, turned as EXIF asks."""
    turn = _TURNS.get(orientation(image))
    return image.copy() if turn is None else image.transpose(turn)


def orientation(image: Image.Image) -> int:
    """EXIF's orientation, 1 to 8; 1 where there is none that can be read."""
    try:
        orientation = image.getexif().get(0x0112, 1)
        return orientation if orientation in _TURNS else 1
    except Exception:  # a tag is not worth a picture
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
    """One decoded frame of any mode as 8-bit `RGB` or `L`."""
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
    """The short reason in an exception of Pillow or of the system."""
    text = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return text.splitlines()[0][:120] if text else type(error).__name__


def is_image(path: Path) -> bool:
    """Whether a name looks like an image; hidden files do not."""
    return path.suffix.lower() in SUFFIXES and not path.name.startswith(".")
