"""Image files put together by hand: what no library would write."""

from __future__ import annotations

import io
import re
import struct
import zlib
from typing import Any

import numpy as np
from PIL import Image


def encode_image(image: Image.Image | np.ndarray, kind: str, **options: Any) -> bytes:
    """A picture as the bytes of a file of that format of Pillow's."""
    file = io.BytesIO()
    (Image.fromarray(image) if isinstance(image, np.ndarray) else image).save(file, kind, **options)
    return file.getvalue()


def build_png_chunk(kind: bytes, body: bytes = b"") -> bytes:
    """A chunk of a PNG file, with its checksum."""
    return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))


def build_png(
    width: int,
    height: int,
    rows: bytes,
    *,
    depth: int = 8,
    colour: int = 2,
    interlaced: bool = False,
    extra: bytes = b"",
) -> bytes:
    """A PNG file of compressed rows; `extra` are the chunks before them."""
    header = struct.pack(">IIBBBBB", width, height, depth, colour, 0, 0, int(interlaced))
    return (
        b"\x89PNG\r\n\x1a\n"
        + build_png_chunk(b"IHDR", header)
        + extra
        + build_png_chunk(b"IDAT", rows)
        + build_png_chunk(b"IEND")
    )


def interlaced_png(values: np.ndarray) -> bytes:
    """(H, W, C) uint16 as an interlaced PNG of 16 bits: the seven passes of Adam7, none of them filtered."""
    passes = ((0, 0, 8, 8), (0, 4, 8, 8), (4, 0, 8, 4), (0, 2, 4, 4), (2, 0, 4, 2), (0, 1, 2, 2), (1, 0, 2, 1))
    parts = [values[top::down, left::right].astype(">u2") for top, left, down, right in passes]
    rows = b"".join(b"\0" + row.tobytes() for part in parts if part.size for row in part)
    height, width = values.shape[:2]
    return build_png(width, height, zlib.compress(rows), depth=16, colour=2 if values.ndim == 3 else 0, interlaced=True)


def compress_zeros(count: int) -> bytes:
    """`count` zero bytes, compressed by zlib, in a thousandth of the time: whole pieces of a megabyte are all alike."""
    piece = 2**20
    packer = zlib.compressobj(9, zlib.DEFLATED, -15)
    first = packer.compress(bytes(piece)) + packer.flush(zlib.Z_FULL_FLUSH)
    last = packer.compress(bytes(count % piece)) + packer.flush()
    return b"\x78\xda" + first * (count // piece) + last + struct.pack(">I", count % 65521 << 16 | 1)


def bits_png(side: int) -> bytes:
    """A black square of one bit a pixel."""
    return build_png(side, side, compress_zeros(side * (1 + -(-side // 8))), depth=1, colour=0)


def with_marker(jpeg: bytes, marker: int, precision: int = 8) -> bytes:
    """A JPEG whose frame says that it is of another coding, or of other bits."""
    place = re.search(rb"\xff[\xc0-\xc2]\x00.[\x08]", jpeg, re.DOTALL)
    assert place
    return (
        jpeg[: place.start() + 1]
        + bytes([marker])
        + jpeg[place.start() + 2 : place.end() - 1]
        + bytes([precision])
        + jpeg[place.end() :]
    )


def with_scans(jpeg: bytes, count: int) -> bytes:
    """A progressive JPEG whose last scan comes `count` times more."""
    last = jpeg[jpeg.rindex(b"\xff\xda") : -2]
    return jpeg[:-2] + last * count + jpeg[-2:]


def with_size(jpeg: bytes, width: int, height: int) -> bytes:
    """A JPEG whose frame says another size."""
    place = re.search(rb"\xff[\xc0-\xc2]\x00.\x08", jpeg, re.DOTALL)
    assert place
    return jpeg[: place.end()] + struct.pack(">HH", height, width) + jpeg[place.end() + 4 :]


def without_segment(jpeg: bytes, marker: int) -> bytes:
    """A JPEG without its segment of that marker."""
    start = jpeg.index(bytes([0xFF, marker]))
    return jpeg[:start] + jpeg[start + 2 + int.from_bytes(jpeg[start + 2 : start + 4], "big") :]


def with_segment(jpeg: bytes, marker: int, body: bytes) -> bytes:
    """A JPEG with one segment more, its first."""
    return jpeg[:2] + bytes([0xFF, marker]) + struct.pack(">H", len(body) + 2) + body + jpeg[2:]


def build_bmp(width: int, height: int, body: bytes, *, bits: int = 24, coding: int = 0, palette: bytes = b"") -> bytes:
    """A BMP file: rows from below, from above where the height is negative, or run lengths where `coding` is 1 or 2."""
    start = 54 + len(palette)
    head = struct.pack("<IiiHHIIiiII", 40, width, height, 1, bits, coding, len(body), 0, 0, len(palette) // 4, 0)
    return b"BM" + struct.pack("<IHHI", start + len(body), 0, 0, start) + head + palette + body


def build_tiff_entry(tag: int, kind: int, count: int, value: int) -> bytes:
    """An entry of a page of a TIFF file."""
    return struct.pack("<HHI", tag, kind, count) + (8 if value == -1 else value).to_bytes(4, "little")


def build_tiff(pages: list[dict[int, tuple[int, int, int]]], body: bytes = b"", loop: bool = False) -> bytes:
    """A little-endian TIFF file: pages of tag -> (type, count, value); a value of -1 is where `body` is, which comes
    first.

    `loop`: the last page is followed by the first.
    """
    out, starts = [b"", body + b"\0" * (len(body) % 2)], []
    at = 8 + len(out[1])
    packed: dict[int, bytes] = {}  # a hundred thousand pages may all be one
    for tags in pages:
        if id(tags) not in packed:
            packed[id(tags)] = struct.pack("<H", len(tags)) + b"".join(
                build_tiff_entry(tag, *said) for tag, said in sorted(tags.items())
            )
        starts.append(at)
        out.append(packed[id(tags)])
        at += len(out[-1]) + 4
    links = [*starts[1:], starts[0] if loop else 0]
    out[0] = b"II*\0" + struct.pack("<I", starts[0])
    return out[0] + out[1] + b"".join(part + struct.pack("<I", link) for part, link in zip(out[2:], links, strict=True))


def tiff_page_tags(width: int, height: int, **more: tuple[int, int, int]) -> dict[int, tuple[int, int, int]]:
    """The tags of one grey page of 8 bits whose only strip is the body of the file; `more` as t320=(type, count,
    value)."""
    tags = {256: width, 257: height, 258: 8, 259: 1, 262: 1, 277: 1, 278: height}
    found = {tag: (4, 1, value) for tag, value in tags.items()}
    return (
        found | {273: (4, 1, -1), 279: (4, 1, width * height)} | {int(name[1:]): value for name, value in more.items()}
    )


def webp_header(width: int, height: int) -> bytes:
    """A lossless WebP file of that size, and nothing after the header."""
    body = b"\x2f" + (width - 1 | (height - 1) << 14).to_bytes(4, "little") + bytes(8)
    return b"RIFF" + struct.pack("<I", len(body) + 13) + b"WEBPVP8L" + struct.pack("<I", len(body)) + body + b"\0"


def gif_header(width: int, height: int) -> bytes:
    """A GIF file of one frame of that size, whose data are one code."""
    colours = bytes(6)
    return (
        b"GIF89a"
        + struct.pack("<HHBBB", width, height, 0x80, 0, 0)
        + colours
        + b","
        + struct.pack("<HHHHB", 0, 0, width, height, 0)
        + b"\x02\x02\x44\x01\0;"
    )


def build_iso_header(brand: bytes) -> bytes:
    """The beginning of a file of the ISO family: HEIC, AVIF, a video."""
    return struct.pack(">I", 24) + b"ftyp" + brand + bytes(4) + b"mif1" + brand + bytes(200)


def build_icon(content: bytes) -> bytes:
    """An icon that holds one picture."""
    return struct.pack("<HHHBBBBHHII", 0, 1, 1, 16, 16, 0, 0, 1, 32, len(content), 22) + content


def build_zip(name: str, content: bytes) -> bytes:
    """A ZIP archive."""
    import zipfile

    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr(zipfile.ZipInfo(name), content)
    return file.getvalue()
