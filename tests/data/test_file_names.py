"""Annotations are matched to images by the longest path suffix that is unique, in any Unicode normal form."""

from __future__ import annotations

import csv
import json
import unicodedata
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.data.test_split_names import write_classes, write_image
from vitreous.data.layouts.file_names import FileIndex, count_shared_end_parts, resolve_unicode_path
from vitreous.data.sources import open_data
from vitreous.errors import DataError

COMPOSED_NAME = "café"
DECOMPOSED_NAME = unicodedata.normalize("NFD", COMPOSED_NAME)
VOC_BOX = "<xmin>1</xmin><ymin>1</ymin><xmax>5</xmax><ymax>5</ymax>"


def write_coco(path: Path, boxes: dict[str, list[int]], category: str = "ant") -> None:
    images = [{"id": number, "file_name": name} for number, name in enumerate(boxes, 1)]
    rows = [{"id": n, "image_id": n, "category_id": 1, "bbox": box} for n, box in enumerate(boxes.values(), 1)]
    path.parent.mkdir(parents=True, exist_ok=True)
    document = {"images": images, "annotations": rows, "categories": [{"id": 1, "name": category}]}
    path.write_text(json.dumps(document, ensure_ascii=False))


def read_boxes(source: Path) -> dict[str, list[list[float]]]:
    data = open_data(source)
    train = data.full_train_split or data.split("train")
    return {train.name(row): train.target(row).boxes.tolist() for row in range(len(train))}


def test_files_are_found_by_the_end_of_their_path():
    assert count_shared_end_parts(("a", "b", "c"), ("x", "b", "c")) == 2
    assert count_shared_end_parts(("b", "c"), ("a", "b", "c")) == 2
    paths = [Path(name) for name in ("d/a/0.png", "d/b/0.png", "d/0.png", "d/b/1.png")]
    index = FileIndex(paths, Path("d"))
    assert index.find("upload/a/0.png", "x") == Path("d/a/0.png")
    assert index.find("C:\\photos\\b\\0.png", "x") == Path("d/b/0.png")
    assert index.find("0.png", "x") == Path("d/0.png")  # matched by the whole path below the folder
    assert index.find("elsewhere/1.png", "x") == Path("d/b/1.png")
    assert index.match("2.png", "x") is None
    with pytest.raises(DataError, match="matches 3 files"):
        index.find("c/0.png", "x")


def test_coco_images_with_equal_base_names_are_matched(tmp_path):
    for folder in "ab":
        write_image(tmp_path / "train" / "batch" / folder / "0.png")
    names = {"upload/a/0.png": [1, 1, 2, 2], "upload/b/0.png": [3, 3, 4, 4]}
    write_coco(tmp_path / "annotations" / "instances_train.json", names)
    boxes = read_boxes(tmp_path)
    assert boxes[str(tmp_path / "train/batch/a/0.png")] == [[1, 1, 3, 3]]
    assert boxes[str(tmp_path / "train/batch/b/0.png")] == [[3, 3, 7, 7]]
    write_coco(tmp_path / "annotations" / "instances_train.json", {"0.png": [1, 1, 2, 2]})
    with pytest.raises(DataError, match="matches 2 files"):
        open_data(tmp_path)


def test_duplicate_coco_image_entries_are_rejected(tmp_path):
    write_image(tmp_path / "train" / "a" / "0.png")
    names = {"upload/a/0.png": [1, 1, 2, 2], "upload/b/0.png": [3, 3, 4, 4]}
    write_coco(tmp_path / "annotations" / "instances_train.json", names)
    with pytest.raises(DataError, match="2 entries refer to the image"):
        open_data(tmp_path)


@pytest.mark.parametrize("names", [("train_a", "train_b"), ("first", "second")])
def test_several_coco_files_of_a_split_are_merged(tmp_path, names):
    for number in range(4):
        write_image(tmp_path / "images" / f"{number}.png")
    write_coco(tmp_path / "annotations" / f"{names[0]}.json", {"0.png": [1, 1, 2, 2], "1.png": [1, 1, 2, 2]})
    write_coco(tmp_path / "annotations" / f"{names[1]}.json", {"2.png": [1, 1, 2, 2], "3.png": [3, 3, 4, 4]})
    boxes = read_boxes(tmp_path)
    assert len(boxes) == 4 and boxes[str(tmp_path / "images/3.png")] == [[3, 3, 7, 7]]
    write_coco(tmp_path / "annotations" / f"{names[1]}.json", {"0.png": [1, 1, 2, 2]})
    with pytest.raises(DataError, match="2 entries refer to the image"):
        open_data(tmp_path)


def test_coco_files_with_different_categories_are_rejected(tmp_path):
    for number in range(2):
        write_image(tmp_path / "images" / f"{number}.png")
    write_coco(tmp_path / "annotations" / "train_a.json", {"0.png": [1, 1, 2, 2]})
    write_coco(tmp_path / "annotations" / "train_b.json", {"1.png": [1, 1, 2, 2]}, "bee")
    with pytest.raises(DataError, match="in another file"):
        open_data(tmp_path)
    (tmp_path / "annotations" / "train_b.json").rename(tmp_path / "annotations" / "extra.json")
    with pytest.raises(DataError, match=r"extra\.json names no split"):
        open_data(tmp_path)
    # AppleDouble files of macOS
    (tmp_path / "annotations" / "extra.json").rename(tmp_path / "annotations" / "._train_a.json")
    assert len(open_data(tmp_path).split("train")) == 1


def test_several_panoptic_files_of_a_split_are_merged(tmp_path):
    for number in range(2):
        path = tmp_path / "annotations" / f"panoptic_train_{number}.json"
        write_image(tmp_path / "images" / f"{number}.png")
        path.with_suffix("").mkdir(parents=True)
        Image.new("RGB", (12, 10), (7, 0, 0)).save(path.with_suffix("") / f"{number}.png")
        segments = [{"id": 7, "category_id": 1}]
        rows = [{"image_id": 1, "file_name": f"{number}.png", "segments_info": segments}]
        document = {"images": [{"id": 1, "file_name": f"{number}.png"}], "annotations": rows}
        path.write_text(json.dumps(document | {"categories": [{"id": 1, "name": "ant", "isthing": 1}]}))
    assert len(read_boxes(tmp_path)) == 2


def write_voc(root: Path, image: str, stem: str, name: str = "ant") -> None:
    write_image(root / "JPEGImages" / image)
    (root / "Annotations").mkdir(exist_ok=True)
    text = f"<annotation><object><name>{name}</name><bndbox>{VOC_BOX}</bndbox></object></annotation>"
    (root / "Annotations" / f"{stem}.xml").write_text(text, "utf-8")


def test_voc_files_match_their_images(tmp_path):
    write_voc(tmp_path, f"{DECOMPOSED_NAME}.jpg", COMPOSED_NAME, COMPOSED_NAME)
    write_voc(tmp_path, "1.jpg", "1", DECOMPOSED_NAME)
    assert open_data(tmp_path).classes == (COMPOSED_NAME,)
    write_image(tmp_path / "JPEGImages" / "1.png")
    with pytest.raises(DataError, match="1 matches 2 files"):
        open_data(tmp_path)


@pytest.mark.parametrize("twice", [False, True])
def test_yolo_files_match_their_images(tmp_path, twice):
    write_image(tmp_path / "images" / "train" / f"{COMPOSED_NAME}.png")
    path = tmp_path / "labels" / "train" / f"{DECOMPOSED_NAME}.txt"
    path.parent.mkdir(parents=True)
    path.write_text("0 0.5 0.5 0.5 0.5\n")
    if not twice:
        assert list(read_boxes(tmp_path).values()) == [[[3, 2.5, 9, 7.5]]]
        return
    write_image(tmp_path / "images" / "train" / f"{COMPOSED_NAME}.jpg")
    with pytest.raises(DataError, match="belongs to 2 images"):
        open_data(tmp_path)


@pytest.mark.parametrize("file_name", ["data.yaml", "classes.txt"])
def test_yolo_class_names_are_unicode_normalised(tmp_path, file_name):
    write_image(tmp_path / "images" / "train" / "0.png")
    (tmp_path / "labels" / "train").mkdir(parents=True)
    (tmp_path / "labels" / "train" / "0.txt").write_text("0 0.5 0.5 0.5 0.5\n")
    texts = {"data.yaml": f"train: images/train\nnames: [{DECOMPOSED_NAME}]\n", "classes.txt": f"{DECOMPOSED_NAME}\n"}
    (tmp_path / file_name).write_text(texts[file_name])
    assert open_data(tmp_path).classes == (COMPOSED_NAME,)


def test_mask_class_names_are_unicode_normalised(tmp_path):
    write_image(tmp_path / "images" / "0.png")
    write_image(tmp_path / "masks" / "0.png")
    (tmp_path / "classes.txt").write_text(f"ground\n{DECOMPOSED_NAME}\n")
    Image.fromarray(np.eye(10, 12, dtype=np.uint8)).save(tmp_path / "masks" / "0.png")
    assert open_data(tmp_path).classes == ("ground", COMPOSED_NAME)


def test_parquet_paths_match_their_images(tmp_path):
    import pyarrow as pa
    import pyarrow.parquet as pq

    write_image(tmp_path / "images" / f"{COMPOSED_NAME}.png")
    rows = [{"bytes": None, "path": f"images/{DECOMPOSED_NAME}.png"}] * 2
    pq.write_table(pa.table({"image": rows, "label": ["ant", "bee"]}), tmp_path / "x.parquet")
    split = open_data(tmp_path / "x.parquet").split("train")
    assert split.raw(0) == (tmp_path / "images" / f"{COMPOSED_NAME}.png").read_bytes()


def test_yolo_folder_names_are_case_insensitive(tmp_path):
    write_image(tmp_path / "images" / "Train" / "0.png")
    (tmp_path / "labels" / "train").mkdir(parents=True)
    (tmp_path / "labels" / "train" / "0.txt").write_text("0 0.5 0.5 0.5 0.5\n")
    assert len(read_boxes(tmp_path)[str(tmp_path / "images/Train/0.png")]) == 1


def test_labelme_files_match_their_images(tmp_path):
    shape = {"label": DECOMPOSED_NAME, "shape_type": "rectangle", "points": [[1, 1], [5, 5]]}
    write_image(tmp_path / f"{COMPOSED_NAME}.png")
    (tmp_path / f"{DECOMPOSED_NAME}.json").write_text(json.dumps({"shapes": [shape]}))
    assert list(read_boxes(tmp_path).values()) == [[[1, 1, 5, 5]]]
    assert open_data(tmp_path).classes == (COMPOSED_NAME,)
    write_image(tmp_path / f"{COMPOSED_NAME}.jpg")
    with pytest.raises(DataError, match="has 2 images of this name"):
        open_data(tmp_path)


def test_masks_match_their_images(tmp_path):
    write_image(tmp_path / "images" / f"{COMPOSED_NAME}.png")
    (tmp_path / "masks").mkdir()
    Image.fromarray(np.eye(10, 12, dtype=np.uint8)).save(tmp_path / "masks" / f"{DECOMPOSED_NAME}.png")
    assert open_data(tmp_path).split("train").target(0).classes.sum() == 10


def test_table_and_list_entries_match_their_images(tmp_path):
    for number, name in enumerate((f"{DECOMPOSED_NAME}/{DECOMPOSED_NAME} 0.png", f"{DECOMPOSED_NAME}/1.png")):
        write_image(tmp_path / name, number)
    rows = [(f"{COMPOSED_NAME}/{COMPOSED_NAME} 0.png", COMPOSED_NAME), (f"{COMPOSED_NAME}/1.png", "bee")]
    with (tmp_path / "t.csv").open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([("path", "label"), *rows])
    data = open_data(tmp_path / "t.csv")
    assert len(data.full_train_split) == 2 and all(Path(path).exists() for path in data.full_train_split.paths)
    with (tmp_path / "b.csv").open("w", newline="", encoding="utf-8") as file:
        boxes = [(path, "ant", 1, 1, 4, 4) for path, _ in rows] + [(f"./{rows[0][0]}", "ant", 5, 5, 8, 8)]
        csv.writer(file).writerows([("image", "class", "left", "top", "right", "bottom"), *boxes])
    assert sorted(map(len, read_boxes(tmp_path / "b.csv").values())) == [1, 2]
    (tmp_path / "train.txt").write_text(f"{rows[0][0]} 0\n{rows[1][0]} 1\n", "utf-8")
    assert len(open_data(tmp_path).full_train_split) == 2


def test_class_folders_match_across_unicode_forms(tmp_path):
    write_classes(tmp_path / "train", ("ant", DECOMPOSED_NAME))
    write_classes(tmp_path / "val", ("ant", COMPOSED_NAME))
    data = open_data(tmp_path)
    assert np.bincount(data.split("val").labels).tolist() == [3, 3]


def test_files_in_both_unicode_forms_are_distinguished(tmp_path):
    for number, name in enumerate((COMPOSED_NAME, DECOMPOSED_NAME)):
        write_image(tmp_path / f"{name}.png", number)
    assert resolve_unicode_path(tmp_path / f"{DECOMPOSED_NAME}.png") == str(tmp_path / f"{DECOMPOSED_NAME}.png")
    assert resolve_unicode_path(tmp_path / "missing.png") is None
    assert resolve_unicode_path(tmp_path / COMPOSED_NAME / "é.png") is None


def test_annotations_of_a_different_image_are_rejected(tmp_path):
    write_voc(tmp_path / "voc", "1.jpg", "1")
    write_voc(tmp_path / "voc", "2.jpg", "2")
    path = tmp_path / "voc" / "Annotations" / "2.xml"
    text = path.read_text()
    path.write_text(text.replace("<object>", "<filename>C:\\old\\elsewhere.jpg</filename><object>", 1))
    # the <filename> matches no image, so the name of the XML file is used
    assert len(read_boxes(tmp_path / "voc")) == 2
    path.write_text(text.replace("<object>", "<filename>1.jpg</filename><object>", 1))
    with pytest.raises(DataError, match=r"named like the image 2 and states the image 1\.jpg"):
        open_data(tmp_path / "voc")
    shape = {"label": "ant", "shape_type": "rectangle", "points": [[1, 1], [5, 5]]}
    for number in range(2):
        write_image(tmp_path / "labelme" / f"{number}.png")
        document = {"shapes": [shape], "imagePath": "../0.png"}
        (tmp_path / "labelme" / f"{number}.json").write_text(json.dumps(document))
    with pytest.raises(DataError, match=r"named like the image 1 and states the image 0\.png"):
        open_data(tmp_path / "labelme")
