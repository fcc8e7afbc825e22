"""Reduced JPEG decoding: close to the exact pixels in every orientation, and rejected for the same reasons."""

from __future__ import annotations

import io

import numpy as np
import pytest
from PIL import Image

from tests.data.hostile import build_corpus
from tests.inference.small_models import encode_jpeg, make_photo
from vitreous.data.decoding import regions
from vitreous.data.decoding.regions import LazyJpeg
from vitreous.data.modalities.base import Preprocess
from vitreous.data.modalities.images import ImagePreprocess
from vitreous.errors import DataError
from vitreous.inference import reading
from vitreous.inference.reading import read_large_jpeg, read_model_input


@pytest.fixture(scope="module")
def photo():
    return make_photo(1203, 901)


def read_shape_or_error(content: bytes, preprocess: Preprocess, exact: bool) -> str:
    """Return the shape of the decoded pixels, or the error message."""
    try:
        return str(read_model_input(content, preprocess, "x", exact).shape)
    except DataError as error:
        return error.message


@pytest.mark.parametrize("fit", ["crop", "squash"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_reduced_jpeg_pixels_are_within_tolerance(photo, fit, orientation, monkeypatch):
    factors = []
    decode_rows = LazyJpeg.decode_rows
    monkeypatch.setattr(
        LazyJpeg, "decode_rows", lambda self, rows, factor: factors.append(factor) or decode_rows(self, rows, factor)
    )
    preprocess, content = ImagePreprocess((64, 96), fit=fit, share=0.9), encode_jpeg(photo, orientation)
    exact, small = (read_model_input(content, preprocess, exact=choice).astype(int) for choice in (True, False))
    assert factors == [4] and exact.shape == small.shape == (3, 64, 96)
    difference = np.abs(exact - small)
    assert 0 < difference.mean() <= 1 and difference.max() < 16
    moved = np.abs(exact[..., 1:] - small[..., :-1]).mean()  # the difference caused by a shift by one pixel
    assert difference.mean() < moved / 5


def test_reduced_decoding_of_greyscale_and_slightly_larger_jpegs(photo):
    content = encode_jpeg(photo.convert("L"))
    for channels in (1, 3):
        decoded = [
            read_model_input(content, ImagePreprocess((48, 48), channels=channels), exact=choice).astype(int)
            for choice in (True, False)
        ]
        assert decoded[0].shape == (channels, 48, 48) and np.abs(decoded[0] - decoded[1]).mean() <= 1
    near = ImagePreprocess((240, 240))
    assert np.array_equal(
        read_model_input(encode_jpeg(photo), near), read_model_input(encode_jpeg(photo), near, exact=True)
    )
    pixels = np.asarray(photo)
    assert np.array_equal(read_model_input(pixels, near), read_model_input(pixels, near, exact=True))


def test_hostile_files_are_rejected_as_in_exact_decoding():
    preprocess = ImagePreprocess((2, 2))  # small enough that almost every file is decoded reduced
    for case in build_corpus():
        assert read_shape_or_error(case.content, preprocess, False) == read_shape_or_error(
            case.content, preprocess, True
        ), case.name


def test_damaged_jpegs_are_rejected_as_in_exact_decoding(photo):
    content, preprocess = encode_jpeg(photo.resize((400, 300))), ImagePreprocess((32, 32))
    rng = np.random.default_rng(0)
    refused = 0
    for _ in range(60):
        damaged = bytearray(content)
        for offset in rng.integers(2, len(content) if rng.random() < 0.5 else 700, rng.integers(1, 4)):
            damaged[offset] = rng.integers(0, 256)
        cut = bytes(damaged[: rng.integers(1, len(content))]) if rng.random() < 0.3 else bytes(damaged)
        exact_result = read_shape_or_error(cut, preprocess, True)
        refused += not exact_result.startswith("(")
        assert read_shape_or_error(cut, preprocess, False) == exact_result
    assert 10 < refused < 50


@pytest.mark.parametrize("progressive", [False, True])
def test_oversized_jpegs_are_decoded_reduced_or_rejected(monkeypatch, progressive):
    """A smooth gradient decodes to nearly the same pixels as the complete file, downscaled."""
    ramp = np.add.outer(np.arange(96), np.arange(160)).astype(np.uint8)
    Image.fromarray(np.stack([ramp] * 3, -1)).save(file := io.BytesIO(), "JPEG", quality=95, progressive=progressive)
    content, preprocess = file.getvalue(), ImagePreprocess((32, 32))
    expected = read_model_input(content, preprocess, exact=True)
    small = read_large_jpeg(content, preprocess, "a.jpg", True, 96 * 160 // 4)
    assert small.shape == expected.shape == (3, 32, 32) and np.abs(small.astype(int) - expected).mean() < 3
    monkeypatch.setattr(reading, "MAX_PIXELS", 96 * 160 // 2)
    monkeypatch.setattr(regions, "MAX_PIXELS", 96 * 160 // 2)
    assert np.abs(read_model_input(content, preprocess).astype(int) - expected).mean() < 3
    with pytest.raises(DataError, match=r"a\.jpg: 160 x 96 pixels, more than 12,800"):
        read_large_jpeg(content, preprocess, "a.jpg", True, 200)
