"""COCO, Pascal VOC, YOLO, LabelMe and CSV give the same targets, also after `data convert`."""

import json
from pathlib import Path

import numpy as np
import pytest

from tests.data.annotations.writing_scenes import (
    CLASSES,
    FORMAT_WRITERS,
    IMAGE_SIZE,
    SPLITS,
    list_image_numbers,
    make_objects,
    write_coco,
    write_yolo,
)
from vitreous.apps.curation.convert import convert_annotations
from vitreous.data.annotations.shapes import mask_to_rle, polygon_to_mask
from vitreous.data.sources import open_data
from vitreous.errors import DataError, UsageError


def get_targets_by_image(data):
    """Map (split, image name) to the target."""
    return {
        (name, Path(split.name(sample)).stem): split.target(sample)
        for name, split in data.splits.items()
        for sample in range(len(split))
    }


def check_scenes(data, masks=False):
    """Assert that all objects are those of the synthetic scenes."""
    rows = get_targets_by_image(data)
    assert data.classes == CLASSES and {name: len(split) for name, split in data.splits.items()} == SPLITS
    for split in SPLITS:
        for number in list_image_numbers(split):
            target, expected = rows[split, str(number)], make_objects(number)
            boxes = [[min(edge, side) for edge, side in zip(box, (32, 24, 32, 24), strict=True)] for _, box in expected]
            assert target.size == IMAGE_SIZE and target.labels.tolist() == [label for label, _ in expected]
            assert np.allclose(target.boxes, np.array(boxes).reshape(-1, 4), atol=1e-4)
            present = data.splits[split].labels[list(list_image_numbers(split)).index(number)]
            assert set(np.flatnonzero(present)) == {label for label, _ in expected}
            for row, (left, top, right, bottom) in enumerate(boxes if masks else []):
                mask = target.mask(row)
                assert mask.sum() == (right - left) * (bottom - top) and mask[top:bottom, left:right].all()


@pytest.mark.parametrize("form", FORMAT_WRITERS)
def test_every_format_gives_the_same_targets(tmp_path, form):
    data = open_data(str(FORMAT_WRITERS[form](tmp_path)))
    order = {
        split: [Path(dataset_split.name(sample)).stem for sample in range(len(dataset_split))]
        for split, dataset_split in data.splits.items()
    }
    if form == "coco":  # images are in file order
        assert order == {"train": ["2", "1", "0"], "val": ["4", "3"]}
        data.splits.update(
            {
                name: dataset_split.take(np.arange(len(dataset_split))[::-1])
                for name, dataset_split in data.splits.items()
            }
        )
    check_scenes(data, masks=form in ("coco", "labelme"))


def test_yolo_polygons_are_masks(tmp_path):
    check_scenes(open_data(str(write_yolo(tmp_path, polygons=True))), masks=True)


@pytest.mark.parametrize("form", FORMAT_WRITERS)
@pytest.mark.parametrize("target_format", ["coco", "voc", "yolo"])
def test_conversion_preserves_targets(tmp_path, form, target_format):
    data = open_data(str(FORMAT_WRITERS[form](tmp_path / "in")))
    counts = convert_annotations(data, tmp_path / "out", target_format)["splits"]
    converted = open_data(str(tmp_path / "out"))
    before, after = get_targets_by_image(data), get_targets_by_image(converted)
    assert counts["train"] == {"images": 3, "objects": sum(len(make_objects(number)) for number in range(3))}
    assert before.keys() == after.keys()
    for name, target in before.items():
        assert [data.classes[k] for k in target.labels] == [converted.classes[k] for k in after[name].labels]
        assert np.allclose(target.boxes, after[name].boxes, atol=1e-5)
        if target_format != "voc" and target.layers is not None:
            assert np.array_equal(target.masks(), after[name].masks())
    assert not [note for note in converted.notes if "held out" in note]


def test_masks_survive_conversion_to_class_maps(tmp_path):
    data = open_data(str(write_coco(tmp_path / "in")))
    convert_annotations(data, tmp_path / "out", "masks")
    converted = open_data(str(tmp_path / "out"))
    assert converted.classes == ("background", *CLASSES)
    before = get_targets_by_image(data)
    for name, target in get_targets_by_image(converted).items():
        expected = before[name].class_map(background=-2) + 1
        assert np.array_equal(target.class_map(), np.maximum(expected, 0))


def test_conversion_does_not_write_a_held_out_split(tmp_path):
    home = write_yolo(tmp_path / "in")
    (home / "data.yaml").write_text("train: [images/train, images/val]\nnames: [cat, dog, owl]\n")
    data = open_data(str(home))
    assert "val" not in convert_annotations(data, tmp_path / "out", "yolo")["splits"]
    assert sum(len(split) for split in open_data(str(tmp_path / "out")).splits.values()) == 5


def test_unsupported_conversions_are_rejected(tmp_path):
    boxes = open_data(str(FORMAT_WRITERS["voc"](tmp_path / "voc")))
    with pytest.raises(DataError, match="boxes but no masks"):
        convert_annotations(boxes, tmp_path / "out", "masks")
    with pytest.raises(DataError, match="no boxes or masks found in digits"):
        convert_annotations(open_data("digits"), tmp_path / "out", "coco")
    with pytest.raises(UsageError, match="already exists and is not overwritten"):
        convert_annotations(boxes, tmp_path / "voc", "coco")
    with pytest.raises(UsageError, match="unknown format to='kitti'"):
        convert_annotations(boxes, tmp_path / "out", "kitti")
    assert not (tmp_path / "out").exists()


def test_crowds_and_run_lengths_survive_conversion(tmp_path):
    home = write_coco(tmp_path)
    path = home / "annotations" / "instances_val2017.json"
    document = json.loads(path.read_text())
    mask = polygon_to_mask(np.array([(3, 3), (9, 4), (6, 20)]), IMAGE_SIZE)
    crowd = {"id": 999, "image_id": 97, "category_id": 10, "iscrowd": 1, "bbox": [3, 3, 6, 17]}
    crowd["segmentation"] = {"counts": mask_to_rle(mask), "size": list(IMAGE_SIZE)}
    document["annotations"].append(crowd)
    path.write_text(json.dumps(document))
    target = get_targets_by_image(open_data(str(home)))["val", "3"]
    assert (
        target.crowd.tolist()[-1] and not target.crowd[:-1].any() and np.array_equal(target.mask(len(target) - 1), mask)
    )
    data = open_data(str(home))
    convert_annotations(data, tmp_path / "out", "coco")
    converted = get_targets_by_image(open_data(str(tmp_path / "out")))["val", "3"]
    assert converted.crowd.tolist() == target.crowd.tolist() and np.array_equal(converted.masks(), target.masks())


def test_zero_based_voc_boxes_are_read_and_empty_boxes_dropped(tmp_path):
    home = FORMAT_WRITERS["voc"](tmp_path)
    path = home / "Annotations" / "3.xml"
    box = (
        "<object><name>cat</name><bndbox><xmin>{}</xmin><ymin>{}</ymin><xmax>{}</xmax><ymax>{}</ymax></bndbox></object>"
    )
    rows = box.format(0, 4, 8, 9) + box.format(5, 5, 5, 9)
    path.write_text(f"<annotation>{rows}</annotation>")
    data = open_data(str(home))
    assert get_targets_by_image(data)["val", "3"].boxes.tolist() == [[0, 4, 8, 9]]
    assert any("1 boxes without area" in note and "3.xml" in note for note in data.notes)


def test_lvis_verified_classes_and_frequencies_are_read(tmp_path):
    home = write_coco(tmp_path)
    path = next((home / "annotations").glob("*train*"))
    document = json.loads(path.read_text())
    numbers = [row["id"] for row in document["categories"]]
    for row, letter in zip(document["categories"], "rcf", strict=False):
        row["frequency"] = letter
    for row in document["images"]:
        row |= {
            "neg_category_ids": numbers[:1],
            "not_exhaustive_category_ids": numbers[1:],
            "coco_url": "http://x/" + row["file_name"],
        }
        del row["file_name"]
    before = open_data(str(home)).fingerprint()
    path.write_text(json.dumps(document))
    data = open_data(str(home))
    order = sorted(numbers)
    for sample in range(len(data.splits["train"])):
        verified = data.splits["train"].target(sample).verified
        assert verified.absent.tolist() == [order.index(numbers[0])]
        assert verified.partial.tolist() == [order.index(number) for number in numbers[1:]]
    assert data.splits["val"].target(0).verified is None and data.fingerprint() != before
    assert set(data.frequency.values()) <= {"rare", "common", "frequent"} and data.frequency
    document["images"][0]["neg_category_ids"] = [999]
    path.write_text(json.dumps(document))
    with pytest.raises(DataError, match="neg_category_ids"):
        open_data(str(home))
