"""`data check` of datasets with boxes and masks."""

import json
import re
import shutil

import numpy as np
import pytest
from PIL import Image

from tests.conftest import make_folder
from tests.data.annotations.scenery import write_maps, write_objects
from tests.data.annotations.writing_scenes import CLASSES, FORMAT_WRITERS, make_objects, write_coco, write_voc
from vitreous.apps.curation.check import check_dataset
from vitreous.apps.curation.checks.page import render_check_page
from vitreous.apps.curation.pack import pack_dataset
from vitreous.cli.main import run_command
from vitreous.data.sources import open_data
from vitreous.data.split import require_labels
from vitreous.errors import DataError, UsageError
from vitreous.models.names import choose_default_image_size


def check_source(source):
    return check_dataset(str(source), workers=0)


def get_findings_by_code(document):
    return {row["code"]: row for row in document["findings"]}


@pytest.mark.parametrize("form", FORMAT_WRITERS)
def test_objects_are_counted(tmp_path, form):
    document, _ = check_source(FORMAT_WRITERS[form](tmp_path))
    annotations = document["annotations"]
    labels = [label for number in range(5) for label, _ in make_objects(number)]
    assert annotations["objects"] == {name: labels.count(number) for number, name in enumerate(CLASSES)}
    assert (
        annotations["object_sizes"] == {"small": len(labels), "medium": 0, "large": 0}
        and annotations["without_objects"] == 1
    )
    assert f"{len(labels)} objects" in get_findings_by_code(document)["objects"]["message"]
    assert "ignored_files" not in get_findings_by_code(document)  # annotation files are not counted as ignored files


def test_invalid_objects_are_reported(tmp_path):
    home = write_coco(tmp_path)
    path = home / "annotations" / "instances_train2017.json"
    document = json.loads(path.read_text())
    image = document["images"][0]["id"]
    boxes = [[20, 10, 30, 9], [1, 1, 10, 10], [1, 1, 10, 10.2], [1, 1, 10, 10]]
    for number, box in enumerate(boxes):
        category = 10 if number == 3 else 5
        document["annotations"].append({"id": 900 + number, "image_id": image, "category_id": category, "bbox": box})
    document["categories"].append({"id": 99, "name": "yak"})
    path.write_text(json.dumps(document))
    val_file = home / "annotations" / "instances_val2017.json"
    held_out = json.loads(val_file.read_text())
    held_out["categories"].append({"id": 98, "name": "emu"})
    held_out["annotations"].append({"id": 1, "image_id": 97, "category_id": 98, "bbox": [1, 1, 5, 5], "iscrowd": 1})
    val_file.write_text(json.dumps(held_out))
    document, subject = check_source(home)
    annotations, rows = document["annotations"], get_findings_by_code(document)
    assert len(annotations["out_of_bounds"]) == 1 and annotations["out_of_bounds"][0]["box"] == [20, 10, 50, 19]
    assert len(annotations["duplicates"]) == 1 and len(annotations["duplicates"][0]["objects"]) == 2
    assert (
        annotations["unused_classes"] == ["yak"]
        and annotations["classes_missing_in_train"] == ["emu"]
        and annotations["crowd_regions"] == 1
    )
    assert {"duplicates", "out_of_bounds", "unused_classes", "classes_missing_in_train"} <= rows.keys() and document[
        "passed"
    ]
    text = render_check_page(document, subject)
    assert (
        text.count("duplicate") >= 2
        and "1 object partly or fully outside the image" in text
        and "<td>emu</td><td>1</td>" in text
    )


def test_unreadable_annotations_fail_the_check(tmp_path):
    home = FORMAT_WRITERS["voc"](tmp_path)
    Image.new("RGB", (9, 9)).save(home / "JPEGImages" / "3.png")
    document, _ = check_source(home)
    assert not document["passed"] and "9 x 9 pixels" in get_findings_by_code(document)["annotations"]["message"]
    (home / "Annotations" / "4.xml").write_text("<a>")
    document, _ = check_source(home)
    assert not document["passed"] and "4.xml" in get_findings_by_code(document)["layout_error"]["message"]


def test_class_map_pixels_are_counted(tmp_path):
    document, subject = check_source(write_maps(tmp_path, 4))
    annotations = document["annotations"]
    assert (
        sum(annotations["pixels"].values()) == 4 * 24 * 32
        and annotations["pixels"]["square"] == 4 * 64
        and not annotations["objects"]
    )
    assert "ground" in get_findings_by_code(document)["pixels"]["message"] and "images" not in document["ignored_files"]
    assert "<th>share of pixels</th>" in render_check_page(document, subject)


def test_object_masks_are_not_counted_as_images(tmp_path):
    document, _ = check_source(write_objects(tmp_path, 3))
    assert document["annotations"]["objects"] == {"object": 6} and "ignored_images" not in get_findings_by_code(
        document
    )


def test_classification_data_have_no_annotations(tmp_path):
    assert check_source("digits")[0]["annotations"] is None


def enlarge_images(home, size=(700, 700)):
    """Replace all images below a folder with larger noise images."""
    draw = np.random.default_rng(0)
    for path in sorted(home.rglob("*.png")):
        Image.fromarray(draw.integers(0, 255, (*size, 3), np.uint8)).save(path)


@pytest.mark.parametrize(("form", "side"), [("voc", 320), ("maps", 256)])
def test_image_sizes_are_compared_with_the_task_input_size(tmp_path, form, side):
    if form == "voc":
        FORMAT_WRITERS[form](tmp_path)
        enlarge_images(tmp_path)
        for path in (tmp_path / "Annotations").glob("*.xml"):
            text = path.read_text()
            path.write_text(re.sub(r"<size>.*?</size>", "", text, flags=re.DOTALL))
        first = tmp_path / "JPEGImages" / "0.png"
    else:
        write_maps(tmp_path)
        enlarge_images(tmp_path / "images")
        for path in (tmp_path / "masks").iterdir():
            Image.open(path).resize((700, 700), Image.Resampling.NEAREST).save(path)
        first = tmp_path / "images" / "0.png"
    document, _ = check_dataset(str(tmp_path), workers=0, image_size=choose_default_image_size)
    finding = get_findings_by_code(document)["large"]
    start = f"100% of the images are at least twice as large as the model input ({side} pixels)"
    assert finding["message"] == f"{start}, which wastes decoding time; the first: {first}"
    expected_hint = (
        "packs do not store annotations: if decoding limits training, downscale images and annotations together"
    )
    assert finding["hint"] == expected_hint


def test_duplicate_images_with_different_objects_are_reported(tmp_path):
    home = write_coco(tmp_path)
    images = home / "train2017"
    shutil.copy(images / "0.png", images / "2.png")
    document, _ = check_source(home)
    rows = {code: row["message"] for code, row in get_findings_by_code(document).items()}
    pair = f"; the first: {images / '2.png'} and {images / '0.png'}"
    assert rows["conflicting_labels"] == f"1 image found with different classes{pair}"
    assert not any("label" in text for text in rows.values())


def test_a_parent_folder_of_the_dataset_suggests_the_dataset(tmp_path, capsys):
    for number, depth in enumerate(("cells", "release/cells")):
        root = tmp_path / str(number)
        home = root / depth
        write_voc(home)
        assert run_command(["data", "check", str(root), "--workers", "0"]) == 1
        assert f"\n    did you mean {home}?\nnote: " in capsys.readouterr().out
        with pytest.raises(DataError) as error:
            require_labels(open_data(root))
        assert error.value.hint == f"did you mean {home}?"


@pytest.mark.parametrize("inner", ["photos", "photos/train", "labels.csv"])
def test_nested_class_folders_and_tables_are_suggested(tmp_path, inner):
    if inner == "labels.csv":
        make_folder(tmp_path, {"": 2}, classes=("all",))
        (tmp_path / inner).write_text("path,label\nall/0.png,ant\nall/1.png,bee\n")
    else:
        make_folder(tmp_path / "photos", {inner.removeprefix("photos").strip("/"): 2})
    with pytest.raises(DataError) as error:
        require_labels(open_data(tmp_path))
    assert error.value.hint == f"did you mean {tmp_path / inner.removesuffix('/train')}?"


def test_findings_name_a_file(tmp_path):
    make_folder(tmp_path, {"train": 3, "val": 3}, classes=("ant", "bee"))
    file_names = {"alpha": "train/ant/0.png", "one_colour": "train/ant/1.png", "wrong_extension": "train/bee/0.jpg"}
    Image.effect_noise((16, 16), 90).convert("RGBA").save(tmp_path / file_names["alpha"])
    Image.new("RGB", (16, 16), (1, 2, 3)).save(tmp_path / file_names["one_colour"])
    (tmp_path / "train/bee/0.png").rename(tmp_path / file_names["wrong_extension"])
    (tmp_path / "train/bee/1.png").write_bytes(b"junk")
    (tmp_path / "notes.md").write_text("x")
    shutil.copy(tmp_path / "train/bee/2.png", tmp_path / "val/ant/9.png")
    document, _ = check_source(tmp_path)
    rows = {code: row["message"] for code, row in get_findings_by_code(document).items()}
    for code, path in (*file_names.items(), ("unreadable", "train/bee/1.png"), ("ignored_files", "notes.md")):
        assert rows[code].endswith(f"; the first: {tmp_path / path}"), code
    pair = f"; the first: {tmp_path / 'train/bee/2.png'} and {tmp_path / 'val/ant/9.png'}"
    assert rows["leak"] == f"1 image of val is an exact duplicate of train images{pair}"
    assert rows["conflicting_labels"] == f"1 image found under two labels{pair}"


def test_annotations_next_to_class_folders_are_reported(tmp_path):
    make_folder(tmp_path, {"": 3})
    (tmp_path / "boxes.json").write_text('{"images": [], "annotations": [], "categories": []}')
    document, _ = check_source(tmp_path)
    note = f"the annotations in {tmp_path / 'boxes.json'} are not used: `train` needs --recipe"
    assert note in document["notes"]


@pytest.mark.parametrize("write", [write_coco, write_maps, write_objects])
def test_packs_refuse_annotations(tmp_path, write):
    data = write(tmp_path / "data")
    with pytest.raises(UsageError) as error:
        pack_dataset(data, tmp_path / "packed")
    message = f"{data} has annotations, but a pack stores only images and their classes"
    assert error.value.message == message
    assert error.value.hint == f"train without a pack: vitreous train {data}"
    assert not (tmp_path / "packed").exists()
