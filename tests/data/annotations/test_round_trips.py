"""`data convert` there and back with unusual names: spaces, dots, other scripts, words with a meaning in YAML."""

import shutil
import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image

from vitreous.apps.curation.convert import UNSTORABLE, convert_annotations
from vitreous.data.annotations.objects import Scene
from vitreous.data.annotations.scenes import build_scene_data
from vitreous.data.annotations.shapes import Shape
from vitreous.data.layouts.file_names import normalise_name
from vitreous.data.sources import open_data
from vitreous.errors import DataError

ODD_NAMES = [
    "a b",
    "a  b",
    "2 1",
    "x -1",
    "yes",
    "null",
    "1.5",
    "~",
    "road 1 2 3",
    "é",
    "e\u0301",
    "猫",
    "a.b.c",
    "#x",
    "a: b",
    "'",
    '"',
]
ODD_NAMES += [
    "&a",
    "*a",
    "<b>",
    "a,b",
    "- a",
    "\u00a0x".strip(),
    "classes",
    "train",
    "labels",
    "images",
    "🐈 cat",
    "%d",
    "{split}",
    "..a",
]
letter_strategy = st.characters(exclude_categories=["Cs", "Cc"], exclude_characters="/")
name_strategy = st.one_of(st.sampled_from(ODD_NAMES), st.text(letter_strategy, min_size=1, max_size=12))
class_name_strategy = name_strategy.map(lambda name: normalise_name(UNSTORABLE.sub("", name).strip())).filter(bool)
file_stem_strategy = name_strategy.filter(lambda name: len(name.encode()) < 60)


def write_data(home, titles, files):
    """Write images with two boxes and masks each; the red value of an image is its number."""
    scenes, names_taken = [], set()
    for number, stem in enumerate(files):
        path = home / f"{number % 2}" / f"{stem}.png"
        if path in names_taken:
            continue
        names_taken.add(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.full((12, 16, 3), (number, 0, 0), np.uint8)).save(path)
        shapes = []
        for row in range(2):
            box = (1.0 + row * 7, 2.0, 5.0 + row * 7, 6.0 + number)
            corners = [(box[0], box[1]), (box[2], box[1]), (box[2], box[3]), (box[0], box[3])]
            shapes.append(Shape((number + row) % len(titles), box, (np.array(corners, np.float32),)))
        scenes.append(Scene(path, tuple(shapes), home))
    return build_scene_data("data", titles, {"train": scenes[:1], "val": scenes[1:]}, 0, [])


def read_contents(data):
    """Map each image number to its objects (class name in NFC form, box), or to the class names in its map."""
    table, titles = {}, list(map(normalise_name, data.classes))
    for split in data.splits.values():
        for sample in range(len(split)):
            target, pixels = split.target(sample), np.asarray(Image.open(split.path(sample)))
            rows = zip(target.labels.tolist(), target.boxes.round(3).tolist(), strict=True)
            objects = sorted((titles[label], tuple(box)) for label, box in rows)
            if target.classes is not None:
                objects = sorted({titles[label] for label in np.unique(target.classes)})
            table[int(pixels[0, 0, 0])] = objects
    return table


@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    st.lists(class_name_strategy, min_size=2, max_size=3, unique=True),
    st.lists(file_stem_strategy, min_size=3, max_size=3),
)
def test_odd_names_survive_every_format(titles, files):
    home = Path(tempfile.mkdtemp())
    try:
        data = write_data(home / "source", titles, files)
        expected = read_contents(data)
        for form in ("coco", "yolo", "voc", "masks"):
            if form == "masks" and "background" in titles:
                continue
            convert_annotations(data, home / form, form)
            result = read_contents(open_data(str(home / form)))
            if form == "masks":
                maps = {
                    number: sorted({"background", *(name for name, _ in rows)}) for number, rows in expected.items()
                }
                assert result == maps
            else:
                assert result == expected, form
    finally:
        shutil.rmtree(home)


@pytest.mark.parametrize("form", ["coco", "yolo", "voc", "masks"])
@pytest.mark.parametrize("name", ODD_NAMES)
def test_each_odd_name_survives_conversion(tmp_path, form, name):
    data = write_data(tmp_path / "source", [name, "other"], [name, f"{name} {name}", f" {name}"])
    convert_annotations(data, tmp_path / "out", form)
    result, expected = read_contents(open_data(str(tmp_path / "out"))), read_contents(data)
    assert result.keys() == expected.keys() and (form == "masks" or result == expected)


def test_non_utf8_names_and_line_ends_survive_conversion(tmp_path):
    data = write_data(tmp_path / "source", ["a", "b"], ["x\ny", "z\udcff", ".hidden"])
    for form in ("coco", "yolo", "voc"):
        convert_annotations(data, tmp_path / form, form)
        assert read_contents(open_data(str(tmp_path / form))) == read_contents(data)


@pytest.mark.parametrize("name", ["a\nb", " a", "a\t", "a\ud800", "\u2028a"])
def test_unstorable_class_names_are_rejected(tmp_path, name):
    data = write_data(tmp_path / "source", [name, "other"], ["0", "1", "2"])
    with pytest.raises(DataError, match="class name"):
        convert_annotations(data, tmp_path / "out", "voc")
    assert not (tmp_path / "out").exists()
