"""Folders with list files (the layout of VTAB-1k copies): splits, and every error with its file and line."""

from __future__ import annotations

import numpy as np
import pytest

from tests.conftest import make_image
from tests.data.resume import assert_continues
from vitreous.data.sources import open_data
from vitreous.errors import DataError


@pytest.fixture
def vtab_task(tmp_path):
    """Return a task of three classes: 12 training, 6 validation and 9 test images."""
    list_images = {"train800": ("train", range(12)), "val200": ("train", range(12, 18)), "test": ("test", range(9))}
    for number, (name, (home, images)) in enumerate(list_images.items()):
        for index in images:
            path = tmp_path / "images" / home / f"{index:06d}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            make_image(100 * number + index).save(path)
        rows = [f"images/{home}/{index:06d}.png {index % 3}\n" for index in reversed(images)]
        (tmp_path / f"{name}.txt").write_text("".join(rows))
    (tmp_path / "train800val200.txt").write_text(
        (tmp_path / "val200.txt").read_text() + (tmp_path / "train800.txt").read_text()
    )
    return tmp_path


def get_open_error(source):
    with pytest.raises(DataError) as error:
        open_data(source)
    return str(error.value)


def test_vtab_lists_are_read_as_splits(vtab_task):
    data = open_data(vtab_task)
    assert data.classes == ("0", "1", "2") and not data.unsplit
    assert {name: len(split) for name, split in data.splits.items()} == {"train": 12, "val": 6, "test": 9}
    for split in data.splits.values():
        assert [int(path.stem) % 3 for path in split.paths] == split.labels.tolist() and split.labels.dtype == np.int64
    assert [int(path.stem) for path in data.splits["train"].paths] == list(reversed(range(12))), (
        "samples are in list order"
    )


def test_without_holdout_all_1000_images_are_trained_on(vtab_task):
    data = open_data(vtab_task).with_holdout(0.0, 0)
    assert set(data.splits) == {"train", "test"} and len(data.splits["train"]) == 18
    assert [int(path.stem) for path in data.splits["train"].paths][:6] == list(reversed(range(12, 18)))


def test_plain_lists_and_class_names_are_read(vtab_task):
    for name in ("train800val200", "val200"):
        (vtab_task / f"{name}.txt").unlink()
    (vtab_task / "train800.txt").rename(vtab_task / "train.txt")
    (vtab_task / "classes.txt").write_text("ant\nbee\ncat\n")
    data = open_data(vtab_task)
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


def test_names_with_spaces_tabs_and_repeated_lines(vtab_task):
    make_image(1).save(vtab_task / "images" / "a b.png")
    with open(vtab_task / "train800.txt", "a") as file:
        file.write("\nimages/a b.png 2\r\nimages/train/000003.png\t0\n./images/a b.png 2\n")
    (vtab_task / "train800val200.txt").unlink()
    train = open_data(vtab_task).splits["train"]
    assert len(train) == 13 and train.paths[12].name == "a b.png" and train.labels[12] == 2


def test_a_class_only_in_test_does_not_shift_labels(vtab_task):
    rows = (vtab_task / "train800.txt").read_text().splitlines()
    (vtab_task / "train800.txt").write_text("\n".join(row for row in rows if row.split()[1] != "1"))
    (vtab_task / "train800val200.txt").unlink()
    data = open_data(vtab_task)
    assert data.classes == ("0", "1", "2") and data.notes == ["1 of 3 classes have no training image"]
    assert set(data.splits["train"].labels) == {0, 2} and set(data.splits["test"].labels) == {0, 1, 2}


INVALID_LINES = {
    "no class": (
        "images/train/000001.png\n",
        "train800.txt, line 13: images/train/000001.png is not a path and a class index",
    ),
    "a name as label": ("images/train/000001.png cat\n", "line 13: images/train/000001.png cat is not a path"),
    "a negative label": ("images/train/000001.png -1\n", "line 13:"),
    "elsewhere": ("../x.png 1\n", "line 13: ../x.png is not below"),
    "absolute": ("/etc/passwd 1\n", "line 13: /etc/passwd is not below"),
    "contradictory labels": (
        "images/train/000001.png 2\n",
        "line 13: images/train/000001.png is of class 2, but of class 1 in",
    ),
    "missing": (
        "images/train/999999.png 2\n",
        "1 listed files are missing:\n    {}/train800.txt, line 13: images/train/999999.png",
    ),
}


@pytest.mark.parametrize("case", INVALID_LINES)
def test_every_invalid_line_is_reported(case, vtab_task):
    line, message = INVALID_LINES[case]
    (vtab_task / "train800val200.txt").unlink()
    with open(vtab_task / "train800.txt", "a") as file:
        file.write(line)
    assert message.format(vtab_task) in get_open_error(vtab_task)


def test_contradictory_lists_are_rejected(vtab_task):
    listed = vtab_task / "train800val200.txt"
    rows = listed.read_text().splitlines()
    listed.write_text("\n".join(rows[:-1]))
    assert "000000.png is of class 0, but not in the other lists" in get_open_error(vtab_task)
    listed.write_text("\n".join([rows[0][:-1] + "0", *rows[1:]]))
    assert "train800val200.txt, line 1: images/train/000017.png is of class 0, but of class 2 in" in get_open_error(
        vtab_task
    )
    listed.unlink()
    (vtab_task / "classes.txt").write_text("ant\nbee\n")
    assert "train800.txt, line 1: class 2, but classes.txt has 2 names" in get_open_error(vtab_task)
    (vtab_task / "classes.txt").write_text("ant\nbee\nant\n")
    assert "a name is empty or repeated" in get_open_error(vtab_task)
    (vtab_task / "train800.txt").write_bytes(b"\n\n")
    assert "lists no image" in get_open_error(vtab_task)
    (vtab_task / "train800.txt").write_bytes(b"\xff 1\n")
    assert "not valid UTF-8" in get_open_error(vtab_task)


def test_class_folders_take_precedence_over_lists(vtab_task):
    for number in range(8):
        path = vtab_task / "train" / "ab"[number % 2] / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        make_image(number).save(path)
    assert open_data(vtab_task).classes == ("a", "b")


def test_a_run_resumes_at_any_step(vtab_task):
    assert_continues(lambda: open_data(vtab_task).split("train"), 0, 20)
    assert_continues(lambda: open_data(vtab_task).split("train"), 1, 2)
