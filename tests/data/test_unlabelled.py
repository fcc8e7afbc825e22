"""Unlabelled image data: flat folders, folders with one class, and commands that need labels."""

import os

import numpy as np
import pytest

from tests.conftest import make_image
from vitreous.data.augmentation.augment import Augment
from vitreous.data.holdout import draw_stratified_splits
from vitreous.data.loader import TrainLoader
from vitreous.data.modalities.images import ImagePreprocess
from vitreous.data.sources import open_data, open_images
from vitreous.data.split import FileSplit, create_empty_labels, require_labels
from vitreous.errors import DataError
from vitreous.jobs.data import exclude_images, prepare_data
from vitreous.progress import NullListener
from vitreous.recipes.options import TrainOptions


def write_images(home, count, first=0):
    home.mkdir(parents=True, exist_ok=True)
    for index in range(first, first + count):
        make_image(index).save(home / f"p{index % 4}-{index}.png")
    return home


def list_sample_names(split):
    return [os.path.basename(split.name(sample)) for sample in range(len(split))]


@pytest.mark.parametrize("inner", ["", "ant"])
def test_flat_and_single_class_folders_are_unlabelled(tmp_path, inner):
    write_images(tmp_path / inner, 40)
    data = open_data(tmp_path)
    assert data.classes == () and not data.labelled and not data.multilabel and data.unsplit
    assert [len(data.splits[name]) for name in ("train", "val")] == [36, 4] and len(data.full_train_split) == 40
    assert data.splits["train"].labels.shape == (36, 0) and data.splits["train"].labels.dtype == np.float32
    assert not set(list_sample_names(data.splits["train"])) & set(list_sample_names(data.splits["val"]))
    assert list_sample_names(data.splits["val"]) == list_sample_names(open_data(tmp_path).splits["val"])
    assert list_sample_names(data.splits["val"]) != list_sample_names(open_data(tmp_path, 1).splits["val"])
    assert any("one class, ant" in note for note in data.notes) == bool(inner)
    with pytest.raises(DataError, match=r"one class only \(ant\)" if inner else "flat folder: 40 images"):
        require_labels(data)
    batch = next(TrainLoader(data.splits["train"], ImagePreprocess((8, 8)), Augment(), 0).iterate_batches(0, 3, 3))
    assert batch.keys() == {"images", "samples"} and batch["images"].shape == (3, 3, 8, 8)


def test_unlabelled_splits_are_kept(tmp_path):
    for name, count in {"train": 6, "valid": 3, "test/deep/er": 2}.items():
        write_images(tmp_path / name, count)
    data = open_data(tmp_path)
    assert {name: len(split) for name, split in data.splits.items()} == {"train": 6, "val": 3, "test": 2}
    assert not data.labelled and data.full_train_split is None and not data.unsplit


def test_a_single_training_class_makes_the_data_unlabelled(tmp_path):
    for name in ("train/ant", "val/ant", "val/bee"):
        write_images(tmp_path / name, 3)
    data = open_data(tmp_path)
    assert not data.labelled and [len(split) for split in data.splits.values()] == [3, 6]
    with pytest.raises(DataError, match=r"one class only \(ant\)"):
        require_labels(data)


@pytest.mark.parametrize("share, val", [(0.25, 10), (0.99, 39), (0.0, 0)])
def test_any_share_is_held_out_and_one_training_image_remains(tmp_path, share, val):
    data = open_data(write_images(tmp_path, 40)).with_holdout(share, 3)
    assert len(data.split("train")) == 40 - val and len(data.splits.get("val", ())) == val
    assert [len(rows) for rows in draw_stratified_splits(create_empty_labels(1), 0, {"val": 0.9}).values()] == [1, 0]


def test_groups_are_kept_together(tmp_path):
    data = open_data(write_images(tmp_path, 40), group_by=r"(p\d)-")
    groups = [{name[:2] for name in list_sample_names(split)} for split in data.splits.values()]
    assert len(groups) == 2 and not groups[0] & groups[1] and len(groups[0] | groups[1]) == 4
    assert data.groups is not None and len(data.groups) == 40


def test_the_fingerprint_covers_images_and_exclusions(tmp_path):
    data = open_data(write_images(tmp_path, 12))
    assert data.fingerprint() == open_data(tmp_path).fingerprint() != open_data(tmp_path, 1).fingerprint()
    left = data.split("train").name(0)
    reduced = exclude_images(data, frozenset([left]), "list.csv", NullListener())
    assert len(reduced.split("train")) == len(data.split("train")) - 1 and left not in list_sample_names(
        reduced.split("train")
    )
    assert reduced.fingerprint() == data.fingerprint() and not reduced.labelled
    write_images(tmp_path, 1, 12)
    assert open_data(tmp_path).fingerprint() != data.fingerprint()


def test_flat_folder_images_are_opened_in_order(tmp_path):
    opened = open_images(write_images(tmp_path / "flat", 12))
    assert isinstance(opened, FileSplit) and len(opened) == 12 and opened.labels.shape == (12, 0)
    assert list_sample_names(opened) == sorted(
        list_sample_names(opened), key=lambda name: (int(name[1]), int(name[3:-4]))
    )


@pytest.mark.parametrize("inner, message", [("", "flat folder: 8 images"), ("ant", "one class only")])
def test_classification_without_labels_is_rejected(tmp_path, inner, message):
    write_images(tmp_path / inner, 8)
    with pytest.raises(DataError, match=message) as error:
        prepare_data(str(tmp_path), None, TrainOptions(str(tmp_path)), NullListener())
    assert error.value.code == 3 and error.value.hint
