"""Mask file formats, lossy compression, gaps in class indices, and `--ignore-index`."""

import io
import json
import re

import numpy as np
import pytest
from PIL import Image

from tests.conftest import run_cli
from tests.data.annotations.scenery import make_scene, write_maps, write_objects
from tests.data.annotations.test_masks import read_class_maps
from vitreous.apps.curation.check import check_dataset
from vitreous.apps.curation.convert import convert_annotations
from vitreous.data.annotations.learnable import find_unlearnable
from vitreous.data.annotations.mask_files import describe_class_gaps, is_lossy, read_mask
from vitreous.data.annotations.target import IGNORE_INDEX
from vitreous.data.sources import open_data
from vitreous.errors import DataError, UsageError


def write_npy(values):
    file = io.BytesIO()
    np.save(file, values)
    return file.getvalue()


def encode_image(image, form):
    file = io.BytesIO()
    image.save(file, form)
    return file.getvalue()


#: file suffix and encoder of (H, W) uint8 class maps for each storage form
MASK_ENCODERS = {
    "png": (".png", lambda classes: encode_image(Image.fromarray(classes), "PNG")),
    "16 bits": (".png", lambda classes: encode_image(Image.fromarray(classes.astype(np.uint16)), "PNG")),
    "32 bits": (".tif", lambda classes: encode_image(Image.fromarray(classes.astype(np.int32)), "TIFF")),
    "float TIFF": (".tif", lambda classes: encode_image(Image.fromarray(classes.astype(np.float32)), "TIFF")),
    "nearly whole": (
        ".tif",
        lambda classes: encode_image(Image.fromarray(classes.astype(np.float32) * 0.9999999), "TIFF"),
    ),
    "grey RGB": (".png", lambda classes: encode_image(Image.fromarray(np.stack([classes] * 3, -1)), "PNG")),
    "grey RGBA": (".png", lambda classes: encode_image(Image.fromarray(classes).convert("RGBA"), "PNG")),
    "grey and alpha": (".png", lambda classes: encode_image(Image.fromarray(classes).convert("LA"), "PNG")),
    "npy": (".npy", lambda classes: write_npy(classes)),
    "npy int64": (".npy", lambda classes: write_npy(classes.astype(np.int64))),
    "npy float": (".npy", lambda classes: write_npy(classes.astype(np.float64))),
    "npy Fortran": (".npy", lambda classes: write_npy(np.asfortranarray(classes))),
    "npy channel": (".npy", lambda classes: write_npy(classes[..., None])),
    "npy grey RGB": (".npy", lambda classes: write_npy(np.stack([classes] * 3, -1))),
}


def store_maps(home, form, change=lambda classes: classes, names="ground\nsquare\ndisc\n"):
    """Write a dataset whose class maps are stored in the given form."""
    write_maps(home, names=names)
    ending, write = MASK_ENCODERS[form]
    for number in range(8):
        (home / "masks" / f"{number}.png").unlink()
        (home / "masks" / f"{number}{ending}").write_bytes(write(change(make_scene(number)[1].copy())))
    return home


@pytest.mark.parametrize("form", MASK_ENCODERS)
def test_class_indices_are_read_from_every_mask_format(tmp_path, form):
    maps = read_class_maps(open_data(str(store_maps(tmp_path, form))))
    assert all(np.array_equal(maps[f"{number}.png"], make_scene(number)[1]) for number in range(8))


def test_boolean_arrays_are_black_and_white(tmp_path):
    write_maps(tmp_path, names="")
    for number in range(8):
        (tmp_path / "masks" / f"{number}.png").unlink()
        (tmp_path / "masks" / f"{number}.npy").write_bytes(write_npy(make_scene(number)[1] > 0))
    data = open_data(str(tmp_path))
    assert data.classes == ("class 0", "class 1") and np.array_equal(
        read_class_maps(data)["2.png"], make_scene(2)[1] > 0
    )


def test_nan_is_a_pixel_without_a_class(tmp_path):
    values = np.zeros((24, 32), np.float32)
    values[0] = np.nan
    (tmp_path / "a.tif").write_bytes(encode_image(Image.fromarray(values), "TIFF"))
    assert (read_mask(tmp_path / "a.tif")[0] == 255).all()


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        (
            "a.tif",
            encode_image(Image.fromarray(np.full((4, 4), 0.37, np.float32)), "TIFF"),
            "0.37 is not a class index",
        ),
        ("a.npy", write_npy(np.full((4, 4), 0.5)), "0.5 is not a class index"),
        ("a.npy", write_npy(np.full((4, 4), np.inf)), "inf is not a class index"),
        ("a.npy", write_npy(np.full((4, 4), 1 << 40)), "too large"),
        ("a.npy", write_npy(np.zeros((5, 4, 4), np.float32)), "5 x 4 x 4 is not a mask"),
        ("a.npy", write_npy(np.zeros(4)), "4 is not a mask"),
        ("a.npy", write_npy(np.array([["a", "b"]])), "type <U1"),
        ("a.npy", write_npy(np.zeros((4, 4)))[:-3], "damaged"),
        ("a.npy", b"\x93NUMPY\x01\x00", "damaged"),
        ("a.png", b"no image at all", "not an image of a known format"),
    ],
)
def test_invalid_mask_files_are_rejected_with_the_reason(tmp_path, name, content, reason):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=re.escape(reason)) as error:
        read_mask(tmp_path / name)
    assert name in error.value.message and "0x" not in error.value.message


def save_lossy(path, values, form="JPEG"):
    Image.fromarray(values).save(path, form, quality=60)


@pytest.mark.parametrize(("form", "ending"), [("JPEG", ".jpg"), ("WEBP", ".webp")])
def test_lossy_maps_are_noted(tmp_path, form, ending):
    write_maps(tmp_path, names="")
    for number in range(8):
        (tmp_path / "masks" / f"{number}.png").unlink()
        save_lossy(tmp_path / "masks" / f"{number}{ending}", make_scene(number)[1] * 50, form)
    data = open_data(str(tmp_path))
    assert any("8 masks are lossy files" in note and "PNG" in note for note in data.notes)
    document, _ = check_dataset(str(tmp_path), workers=0)
    assert any("lossy" in note for note in document["notes"])


def test_lossy_black_and_white_is_restored(tmp_path):
    write_maps(tmp_path, names="")
    for number in range(8):
        (tmp_path / "masks" / f"{number}.png").unlink()
        save_lossy(tmp_path / "masks" / f"{number}.jpg", (make_scene(number)[1] == 1).astype(np.uint8) * 255)
    data = open_data(str(tmp_path))
    assert data.classes == ("class 0", "class 1") and any("lossy" in note for note in data.notes)
    assert np.array_equal(read_class_maps(data)["2.png"], make_scene(2)[1] == 1)
    assert (data.split("train").labels == 1).all()


def test_lossy_masks_of_objects_have_no_halo(tmp_path):
    write_objects(tmp_path)
    for path in tmp_path.glob("*/masks/*.png"):
        save_lossy(path.with_suffix(".jpg"), np.asarray(Image.open(path)))
        path.unlink()
    split = open_data(str(tmp_path)).split("train")
    classes = make_scene(int(split.name(0)[-5]))[1]
    assert split.target(0).mask(0).sum() == (classes == 1).sum()


def test_lossless_files_are_not_lossy(tmp_path):
    Image.new("L", (4, 4)).save(tmp_path / "a.webp", lossless=True)
    Image.new("L", (4, 4)).save(tmp_path / "a.png")
    assert not any(is_lossy(tmp_path / name) for name in ("a.webp", "a.png", "nobody.png"))


def mark_void(classes, value=100):
    classes[:2] = value
    return classes


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({0, 1, 2, 100}, "use --ignore-index 100"),
        ({0, 1, 254}, "use --ignore-index 254"),
        ({0, 50, 100, 150}, "number the classes from 0"),
        ({0, 1, 2}, ""),
        ({1, 2, 3}, ""),
        (set(), ""),
    ],
)
def test_gaps_in_class_indices_are_described(values, message):
    assert message in describe_class_gaps(values) and bool(message) == bool(describe_class_gaps(values))


def test_a_likely_ignore_index_is_suggested(tmp_path):
    data = open_data(str(store_maps(tmp_path, "png", mark_void, names="")))
    assert len(data.classes) == 101 and any("--ignore-index 100" in note for note in data.notes)


def test_an_unnamed_class_index_suggests_ignore_index(tmp_path):
    home = store_maps(tmp_path, "png", mark_void)
    error = find_unlearnable(open_data(str(home)))
    assert error is not None and "has class 100, but there are 3" in error.message
    assert "--ignore-index 100" in error.hint
    document, _ = check_dataset(str(home), workers=0)
    assert not document["passed"]


@pytest.mark.parametrize("names", ["", "ground\nsquare\ndisc\n"])
def test_the_ignore_index_is_not_a_class(tmp_path, names):
    data = open_data(str(store_maps(tmp_path, "png", mark_void, names)), ignore_index=100)
    assert len(data.classes) == 3 and not any("--ignore-index" in note for note in data.notes)
    found_maps = read_class_maps(data)
    assert all((found_maps[f"{number}.png"][:2] == IGNORE_INDEX).all() for number in range(8))
    assert find_unlearnable(data) is None and data.split("train").labels.shape[1] == 3


def test_only_minus_one_is_a_valid_negative_index(tmp_path):
    home = write_maps(tmp_path)
    values = make_scene(0)[1].astype(np.int32)
    for value, image_number in ((-1, 0), (-5, 1)):
        (home / "masks" / f"{image_number}.png").unlink()
        (home / "masks" / f"{image_number}.npy").write_bytes(write_npy(np.where(values == 2, value, values)))
    error = find_unlearnable(open_data(str(home)))
    assert error is not None and "negative class index -5" in error.message
    (home / "masks" / "1.npy").write_bytes(write_npy(values))
    data = open_data(str(home))
    assert find_unlearnable(data) is None and (read_class_maps(data)["0.png"] == IGNORE_INDEX).any()


def test_ignore_index_requires_class_maps(tmp_path):
    with pytest.raises(UsageError, match="class maps"):
        open_data("digits", ignore_index=100)
    with pytest.raises(UsageError, match="-1 is negative"):
        open_data(str(write_maps(tmp_path)), ignore_index=-1)


def test_a_run_stores_the_ignore_index(tmp_path):
    home = store_maps(tmp_path / "data", "png", mark_void)
    arguments = ("--recipe", "segment", "--model", "ViT-32x2/8", "--image-size", "32", "--steps", "1", "--workers", "0")
    rejected = run_cli("train", str(home), *arguments, "--out", str(tmp_path / "run"))
    assert rejected.returncode == 3 and "--ignore-index 100" in rejected.stderr
    trained = run_cli("train", str(home), *arguments, "--ignore-index", "100", "--out", str(tmp_path / "run"))
    assert trained.returncode == 0, trained.stderr
    assert "ignore_index: 100" in (tmp_path / "run" / "config.yaml").read_text()
    for data in ([], [str(home)]):
        evaluated = run_cli("evaluate", str(tmp_path / "run"), *data, "--split", "val", "--json")
        assert evaluated.returncode == 0, evaluated.stderr
    checked = run_cli("data", "check", str(home), "--ignore-index", "100", "--json")
    assert json.loads(checked.stdout)["passed"]


def test_converted_maps_keep_pixels_without_a_class(tmp_path):
    data = open_data(str(store_maps(tmp_path / "data", "png", mark_void)), ignore_index=100)
    convert_annotations(data, tmp_path / "out", "masks")
    converted = open_data(str(tmp_path / "out"))
    assert converted.classes == data.classes
    assert all((classes[:2] == IGNORE_INDEX).all() for classes in read_class_maps(converted).values())


@pytest.mark.parametrize("split", ["train", "val"])
def test_one_mask_with_an_unknown_class_index_is_rejected(tmp_path, split):
    for name, count in (("train", 4), ("val", 2)):
        write_maps(tmp_path / name, count, "")
    (tmp_path / "classes.txt").write_text("ground\nsquare\ndisc\n")
    Image.fromarray(np.full((24, 32), 7, np.uint8)).save(tmp_path / split / "masks" / "1.png")
    error = find_unlearnable(open_data(str(tmp_path)))
    assert error is not None and "1.png has class 7, but there are 3" in error.message


@pytest.mark.parametrize("ending", ["png", "jpg"])
def test_one_mask_with_an_unknown_colour_is_rejected(tmp_path, ending):
    colours = np.array([[0, 0, 0], [200, 30, 30], [30, 200, 30]], np.uint8)
    write_maps(tmp_path, names="ground 0 0 0\nsquare 200 30 30\ndisc 30 200 30\n")
    for number in range(8):
        (tmp_path / "masks" / f"{number}.png").unlink()
        values = colours[make_scene(number)[1]]
        if ending == "png" and number == 3:
            values[0] = 9
        Image.fromarray(values).save(tmp_path / "masks" / f"{number}.{ending}")
    error = find_unlearnable(open_data(str(tmp_path)))
    assert error is not None and "without a class" in error.message and ("lossy" in error.message) == (ending == "jpg")
