"""Checks before decoding: reject files whose decoding cost far exceeds their size, and identify files of other formats.

Pillow limits headers, tags and text, but not the following:

- the size of a WebP canvas, which it allocates to open the file
- the number of scans of a progressive JPEG, each of which visits every pixel
- the run lengths in a BMP, which it unpacks byte by byte

Pillow also does not detect missing rows of a PNG.
"""

from __future__ import annotations

import re
import struct
import zlib

from vitreous.errors import DataError

MAX_PIXELS = 64_000_000  # maximum pixels of an image
MAX_JPEG_PIXELS = 178_000_000  # maximum pixels of a JPEG decoded at 1/2 to 1/8: Pillow's limit
PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"
# left, top, horizontal and vertical step of each interlacing pass of a PNG
ADAM7_PASSES = ((0, 0, 8, 8), (4, 0, 8, 8), (0, 4, 4, 8), (2, 0, 4, 4), (0, 2, 2, 4), (1, 0, 2, 2), (0, 1, 1, 2))
MAX_DEFLATE_RATIO = 1040  # limit of unpacked / packed bytes; deflate reaches 1032 (RFC 1951: 258 bytes for two bits)
MAX_JPEG_SCANS = 64  # maximum scans of a JPEG; encoders write about ten
MAX_BMP_RUN_PIXELS = (
    4_000_000  # maximum pixels, and file bytes, of a run-length encoded BMP; it decodes in half a second
)
SAVE_IMAGE_HINT = "save it as a standard JPEG or PNG"
#: file formats that often occur in place of images: offset of the signature, signature, name with article
FILE_SIGNATURES = (
    (0, b"%PDF-", "a PDF document"),
    (0, b"%!PS", "a PostScript document"),
    (0, b"\xc5\xd0\xd3\xc6", "a PostScript document"),
    (0, b"8BPS", "a Photoshop document"),
    (0, b"qoif", "a QOI image"),
    (0, b"\0\0\1\0", "an icon"),
    (0, b"\xff\x0a", "a JPEG XL image"),
    (0, b"\0\0\0\x0cJXL ", "a JPEG XL image"),
    (0, b"\0\0\0\x0cjP  ", "a JPEG 2000 image"),
    (0, b"\xff\x4f\xff\x51", "a JPEG 2000 image"),
    (4, b"ftyp", "a video"),
    (0, b"PK\3\4", "a ZIP archive"),
    (0, b"\x1f\x8b", "a gzip archive"),
    (0, b"version https://git-lfs", "a Git LFS pointer (git lfs pull downloads the file)"),
)


def identify_file_format(content: bytes) -> str:
    """Return the name of a format that is not read as an image, such as "a PDF document"; an empty string if the format
    is unknown."""
    text = content[:1024].removeprefix(b"\xef\xbb\xbf").lstrip().lower()
    if text.startswith((b"<svg", b"<?xml", b"<!doctype svg", b"<!--")) and b"<svg" in text:
        return "an SVG drawing"
    if text.startswith((b"<!doctype html", b"<html", b"<head", b"<body")):
        return "an HTML page"
    return next((reason for offset, signature, reason in FILE_SIGNATURES if content.startswith(signature, offset)), "")


def check_decoding_cost(content: bytes, name: str, max_pixels: int = MAX_PIXELS) -> None:
    """Raise DataError for files that are empty, too expensive to decode, or decoded differently by different decoders:

    - a PNG or WebP with more than `max_pixels` pixels
    - a PNG with fewer bytes than its rows need
    - a JPEG with more than MAX_JPEG_SCANS scans, or with coding other than 8-bit Huffman (ITU-T T.81, Table B.1)
    - a run-length encoded BMP with more than MAX_BMP_RUN_PIXELS pixels or bytes
    """
    if not content:
        raise DataError(f"{name}: empty file")
    if content.startswith(b"\xff\xd8"):
        if reason := find_jpeg_problem(content):
            raise DataError(f"{name}: a JPEG {reason}", SAVE_IMAGE_HINT)
    elif content.startswith(PNG_SIGNATURE):
        width, height = struct.unpack_from(">II", content.ljust(24), 16)
        if width * height > max_pixels and content[12:16] == b"IHDR":
            raise too_large_error(name, width, height, max_pixels)
        if count_png_row_bytes(content) > MAX_DEFLATE_RATIO * len(content):
            raise DataError(f"{name}: cannot be read as an image (rows are missing)", "fix or delete the file")
    elif content.startswith(b"RIFF") and content[8:12] == b"WEBP":
        width, height = read_webp_size(content)
        if width * height > max_pixels:
            raise too_large_error(name, width, height, max_pixels)
    elif content.startswith(b"BM") and len(content) >= 34:
        width, height, coding = struct.unpack_from("<ii4xI", content, 18)
        if coding in (1, 2) and max(abs(width * height), len(content)) > MAX_BMP_RUN_PIXELS:
            problem = f"a run-length encoded BMP of {abs(width)} x {abs(height)} pixels is too slow to decode"
            raise DataError(f"{name}: {problem}", SAVE_IMAGE_HINT)


def too_large_error(name: str, width: int, height: int, max_pixels: int = MAX_PIXELS) -> DataError:
    """Create the error for an image with more than `max_pixels` pixels."""
    return DataError(f"{name}: {width} x {height} pixels, more than {max_pixels:,}", "scale it down")


def read_webp_size(content: bytes) -> tuple[int, int]:
    """Read width and height from the first chunk of a WebP file; (0, 0) if the chunk has no size."""
    head = content[12:30].ljust(18, b"\0")
    if head.startswith(b"VP8X"):
        return int.from_bytes(head[12:15], "little") + 1, int.from_bytes(head[15:18], "little") + 1
    if head.startswith(b"VP8L"):
        bits = int.from_bytes(head[9:13], "little")
        return (bits & 0x3FFF) + 1, (bits >> 14 & 0x3FFF) + 1
    if head.startswith(b"VP8 "):
        width, height = struct.unpack_from("<HH", head, 14)
        return width & 0x3FFF, height & 0x3FFF
    return 0, 0


def count_png_row_bytes(content: bytes) -> int:
    """Compute the number of bytes of a PNG's unpacked rows, from its header; 0 without a header. Each row has one
    filter byte (W3C PNG, 7.2 and 8.1)."""
    if content[12:16] != b"IHDR" or len(content) < 29 or content[25] not in _PNG_SAMPLES:
        return 0
    width, height, depth, colour = struct.unpack_from(">IIBB", content, 16)
    passes = ADAM7_PASSES if content[28] else ((0, 0, 1, 1),)
    sizes = ((-(-(width - left) // x_step), -(-(height - top) // y_step)) for left, top, x_step, y_step in passes)
    return sum(
        pass_height * (1 + -(-pass_width * depth * _PNG_SAMPLES[colour] // 8))
        for pass_width, pass_height in sizes
        if pass_width > 0 and pass_height > 0
    )


def has_missing_png_rows(content: bytes) -> bool:
    """Return whether rows are missing at the end of a PNG. Pillow decodes such a file without an error and leaves the
    rows black."""
    unpacker, offset, remaining = zlib.decompressobj(), 8, count_png_row_bytes(content)
    while remaining > 0 and offset + 8 <= len(content):
        length, chunk_type = struct.unpack_from(">I4s", content, offset)
        compressed = content[offset + 8 : offset + 8 + length] if chunk_type == b"IDAT" else b""
        while compressed and remaining > 0:
            remaining -= len(unpacker.decompress(compressed, 2**20))
            compressed = unpacker.unconsumed_tail
        offset += 12 + length
    return remaining > 0


def find_jpeg_problem(content: bytes) -> str:
    """Return the reason to reject a JPEG, such as "with 12 bits"; an empty string if it is accepted, or too damaged to
    parse."""
    has_many_scans, offset, scans = content.count(b"\xff\xda") > MAX_JPEG_SCANS, 2, 0
    while match := _JPEG_MARKER.search(content, offset):
        marker, offset = match[1][0], match.end()
        if marker == 0xD9:
            break
        if marker == 0x01 or 0xD0 <= marker <= 0xD8:
            continue
        length = int.from_bytes(content[offset : offset + 2], "big")
        if marker in _JPEG_CODINGS:
            if marker not in (0xC0, 0xC1, 0xC2):
                return f"with {_JPEG_CODINGS[marker]} coding"
            if content[offset + 2 : offset + 3] not in (b"\x08", b""):
                return f"with {content[offset + 2]} bits"
        if marker == 0xDA:
            scans += 1
            if scans > MAX_JPEG_SCANS:
                return f"with more than {MAX_JPEG_SCANS} scans"
            if not has_many_scans:
                break
        offset += length
    return ""


#: a marker of a JPEG: one or more 0xFF, and a code byte; 0xFF before 0 is coded data
_JPEG_MARKER = re.compile(rb"\xff+([^\x00\xff])", re.DOTALL)
_PNG_SAMPLES = {0: 1, 2: 3, 3: 1, 4: 2, 6: 4}  # samples per pixel of each PNG colour type
# marker of a JPEG frame -> name of its coding
_JPEG_CODINGS = {
    **{0xC0: "baseline", 0xC1: "extended", 0xC2: "progressive", 0xC3: "lossless"},
    **dict.fromkeys((0xC5, 0xC6, 0xC7), "hierarchical"),
    **dict.fromkeys((0xC9, 0xCA, 0xCB, 0xCD, 0xCE, 0xCF), "arithmetic"),
}
