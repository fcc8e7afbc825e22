"""Training images excluded by a list: at the start, after resuming, and in the metrics."""

from __future__ import annotations

import json

import pytest

from tests.conftest import make_folder
from vitreous.errors import DataError
from vitreous.jobs.train import train

TINY_OPTIONS = {"model": "ViT-16x1/8", "image_size": 16, "epochs": 1, "batch_size": 8, "workers": 0}


@pytest.fixture
def image_folder(tmp_path):
    return make_folder(tmp_path / "photos", {"train": 8, "val": 2}, classes=("ant", "bee"))


def write_copy_list(path, names):
    path.write_text("path,duplicate_of,reason,score\n" + "".join(f"{name},elsewhere,bytes,1.0\n" for name in names))
    return path


def test_listed_images_are_excluded_and_the_list_is_stored(image_folder, tmp_path):
    names = sorted(str(path) for path in (image_folder / "train" / "ant").iterdir())[:3]
    copies = write_copy_list(tmp_path / "copies.csv", names)
    out = tmp_path / "run"
    train(str(image_folder), exclude=str(copies), out=str(out), **TINY_OPTIONS)
    data = json.loads((out / "data.json").read_text())
    assert (
        data["train_images"] == 13 and data["splits"] == {"train": 13, "val": 4} and data["excluded_by"] == str(copies)
    )
    assert json.loads((out / "excluded.json").read_text()) == names
    copies.unlink()  # the run has a copy of the list
    (out / "summary.json").unlink()
    train(str(image_folder), resume=True, out=str(out))
    assert json.loads((out / "data.json").read_text()) == data and (out / "summary.json").exists()


def test_lists_that_exclude_all_or_no_images_are_rejected(image_folder, tmp_path):
    every = write_copy_list(tmp_path / "all.csv", [str(path) for path in (image_folder / "train").rglob("*.png")])
    with pytest.raises(DataError, match="excludes every training image"):
        train(str(image_folder), exclude=str(every), out=str(tmp_path / "run"), **TINY_OPTIONS)
    assert not (tmp_path / "run").exists()
    with pytest.raises(DataError, match="none of the 1 names"):
        train(
            str(image_folder),
            exclude=str(write_copy_list(tmp_path / "strange.csv", ["elsewhere/1.png"])),
            out=str(tmp_path / "run"),
            **TINY_OPTIONS,
        )
    with pytest.raises(DataError, match="no column path"):
        train(str(image_folder), exclude=str(write_unrelated_csv(tmp_path / "other.csv")), **TINY_OPTIONS)


def write_unrelated_csv(path):
    path.write_text("a,b\n1,2\n")
    return path
