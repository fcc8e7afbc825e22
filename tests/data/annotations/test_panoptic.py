"""COCO's panoptic format: segments become class maps, "thing" segments become objects, damaged files are rejected."""

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.data.annotations.writing_scenes import IMAGE_SIZE, SPLITS, list_image_numbers, save_image
from vitreous.apps.curation.convert import convert_annotations
from vitreous.data.annotations.target import IGNORE_INDEX
from vitreous.data.sources import open_data
from vitreous.errors import DataError, VitreousError

CATEGORY_NAMES = {3: "cat", 9: "dog", 200: "sky"}  # by id; sky is "stuff", the others are "things"


def make_segments(number):
    """Return (H, W) segment ids, and the category and crowd flag of each id. Image 1 contains only sky."""
    draw = np.random.default_rng(number)
    ids = np.zeros(IMAGE_SIZE, np.int64)
    ids[2:] = 70000 + number
    categories = {70000 + number: (200, 0)}
    for position, category in enumerate((9, 3, 9) if number != 1 else ()):
        top, left = 4 + int(draw.integers(0, 8)), 10 * position + int(draw.integers(0, 3))
        ids[top : top + 5, left : left + 6] = 300 + position * 256
        categories[300 + position * 256] = (category, int(position == 2))
    return ids, categories


def save_segments(path, ids):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.stack([ids % 256, ids // 256 % 256, ids // 65536], -1).astype(np.uint8)).save(path)


def write_panoptic(home):
    """Write a panoptic dataset with its images below `images/`."""
    for split in SPLITS:
        images, annotations = [], []
        path = home / "annotations" / f"panoptic_{split}2017.json"
        for number in list_image_numbers(split):
            save_image(home / "images" / f"{split}2017" / f"{number}.png", number)
            ids, segments = make_segments(number)
            save_segments(path.with_suffix("") / f"{number}.png", ids)
            images.append(
                {"id": 50 - number, "file_name": f"{number}.png", "height": IMAGE_SIZE[0], "width": IMAGE_SIZE[1]}
            )
            infos = [
                {"id": key, "category_id": category, "iscrowd": crowd} for key, (category, crowd) in segments.items()
            ]
            annotations.append({"image_id": 50 - number, "file_name": f"{number}.png", "segments_info": infos})
        categories = [{"id": key, "name": name, "isthing": int(key < 100)} for key, name in CATEGORY_NAMES.items()]
        document = {"images": images, "annotations": annotations[::-1], "categories": categories[::-1]}
        path.write_text(json.dumps(document))
    return home


def test_things_are_objects_and_segments_are_class_maps(tmp_path):
    data = open_data(str(write_panoptic(tmp_path)))
    assert (
        data.classes == ("cat", "dog", "sky")
        and {name: len(dataset_split) for name, dataset_split in data.splits.items()} == SPLITS
    )
    for dataset_split in data.splits.values():
        for sample in reversed(range(len(dataset_split))):
            number, target = int(Path(dataset_split.name(sample)).stem), dataset_split.target(sample)
            ids, categories = make_segments(number)
            expected = np.full(IMAGE_SIZE, IGNORE_INDEX)
            for key, (category, _) in categories.items():
                expected[ids == key] = sorted(CATEGORY_NAMES).index(category)
            assert np.array_equal(target.class_map(), expected) and (target.class_map()[:2] == IGNORE_INDEX).all()
            thing_ids = [key for key in sorted(categories) if categories[key][0] < 100]
            assert [CATEGORY_NAMES[categories[key][0]] for key in thing_ids] == [
                data.classes[label] for label in target.labels
            ]
            assert target.crowd.tolist() == [bool(categories[key][1]) for key in thing_ids]
            for row, key in enumerate(thing_ids):
                rows, columns = np.nonzero(ids == key)
                edges = [columns.min(), rows.min(), columns.max() + 1, rows.max() + 1]
                assert np.array_equal(target.mask(row), ids == key) and target.boxes[row].tolist() == edges
            present = {data.classes[k] for k in np.flatnonzero(dataset_split.labels[sample])}
            assert present == {CATEGORY_NAMES[category] for category, _ in categories.values()}


def test_instance_files_take_precedence_over_panoptic_files(tmp_path):
    home = write_panoptic(tmp_path)
    path = home / "annotations" / "panoptic_train2017.json"
    panoptic_data = open_data(str(path))
    train_split = (
        panoptic_data.full_train_split if panoptic_data.full_train_split is not None else panoptic_data.split("train")
    )
    assert len(train_split) == SPLITS["train"]
    assert train_split.target(0).class_map().max() == 2
    for split in SPLITS:
        document = json.loads((home / "annotations" / f"panoptic_{split}2017.json").read_text())
        (home / "annotations" / f"instances_{split}2017.json").write_text(json.dumps(document | {"annotations": []}))
    assert not len(open_data(str(home)).split("train").target(0))


def test_conversion_preserves_objects_and_class_maps(tmp_path):
    data = open_data(str(write_panoptic(tmp_path / "in")))
    for target_format in ("coco", "masks"):
        convert_annotations(data, tmp_path / target_format, target_format)
        converted = open_data(str(tmp_path / target_format))
        assert converted.classes == data.classes
        for name, dataset_split in data.splits.items():
            for sample in range(len(dataset_split)):
                stems = [Path(converted.splits[name].name(row)).stem for row in range(len(dataset_split))]
                before = dataset_split.target(sample)
                after = converted.splits[name].target(stems.index(Path(dataset_split.name(sample)).stem))
                if target_format == "masks":
                    assert np.array_equal(before.class_map(), after.class_map())
                else:
                    assert np.array_equal(before.labels, after.labels) and np.array_equal(before.boxes, after.boxes)
                    assert np.array_equal(before.masks(), after.masks() if len(after) else after.create_empty_masks())


def set_first_entry(key, name, value):
    """Return an edit that sets `name` in the first entry of a list."""
    return lambda document: document[key][0].update({name: value})


def change_segment(name, value):
    """Return an edit of the first segment of the first annotation."""
    return lambda document: document["annotations"][0]["segments_info"][0].update({name: value})


DOCUMENT_DAMAGES = [
    lambda document: document.pop("categories"),
    lambda document: document["annotations"].pop(),
    lambda document: document["images"].pop(),
    lambda document: document["images"].append(document["images"][0]),
    lambda document: document["annotations"].append(document["annotations"][0]),
    lambda document: document["annotations"][0]["segments_info"].pop(),
    lambda document: document["annotations"][0]["segments_info"].append({"id": 5, "category_id": 3}),
    lambda document: document["annotations"][0]["segments_info"].append(3),
    lambda document: document["categories"][0].pop("isthing"),
    set_first_entry("categories", "isthing", []),
    set_first_entry("categories", "name", "cat"),
    set_first_entry("annotations", "segments_info", None),
    set_first_entry("annotations", "image_id", "x"),
    set_first_entry("annotations", "image_id", [1]),
    set_first_entry("annotations", "file_name", "nobody.png"),
    set_first_entry("annotations", "file_name", "../../etc/passwd"),
    set_first_entry("images", "file_name", "nobody.png"),
    set_first_entry("images", "file_name", None),
    set_first_entry("images", "id", {}),
    set_first_entry("images", "width", 31),
    change_segment("id", 0),
    change_segment("id", 1 << 24),
    change_segment("id", None),
    change_segment("category_id", 4),
    change_segment("category_id", [3]),
]


def read_all_targets(home):
    for dataset_split in open_data(str(home)).splits.values():
        for sample in range(len(dataset_split)):
            dataset_split.target(sample)


@pytest.mark.parametrize("damage", DOCUMENT_DAMAGES)
def test_damaged_panoptic_documents_are_reported(tmp_path, damage):
    home = write_panoptic(tmp_path)
    path = home / "annotations" / "panoptic_train2017.json"
    document = json.loads(path.read_text())
    damage(document)
    path.write_text(json.dumps(document))
    with pytest.raises(VitreousError) as error:
        read_all_targets(home)
    names = (path.name, "panoptic_val2017.json")  # either file may be named if two files disagree
    assert any(name in error.value.message for name in names) or "two classes" in error.value.message
    assert len(error.value.message) < 700


@pytest.mark.parametrize("pixels", [np.zeros((24, 31, 3)), np.zeros(IMAGE_SIZE), np.full((*IMAGE_SIZE, 3), 7), None])
def test_damaged_panoptic_pngs_are_reported(tmp_path, pixels):
    home = write_panoptic(tmp_path)
    path = home / "annotations" / "panoptic_train2017" / "0.png"
    if pixels is None:
        path.write_bytes(path.read_bytes()[:60])
    else:
        Image.fromarray(pixels.astype(np.uint8)).save(path)
    with pytest.raises(DataError, match=r"panoptic_train2017/0\.png"):
        read_all_targets(home)
