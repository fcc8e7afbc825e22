"""CSV datasets: accepted columns and dialects, and every error with its line."""

from __future__ import annotations

import os

import numpy as np
import pytest

from tests.conftest import make_image
from vitreous.data.holdout import draw_stratified_splits
from vitreous.data.loader import EvalLoader
from vitreous.data.modalities.images import ImagePreprocess
from vitreous.data.sources import open_data
from vitreous.data.split import require_labels
from vitreous.errors import DataError


@pytest.fixture
def table_folder(tmp_path):
    """Return a folder of twenty images for tables."""
    (tmp_path / "images").mkdir()
    for index in range(20):
        make_image(index).save(tmp_path / "images" / f"{index}.png")
    return tmp_path


def write_table(table_folder, text, encoding="utf-8"):
    (table_folder / "x.csv").write_bytes(text.encode(encoding))
    return table_folder / "x.csv"


def make_rows(labels, start=0):
    """Return lines `path,label` for images from `start` on."""
    return "".join(f"images/{start + index}.png,{label}\n" for index, label in enumerate(labels))


def get_open_error(source):
    with pytest.raises(DataError) as error:
        require_labels(open_data(source))
    return str(error.value)


def test_single_label_tables_are_read(table_folder):
    data = open_data(write_table(table_folder, "path,label\n" + make_rows(["b10", "b9", "a"] * 6)))
    assert data.classes == ("a", "b9", "b10") and not data.multilabel and data.unsplit
    train, val = data.splits["train"], data.splits["val"]
    assert train.labels.dtype == np.int64 and (len(train), len(val)) == (15, 3)
    assert not set(train.paths) & set(val.paths)
    for split in (train, val):
        for path, label in zip(split.paths, split.labels, strict=True):
            assert data.classes[label] == ["b10", "b9", "a"][int(path.stem) % 3]
    assert data.notes == ["held out 3 of 18 training images for validation (split seed 0)"]


def test_multilabel_tables_are_read(table_folder):
    text = (
        "label,split,path\ncat|dog,train,images/0.png\ndog,valid,images/1.png\n,validation,images/2.png\n dog | "
        "cat "
        ",test,images/3.png\n"
    )
    data = open_data(write_table(table_folder, text))
    assert data.multilabel and not data.unsplit and list(data.splits) == ["train", "val", "test"]
    labels_by_split = {name: split.labels.tolist() for name, split in data.splits.items()}
    assert labels_by_split == {"train": [[1, 1]], "val": [[0, 1], [0, 0]], "test": [[1, 1]]}
    assert data.splits["val"].labels.dtype == np.float32
    assert data.notes == ["multi-label: 2 of 4 images have several labels, 1 have none"]


def test_image_paths_are_relative_to_the_table(table_folder, monkeypatch):
    source = write_table(table_folder, "path,label\n" + make_rows("ab" * 8) + f"{table_folder}/images/16.png,a\n")
    absolute = open_data(source)
    monkeypatch.chdir(table_folder.parent)
    relative = open_data(os.path.join(table_folder.name, "x.csv"))
    assert relative.fingerprint() == absolute.fingerprint()
    for data in (absolute, relative):
        _, images = next(EvalLoader(data.splits["train"], ImagePreprocess((16, 16))).iterate_batches(100))
        assert not any(isinstance(image, DataError) for image in images)


@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig"])
def test_csv_dialects_and_byte_order_marks_are_read(table_folder, end, encoding):
    names = ['a, "b".png', "é.png", " c.png", "last\nline.png"]
    for name in names:
        make_image(1).save(table_folder / name)
    rows = [f'"{name}"'.replace('"b"', '""b""') + f",{label}" for name, label in zip(names, "xxyy", strict=True)]
    data = open_data(write_table(table_folder, end.join(['path,"label"', "", *rows, ""]), encoding))
    assert {path.name for split in data.splits.values() for path in split.paths} == set(names)
    assert data.classes == ("x", "y")


INVALID_TABLES = {
    "nothing": ("", "is empty"),
    "blank lines": ("\n\n", "x.csv is empty"),
    "no rows": ("path,label\n", "x.csv has no rows"),
    "no header": (make_rows("ab"), "line 1: unknown column images/0.png"),
    "other column": ("path,labels\n" + make_rows("ab"), "line 1: unknown column labels\n  did you mean label?"),
    "no such column": ("path,split\nimages/0.png,train\n", "x.csv: no column label"),
    "column twice": ("path,label,path\n", "line 1: two columns path"),
    "semicolons": ("path;label\nimages/0.png;a\n", "separate cells with commas"),
    "too many cells": ("path,label\n" + make_rows("ab") + "images/2.png,a,b\n", "line 4: 3 cells for 2 columns"),
    "too few cells": ("path,label\nimages/0.png\n", "line 2: 1 cells for 2 columns"),
    "no path": ("path,label\n" + make_rows("ab") + ",a\n", "line 4: no path"),
    "empty label": ("path,label\nimages/0.png,a||b\n", "line 2: an empty label in a||b"),
    "open quote": ('path,label\nimages/0.png,a\n"images/1.png,b\n', "line 3: not CSV"),
    "text after a quote": ('path,label\n"images/0.png"x,a\n', "line 2: not CSV"),
    "an endless cell": (f"path,label\n{'x' * 200_000},a\n", "line 2: not CSV"),
    "line of a row after one of two lines": ('path,label\n"no\nsuch.png",a\nimages/1.png\n', "line 4: 1 cells"),
    "other split": ("path,label,split\nimages/0.png,a,vall\n", "line 2: unknown split vall\n  did you mean val?"),
    "no split": ("path,label,split\nimages/0.png,a,\n", "line 2: no split"),
    "no training": ("path,label,split\nimages/0.png,a,test\n", "test but no rows of the split train"),
    "one class": ("path,label\n" + make_rows("aa"), "one class only (a)"),
    "no class": ("path,label\n" + make_rows(["", ""]), "x.csv has no labels"),
    "new class": (
        "path,label,split\nimages/0.png,cat,train\nimages/1.png,dog,train\nimages/2.png,cats,test\n",
        "line 4: test has classes that train lacks: cats\n  did you mean cat?",
    ),
    "case": ("path,label\n" + make_rows(["cat", "Cat", "dog"]), "differ only in case"),
    "contradictory labels": (
        "path,label\n" + make_rows("ab") + "./images/0.png,b\n",
        "1 rows contradict the labels of an earlier row:\n    line 4",
    ),
    "missing": (
        "path,label\n" + make_rows("ab" * 3) + "images/x.png,a\n",
        "1 of 7 files are missing:\n    line 8: images/x.png",
    ),
    "a NUL": ("path,label\n" + make_rows("ab") + "images/\0.png,a\n", "line 4: NUL bytes"),
}


@pytest.mark.parametrize("fault", INVALID_TABLES)
def test_invalid_tables_are_reported_with_their_line(table_folder, fault):
    text, expected = INVALID_TABLES[fault]
    assert expected in get_open_error(write_table(table_folder, text))


def test_invalid_bytes_are_reported_with_their_line(table_folder):
    (table_folder / "x.csv").write_bytes("path,label\nimages/0.png,a\nimages/1.png,caf\xe9\n".encode("latin-1"))
    assert "line 3: byte 0xE9 is not valid UTF-8" in get_open_error(table_folder / "x.csv")
    assert "looks like UTF-16 LE" in get_open_error(write_table(table_folder, "path,label\n", "utf-16-le"))


def test_the_first_20_missing_files_are_listed(table_folder):
    message = get_open_error(write_table(table_folder, "path,label\n" + "".join(f"{index},a\n" for index in range(25))))
    assert "25 of 25 files are missing" in message and "line 21: 19" in message
    assert "line 22" not in message and "and 5 more" in message


def test_missing_or_special_tables_are_rejected(table_folder):
    assert "no such file" in get_open_error(table_folder / "y.csv")
    (table_folder / "nowhere.csv").symlink_to(table_folder / "gone.csv")
    assert "nowhere.csv: cannot be read (No such file" in get_open_error(table_folder / "nowhere.csv")
    os.mkfifo(table_folder / "pipe.csv")
    assert "not a regular file" in get_open_error(table_folder / "pipe.csv")
    (table_folder / "z.txt").write_text("path,label\n")
    assert "is a file, not a dataset" in get_open_error(table_folder / "z.txt")


def test_duplicate_rows_and_split_overlaps_are_reported(table_folder):
    text = "path,label,split\nimages/0.png,a,train\nimages/1.png,b,train\nimages/0.png,a,train\nimages/1.png,b,test\n"
    data = open_data(write_table(table_folder, text))
    assert len(data.splits["train"]) == 2 and len(data.splits["test"]) == 1
    assert data.notes[:2] == [
        "1 rows are duplicates and are ignored",
        "1 images are in more than one split; the first is images/1.png",
    ]


def test_the_fingerprint_covers_labels_and_order(table_folder):
    texts = [
        "path,label\n" + make_rows(["a", "b", "a|b"] * 4),
        "path,label\n" + make_rows(["a", "b", "b"] * 4),
        "path,label\n" + make_rows(["a", "b|a", "a"] * 4),
    ]
    fingerprints = [open_data(write_table(table_folder, text)).fingerprint() for text in texts]
    assert len(set(fingerprints)) == 3
    assert open_data(write_table(table_folder, texts[0])).fingerprint() == fingerprints[0]


def test_multilabel_splits_keep_every_class_in_train():
    labels = (np.random.default_rng(0).random((200, 12)) < 0.1).astype(np.float32)
    labels[:, 11] = 0
    labels[7, 11] = 1  # the only image of its class
    for seed in range(20):
        split_rows = draw_stratified_splits(labels, seed, {"val": 0.1, "test": 0.25})
        assert {name: len(rows) for name, rows in split_rows.items()} == {"train": 130, "val": 20, "test": 50}
        assert sorted(np.concatenate(list(split_rows.values()))) == list(range(200))
        assert 7 in split_rows["train"] and (labels[split_rows["train"]].sum(0) > 0).all()
    assert all(
        np.array_equal(split_rows[name], rows)
        for name, rows in draw_stratified_splits(labels, seed, {"val": 0.1, "test": 0.25}).items()
    )
    assert not np.array_equal(split_rows["val"], draw_stratified_splits(labels, 0, {"val": 0.1, "test": 0.25})["val"])
    single_class_labels = np.eye(4, dtype=np.float32)
    assert len(draw_stratified_splits(single_class_labels, 0, {"val": 0.5})["val"]) == 0


@pytest.mark.parametrize(
    "text", ["path\n" + make_rows([""] * 12).replace(",", ""), "path,label\n" + make_rows("a" * 12)]
)
def test_without_two_classes_the_images_have_no_labels(table_folder, text):
    data = open_data(write_table(table_folder, text))
    assert data.classes == () and not data.labelled and [len(split) for split in data.splits.values()] == [11, 1]
    assert data.splits["train"].labels.shape == (11, 0)
