"""Images with any number of channels are read as stored, augmented like colour images, and trained on."""

from __future__ import annotations

import io
import random
import struct
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from tests.conftest import TINY_RUN, make_image
from vitreous.data.augmentation.augment import Augment
from vitreous.data.decoding import npy
from vitreous.data.decoding.decode import decode_to_pillow
from vitreous.data.decoding.spectral import detect_channel_form, read_bands, read_channels
from vitreous.data.keys import derive_keys
from vitreous.data.layouts.folder import open_image_folder
from vitreous.data.modalities.bands import BandPreprocess
from vitreous.data.modalities.base import image_to_tensor
from vitreous.data.modalities.images import ImagePreprocess
from vitreous.data.screen import screen_images
from vitreous.data.split import ArraySplit
from vitreous.data.statistics import measure_channel_statistics
from vitreous.errors import DataError
from vitreous.inference.predict import load
from vitreous.jobs.train import train
from vitreous.reports.evaluate import evaluate
from vitreous.training.folder import RunFolder

tifffile = pytest.importorskip("tifffile")

DTYPES = ("uint8", "uint16", "int16", "float32")


def draw_values(shape: tuple[int, ...], dtype: str, seed: int = 0) -> np.ndarray:
    """Return random numbers over most of the range of a dtype."""
    generator = np.random.default_rng(seed)
    if dtype == "float32":
        return generator.normal(0, 3, shape).astype(np.float32)
    return generator.integers(np.iinfo(dtype).min // 2, np.iinfo(dtype).max, shape).astype(dtype)


def encode_npy_bytes(array: np.ndarray) -> bytes:
    """Return the bytes of a .npy file."""
    file = io.BytesIO()
    np.save(file, array)
    return file.getvalue()


def encode_tiff_bytes(array: np.ndarray, **options) -> bytes:
    """Return the bytes of a TIFF of an image (H, W, C); by default its channels are not colours."""
    file = io.BytesIO()
    tifffile.imwrite(file, array, **{"photometric": "minisblack", "planarconfig": "contig"} | options)
    return file.getvalue()


def encode_tiff_pages(array: np.ndarray) -> bytes:
    """Return the bytes of a TIFF written by Pillow, with one page per channel of (C, H, W)."""
    file = io.BytesIO()
    first, *later_pages = (Image.fromarray(page) for page in array)
    first.save(file, "TIFF", save_all=True, append_images=later_pages)
    return file.getvalue()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("order", ["<", ">"])
def test_npy_is_read_in_every_memory_layout(dtype, order):
    array = draw_values((5, 7, 9), dtype)
    for stored in (array, np.moveaxis(array, 0, -1), np.asfortranarray(array), np.moveaxis(array, 0, -1).copy()):
        raw = encode_npy_bytes(stored.astype(np.dtype(dtype).newbyteorder(order)))
        assert detect_channel_form(raw, "x") == (5, dtype)
        assert np.array_equal(read_channels(raw, "x"), array) and read_channels(raw, "x").dtype == np.dtype(dtype)
        assert all(
            np.array_equal(np.asarray(band), expected_band)
            for band, expected_band in zip(read_bands(raw, 5, dtype), array, strict=True)
        )
    assert np.array_equal(read_channels(encode_npy_bytes(array[0]), "x"), array[:1])


@pytest.mark.parametrize("dtype", ["uint8", "uint16", "float32", "int16"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"planarconfig": "separate"},
        {"compression": "zlib", "predictor": True},
        {"tile": (16, 16), "compression": "zlib"},
        {"planarconfig": "separate", "rowsperstrip": 5},
        {"bigtiff": True},
        {"byteorder": ">"},
    ],
)
def test_multiband_tiffs_are_read_in_every_layout(dtype, options):
    array = draw_values((6, 18, 21), dtype)
    if dtype == "float32" and "predictor" in options:
        options = {"compression": "zlib"}  # tifffile needs imagecodecs to write floating-point predictors
    raw = encode_tiff_bytes(array if options.get("planarconfig") else np.moveaxis(array, 0, -1), **options)
    assert detect_channel_form(raw, "x") == (6, dtype) and np.array_equal(read_channels(raw, "x"), array)


@pytest.mark.parametrize("dtype", ["uint8", "uint16", "float32"])
def test_tiff_pages_of_equal_size_are_channels(dtype):
    array = draw_values((4, 9, 7), dtype)
    assert detect_channel_form(encode_tiff_pages(array), "x") == (4, dtype)
    assert np.array_equal(read_channels(encode_tiff_pages(array), "x"), array)
    assert detect_channel_form(encode_tiff_pages(array[:1]), "x") == ((1, "float32") if dtype == "float32" else None)
    signed = encode_tiff_bytes(draw_values((3, 9, 7), "int16"), planarconfig=None)
    assert detect_channel_form(signed, "x") == (3, "int16") and np.array_equal(
        read_channels(signed, "x"), draw_values((3, 9, 7), "int16")
    )
    thumbnail = io.BytesIO()
    Image.new("L", (9, 7)).save(thumbnail, "TIFF", save_all=True, append_images=[Image.new("L", (3, 2))])
    assert detect_channel_form(thumbnail.getvalue(), "x") is None


def test_colour_images_are_not_read_as_bands():
    for mode in ("RGB", "L", "RGBA", "CMYK", "P", "1", "LA", "I;16"):
        file = io.BytesIO()
        (Image.new("I;16", (8, 6)) if mode == "I;16" else make_image(0, (8, 6)).convert(mode)).save(file, "TIFF")
        assert detect_channel_form(file.getvalue(), "x") is None and decode_to_pillow(file.getvalue()).mode == "RGB", (
            mode
        )
    rgb = draw_values((9, 8, 3), "uint8")
    for raw in (
        encode_npy_bytes(rgb),
        encode_npy_bytes(np.moveaxis(rgb, -1, 0).copy()),
        encode_tiff_bytes(rgb, photometric="rgb"),
        rgb,
    ):
        assert detect_channel_form(raw, "x") is None and np.array_equal(np.asarray(decode_to_pillow(raw)), rgb)
    assert np.array_equal(np.asarray(decode_to_pillow(encode_npy_bytes(rgb[..., 0]), 1)), rgb[..., 0])
    infrared = encode_tiff_bytes(draw_values((9, 8, 4), "uint8"), photometric="rgb", extrasamples=["unspecified"])
    assert detect_channel_form(infrared, "x") == (4, "uint8")
    assert (
        detect_channel_form(
            encode_tiff_bytes(draw_values((9, 8, 4), "uint8"), photometric="rgb", extrasamples=["unassalpha"]), "x"
        )
        is None
    )
    assert detect_channel_form(draw_values((9, 8, 4), "uint8"), "x") == (4, "uint8")


def test_16_bit_values_are_kept_on_request():
    array = draw_values((9, 7), "uint16")
    for format in ("PNG", "TIFF"):
        file = io.BytesIO()
        Image.fromarray(array).save(file, format)
        assert detect_channel_form(file.getvalue(), "x") is None
        assert np.array_equal(np.asarray(read_bands(file.getvalue(), 1, "uint16")[0]), array.astype(np.float32))
    rgb = draw_values((9, 7, 3), "uint16")
    assert np.array_equal(read_channels(encode_tiff_bytes(rgb, photometric="rgb"), "x"), np.moveaxis(rgb, -1, 0))


def build_npy_header(text: str, body: bytes = b"", version: bytes = b"\1\0", length: int | None = None) -> bytes:
    """Return a .npy file with this header."""
    return npy.NPY_MAGIC + version + struct.pack("<H", len(text) if length is None else length) + text.encode() + body


HEADER_TEMPLATE = "{{'descr': '{}', 'fortran_order': False, 'shape': {}, }}"
INVALID_NPY_FILES = {
    "nothing": (b"", "empty|header"),
    "magic number only": (npy.NPY_MAGIC, "damaged .npy header"),
    "version": (build_npy_header(HEADER_TEMPLATE.format("|u1", "(2, 2)"), b"1234", b"\7\0"), "damaged .npy header"),
    "truncated header": (build_npy_header("{'descr'", length=60), "damaged .npy header"),
    "header of 65,535": (build_npy_header("{" * 60_000), "damaged .npy header"),
    "code": (build_npy_header("__import__('os').system('true')"), "damaged .npy header"),
    "deep": (build_npy_header("(" * 2000), "damaged .npy header"),
    "many minus signs": (build_npy_header("-" * 2000 + "1"), "damaged .npy header"),
    "negative sizes": (build_npy_header(HEADER_TEMPLATE.format("|u1", "(-2, -2)"), b"1234"), "damaged .npy header"),
    "fields": (encode_npy_bytes(np.zeros(4, [("a", "u1"), ("b", "f4")])), "type"),
    "objects": (encode_npy_bytes(np.array([[1, "a"]], dtype=object)), "type"),
    "pickle": (build_npy_header(HEADER_TEMPLATE.format("|O", "(2, 2)"), b"cos\nsystem\n(S'true'\ntR."), "type"),
    "complex": (encode_npy_bytes(np.zeros((4, 4, 2), np.complex64)), "type <c8"),
    "4 TB": (build_npy_header(HEADER_TEMPLATE.format("<f4", "(4, 500000, 500000)")), "the header states"),
    "cut": (encode_npy_bytes(draw_values((5, 9, 9), "uint16"))[:-1], "the header states"),
    "too long": (encode_npy_bytes(draw_values((5, 9, 9), "uint16")) + b"0", "the header states"),
    "no channel axis": (encode_npy_bytes(draw_values((9, 9, 9), "uint16")), "is ambiguous"),
    "ambiguous axes": (encode_npy_bytes(draw_values((9, 5, 9), "uint16")), "is ambiguous"),
    "more channels than rows": (encode_npy_bytes(draw_values((9, 9, 20), "uint16")), "is ambiguous"),
    "one axis": (encode_npy_bytes(draw_values((9,), "uint16")), "is ambiguous"),
    "four axes": (encode_npy_bytes(draw_values((2, 3, 9, 9), "uint16")), "is ambiguous"),
    "none": (encode_npy_bytes(draw_values((0, 9), "uint16")), "0 x 9"),
}


@pytest.mark.parametrize("name", INVALID_NPY_FILES)
def test_invalid_npy_files_are_rejected_with_the_reason(name):
    raw, message = INVALID_NPY_FILES[name]
    with pytest.raises(DataError, match=message) as error:
        read_bands(raw, 5, "uint16", "shot.npy")
    assert error.value.message.startswith("shot.npy: ")
    if raw.startswith(npy.NPY_MAGIC):
        with pytest.raises(DataError):
            detect_channel_form(raw, "shot.npy")
        with pytest.raises(DataError, match=r"shot\.npy"):
            decode_to_pillow(raw, 3, "shot.npy")


def test_band_mismatches_report_both_band_counts():
    raw = encode_npy_bytes(draw_values((5, 8, 8), "uint16"))
    for channels, dtype in ((4, "uint16"), (5, "int16")):
        with pytest.raises(DataError, match=f"x: 5 bands of uint16, but the model expects {channels} bands of {dtype}"):
            read_bands(raw, channels, dtype, "x")
    for content in (raw, encode_tiff_bytes(draw_values((8, 8, 5), "uint16"))):
        with pytest.raises(DataError) as error:
            decode_to_pillow(content, 3, "x")
        assert error.value.message == "x: 5 bands of uint16, but the model expects 3 of uint8 (RGB)"


def test_a_missing_tifffile_is_reported(monkeypatch):
    raw = encode_tiff_bytes(draw_values((8, 8, 5), "uint16"))
    monkeypatch.setitem(sys.modules, "tifffile", None)
    assert detect_channel_form(raw, "x") == (5, "uint16")
    with pytest.raises(DataError, match="needs tifffile") as error:
        read_channels(raw, "x")
    assert "pip install" in error.value.hint


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda raw: raw[:-40], "missing strips"),
        (
            lambda raw: raw.replace(struct.pack("<HHII", 259, 3, 1, 1), struct.pack("<HHII", 259, 3, 1, 7)),
            "unsupported compression 7",
        ),
        (
            lambda raw: raw.replace(struct.pack("<HHII", 256, 4, 1, 8), struct.pack("<HHII", 256, 4, 1, 60_000)),
            "more than|the header states",
        ),
        (
            lambda raw: raw.replace(struct.pack("<HHII", 257, 4, 1, 8), struct.pack("<HHII", 257, 4, 1, 9)),
            "missing strips|the header states",
        ),
    ],
)
def test_invalid_multiband_tiffs_are_rejected_with_the_reason(change, message):
    raw = encode_tiff_bytes(draw_values((8, 8, 5), "uint16"), metadata=None)
    assert change(raw) != raw
    with pytest.raises(DataError, match=message):
        read_channels(change(raw), "x")


def test_oversized_deflated_strips_are_rejected():
    bomb = encode_tiff_bytes(np.zeros((3000, 3000, 4), np.uint8), compression="zlib", rowsperstrip=3000, metadata=None)
    small = bomb.replace(struct.pack("<HHII", 257, 4, 1, 3000), struct.pack("<HHII", 257, 4, 1, 8))
    small = small.replace(struct.pack("<HHII", 278, 3, 1, 3000), struct.pack("<HHII", 278, 3, 1, 8))
    assert small != bomb
    with pytest.raises(DataError, match="deflate: a strip is cut short or too long"):
        read_channels(small, "x")


def test_damaged_files_raise_only_data_errors():
    """Random damage, as in `tests.data.mutate`, to the formats that only this file covers."""
    rng, array = random.Random(0), draw_values((5, 12, 14), "uint16")
    wide = np.moveaxis(array, 0, -1)
    seeds = [
        encode_npy_bytes(array),
        encode_tiff_pages(array),
        encode_tiff_bytes(wide),
        encode_tiff_bytes(wide, compression="zlib"),
        encode_tiff_bytes(wide, tile=(16, 16)),
    ]
    rejected = 0
    for _ in range(600):
        raw = bytearray(rng.choice(seeds))
        for _ in range(rng.randint(1, 6)):
            position = rng.randrange(min(len(raw), 600)) if rng.random() < 0.8 else rng.randrange(len(raw))
            raw[position] = rng.choice((0, 1, 2, 255, rng.randrange(256)))
        raw = bytes(raw[: rng.randrange(len(raw))]) if rng.random() < 0.1 else bytes(raw)
        for reader in (lambda raw: detect_channel_form(raw, "x"), lambda raw: read_bands(raw, 5, "uint16", "x")):
            try:
                reader(raw)
            except DataError:
                rejected += 1
    assert 200 < rejected < 1100


BAND_PREPROCESS = BandPreprocess((20, 24), 3, numbers="uint8")


@pytest.mark.parametrize("fit", [{"fit": "crop"}, {"fit": "squash"}, {"share": 0.8, "filter": "bilinear"}])
def test_bands_are_resized_like_colour_channels(fit):
    image = make_image(0, (70, 45))
    separate_bands = BandPreprocess((20, 24), 3, **fit).to_tensor(image.split())
    assert torch.equal(separate_bands, ImagePreprocess((20, 24), 3, **fit).to_tensor(image))


GEOMETRIC_OPTIONS = {
    "crop": {"crop": (0.2, 1.0)},
    "inception": {"crop": (0.05, 1.0), "crop_style": "inception", "crop_filter": "aliased"},
    "simple": {"crop_style": "simple"},
    "turn": {"rotate": 12, "zoom": 0.2, "shift": 0.1},
}


@pytest.mark.parametrize("name", GEOMETRIC_OPTIONS)
def test_bands_are_transformed_like_colour_channels(name):
    augment, image = Augment(**GEOMETRIC_OPTIONS[name], flip=0.5), make_image(0, (50, 40))
    wide = tuple(Image.fromarray(np.asarray(band).astype(np.float32) * 100) for band in image.split())
    for k in range(6):
        expected = augment.augment_image(image, ImagePreprocess((20, 24)), k)
        assert torch.equal(augment.augment_image(image.split(), BAND_PREPROCESS, k), expected)
        floats = augment.augment_image(wide, BAND_PREPROCESS, k)
        assert floats.dtype == torch.float32 and floats.shape == expected.shape
        assert (floats / 100 - expected).abs().mean() < 1  # 8-bit results are clipped to 0 and 255
    small, keys = torch.stack([image_to_tensor(image.resize((24, 20)))] * 5), derive_keys(0, np.arange(5))
    batch_views = augment.augment_batch(torch.cat([small.float() * 300, small.float()], 1), keys)
    assert batch_views.shape == (5, 6, 20, 24) and batch_views.dtype == torch.float32
    assert torch.allclose(batch_views[:, :3] / 300, batch_views[:, 3:], atol=0.01)
    assert (batch_views[:, 3:] - augment.augment_batch(small, keys)).abs().mean() < 1


def test_colour_transforms_are_removed_for_bands():
    rich = Augment(
        crop=(0.2, 1.0),
        flip=0.5,
        rand_layers=2,
        three=True,
        trivial=True,
        jitter=(0.3, 0.3, 0.3),
        erase=0.25,
        mixup=0.8,
    )
    assert rich.without_colour_transforms() == Augment(crop=(0.2, 1.0), flip=0.5, mixup=0.8)


@pytest.mark.parametrize("dtype", DTYPES)
def test_channel_statistics_match_numpy(dtype):
    pixels = draw_values((30, 9, 8, 5), dtype)
    pixels[..., 4] = 7
    preprocess = BandPreprocess((9, 8), 5, numbers=dtype)
    mean, std = measure_channel_statistics(ArraySplit(pixels, np.zeros(30, np.int64)), preprocess)
    scaled_pixels = pixels.reshape(-1, 5).astype(np.float64) / preprocess.peak
    assert np.allclose(mean, scaled_pixels.mean(0), rtol=1e-12) and np.allclose(
        std[:4], scaled_pixels.std(0)[:4], rtol=1e-12
    )
    assert std[4] == 1
    normal = BandPreprocess((9, 8), 5, mean, std, numbers=dtype).normalise(
        torch.from_numpy(pixels.astype(np.float32).transpose(0, 3, 1, 2))
    )
    assert normal.mean((0, 2, 3)).abs().max() < 1e-4 and (normal.std((0, 2, 3))[:4] - 1).abs().max() < 1e-3


def test_channel_statistics_are_stable_and_skip_nonfinite_pixels():
    pixels = (1e4 + draw_values((20, 6, 6, 2), "float32")).astype(np.float32)
    preprocess = BandPreprocess((6, 6), 2, numbers="float32")
    _, std = measure_channel_statistics(ArraySplit(pixels, np.zeros(20, np.int64)), preprocess)
    assert np.allclose(std, pixels.reshape(-1, 2).astype(np.float64).std(0), rtol=1e-9)
    broken = pixels.copy()
    broken[3, 0, 0, 0] = np.nan  # one non-finite pixel is left out
    broken[5] = np.inf  # an image without finite pixels is left out
    valid_pixels = np.delete(broken.reshape(-1, 2).astype(np.float64), [3 * 36, *range(5 * 36, 6 * 36)], 0)
    mean, std = measure_channel_statistics(ArraySplit(broken, np.zeros(20, np.int64)), preprocess)
    assert np.allclose(mean, valid_pixels.mean(0), rtol=1e-12) and np.allclose(std, valid_pixels.std(0), rtol=1e-9)
    with pytest.raises(DataError, match="no pixel has data"):
        measure_channel_statistics(ArraySplit(broken[5:6], np.zeros(1, np.int64)), preprocess)


def write_band_dataset(root: Path, file_format: str, size: tuple[int, int] = (16, 16)) -> Path:
    """Write a folder of three classes, each bright in a different channel."""
    for split, count in (("train", 8), ("val", 2), ("test", 3)):
        for label, name in enumerate(("ant", "bee", "cat")):
            home = root / split / name
            home.mkdir(parents=True)
            for index in range(count):
                array = np.random.default_rng([label, index, count]).random((4, *size))
                array[label] += 0.7
                if file_format == "tiff":
                    (home / f"{index}.tif").write_bytes(
                        encode_tiff_bytes(np.moveaxis(array * 100, 0, -1).astype(np.uint8))
                    )
                else:
                    np.save(
                        home / f"{index}.npy", (array * (9000 if file_format == "uint16" else 40)).astype(file_format)
                    )
    return root


@pytest.mark.parametrize("workers", [0, 1])
def test_statistics_and_caching_do_not_depend_on_workers(tmp_path, workers):
    split = open_image_folder(write_band_dataset(tmp_path, "uint16", (40, 30))).split("train")
    preprocess = BandPreprocess((16, 16), 4, numbers="uint16")
    assert measure_channel_statistics(split, preprocess, workers) == measure_channel_statistics(split, preprocess)
    cached, unreadable = screen_images(split, preprocess, workers, keep=True)
    assert cached is not None and cached.dtype == torch.float32 and cached.shape == (24, 4, 16, 16) and not unreadable
    assert cached.max() > 9000


@pytest.mark.parametrize(("file_format", "size"), [("tiff", (16, 16)), ("uint16", (40, 30)), ("float32", (16, 16))])
def test_multiband_data_are_trained_evaluated_and_predicted(tmp_path, file_format, size):
    data, run = write_band_dataset(tmp_path / "data", file_format, size), tmp_path / "run"
    side = {} if max(size) <= 16 else {"image_size": 16}
    options = {
        **TINY_RUN,
        **side,
        "epochs": 8.0,
        "evaluate_every": 100,
        "save_every": 100,
        "workers": 0,
        "rand_augment": 2,
        "drop_path": 0.0,
    }
    train(str(data), **options, out=str(run))
    preprocess = RunFolder(run).run().preprocess
    assert (preprocess.channels, preprocess.numbers) == (4, {"tiff": "uint8"}.get(file_format, file_format))
    mean, _ = measure_channel_statistics(open_image_folder(data).split("train"), preprocess)
    assert preprocess.mean == mean and RunFolder(run).run().views.rand_layers == 0
    evaluation = evaluate(run, workers=0)
    assert evaluation["test"]["top1"] > 0.8
    file = next((data / "test" / "bee").iterdir())
    assert load(run).predict([file])[0].names[0] == "bee"
    with pytest.raises(DataError, match="the model expects 4 bands of"):
        make_image(0).save(tmp_path / "photo.png")
        load(run).predict([tmp_path / "photo.png"])


def test_weights_with_a_different_channel_count_are_rejected(tmp_path):
    data, photos = write_band_dataset(tmp_path / "data", "float32"), tmp_path / "photos"
    for label in ("ant", "bee"):
        (photos / label).mkdir(parents=True)
        for index in range(6):
            make_image(index).save(photos / label / f"{index}.png")
    train(str(photos), **{**TINY_RUN, "epochs": 0.5}, out=str(tmp_path / "run"), workers=0)
    with pytest.raises(Exception, match="the images have 4 channels, but the weights need 3") as error:
        train(str(data), init=str(tmp_path / "run"), out=str(tmp_path / "other"), epochs=1.0, device="cpu")
    assert "--channels 4" in str(error.value)
