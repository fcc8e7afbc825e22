"""Folders with lists: the layout of VTAB-1k's copies, and every fault with its file and line."""

from __future__ import annotations

import numpy as np
import pytest

from tests.conftest import picture
from tests.data.resume import assert_continues
from vitreous.data.sources import open_data
from vitreous.errors import DataError


@pytest.fixture
def task(tmp_path):
    """A task of three classes: 12 images to train on, 6 to choose by, 9 to judge."""
    parts = {"train800": ("train", range(12)), "val200": ("train", range(12, 18)), "test": ("test", range(9))}
    for number, (name, (home, images)) in enumerate(parts.items()):
        for index in images:
            path = tmp_path / "images" / home / f"{index:06d}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            picture(100 * number + index).save(path)
        rows = [f"images/{home}/{index:06d}.png {index % 3}\n" for index in reversed(images)]
        (tmp_path / f"{name}.txt").write_text("".join(rows))
    (tmp_path / "train800val200.txt").write_text(
        (tmp_path / "val200.txt").read_text() + (tmp_path / "train800.txt").read_text()
    )
    return tmp_path


def refusal(source):
    with pytest.raises(DataError) as error:
        open_data(source)
    return str(error.value)


def test_the_parts_of_a_task(task):
    data = open_data(task)
    assert data.classes == ("0", "1", "2") and not data.unsplit
    assert {name: len(split) for name, split in data.splits.items()} == {"train": 12, "val": 6, "test": 9}
    for split in data.splits.values():
        assert [int(path.stem) % 3 for path in split.paths] == split.labels.tolist() and split.labels.dtype == np.int64
    assert [int(path.stem) for path in data.splits["train"].paths] == list(reversed(range(12))), "the order of the list"


def test_the_last_training_is_on_all_of_the_thousand(task):
    data = open_data(task).with_holdout(0.0, 0)
    assert set(data.splits) == {"train", "test"} and len(data.splits["train"]) == 18
    assert [int(path.stem) for path in data.splits["train"].paths][:6] == list(reversed(range(12, 18)))


def test_plain_lists_and_names_of_classes(task):
    for name in ("train800val200", "val200"):
        (task / f"{name}.txt").unlink()
    (task / "train800.txt").rename(task / "train.txt")
    (task / "classes.txt").write_text("ant\nbee\ncat\n")
    data = open_data(task)
    assert data.classes == ("ant", "bee", "cat") and {name: len(split) for name, split in data.splits.items()} == {
        "train": 12,
        "test": 9,
    }
    assert {name: len(split) for name, split in data.with_holdout(0.25, 0).splits.items()} == {
        "train": 9,
        "val": 3,
        "test": 9,
    }
    assert data.with_holdout(0.0, 0).splits["train"].labels.tolist() == [index % 3 for index in reversed(range(12))]


def test_names_with_spaces_tabs_and_repeated_lines(task):
    picture(1).save(task / "images" / "a b.png")
    with open(task / "train800.txt", "a") as file:
        file.write("\nimages/a b.png 2\r\nimages/train/000003.png\t0\n./images/a b.png 2\n")
    (task / "train800val200.txt").unlink()
    train = open_data(task).splits["train"]
    assert len(train) == 13 and train.paths[12].name == "a b.png" and train.labels[12] == 2


def test_a_class_that_is_only_judged_shifts_no_label(task):
    rows = (task / "train800.txt").read_text().splitlines()
    (task / "train800.txt").write_text("\n".join(row for row in rows if row.split()[1] != "1"))
    (task / "train800val200.txt").unlink()
    data = open_data(task)
    assert data.classes == ("0", "1", "2") and data.notes == ["1 of 3 classes have no training image"]
    assert set(data.splits["train"].labels) == {0, 2} and set(data.splits["test"].labels) == {0, 1, 2}


FAULTS = {
    "no class": (
        "images/train/000001.png\n",
        "train800.txt, line 13: images/train/000001.png is not a path and a class index",
    ),
    "a name for a number": ("images/train/000001.png cat\n", "line 13: images/train/000001.png cat is not a path"),
    "below nothing": ("images/train/000001.png -1\n", "line 13:"),
    "elsewhere": ("../x.png 1\n", "line 13: ../x.png is not below"),
    "absolute": ("/etc/passwd 1\n", "line 13: /etc/passwd is not below"),
    "two answers": ("images/train/000001.png 2\n", "line 13: images/train/000001.png is of class 2, but of class 1 in"),
    "missing": (
        "images/train/999999.png 2\n",
        "1 listed files are missing:\n    {}/train800.txt, line 13: images/train/999999.png",
    ),
}


@pytest.mark.parametrize("case", FAULTS)
def test_every_fault_has_its_line(case, task):
    line, told = FAULTS[case]
    (task / "train800val200.txt").unlink()
    with open(task / "train800.txt", "a") as file:
        file.write(line)
    assert told.format(task) in refusal(task)


def test_lists_that_do_not_agree(task):
    listed = task / "train800val200.txt"
    rows = listed.read_text().splitlines()
    listed.write_text("\n".join(rows[:-1]))
    assert "000000.png is of class 0, but not in the others" in refusal(task)
    listed.write_text("\n".join([rows[0][:-1] + "0", *rows[1:]]))
    assert "train800val200.txt, line 1: images/train/000017.png is of class 0, but of class 2 in" in refusal(task)
    listed.unlink()
    (task / "classes.txt").write_text("ant\nbee\n")
    assert "train800.txt, line 1: class 2, but classes.txt has 2 names" in refusal(task)
    (task / "classes.txt").write_text("ant\nbee\nant\n")
    assert "a name is empty or repeated" in refusal(task)
    (task / "train800.txt").write_bytes(b"\n\n")
    assert "lists no image" in refusal(task)
    (task / "train800.txt").write_bytes(b"\xff 1\n")
    assert "not valid UTF-8" in refusal(task)


def test_a_folder_of_training_images_by_classes_goes_before_a_list(task):
    for number in range(8):
        path = task / "train" / "ab"[number % 2] / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        picture(number).save(path)
    assert open_data(task).classes == ("a", "b")


def test_a_run_continues_anywhere(task):
    assert_continues(lambda: open_data(task).split("train"), 0, 20)
    assert_continues(lambda: open_data(task).split("train"), 1, 2)
