"""Folder datasets with special files, unusual names, changing classes, and order-dependent content."""

from __future__ import annotations

import csv
import hashlib
import json
import os
import random
import shutil
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from tests.conftest import TINY_RUN, make_folder, make_image, run_cli
from tests.data.crafted import encode_image
from vitreous.data.augmentation.augment import Augment
from vitreous.data.decoding.decode import decode_to_pillow
from vitreous.data.loader import EvalLoader, TrainLoader
from vitreous.data.modalities.images import ImagePreprocess
from vitreous.data.screen import screen_images
from vitreous.data.sources import open_data
from vitreous.errors import DataError
from vitreous.inference.predict import load
from vitreous.jobs.train import train
from vitreous.reports.evaluate import evaluate

pytestmark = pytest.mark.usefixtures("without_pages")  # report pages would slow down the many trainings

SMALL_PREPROCESS = ImagePreprocess((16, 16))
QUICK_OPTIONS = {**TINY_RUN, "epochs": 1, "accumulate": 1, "workers": 0}


@pytest.fixture(scope="module")
def trained_photos_and_run(tmp_path_factory) -> tuple[Path, Path]:
    """Return an image folder of three classes with splits, and a run trained on it."""
    home = tmp_path_factory.mktemp("trained")
    photos = make_folder(home / "photos", {"train": 8, "val": 2, "test": 4})
    train(
        str(photos),
        out=str(home / "run"),
        **{**QUICK_OPTIONS, "epochs": 10, "lr": 3e-3, "mixup": 0.0, "save_every": 1000},
    )
    return photos, home / "run"


@pytest.fixture
def copied_photos_and_run(trained_photos_and_run, tmp_path) -> tuple[Path, Path]:
    """Return copies of the folder and the run that a test may modify; the run's config points to the copy."""
    photos, run = (Path(shutil.copytree(path, tmp_path / path.name)) for path in trained_photos_and_run)
    config = run / "config.yaml"
    config.write_text(config.read_text().replace(str(trained_photos_and_run[0]), str(photos)))
    return photos, run


def test_special_files_are_reported_and_others_are_read(tmp_path, monkeypatch):
    root = make_folder(tmp_path / "x", {"train": 5, "val": 1})
    home = root / "train" / "bee"
    os.mkfifo(home / "pipe.jpg")
    with socket.socket(socket.AF_UNIX) as unix_socket:
        monkeypatch.chdir(home)  # socket paths are limited to 108 bytes
        unix_socket.bind("socket.jpg")
        (home / "dangling.jpg").symlink_to("nowhere")
        (home / "self.jpg").symlink_to("self.jpg")
        (home / "zero.jpg").symlink_to("/dev/zero")
        (home / "deeper.jpg").mkdir()
        make_image(7).save(home / "deeper.jpg" / "7.png")
        (home / "up").symlink_to("..")
        split, start_time = open_data(root).split("train"), time.process_time()
        _, unreadable = screen_images(split, SMALL_PREPROCESS, 0, keep=False)
    assert time.process_time() - start_time < 2
    assert [error.message.split(": ")[0] for error in unreadable.values()] == [
        str(home / f"{name}.jpg") for name in ("dangling", "pipe", "self", "socket", "zero")
    ]
    read_files = [os.path.realpath(split.name(sample)) for sample in range(len(split)) if sample not in unreadable]
    assert str(home / "deeper.jpg" / "7.png") in read_files and "bee" in {Path(path).parent.name for path in read_files}


ODD_FILE_NAMES = [
    b"a\nb.png", b"q'\".png", b"$(touch x).png", b"`touch x`.png", b"--help.png", b"-.png", b"x" * 236 + b".png", b"caf\xe9.png",
    "caf\u00e9.png".encode(), "cafe\u0301.png".encode(), "\u202egnp.exe.png".encode(), "\u05e9\u05dc\u05d5\u05dd.png".encode(),
    "\U0001f9d1\u200d\U0001f680.png".encode(), b"a:b\\c.png", b"=cmd|' -C calc'!A0.png", b"a,b;c\t.png", b"\x1b[31m.png", b"%00.png",
    b"<script>.png", b" .png", b"CON.png",
]  # fmt: skip


@pytest.fixture
def oddly_named_folder(tmp_path) -> Path:
    """Return a folder with a distinct image for each of the names above."""
    root = make_folder(tmp_path / "named", {"": 2}, classes=("a", "b"))
    for number, name in enumerate(ODD_FILE_NAMES):
        with open(os.fsencode(root / "a") + b"/" + name, "wb") as file:
            file.write(encode_image(np.full((16, 16, 3), 10 * number, np.uint8), "PNG"))
    return root


def test_any_file_name_is_read(oddly_named_folder):
    train_split = open_data(oddly_named_folder).with_holdout(0.0, 0).split("train")
    pixels_by_name = {}
    for sample in range(len(train_split)):
        name = train_split.name(sample)
        assert name.isprintable() and "\n" not in name
        pixels_by_name[os.path.basename(os.fsencode(train_split.paths[sample]))] = np.asarray(
            decode_to_pillow(train_split.raw(sample))
        )[0, 0, 0]
    assert {name: pixels_by_name[name] for name in ODD_FILE_NAMES} == {
        name: 10 * number for number, name in enumerate(ODD_FILE_NAMES)
    }


def test_the_command_line_escapes_file_names(oddly_named_folder, trained_photos_and_run, tmp_path):
    make_image(0).save(tmp_path / "=1+1.png")
    arguments = [
        "predict",
        str(trained_photos_and_run[1]),
        "=1+1.png",
        str(oddly_named_folder / "a"),
        "--csv",
        "x.csv",
        "--json",
    ]
    result = run_cli(*arguments, cwd=tmp_path)
    paths = [row["path"] for row in json.loads(result.stdout)["predictions"]]
    assert paths[0] == "=1+1.png" and set(paths[1:]) == {str(path) for path in (oddly_named_folder / "a").iterdir()}, (
        "every name is unchanged"
    )
    assert result.stdout.removesuffix("\n").isprintable() and all(
        line.isprintable() for line in result.stderr.splitlines()
    )
    with open(tmp_path / "x.csv", newline="", encoding="utf-8", errors="surrogateescape") as file:
        assert {row["path"] for row in csv.DictReader(file)} == {"'=1+1.png", *paths[1:]}
    assert not list(tmp_path.rglob("x")), "no name was executed"


CLASS_NAME_CASES = {
    "numbers": (["1", "01", "10", "2"], ["01", "1", "2", "10"]),
    "case": (["Cat", "cat", "dog"], "classes Cat and cat differ only in case"),
    "accents": (["caf\u00e9", "cafe\u0301", "dog"], "differ only in case or accents"),
    "control": (["a\nb", "c"], r"class a\nb has a name that is not one line of UTF-8 text"),
    "escape": (["\x1b[31mred", "c"], r"class \x1b[31mred has a name"),
    "bytes": ([os.fsdecode(b"caf\xe9"), "c"], r"class caf\udce9 has a name"),
    "persian, emoji": (["\u0645\u06cc\u200c\u062e\u0648\u0627\u0647\u0645", "\U0001f9d1\u200d\U0001f680"], None),
    "odd": (["--help", "$(x)", "=1+1", "a'b\"", "a:b"], None),
}


@pytest.mark.parametrize("case", CLASS_NAME_CASES)
def test_unusual_class_names_are_read_or_rejected(tmp_path, case):
    names, expected = CLASS_NAME_CASES[case]
    root = make_folder(tmp_path / "x", {"": 2}, classes=names)
    if len(os.listdir(root)) < len(names):
        pytest.skip("this file system treats the two names as equal")
    if isinstance(expected, str):
        with pytest.raises(DataError) as error:
            open_data(root)
        assert expected in error.value.message and error.value.message.isprintable()
        return
    data = open_data(root).with_holdout(0.0, 0)
    assert list(data.classes) == (expected or sorted(names))
    split = data.split("train")
    assert [data.classes[label] for label in split.labels] == [path.parent.name for path in split.paths]
    assert len(data.fingerprint()) == 64


def test_equal_subfolder_names_belong_to_their_parent_class(tmp_path):
    root = make_folder(tmp_path / "x", {"a": 2, "b": 3}, classes=("same",))
    data = open_data(root).with_holdout(0.0, 0)
    assert data.classes == ("a", "b") and data.split("train").labels.tolist() == [0] * 2 + [1] * 3


@pytest.mark.parametrize("count", [2_000, pytest.param(10_000, marks=pytest.mark.slow)])
def test_thousands_of_single_image_classes_load_quickly(tmp_path, count):
    (tmp_path / ".png").write_bytes(encode_image(make_image(0), "PNG"))
    for number in range(count):
        os.mkdir(tmp_path / str(number))
        os.link(tmp_path / ".png", f"{tmp_path}/{number}/0.png")
    start_time = time.process_time()
    data = open_data(tmp_path)
    assert time.process_time() - start_time < 20  # quadratic time would be minutes
    assert data.classes == tuple(map(str, range(count))) and data.notes == [
        "too few images to hold any out for validation"
    ]
    assert np.array_equal(data.split("train").labels, np.arange(count))


def test_a_class_without_validation_images_shifts_no_label(tmp_path):
    root = make_folder(tmp_path / "x", {"train": 2, "val": 1, "test": 1})
    shutil.rmtree(root / "val" / "ant")
    for image in (root / "test" / "bee").iterdir():
        image.unlink()
    data = open_data(root)
    assert data.classes == ("ant", "bee", "cat")
    assert data.split("val").labels.tolist() == [1, 2] and data.split("test").labels.tolist() == [0, 2]


def run_as_nobody(work) -> str:
    """Return the output of `work`, run by a user without permission to read root's files."""
    reader, writer = os.pipe()
    if child := os.fork():
        os.close(writer)
        with os.fdopen(reader) as pipe:
            output = pipe.read()
        os.waitpid(child, 0)
        return output
    try:
        os.setgid(65534)
        os.setuid(65534)
        text = work()
    except BaseException as error:
        text = f"{type(error).__name__}: {error}"
    os.write(writer, text.encode())
    os._exit(0)


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="switching the user requires root")
def test_files_without_permission_are_reported(tmp_path):
    root = make_folder(tmp_path / "x", {"": 3})
    for path in (root, tmp_path, *tmp_path.parents):
        if path.stat().st_mode & 0o055 != 0o055:
            path.chmod(0o755)
    (root / "bee" / "1.png").chmod(0)

    def read_as_nobody() -> str:
        split = open_data(root).with_holdout(0.0, 0).split("train")
        return "\n".join(error.message for error in screen_images(split, SMALL_PREPROCESS, 0, keep=False)[1].values())

    assert run_as_nobody(read_as_nobody) == f"{root}/bee/1.png: cannot be read (Permission denied)"
    (root / "cat").chmod(0)
    assert run_as_nobody(read_as_nobody).startswith(f"DataError: {root}/cat: cannot be read (Permission denied)")


@pytest.mark.parametrize("share", [0.01, 0.1, 1.0])
def test_bad_images_are_listed_skipped_or_counted_as_wrong(trained_photos_and_run, tmp_path, share):
    root = make_folder(tmp_path / "x", {"train": 50, "test": 50}, classes=("ant", "bee"))
    damaged_files = {}
    for split in ("train", "test"):
        files = sorted((root / split).rglob("*.png"))
        damaged_files[split] = random.Random(0).sample(files, round(share * len(files)))
        for path in damaged_files[split]:
            path.write_bytes(path.read_bytes()[:-30])
    count, options = len(damaged_files["train"]), {**QUICK_OPTIONS, "epochs": 0.1, "out": str(tmp_path / "run")}
    with pytest.raises(DataError) as error:
        train(str(root), **options)
    assert error.value.code == 3
    if share < 1:
        assert " images cannot be read:" in error.value.message
        train(str(root), bad_images="skip", **options)
        data_document = json.loads((tmp_path / "run" / "data.json").read_text())
        listed = error.value.message.splitlines()
        num_readable = data_document["splits"]["train"] - int(listed[0].split()[0])
        assert data_document["train_images"] == num_readable and count - 10 <= int(listed[0].split()[0]) <= count
    else:
        with pytest.raises(DataError) as error:
            train(str(root), bad_images="skip", **options)
        assert error.value.code == 3 and "can be read" in error.value.message
    with pytest.raises(DataError) as error:
        evaluate(trained_photos_and_run[1], root, workers=0)
    assert error.value.message.startswith(f"{count} of 100 images cannot be read:")
    assert len(error.value.message.splitlines()) == 1 + min(count, 20) + (count > 20)
    if share < 1:
        data_document = evaluate(trained_photos_and_run[1], root, bad_images="skip", workers=0)["test"]
        assert (data_document["images"], data_document["unreadable"]) == (100, count) and data_document[
            "top1"
        ] <= 1 - share
    else:
        with pytest.raises(DataError, match="none of 100 images can be read"):
            evaluate(trained_photos_and_run[1], root, bad_images="skip", workers=0)


def test_a_file_deleted_after_the_scan_is_reported(copied_photos_and_run):
    photos, _ = copied_photos_and_run
    data = open_data(photos)
    deleted_file = photos / "train" / "bee" / "3.png"
    deleted_file.unlink()
    (photos / "test" / "cat" / "0.png").unlink()
    split = data.split("train")
    for workers in (0, 1):
        with pytest.raises(DataError, match=r"train/bee/3\.png: cannot be read \(No such file"):
            list(TrainLoader(split, SMALL_PREPROCESS, Augment(), 0, workers=workers).iterate_batches(0, len(split), 4))
        images = [
            image for _, batch in EvalLoader(split, SMALL_PREPROCESS, workers).iterate_batches(10) for image in batch
        ]
        assert [isinstance(image, DataError) for image in images] == [
            split.name(i) == str(deleted_file) for i in range(len(split))
        ]


def test_changed_class_folders_do_not_shift_predictions(copied_photos_and_run):
    photos, run = copied_photos_and_run
    evaluation = evaluate(run, photos, workers=0)
    recall = {row["class"]: row["recall"] for row in evaluation["per_class"]}
    assert len(set(recall.values())) > 1 or evaluation["test"]["top1"] == 1, "shifted labels would change the accuracy"
    for split in ("train", "val", "test"):
        shutil.rmtree(photos / split / "ant")
    smaller_evaluation = evaluate(run, photos, workers=0)
    assert {row["class"]: row["recall"] for row in smaller_evaluation["per_class"]} == {**recall, "ant": None}
    cat_image = photos / "test" / "cat" / "0.png"
    before = load(run).predict([cat_image])[0].probabilities
    (run / "summary.json").unlink()
    with pytest.raises(DataError, match="has changed since the run started") as error:
        train(str(photos), out=str(run), resume=True)
    assert "--allow-data-change" not in error.value.hint, "the option does not apply to changed classes"
    for split in ("train", "val", "test"):
        (photos / split / "bee").rename(photos / split / "aardvark")
    for attempt in (lambda: evaluate(run, photos, workers=0), lambda: evaluate(run, workers=0)):
        with pytest.raises(DataError, match="the model has no classes named aardvark"):
            attempt()
    assert load(run).predict([cat_image])[0].probabilities == before
    assert load(run).predict([cat_image])[0].names == load(run).predict([cat_image])[0].names


def test_a_class_unseen_in_training_is_rejected(copied_photos_and_run):
    photos, run = copied_photos_and_run
    for split in ("train", "val", "test"):
        shutil.copytree(photos / split / "ant", photos / split / "aaa")
    with pytest.raises(DataError, match="has no classes named aaa"):
        evaluate(run, photos, workers=0)
    (run / "summary.json").unlink()
    with pytest.raises(DataError, match="has changed since the run started"):
        train(str(photos), out=str(run), resume=True, allow_data_change=True)


def test_duplicates_across_splits_and_labels_are_reported(copied_photos_and_run):
    photos, _ = copied_photos_and_run
    shutil.copy(photos / "train" / "ant" / "0.png", photos / "test" / "ant" / "copy.png")
    shutil.copy(photos / "train" / "bee" / "0.png", photos / "train" / "cat" / "copy.png")
    result = run_cli("data", "check", str(photos), "--json")
    document_text = json.dumps(json.loads(result.stdout))
    assert result.returncode == 1
    for name in ("test/ant/copy.png", "train/ant/0.png", "train/bee/0.png", "train/cat/copy.png"):
        assert name in document_text


PRINT_ORDER_SCRIPT = """
import hashlib, sys
from vitreous.data.decoding.decode import decode_to_pillow
from vitreous.data.sampling import SampleOrder, get_stream_samples
from vitreous.data.sources import open_data
for root in sys.argv[1:]:
    data = open_data(root)
    digest = hashlib.sha256(repr((data.fingerprint(), data.classes)).encode())
    split = data.split("train")
    samples, epochs, views = get_stream_samples(SampleOrder(len(split), 5), 0, 2 * len(split))
    for sample in samples.tolist():
        digest.update(b"%d" % split.labels[sample] + decode_to_pillow(split.raw(sample)).tobytes())
    print(digest.hexdigest())
assert "torch" not in sys.modules
"""


@pytest.fixture
def identical_datasets(tmp_path) -> list[Path]:
    """Return two datasets with the same images, created in different orders and at different times."""
    roots = [tmp_path / "one", tmp_path / "two"]
    names = ["Zebra", "\u00e9clair", "ant", "10", "9", "b c", "\u0130stanbul", "ill"]
    for number, root in enumerate(roots):
        files = [(name, index) for name in names for index in range(6)]
        random.Random(number).shuffle(files)
        for name, index in files:
            path = root / name / f"{index}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            make_image(index + 10 * names.index(name)).save(path)
            modified_time = 1_000_000_000 * (1 + number) - 7 * index
            os.utime(path, (modified_time, modified_time))
    return roots


@pytest.mark.parametrize("seeds", [5, pytest.param(20, marks=pytest.mark.slow)])
def test_data_order_is_independent_of_hash_seed_and_locale(identical_datasets, seeds):
    locales = ["C", "C.UTF-8", "de_DE.UTF-8", "tr_TR.UTF-8", "POSIX"]

    def print_order(seed: int) -> list[str]:
        environment = {
            **os.environ,
            "PYTHONHASHSEED": str(seed),
            "LC_ALL": locales[seed % 5],
            "TZ": "Asia/Tokyo" if seed % 2 else "UTC",
        }
        command = [sys.executable, "-c", PRINT_ORDER_SCRIPT, *map(str, identical_datasets)]
        return subprocess.run(command, capture_output=True, text=True, check=True, env=environment).stdout.split()

    with ThreadPoolExecutor(2) as pool:
        digests_seen = [digest for digests in pool.map(print_order, range(seeds)) for digest in digests]
    assert len(digests_seen) == 2 * seeds and len(set(digests_seen)) == 1


def test_identical_datasets_give_identical_batches(identical_datasets):
    augment = Augment(crop=(0.3, 1.0), flip=0.5, rand_layers=1, rand_magnitude=9, erase=0.5)
    digests = set()
    for root in identical_datasets:
        loader, digest = (
            TrainLoader(open_data(root).split("train"), ImagePreprocess((12, 12)), augment, 3),
            hashlib.sha256(),
        )
        for batch in loader.iterate_batches(0, 2 * len(loader.split), 7):
            for name in sorted(batch):
                digest.update(batch[name].numpy().tobytes())
        digests.add(digest.hexdigest())
    assert len(digests) == 1
