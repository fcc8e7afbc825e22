"""`data check` of data with boxes and masks."""

import json

import pytest
from PIL import Image

from tests.data.annotations.scenery import write_maps, write_objects
from tests.data.annotations.writing_scenes import CLASSES, WRITERS, scene, write_coco
from vitreous.data.check.check import check
from vitreous.data.check.page import page


def checked(source):
    return check(str(source), workers=0)


def findings(document):
    return {row["what"]: row for row in document["findings"]}


@pytest.mark.parametrize("form", WRITERS)
def test_objects_are_counted(tmp_path, form):
    document, _ = checked(WRITERS[form](tmp_path))
    facts = document["annotations"]
    labels = [label for number in range(5) for label, _ in scene(number)]
    assert facts["objects"] == {name: labels.count(number) for number, name in enumerate(CLASSES)}
    assert facts["sizes"] == {"small": len(labels), "medium": 0, "large": 0} and facts["without_objects"] == 1
    assert f"{len(labels)} objects" in findings(document)["objects"]["text"]
    assert "others" not in findings(document)  # files of annotations are read, not left out


def test_what_is_wrong_with_objects_is_reported(tmp_path):
    home = write_coco(tmp_path)
    place = home / "annotations" / "instances_train2017.json"
    document = json.loads(place.read_text())
    image = document["images"][0]["id"]
    boxes = [[20, 10, 30, 9], [1, 1, 10, 10], [1, 1, 10, 10.2], [1, 1, 10, 10]]
    for number, box in enumerate(boxes):
        category = 10 if number == 3 else 5
        document["annotations"].append({"id": 900 + number, "image_id": image, "category_id": category, "bbox": box})
    document["categories"].append({"id": 99, "name": "yak"})
    place.write_text(json.dumps(document))
    other = home / "annotations" / "instances_val2017.json"
    held_out = json.loads(other.read_text())
    held_out["categories"].append({"id": 98, "name": "emu"})
    held_out["annotations"].append({"id": 1, "image_id": 97, "category_id": 98, "bbox": [1, 1, 5, 5], "iscrowd": 1})
    other.write_text(json.dumps(held_out))
    document, subject = checked(home)
    facts, rows = document["annotations"], findings(document)
    assert len(facts["outside"]) == 1 and facts["outside"][0]["box"] == [20, 10, 50, 19]
    assert len(facts["twice"]) == 1 and len(facts["twice"][0]["objects"]) == 2
    assert facts["unused"] == ["yak"] and facts["held_out"] == ["emu"] and facts["crowds"] == 1
    assert {"twice", "outside", "unused", "held_out"} <= rows.keys() and document["passed"]
    text = page(document, subject)
    assert text.count("there twice") >= 2 and "over the edge" in text and "<td>emu</td><td>1</td>" in text


def test_annotations_that_cannot_be_read_fail_the_check(tmp_path):
    home = WRITERS["voc"](tmp_path)
    Image.new("RGB", (9, 9)).save(home / "JPEGImages" / "3.png")
    document, _ = checked(home)
    assert not document["passed"] and "9 x 9 pixels" in findings(document)["annotations"]["text"]
    (home / "Annotations" / "4.xml").write_text("<a>")
    document, _ = checked(home)
    assert not document["passed"] and "4.xml" in findings(document)["refused"]["text"]


def test_pixels_of_class_maps_are_counted(tmp_path):
    document, subject = checked(write_maps(tmp_path, 4))
    facts = document["annotations"]
    assert sum(facts["pixels"].values()) == 4 * 24 * 32 and facts["pixels"]["square"] == 4 * 64 and not facts["objects"]
    assert "ground" in findings(document)["pixels"]["text"] and "images" not in document["left_out"]
    assert "share of the pixels" in page(document, subject)


def test_masks_of_objects_are_no_images_of_the_data(tmp_path):
    document, _ = checked(write_objects(tmp_path, 3))
    assert document["annotations"]["objects"] == {"object": 6} and "outside" not in findings(document)


def test_other_data_have_no_annotations(tmp_path):
    assert checked("digits")[0]["annotations"] is None
