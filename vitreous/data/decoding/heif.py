"""Support for HEIC, HEIF and AVIF images: detection, availability of decoders, and registration with Pillow.

All three are ISO base media files (ISO/IEC 14496-12). Their first box, `ftyp`, lists the brands of the file, which
identify the format. Pillow reads AVIF; pillow-heif (extra `heif`) reads HEIC and HEIF, and is imported for the first
such file.
"""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec

from PIL import Image, features

from vitreous.errors import DataError, install_hint

# format -> description of a file that cannot be read, and the way to install its decoder
UNREADABLE_FORMATS = {
    "AVIF": "an AVIF image, but Pillow was built without AVIF support (pip install --upgrade pillow)",
    "HEIF": f"a HEIC image, which needs pillow-heif ({install_hint('heif')})",
}
# brand -> format
_BRANDS = {
    **dict.fromkeys((b"avif", b"avis"), "AVIF"),
    **dict.fromkeys((b"heic", b"heix", b"heim", b"heis", b"hevc", b"hevx", b"hevm", b"hevs"), "HEIF"),
}
_CONTAINERS = (b"mif1", b"msf1", b"mif2")  # brands of images in any format


def detect_heif_format(content: bytes) -> str:
    """Return the format of an image by its brands, `AVIF` or `HEIF`; an empty string for other files. HEIC is
    `HEIF`."""
    if content[4:8] != b"ftyp":
        return ""
    end = min(int.from_bytes(content[:4], "big"), 512)
    brands = [content[8:12], *(content[offset : offset + 4] for offset in range(16, end, 4))]
    if brands[0] not in (*_BRANDS, *_CONTAINERS):
        return ""  # the first brand is decisive: a video may list brands of images after it
    return next((_BRANDS[brand] for brand in brands if brand in _BRANDS), "HEIF")


@cache
def is_format_readable(format_name: str) -> bool:
    """Return whether the installed libraries can read the format `AVIF` or `HEIF`."""
    return bool(features.check("avif")) if format_name == "AVIF" else find_spec("pillow_heif") is not None


def select_pillow_formats(content: bytes, name: str, fallback_formats: tuple[str, ...]) -> tuple[str, ...]:
    """Return the formats as which Pillow may open a file: AVIF or HEIF for such a file, else `fallback_formats`.

    Registers the reader of AVIF or HEIF with Pillow. If it is not installed, raises DataError with `name` and the
    package to install.
    """
    format_name = detect_heif_format(content)
    if not format_name:
        return fallback_formats
    if not is_format_readable(format_name):
        raise DataError(f"{name}: {UNREADABLE_FORMATS[format_name]}", "or convert it to JPEG")
    register_pillow_reader(format_name)
    return (format_name,)


@cache
def register_pillow_reader(format_name: str) -> None:
    """Register the reader of `AVIF` or `HEIF` with Pillow. It uses one thread, since images are decoded in parallel."""
    if format_name == "AVIF":
        from PIL import AvifImagePlugin

        AvifImagePlugin.DEFAULT_MAX_THREADS = 1
        return
    import pillow_heif

    if "HEIF" not in Image.OPEN:
        pillow_heif.register_heif_opener(decode_threads=1, thumbnails=False)


def list_readable_formats() -> tuple[str, ...]:
    """List those of the formats `AVIF` and `HEIF` that the installed libraries can read."""
    return tuple(format_name for format_name in ("AVIF", "HEIF") if is_format_readable(format_name))
