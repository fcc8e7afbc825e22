"""Pictures of any number of channels are read as they are stored, seen as photographs are, and trained on."""

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
    """Random numbers over most of a type's range."""
    generator = np.random.default_rng(seed)
    if dtype == "float32":
        return generator.normal(0, 3, shape).astype(np.float32)
    return generator.integers(np.iinfo(dtype).min // 2, np.iinfo(dtype).max, shape).astype(dtype)


def as_npy(array: np.ndarray) -> bytes:
    """The bytes of a .npy file."""
    file = io.BytesIO()
    np.save(file, array)
    return file.getvalue()


def as_tiff(array: np.ndarray, **options) -> bytes:
    """The bytes of a TIFF; unless said, of samples that are no colours, a picture (H, W, C)."""
    file = io.BytesIO()
    tifffile.imwrite(file, array, **{"photometric": "minisblack", "planarconfig": "contig"} | options)
    return file.getvalue()


def as_pages(array: np.ndarray) -> bytes:
    """The bytes of a TIFF that Pillow wrote, a page for each channel (C, H, W)."""
    file = io.BytesIO()
    first, *rest = (Image.fromarray(page) for page in array)
    first.save(file, "TIFF", save_all=True, append_images=rest)
    return file.getvalue()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("order", ["<", ">"])
def test_npy_is_read_in_every_memory_layout(dtype, order):
    array = draw_values((5, 7, 9), dtype)
    for stored in (array, np.moveaxis(array, 0, -1), np.asfortranarray(array), np.moveaxis(array, 0, -1).copy()):
        raw = as_npy(stored.astype(np.dtype(dtype).newbyteorder(order)))
        assert detect_channel_form(raw, "x") == (5, dtype)
        assert np.array_equal(read_channels(raw, "x"), array) and read_channels(raw, "x").dtype == np.dtype(dtype)
        assert all(
            np.array_equal(np.asarray(band), one) for band, one in zip(read_bands(raw, 5, dtype), array, strict=True)
        )
    assert np.array_equal(read_channels(as_npy(array[0]), "x"), array[:1])


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
        options = {"compression": "zlib"}  # tifffile writes floating-point differences with imagecodecs alone
    raw = as_tiff(array if options.get("planarconfig") else np.moveaxis(array, 0, -1), **options)
    assert detect_channel_form(raw, "x") == (6, dtype) and np.array_equal(read_channels(raw, "x"), array)


@pytest.mark.parametrize("dtype", ["uint8", "uint16", "float32"])
def test_alike_pages_are_channels(dtype):
    array = draw_values((4, 9, 7), dtype)
    assert detect_channel_form(as_pages(array), "x") == (4, dtype)
    assert np.array_equal(read_channels(as_pages(array), "x"), array)
    assert detect_channel_form(as_pages(array[:1]), "x") == ((1, "float32") if dtype == "float32" else None)
    signed = as_tiff(draw_values((3, 9, 7), "int16"), planarconfig=None)
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
    for raw in (as_npy(rgb), as_npy(np.moveaxis(rgb, -1, 0).copy()), as_tiff(rgb, photometric="rgb"), rgb):
        assert detect_channel_form(raw, "x") is None and np.array_equal(np.asarray(decode_to_pillow(raw)), rgb)
    assert np.array_equal(np.asarray(decode_to_pillow(as_npy(rgb[..., 0]), 1)), rgb[..., 0])
    infrared = as_tiff(draw_values((9, 8, 4), "uint8"), photometric="rgb", extrasamples=["unspecified"])
    assert detect_channel_form(infrared, "x") == (4, "uint8")
    assert (
        detect_channel_form(
            as_tiff(draw_values((9, 8, 4), "uint8"), photometric="rgb", extrasamples=["unassalpha"]), "x"
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
    assert np.array_equal(read_channels(as_tiff(rgb, photometric="rgb"), "x"), np.moveaxis(rgb, -1, 0))


def build_npy_header(text: str, rest: bytes = b"", version: bytes = b"\1\0", length: int | None = None) -> bytes:
    """A .npy file with this header."""
    return npy.NPY_MAGIC + version + struct.pack("<H", len(text) if length is None else length) + text.encode() + rest


HEADER_TEMPLATE = "{{'descr': '{}', 'fortran_order': False, 'shape': {}, }}"
INVALID_NPY_FILES = {
    "nothing": (b"", "empty|header"),
    "magic alone": (npy.NPY_MAGIC, "damaged .npy header"),
    "version": (build_npy_header(HEADER_TEMPLATE.format("|u1", "(2, 2)"), b"1234", b"\7\0"), "damaged .npy header"),
    "header cut": (build_npy_header("{'descr'", length=60), "damaged .npy header"),
    "header of 65,535": (build_npy_header("{" * 60_000), "damaged .npy header"),
    "code": (build_npy_header("__import__('os').system('true')"), "damaged .npy header"),
    "deep": (build_npy_header("(" * 2000), "damaged .npy header"),
    "many signs": (build_npy_header("-" * 2000 + "1"), "damaged .npy header"),
    "sides below 0": (build_npy_header(HEADER_TEMPLATE.format("|u1", "(-2, -2)"), b"1234"), "damaged .npy header"),
    "fields": (as_npy(np.zeros(4, [("a", "u1"), ("b", "f4")])), "type"),
    "objects": (as_npy(np.array([[1, "a"]], dtype=object)), "type"),
    "pickle": (build_npy_header(HEADER_TEMPLATE.format("|O", "(2, 2)"), b"cos\nsystem\n(S'true'\ntR."), "type"),
    "complex": (as_npy(np.zeros((4, 4, 2), np.complex64)), "type <c8"),
    "4 TB": (build_npy_header(HEADER_TEMPLATE.format("<f4", "(4, 500000, 500000)")), "the header states"),
    "cut": (as_npy(draw_values((5, 9, 9), "uint16"))[:-1], "the header states"),
    "too long": (as_npy(draw_values((5, 9, 9), "uint16")) + b"0", "the header states"),
    "no axis of channels": (as_npy(draw_values((9, 9, 9), "uint16")), "is ambiguous"),
    "which is height": (as_npy(draw_values((9, 5, 9), "uint16")), "is ambiguous"),
    "more channels than rows": (as_npy(draw_values((9, 9, 20), "uint16")), "is ambiguous"),
    "one axis": (as_npy(draw_values((9,), "uint16")), "is ambiguous"),
    "four axes": (as_npy(draw_values((2, 3, 9, 9), "uint16")), "is ambiguous"),
    "none": (as_npy(draw_values((0, 9), "uint16")), "0 x 9"),
}


@pytest.mark.parametrize("name", INVALID_NPY_FILES)
def test_a_bad_npy_is_refused_with_the_reason(name):
    raw, why = INVALID_NPY_FILES[name]
    with pytest.raises(DataError, match=why) as caught:
        read_bands(raw, 5, "uint16", "shot.npy")
    assert caught.value.message.startswith("shot.npy: ")
    if raw.startswith(npy.NPY_MAGIC):
        with pytest.raises(DataError):
            detect_channel_form(raw, "shot.npy")
        with pytest.raises(DataError, match=r"shot\.npy"):
            decode_to_pillow(raw, 3, "shot.npy")


def test_band_mismatches_report_both_band_counts():
    raw = as_npy(draw_values((5, 8, 8), "uint16"))
    for channels, kind in ((4, "uint16"), (5, "int16")):
        with pytest.raises(DataError, match=f"x: 5 bands of uint16, but the model expects {channels} bands of {kind}"):
            read_bands(raw, channels, kind, "x")
    for content in (raw, as_tiff(draw_values((8, 8, 5), "uint16"))):
        with pytest.raises(DataError) as caught:
            decode_to_pillow(content, 3, "x")
        assert caught.value.message == "x: 5 bands of uint16, but the model expects 3 of uint8 (RGB)"


def test_a_missing_tifffile_is_reported(monkeypatch):
    raw = as_tiff(draw_values((8, 8, 5), "uint16"))
    monkeypatch.setitem(sys.modules, "tifffile", None)
    assert detect_channel_form(raw, "x") == (5, "uint16")
    with pytest.raises(DataError, match="needs tifffile") as caught:
        read_channels(raw, "x")
    assert "pip install" in caught.value.hint


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda raw: raw[:-40], "missing strips"),
        (lambda raw: raw.replace(struct.pack("<HHII", 259, 3, 1, 1), struct.pack("<HHII", 259, 3, 1, 7)), "unsupported compression 7"),
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
def test_invalid_multiband_tiffs_are_rejected_with_the_reason(change, why):
    raw = as_tiff(draw_values((8, 8, 5), "uint16"), metadata=None)
    assert change(raw) != raw
    with pytest.raises(DataError, match=why):
        read_channels(change(raw), "x")


def test_oversized_deflated_strips_are_rejected():
    bomb = as_tiff(np.zeros((3000, 3000, 4), np.uint8), compression="zlib", rowsperstrip=3000, metadata=None)
    small = bomb.replace(struct.pack("<HHII", 257, 4, 1, 3000), struct.pack("<HHII", 257, 4, 1, 8))
    small = small.replace(struct.pack("<HHII", 278, 3, 1, 3000), struct.pack("<HHII", 278, 3, 1, 8))
    assert small != bomb
    with pytest.raises(DataError, match="deflate: a strip is cut short or too long"):
        read_channels(small, "x")


def test_damaged_files_are_refused_and_nothing_else():
    """What `tests.data.mutate` does to files at large, for the formats that are only read here."""
    chance, array = random.Random(0), draw_values((5, 12, 14), "uint16")
    wide = np.moveaxis(array, 0, -1)
    seeds = [
        as_npy(array),
        as_pages(array),
        as_tiff(wide),
        as_tiff(wide, compression="zlib"),
        as_tiff(wide, tile=(16, 16)),
    ]
    refused = 0
    for _ in range(600):
        raw = bytearray(chance.choice(seeds))
        for _ in range(chance.randint(1, 6)):
            place = chance.randrange(min(len(raw), 600)) if chance.random() < 0.8 else chance.randrange(len(raw))
            raw[place] = chance.choice((0, 1, 2, 255, chance.randrange(256)))
        raw = bytes(raw[: chance.randrange(len(raw))]) if chance.random() < 0.1 else bytes(raw)
        for look in (lambda raw: detect_channel_form(raw, "x"), lambda raw: read_bands(raw, 5, "uint16", "x")):
            try:
                look(raw)
            except DataError:
                refused += 1
    assert 200 < refused < 1100


BAND_PREPROCESS = BandPreprocess((20, 24), 3, numbers="uint8")


@pytest.mark.parametrize("fit", [{"fit": "crop"}, {"fit": "squash"}, {"share": 0.8, "filter": "bilinear"}])
def test_channels_are_fitted_as_colours_are(fit):
    image = make_image(0, (70, 45))
    apart = BandPreprocess((20, 24), 3, **fit).to_tensor(image.split())
    assert torch.equal(apart, ImagePreprocess((20, 24), 3, **fit).to_tensor(image))


GEOMETRIC_OPTIONS = {
    "crop": {"crop": (0.2, 1.0)},
    "inception": {"crop": (0.05, 1.0), "crop_style": "inception", "crop_filter": "aliased"},
    "simple": {"crop_style": "simple"},
    "turn": {"rotate": 12, "zoom": 0.2, "shift": 0.1},
}


@pytest.mark.parametrize("name", GEOMETRIC_OPTIONS)
def test_channels_are_moved_as_colours_are(name):
    augment, image = Augment(**GEOMETRIC_OPTIONS[name], flip=0.5), make_image(0, (50, 40))
    wide = tuple(Image.fromarray(np.asarray(band).astype(np.float32) * 100) for band in image.split())
    for k in range(6):
        whole = augment.augment_image(image, ImagePreprocess((20, 24)), k)
        assert torch.equal(augment.augment_image(image.split(), BAND_PREPROCESS, k), whole)
        floats = augment.augment_image(wide, BAND_PREPROCESS, k)
        assert floats.dtype == torch.float32 and floats.shape == whole.shape
        assert (floats / 100 - whole).abs().mean() < 1  # what is 8 bits is cut off at 0 and 255
    small, keys = torch.stack([image_to_tensor(image.resize((24, 20)))] * 5), derive_keys(0, np.arange(5))
    many = augment.augment_batch(torch.cat([small.float() * 300, small.float()], 1), keys)
    assert many.shape == (5, 6, 20, 24) and many.dtype == torch.float32
    assert torch.allclose(many[:, :3] / 300, many[:, 3:], atol=0.01)
    assert (many[:, 3:] - augment.augment_batch(small, keys)).abs().mean() < 1


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
    seen = BandPreprocess((9, 8), 5, numbers=dtype)
    mean, std = measure_channel_statistics(ArraySplit(pixels, np.zeros(30, np.int64)), seen)
    whole = pixels.reshape(-1, 5).astype(np.float64) / seen.peak
    assert np.allclose(mean, whole.mean(0), rtol=1e-12) and np.allclose(std[:4], whole.std(0)[:4], rtol=1e-12)
    assert std[4] == 1
    normal = BandPreprocess((9, 8), 5, mean, std, numbers=dtype).normalise(
        torch.from_numpy(pixels.astype(np.float32).transpose(0, 3, 1, 2))
    )
    assert normal.mean((0, 2, 3)).abs().max() < 1e-4 and (normal.std((0, 2, 3))[:4] - 1).abs().max() < 1e-3


def test_channel_statistics_are_stable_and_skip_nonfinite_pixels():
    pixels = (1e4 + draw_values((20, 6, 6, 2), "float32")).astype(np.float32)
    seen = BandPreprocess((6, 6), 2, numbers="float32")
    _, std = measure_channel_statistics(ArraySplit(pixels, np.zeros(20, np.int64)), seen)
    assert np.allclose(std, pixels.reshape(-1, 2).astype(np.float64).std(0), rtol=1e-9)
    broken = pixels.copy()
    broken[3, 0, 0, 0] = np.nan  # one pixel: left out
    broken[5] = np.inf  # an image: left out
    known = np.delete(broken.reshape(-1, 2).astype(np.float64), [3 * 36, *range(5 * 36, 6 * 36)], 0)
    mean, std = measure_channel_statistics(ArraySplit(broken, np.zeros(20, np.int64)), seen)
    assert np.allclose(mean, known.mean(0), rtol=1e-12) and np.allclose(std, known.std(0), rtol=1e-9)
    with pytest.raises(DataError, match="no pixel has data"):
        measure_channel_statistics(ArraySplit(broken[5:6], np.zeros(1, np.int64)), seen)


def write_band_dataset(root: Path, kind: str, size: tuple[int, int] = (16, 16)) -> Path:
    """A folder of three classes, each brighter in a channel of its own."""
    for split, count in (("train", 8), ("val", 2), ("test", 3)):
        for label, name in enumerate(("ant", "bee", "cat")):
            home = root / split / name
            home.mkdir(parents=True)
            for index in range(count):
                array = np.random.default_rng([label, index, count]).random((4, *size))
                array[label] += 0.7
                if kind == "tiff":
                    (home / f"{index}.tif").write_bytes(as_tiff(np.moveaxis(array * 100, 0, -1).astype(np.uint8)))
                else:
                    np.save(home / f"{index}.npy", (array * (9000 if kind == "uint16" else 40)).astype(kind))
    return root


@pytest.mark.parametrize("workers", [0, 1])
def test_statistics_and_caching_do_not_depend_on_workers(tmp_path, workers):
    split = open_image_folder(write_band_dataset(tmp_path, "uint16", (40, 30))).split("train")
    seen = BandPreprocess((16, 16), 4, numbers="uint16")
    assert measure_channel_statistics(split, seen, workers) == measure_channel_statistics(split, seen)
    cached, bad = screen_images(split, seen, workers, keep=True)
    assert cached is not None and cached.dtype == torch.float32 and cached.shape == (24, 4, 16, 16) and not bad
    assert cached.max() > 9000


@pytest.mark.parametrize(("kind", "size"), [("tiff", (16, 16)), ("uint16", (40, 30)), ("float32", (16, 16))])
def test_multiband_data_are_trained_evaluated_and_predicted(tmp_path, kind, size):
    data, run = write_band_dataset(tmp_path / "data", kind, size), tmp_path / "run"
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
    seen = RunFolder(run).run().preprocess
    assert (seen.channels, seen.numbers) == (4, {"tiff": "uint8"}.get(kind, kind))
    mean, _ = measure_channel_statistics(open_image_folder(data).split("train"), seen)
    assert seen.mean == mean and RunFolder(run).run().views.rand_layers == 0
    judged = evaluate(run, workers=0)
    assert judged["test"]["top1"] > 0.8
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
    with pytest.raises(Exception, match="the images have 4 channels, but the weights need 3") as caught:
        train(str(data), init=str(tmp_path / "run"), out=str(tmp_path / "other"), epochs=1.0, device="cpu")
    assert "--channels 4" in str(caught.value)
