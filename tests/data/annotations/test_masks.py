"""Class maps and object masks next to images, in common layouts, and damaged masks."""

import shutil

import numpy as np
import pytest
from PIL import Image

from tests.data.annotations.scenery import make_scene, write_maps, write_objects
from vitreous.data.annotations.painted import paint_class_maps
from vitreous.data.annotations.target import IGNORE_INDEX
from vitreous.data.sources import open_data
from vitreous.errors import DataError

CLASS_COLOURS = np.array([[0, 0, 0], [128, 64, 128], [0, 0, 230]], np.uint8)


def read_class_maps(data):
    """Map each image name to its class map, over all splits."""
    return {split.name(i).rpartition("/")[2]: split.target(i).classes for split in data.splits.values()
            for i in range(len(split))}  # fmt: skip


def test_indices_palettes_and_colours_give_equal_class_maps(tmp_path):
    index_folder = write_maps(tmp_path / "numbers")
    expected = {f"{number}.png": make_scene(number)[1].astype(int) for number in range(8)}
    for encoding in ("palette", "colours"):
        shutil.copytree(index_folder, tmp_path / encoding)
        for path in (tmp_path / encoding / "masks").iterdir():
            values = np.asarray(Image.open(path))
            if encoding == "colours":
                Image.fromarray(CLASS_COLOURS[values]).save(path)
            else:
                image = Image.fromarray(values).convert("P")
                image.putpalette(CLASS_COLOURS.ravel().tolist())
                image.putdata(values.ravel().tolist())
                image.save(path)
    lines = ("ground", "square", "disc")
    text = "".join(f"{name} {' '.join(map(str, colour))}\n" for name, colour in zip(lines, CLASS_COLOURS, strict=True))
    (tmp_path / "colours" / "classes.txt").write_text(text)
    for encoding in ("numbers", "palette", "colours"):
        data = open_data(tmp_path / encoding)
        assert data.classes == ("ground", "square", "disc") and set(data.splits) == {"train", "val"}
        class_maps = read_class_maps(data)
        assert class_maps.keys() == expected.keys()
        assert all(np.array_equal(class_maps[name], expected[name]) for name in expected), encoding
        assert all((split.labels == 1).all() for split in data.splits.values()), encoding


def test_labels_are_the_classes_present_in_each_map(tmp_path):
    home = write_maps(tmp_path)
    Image.fromarray(np.full((24, 32), 255, np.uint8)).save(home / "masks" / "3.png")
    Image.fromarray(np.ones((24, 32), np.uint8)).save(home / "masks" / "4.png")
    data = open_data(home)
    rows = {split.name(i)[-5]: split.labels[i].tolist() for split in data.splits.values() for i in range(len(split))}
    assert rows["0"] == [1, 1, 1] and rows["3"] == [0, 0, 0] and rows["4"] == [0, 1, 0]
    assert (read_class_maps(data)["3.png"] == IGNORE_INDEX).all()


@pytest.mark.parametrize("inside", [False, True])
def test_split_folders_may_be_inside_or_outside(tmp_path, inside):
    for split, count in (("train", 5), ("valid", 2), ("test", 3)):
        home = write_maps(tmp_path / "parts" / split, count, "")
        for folder in ("images", "masks"):
            path = tmp_path / "data" / (f"{folder}/{split}" if inside else f"{split}/{folder}")
            shutil.copytree(home / folder, path)
    data = open_data(tmp_path / "data")
    assert {name: len(split) for name, split in data.splits.items()} == {"train": 5, "val": 2, "test": 3}
    assert data.classes == ("class 0", "class 1", "class 2") and "classes.txt" in data.notes[0]


def test_black_and_white_maps_have_two_classes(tmp_path):
    home = write_maps(tmp_path, names="")
    for path in (home / "masks").iterdir():
        Image.fromarray((np.asarray(Image.open(path)) == 1).astype(np.uint8) * 255).save(path)
    data = open_data(home)
    assert data.classes == ("class 0", "class 1")
    assert np.array_equal(read_class_maps(data)["2.png"], make_scene(2)[1] == 1)


def test_one_mask_per_object_gives_objects_and_a_class_map(tmp_path):
    data = open_data(write_objects(tmp_path))
    assert data.classes == ("object",)
    split = data.splits["train"]
    target = split.target(0)
    classes = make_scene(int(split.name(0)[-5]))[1]
    assert target.labels.tolist() == [0, 0] and np.array_equal(target.masks(), np.stack([classes == 1, classes == 2]))
    painted = paint_class_maps(data)
    assert painted.classes == ("background", "object")
    assert np.array_equal(painted.splits["train"].target(0).classes, classes > 0)
    assert paint_class_maps(open_data(write_maps(tmp_path / "maps"))).classes == ("ground", "square", "disc")


def damage_mask(home, file_name, change):
    """Apply `change` to one mask of a folder."""
    file = home / "masks" / file_name
    change(file)


def write_wrong_size(file):
    Image.fromarray(np.zeros((5, 5), np.uint8)).save(file)


def unknown_class(file):
    Image.fromarray(np.full((24, 32), 7, np.uint8)).save(file)


def unknown_colour(file):
    Image.fromarray(np.full((24, 32, 3), (9, 8, 7), np.uint8)).save(file)


@pytest.mark.parametrize(("change", "text"), [
    (write_wrong_size, "1.png is 5 x 5 pixels, its image .*1.png 32 x 24"),
    (unknown_class, "1.png has class 7, but there are 3"),
    (unknown_colour, "1.png is a colour map, but class colours are not defined"),
    (lambda file: file.write_bytes(b"not an image"), "1.png is not a readable mask"),
    (lambda file: file.write_bytes(file.read_bytes()[:60]), "1.png is not a readable mask"),
    (lambda file: file.write_bytes(b""), "1.png"),
    (lambda file: file.unlink(), "1 of 8 have no mask; the first is .*images/1.png"),
    (lambda file: file.rename(file.with_name("other.png")), "1 of 8 have no mask"),
    (lambda file: shutil.copy(file, file.with_name("extra.png")), "1 of 9 have no image; the first is .*extra.png"),
])  # fmt: skip
def test_damaged_masks_are_rejected_by_name(tmp_path, change, text):
    home = write_maps(tmp_path)
    damage_mask(home, "1.png", change)
    with pytest.raises(DataError, match=text):
        read_class_maps(open_data(home))


@pytest.mark.parametrize(("names", "text"), [
    ("ground\nground\ndisc\n", "line 2: ground is repeated"),
    ("ground 1 2 3\nsquare\ndisc\n", "line 2: square has no colour"),
    ("ground\nsquare\n", "has class 2, but there are 2"),
])  # fmt: skip
def test_invalid_class_lists_are_rejected(tmp_path, names, text):
    with pytest.raises(DataError, match=text):
        read_class_maps(open_data(write_maps(tmp_path, names=names)))


def test_unknown_mask_colours_are_rejected(tmp_path):
    home = write_maps(tmp_path, names="ground 0 0 0\nsquare 1 1 1\ndisc 2 2 2\n")
    for path in (home / "masks").iterdir():
        Image.open(path).convert("RGB").save(path)
    unknown_colour(home / "masks" / "1.png")
    with pytest.raises(DataError, match=r"1\.png has the colour 9 8 7 without a class"):
        read_class_maps(open_data(home))


def test_mixed_mask_kinds_and_duplicate_names_are_rejected(tmp_path):
    home = write_maps(tmp_path / "twice")
    Image.open(home / "masks" / "1.png").save(home / "masks" / "1.tif")
    with pytest.raises(DataError, match=r"1\.png and .*1\.tif differ only in suffix or Unicode form"):
        open_data(home)
    write_maps(tmp_path / "mixed" / "train")
    write_objects(tmp_path / "mixed" / "val")
    with pytest.raises(DataError, match="class maps in some splits"):
        open_data(tmp_path / "mixed")


def test_class_maps_require_boxes_masks_or_maps(tmp_path):
    with pytest.raises(DataError, match="has no boxes, masks or class maps"):
        paint_class_maps(open_data("digits"))
