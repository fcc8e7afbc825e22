"""ImageNet folders: class names and labels come from the accompanying files; models match classes by other names."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import numpy as np
import pytest
from scipy.io import savemat

from tests.conftest import make_image
from vitreous.data.class_order import align_labels, find_class_indices
from vitreous.data.layouts.imagenet import ILSVRC2012_SHA256, is_ilsvrc2012, read_class_titles
from vitreous.data.sources import open_data
from vitreous.data.split import Data, FileSplit
from vitreous.errors import DataError

SYNSET_WORDS = {"n01440764": "tench, Tinca tinca", "n02012849": "crane", "n03126707": "crane"}
VALIDATION_LABELS = [2, 0, 1, 1, 2, 0]  # labels of the validation images, as indices into the synsets


def save_jpeg(path: Path, seed: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    make_image(seed).save(path, "JPEG")


def write_training_images(home: Path) -> Path:
    for number, synset in enumerate(SYNSET_WORDS):
        for index in range(11):
            save_jpeg(home / synset / f"{synset}_{index}.JPEG", 20 * number + index)
    return home


@pytest.fixture
def flat_ilsvrc2012(tmp_path):
    """Return ILSVRC2012 in its original layout: validation images without class folders."""
    write_training_images(tmp_path / "x" / "train")
    for number in range(1, 7):
        save_jpeg(tmp_path / "x" / "val" / f"ILSVRC2012_val_{number:08d}.JPEG", 100 + number)
        save_jpeg(tmp_path / "x" / "test" / f"ILSVRC2012_test_{number:08d}.JPEG", 200 + number)
    return tmp_path / "x"


def write_kaggle_solution(home: Path) -> None:
    rows = [
        f"ILSVRC2012_val_{n:08d},{list(SYNSET_WORDS)[synset_index]} 85 1 499 272 {list(SYNSET_WORDS)[synset_index]} 1 2 3 4\n"
        for n, synset_index in enumerate(VALIDATION_LABELS, 1)
    ]
    (home / "LOC_val_solution.csv").write_text("ImageId,PredictionString\n" + "".join(reversed(rows)))


def write_devkit(home: Path) -> None:
    """Write a development kit with its own numbering, and inner nodes of the tree after the leaves."""
    home.mkdir(parents=True, exist_ok=True)
    numbers = {"n01440764": 3, "n02012849": 1, "n03126707": 2}
    field_types = [("ILSVRC2012_ID", "i8"), ("WNID", "O"), ("words", "O"), ("gloss", "O"), ("num_children", "i8")]
    rows = [(numbers[synset], synset, title, "a thing", 0) for synset, title in SYNSET_WORDS.items()]
    savemat(home / "meta.mat", {"synsets": np.array([*rows, (4, "n00001740", "entity", "all", 3)], dtype=field_types)})
    truth = "".join(f"{numbers[list(SYNSET_WORDS)[synset_index]]}\n" for synset_index in VALIDATION_LABELS)
    (home / "ILSVRC2012_validation_ground_truth.txt").write_text(truth)


def assert_ground_truth(data: Data) -> None:
    val = data.splits["val"]
    assert data.classes == tuple(SYNSET_WORDS) and len(val) == 6 and "test" not in data.splits
    assert {int(path.stem[-8:]): label for path, label in zip(val.paths, val.labels, strict=True)} == dict(
        enumerate(VALIDATION_LABELS, 1)
    )
    assert any("test has 6 images without labels" in note for note in data.notes)


def test_flat_images_are_labelled_by_the_kaggle_solution(flat_ilsvrc2012):
    write_kaggle_solution(flat_ilsvrc2012)
    (flat_ilsvrc2012 / "LOC_synset_mapping.txt").write_text(
        "".join(f"{synset} {title}\n" for synset, title in SYNSET_WORDS.items())
    )
    data = open_data(flat_ilsvrc2012)
    assert_ground_truth(data)
    assert data.titles == SYNSET_WORDS and data.full_train_split is None


@pytest.mark.parametrize("folder", [".", "ILSVRC2012_devkit_t12/data", "../ILSVRC2012_devkit_t12/data"])
def test_flat_images_are_labelled_by_the_development_kit(flat_ilsvrc2012, folder):
    write_devkit(flat_ilsvrc2012 / folder)
    data = open_data(flat_ilsvrc2012)
    assert_ground_truth(data)
    assert data.titles == SYNSET_WORDS


@pytest.mark.parametrize("named", [".", "ILSVRC/Data/CLS-LOC"])
def test_imagenet_in_the_kaggle_layout_is_read(flat_ilsvrc2012, tmp_path, named):
    (tmp_path / "kaggle" / "ILSVRC" / "Data").mkdir(parents=True)
    flat_ilsvrc2012.rename(tmp_path / "kaggle" / "ILSVRC" / "Data" / "CLS-LOC")
    write_kaggle_solution(tmp_path / "kaggle")
    (tmp_path / "kaggle" / "LOC_synset_mapping.txt").write_text("n01440764 tench, Tinca tinca\n")
    data = open_data(tmp_path / "kaggle" / named)
    assert_ground_truth(data)
    assert data.titles == {"n01440764": "tench, Tinca tinca"} and data.name == str(tmp_path / "kaggle" / named)


def test_synset_folders_are_classes(tmp_path):
    write_training_images(tmp_path / "x" / "train")
    write_training_images(tmp_path / "x" / "val")
    data = open_data(tmp_path / "x")
    assert {name: len(split) for name, split in data.splits.items()} == {"train": 33, "val": 33} and data.titles == {}


def test_imagenet_21k_titles_are_read_from_words_txt(tmp_path):
    write_training_images(tmp_path / "winter21_whole")
    (tmp_path / "words.txt").write_text("n00001740\tentity\nn02012849\tcrane, bird\nn03126707\tcrane, machine\n")
    data = open_data(tmp_path / "winter21_whole")
    assert data.unsplit and {name: len(split) for name, split in data.splits.items()} == {"train": 30, "val": 3}
    assert data.titles == {"n02012849": "crane, bird", "n03126707": "crane, machine"}


def test_missing_or_wrong_ground_truth_is_rejected(flat_ilsvrc2012):
    def get_open_error():
        with pytest.raises(DataError) as error:
            open_data(flat_ilsvrc2012)
        return str(error.value)

    assert "6 images without class folders and without ground truth\n  put LOC_val_solution.csv" in get_open_error()
    write_kaggle_solution(flat_ilsvrc2012)
    text = (flat_ilsvrc2012 / "LOC_val_solution.csv").read_text()
    (flat_ilsvrc2012 / "LOC_val_solution.csv").write_text(text.replace("val_00000004", "val_00000009"))
    assert "1 of 6 images are not in the ground truth; the first is" in get_open_error()
    (flat_ilsvrc2012 / "LOC_val_solution.csv").write_text(
        "ImageId,PredictionString\nILSVRC2012_val_00000001,tench 1 2 3 4\n"
    )
    assert "without a synset" in get_open_error()
    (flat_ilsvrc2012 / "LOC_val_solution.csv").unlink()
    write_devkit(flat_ilsvrc2012)
    (flat_ilsvrc2012 / "ILSVRC2012_validation_ground_truth.txt").write_text("1\n2\n17\n")
    assert "17 is not a synset index" in get_open_error()
    (flat_ilsvrc2012 / "meta.mat").write_bytes(b"MATLAB 5.0 MAT-file" + bytes(200))
    assert "is not the meta.mat" in get_open_error()


def make_data(classes, titles=None) -> Data:
    split = FileSplit([Path(f"{index}.jpg") for index in range(len(classes))], np.arange(len(classes)))
    return Data("x", tuple(classes), {"test": split}, titles=titles or {})


def test_model_classes_match_by_title():
    titles = {"n01440764": "tench, Tinca tinca", "n01443537": "goldfish, Carassius auratus"}
    data = make_data(titles, titles)
    for model_classes in (
        ("goldfish", "tench"),
        ("goldfish, Carassius auratus", "tench, Tinca tinca"),
        ("n01443537", "n01440764"),
    ):
        assert find_class_indices(data, (*model_classes, "shark")).tolist() == [1, 0]
        assert align_labels(data.splits["test"], data, (*model_classes, "shark")).labels.tolist() == [1, 0]
    for titles, model_classes in (
        (SYNSET_WORDS, ("tench", "crane", "bird")),
        ({**SYNSET_WORDS, "n03126707": "lift"}, ("tench", "crane", "crane, bird", "lift")),
    ):
        with pytest.raises(DataError, match="has no classes named n02012849"):
            find_class_indices(make_data(SYNSET_WORDS, titles), model_classes)
    with pytest.raises(DataError, match="has no classes named tench"):
        find_class_indices(make_data(["tench", "n01440764"], {"n01440764": "tench"}), ("tench", "goldfish"))


def list_imagenet_1k_synsets() -> list[str]:
    """Return the ILSVRC2012 synsets in order, from timm's file."""
    spec = importlib.util.find_spec("timm")
    assert spec and spec.origin
    return (Path(spec.origin).parent / "data" / "_info" / "imagenet_synsets.txt").read_text().split()


def test_numbered_classes_match_only_the_imagenet_1k_synsets():
    numbers = tuple(map(str, range(1000)))
    synsets = tuple(f"n{index:08d}" for index in range(1000))
    assert len(ILSVRC2012_SHA256) == 64 and not is_ilsvrc2012(synsets)
    with pytest.raises(DataError, match="has no classes named"):
        find_class_indices(make_data(synsets), numbers)
    true = list_imagenet_1k_synsets()
    data = make_data(true)
    assert is_ilsvrc2012(data.classes) and find_class_indices(data, numbers).tolist() == list(range(1000))
    with pytest.raises(DataError, match="has no classes named"):
        find_class_indices(make_data(true[:-1]), numbers)


def test_imagenet_1k_titles_are_built_in():
    titles = read_class_titles(tuple(list_imagenet_1k_synsets()), [])
    assert titles["n01440764"] == "tench" and titles["n15075141"] == "toilet tissue" and len(titles) == 1000
