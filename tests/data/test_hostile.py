"""Every file of the hostile corpus gives the same pixels or error in every command, at a bounded cost."""

from __future__ import annotations

import csv
import hashlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from torch import Tensor

from tests.conftest import TINY_RUN, make_folder, run_cli
from tests.data.crafted import encode_image, insert_segment, repeat_last_scan
from tests.data.hostile import BLOCK_PIXELS, NOISE_PIXELS, HostileFile, build_corpus
from tests.data.mutate import run_mutants
from tests.inference.small_models import read_predictor_input
from vitreous.data.augmentation.augment import Augment
from vitreous.data.decoding import decode as decoding
from vitreous.data.decoding.decode import decode_to_pillow
from vitreous.data.decoding.gate import MAX_JPEG_SCANS
from vitreous.data.loader import DecodingDataset, EvalLoader, TrainLoader
from vitreous.data.screen import screen_images
from vitreous.data.sources import open_data
from vitreous.errors import DataError
from vitreous.inference.predict import Predictor, load
from vitreous.jobs.train import train
from vitreous.progress import NullListener
from vitreous.reports.evaluate import evaluate

pytestmark = pytest.mark.usefixtures("without_pages")  # report pages would slow down the many trainings

NO_FILES = {"pipe.jpg": "not a regular file", "folder.jpg": "not a regular file", "device.jpg": "not a regular file",
            "memory.jpg": "empty file", "dangling.jpg": "No such file", "loop.jpg": "symbolic links"}  # fmt: skip


@pytest.mark.parametrize("case", build_corpus(), ids=lambda case: case.name)
def test_every_file_gives_its_pixels_or_its_error(case: HostileFile):
    if case.error_pattern is not None:
        with pytest.raises(DataError, match=case.error_pattern) as error:
            decode_to_pillow(case.content, name=case.name)
        assert error.value.message.startswith(case.name) and (error.value.hint or not case.content)
        return
    pixels = np.asarray(decode_to_pillow(case.content, name=case.name)).astype(int)
    if case.golden is not None:
        assert pixels.shape == case.golden.shape
        assert np.abs(pixels - case.golden).max() <= case.tolerance


def test_all_exif_orientations_decode_to_the_same_image():
    exif_images = [decode_to_pillow(case.content) for case in build_corpus() if re.match(r"exif_\d", case.name)]
    assert len(exif_images) == 8 and len({image.tobytes() for image in exif_images}) == 1


@pytest.fixture(scope="module")
def corpus_files(tmp_path_factory) -> dict[str, Path]:
    """Write every case and some special files; return name -> path."""
    home = tmp_path_factory.mktemp("corpus")
    for case in build_corpus():
        (home / case.name).write_bytes(case.content)
    os.mkfifo(home / "pipe.jpg")
    (home / "folder.jpg").mkdir()
    (home / "device.jpg").symlink_to("/dev/zero")
    (home / "memory.jpg").symlink_to("/proc/self/mem")
    (home / "dangling.jpg").symlink_to("nowhere")
    (home / "loop.jpg").symlink_to("loop.jpg")
    return {name: home / name for name in [*(case.name for case in build_corpus()), *NO_FILES]}


@pytest.fixture(scope="module")
def corpus_table(corpus_files) -> Path:
    """Return a table that lists every file once in train and once in test."""
    path = corpus_files["ok.jpg"].parent / "table.csv"
    with open(path, "w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["path", "label", "split"])
        writer.writerows(
            [name, "ab"[number % 2], split] for split in ("train", "test") for number, name in enumerate(corpus_files)
        )
    return path


@pytest.fixture(scope="module")
def predictor(tmp_path_factory) -> Predictor:
    """Return an untrained model with the classes a and b."""
    home = tmp_path_factory.mktemp("model")
    photos = make_folder(home / "photos", {"train": 2, "val": 1}, classes=("a", "b"))
    train(str(photos), out=str(home / "run"), workers=0, **{**TINY_RUN, "epochs": 1, "accumulate": 1})
    return load(home / "run")


@pytest.fixture(scope="module")
def decode_results(corpus_files, predictor) -> dict[str, str]:
    """Map each name to the error of `decode_to_pillow`, or to the digest of the model's input."""

    def decode(path: Path) -> Tensor | DataError:
        try:
            return predictor.bundle.preprocess.to_tensor(decode_to_pillow(path))
        except DataError as error:
            return error

    return {name: describe_result(decode(path)) for name, path in corpus_files.items()}


def describe_result(result: Tensor | np.ndarray | DataError) -> str:
    """Return the error text, or the digest of the pixels."""
    return result.message if isinstance(result, DataError) else hashlib.sha256(np.asarray(result).tobytes()).hexdigest()


def get_rejected_files(decode_results: dict[str, str]) -> dict[str, str]:
    """Return the rejected files with their reasons."""
    return {name: message for name, message in decode_results.items() if " " in message}


def test_special_files_are_rejected(decode_results):
    for name, reason in NO_FILES.items():
        assert reason in decode_results[name] and name in decode_results[name]
    expected = {case.name for case in build_corpus() if case.error_pattern is not None} | set(NO_FILES)
    assert set(get_rejected_files(decode_results)) == expected


def test_every_code_path_gives_the_same_pixels_or_error(corpus_files, corpus_table, predictor, decode_results):
    split, preprocess = open_data(corpus_table).split("test"), predictor.bundle.preprocess

    def evaluate_samples(workers: int) -> list[str]:
        return [
            describe_result(image)
            for _, images in EvalLoader(split, preprocess, workers).iterate_batches(50)
            for image in images
        ]

    def train_samples(loader: TrainLoader) -> list[str]:
        return [describe_result(DecodingDataset(loader)[sample, 0, 0][1]) for sample in range(len(split))]

    pixels, errors_by_index = screen_images(split, preprocess, 0, keep=True)
    assert pixels is not None
    paths = {
        "predict": [describe_result(read_predictor_input(predictor, path)) for path in corpus_files.values()],
        "evaluate": evaluate_samples(0),
        "evaluate, in workers": evaluate_samples(2),
        "screen": [describe_result(errors_by_index.get(sample, pixels[sample])) for sample in range(len(split))],
        "train": train_samples(TrainLoader(split, preprocess, Augment(), 0)),
    }
    for name, results in paths.items():
        assert dict(zip(corpus_files, results, strict=True)) == decode_results, name
    crops = train_samples(TrainLoader(split, preprocess, Augment(crop=(0.05, 1.0), flip=0.5), 0))
    assert get_rejected_files(dict(zip(corpus_files, crops, strict=True))) == get_rejected_files(decode_results)


def test_predict_names_unreadable_files(corpus_files, predictor, decode_results):
    predictions = predictor.predict(list(corpus_files.values()), bad_images="skip")
    assert {
        name: prediction.error for name, prediction in zip(corpus_files, predictions, strict=True) if prediction.error
    } == get_rejected_files(decode_results)
    with pytest.raises(DataError, match=re.escape(decode_results["zero.jpg"])):
        predictor.predict([corpus_files["ok.jpg"], corpus_files["zero.jpg"], corpus_files["html.jpg"]])


def test_the_command_line_reports_the_same_errors(corpus_files, predictor, decode_results, tmp_path):
    run = save_predictor(predictor, tmp_path)
    # a folder argument is expanded to the images in it
    arguments = {name: path for name, path in corpus_files.items() if not path.is_dir()}
    result = run_cli("predict", str(run), *map(str, arguments.values()), "--json")
    predictions = json.loads(result.stdout)["predictions"]
    assert result.returncode == 3
    expected = {name: message for name, message in get_rejected_files(decode_results).items() if name in arguments}
    assert {name: row["error"] for name, row in zip(arguments, predictions, strict=True) if row["error"]} == expected


def save_predictor(predictor: Predictor, home: Path) -> Path:
    """Save the model as a bundle in a folder."""
    assert predictor.bundle is not None
    predictor.bundle.save(home / "model")
    return home / "model"


def test_evaluation_counts_unreadable_files_as_wrong(corpus_files, corpus_table, predictor, decode_results, tmp_path):
    run, rejected = save_predictor(predictor, tmp_path), get_rejected_files(decode_results)
    test_metrics = evaluate(run, corpus_table, bad_images="skip", workers=0)["test"]
    assert (test_metrics["images"], test_metrics["unreadable"]) == (len(corpus_files), len(rejected))
    assert test_metrics["top1"] <= 1 - len(rejected) / len(corpus_files)
    with pytest.raises(DataError) as error:
        evaluate(run, corpus_table, workers=0)
    check_listing(error.value, rejected, len(corpus_files))


def check_listing(error: DataError, rejected: dict[str, str], total: int) -> None:
    """Assert that an error lists the first twenty files with their reasons, and counts the rest."""
    assert error.code == 3 and error.message.startswith(f"{len(rejected)} of {total} images cannot be read:")
    lines = error.message.splitlines()[1:]
    assert [line.strip() for line in lines[:-1]] == list(rejected.values())[:20]
    assert lines[-1].strip() == f"and {len(rejected) - 20} more"


def test_training_stops_at_or_skips_unreadable_files(corpus_files, corpus_table, decode_results, tmp_path):
    rejected, notes = get_rejected_files(decode_results), list[str]()
    options = {**TINY_RUN, "epochs": 0.2, "accumulate": 1, "workers": 0, "out": str(tmp_path / "run")}
    with pytest.raises(DataError) as error:
        train(str(corpus_table), **options)
    assert error.value.message.splitlines()[0].endswith("images cannot be read:")
    assert not (tmp_path / "run").exists()

    class NoteListener(NullListener):
        """Keeps the notes."""

        def note(self, text: str) -> None:
            notes.append(text)

    train(str(corpus_table), NoteListener(), bad_images="skip", **options)
    left = next(match for note in notes if (match := re.match(r"(\d+) of (\d+) training images cannot be read", note)))
    data_document = json.loads((tmp_path / "run" / "data.json").read_text())
    assert data_document["train_images"] == int(left[2]) - int(left[1]) and 0 < int(left[1]) <= len(rejected)


def test_data_check_reports_the_same_errors(corpus_files, corpus_table, decode_results):
    result = run_cli("data", "check", str(corpus_table), "--json")
    document_text = json.dumps(json.loads(result.stdout))
    assert result.returncode == 1
    for name, message in get_rejected_files(decode_results).items():
        assert (
            json.dumps(message)[1:-1] in document_text or json.dumps(message.split(": ", 1)[1])[1:-1] in document_text
        ), name


def test_rejecting_a_file_takes_under_100_ms_and_20_mb(corpus_files, decode_results):
    paths = {name: str(corpus_files[name]) for name in get_rejected_files(decode_results)}
    command = [sys.executable, "-m", "tests.data.cost", *paths.values()]
    measurements = [
        json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout) for _ in range(2)
    ]
    for name, path in paths.items():
        assert min(once[path][0] for once in measurements) < 0.1, name
        assert min(once[path][1] for once in measurements) < 20 * 2**20, name


IMAGE_ENCODINGS = {
    "JPEG": {}, "JPEG progressive": {"progressive": True}, "PNG": {}, "GIF": {}, "BMP": {}, "WEBP": {}, "WEBP lossless": {"lossless": True},
    "TIFF": {}, "TIFF lzw": {"compression": "tiff_lzw"}, "TIFF deflate": {"compression": "tiff_adobe_deflate"},
}  # fmt: skip


@pytest.mark.parametrize("image_format", IMAGE_ENCODINGS)
def test_truncated_files_are_rejected_or_decoded_completely(image_format):
    content = encode_image(NOISE_PIXELS[:24, :24], image_format.split()[0], **IMAGE_ENCODINGS[image_format])
    pixels, refusals = np.asarray(decode_to_pillow(content)), 0
    for end in [*range(1, len(content) - 40, 13), *range(len(content) - 40, len(content))]:
        try:
            assert np.array_equal(np.asarray(decode_to_pillow(content[:end])), pixels), end
        except DataError:
            refusals += 1
    assert refusals > 40


def test_jpeg_scans_are_limited_and_counted_exactly():
    ten = encode_image(NOISE_PIXELS, "JPEG", progressive=True)
    pixels, scan_markers = np.asarray(decode_to_pillow(ten)), b"\xff\xda" * (MAX_JPEG_SCANS + 1)
    assert ten.count(b"\xff\xda") == 10
    for content in (ten + scan_markers, insert_segment(ten, 0xE5, scan_markers)):
        assert np.array_equal(np.asarray(decode_to_pillow(content)), pixels)
    decode_to_pillow(repeat_last_scan(ten, MAX_JPEG_SCANS - 10))
    with pytest.raises(DataError, match="scans"):
        decode_to_pillow(repeat_last_scan(ten, MAX_JPEG_SCANS - 9))


@pytest.mark.parametrize("change", ["shorter", "longer", "another", "gone"])
def test_a_file_changed_while_reading_is_detected(tmp_path, monkeypatch, change):
    path, opened = tmp_path / "x.png", decoding.open_input_file
    path.write_bytes(encode_image(BLOCK_PIXELS, "PNG"))

    def open_and_change(file_path):
        file = opened(file_path)
        if change == "shorter":
            os.truncate(file_path, 70)
        elif change == "longer":
            with open(file_path, "ab") as appended_file:
                appended_file.write(bytes(10_000))
        elif change == "another":
            (tmp_path / "y.png").write_bytes(encode_image(Image.new("RGB", (3, 3)), "PNG"))
            os.replace(tmp_path / "y.png", file_path)
        else:
            os.unlink(file_path)
        return file

    monkeypatch.setattr(decoding, "open_input_file", open_and_change)
    if change == "shorter":
        with pytest.raises(DataError, match=r"x\.png: cannot be read"):
            decode_to_pillow(path)
    else:
        assert np.array_equal(np.asarray(decode_to_pillow(path)), BLOCK_PIXELS)


def test_2000_mutated_files_decode_or_raise_data_errors():
    tally = run_mutants(2_000)
    assert not tally.misses, tally
    assert tally.counts["accepted"] > 100 and tally.counts["refused"] > 1_000 and tally.counts.total() == 2_000
