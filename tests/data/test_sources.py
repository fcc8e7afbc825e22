"""Class folders and the embedded digits as data sources, held-out splits, and errors of `open_data`."""

import os
import subprocess
import sys

import numpy as np
import pytest

from tests.conftest import make_folder, make_image
from vitreous.data.holdout import draw_stratified_splits
from vitreous.data.layouts.folder import natural_sort_key
from vitreous.data.layouts.named import open_digits
from vitreous.data.sources import open_data
from vitreous.errors import DataError, UsageError


def test_digits_are_split_once_and_for_all():
    data = open_digits()
    assert {name: len(split) for name, split in data.splits.items()} == {"train": 1439, "val": 179, "test": 179}
    assert data.classes == tuple("0123456789")
    pixels = np.concatenate([split.pixels.reshape(len(split), -1) for split in data.splits.values()])
    assert len(pixels) == 1797 and pixels.max() == 255 and pixels.dtype == np.uint8
    assert data.fingerprint() == open_digits().fingerprint() != open_digits(1).fingerprint()


def test_held_out_samples_are_disjoint_and_stratified():
    labels = np.repeat(np.arange(5), [3, 10, 40, 1, 100])
    split_rows = draw_stratified_splits(labels, 0, {"val": 0.1, "test": 0.1})
    rows = np.concatenate(list(split_rows.values()))
    assert sorted(rows) == list(range(len(labels)))
    assert set(labels[split_rows["train"]]) == set(range(5))
    assert (np.bincount(labels[split_rows["test"]], minlength=5) == [0, 1, 4, 0, 10]).all()


def test_split_folders(photo_folder):
    data = open_data(photo_folder)
    assert data.classes == ("ant", "bee", "cat")
    assert {name: len(split) for name, split in data.splits.items()} == {"train": 36, "val": 12, "test": 12}
    for split in data.splits.values():
        for sample in range(len(split)):
            assert split.paths[sample].parent.name == data.classes[split.labels[sample]]


def test_class_folders_hold_out_ten_percent(tmp_path):
    data = open_data(make_folder(tmp_path / "x", {"": 20}))
    assert {name: len(split) for name, split in data.splits.items()} == {"train": 54, "val": 6}
    assert data.notes == ["held out 6 of 60 training images for validation (split seed 0)"]
    assert not set(data.splits["train"].paths) & set(data.splits["val"].paths)
    assert open_data(tmp_path / "x", 1).splits["val"].paths != data.splits["val"].paths


@pytest.mark.parametrize("name", ["valid", "validation"])
def test_alternative_validation_split_names_are_read(tmp_path, name):
    data = open_data(make_folder(tmp_path / "x", {"train": 4, name: 2}))
    assert list(data.splits) == ["train", "val"]


def test_class_names_are_sorted_naturally():
    assert sorted(["10", "9", "a10", "a9", "1", "01"], key=natural_sort_key) == ["01", "1", "9", "10", "a9", "a10"]


PRINT_ORDER_SCRIPT = """
import sys
from vitreous.data.sources import open_data
data = open_data(sys.argv[1])
print(data.fingerprint(), data.classes, [p.name for p in data.splits["train"].paths][:5])
"""


def test_order_is_independent_of_hash_seed_locale_and_file_system(tmp_path):
    for order, home in ((1, tmp_path / "a"), (-1, tmp_path / "b")):
        for name in ["Zebra", "éclair", "ant", "10", "9", "b c"][::order]:
            for index in list(range(12))[::order]:
                (home / name).mkdir(parents=True, exist_ok=True)
                make_image(index).save(home / name / f"{index}.png")
    printed = set()
    for seed, locale, home in (("0", "C", "a"), ("1", "C.UTF-8", "b"), ("77", "de_DE", "a")):
        environment = {**os.environ, "PYTHONHASHSEED": seed, "LC_ALL": locale, "PYTHONUTF8": "1"}
        printed.add(
            subprocess.run(
                [sys.executable, "-c", PRINT_ORDER_SCRIPT, str(tmp_path / home)],
                capture_output=True,
                text=True,
                check=True,
                env=environment,
            ).stdout
        )
    assert len(printed) == 1


def test_hidden_and_empty_folders_are_not_classes(tmp_path):
    root = make_folder(tmp_path / "x", {"": 3})
    (root / ".ipynb_checkpoints").mkdir()
    make_image(0).save(root / ".ipynb_checkpoints" / "0.png")
    (root / "empty").mkdir()
    (root / "ant" / "notes.txt").write_text("x")
    assert open_data(root).classes == ("ant", "bee", "cat")


def test_symlink_loops_are_visited_once(tmp_path):
    root = make_folder(tmp_path / "x", {"": 3})
    (root / "ant" / "loop").symlink_to(root / "ant")
    data = open_data(root)
    assert sum(map(len, data.splits.values())) == 9


def get_open_error(source):
    with pytest.raises((DataError, UsageError)) as error:
        open_data(source)
    return str(error.value)


def test_open_errors_name_the_problem_and_the_expected_layout(tmp_path):
    assert "no such folder" in get_open_error(tmp_path / "missing")
    assert "DIR/train/CLASS" in get_open_error(tmp_path / "missing")
    (tmp_path / "empty").mkdir()
    assert "no images in" in get_open_error(tmp_path / "empty")
    (tmp_path / "file").write_text("x")
    assert "is a file" in get_open_error(tmp_path / "file")
    assert "did you mean digits" in get_open_error("digit")
    assert "not supported yet" in get_open_error("s3://bucket/x")
    assert "no train folder" in get_open_error(make_folder(tmp_path / "test only", {"test": 3}))


def test_a_class_missing_from_train_is_rejected(tmp_path):
    root = make_folder(tmp_path / "x", {"train": 3, "val": 1})
    (root / "val" / "ants").mkdir()
    make_image(0).save(root / "val" / "ants" / "0.png")
    message = get_open_error(root)
    assert "val has classes that train lacks: ants" in message and "did you mean ant?" in message


def test_class_names_that_differ_only_in_case_are_rejected(tmp_path):
    root = make_folder(tmp_path / "x", {"": 2}, classes=("Cat", "cat", "dog"))
    if len(list(root.iterdir())) == 3:
        assert "differ only in case" in get_open_error(root)
