"""HEIC, HEIF and AVIF: which of them can be read, and Pillow's readers of them.

All three are ISO base media files (ISO/IEC 14496-12), whose first box, `ftyp`, names their brands. Pillow's wheels read
AVIF; pillow-heif, the extra `heif`, reads HEIC and HEIF and is imported for the first such file.
"""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec

from PIL import Image, features

from vitreous.errors import DataError, install_hint

UNREADABLE_FORMATS = {
    "AVIF": "an AVIF image, which cannot be read here: Pillow was built without AVIF (pip install --upgrade pillow)",
    "HEIF": f"a HEIC image, which cannot be read here without pillow-heif ({install_hint('heif')})",
}
_BRANDS = {
    **dict.fromkeys((b"avif", b"avis"), "AVIF"),
    **dict.fromkeys((b"heic", b"heix", b"heim", b"heis", b"hevc", b"hevx", b"hevm", b"hevs"), "HEIF"),
}
_CONTAINERS = (b"mif1", b"msf1", b"mif2")  # brands that do not determine the coding of the pixels


def detect_heif_format(content: bytes) -> str:
    """Pillow's name of the format, `AVIF` or `HEIF`, from the brands in the first box; else an empty string."""
    if content[4:8] != b"ftyp":
        return ""
    end = min(int.from_bytes(content[:4], "big"), 512)
    brands = [content[8:12], *(content[at : at + 4] for at in range(16, end, 4))]
    if brands[0] not in (*_BRANDS, *_CONTAINERS):
        return ""  # a video may be compatible with anything
    return next((_BRANDS[brand] for brand in brands if brand in _BRANDS), "HEIF")


@cache
def is_format_readable(kind: str) -> bool:
    """Whether `AVIF` or `HEIF` can be read here."""
    return bool(features.check("avif")) if kind == "AVIF" else find_spec("pillow_heif") is not None


def select_pillow_formats(content: bytes, name: str, others: tuple[str, ...]) -> tuple[str, ...]:
    """The formats that Pillow may open a file as, registered: that of its brands, else the `others`.

    Raises DataError, with `name` and what to install, for AVIF or HEIF that cannot be read here.
    """
    kind = detect_heif_format(content)
    if not kind:
        return others
    if not is_format_readable(kind):
        raise DataError(f"{name}: {UNREADABLE_FORMATS[kind]}", "or convert it to JPEG")
    register_pillow_reader(kind)
    return (kind,)


@cache
def register_pillow_reader(kind: str) -> None:
    """Register the reader of `AVIF` or `HEIF` with Pillow, single-threaded: images are decoded in parallel."""
    if kind == "AVIF":
        from PIL import AvifImagePlugin

        AvifImagePlugin.DEFAULT_MAX_THREADS = 1
        return
    import pillow_heif

    if "HEIF" not in Image.OPEN:
        pillow_heif.register_heif_opener(decode_threads=1, thumbnails=False)


def list_readable_formats() -> tuple[str, ...]:
    """List those of `AVIF` and `HEIF` that can be read here."""
    return tuple(kind for kind in ("AVIF", "HEIF") if is_format_readable(kind))
