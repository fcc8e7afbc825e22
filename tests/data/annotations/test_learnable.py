"""Objects that cannot be trained on are counted by reason; data without usable objects are rejected."""

import json
import re
import shutil

import numpy as np
import pytest
from PIL import Image

from tests.conftest import run_cli
from tests.data.annotations.scenery import write_maps, write_objects
from tests.data.annotations.test_panoptic import write_panoptic
from tests.data.annotations.writing_scenes import FORMAT_WRITERS, save_image, write_coco, write_yolo
from vitreous.apps.curation.check import check_dataset
from vitreous.data.annotations.fields import read_flag
from vitreous.data.annotations.learnable import find_unlearnable, require_learnable
from vitreous.data.sources import open_data
from vitreous.errors import DataError

DETECT_ARGUMENTS = (
    "--recipe",
    "detect",
    "--model",
    "ViT-32x2/8",
    "--image-size",
    "32",
    "--steps",
    "1",
    "--workers",
    "0",
)


def edit_json(path, change):
    document = json.loads(path.read_text())
    change(document)
    path.write_text(json.dumps(document))


def edit_annotations(home, **values):
    """Write COCO data and set the `values` in every annotation."""
    write_coco(home)
    for path in (home / "annotations").iterdir():
        edit_json(path, lambda document: [entry.update(values) for entry in document["annotations"]])
    return home


def rewrite_texts(home, pattern, change):
    for path in home.rglob(pattern):
        path.write_text(change(path.read_text()))
    return home


def write_crowds(home):
    return edit_annotations(home, iscrowd=1)


def write_difficult(home):
    FORMAT_WRITERS["voc"](home)
    return rewrite_texts(home, "*.xml", lambda text: text.replace("</name>", "</name><difficult>1</difficult>"))


def write_empty_boxes(home):
    return edit_annotations(home, bbox=[3, 3, 0, 0], segmentation=[])


def write_boxes_outside(home):
    return edit_annotations(home, bbox=[300, 300, 20, 20], segmentation=[])


def write_shares(home):
    return edit_annotations(home, bbox=[0.1, 0.2, 0.4, 0.4], segmentation=[])


def write_voc_shares(home):
    FORMAT_WRITERS["voc"](home)
    return rewrite_texts(
        home, "*.xml", lambda text: re.sub(r"(<[xy]m\w\w>)(\d+)", lambda m: f"{m[1]}{int(m[2]) / 40}", text)
    )


def write_labelme_shares(home):
    FORMAT_WRITERS["labelme"](home)

    def divide_points(document):
        for entry in document["shapes"]:
            entry["points"] = [[x / 40, y / 40] for x, y in entry["points"]]

    for path in home.rglob("*.json"):
        edit_json(path, divide_points)
    return home


def write_csv_shares(home):
    rows = "".join(f"{number}.png,cat,0.1,0.2,0.5,0.6\n" for number in range(8))
    return write_table(home, "image,label,xmin,ymin,xmax,ymax\n" + rows)


def write_csv_sizes(home):
    rows = "".join(f"{number}.png,1024,768,cat,3,3,9,9\n" for number in range(8))
    return write_table(home, "filename,width,height,class,xmin,ymin,xmax,ymax\n" + rows)


def write_table(home, text):
    for number in range(8):
        save_image(home / f"{number}.png", number)
    (home / "boxes.csv").write_text(text)
    return home / "boxes.csv"


def write_voc_sizes(home):
    FORMAT_WRITERS["voc"](home)
    return rewrite_texts(home, "*.xml", lambda text: text.replace("<width>32<", "<width>64<"))


def write_no_labels(home):
    write_yolo(home)
    shutil.rmtree(home / "labels")
    return home


def write_empty_labels(home):
    return rewrite_texts(write_yolo(home), "*.txt", lambda text: "")


def write_no_shapes(home):
    FORMAT_WRITERS["labelme"](home)
    for path in home.rglob("*.json"):
        edit_json(path, lambda document: document.update(shapes=[]))
    return home


def write_empty_masks(home):
    write_objects(home)
    for path in home.glob("*/masks/*.png"):
        Image.new("L", (32, 24)).save(path)
    return home


def write_constant_maps(home, value=0):
    write_maps(home)
    for path in (home / "masks").iterdir():
        Image.new("L", (32, 24), value).save(path)
    return home


def write_unknown_maps(home):
    write_constant_maps(home, 255)
    Image.fromarray(np.full((24, 32), 255, np.uint8)).save(home / "masks" / "0.png")
    return home


UNLEARNABLE_WRITERS = {
    write_crowds: "crowds",
    write_difficult: "crowds",
    write_empty_boxes: "without area",
    write_boxes_outside: "outside their image",
    write_shares: "relative coordinates, not pixels",
    write_voc_shares: "relative coordinates, not pixels",
    write_labelme_shares: "relative coordinates, not pixels",
    write_csv_shares: "relative coordinates, not pixels",
    write_csv_sizes: "32 x 24 pixels, .*boxes.csv states 1024 x 768",
    write_voc_sizes: "states 64 x 24",
    write_no_labels: "label files do not exist",
    write_empty_labels: "none of 3 training images has an annotated object",
    write_no_shapes: "none of 3 training images has an annotated object",
    write_empty_masks: "no object on 4 training images is usable",
    write_constant_maps: r"has one class \(ground\)",
    write_unknown_maps: "has one class",
}


@pytest.mark.parametrize("write", UNLEARNABLE_WRITERS, ids=lambda write: write.__name__)
def test_unlearnable_data_are_rejected(tmp_path, write):
    source = write(tmp_path / "data")
    maps = "maps" in write.__name__
    with pytest.raises(DataError, match=UNLEARNABLE_WRITERS[write]) as error:
        require_learnable(open_data(str(source)), "classes" if maps else "objects")
    assert error.value.hint and error.value.code == 3
    document, _ = check_dataset(str(source), workers=0)
    finding = next(row for row in document["findings"] if row["code"] == "target_error")
    assert not document["passed"] and finding["level"] == "error"
    assert re.search(UNLEARNABLE_WRITERS[write], finding["message"])


@pytest.mark.parametrize("form", FORMAT_WRITERS)
def test_valid_data_are_learnable(tmp_path, form):
    data = open_data(str(FORMAT_WRITERS[form](tmp_path)))
    assert find_unlearnable(data) is None and not any("are unusable" in note for note in data.notes)


def test_data_check_rejects_unlearnable_data(tmp_path):
    source = write_crowds(tmp_path / "data")
    trained = run_cli("train", str(source), *DETECT_ARGUMENTS, "--out", str(tmp_path / "run"))
    assert trained.returncode == 3 and "crowds" in trained.stderr and not (tmp_path / "run").exists()
    checked = run_cli("data", "check", str(source))
    assert checked.returncode != 0 and "crowds" in checked.stdout + checked.stderr


def test_panoptic_crowds_are_in_class_maps_but_not_objects(tmp_path):
    write_panoptic(tmp_path)

    def set_crowd(document):
        for entry in document["annotations"]:
            for segment in entry["segments_info"]:
                segment["iscrowd"] = "1"

    for path in (tmp_path / "annotations").glob("*.json"):
        edit_json(path, set_crowd)
    data = open_data(str(tmp_path))
    assert find_unlearnable(data, "classes") is None and find_unlearnable(data) is None
    with pytest.raises(DataError, match="no object on 3 training images"):
        require_learnable(data, "objects")


@pytest.mark.parametrize(
    ("value", "flag"),
    [(0, False), (1, True), ("0", False), ("1", True), (False, False), (True, True), (None, False), (1.0, True)]
    + [("false", False), (" True ", True), ("", False)],
)
def test_boolean_flags_are_parsed_from_numbers_and_text(value, flag):
    assert read_flag(value, "iscrowd", "x.json") is flag


@pytest.mark.parametrize("value", [2, -1, "yes", [], {}, 0.5, "2"])
def test_invalid_flags_are_rejected(tmp_path, value):
    with pytest.raises(DataError, match=r"annotation .*iscrowd .* is not 0 or 1"):
        open_data(str(edit_annotations(tmp_path, iscrowd=value)))


def test_text_zero_is_no_crowd(tmp_path):
    data = open_data(str(edit_annotations(tmp_path, iscrowd="0")))
    assert not any(data.split("train").target(sample).crowd.any() for sample in range(3))


def test_the_share_of_unusable_objects_is_reported(tmp_path):
    write_coco(tmp_path)
    path = tmp_path / "annotations" / "instances_train2017.json"
    edit_json(path, lambda document: document["annotations"][0].update(bbox=[99, 99, 5, 5], segmentation=[]))
    notes = open_data(str(tmp_path)).notes
    assert any(
        re.search(r"train: 1 of 4 objects \(25%\).*1 boxes outside their image.*instances_train", n) for n in notes
    )


def test_boxes_outside_their_images_are_reported(tmp_path):
    boxes = {"quarter": (1, 1, 10, 10), "beyond": (20, 2, 40, 10)}
    texts = {"quarter": "upper left quarter", "beyond": "over the edge"}
    for name, box in boxes.items():
        home = tmp_path / name
        lines = ["image,label,xmin,ymin,xmax,ymax"]
        for number in range(12):
            save_image(home / f"{number}.png", number)
            lines += [f"{number}.png,cat,{','.join(map(str, box))}"] * 2
        (home / "boxes.csv").write_text("\n".join(lines))
        assert any(texts[name] in note for note in open_data(str(home / "boxes.csv")).notes)


def test_box_size_columns_are_not_image_sizes(tmp_path):
    rows = "".join(f"{number}.png,6,6,cat,3,3,9,9\n" for number in range(8))
    source = write_table(tmp_path, "filename,width,height,class,xmin,ymin,xmax,ymax\n" + rows)
    data = open_data(str(source))
    assert find_unlearnable(data) is None and data.split("train").target(0).boxes.tolist() == [[3, 3, 9, 9]]


def write_pose(home, values, declared=True, polygons=False):
    """Write YOLO labels with two keypoints after each box."""
    write_yolo(home)
    points = "0.4 0.4 2 0.6 0.6 0" if values == 3 else "0.4 0.4 0.6 0.6"
    for path in (home / "labels").rglob("*.txt"):
        path.write_text(f"0 0.5 0.5 0.5 0.5 {points}\n1 0.5 0.5 0.25 0.25 {points}\n")
    config = home / "data.yaml"
    kpt_shape = f"kpt_shape: [2, {values}]\n" if declared else "kpt_shape: null\n" if polygons else ""
    config.write_text(config.read_text() + kpt_shape)
    return home


@pytest.mark.parametrize("values", [2, 3])
def test_keypoints_are_ignored(tmp_path, values):
    data = open_data(str(write_pose(tmp_path, values)))
    target = data.split("train").target(0)
    assert target.boxes.tolist() == [[8, 6, 24, 18], [12, 9, 20, 15]] and target.layers is None
    assert any("keypoints" in note for note in data.notes)


@pytest.mark.parametrize("values", [2, 3])
def test_undeclared_keypoints_are_rejected(tmp_path, values):
    home = write_pose(tmp_path / "unstated", values, declared=False)
    with pytest.raises(DataError, match="2 keypoints") as error:
        open_data(str(home))
    assert f"kpt_shape: [2, {values}]" in error.value.hint
    if values == 2:
        home = write_pose(tmp_path / "polygons", values, declared=False, polygons=True)
        assert open_data(str(home)).split("train").target(0).layers is not None


def test_an_undeclared_single_keypoint_suggests_kpt_shape(tmp_path):
    write_yolo(tmp_path)
    (tmp_path / "labels" / "train" / "0.txt").write_text("0 0.5 0.5 0.5 0.5 0.4 0.4 2\n")
    with pytest.raises(DataError) as error:
        open_data(str(tmp_path))
    assert "kpt_shape: [1, 3]" in error.value.hint


@pytest.mark.parametrize("shape", ["3", "[17]", "[0, 2]", "[17, 4]", "[a, b]"])
def test_damaged_kpt_shapes_are_rejected(tmp_path, shape):
    home = write_pose(tmp_path, 2, declared=False)
    (home / "data.yaml").write_text((home / "data.yaml").read_text() + f"kpt_shape: {shape}\n")
    with pytest.raises(DataError, match="kpt_shape"):
        open_data(str(home))


@pytest.mark.parametrize("config", [True, False])
def test_label_files_in_image_folders_are_read(tmp_path, config):
    expected = open_data(str(write_yolo(tmp_path / "usual"))).split("train").target(0)
    home = write_yolo(tmp_path / "beside")
    for path in (home / "labels").rglob("*.txt"):
        shutil.move(path, home / "images" / path.relative_to(home / "labels"))
    shutil.rmtree(home / "labels")
    if not config:
        (home / "data.yaml").unlink()
        (home / "classes.txt").write_text("cat\ndog\nowl\n")
    assert np.array_equal(open_data(str(home)).split("train").target(0).boxes, expected.boxes)


def test_a_yolo_dataset_without_label_files_is_rejected(tmp_path):
    home = write_no_labels(tmp_path / "data")
    trained = run_cli("train", str(home), *DETECT_ARGUMENTS[2:], "--out", str(tmp_path / "run"))
    assert trained.returncode == 3 and "label files do not exist" in trained.stderr


@pytest.mark.parametrize(("mark", "encoding"), [(";", "utf-8-sig"), ("\t", "utf-16")])
def test_spreadsheet_box_tables_are_read(tmp_path, mark, encoding):
    rows = "".join(f"{number}.png,cat,3,3,9,9\n" for number in range(8))
    source = write_table(tmp_path, "")
    source.write_bytes(("image,class,left,top,right,bottom\n" + rows).replace(",", mark).encode(encoding))
    assert open_data(str(source)).split("train").target(0).boxes.tolist() == [[3, 3, 9, 9]]
