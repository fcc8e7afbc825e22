"""Multi-band images are read in every layout, dtype and compression; no-data pixels are ignored."""

from __future__ import annotations

import struct
import sys

import numpy as np
import pytest

from tests.data.band_files import make_bands, mark_as_lzw, write_tiff
from vitreous.data.annotations.mask_files import read_mask
from vitreous.data.decoding.decode import decode_to_pillow, read_upright_size
from vitreous.data.decoding.spectral import decode_void_mask, detect_channel_form, read_band_values, read_bands
from vitreous.data.decoding.tiff import encode_geotiff, has_imagecodecs, read_georeference
from vitreous.data.modalities.bands import BandPreprocess
from vitreous.errors import DataError, EmptyImageError

DTYPES = ("uint8", "uint16", "int16", "float32", "float64", "uint32", "int32", "int8", "float16")
LAYOUTS = {
    "pixel strips": {"rowsperstrip": 5},
    "planar strips": {"planarconfig": "separate", "rowsperstrip": 7},
    "pixel tiles": {"tile": (16, 16)},
    "planar tiles": {"planarconfig": "separate", "tile": (16, 16)},
}
CODECS = ("lzw", "zstd", "packbits", "lzma", "zlib")
needs_imagecodecs = pytest.mark.skipif(not has_imagecodecs(), reason="the extra `geotiff` is not installed")


def read_pixel_values(path, bands, dtype):
    """Return the values of a multi-band file after reading it through every function that parses its header."""
    raw, read_dtype = path.read_bytes(), dtype if dtype in ("uint8", "uint16", "int16", "float32") else "float32"
    assert read_upright_size(raw, "x") == bands.shape[:0:-1]
    if bands.shape[0] != 1 or read_dtype in ("int16", "float32"):
        assert detect_channel_form(raw, "x") == (len(bands), read_dtype)
    bands_read = read_bands(raw, len(bands), read_dtype, "x")
    assert [band.size for band in bands_read] == [bands.shape[:0:-1]] * len(bands)
    return np.stack([np.asarray(band) for band in bands_read])


@pytest.mark.parametrize("count", [1, 3, 4, 5, 13])
@pytest.mark.parametrize("dtype", DTYPES)
def test_bands_are_read_in_every_layout_and_dtype(tmp_path, count, dtype):
    bands = make_bands(count, dtype, size=(21, 37))
    for layout in LAYOUTS.values() if count > 1 else [{}, {"tile": (16, 16)}]:
        path = write_tiff(tmp_path / "a.tif", bands, **layout)
        assert np.array_equal(read_pixel_values(path, bands, dtype), bands.astype(np.float32))
    if count in (3, 1) and dtype == "uint8":
        return  # read as a colour image
    for stored in (bands, np.moveaxis(bands, 0, -1), bands[0]):
        np.save(tmp_path / "a.npy", stored)
        expected = bands[:1] if stored.ndim == 2 else bands
        if expected.shape[0] == 1 and dtype == "uint8":
            continue
        assert np.array_equal(read_pixel_values(tmp_path / "a.npy", expected, dtype), expected.astype(np.float32))


@needs_imagecodecs
@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("dtype", ["uint8", "uint16", "int16", "float32", "float64"])
def test_bands_are_read_in_every_compression(tmp_path, codec, dtype):
    bands = make_bands(5, dtype, size=(40, 37))
    predictors = [False] if codec == "packbits" else [False, 3 if np.dtype(dtype).kind == "f" else 2]
    for layout in LAYOUTS.values():
        for predictor in predictors:
            path = write_tiff(tmp_path / "a.tif", bands, compression=codec, predictor=predictor, **layout)
            assert np.array_equal(read_pixel_values(path, bands, dtype), bands.astype(np.float32))
    cut = path.read_bytes()[:-30]
    with pytest.raises(DataError, match=r"^x: "):
        read_bands(cut, 5, dtype, "x")


@needs_imagecodecs
@pytest.mark.parametrize("codec", CODECS)
def test_a_truncated_strip_is_rejected(tmp_path, codec):
    raw = write_tiff(tmp_path / "a.tif", make_bands(5, "uint16", size=(30, 37)), compression=codec).read_bytes()
    truncated = raw.replace(struct.pack("<HHII", 257, 4, 1, 30), struct.pack("<HHII", 257, 4, 1, 40))
    truncated = truncated.replace(struct.pack("<HHII", 278, 3, 1, 30), struct.pack("<HHII", 278, 3, 1, 40))
    truncated = truncated.replace(struct.pack("<HHII", 278, 4, 1, 30), struct.pack("<HHII", 278, 4, 1, 40))
    assert read_bands(raw, 5, "uint16")[0].size == (37, 30) and read_upright_size(truncated, "x") == (37, 40)
    with pytest.raises(DataError, match=r"^x: .*(cut short|cannot be read|the header states)"):
        read_bands(truncated, 5, "uint16", "x")


def test_a_missing_imagecodecs_is_reported_with_its_extra(tmp_path, monkeypatch):
    raw = mark_as_lzw(write_tiff(tmp_path / "a.tif", make_bands(5, "uint16"))).read_bytes()
    monkeypatch.setitem(sys.modules, "imagecodecs", None)
    assert detect_channel_form(raw, "x") == (5, "uint16") and read_upright_size(raw, "x") == (32, 32)
    with pytest.raises(DataError) as error:
        read_bands(raw, 5, "uint16", "x")
    problem = "x: a TIFF with LZW compression needs imagecodecs (pip install 'vitreous[geotiff]')"
    assert error.value.message == problem


def test_band_mismatches_report_found_and_expected_bands(tmp_path):
    five = write_tiff(tmp_path / "five.tif", make_bands(5, "float32"), planarconfig="separate").read_bytes()
    np.save(tmp_path / "five.npy", make_bands(5, "float32"))
    for raw in (five, (tmp_path / "five.npy").read_bytes()):
        for channels, message in ((3, "3 of uint8 (RGB)"), (1, "1 of uint8 (grey)")):
            with pytest.raises(DataError) as error:
                decode_to_pillow(raw, channels, "five")
            assert error.value.message == f"five: 5 bands of float32, but the model expects {message}"
    with pytest.raises(DataError) as error:
        read_bands(np.zeros((8, 8, 3), np.uint8), 5, "uint16", "photo.png")
    assert error.value.message == "photo.png: 3 bands of uint8, but the model expects 5 bands of uint16"


@pytest.mark.parametrize(
    ("dtype", "nodata", "value", "where"),
    [
        ("float32", None, np.nan, "any"),
        ("float64", None, -np.inf, "any"),
        ("float32", -9999, -9999, "any"),
        ("float64", -1.7976931348623157e308, -1.7976931348623157e308, "any"),
        ("int16", -9999, -9999, "any"),
        ("uint8", 255, 255, "any"),
        ("uint16", 0, 0, "all"),
    ],
)
def test_pixels_without_data_are_void_and_filled_with_the_mean(tmp_path, dtype, nodata, value, where):
    bands = make_bands(5, dtype)
    bands[:, :, 7] = value  # in all bands
    bands[2, 9, 9] = value  # in one band
    path = write_tiff(tmp_path / "a.tif", bands, nodata)
    void = np.zeros((32, 32), bool)
    void[:, 7] = True
    void[9, 9] = where == "any"
    raw, numbers = path.read_bytes(), dtype if dtype != "float64" else "float32"
    assert np.array_equal(decode_void_mask(raw, "x"), void) and np.array_equal(read_band_values(raw, "x")[1], void)
    bands_read = read_bands(raw, 5, numbers, "x")
    for band, stored in zip(bands_read, bands.astype(np.float64), strict=True):
        mean = stored[~void].mean()
        assert np.allclose(np.asarray(band)[void], round(mean) if dtype == "uint8" else mean, rtol=1e-5)
        assert np.array_equal(np.asarray(band)[~void], stored[~void].astype(np.float32))
    assert np.array_equal(bands_read.is_void, void)
    preprocess = BandPreprocess((32, 32), 5, (0.1, 0.2, 0.3, 0.4, 0.5), (0.1,) * 5, numbers=numbers)
    normalised = preprocess.normalise(preprocess.to_tensor(preprocess.decode(raw))[None])[0]
    assert np.abs(normalised.numpy()[:, void]).max() < (0.03 if dtype == "uint8" else 1e-4)


@pytest.mark.parametrize(("dtype", "nodata", "value"), [("float32", None, np.nan), ("uint16", 0, 0)])
def test_an_image_without_data_is_rejected(tmp_path, dtype, nodata, value):
    raw = write_tiff(tmp_path / "a.tif", np.full((5, 32, 32), value, dtype), nodata).read_bytes()
    with pytest.raises(EmptyImageError) as error:
        read_bands(raw, 5, dtype, "edge.tif")
    assert error.value.message == "edge.tif: no pixel has data"


@pytest.mark.parametrize("dtype", ["int16", "float32", "float64", "int32", "uint8"])
def test_geotiff_masks_are_read_as_class_indices(tmp_path, dtype):
    numbers = np.arange(32 * 32).reshape(32, 32) % 3
    mask = numbers.astype(dtype)
    assert np.array_equal(read_mask(write_tiff(tmp_path / "a.tif", mask[None])), numbers)
    void = 255 if dtype == "uint8" else -1
    mask[numbers == 2] = void
    mask_classes = read_mask(write_tiff(tmp_path / "a.tif", mask[None], nodata=void))
    assert np.array_equal(mask_classes, np.where(numbers == 2, 255, numbers))
    classes_with_zero = read_mask(write_tiff(tmp_path / "a.tif", numbers.astype(dtype)[None], nodata=0))
    assert np.array_equal(classes_with_zero, numbers)  # 0 is a class even if the nodata tag is 0


def test_a_class_map_is_written_with_a_georeference(tmp_path):
    from PIL import Image

    source = write_tiff(tmp_path / "a.tif", make_bands(5, "float32"))
    tags = read_georeference(source)
    classes = np.arange(32 * 32, dtype=np.uint8).reshape(32, 32) % 4
    (tmp_path / "b.tif").write_bytes(encode_geotiff(Image.fromarray(classes), tags))
    assert read_georeference(tmp_path / "b.tif") == tags and set(tags) == {33550, 33922, 34735}
    assert np.array_equal(read_mask(tmp_path / "b.tif"), classes)
    assert read_georeference(write_tiff(tmp_path / "c.tif", make_bands(5, "uint8"), located=False)) is None
