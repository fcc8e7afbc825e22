"""Folder and file naming conventions for masks used by other tools and datasets, and unsupported layouts."""

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.data.annotations.scenery import make_scene, write_maps
from vitreous.data.annotations.mask_names import parse_file_key, parse_folder_role
from vitreous.data.sources import open_data
from vitreous.errors import DataError

PAIRS_PER_SPLIT = 3


def write_pairs(root: Path, *names: tuple[str, str], count: int = PAIRS_PER_SPLIT, first: int = 0) -> None:
    """Write scenes `first` to `first + count` as image and mask files; {0} in a name pattern is the number."""
    for image, mask in names:
        for number in range(first, first + count):
            for name, array in zip((image, mask), make_scene(number), strict=True):
                path = root / name.format(number)
                path.parent.mkdir(parents=True, exist_ok=True)
                Image.fromarray(array).save(path)


SPLIT_LAYOUTS = {
    "camvid": [(f"{s}/{{0}}.png", f"{s}annot/{{0}}.png") for s in ("train", "val", "test")],
    "carvana": [(f"{s}/{{0}}.jpg", f"{s}_masks/{{0}}_mask.png") for s in ("train", "val", "test")],
    "kaggle": [(f"{s}_images/img_{{0}}.png", f"{s}_labels/img_{{0}}_L.png") for s in ("train", "val", "test")],
    "ade20k": [(f"images/{s}/a_{{0}}.jpg", f"annotations/{s}/a_{{0}}.png") for s in ("training", "validation", "test")],
    "cityscapes": [
        (f"leftImg8bit/{s}/aachen/a_{{0}}_leftImg8bit.png", f"gtFine/{s}/aachen/a_{{0}}_gtFine_labelIds.png")
        for s in ("train", "val", "test")
    ],
    "suffixes": [(f"{s}/images/{{0}}.png", f"{s}/masks/{{0}}_seg.png") for s in ("train", "val", "test")],
    "beside": [(f"{s}/{{0}}.jpg", f"{s}/{{0}}_gt.png") for s in ("train", "val", "test")],
    "deepglobe": [(f"{s}/{{0}}_sat.jpg", f"{s}/{{0}}_mask.png") for s in ("train", "val", "test")],
    "below": [(f"{s}/{{0}}.jpg", f"masks/{s}/{{0}}.png") for s in ("train", "val", "test")],
}


@pytest.mark.parametrize("layout", SPLIT_LAYOUTS)
def test_images_and_masks_are_found_in_each_split(tmp_path, layout):
    for number, pair in enumerate(SPLIT_LAYOUTS[layout]):
        write_pairs(tmp_path, pair, first=PAIRS_PER_SPLIT * number)
    data = open_data(tmp_path)
    assert list(data.splits) == ["train", "val", "test"]
    for number, split in enumerate(data.splits.values()):
        assert len(split) == PAIRS_PER_SPLIT
        for sample in range(PAIRS_PER_SPLIT):
            pixels, classes = make_scene(PAIRS_PER_SPLIT * number + sample)
            np.testing.assert_array_equal(split.target(sample).classes, classes)
            if split.name(sample).endswith("png"):
                np.testing.assert_array_equal(np.asarray(Image.open(split.path(sample))), pixels)


UNSPLIT_LAYOUTS = {
    "other stems": ("post_fire/post_fire_{0}.png", "masks/mask_{0}.png"),
    "numbers glued to words": ("images/image{0}.png", "masks/mask{0}.png"),
    "singular folders": ("image/{0}.png", "label/{0}.png"),
    "one folder": ("a{0}.png", "a{0}_mask.png"),
    "masks in subfolders": ("images/a{0}.png", "masks/b/a{0}_gt.png"),
    "same folder below both": ("images/b/a{0}.png", "masks/b/a{0}_labelIds.png"),
}


@pytest.mark.parametrize("layout", UNSPLIT_LAYOUTS)
def test_a_folder_without_splits_is_split_on_load(tmp_path, layout):
    write_pairs(tmp_path, UNSPLIT_LAYOUTS[layout], count=10)
    data = open_data(tmp_path)
    assert {name: len(split) for name, split in data.splits.items()} == {"train": 9, "val": 1}
    for split in data.splits.values():
        for sample in range(len(split)):
            number = int("".join(filter(str.isdigit, Path(split.name(sample)).stem)))
            np.testing.assert_array_equal(split.target(sample).classes, make_scene(number)[1])


def test_label_id_masks_are_chosen_among_several_masks(tmp_path):
    write_pairs(tmp_path, ("leftImg8bit/train/a/a_{0}_leftImg8bit.png", "gtFine/train/a/a_{0}_gtFine_labelIds.png"))
    for number in range(PAIRS_PER_SPLIT):
        for word in ("color", "instanceIds"):
            path = tmp_path / f"gtFine/train/a/a_{number}_gtFine_{word}.png"
            Image.fromarray(np.full((24, 32), 7, np.uint8)).save(path)
    split = open_data(tmp_path).full_train_split
    np.testing.assert_array_equal(split.target(0).classes, make_scene(0)[1])


def test_a_split_without_masks_has_no_labels(tmp_path):
    write_pairs(tmp_path, SPLIT_LAYOUTS["camvid"][0], count=10)
    (tmp_path / "test").mkdir()
    Image.fromarray(make_scene(99)[0]).save(tmp_path / "test" / "99.png")
    data = open_data(tmp_path)
    assert list(data.splits) == ["train", "val"]
    assert "test has 1 images without labels and is ignored" in data.notes


def get_open_error(root: Path) -> tuple[str, str]:
    with pytest.raises(DataError) as error:
        open_data(root)
    return error.value.message.replace(f"{root}/", ""), error.value.hint


NAMING_HINT = "name the mask of a.jpg a.png, or a_mask.png"


def test_an_image_without_a_mask_and_a_mask_without_an_image_are_rejected(tmp_path):
    write_pairs(tmp_path, ("train/{0}.png", "trainannot/{0}_mask.png"))
    (tmp_path / "trainannot" / "1_mask.png").rename(tmp_path / "trainannot" / "7_mask.png")
    assert get_open_error(tmp_path) == ("1 of 3 have no mask; the first is train/1.png", NAMING_HINT)
    Image.fromarray(make_scene(1)[1]).save(tmp_path / "trainannot" / "1_mask.png")
    assert get_open_error(tmp_path) == ("1 of 4 have no image; the first is trainannot/7_mask.png", NAMING_HINT)


def test_ambiguous_mask_names_are_rejected(tmp_path):
    write_pairs(tmp_path, ("images/{0}.png", "masks/{0}_mask.png"))
    Image.fromarray(make_scene(1)[1]).save(tmp_path / "masks" / "1_gt.png")
    text = "images/1.png matches 2 masks: "
    assert get_open_error(tmp_path)[0].startswith(text)
    (tmp_path / "masks" / "1_gt.png").unlink()
    Image.fromarray(make_scene(1)[1]).save(tmp_path / "images" / "image_1.png")
    assert get_open_error(tmp_path) == (
        "masks/1_mask.png matches 2 images, images/1.png and images/image_1.png",
        NAMING_HINT,
    )


def test_ambiguous_image_and_mask_folders_are_rejected(tmp_path):
    write_pairs(tmp_path, ("pre_fire/{0}.png", "masks/{0}.png"), ("post_fire/{0}.png", "masks/{0}.png"))
    hint = "rename the folder of its images to images"
    assert get_open_error(tmp_path) == ("masks may belong to 2 folders: post_fire, pre_fire", hint)
    (tmp_path / "masks").rename(tmp_path / "gtFine")
    write_pairs(tmp_path, ("images/{0}.png", "gtCoarse/{0}.png"))
    message = f"{tmp_path} has 2 folders of masks: gtCoarse, gtFine"
    assert get_open_error(tmp_path) == (message, "move all but one to another folder")


@pytest.mark.parametrize("images", ["images", "post_fire"])
def test_a_parent_folder_suggests_the_dataset_folder(tmp_path, images):
    write_pairs(tmp_path / "fires", (f"{images}/{{0}}.png", "masks/{0}_mask.png"))
    data = open_data(tmp_path)
    assert data.unlabelled is not None and data.unlabelled.hint == f"did you mean {tmp_path / 'fires'}?"


def test_class_folders_with_masks_next_to_images_are_rejected(tmp_path):
    write_pairs(
        tmp_path, ("benign/b ({0}).png", "benign/b ({0})_mask.png"), ("normal/n{0}.png", "normal/n{0}_mask.png")
    )
    hint = "for segmentation, use folders images/ and masks/; for classification, move the masks away"
    message = "benign is a class folder with masks next to its images, such as b (0)_mask.png"
    assert get_open_error(tmp_path) == (message, hint)


def test_class_folders_named_mask_are_classes(tmp_path):
    for number in range(4):
        for name in ("mask", "no_mask"):
            path = tmp_path / name / f"{number}.jpg"
            path.parent.mkdir(exist_ok=True)
            noise = np.random.default_rng(number).integers(0, 256, (32, 32, 3), dtype=np.uint8)
            Image.fromarray(noise).save(path)
    assert open_data(tmp_path).classes == ("mask", "no_mask")


@pytest.mark.parametrize(
    ("name", "role"),
    [
        ("trainannot", ("train", "masks")),
        ("train_masks", ("train", "masks")),
        ("Masks-Training", ("train", "masks")),
        ("train2017", ("train", "images")),
        ("val_images", ("val", "images")),
        ("leftImg8bit", (None, "images")),
        ("SegmentationClass", (None, "masks")),
        ("post_fire", (None, None)),
        ("trainer", (None, None)),
    ],
)
def test_folders_have_a_split_and_a_role(name, role):
    assert parse_folder_role(name) == role


def test_file_keys_are_parsed():
    assert (
        parse_file_key("a_1_leftImg8bit", "images").key
        == parse_file_key("a_1_gtFine_labelIds", "masks").key
        == ("a", "1")
    )
    assert parse_file_key("post_fire_12", "images", "post_fire").key == ("12",)
    assert parse_file_key("mask", "masks").key == ("mask",)
    assert parse_file_key("a_L", "images").key == ("a", "l")


def test_exact_mask_names_take_precedence(tmp_path):
    """`a` and `a_gt` are two images, and each has an exact mask."""
    write_maps(tmp_path, 2)
    for folder in ("images", "masks"):
        (tmp_path / folder / "1.png").rename(tmp_path / folder / "0_gt.png")
    split = open_data(tmp_path).full_train_split
    assert [Path(split.path(row)).name for row in range(2)] == ["0.png", "0_gt.png"]
    np.testing.assert_array_equal(split.target(1).classes, make_scene(1)[1])
