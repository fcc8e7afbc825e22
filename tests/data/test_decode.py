"""Every image file is decoded to the correct pixels, or rejected with an error that names the file."""

from __future__ import annotations

import io
import os
import struct
import time
import zlib

import numpy as np
import pytest
from PIL import Image, TiffImagePlugin

from vitreous.data.decoding.decode import MAX_PIXELS, decode_to_pillow
from vitreous.errors import DataError


def make_gradient(height=12, width=20) -> np.ndarray:
    rows, columns = np.mgrid[:height, :width]
    return np.stack([rows * 20, columns * 12, 255 - rows * 10 - columns * 5], -1).astype(np.uint8)


GRADIENT_PIXELS = make_gradient()


def save_image(path, image, **options):
    image.save(path, **options)
    return path


@pytest.mark.parametrize("suffix,tolerance", [("png", 0), ("bmp", 0), ("tif", 0), ("webp", 0), ("jpg", 12)])
def test_rgb_images_are_decoded(tmp_path, suffix, tolerance):
    options = {"lossless": True} if suffix == "webp" else {"quality": 95, "subsampling": 0} if suffix == "jpg" else {}
    path = save_image(tmp_path / f"x.{suffix}", Image.fromarray(GRADIENT_PIXELS), **options)
    assert np.abs(np.asarray(decode_to_pillow(path)).astype(int) - GRADIENT_PIXELS).max() <= tolerance


def test_grey_becomes_rgb_and_rgb_becomes_grey(tmp_path):
    grey = GRADIENT_PIXELS[..., 0]
    path = save_image(tmp_path / "x.png", Image.fromarray(grey))
    assert np.array_equal(np.asarray(decode_to_pillow(path)), np.stack([grey] * 3, -1))
    assert np.array_equal(np.asarray(decode_to_pillow(path, channels=1)), grey)
    colour = decode_to_pillow(save_image(tmp_path / "y.png", Image.fromarray(GRADIENT_PIXELS)), channels=1)
    assert np.array_equal(np.asarray(colour), np.asarray(Image.fromarray(GRADIENT_PIXELS).convert("L")))


def test_one_bit_images_are_decoded(tmp_path):
    path = save_image(tmp_path / "x.png", Image.fromarray(GRADIENT_PIXELS[..., 0] > 100))
    assert np.array_equal(np.asarray(decode_to_pillow(path))[..., 0], (GRADIENT_PIXELS[..., 0] > 100) * 255)


def test_palette_images_become_rgb(tmp_path):
    path = save_image(tmp_path / "x.png", Image.fromarray(GRADIENT_PIXELS).quantize(200))
    assert np.array_equal(np.asarray(decode_to_pillow(path)), np.asarray(Image.open(path).convert("RGB")))


def test_sixteen_bit_grey_is_scaled_not_clipped(tmp_path):
    values = np.arange(240, dtype=np.uint16).reshape(12, 20) * 270
    path = save_image(tmp_path / "x.png", Image.fromarray(values))
    expected = np.rint(values / 257)
    assert np.abs(np.asarray(decode_to_pillow(path, 1)).astype(int) - expected).max() <= 1
    assert len(np.unique(np.asarray(decode_to_pillow(path, 1)))) > 200
    assert np.array_equal(
        np.asarray(decode_to_pillow(save_image(tmp_path / "x.tif", Image.fromarray(values)), 1)),
        np.asarray(decode_to_pillow(path, 1)),
    )


def test_sixteen_bit_colour_keeps_the_high_byte(tmp_path):
    pixels_16_bit = GRADIENT_PIXELS.astype(">u2") * 257
    rows = b"".join(b"\0" + row.tobytes() for row in pixels_16_bit)

    def build_chunk(chunk_type, body):
        return struct.pack(">I", len(body)) + chunk_type + body + struct.pack(">I", zlib.crc32(chunk_type + body))

    header = struct.pack(">IIBBBBB", 20, 12, 16, 2, 0, 0, 0)
    content = (
        b"\x89PNG\r\n\x1a\n"
        + build_chunk(b"IHDR", header)
        + build_chunk(b"IDAT", zlib.compress(rows))
        + build_chunk(b"IEND", b"")
    )
    (tmp_path / "x.png").write_bytes(content)
    assert np.array_equal(np.asarray(decode_to_pillow(tmp_path / "x.png")), GRADIENT_PIXELS)


@pytest.mark.parametrize("mode", ["RGBA", "LA", "PA", "P+tRNS", "RGB+tRNS"])
def test_transparency_is_laid_over_white(tmp_path, mode):
    alpha = np.zeros((12, 20), np.uint8)
    alpha[:, 10:] = 255
    rgba = Image.fromarray(np.dstack([GRADIENT_PIXELS, alpha]))
    if mode == "RGBA":
        path = save_image(tmp_path / "x.png", rgba)
    elif mode == "LA":
        path = save_image(tmp_path / "x.png", rgba.convert("LA"))
    elif mode == "PA":
        path = save_image(tmp_path / "x.webp", rgba, lossless=True, exact=True)
    elif mode == "P+tRNS":
        paletted = Image.fromarray(np.tile(np.arange(20, dtype=np.uint8), (12, 1)), "P")
        paletted.putpalette([v for i in range(256) for v in (i, 0, 0)])
        path = save_image(tmp_path / "x.png", paletted, transparency=bytes([0] * 10 + [255] * 246))
    else:
        pixels = GRADIENT_PIXELS.copy()
        pixels[:, :10] = (1, 2, 3)
        path = save_image(tmp_path / "x.png", Image.fromarray(pixels), transparency=(1, 2, 3))
    decoded = np.asarray(decode_to_pillow(path))
    assert (decoded[:, :10] == 255).all()
    assert not (decoded[:, 10:] == 255).all()


def test_half_transparency_is_mixed(tmp_path):
    half = Image.fromarray(np.dstack([np.zeros_like(GRADIENT_PIXELS), np.full((12, 20), 128, np.uint8)]))
    assert np.abs(np.asarray(decode_to_pillow(save_image(tmp_path / "x.png", half))).astype(int) - 127).max() <= 1


def test_cmyk_images_become_rgb(tmp_path):
    path = save_image(tmp_path / "x.jpg", Image.fromarray(GRADIENT_PIXELS).convert("CMYK"), quality=98, subsampling=0)
    assert np.abs(np.asarray(decode_to_pillow(path)).astype(int) - GRADIENT_PIXELS).mean() < 6


@pytest.mark.parametrize("orientation", range(1, 9))
def test_all_exif_orientations_come_out_upright(tmp_path, orientation):
    transpositions = {
        1: [], 2: [Image.Transpose.FLIP_LEFT_RIGHT], 3: [Image.Transpose.ROTATE_180], 4: [Image.Transpose.FLIP_TOP_BOTTOM],
        5: [Image.Transpose.TRANSPOSE], 6: [Image.Transpose.ROTATE_90], 7: [Image.Transpose.TRANSVERSE], 8: [Image.Transpose.ROTATE_270],
    }  # fmt: skip
    image = Image.fromarray(GRADIENT_PIXELS)
    for operation in transpositions[orientation]:
        image = image.transpose(operation)
    exif = Image.Exif()
    exif[0x0112] = orientation
    decoded = decode_to_pillow(save_image(tmp_path / "x.png", image, exif=exif))
    assert np.array_equal(np.asarray(decoded), GRADIENT_PIXELS)


def test_a_senseless_orientation_is_ignored(tmp_path):
    exif = Image.Exif()
    exif[0x0112] = 99
    assert np.array_equal(
        np.asarray(decode_to_pillow(save_image(tmp_path / "x.png", Image.fromarray(GRADIENT_PIXELS), exif=exif))),
        GRADIENT_PIXELS,
    )


def test_the_first_frame_of_an_animation_is_decoded(tmp_path):
    frames = [Image.fromarray(np.full((8, 8, 3), value, np.uint8)) for value in (10, 200)]
    for name, options in (("x.gif", {}), ("x.webp", {"lossless": True}), ("x.png", {"default_image": False})):
        path = save_image(tmp_path / name, frames[0], save_all=True, append_images=frames[1:], **options)
        assert (np.asarray(decode_to_pillow(path)) == 10).all(), name


def test_the_content_decides_not_the_name(tmp_path):
    assert np.array_equal(
        np.asarray(decode_to_pillow(save_image(tmp_path / "x.jpg", Image.fromarray(GRADIENT_PIXELS), format="PNG"))),
        GRADIENT_PIXELS,
    )


def encode_jpeg_bytes(size=(300, 200)) -> bytes:
    file = io.BytesIO()
    Image.fromarray(np.random.default_rng(0).integers(0, 255, (*size, 3), dtype=np.uint8)).save(file, "JPEG")
    return file.getvalue()


@pytest.mark.parametrize(
    "content,reason",
    [
        (b"", "empty file"),
        (b"x", "not an image"),
        (b"<html></html>", "not an image"),
        (b"%PDF-1.7 ...", "not an image"),
        (b"<svg xmlns='http://www.w3.org/2000/svg'/>", "not an image"),
        (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", "not an image"),
        (encode_jpeg_bytes()[:10_000], "truncated"),
        (encode_jpeg_bytes()[:-200], "truncated|broken|cannot be read"),
    ],
)
def test_invalid_images_are_rejected_by_name(tmp_path, content, reason):
    path = tmp_path / "bad.jpg"
    path.write_bytes(content)
    with pytest.raises(DataError, match=reason) as error:
        decode_to_pillow(path)
    assert "bad.jpg" in str(error.value)


@pytest.mark.parametrize("cut", [0.3, 0.8])
def test_truncated_pngs_are_rejected(tmp_path, cut):
    path = save_image(
        tmp_path / "x.png", Image.fromarray(np.random.default_rng(0).integers(0, 255, (64, 64, 3), dtype=np.uint8))
    )
    content = path.read_bytes()
    path.write_bytes(content[: int(cut * len(content))])
    with pytest.raises(DataError, match=r"x\.png"):
        decode_to_pillow(path)


def test_float_pixels_are_rejected(tmp_path):
    path = save_image(tmp_path / "x.tif", Image.fromarray(np.random.default_rng(0).random((8, 8), dtype=np.float32)))
    with pytest.raises(DataError, match="no stated range"):
        decode_to_pillow(path)
    path = save_image(tmp_path / "y.tif", Image.new("LAB", (8, 8)))
    with pytest.raises(DataError, match="no stated range"):
        decode_to_pillow(path)


def test_too_large_images_are_rejected_from_the_header(tmp_path):
    path = tmp_path / "bomb.png"
    side = int(MAX_PIXELS**0.5) + 100
    Image.new("1", (side, side)).save(path)
    assert path.stat().st_size < 100_000
    started = time.process_time()
    with pytest.raises(DataError, match="more than 64,000,000"):
        decode_to_pillow(path)
    assert time.process_time() - started < 0.5


def test_pipes_folders_and_missing_files_are_rejected(tmp_path):
    os.mkfifo(tmp_path / "pipe.jpg")
    (tmp_path / "folder.jpg").mkdir()
    (tmp_path / "dangling.jpg").symlink_to("nowhere")
    for name in ("pipe.jpg", "folder.jpg", "dangling.jpg", "missing.jpg"):
        with pytest.raises(DataError, match=name):
            decode_to_pillow(tmp_path / name)


def test_error_messages_escape_file_names(tmp_path):
    path = tmp_path / "a\nb\x1b[31m.jpg"
    path.write_bytes(b"junk")
    with pytest.raises(DataError) as error:
        decode_to_pillow(path)
    assert "\n" not in error.value.message and "\x1b" not in error.value.message


def test_tiff_with_floating_point_tags_is_left_to_the_library(tmp_path):
    info = TiffImagePlugin.ImageFileDirectory_v2()
    info[282] = 72.0
    assert np.array_equal(
        np.asarray(decode_to_pillow(save_image(tmp_path / "x.tif", Image.fromarray(GRADIENT_PIXELS), tiffinfo=info))),
        GRADIENT_PIXELS,
    )
