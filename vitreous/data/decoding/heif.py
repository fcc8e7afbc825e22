"""HEIC, HEIF and AVIF: detection, availability, and Pillow's readers.

All three are ISO base media files (ISO/IEC 14496-12), whose first box, `ftyp`, lists their brands. Pillow's wheels read
AVIF; pillow-heif, the extra `heif`, reads HEIC and HEIF and is imported for the first such file.
"""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec

from PIL import Image, features

from vitreous.errors import DataError, install_hint

UNREADABLE_FORMATS = {
    "AVIF": "an AVIF image, but Pillow was built without AVIF support (pip install --upgrade pillow)",
    "HEIF": f"a HEIC image, which needs pillow-heif ({install_hint('heif')})",
}
_BRANDS = {
    **dict.fromkeys((b"avif", b"avis"), "AVIF"),
    **dict.fromkeys((b"heic", b"heix", b"heim", b"heis", b"hevc", b"hevx", b"hevm", b"hevs"), "HEIF"),
}
_CONTAINERS = (b"mif1", b"msf1", b"mif2")  # brands that do not determine the pixel coding


def detect_heif_format(content: bytes) -> str:
    """Return Pillow's name of the format, `AVIF` or `HEIF`, from the brands in the first box; else an empty string."""
    if content[4:8] != b"ftyp":
        return ""
    end = min(int.from_bytes(content[:4], "big"), 512)
    brands = [content[8:12], *(content[offset : offset + 4] for offset in range(16, end, 4))]
    if brands[0] not in (*_BRANDS, *_CONTAINERS):
        return ""  # a video may have any compatible brand
    return next((_BRANDS[brand] for brand in brands if brand in _BRANDS), "HEIF")


@cache
def is_format_readable(format_name: str) -> bool:
    """Return whether `AVIF` or `HEIF` can be read with the installed libraries."""
    return bool(features.check("avif")) if format_name == "AVIF" else find_spec("pillow_heif") is not None


def select_pillow_formats(content: bytes, name: str, fallback_formats: tuple[str, ...]) -> tuple[str, ...]:
    """Select and register the formats that Pillow may open a file as: that of its brands, else the `fallback_formats`.

    Raises DataError, with `name` and the package to install, for unreadable AVIF or HEIF.
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
    """Register Pillow's reader of `AVIF` or `HEIF`, single-threaded, since images are decoded in parallel."""
    if format_name == "AVIF":
        from PIL import AvifImagePlugin

        AvifImagePlugin.DEFAULT_MAX_THREADS = 1
        return
    import pillow_heif

    if "HEIF" not in Image.OPEN:
        pillow_heif.register_heif_opener(decode_threads=1, thumbnails=False)


def list_readable_formats() -> tuple[str, ...]:
    """List the readable formats among `AVIF` and `HEIF`."""
    return tuple(format_name for format_name in ("AVIF", "HEIF") if is_format_readable(format_name))
