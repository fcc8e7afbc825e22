"""CSV files: what they may say, and every fault with its line."""

from __future__ import annotations

import os

import numpy as np
import pytest

from tests.conftest import picture
from vitreous.data.holdout import draw_stratified_splits
from vitreous.data.loader import EvalLoader
from vitreous.data.modalities.images import ImagePreprocess
from vitreous.data.sources import open_data
from vitreous.data.split import require_labels
from vitreous.errors import DataError


@pytest.fixture
def table_folder(tmp_path):
    """Twenty images to list."""
    (tmp_path / "images").mkdir()
    for index in range(20):
        picture(index).save(tmp_path / "images" / f"{index}.png")
    return tmp_path


def write(table_folder, text, encoding="utf-8"):
    (table_folder / "x.csv").write_bytes(text.encode(encoding))
    return table_folder / "x.csv"


def lines(labels, start=0):
    """Rows of `path,label` for images from `start` on."""
    return "".join(f"images/{start + index}.png,{label}\n" for index, label in enumerate(labels))


def refusal(source):
    with pytest.raises(DataError) as error:
        require_labels(open_data(source))
    return str(error.value)


def test_one_label_an_image(table_folder):
    data = open_data(write(table_folder, "path,label\n" + lines(["b10", "b9", "a"] * 6)))
    assert data.classes == ("a", "b9", "b10") and not data.multilabel and data.unsplit
    train, val = data.splits["train"], data.splits["val"]
    assert train.labels.dtype == np.int64 and (len(train), len(val)) == (15, 3)
    assert not set(train.paths) & set(val.paths)
    for split in (train, val):
        for path, label in zip(split.paths, split.labels, strict=True):
            assert data.classes[label] == ["b10", "b9", "a"][int(path.stem) % 3]
    assert data.notes == ["held out 3 of 18 training images for validation (split seed 0)"]


def test_several_labels_an_image_and_none(table_folder):
    text = (
        "label,split,path\ncat|dog,train,images/0.png\ndog,valid,images/1.png\n,validation,images/2.png\n dog | "
        "cat "
        ",test,images/3.png\n"
    )
    data = open_data(write(table_folder, text))
    assert data.multilabel and not data.unsplit and list(data.splits) == ["train", "val", "test"]
    found = {name: split.labels.tolist() for name, split in data.splits.items()}
    assert found == {"train": [[1, 1]], "val": [[0, 1], [0, 0]], "test": [[1, 1]]}
    assert data.splits["val"].labels.dtype == np.float32
    assert data.notes == ["multi-label: 2 of 4 images have several labels, 1 have none"]


def test_pictures_are_found_beside_the_file_from_anywhere(table_folder, monkeypatch):
    source = write(table_folder, "path,label\n" + lines("ab" * 8) + f"{table_folder}/images/16.png,a\n")
    absolute = open_data(source)
    monkeypatch.chdir(table_folder.parent)
    relative = open_data(os.path.join(table_folder.name, "x.csv"))
    assert relative.fingerprint() == absolute.fingerprint()
    for data in (absolute, relative):
        _, images = next(EvalLoader(data.splits["train"], ImagePreprocess((16, 16))).iterate_batches(100))
        assert not any(isinstance(image, DataError) for image in images)


@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig"])
def test_quotes_line_ends_blank_lines_and_a_mark_at_the_start(table_folder, end, encoding):
    names = ['a, "b".png', "é.png", " c.png", "last\nline.png"]
    for name in names:
        picture(1).save(table_folder / name)
    rows = [f'"{name}"'.replace('"b"', '""b""') + f",{label}" for name, label in zip(names, "xxyy", strict=True)]
    data = open_data(write(table_folder, end.join(['path,"label"', "", *rows, ""]), encoding))
    assert {path.name for split in data.splits.values() for path in split.paths} == set(names)
    assert data.classes == ("x", "y")


FAULTS = {
    "nothing": ("", "is empty"),
    "blank lines": ("\n\n", "x.csv is empty"),
    "no rows": ("path,label\n", "x.csv has no rows"),
    "no header": (lines("ab"), "line 1: unknown column images/0.png"),
    "other column": ("path,labels\n" + lines("ab"), "line 1: unknown column labels\n  did you mean label?"),
    "no such column": ("path,split\nimages/0.png,train\n", "x.csv: no column label"),
    "column twice": ("path,label,path\n", "line 1: two columns path"),
    "semicolons": ("path;label\nimages/0.png;a\n", "separate cells with commas"),
    "too many cells": ("path,label\n" + lines("ab") + "images/2.png,a,b\n", "line 4: 3 cells for 2 columns"),
    "too few cells": ("path,label\nimages/0.png\n", "line 2: 1 cells for 2 columns"),
    "no path": ("path,label\n" + lines("ab") + ",a\n", "line 4: no path"),
    "empty label": ("path,label\nimages/0.png,a||b\n", "line 2: an empty label in a||b"),
    "open quote": ('path,label\nimages/0.png,a\n"images/1.png,b\n', "line 3: not CSV"),
    "text after a quote": ('path,label\n"images/0.png"x,a\n', "line 2: not CSV"),
    "an endless cell": (f"path,label\n{'x' * 200_000},a\n", "line 2: not CSV"),
    "line of a row after one of two lines": ('path,label\n"no\nsuch.png",a\nimages/1.png\n', "line 4: 1 cells"),
    "other split": ("path,label,split\nimages/0.png,a,vall\n", "line 2: unknown split vall\n  did you mean val?"),
    "no split": ("path,label,split\nimages/0.png,a,\n", "line 2: no split"),
    "no training": ("path,label,split\nimages/0.png,a,test\n", "test but no rows of the split train"),
    "one class": ("path,label\n" + lines("aa"), "one class only (a)"),
    "no class": ("path,label\n" + lines(["", ""]), "x.csv has no labels"),
    "new class": (
        "path,label,split\nimages/0.png,cat,train\nimages/1.png,dog,train\nimages/2.png,cats,test\n",
        "line 4: test has classes that train lacks: cats\n  did you mean cat?",
    ),
    "case": ("path,label\n" + lines(["cat", "Cat", "dog"]), "differ only in case"),
    "two answers": (
        "path,label\n" + lines("ab") + "./images/0.png,b\n",
        "1 rows contradict the labels of an earlier row:\n    line 4",
    ),
    "missing": (
        "path,label\n" + lines("ab" * 3) + "images/x.png,a\n",
        "1 of 7 files are missing:\n    line 8: images/x.png",
    ),
    "a NUL": ("path,label\n" + lines("ab") + "images/\0.png,a\n", "line 4: NUL bytes"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_every_fault_is_named_with_its_line(table_folder, fault):
    text, expected = FAULTS[fault]
    assert expected in refusal(write(table_folder, text))


def test_bytes_that_are_no_text_are_named_with_their_line(table_folder):
    (table_folder / "x.csv").write_bytes("path,label\nimages/0.png,a\nimages/1.png,caf\xe9\n".encode("latin-1"))
    assert "line 3: byte 0xE9 is not valid UTF-8" in refusal(table_folder / "x.csv")
    assert "looks like UTF-16 LE" in refusal(write(table_folder, "path,label\n", "utf-16-le"))


def test_the_first_twenty_missing_files_are_named_and_the_others_counted(table_folder):
    message = refusal(write(table_folder, "path,label\n" + "".join(f"{index},a\n" for index in range(25))))
    assert "25 of 25 files are missing" in message and "line 21: 19" in message
    assert "line 22" not in message and "and 5 more" in message


def test_a_file_that_is_not_there_or_not_a_file(table_folder):
    assert "no such file" in refusal(table_folder / "y.csv")
    (table_folder / "nowhere.csv").symlink_to(table_folder / "gone.csv")
    assert "nowhere.csv: cannot be read (No such file" in refusal(table_folder / "nowhere.csv")
    os.mkfifo(table_folder / "pipe.csv")
    assert "not a regular file" in refusal(table_folder / "pipe.csv")
    (table_folder / "z.txt").write_text("path,label\n")
    assert "is a file, not a dataset" in refusal(table_folder / "z.txt")


def test_repeated_rows_count_once_and_images_in_two_splits_are_told(table_folder):
    text = "path,label,split\nimages/0.png,a,train\nimages/1.png,b,train\nimages/0.png,a,train\nimages/1.png,b,test\n"
    data = open_data(write(table_folder, text))
    assert len(data.splits["train"]) == 2 and len(data.splits["test"]) == 1
    assert data.notes[:2] == [
        "1 rows are duplicates and are ignored",
        "1 images are in more than one split; the first is images/1.png",
    ]


def test_the_fingerprint_covers_labels_and_order(table_folder):
    texts = [
        "path,label\n" + lines(["a", "b", "a|b"] * 4),
        "path,label\n" + lines(["a", "b", "b"] * 4),
        "path,label\n" + lines(["a", "b|a", "a"] * 4),
    ]
    found = [open_data(write(table_folder, text)).fingerprint() for text in texts]
    assert len(set(found)) == 3
    assert open_data(write(table_folder, texts[0])).fingerprint() == found[0]


def test_a_tenth_of_several_labels_is_drawn_over_all_and_leaves_every_class_one():
    labels = (np.random.default_rng(0).random((200, 12)) < 0.1).astype(np.float32)
    labels[:, 11] = 0
    labels[7, 11] = 1  # the only one of its class
    for seed in range(20):
        parts = draw_stratified_splits(labels, seed, {"val": 0.1, "test": 0.25})
        assert {name: len(rows) for name, rows in parts.items()} == {"train": 130, "val": 20, "test": 50}
        assert sorted(np.concatenate(list(parts.values()))) == list(range(200))
        assert 7 in parts["train"] and (labels[parts["train"]].sum(0) > 0).all()
    assert all(
        np.array_equal(parts[name], rows)
        for name, rows in draw_stratified_splits(labels, seed, {"val": 0.1, "test": 0.25}).items()
    )
    assert not np.array_equal(parts["val"], draw_stratified_splits(labels, 0, {"val": 0.1, "test": 0.25})["val"])
    alone = np.eye(4, dtype=np.float32)
    assert len(draw_stratified_splits(alone, 0, {"val": 0.5})["val"]) == 0


@pytest.mark.parametrize("text", ["path\n" + lines([""] * 12).replace(",", ""), "path,label\n" + lines("a" * 12)])
def test_without_two_classes_the_images_have_no_labels(table_folder, text):
    data = open_data(write(table_folder, text))
    assert data.classes == () and not data.labelled and [len(split) for split in data.splits.values()] == [11, 1]
    assert data.splits["train"].labels.shape == (11, 0)
