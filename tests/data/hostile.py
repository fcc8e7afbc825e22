"""The files that go wrong elsewhere, made here, each with what must come of it: the same in every command.

A case is accepted, with the pixels that it must decode to where they are known, or refused for a reason that its
message names.
"""

from __future__ import annotations

import io
import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

import numpy as np
from PIL import Image

from tests.data.crafted import (
    bits_png,
    bmp,
    chunk,
    ftyp,
    gif_header,
    icon,
    interlaced_png,
    page,
    png,
    saved,
    tiff,
    webp_header,
    with_marker,
    with_scans,
    with_segment,
    with_size,
    without_segment,
    zeros,
    zip_of,
)
from vitreous.data.decoding.heif import is_format_readable, register_pillow_reader

BROKEN = "cannot be read as an image"
UNKNOWN = "not an image of a known format"
LARGE = "more than 64,000,000"
NO_RANGE = "no stated range"


@dataclass(frozen=True)
class Case:
    """One file. `refused`: what its message says, or None where it is accepted, as `golden` (H, W, 3) give or take
    `off` where known."""

    name: str
    content: bytes
    refused: str | None = None
    golden: np.ndarray | None = None
    off: int = 0


def blocks(rows: int = 2, columns: int = 3) -> np.ndarray:
    """Squares of 8 pixels, each of one colour: (8 rows, 8 columns, 3) uint8. JPEG keeps them, whichever way it is
    turned."""
    colours = np.array(
        [(220, 40, 30), (30, 200, 60), (40, 60, 230), (250, 250, 0), (9, 9, 9), (128, 70, 200)], np.uint8
    )
    return np.kron(np.resize(colours, (rows, columns, 3)), np.ones((8, 8, 1), np.uint8))


RGB = blocks()
PICTURE = Image.fromarray(RGB)
NOISE = np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8)
JPEG = saved(NOISE, "JPEG", quality=90)
PNG = saved(NOISE, "PNG")
SMOOTH = {"quality": 98, "subsampling": 0}


def grey(values: np.ndarray) -> np.ndarray:
    """(H, W) as (H, W, 3)."""
    return np.repeat(values[..., None], 3, 2)


@cache
def corpus() -> tuple[Case, ...]:
    """Every case, in about a second."""
    found = (*plain(), *cut(), *foreign(), *deep(), *turned(), *animated(), *long(), *bombs(), *arrays(), *rare())
    assert len({case.name for case in found}) == len(found)
    return found


def plain() -> Iterator[Case]:
    """The formats themselves."""
    yield Case("ok.jpg", saved(PICTURE, "JPEG", **SMOOTH), golden=RGB, off=3)
    yield Case("ok_progressive.jpg", saved(PICTURE, "JPEG", progressive=True, **SMOOTH), golden=RGB, off=3)
    yield Case(
        "ok_grey.jpg",
        saved(PICTURE.convert("L"), "JPEG", quality=98),
        golden=np.asarray(PICTURE.convert("L").convert("RGB")),
        off=2,
    )
    yield Case("ok.webp", saved(PICTURE, "WEBP", lossless=True), golden=RGB)
    yield Case("ok_lossy.webp", saved(PICTURE, "WEBP", quality=95))
    yield Case("ok.gif", saved(PICTURE, "GIF"), golden=RGB)
    yield Case(
        "ok_bits.png",
        saved(Image.fromarray(RGB[..., 0] > 100), "PNG"),
        golden=grey((RGB[..., 0] > 100).astype(np.uint8) * 255),
    )
    for kind, name in (("AVIF", "ok.avif"), ("HEIF", "ok.heic")):
        if is_format_readable(kind):
            register_pillow_reader(kind)
            coded = saved(
                PICTURE, kind, quality=98, **({"subsampling": "4:4:4"} if kind == "AVIF" else {"chroma": 444})
            )
            yield Case(name, coded, golden=RGB, off=6)
            yield Case(f"trunc_50_{name}", coded[: len(coded) // 2], BROKEN)
    for kind in ("PNG", "BMP", "TIFF"):
        yield Case(f"ok.{kind.lower()}", saved(PICTURE, kind), golden=RGB)
    for coding in ("tiff_lzw", "packbits", "tiff_adobe_deflate"):
        yield Case(f"ok_{coding}.tif", saved(PICTURE, "TIFF", compression=coding), golden=RGB)


def cut() -> Iterator[Case]:
    """Files that end too early, or hold what their checksum does not."""
    yield Case("zero.jpg", b"", "empty file")
    yield Case("one_byte.jpg", b"\xff", UNKNOWN)
    progressive = saved(NOISE, "JPEG", progressive=True)
    for name, end in (("10", len(JPEG) // 10), ("50", len(JPEG) // 2), ("90", len(JPEG) * 9 // 10), ("3_bytes", -3)):
        yield Case(f"trunc_{name}.jpg", JPEG[:end], BROKEN if name != "10" else "not an image|cannot be read")
    yield Case("progressive_trunc.jpg", progressive[: len(progressive) // 2], BROKEN)
    yield Case("trunc_50.png", PNG[: len(PNG) // 2], BROKEN)
    yield Case("badcrc.png", PNG[:3000] + bytes([PNG[3000] ^ 1]) + PNG[3001:], BROKEN)
    yield Case("badcrc_header.png", PNG[:30] + bytes([PNG[30] ^ 1]) + PNG[31:], "not an image|cannot be read")
    row = b"\0" + b"\x55" * 72
    few, interlaced = png(24, 16, zlib.compress(row * 15)), interlaced_png(RGB.astype(np.uint16))
    yield Case("rows.png", few, "rows are missing")
    yield Case("rows_no_end.png", few[:-12], "rows are missing")
    taller = struct.pack(">IIBBBBB", 24, 17, 16, 2, 0, 0, 1)
    yield Case("rows_interlaced.png", interlaced[:8] + chunk(b"IHDR", taller) + interlaced[33:], BROKEN)
    yield Case("rows_few_bytes.png", png(1, 33_554_433, zlib.compress(bytes(9))), "rows are missing")
    yield Case("black.png", saved(np.zeros((16, 24, 3), np.uint8), "PNG"), golden=np.zeros((16, 24, 3), np.uint8))
    yield Case("strips.tif", tiff([page(4, 400) | {278: (4, 1, 4), 279: (4, 1, 16)}], bytes(16)), BROKEN)
    yield Case("trunc_iend.png", PNG[:-12], golden=NOISE)
    for kind in ("BMP", "TIFF", "GIF", "WEBP"):
        content = saved(NOISE, kind)
        yield Case(f"trunc_50.{kind.lower()}", content[: len(content) // 2], "not an image|cannot be read")


def foreign() -> Iterator[Case]:
    """What is no image, or none of the known formats, under the name of one; and images under the name of another."""
    svg = b'<svg xmlns="http://www.w3.org/2000/svg" width="9" height="9"/>'
    yield Case("html.jpg", b"\n<!DOCTYPE html><html><body>404</body></html>", f"{UNKNOWN}, but an HTML page")
    yield Case("pdf.jpg", b"%PDF-1.7\n%\xe2\xe3\xcf\xd3\n1 0 obj", f"{UNKNOWN}, but a PDF")
    yield Case("svg.png", svg, f"{UNKNOWN}, but an SVG")
    yield Case("svg.svg", b'<?xml version="1.0"?>\n<!-- x -->\n' + svg, f"{UNKNOWN}, but an SVG")
    yield Case("eps.jpg", b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n%%EOF\n", f"{UNKNOWN}, but a PostScript")
    yield Case("ico.jpg", icon(saved(PICTURE, "PNG")), f"{UNKNOWN}, but an icon")
    yield Case("avif.jpg", ftyp(b"avif"), "cannot be read as an image|an AVIF image, but Pillow was built without")
    yield Case("heic.jpg", ftyp(b"heic"), "cannot be read as an image|a HEIC image, which needs pillow-heif")
    yield Case("video.jpg", ftyp(b"isom"), f"{UNKNOWN}, but a video")
    yield Case("jp2.jpg", b"\0\0\0\x0cjP  \r\n\x87\n" + bytes(99), f"{UNKNOWN}, but a JPEG 2000")
    yield Case("jxl.jpg", b"\xff\x0a" + bytes(99), f"{UNKNOWN}, but a JPEG XL")
    yield Case("jxl_box.jpg", b"\0\0\0\x0cJXL \r\n\x87\n" + bytes(99), f"{UNKNOWN}, but a JPEG XL")
    yield Case(
        "qoi.jpg",
        b"qoif" + struct.pack(">IIBB", 1, 1, 3, 0) + b"\xfe\1\2\3" + b"\0" * 7 + b"\1",
        f"{UNKNOWN}, but a QOI",
    )
    yield Case("tga.jpg", struct.pack("<BBBHHBHHHHBB", 0, 0, 2, 0, 0, 0, 0, 0, 2, 2, 24, 0) + bytes(12), UNKNOWN)
    yield Case("zip.jpg", zip_of("x.txt", b"x"), f"{UNKNOWN}, but a ZIP")
    yield Case(
        "lfs.jpg",
        b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n",
        f"{UNKNOWN}, but a Git LFS pointer",
    )
    yield Case("png_named.jpg", saved(PICTURE, "PNG"), golden=RGB)
    yield Case("zip_tail.jpg", saved(PICTURE, "JPEG", **SMOOTH) + zip_of("x.html", b"<script>"), golden=RGB, off=3)


def deep() -> Iterator[Case]:
    """Modes other than 8-bit colour."""
    ramp = np.arange(384, dtype=np.uint16).reshape(16, 24) * 170
    scaled = grey(((ramp.astype(np.int64) + 128) // 257).astype(np.uint8))
    ink = PICTURE.convert("CMYK")
    inked = np.asarray(ink.convert("RGB"))
    yield Case("cmyk.jpg", saved(ink, "JPEG", **SMOOTH), golden=inked, off=3)
    yield Case("cmyk_plain.jpg", without_segment(saved(ink, "JPEG", **SMOOTH), 0xEE), golden=inked, off=3)
    yield Case("cmyk.tif", saved(ink, "TIFF"), golden=inked)
    yield Case("lab.tif", saved(Image.new("LAB", (8, 8)), "TIFF"), NO_RANGE)
    yield Case("gray16.png", saved(ramp, "PNG"), golden=scaled)
    yield Case("gray16.tif", saved(ramp, "TIFF"), golden=scaled)
    yield Case("gray16_interlaced.png", interlaced_png(ramp), golden=scaled)
    yield Case("rgb16_interlaced.png", interlaced_png(RGB.astype(np.uint16) * 257), golden=RGB)
    rows = b"".join(b"\0" + (row.astype(">u2") * 257).tobytes() for row in RGB)
    yield Case("rgb16.png", png(24, 16, zlib.compress(rows), depth=16), golden=RGB)
    yield Case("float.tif", saved(np.random.default_rng(0).random((8, 8), dtype=np.float32), "TIFF"), NO_RANGE)
    yield Case("int32.tif", saved(np.full((8, 8), 70_000, np.int32), "TIFF"), NO_RANGE)
    alpha = np.zeros((16, 24), np.uint8)
    alpha[:, 12:] = 255
    over = np.where(alpha[..., None] > 0, RGB, 255).astype(np.uint8)
    rgba = Image.fromarray(np.dstack([RGB, alpha]))
    yield Case("rgba.png", saved(rgba, "PNG"), golden=over)
    yield Case("rgba.webp", saved(rgba, "WEBP", lossless=True, exact=True), golden=over)
    yield Case("rgba.tif", saved(rgba, "TIFF"), golden=over)
    shade = np.asarray(PICTURE.convert("L"))
    yield Case("la.png", saved(Image.merge("LA", [PICTURE.convert("L"), Image.fromarray(alpha)]), "PNG"),
               golden=grey(np.where(alpha > 0, shade, 255).astype(np.uint8)))  # fmt: skip
    steps = Image.fromarray(np.tile(np.arange(24, dtype=np.uint8), (16, 1)), "P")
    steps.putpalette([v for i in range(256) for v in (i, 0, 0)])
    seen = np.zeros((16, 24, 3), np.uint8)
    seen[..., 0], seen[:, :12] = np.arange(24), 255
    yield Case("palette_alpha.png", saved(steps, "PNG", transparency=bytes([0] * 12 + [255] * 244)), golden=seen)
    corner = RGB[0, 0]
    keyed = np.where((corner == RGB).all(-1, keepdims=True), 255, RGB).astype(np.uint8)
    yield Case("trns.png", saved(PICTURE, "PNG", transparency=tuple(corner.tolist())), golden=keyed)


def turned() -> Iterator[Case]:
    """EXIF, right and wrong, and a profile that is none."""
    back = {2: [0], 3: [3], 4: [1], 5: [5], 6: [2], 7: [6], 8: [4]}  # orientation -> Pillow's transpositions
    for orientation in range(1, 9):
        image = PICTURE
        for operation in back.get(orientation, []):
            image = image.transpose(Image.Transpose(operation))
        exif = Image.Exif()
        exif[0x0112] = orientation
        yield Case(f"exif_{orientation}.jpg", saved(image, "JPEG", exif=exif, **SMOOTH), golden=RGB, off=3)
    exif = Image.Exif()
    exif[0x0112] = 99
    jpeg = saved(PICTURE, "JPEG", **SMOOTH)
    yield Case("exif_bad.jpg", saved(PICTURE, "JPEG", exif=exif, **SMOOTH), golden=RGB, off=3)
    yield Case("exif_garbage.jpg", with_segment(jpeg, 0xE1, b"Exif\0\0" + b"MM\0*" + b"\xff" * 60), golden=RGB, off=3)
    yield Case("exif_no_header.jpg", with_segment(jpeg, 0xE1, b"Exif\0\0" + b"junk" * 9), golden=RGB, off=3)
    yield Case(
        "exif_words.jpg",
        with_segment(jpeg, 0xE1, b"Exif\0\0" + tiff([{0x0112: (2, 4, 0x00783C3C)}])),
        golden=RGB,
        off=3,
    )
    yield Case("icc_garbage.jpg", with_segment(jpeg, 0xE2, b"ICC_PROFILE\0\1\1" + b"\x80" * 60), golden=RGB, off=3)
    yield Case("icc_garbage.png", saved(PICTURE, "PNG", icc_profile=b"junk"), golden=RGB)


def animated() -> Iterator[Case]:
    """Several pictures in a file: the first is taken."""
    frames = [Image.fromarray(np.full((16, 16, 3), value, np.uint8)) for value in (10, 200, 90)]
    more = {"save_all": True, "append_images": frames[1:]}
    first = np.asarray(frames[0])
    yield Case("anim.gif", saved(frames[0], "GIF", **more), golden=first)
    yield Case("anim.webp", saved(frames[0], "WEBP", lossless=True, **more), golden=first)
    yield Case("anim.png", saved(frames[0], "PNG", **more), golden=first)
    yield Case("anim.tif", saved(frames[0], "TIFF", **more), golden=first)
    yield Case("mpo.jpg", saved(frames[0], "MPO", **more), golden=first, off=2)
    one = saved(Image.fromarray(np.full((4, 4), 255, np.uint8)), "GIF")
    body = one[one.index(b"\x2c\0") :][:-1]  # from the frame's own header to the end of its data
    yield Case("many_frames.gif", one[:-1] + body * 2999 + b";", golden=np.full((4, 4, 3), 255, np.uint8))
    pages = [page(4, 4)] * 100_000
    yield Case("many_pages.tif", tiff(pages, bytes([77] * 16)), golden=np.full((4, 4, 3), 77, np.uint8))
    yield Case("page_loop.tif", tiff(pages[:2], bytes([77] * 16), loop=True), golden=np.full((4, 4, 3), 77, np.uint8))


def long() -> Iterator[Case]:
    """Pictures of one pixel, or far longer than they are wide; and of none."""
    for width, height in ((1, 1), (1, 10_000), (10_000, 1)):
        golden = np.full((height, width, 3), (1, 2, 3), np.uint8)
        yield Case(f"{width}x{height}.png", saved(golden, "PNG"), golden=golden)
    golden = np.full((2, 65_500, 3), 128, np.uint8)
    yield Case("65500x2.jpg", saved(golden, "JPEG"), golden=golden, off=1)
    yield Case("0x10.png", png(0, 10, zlib.compress(b"\0" * 10)), "not an image|cannot be read")
    yield Case("0x0.gif", gif_header(0, 0), "not an image|cannot be read")
    yield Case("0x8.bmp", bmp(0, 8, b""), "not an image|cannot be read")


def bombs() -> Iterator[Case]:
    """Small files that ask for much."""
    small = saved(PICTURE, "JPEG", progressive=True)
    yield Case("side_2e31.png", png(2**31 - 1, 2**31 - 1, zeros(99)), LARGE)
    yield Case("30000.png", png(30_000, 30_000, zeros(99)), LARGE)
    yield Case("13300_bits.png", bits_png(13_300), LARGE)
    yield Case("9400_bits.png", bits_png(9_400), LARGE)
    yield Case("1x100000000.png", png(1, 100_000_000, zeros(99)), LARGE)
    yield Case("65535.gif", gif_header(65_535, 65_535), LARGE)
    yield Case("9000.gif", gif_header(9_000, 9_000), LARGE)
    yield Case("65535.jpg", with_size(small, 65_535, 65_535), LARGE)
    yield Case("40000.bmp", bmp(40_000, 40_000, bytes(99)), LARGE)
    yield Case("10000.tif", tiff([page(10_000, 10_000)], bytes(16)), LARGE)
    yield Case("16383.webp", webp_header(16_383, 16_383), LARGE)
    yield Case("9000.webp", webp_header(9_000, 9_000), LARGE)
    yield Case(
        "ztxt.png", png(1, 1, zlib.compress(bytes(4)), extra=chunk(b"zTXt", b"x\0\0" + zeros(200 << 20))), BROKEN
    )
    yield Case(
        "iccp.png", png(1, 1, zlib.compress(bytes(4)), extra=chunk(b"iCCP", b"x\0\0" + zeros(100 << 20))), BROKEN
    )
    yield Case("scans.jpg", with_scans(small, 1000), "more than 64 scans")
    yield Case(
        "runs.bmp",
        bmp(8_000, 8_000, b"\1\1\0\0" * 8_000, bits=8, coding=1, palette=bytes(1024)),
        "a run-length encoded BMP",
    )


def arrays() -> Iterator[Case]:
    """Pictures that numpy stored."""
    from numpy.lib import format as npy

    def header(shape: tuple[int, ...], kind: str = "|u1", body: bytes = b"") -> bytes:
        file = io.BytesIO()
        npy.write_array_header_1_0(file, {"descr": kind, "fortran_order": False, "shape": shape})
        return file.getvalue() + body

    yield Case("ok.npy", header((16, 24, 3), body=RGB.tobytes()), golden=RGB)
    yield Case("bands.npy", header((3, 16, 24), body=RGB.transpose(2, 0, 1).tobytes()), golden=RGB)
    yield Case("short.npy", header((16, 24, 3), body=RGB.tobytes()[:-1]), "bytes of data, but the header states")
    yield Case("huge.npy", header((2**20, 2**20, 4)), "bytes of data, but the header states")
    yield Case(
        "objects.npy", header((8, 8), "|O", b"cos\nsystem\n(S'exit 1'\ntR."), "a damaged .npy header|is not supported"
    )
    yield Case("float.npy", header((8, 8), "<f4", bytes(256)), "the model expects 3 of uint8")


def rare() -> Iterator[Case]:
    """What standards allow and few files have."""
    jpeg = saved(PICTURE, "JPEG", **SMOOTH)
    yield Case("12_bits.jpg", with_marker(jpeg, 0xC1, 12), "a JPEG with 12 bits")
    yield Case("arithmetic.jpg", with_marker(jpeg, 0xC9), "a JPEG with arithmetic coding")
    yield Case("lossless.jpg", with_marker(jpeg, 0xC3), "a JPEG with lossless coding")
    rational = page(4, 4, t273=(5, 1, -1))  # what Pillow takes for a place in the file, until it goes there
    yield Case("rational.tif", tiff([rational], struct.pack("<II", 8, 1) + bytes(8)), BROKEN)
    below = RGB[::-1, :, ::-1]
    yield Case("below.bmp", bmp(24, 16, below.tobytes()), golden=RGB)
    yield Case("above.bmp", bmp(24, -16, RGB[..., ::-1].tobytes()), golden=RGB)
    shades = bytes(v for i in range(256) for v in (i, i, i, 0))
    runs = b"".join(bytes([5, row, 3, 200]) + b"\0\0" for row in range(9, -1, -1)) + b"\0\1"
    golden = grey(np.array([[row] * 5 + [200] * 3 for row in range(10)], np.uint8))
    yield Case("rle.bmp", bmp(8, 10, runs, bits=8, coding=1, palette=shades), golden=golden)
