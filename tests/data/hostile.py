"""Image files that commonly break decoders, each with its expected result in every command.

A case is either accepted, with its expected pixels where they are known, or rejected with a message that names the
reason.
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
    build_bmp,
    build_gif_header,
    build_icon,
    build_interlaced_png,
    build_iso_header,
    build_one_bit_png,
    build_png,
    build_png_chunk,
    build_tiff,
    build_webp_header,
    build_zip,
    compress_zeros,
    encode_image,
    insert_segment,
    make_page_tags,
    remove_segment,
    repeat_last_scan,
    replace_frame_marker,
    replace_frame_size,
)
from vitreous.data.decoding.heif import is_format_readable, register_pillow_reader

DECODE_ERROR = "cannot be read as an image"
UNKNOWN_FORMAT_ERROR = "not an image of a known format"
TOO_LARGE_ERROR = "more than 64,000,000"
NO_RANGE = "no stated range"


@dataclass(frozen=True)
class HostileFile:
    """One file and its expected result.

    `error_pattern`: text of the error message, or None if the file is accepted. `golden` (H, W, 3): expected pixels, if
    known, which may differ by up to `tolerance`.
    """

    name: str
    content: bytes
    error_pattern: str | None = None
    golden: np.ndarray | None = None
    tolerance: int = 0


def make_colour_blocks(rows: int = 2, columns: int = 3) -> np.ndarray:
    """Return 8-pixel squares of one colour each, (8 rows, 8 columns, 3) uint8.

    JPEG preserves these colours in every orientation.
    """
    colours = np.array(
        [(220, 40, 30), (30, 200, 60), (40, 60, 230), (250, 250, 0), (9, 9, 9), (128, 70, 200)], np.uint8
    )
    return np.kron(np.resize(colours, (rows, columns, 3)), np.ones((8, 8, 1), np.uint8))


BLOCK_PIXELS = make_colour_blocks()
BLOCK_IMAGE = Image.fromarray(BLOCK_PIXELS)
NOISE_PIXELS = np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8)
NOISE_JPEG = encode_image(NOISE_PIXELS, "JPEG", quality=90)
NOISE_PNG = encode_image(NOISE_PIXELS, "PNG")
JPEG_OPTIONS = {"quality": 98, "subsampling": 0}


def grey_to_rgb(values: np.ndarray) -> np.ndarray:
    """Repeat (H, W) as (H, W, 3)."""
    return np.repeat(values[..., None], 3, 2)


@cache
def build_corpus() -> tuple[HostileFile, ...]:
    """Return every case; takes about a second."""
    cases = (
        *iterate_format_cases(),
        *iterate_truncated_cases(),
        *iterate_foreign_cases(),
        *iterate_pixel_mode_cases(),
        *iterate_exif_cases(),
        *iterate_animation_cases(),
        *iterate_extreme_size_cases(),
        *iterate_bomb_cases(),
        *iterate_npy_cases(),
        *iterate_rare_format_cases(),
    )
    assert len({case.name for case in cases}) == len(cases)
    return cases


def iterate_format_cases() -> Iterator[HostileFile]:
    """Valid files of every format."""
    yield HostileFile("ok.jpg", encode_image(BLOCK_IMAGE, "JPEG", **JPEG_OPTIONS), golden=BLOCK_PIXELS, tolerance=3)
    yield HostileFile(
        "ok_progressive.jpg",
        encode_image(BLOCK_IMAGE, "JPEG", progressive=True, **JPEG_OPTIONS),
        golden=BLOCK_PIXELS,
        tolerance=3,
    )
    yield HostileFile(
        "ok_grey.jpg",
        encode_image(BLOCK_IMAGE.convert("L"), "JPEG", quality=98),
        golden=np.asarray(BLOCK_IMAGE.convert("L").convert("RGB")),
        tolerance=2,
    )
    yield HostileFile("ok.webp", encode_image(BLOCK_IMAGE, "WEBP", lossless=True), golden=BLOCK_PIXELS)
    yield HostileFile("ok_lossy.webp", encode_image(BLOCK_IMAGE, "WEBP", quality=95))
    yield HostileFile("ok.gif", encode_image(BLOCK_IMAGE, "GIF"), golden=BLOCK_PIXELS)
    yield HostileFile(
        "ok_bits.png",
        encode_image(Image.fromarray(BLOCK_PIXELS[..., 0] > 100), "PNG"),
        golden=grey_to_rgb((BLOCK_PIXELS[..., 0] > 100).astype(np.uint8) * 255),
    )
    for image_format, name in (("AVIF", "ok.avif"), ("HEIF", "ok.heic")):
        if is_format_readable(image_format):
            register_pillow_reader(image_format)
            run_length_bmp = encode_image(
                BLOCK_IMAGE,
                image_format,
                quality=98,
                **({"subsampling": "4:4:4"} if image_format == "AVIF" else {"chroma": 444}),
            )
            yield HostileFile(name, run_length_bmp, golden=BLOCK_PIXELS, tolerance=6)
            yield HostileFile(f"trunc_50_{name}", run_length_bmp[: len(run_length_bmp) // 2], DECODE_ERROR)
    for image_format in ("PNG", "BMP", "TIFF"):
        yield HostileFile(f"ok.{image_format.lower()}", encode_image(BLOCK_IMAGE, image_format), golden=BLOCK_PIXELS)
    for coding in ("tiff_lzw", "packbits", "tiff_adobe_deflate"):
        yield HostileFile(
            f"ok_{coding}.tif", encode_image(BLOCK_IMAGE, "TIFF", compression=coding), golden=BLOCK_PIXELS
        )


def iterate_truncated_cases() -> Iterator[HostileFile]:
    """Truncated files and files with a wrong checksum."""
    yield HostileFile("zero.jpg", b"", "empty file")
    yield HostileFile("one_byte.jpg", b"\xff", UNKNOWN_FORMAT_ERROR)
    progressive = encode_image(NOISE_PIXELS, "JPEG", progressive=True)
    for name, end in (
        ("10", len(NOISE_JPEG) // 10),
        ("50", len(NOISE_JPEG) // 2),
        ("90", len(NOISE_JPEG) * 9 // 10),
        ("3_bytes", -3),
    ):
        yield HostileFile(
            f"trunc_{name}.jpg", NOISE_JPEG[:end], DECODE_ERROR if name != "10" else "not an image|cannot be read"
        )
    yield HostileFile("progressive_trunc.jpg", progressive[: len(progressive) // 2], DECODE_ERROR)
    yield HostileFile("trunc_50.png", NOISE_PNG[: len(NOISE_PNG) // 2], DECODE_ERROR)
    yield HostileFile("badcrc.png", NOISE_PNG[:3000] + bytes([NOISE_PNG[3000] ^ 1]) + NOISE_PNG[3001:], DECODE_ERROR)
    yield HostileFile(
        "badcrc_header.png", NOISE_PNG[:30] + bytes([NOISE_PNG[30] ^ 1]) + NOISE_PNG[31:], "not an image|cannot be read"
    )
    row = b"\0" + b"\x55" * 72
    missing_rows, interlaced = (
        build_png(24, 16, zlib.compress(row * 15)),
        build_interlaced_png(BLOCK_PIXELS.astype(np.uint16)),
    )
    yield HostileFile("rows.png", missing_rows, "rows are missing")
    yield HostileFile("rows_no_end.png", missing_rows[:-12], "rows are missing")
    taller_header = struct.pack(">IIBBBBB", 24, 17, 16, 2, 0, 0, 1)
    yield HostileFile(
        "rows_interlaced.png", interlaced[:8] + build_png_chunk(b"IHDR", taller_header) + interlaced[33:], DECODE_ERROR
    )
    yield HostileFile("rows_few_bytes.png", build_png(1, 33_554_433, zlib.compress(bytes(9))), "rows are missing")
    yield HostileFile(
        "black.png", encode_image(np.zeros((16, 24, 3), np.uint8), "PNG"), golden=np.zeros((16, 24, 3), np.uint8)
    )
    yield HostileFile(
        "strips.tif", build_tiff([make_page_tags(4, 400) | {278: (4, 1, 4), 279: (4, 1, 16)}], bytes(16)), DECODE_ERROR
    )
    yield HostileFile("trunc_iend.png", NOISE_PNG[:-12], golden=NOISE_PIXELS)
    for image_format in ("BMP", "TIFF", "GIF", "WEBP"):
        content = encode_image(NOISE_PIXELS, image_format)
        yield HostileFile(
            f"trunc_50.{image_format.lower()}", content[: len(content) // 2], "not an image|cannot be read"
        )


def iterate_foreign_cases() -> Iterator[HostileFile]:
    """Files that are no images or of an unsupported format, and images with the suffix of another format."""
    svg = b'<svg xmlns="http://www.w3.org/2000/svg" width="9" height="9"/>'
    yield HostileFile(
        "html.jpg", b"\n<!DOCTYPE html><html><body>404</body></html>", f"{UNKNOWN_FORMAT_ERROR}, but an HTML page"
    )
    yield HostileFile("pdf.jpg", b"%PDF-1.7\n%\xe2\xe3\xcf\xd3\n1 0 obj", f"{UNKNOWN_FORMAT_ERROR}, but a PDF")
    yield HostileFile("svg.png", svg, f"{UNKNOWN_FORMAT_ERROR}, but an SVG")
    yield HostileFile("svg.svg", b'<?xml version="1.0"?>\n<!-- x -->\n' + svg, f"{UNKNOWN_FORMAT_ERROR}, but an SVG")
    yield HostileFile(
        "eps.jpg",
        b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n%%EOF\n",
        f"{UNKNOWN_FORMAT_ERROR}, but a PostScript",
    )
    yield HostileFile("ico.jpg", build_icon(encode_image(BLOCK_IMAGE, "PNG")), f"{UNKNOWN_FORMAT_ERROR}, but an icon")
    yield HostileFile(
        "avif.jpg", build_iso_header(b"avif"), "cannot be read as an image|an AVIF image, but Pillow was built without"
    )
    yield HostileFile(
        "heic.jpg", build_iso_header(b"heic"), "cannot be read as an image|a HEIC image, which needs pillow-heif"
    )
    yield HostileFile("video.jpg", build_iso_header(b"isom"), f"{UNKNOWN_FORMAT_ERROR}, but a video")
    yield HostileFile("jp2.jpg", b"\0\0\0\x0cjP  \r\n\x87\n" + bytes(99), f"{UNKNOWN_FORMAT_ERROR}, but a JPEG 2000")
    yield HostileFile("jxl.jpg", b"\xff\x0a" + bytes(99), f"{UNKNOWN_FORMAT_ERROR}, but a JPEG XL")
    yield HostileFile("jxl_box.jpg", b"\0\0\0\x0cJXL \r\n\x87\n" + bytes(99), f"{UNKNOWN_FORMAT_ERROR}, but a JPEG XL")
    yield HostileFile(
        "qoi.jpg",
        b"qoif" + struct.pack(">IIBB", 1, 1, 3, 0) + b"\xfe\1\2\3" + b"\0" * 7 + b"\1",
        f"{UNKNOWN_FORMAT_ERROR}, but a QOI",
    )
    yield HostileFile(
        "tga.jpg", struct.pack("<BBBHHBHHHHBB", 0, 0, 2, 0, 0, 0, 0, 0, 2, 2, 24, 0) + bytes(12), UNKNOWN_FORMAT_ERROR
    )
    yield HostileFile("zip.jpg", build_zip("x.txt", b"x"), f"{UNKNOWN_FORMAT_ERROR}, but a ZIP")
    yield HostileFile(
        "lfs.jpg",
        b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n",
        f"{UNKNOWN_FORMAT_ERROR}, but a Git LFS pointer",
    )
    yield HostileFile("png_named.jpg", encode_image(BLOCK_IMAGE, "PNG"), golden=BLOCK_PIXELS)
    yield HostileFile(
        "zip_tail.jpg",
        encode_image(BLOCK_IMAGE, "JPEG", **JPEG_OPTIONS) + build_zip("x.html", b"<script>"),
        golden=BLOCK_PIXELS,
        tolerance=3,
    )


def iterate_pixel_mode_cases() -> Iterator[HostileFile]:
    """Pixel modes other than 8-bit colour."""
    ramp = np.arange(384, dtype=np.uint16).reshape(16, 24) * 170
    scaled = grey_to_rgb(((ramp.astype(np.int64) + 128) // 257).astype(np.uint8))
    ink = BLOCK_IMAGE.convert("CMYK")
    inked = np.asarray(ink.convert("RGB"))
    yield HostileFile("cmyk.jpg", encode_image(ink, "JPEG", **JPEG_OPTIONS), golden=inked, tolerance=3)
    yield HostileFile(
        "cmyk_plain.jpg", remove_segment(encode_image(ink, "JPEG", **JPEG_OPTIONS), 0xEE), golden=inked, tolerance=3
    )
    yield HostileFile("cmyk.tif", encode_image(ink, "TIFF"), golden=inked)
    yield HostileFile("lab.tif", encode_image(Image.new("LAB", (8, 8)), "TIFF"), NO_RANGE)
    yield HostileFile("gray16.png", encode_image(ramp, "PNG"), golden=scaled)
    yield HostileFile("gray16.tif", encode_image(ramp, "TIFF"), golden=scaled)
    yield HostileFile("gray16_interlaced.png", build_interlaced_png(ramp), golden=scaled)
    yield HostileFile(
        "rgb16_interlaced.png", build_interlaced_png(BLOCK_PIXELS.astype(np.uint16) * 257), golden=BLOCK_PIXELS
    )
    rows = b"".join(b"\0" + (row.astype(">u2") * 257).tobytes() for row in BLOCK_PIXELS)
    yield HostileFile("rgb16.png", build_png(24, 16, zlib.compress(rows), depth=16), golden=BLOCK_PIXELS)
    yield HostileFile(
        "float.tif", encode_image(np.random.default_rng(0).random((8, 8), dtype=np.float32), "TIFF"), NO_RANGE
    )
    yield HostileFile("int32.tif", encode_image(np.full((8, 8), 70_000, np.int32), "TIFF"), NO_RANGE)
    alpha = np.zeros((16, 24), np.uint8)
    alpha[:, 12:] = 255
    over_white = np.where(alpha[..., None] > 0, BLOCK_PIXELS, 255).astype(np.uint8)
    rgba = Image.fromarray(np.dstack([BLOCK_PIXELS, alpha]))
    yield HostileFile("rgba.png", encode_image(rgba, "PNG"), golden=over_white)
    yield HostileFile("rgba.webp", encode_image(rgba, "WEBP", lossless=True, exact=True), golden=over_white)
    yield HostileFile("rgba.tif", encode_image(rgba, "TIFF"), golden=over_white)
    shade = np.asarray(BLOCK_IMAGE.convert("L"))
    yield HostileFile("la.png", encode_image(Image.merge("LA", [BLOCK_IMAGE.convert("L"), Image.fromarray(alpha)]), "PNG"),
               golden=grey_to_rgb(np.where(alpha > 0, shade, 255).astype(np.uint8)))  # fmt: skip
    steps = Image.fromarray(np.tile(np.arange(24, dtype=np.uint8), (16, 1)), "P")
    steps.putpalette([v for i in range(256) for v in (i, 0, 0)])
    golden = np.zeros((16, 24, 3), np.uint8)
    golden[..., 0], golden[:, :12] = np.arange(24), 255
    yield HostileFile(
        "palette_alpha.png", encode_image(steps, "PNG", transparency=bytes([0] * 12 + [255] * 244)), golden=golden
    )
    corner = BLOCK_PIXELS[0, 0]
    keyed = np.where((corner == BLOCK_PIXELS).all(-1, keepdims=True), 255, BLOCK_PIXELS).astype(np.uint8)
    yield HostileFile("trns.png", encode_image(BLOCK_IMAGE, "PNG", transparency=tuple(corner.tolist())), golden=keyed)


def iterate_exif_cases() -> Iterator[HostileFile]:
    """Valid and invalid EXIF data, and an invalid colour profile."""
    transpositions = {2: [0], 3: [3], 4: [1], 5: [5], 6: [2], 7: [6], 8: [4]}  # orientation -> Pillow's transpositions
    for orientation in range(1, 9):
        image = BLOCK_IMAGE
        for operation in transpositions.get(orientation, []):
            image = image.transpose(Image.Transpose(operation))
        exif = Image.Exif()
        exif[0x0112] = orientation
        yield HostileFile(
            f"exif_{orientation}.jpg",
            encode_image(image, "JPEG", exif=exif, **JPEG_OPTIONS),
            golden=BLOCK_PIXELS,
            tolerance=3,
        )
    exif = Image.Exif()
    exif[0x0112] = 99
    jpeg = encode_image(BLOCK_IMAGE, "JPEG", **JPEG_OPTIONS)
    yield HostileFile(
        "exif_bad.jpg", encode_image(BLOCK_IMAGE, "JPEG", exif=exif, **JPEG_OPTIONS), golden=BLOCK_PIXELS, tolerance=3
    )
    yield HostileFile(
        "exif_garbage.jpg",
        insert_segment(jpeg, 0xE1, b"Exif\0\0" + b"MM\0*" + b"\xff" * 60),
        golden=BLOCK_PIXELS,
        tolerance=3,
    )
    yield HostileFile(
        "exif_no_header.jpg", insert_segment(jpeg, 0xE1, b"Exif\0\0" + b"junk" * 9), golden=BLOCK_PIXELS, tolerance=3
    )
    yield HostileFile(
        "exif_words.jpg",
        insert_segment(jpeg, 0xE1, b"Exif\0\0" + build_tiff([{0x0112: (2, 4, 0x00783C3C)}])),
        golden=BLOCK_PIXELS,
        tolerance=3,
    )
    yield HostileFile(
        "icc_garbage.jpg",
        insert_segment(jpeg, 0xE2, b"ICC_PROFILE\0\1\1" + b"\x80" * 60),
        golden=BLOCK_PIXELS,
        tolerance=3,
    )
    yield HostileFile("icc_garbage.png", encode_image(BLOCK_IMAGE, "PNG", icc_profile=b"junk"), golden=BLOCK_PIXELS)


def iterate_animation_cases() -> Iterator[HostileFile]:
    """Files with several frames: the first is decoded."""
    frames = [Image.fromarray(np.full((16, 16, 3), value, np.uint8)) for value in (10, 200, 90)]
    save_options = {"save_all": True, "append_images": frames[1:]}
    first = np.asarray(frames[0])
    yield HostileFile("anim.gif", encode_image(frames[0], "GIF", **save_options), golden=first)
    yield HostileFile("anim.webp", encode_image(frames[0], "WEBP", lossless=True, **save_options), golden=first)
    yield HostileFile("anim.png", encode_image(frames[0], "PNG", **save_options), golden=first)
    yield HostileFile("anim.tif", encode_image(frames[0], "TIFF", **save_options), golden=first)
    yield HostileFile("mpo.jpg", encode_image(frames[0], "MPO", **save_options), golden=first, tolerance=2)
    gif = encode_image(Image.fromarray(np.full((4, 4), 255, np.uint8)), "GIF")
    body = gif[gif.index(b"\x2c\0") :][:-1]  # the frame without the file header and trailer
    yield HostileFile("many_frames.gif", gif[:-1] + body * 2999 + b";", golden=np.full((4, 4, 3), 255, np.uint8))
    pages = [make_page_tags(4, 4)] * 100_000
    yield HostileFile("many_pages.tif", build_tiff(pages, bytes([77] * 16)), golden=np.full((4, 4, 3), 77, np.uint8))
    yield HostileFile(
        "page_loop.tif", build_tiff(pages[:2], bytes([77] * 16), loop=True), golden=np.full((4, 4, 3), 77, np.uint8)
    )


def iterate_extreme_size_cases() -> Iterator[HostileFile]:
    """Images of one pixel, of extreme aspect ratios, and of zero size."""
    for width, height in ((1, 1), (1, 10_000), (10_000, 1)):
        golden = np.full((height, width, 3), (1, 2, 3), np.uint8)
        yield HostileFile(f"{width}x{height}.png", encode_image(golden, "PNG"), golden=golden)
    golden = np.full((2, 65_500, 3), 128, np.uint8)
    yield HostileFile("65500x2.jpg", encode_image(golden, "JPEG"), golden=golden, tolerance=1)
    yield HostileFile("0x10.png", build_png(0, 10, zlib.compress(b"\0" * 10)), "not an image|cannot be read")
    yield HostileFile("0x0.gif", build_gif_header(0, 0), "not an image|cannot be read")
    yield HostileFile("0x8.bmp", build_bmp(0, 8, b""), "not an image|cannot be read")


def iterate_bomb_cases() -> Iterator[HostileFile]:
    """Small files that expand to much memory."""
    small = encode_image(BLOCK_IMAGE, "JPEG", progressive=True)
    yield HostileFile("side_2e31.png", build_png(2**31 - 1, 2**31 - 1, compress_zeros(99)), TOO_LARGE_ERROR)
    yield HostileFile("30000.png", build_png(30_000, 30_000, compress_zeros(99)), TOO_LARGE_ERROR)
    yield HostileFile("13300_bits.png", build_one_bit_png(13_300), TOO_LARGE_ERROR)
    yield HostileFile("9400_bits.png", build_one_bit_png(9_400), TOO_LARGE_ERROR)
    yield HostileFile("1x100000000.png", build_png(1, 100_000_000, compress_zeros(99)), TOO_LARGE_ERROR)
    yield HostileFile("65535.gif", build_gif_header(65_535, 65_535), TOO_LARGE_ERROR)
    yield HostileFile("9000.gif", build_gif_header(9_000, 9_000), TOO_LARGE_ERROR)
    yield HostileFile("65535.jpg", replace_frame_size(small, 65_535, 65_535), TOO_LARGE_ERROR)
    yield HostileFile("40000.bmp", build_bmp(40_000, 40_000, bytes(99)), TOO_LARGE_ERROR)
    yield HostileFile("10000.tif", build_tiff([make_page_tags(10_000, 10_000)], bytes(16)), TOO_LARGE_ERROR)
    yield HostileFile("16383.webp", build_webp_header(16_383, 16_383), TOO_LARGE_ERROR)
    yield HostileFile("9000.webp", build_webp_header(9_000, 9_000), TOO_LARGE_ERROR)
    yield HostileFile(
        "ztxt.png",
        build_png(1, 1, zlib.compress(bytes(4)), extra=build_png_chunk(b"zTXt", b"x\0\0" + compress_zeros(200 << 20))),
        DECODE_ERROR,
    )
    yield HostileFile(
        "iccp.png",
        build_png(1, 1, zlib.compress(bytes(4)), extra=build_png_chunk(b"iCCP", b"x\0\0" + compress_zeros(100 << 20))),
        DECODE_ERROR,
    )
    yield HostileFile("scans.jpg", repeat_last_scan(small, 1000), "more than 64 scans")
    yield HostileFile(
        "runs.bmp",
        build_bmp(8_000, 8_000, b"\1\1\0\0" * 8_000, bits=8, coding=1, palette=bytes(1024)),
        "a run-length encoded BMP",
    )


def iterate_npy_cases() -> Iterator[HostileFile]:
    """Images stored by numpy."""
    from numpy.lib import format as npy

    def build_npy_file(shape: tuple[int, ...], descr: str = "|u1", body: bytes = b"") -> bytes:
        file = io.BytesIO()
        npy.write_array_header_1_0(file, {"descr": descr, "fortran_order": False, "shape": shape})
        return file.getvalue() + body

    yield HostileFile("ok.npy", build_npy_file((16, 24, 3), body=BLOCK_PIXELS.tobytes()), golden=BLOCK_PIXELS)
    yield HostileFile(
        "bands.npy", build_npy_file((3, 16, 24), body=BLOCK_PIXELS.transpose(2, 0, 1).tobytes()), golden=BLOCK_PIXELS
    )
    yield HostileFile(
        "short.npy",
        build_npy_file((16, 24, 3), body=BLOCK_PIXELS.tobytes()[:-1]),
        "bytes of data, but the header states",
    )
    yield HostileFile("huge.npy", build_npy_file((2**20, 2**20, 4)), "bytes of data, but the header states")
    yield HostileFile(
        "objects.npy",
        build_npy_file((8, 8), "|O", b"cos\nsystem\n(S'exit 1'\ntR."),
        "a damaged .npy header|is not supported",
    )
    yield HostileFile("float.npy", build_npy_file((8, 8), "<f4", bytes(256)), "the model expects 3 of uint8")


def iterate_rare_format_cases() -> Iterator[HostileFile]:
    """Rare variants that the format standards allow."""
    jpeg = encode_image(BLOCK_IMAGE, "JPEG", **JPEG_OPTIONS)
    yield HostileFile("12_bits.jpg", replace_frame_marker(jpeg, 0xC1, 12), "a JPEG with 12 bits")
    yield HostileFile("arithmetic.jpg", replace_frame_marker(jpeg, 0xC9), "a JPEG with arithmetic coding")
    yield HostileFile("lossless.jpg", replace_frame_marker(jpeg, 0xC3), "a JPEG with lossless coding")
    rational = make_page_tags(4, 4, t273=(5, 1, -1))  # Pillow treats the rational as an offset until it seeks to it
    yield HostileFile("rational.tif", build_tiff([rational], struct.pack("<II", 8, 1) + bytes(8)), DECODE_ERROR)
    below = BLOCK_PIXELS[::-1, :, ::-1]
    yield HostileFile("below.bmp", build_bmp(24, 16, below.tobytes()), golden=BLOCK_PIXELS)
    yield HostileFile("above.bmp", build_bmp(24, -16, BLOCK_PIXELS[..., ::-1].tobytes()), golden=BLOCK_PIXELS)
    shades = bytes(v for i in range(256) for v in (i, i, i, 0))
    runs = b"".join(bytes([5, row, 3, 200]) + b"\0\0" for row in range(9, -1, -1)) + b"\0\1"
    golden = grey_to_rgb(np.array([[row] * 5 + [200] * 3 for row in range(10)], np.uint8))
    yield HostileFile("rle.bmp", build_bmp(8, 10, runs, bits=8, coding=1, palette=shades), golden=golden)
