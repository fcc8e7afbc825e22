"""Image files built byte by byte, which no library would write."""

from __future__ import annotations

import io
import re
import struct
import zlib
from typing import Any

import numpy as np
from PIL import Image


def encode_image(image: Image.Image | np.ndarray, image_format: str, **options: Any) -> bytes:
    """Return an image encoded by Pillow in the format `image_format`."""
    file = io.BytesIO()
    (Image.fromarray(image) if isinstance(image, np.ndarray) else image).save(file, image_format, **options)
    return file.getvalue()


def build_png_chunk(chunk_type: bytes, body: bytes = b"") -> bytes:
    """Return a PNG chunk with its checksum."""
    return struct.pack(">I", len(body)) + chunk_type + body + struct.pack(">I", zlib.crc32(chunk_type + body))


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
    """Return a PNG file with compressed rows; `extra` holds the chunks before them."""
    header = struct.pack(">IIBBBBB", width, height, depth, colour, 0, 0, int(interlaced))
    return (
        b"\x89PNG\r\n\x1a\n"
        + build_png_chunk(b"IHDR", header)
        + extra
        + build_png_chunk(b"IDAT", rows)
        + build_png_chunk(b"IEND")
    )


def build_interlaced_png(values: np.ndarray) -> bytes:
    """Encode (H, W, C) uint16 as an interlaced 16-bit PNG: the seven Adam7 passes without filters."""
    passes = ((0, 0, 8, 8), (0, 4, 8, 8), (4, 0, 8, 4), (0, 2, 4, 4), (2, 0, 4, 2), (0, 1, 2, 2), (1, 0, 2, 1))
    passes_pixels = [values[top::down, left::right].astype(">u2") for top, left, down, right in passes]
    rows = b"".join(b"\0" + row.tobytes() for pass_pixels in passes_pixels if pass_pixels.size for row in pass_pixels)
    height, width = values.shape[:2]
    return build_png(width, height, zlib.compress(rows), depth=16, colour=2 if values.ndim == 3 else 0, interlaced=True)


def compress_zeros(count: int) -> bytes:
    """Return `count` zero bytes compressed by zlib.

    About 1000x faster than zlib: the compressed form of one megabyte is repeated.
    """
    block_size = 2**20
    packer = zlib.compressobj(9, zlib.DEFLATED, -15)
    first = packer.compress(bytes(block_size)) + packer.flush(zlib.Z_FULL_FLUSH)
    last = packer.compress(bytes(count % block_size)) + packer.flush()
    return b"\x78\xda" + first * (count // block_size) + last + struct.pack(">I", count % 65521 << 16 | 1)


def build_one_bit_png(side: int) -> bytes:
    """Return a black square PNG with one bit per pixel."""
    return build_png(side, side, compress_zeros(side * (1 + -(-side // 8))), depth=1, colour=0)


def replace_frame_marker(jpeg: bytes, marker: int, precision: int = 8) -> bytes:
    """Return a JPEG with another frame marker (coding process) or sample precision."""
    match = re.search(rb"\xff[\xc0-\xc2]\x00.[\x08]", jpeg, re.DOTALL)
    assert match
    return (
        jpeg[: match.start() + 1]
        + bytes([marker])
        + jpeg[match.start() + 2 : match.end() - 1]
        + bytes([precision])
        + jpeg[match.end() :]
    )


def repeat_last_scan(jpeg: bytes, count: int) -> bytes:
    """Return a progressive JPEG with its last scan repeated `count` times."""
    last = jpeg[jpeg.rindex(b"\xff\xda") : -2]
    return jpeg[:-2] + last * count + jpeg[-2:]


def replace_frame_size(jpeg: bytes, width: int, height: int) -> bytes:
    """Return a JPEG with another size in its frame header."""
    match = re.search(rb"\xff[\xc0-\xc2]\x00.\x08", jpeg, re.DOTALL)
    assert match
    return jpeg[: match.end()] + struct.pack(">HH", height, width) + jpeg[match.end() + 4 :]


def remove_segment(jpeg: bytes, marker: int) -> bytes:
    """Return a JPEG without the segment of that marker."""
    start = jpeg.index(bytes([0xFF, marker]))
    return jpeg[:start] + jpeg[start + 2 + int.from_bytes(jpeg[start + 2 : start + 4], "big") :]


def insert_segment(jpeg: bytes, marker: int, body: bytes) -> bytes:
    """Return a JPEG with an additional segment, placed first."""
    return jpeg[:2] + bytes([0xFF, marker]) + struct.pack(">H", len(body) + 2) + body + jpeg[2:]


def build_bmp(width: int, height: int, body: bytes, *, bits: int = 24, coding: int = 0, palette: bytes = b"") -> bytes:
    """Return a BMP file: bottom-up rows, top-down if `height` is negative, run-length coded if `coding` is 1 or 2."""
    start = 54 + len(palette)
    head = struct.pack("<IiiHHIIiiII", 40, width, height, 1, bits, coding, len(body), 0, 0, len(palette) // 4, 0)
    return b"BM" + struct.pack("<IHHI", start + len(body), 0, 0, start) + head + palette + body


def build_tiff_entry(tag: int, value_type: int, count: int, value: int) -> bytes:
    """Return an entry of a TIFF page directory."""
    return struct.pack("<HHI", tag, value_type, count) + (8 if value == -1 else value).to_bytes(4, "little")


def build_tiff(pages: list[dict[int, tuple[int, int, int]]], body: bytes = b"", loop: bool = False) -> bytes:
    """Return a little-endian TIFF file.

    Each page maps tag -> (type, count, value). A value of -1 is the offset of `body`, which comes first. With `loop`,
    the last page links to the first.
    """
    out, starts = [b"", body + b"\0" * (len(body) % 2)], []
    at = 8 + len(out[1])
    packed: dict[int, bytes] = {}  # a page that is listed a hundred thousand times is packed once
    for tags in pages:
        if id(tags) not in packed:
            packed[id(tags)] = struct.pack("<H", len(tags)) + b"".join(
                build_tiff_entry(tag, *fields) for tag, fields in sorted(tags.items())
            )
        starts.append(at)
        out.append(packed[id(tags)])
        at += len(out[-1]) + 4
    links = [*starts[1:], starts[0] if loop else 0]
    out[0] = b"II*\0" + struct.pack("<I", starts[0])
    return out[0] + out[1] + b"".join(page + struct.pack("<I", link) for page, link in zip(out[2:], links, strict=True))


def make_page_tags(width: int, height: int, **extra_tags: tuple[int, int, int]) -> dict[int, tuple[int, int, int]]:
    """Return the tags of one grey 8-bit page whose single strip is the file body.

    `extra_tags` are given as t320=(type, count, value).
    """
    tags = {256: width, 257: height, 258: 8, 259: 1, 262: 1, 277: 1, 278: height}
    default_tags = {tag: (4, 1, value) for tag, value in tags.items()}
    return (
        default_tags
        | {273: (4, 1, -1), 279: (4, 1, width * height)}
        | {int(name[1:]): value for name, value in extra_tags.items()}
    )


def build_webp_header(width: int, height: int) -> bytes:
    """Return the header of a lossless WebP file of that size, without data."""
    body = b"\x2f" + (width - 1 | (height - 1) << 14).to_bytes(4, "little") + bytes(8)
    return b"RIFF" + struct.pack("<I", len(body) + 13) + b"WEBPVP8L" + struct.pack("<I", len(body)) + body + b"\0"


def build_gif_header(width: int, height: int) -> bytes:
    """Return a GIF file with one frame of that size, whose data are a single code."""
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
    """Return the start of an ISO base media file: HEIC, AVIF or a video."""
    return struct.pack(">I", 24) + b"ftyp" + brand + bytes(4) + b"mif1" + brand + bytes(200)


def build_icon(content: bytes) -> bytes:
    """Return an icon file with one image."""
    return struct.pack("<HHHBBBBHHII", 0, 1, 1, 16, 16, 0, 0, 1, 32, len(content), 22) + content


def build_zip(name: str, content: bytes) -> bytes:
    """Return a ZIP archive with one member."""
    import zipfile

    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr(zipfile.ZipInfo(name), content)
    return file.getvalue()
