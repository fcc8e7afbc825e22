"""ImageNet's folders, with names and ground truth from what lies beside them; and models that know the classes by other
names."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import numpy as np
import pytest
from scipy.io import savemat

from tests.conftest import picture
from vitreous.data.class_order import align_labels, find_class_indices
from vitreous.data.layouts.imagenet import ILSVRC2012_SHA256, is_ilsvrc2012, read_class_titles
from vitreous.data.sources import open_data
from vitreous.data.split import Data, FileSplit
from vitreous.errors import DataError

SYNSETS = {"n01440764": "tench, Tinca tinca", "n02012849": "crane", "n03126707": "crane"}
TRUTH = [2, 0, 1, 1, 2, 0]  # of the images to validate on, places among the synsets


def save(path: Path, seed: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    picture(seed).save(path, "JPEG")


def training(home: Path) -> Path:
    for number, synset in enumerate(SYNSETS):
        for index in range(11):
            save(home / synset / f"{synset}_{index}.JPEG", 20 * number + index)
    return home


@pytest.fixture
def flat(tmp_path):
    """ILSVRC2012 as it comes: images to validate on without folders."""
    training(tmp_path / "x" / "train")
    for number in range(1, 7):
        save(tmp_path / "x" / "val" / f"ILSVRC2012_val_{number:08d}.JPEG", 100 + number)
        save(tmp_path / "x" / "test" / f"ILSVRC2012_test_{number:08d}.JPEG", 200 + number)
    return tmp_path / "x"


def solution(home: Path) -> None:
    rows = [
        f"ILSVRC2012_val_{n:08d},{list(SYNSETS)[place]} 85 1 499 272 {list(SYNSETS)[place]} 1 2 3 4\n"
        for n, place in enumerate(TRUTH, 1)
    ]
    (home / "LOC_val_solution.csv").write_text("ImageId,PredictionString\n" + "".join(reversed(rows)))


def devkit(home: Path) -> None:
    """The development kit has numbers of its own, and inner nodes of the tree after the leaves."""
    home.mkdir(parents=True, exist_ok=True)
    numbers = {"n01440764": 3, "n02012849": 1, "n03126707": 2}
    kinds = [("ILSVRC2012_ID", "i8"), ("WNID", "O"), ("words", "O"), ("gloss", "O"), ("num_children", "i8")]
    rows = [(numbers[synset], synset, words, "a thing", 0) for synset, words in SYNSETS.items()]
    savemat(home / "meta.mat", {"synsets": np.array([*rows, (4, "n00001740", "entity", "all", 3)], dtype=kinds)})
    truth = "".join(f"{numbers[list(SYNSETS)[place]]}\n" for place in TRUTH)
    (home / "ILSVRC2012_validation_ground_truth.txt").write_text(truth)


def assert_true(data: Data) -> None:
    val = data.splits["val"]
    assert data.classes == tuple(SYNSETS) and len(val) == 6 and "test" not in data.splits
    assert {int(path.stem[-8:]): label for path, label in zip(val.paths, val.labels, strict=True)} == dict(
        enumerate(TRUTH, 1)
    )
    assert any("test has 6 images without labels" in note for note in data.notes)


def test_flat_images_by_kaggles_list(flat):
    solution(flat)
    (flat / "LOC_synset_mapping.txt").write_text("".join(f"{synset} {words}\n" for synset, words in SYNSETS.items()))
    data = open_data(flat)
    assert_true(data)
    assert data.titles == SYNSETS and data.full_train_split is None


@pytest.mark.parametrize("place", [".", "ILSVRC2012_devkit_t12/data", "../ILSVRC2012_devkit_t12/data"])
def test_flat_images_by_the_development_kit(flat, place):
    devkit(flat / place)
    data = open_data(flat)
    assert_true(data)
    assert data.titles == SYNSETS


@pytest.mark.parametrize("named", [".", "ILSVRC/Data/CLS-LOC"])
def test_kaggles_tree(flat, tmp_path, named):
    (tmp_path / "kaggle" / "ILSVRC" / "Data").mkdir(parents=True)
    flat.rename(tmp_path / "kaggle" / "ILSVRC" / "Data" / "CLS-LOC")
    solution(tmp_path / "kaggle")
    (tmp_path / "kaggle" / "LOC_synset_mapping.txt").write_text("n01440764 tench, Tinca tinca\n")
    data = open_data(tmp_path / "kaggle" / named)
    assert_true(data)
    assert data.titles == {"n01440764": "tench, Tinca tinca"} and data.name == str(tmp_path / "kaggle" / named)


def test_images_in_folders_of_their_synsets(tmp_path):
    training(tmp_path / "x" / "train")
    training(tmp_path / "x" / "val")
    data = open_data(tmp_path / "x")
    assert {name: len(split) for name, split in data.splits.items()} == {"train": 33, "val": 33} and data.titles == {}


def test_imagenet_21k_with_words_beside_it(tmp_path):
    training(tmp_path / "winter21_whole")
    (tmp_path / "words.txt").write_text("n00001740\tentity\nn02012849\tcrane, bird\nn03126707\tcrane, machine\n")
    data = open_data(tmp_path / "winter21_whole")
    assert data.unsplit and {name: len(split) for name, split in data.splits.items()} == {"train": 30, "val": 3}
    assert data.titles == {"n02012849": "crane, bird", "n03126707": "crane, machine"}


def test_truth_that_is_lacking_or_wrong(flat):
    def refusal():
        with pytest.raises(DataError) as error:
            open_data(flat)
        return str(error.value)

    assert "6 images without class folders and without ground truth\n  put LOC_val_solution.csv" in refusal()
    solution(flat)
    text = (flat / "LOC_val_solution.csv").read_text()
    (flat / "LOC_val_solution.csv").write_text(text.replace("val_00000004", "val_00000009"))
    assert "1 of 6 images are not in the ground truth; the first is" in refusal()
    (flat / "LOC_val_solution.csv").write_text("ImageId,PredictionString\nILSVRC2012_val_00000001,tench 1 2 3 4\n")
    assert "a synset in every row" in refusal()
    (flat / "LOC_val_solution.csv").unlink()
    devkit(flat)
    (flat / "ILSVRC2012_validation_ground_truth.txt").write_text("1\n2\n17\n")
    assert "17 is not a synset index" in refusal()
    (flat / "meta.mat").write_bytes(b"MATLAB 5.0 MAT-file" + bytes(200))
    assert "is not the meta.mat" in refusal()


def data_of(classes, titles=None) -> Data:
    split = FileSplit([Path(f"{index}.jpg") for index in range(len(classes))], np.arange(len(classes)))
    return Data("x", tuple(classes), {"test": split}, titles=titles or {})


def test_a_model_that_knows_the_classes_by_their_titles():
    titles = {"n01440764": "tench, Tinca tinca", "n01443537": "goldfish, Carassius auratus"}
    data = data_of(titles, titles)
    for known in (
        ("goldfish", "tench"),
        ("goldfish, Carassius auratus", "tench, Tinca tinca"),
        ("n01443537", "n01440764"),
    ):
        assert find_class_indices(data, (*known, "shark")).tolist() == [1, 0]
        assert align_labels(data.splits["test"], data, (*known, "shark")).labels.tolist() == [1, 0]
    for titles, known in (
        (SYNSETS, ("tench", "crane", "bird")),
        ({**SYNSETS, "n03126707": "lift"}, ("tench", "crane", "crane, bird", "lift")),
    ):
        with pytest.raises(DataError, match="has no classes named n02012849"):
            find_class_indices(data_of(SYNSETS, titles), known)
    with pytest.raises(DataError, match="has no classes named tench"):
        find_class_indices(data_of(["tench", "n01440764"], {"n01440764": "tench"}), ("tench", "goldfish"))


def the_thousand() -> list[str]:
    """The synsets of ILSVRC2012 in their order, as timm has them in a file."""
    spec = importlib.util.find_spec("timm")
    assert spec and spec.origin
    return (Path(spec.origin).parent / "data" / "_info" / "imagenet_synsets.txt").read_text().split()


def test_numbers_stand_for_the_thousand_synsets_and_for_no_others():
    numbers = tuple(map(str, range(1000)))
    synsets = tuple(f"n{index:08d}" for index in range(1000))
    assert len(ILSVRC2012_SHA256) == 64 and not is_ilsvrc2012(synsets)
    with pytest.raises(DataError, match="has no classes named"):
        find_class_indices(data_of(synsets), numbers)
    true = the_thousand()
    data = data_of(true)
    assert is_ilsvrc2012(data.classes) and find_class_indices(data, numbers).tolist() == list(range(1000))
    with pytest.raises(DataError, match="has no classes named"):
        find_class_indices(data_of(true[:-1]), numbers)


def test_the_thousand_have_titles_without_a_list_beside_them():
    titles = read_class_titles(tuple(the_thousand()), [])
    assert titles["n01440764"] == "tench" and titles["n15075141"] == "toilet tissue" and len(titles) == 1000
