"""Split names in all layouts, folders that are not classes, and datasets with ambiguous names."""

from __future__ import annotations

import csv
import io
import json
import tarfile
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from vitreous.data.layouts.split_names import find_split_folders, find_split_word, parse_split_name, role_names_note
from vitreous.data.sources import open_data
from vitreous.errors import DataError, UsageError


def write_image(path: Path, seed: int = 0, size: tuple[int, int] = (12, 10)) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    pixels = np.random.default_rng(seed).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
    Image.fromarray(pixels).save(path, format="JPEG" if path.suffix in (".jpg", ".jfif", ".jpe") else "PNG")
    return path


def write_classes(home: Path, classes: tuple[str, ...] = ("ant", "bee"), count: int = 3) -> None:
    for name in classes:
        for number in range(count):
            write_image(home / name / f"{number}.png", number)


def get_split_sizes(source: Path) -> dict[str, int]:
    return {name: len(split) for name, split in open_data(source).splits.items()}


def test_names_are_split_names_in_any_case():
    names = ("Training", "TEST", "Testing", "valid", "Validation", "val", "trainer", "tests")
    assert [parse_split_name(name) for name in names] == ["train", "test", "test", "val", "val", "val", None, None]
    assert find_split_word("Instances_Validation2017") == "val"
    with pytest.raises(DataError, match="two split names"):
        find_split_word("train_testing")


@pytest.mark.parametrize(
    "train,val,test", [("Training", "Validation", "Testing"), ("TRAIN", "Valid", "Test"), ("train", "val", "testing")]
)
def test_split_names_of_class_folders(tmp_path, train, val, test):
    for name, count in ((train, 3), (val, 1), (test, 2)):
        write_classes(tmp_path / name, count=count)
    assert open_data(tmp_path).classes == ("ant", "bee")
    assert get_split_sizes(tmp_path) == {"train": 6, "val": 2, "test": 4}


def test_two_folders_of_one_split_are_rejected(tmp_path):
    for name in ("train", "val", "Valid"):
        write_classes(tmp_path / name)
    with pytest.raises(DataError, match="two val splits, Valid and val"):
        open_data(tmp_path)


@pytest.mark.parametrize("inside", [True, False])
def test_split_names_of_masks(tmp_path, inside):
    for split, lower_name, count in (("Training", "train", 3), ("Testing", "test", 2)):
        for number in range(count):
            image = f"{split}/images" if inside else f"images/{split}"
            mask = f"{split}/masks" if inside else f"masks/{lower_name}"
            write_image(tmp_path / image / f"{number}.png", number)
            (tmp_path / mask).mkdir(parents=True, exist_ok=True)
            Image.fromarray(np.eye(10, 12, dtype=np.uint8)).save(tmp_path / mask / f"{number}.png")
    assert get_split_sizes(tmp_path) == {"train": 3, "test": 2}


def write_coco(path: Path, names: list[str], first: int = 1) -> None:
    rows = [{"id": first + number, "file_name": name, "width": 12, "height": 10} for number, name in enumerate(names)]
    boxes = [{"id": row["id"], "image_id": row["id"], "category_id": 1, "bbox": [1, 1, 4, 4]} for row in rows]
    path.parent.mkdir(parents=True, exist_ok=True)
    document = {"images": rows, "annotations": boxes, "categories": [{"id": 1, "name": "ant"}]}
    path.write_text(json.dumps(document))


def test_split_names_of_coco(tmp_path):
    for split in ("Training", "Testing"):
        write_image(tmp_path / split / "0.png")
        write_coco(tmp_path / "annotations" / f"instances_{split}.json", ["0.png"])
    data = open_data(tmp_path)
    assert {name: data.split(name).name(0).split("/")[-2] for name in data.splits} == {
        "train": "Training",
        "test": "Testing",
    }


def test_split_names_of_yolo_keys_and_folders(tmp_path):
    for split in ("Training", "Testing"):
        write_image(tmp_path / "images" / split / "0.png")
        (tmp_path / "labels" / split).mkdir(parents=True)
        (tmp_path / "labels" / split / "0.txt").write_text("0 0.5 0.5 0.2 0.2\n")
    assert get_split_sizes(tmp_path) == {"train": 1, "test": 1}
    (tmp_path / "data.yaml").write_text("names: [ant]\nTrain: images/Training\nVALIDATION: images/Testing\n")
    assert get_split_sizes(tmp_path) == get_split_sizes(tmp_path / "data.yaml") == {"train": 1, "val": 1}
    (tmp_path / "ants.yaml").write_text("names: [ant]\ntrain: images/Training\n")
    with pytest.raises(DataError, match=r"ants.yaml is not a dataset"):
        open_data(tmp_path / "ants.yaml")
    (tmp_path / "data.yaml").write_text("names: [ant]\ntrain: images/Training\nval: images/Testing\nvalid: images\n")
    with pytest.raises(DataError, match="two val splits, val and valid"):
        open_data(tmp_path)


def test_split_names_of_voc_lists(tmp_path):
    for number in range(3):
        write_image(tmp_path / "JPEGImages" / f"{number}.jpg")
        path = tmp_path / "Annotations" / f"{number}.xml"
        path.parent.mkdir(exist_ok=True)
        box = "<xmin>1</xmin><ymin>1</ymin><xmax>5</xmax><ymax>5</ymax>"
        path.write_text(f"<annotation><object><name>ant</name><bndbox>{box}</bndbox></object></annotation>")
    lists = tmp_path / "ImageSets" / "Main"
    lists.mkdir(parents=True)
    (lists / "Training.txt").write_text("0\n1\n")
    (lists / "valid.txt").write_text("2\n")
    (lists / "ant_train.txt").write_text("0 1\n")  # per-class list, as in Pascal VOC
    assert get_split_sizes(tmp_path) == {"train": 2, "val": 1}
    (lists / "val.txt").write_text("0\n")
    with pytest.raises(DataError, match="two val splits"):
        open_data(tmp_path)


def test_split_names_of_labelme(tmp_path):
    shape = {"label": "ant", "shape_type": "rectangle", "points": [[1, 1], [5, 5]]}
    for split in ("Training", "Testing"):
        write_image(tmp_path / split / "0.png")
        (tmp_path / split / "0.json").write_text(json.dumps({"shapes": [shape]}))
    assert get_split_sizes(tmp_path) == {"train": 1, "test": 1}


def test_split_names_in_tables_are_read(tmp_path):
    write_image(tmp_path / "0.png")
    write_image(tmp_path / "1.png")
    write_image(tmp_path / "2.png")
    rows = [("0.png", "ant", "Training"), ("1.png", "bee", "TRAIN"), ("2.png", "ant", "Testing")]
    with (tmp_path / "t.csv").open("w", newline="") as file:
        csv.writer(file).writerows([("path", "label", "split"), *rows])
    assert get_split_sizes(tmp_path / "t.csv")["test"] == 1
    with (tmp_path / "b.csv").open("w", newline="") as file:
        boxes = [(path, label, split, 1, 1, 4, 4) for path, label, split in rows]
        csv.writer(file).writerows([("image", "class", "split", "left", "top", "right", "bottom"), *boxes])
    assert get_split_sizes(tmp_path / "b.csv") == {"train": 2, "test": 1}


def test_split_names_of_lists(tmp_path):
    for number in range(3):
        write_image(tmp_path / f"{number}.png")
    (tmp_path / "Train.txt").write_text("0.png 0\n1.png 1\n")
    (tmp_path / "Testing.txt").write_text("2.png 0\n")
    assert get_split_sizes(tmp_path)["test"] == 1
    (tmp_path / "test.txt").write_text("2.png 0\n")
    with pytest.raises(DataError, match="two test splits"):
        open_data(tmp_path)


def test_split_names_of_archives_are_read(tmp_path):
    image = write_image(tmp_path / "image.png").read_bytes()
    for split, count in (("Training", 4), ("Testing", 2)):
        with tarfile.open(tmp_path / f"{split}-0.tar", "w") as archive:
            for number in range(count):
                for name, content in ((f"{number}.png", image), (f"{number}.cls", b"%d" % (number % 2))):
                    member = tarfile.TarInfo(f"{split}{name}")
                    member.size = len(content)
                    archive.addfile(member, io.BytesIO(content))
    (tmp_path / "image.png").unlink()
    data = open_data(tmp_path)
    assert (len(data.split("test")), len(data.full_train_split)) == (2, 4)


def test_split_names_of_parquet(tmp_path):
    arrow = pytest.importorskip("pyarrow")
    import pyarrow.parquet as parquet

    image = write_image(tmp_path / "image.png").read_bytes()
    for split, count in (("Training", 4), ("Testing", 2)):
        table = arrow.table({"image": [image] * count, "label": [number % 2 for number in range(count)]})
        parquet.write_table(table, tmp_path / f"{split}-00000.parquet")
    (tmp_path / "image.png").unlink()
    data = open_data(tmp_path)
    assert (len(data.split("test")), len(data.full_train_split)) == (2, 4)


def test_a_class_may_be_called_train(tmp_path):
    for name in ("bus", "car", "train"):
        write_image(tmp_path / name / "0.png")
    data = open_data(tmp_path)
    assert data.classes == ("bus", "car", "train")
    assert any("read as classes: train" in note for note in data.notes)


def test_system_folders_are_not_classes(tmp_path):
    write_classes(tmp_path)
    for name in ("@eaDir", "__MACOSX", ".thumbnails", "$RECYCLE.BIN", "lost+found"):
        write_image(tmp_path / name / "0.png")
        write_image(tmp_path / "ant" / name / "0.png")
    data = open_data(tmp_path)
    assert (data.classes, len(data.full_train_split)) == (("ant", "bee"), 6)


def test_annotation_folders_read_as_classes_are_reported(tmp_path):
    for name in ("images", "trainannot"):
        write_image(tmp_path / name / "0.png")
    assert any("read as classes: images, trainannot" in note for note in open_data(tmp_path).notes)
    assert role_names_note(["mask", "no mask"]) == []  # a common pair of classes
    assert role_names_note(["img", "mask"])


def test_folders_next_to_the_splits_are_reported(tmp_path):
    write_classes(tmp_path / "train")
    write_classes(tmp_path / "holdout")
    assert "folders next to the splits are ignored: holdout" in open_data(tmp_path).notes


def test_image_suffixes_are_read_or_reported(tmp_path):
    write_classes(tmp_path)
    write_image(tmp_path / "ant" / "9.jfif")
    Image.new("RGB", (4, 4)).save(tmp_path / "bee" / "9.ppm")
    data = open_data(tmp_path)
    assert len(data.full_train_split) == 7
    assert "1 image files are skipped, as their formats are not supported: 1 .ppm" in data.notes


def test_a_local_folder_digits_is_ambiguous(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_classes(tmp_path / "digits")
    with pytest.raises(UsageError, match="built-in dataset") as raised:
        open_data("digits")
    assert "./digits" in raised.value.hint
    assert open_data("./digits").classes == ("ant", "bee")
    (tmp_path / "digits" / "config.yaml").write_text("")  # a run with that name
    assert len(open_data("digits").classes) == 10


def test_a_missing_folder_has_no_split_folders(tmp_path):
    assert find_split_folders(tmp_path / "missing") == {}
