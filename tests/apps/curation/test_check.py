"""`data check` of classification data: unreadable files, duplicates, imbalance, groups and workers."""

from __future__ import annotations

import csv
import faulthandler
import hashlib
import json
import os
import signal
import subprocess
import sys
import time
import tracemalloc
from functools import partial
from html.parser import HTMLParser

import numpy as np
import pytest
from PIL import Image, ImageDraw, ImageEnhance, ImageOps

from tests.apps.curation.test_copies import draw_photo as photograph
from tests.conftest import TINY_RUN, make_folder, make_image
from tests.data.hostile import build_corpus
from vitreous.apps.curation.check import check_dataset as check_images
from vitreous.apps.curation.checks.facts import group_by_reason
from vitreous.apps.curation.checks.page import render_check_page
from vitreous.apps.curation.checks.record import RECORD, ImageTrait, survey_images
from vitreous.apps.curation.checks.subject import open_checked_dataset
from vitreous.apps.curation.copies import alike
from vitreous.apps.curation.copies import scan as scanning
from vitreous.apps.curation.copies.alike import group_by_number, group_exact_copies
from vitreous.apps.curation.copies.scan import UNREADABLE
from vitreous.apps.curation.copies.windows import DESCRIPTOR_LENGTH
from vitreous.apps.curation.dedup import find_copies
from vitreous.cli.console import Console
from vitreous.cli.data_check import Options, run
from vitreous.cli.main import run_command
from vitreous.data.decoding.decode import decode_to_pillow
from vitreous.data.grouping import split_by_groups
from vitreous.data.sources import open_data
from vitreous.data.split import ArraySplit
from vitreous.errors import DataError, ResourceError, UsageError
from vitreous.jobs.data import prepare_data
from vitreous.jobs.train import train
from vitreous.jobs.transfer import hold_out_inputs
from vitreous.progress import NullListener
from vitreous.recipes.options import TrainOptions
from vitreous.reports.evaluate import evaluate
from vitreous.training.folder import RunFolder


def draw_scene(seed: int, size: tuple[int, int] = (96, 72)) -> Image.Image:
    """Return an image of a few large shapes; different seeds differ like different photos."""
    random = np.random.default_rng(seed)
    image = Image.new("RGB", size, tuple(random.integers(0, 256, 3).tolist()))
    draw = ImageDraw.Draw(image)
    for _ in range(9):
        x, y = random.integers(0, size[0]), random.integers(0, size[1])
        w, h = random.integers(10, 50, 2)
        draw.ellipse((x - w // 2, y - h // 2, x + w // 2, y + h // 2), fill=tuple(random.integers(0, 256, 3).tolist()))
    return image


def write_scenes(root, counts, classes=("ant", "bee")):
    """Write root/SPLIT/CLASS/N.png with distinct images."""
    for s, (split, count) in enumerate(counts.items()):
        for c, name in enumerate(classes):
            (root / split / name).mkdir(parents=True)
            for index in range(count):
                draw_scene(1000 * s + 100 * c + index).save(root / split / name / f"{index}.png")
    return root


def check_to_document(source, **options):
    """Return the JSON document of a check."""
    return check_images(source, **options)[0]


def scan_split(split, workers):
    """Return the records of all samples of a split, and the errors of the unreadable ones."""
    return scanning.scan_samples(split, range(len(split)), survey_images, workers)


def get_findings_by_code(document):
    """Map each kind of finding to its entry."""
    return {finding["code"]: finding for finding in document["findings"]}


def test_a_valid_dataset_passes_and_is_counted(tmp_path):
    root = write_scenes(tmp_path / "photos", {"train": 12, "val": 3, "test": 4})
    document = check_to_document(root, workers=0, image_size=64)
    assert document["passed"] and not document["findings"]
    assert {name: row["images"] for name, row in document["splits"].items()} == {"train": 24, "val": 6, "test": 8}
    assert document["splits"]["val"]["per_class"] == {"ant": 3, "bee": 3}
    assert document["splits"]["val"]["bytes"] == sum(path.stat().st_size for path in (root / "val").glob("*/*"))
    assert (
        document["class_balance"]["effective_classes"] == pytest.approx(2)
        and document["class_balance"]["max_images"] == 12
    )
    assert (
        document["image_sizes"]["width"] == {"min": 96, "median": 96, "max": 96}
        and document["image_sizes"]["fraction_smaller"] == 0
    )
    pixels = np.concatenate([np.asarray(Image.open(path)).reshape(-1, 3) for path in root.glob("*/*/*")]) / 255
    assert document["colour"]["mean"] == pytest.approx(pixels.mean(0), abs=1e-5)
    assert document["colour"]["std"] == pytest.approx(pixels.std(0), abs=1e-5)
    assert (
        document["formats"] == {"PNG": 38} and document["modes"] == {"RGB": 38} and document["bit_depths"] == {"8": 38}
    )


def test_unreadable_images_are_those_that_decoding_rejects(tmp_path):
    root = make_folder(tmp_path / "photos", {"": 2}, classes=("ant", "bee"))
    for case in build_corpus():
        (root / "ant" / case.name).write_bytes(case.content)
    os.mkfifo(root / "bee" / "pipe.png")
    os.symlink("nowhere", root / "bee" / "dangling.png")
    document = check_to_document(root, workers=1)
    expected = {}
    paths = open_checked_dataset(str(root)).splits["train"].paths
    for path in paths:
        try:
            decode_to_pillow(path, 3)
        except DataError as error:
            expected[str(path)] = error.message.removeprefix(f"{path}: ")
    assert {row["path"]: row["reason"] for row in document["unreadable"]} == expected
    assert len(expected) > 20 and not document["passed"]
    image_traits = document["traits"]
    accepted = {case.name for case in build_corpus() if case.error_pattern is None}
    # all but exif_1
    assert image_traits["exif_rotated"] == sum(name.startswith("exif_") and name[5].isdigit() for name in accepted) - 1
    assert {os.path.basename(row["path"]) for row in document["wrong_extension"]} == {"png_named.jpg"}
    assert (
        image_traits["animated"] >= 5
        and image_traits["alpha"] >= 5
        and document["modes"]["CMYK"] >= 3
        and document["bit_depths"]["16"] >= 4
    )
    assert sum(len(rows) for _, rows in group_by_reason(document["unreadable"])) == len(expected)


def test_copies_across_splits_and_under_two_labels_fail(tmp_path):
    root = write_scenes(tmp_path / "photos", {"train": 11, "test": 4})
    copy = (root / "train/ant/0.png").read_bytes()
    for file_name in ("test/ant/x.png", "test/ant/y.png", "train/ant/z.png", "train/bee/other.png"):
        (root / file_name).write_bytes(copy)
    draw_scene(7000).save(root / "train/bee/near.png")
    draw_scene(7000).save(root / "test/bee/near.jpg", quality=50)
    document = check_to_document(root, workers=0)
    assert document["exact_duplicates"]["groups"] == 1 and document["exact_duplicates"]["surplus"] == 4
    assert (
        document["exact_duplicates"]["across_splits"] == {"train/test": 2}
        and document["exact_duplicates"]["conflicting_labels"] == 1
    )
    (near_group,) = document["near_duplicates"]["listed_groups"]
    assert {os.path.basename(row["path"]) for row in near_group} == {"near.png", "near.jpg"}
    findings = get_findings_by_code(document)
    assert {name for name, finding in findings.items() if finding["level"] == "error"} == {"leak", "conflicting_labels"}
    assert findings["near_leak"]["level"] == "warning" and "data dedup" in findings["leak"]["hint"]


def test_near_duplicates_of_whole_images_match_dedup(tmp_path):
    home = tmp_path / "photos"
    for label, first in (("ant", 0), ("bee", 30)):
        (home / label).mkdir(parents=True)
        for seed in range(first, first + 8):
            photograph(seed).save(home / label / f"{seed}.png")
    changed = {
        "mirrored": ImageOps.mirror(photograph(1)),
        "mirrored, less contrast": ImageEnhance.Contrast(ImageOps.mirror(photograph(2))).enhance(0.6),
        "framed": ImageOps.expand(photograph(3), 8, "black"),
        "other colours": Image.merge("RGB", photograph(4).split()[::-1]),
        "cut to half": photograph(5).crop((0, 0, 113, 85)),
    }
    for name, image in changed.items():
        image.save(home / "bee" / f"{name}.png")
    document = check_to_document(home, workers=0)
    near_pairs = {
        tuple(os.path.basename(row["path"]) for row in group) for group in document["near_duplicates"]["listed_groups"]
    }
    quick = {
        ("1.png", "mirrored.png"),
        ("2.png", "mirrored, less contrast.png"),
        ("3.png", "framed.png"),
        ("4.png", "other colours.png"),
    }
    assert near_pairs == quick
    every = find_copies([open_data(home).full_train_split], [], within=True, workers=0)["duplicates"]
    pairs = {(os.path.basename(copy["duplicate_of"]), os.path.basename(copy["path"])) for copy in every}
    assert pairs == quick | {("5.png", "cut to half.png")}
    assert (
        "near-duplicates of other images" in get_findings_by_code(document)["duplicates"]["message"]
        and "data dedup" in get_findings_by_code(document)["duplicates"]["hint"]
    )


def test_only_the_most_similar_candidates_are_read_again(monkeypatch):
    records = np.zeros(40, RECORD)
    records["state"], records["std"], records["digest"][:, 0] = 1, 50, np.arange(40)
    whole_views, noise = (
        values / np.linalg.norm(values, axis=1, keepdims=True)
        for values in np.random.default_rng(0).normal(size=(2, 20, DESCRIPTOR_LENGTH))
    )
    noise = noise * np.linspace(0.02, 0.4, 20)[:, None]
    for rows, values in ((slice(0, 20), whole_views), (slice(20, 40), whole_views + noise)):
        records["whole"][rows] = np.rint(127 * values / np.linalg.norm(values, axis=1, keepdims=True))
    for most in (6, 14):
        monkeypatch.setattr(alike, "REREAD_IMAGES", most)
        pairs = alike.propose_near_pairs(records)
        assert sorted(map(tuple, np.stack([pairs["of"], pairs["sample"]], 1).tolist())) == [
            (i, i + 20) for i in range(most // 2)
        ]


def test_duplicate_pairs_that_share_an_image_form_one_group():
    pairs = np.array([[3, 9, 4, 12, 30], [7, 3, 5, 4, 31]])
    assert [group.tolist() for group in alike.group_connected_samples(pairs)] == [[3, 7, 9], [4, 5, 12], [30, 31]]
    assert alike.group_connected_samples(np.empty((2, 0), np.int64)) == []


def test_small_missing_and_imbalanced_classes_are_reported(tmp_path):
    root = write_scenes(tmp_path / "photos", {"train": 30, "test": 2}, ("ant", "bee", "cat"))
    for path in [*list((root / "train" / "cat").glob("*"))[2:], *(root / "test" / "bee").glob("*")]:
        path.unlink()
    (root / "train" / "notes.txt").write_text("")
    make_image(5).save(root / "train" / "loose.png")
    document = check_to_document(root, workers=0)
    findings = get_findings_by_code(document)
    assert document["passed"]
    assert "30" in findings["imbalance"]["message"] and "--sampling balanced" in findings["imbalance"]["hint"]
    assert document["class_balance"]["small_classes"] == {"cat": 2} and document["class_balance"][
        "missing_classes"
    ] == {"test": ["bee"]}
    assert document["ignored_files"] == {"images": 1, ".txt": 1} and {
        "ignored_images",
        "ignored_files",
        "missing_classes",
        "small_classes",
    } <= set(findings)


def test_a_folder_that_training_rejects_is_still_checked(tmp_path):
    root = write_scenes(tmp_path / "photos", {"": 3}, ("one",))
    (root / "one" / "bad.jpg").write_bytes(b"\xff")
    document = check_to_document(root, workers=0)
    assert not document["passed"] and document["layout_error"] is None
    assert [finding["code"] for finding in document["findings"][:2]] == ["unreadable", "label_error"]
    assert "one class only" in document["label_error"]["message"] and document["class_balance"] is None
    assert document["splits"]["images"]["images"] == 4 and len(document["unreadable"]) == 1
    (root / "One").mkdir()
    (root / "One" / "0.png").write_bytes((root / "one" / "0.png").read_bytes())
    document = check_to_document(root, workers=0)
    assert not document["passed"] and document["findings"][0]["code"] == "layout_error"
    assert "differ only in case" in document["layout_error"]["message"] and document["splits"]["images"]["images"] == 5
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match="no images"):
        check_to_document(tmp_path / "empty", workers=0)
    with pytest.raises(DataError, match="no such"):
        check_to_document(tmp_path / "nothing", workers=0)


@pytest.mark.parametrize("size, input_side", [((32, 32), 32), ((28, 30), 32), ((12, 16), 12), ((96, 72), 224)])
def test_the_checked_input_size_is_that_of_train(tmp_path, size, input_side, capsys):
    for label in ("ant", "bee"):
        (tmp_path / "photos" / label).mkdir(parents=True)
        for index in range(6):
            draw_scene(index + 50 * (label == "bee"), size).save(tmp_path / "photos" / label / f"{index}.png")
    (tmp_path / "photos" / "ant" / "0.png").write_bytes(b"not an image")  # the size is that of the first readable image
    document = run(Options(data=str(tmp_path / "photos"), workers=0), Console())
    options = TrainOptions(str(tmp_path / "photos"), bad_images="skip", device="cpu", precision="fp32")
    _, planned, _ = prepare_data(options.data, None, options, NullListener())
    assert document["image_sizes"]["model_input"] == min(planned.model.image) == input_side
    assert (
        run(Options(data=str(tmp_path / "photos"), workers=0, image_size=48), Console())["image_sizes"]["model_input"]
        == 48
    )
    assert ("small" in get_findings_by_code(document)) == (input_side == 224)


@pytest.mark.parametrize("home", ["", "train"])
def test_a_flat_folder_is_reported_and_its_images_are_checked(tmp_path, home):
    root = tmp_path / "flat"
    (root / home).mkdir(parents=True)
    for index in range(3):
        draw_scene(index).save(root / home / f"{index}.png")
    (root / home / "again.png").write_bytes((root / home / "1.png").read_bytes())
    (root / home / "bad.jpg").write_bytes(b"\xff")
    document, split = check_to_document(root, workers=0), home or "images"
    unlabelled = document["label_error"]
    assert f"{root / home} is a flat folder: 5 images and no class folders" in unlabelled["message"]
    assert "folder of its class" in unlabelled["hint"] and "path,label" in unlabelled["hint"]
    assert document["splits"][split]["images"] == 5 and len(document["unreadable"]) == 1
    assert document["exact_duplicates"]["groups"] == 1 and not document["passed"]
    (root / home / "bad.jpg").unlink()
    document = check_to_document(root, workers=0)
    assert document["passed"] and document["findings"][0]["code"] == "label_error"


def test_in_memory_and_multichannel_images_are_checked(tmp_path):
    assert check_to_document("digits", workers=0)["passed"]
    for name in ("ant", "bee"):
        (tmp_path / "bands" / name).mkdir(parents=True)
        for index in range(3):
            noise = np.random.default_rng([index, len(name), ord(name[0])]).integers(
                0, 60_000, (5, 12, 16), dtype=np.uint16
            )
            np.save(tmp_path / "bands" / name / f"{index}.npy", noise)
    np.save(tmp_path / "bands" / "ant" / "other.npy", np.zeros((4, 12, 16), np.uint16))
    document = check_to_document(tmp_path / "bands", workers=1)
    assert document["channels"] == {"count": 5, "dtype": "uint16"} and document["bit_depths"] == {"16": 6}
    assert [os.path.basename(row["path"]) for row in document["unreadable"]] == ["other.npy"]


def test_results_are_identical_for_any_number_of_workers(tmp_path):
    root = write_scenes(tmp_path / "photos", {"train": 40, "test": 9})
    for index in range(0, 40, 7):
        (root / "train" / "ant" / f"{index}.png").write_bytes(b"GIF89a" + bytes(index))
    (root / "test/bee/same.png").write_bytes((root / "train/bee/5.png").read_bytes())
    outputs = []
    for workers in (0, 1, 3):
        document, subject = check_images(str(root), workers=workers)
        outputs.append((json.dumps(document), render_check_page(document, subject)))
    assert outputs[0] == outputs[1] == outputs[2]


class CrashingSplit(ArraySplit):
    """Images of which some crash or hang the process that reads them."""

    deadly = frozenset({3, 4, 5, 70, 127})
    endless = frozenset({90})

    def raw(self, sample):
        faulthandler.disable()
        if sample in self.deadly:
            os.kill(os.getpid(), signal.SIGSEGV if sample != 70 else signal.SIGKILL)
        while sample in self.endless:
            time.sleep(0.1)
        return super().raw(sample)


def test_a_worker_crash_or_hang_loses_only_one_file(monkeypatch):
    monkeypatch.setattr(scanning, "TASK_TIMEOUT", 1.0)
    pixels = np.random.default_rng(0).integers(0, 256, (128, 8, 8), dtype=np.uint8)
    labels = np.zeros(128, np.int64)
    (expected_records, _), (records, reasons) = (
        scan_split(ArraySplit(pixels, labels), 0),
        scan_split(CrashingSplit(pixels, labels), 2),
    )
    assert set(reasons) == CrashingSplit.deadly | CrashingSplit.endless
    assert "SIGSEGV" in reasons[3] and "SIGKILL" in reasons[70] and "longer than 1 s" in reasons[90]
    is_readable = np.array([sample not in reasons for sample in range(128)])
    assert (records["state"][~is_readable] == UNREADABLE).all() and (
        records[is_readable] == expected_records[is_readable]
    ).all()


def test_workers_that_exit_at_start_fail_the_check(monkeypatch):
    monkeypatch.setattr(scanning, "start_scan_worker", lambda *words: os._exit(9))
    with pytest.raises(ResourceError, match="processes ended before they read an image"):
        scan_split(ArraySplit(np.zeros((4, 2, 2), np.uint8), np.zeros(4, np.int64)), 2)


class RepeatedImageSplit(ArraySplit):
    """A small image repeated `len(labels)` times, with one pixel changed in each."""

    def __len__(self):
        return len(self.labels)

    def raw(self, sample):
        pixels = self.pixels.copy()
        pixels[0, :4] = sample >> np.arange(0, 32, 8) & 255
        return pixels


def test_memory_use_is_one_record_per_file():
    assert RECORD.itemsize <= 100
    pixels = np.random.default_rng(0).integers(0, 256, (4, 4), dtype=np.uint8)
    memory_growth = []
    scan_split(RepeatedImageSplit(pixels, np.zeros(64, np.int64)), 0)  # one-time allocations
    for count in (200, 1_700):
        split = RepeatedImageSplit(pixels, np.zeros(count, np.int64))
        tracemalloc.start()
        records, _ = scan_split(split, 0)
        memory_growth.append(tracemalloc.get_traced_memory()[0])
        tracemalloc.stop()
        assert len(np.unique(records["digest"], axis=0)) == count
    assert (memory_growth[1] - memory_growth[0]) / 1_500 < RECORD.itemsize + 16


def test_equal_digests_are_grouped():
    random = np.random.default_rng(0)
    records = np.zeros(300, RECORD)
    records["digest"] = random.integers(0, 90, (300, 1))
    records["state"] = random.integers(1, 3, 300)
    groups: dict[int, list[int]] = {}
    for row in np.flatnonzero(records["state"] == 1):
        groups.setdefault(int(records["digest"][row, 0]), []).append(int(row))
    expected = sorted(group for group in groups.values() if len(group) > 1)
    assert [group.tolist() for group in group_exact_copies(records)] == expected and len(expected) > 20
    assert group_by_number(np.empty(0, np.int64), np.empty(0, np.int64)) == []


class OpenTagParser(HTMLParser):
    """Collects the unclosed tags and all tags of a page."""

    def __init__(self):
        super().__init__()
        self.open, self.tags, self.sources = [], set(), []

    def handle_starttag(self, tag, attributes):
        self.tags.add(tag)
        self.sources += [value for name, value in attributes if name in ("src", "href")]
        if tag not in ("meta", "img", "br"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def test_the_page_is_self_contained_and_escapes_names(tmp_path):
    root = write_scenes(tmp_path / "photos", {"train": 3, "test": 2}, ("ant", "<script>alert(1)<b>"))
    (root / "train/ant/<img src=x onerror=y>\n.png").write_bytes(b"")
    (root / "test/ant/same.png").write_bytes((root / "train/ant/1.png").read_bytes())
    for index in range(30):
        (root / f"train/ant/copy{index}.png").write_bytes((root / "train/ant/2.png").read_bytes())
    document, subject = check_images(str(root), workers=0)
    text = render_check_page(document, subject)
    parser = OpenTagParser()
    parser.feed(text)
    assert not parser.open and "script" not in parser.tags and {"svg", "rect", "img"} <= parser.tags
    assert parser.sources and all(source.startswith("data:image/jpeg;base64,") for source in parser.sources)
    assert "&lt;script&gt;" in text and "\\n.png" in text and len(text) < 200_000


def test_the_command_prints_findings_and_sets_the_exit_status(tmp_path, capsys):
    root = write_scenes(tmp_path / "photos", {"train": 4, "test": 2})
    assert run_command(["data", "check", str(root), "--json", "--workers", "1"]) == 0
    assert json.loads(capsys.readouterr().out)["passed"]
    (root / "train" / "ant" / "=cmd\n.png").write_bytes(b"no image")
    out = tmp_path / "report.html"
    assert run_command(["data", "check", str(root), "--workers", "1", "--out", str(out)]) == 1
    output = capsys.readouterr().out
    assert "=cmd\\n.png" in output and "not an image" in output and "failed" in output
    assert out.read_text("utf-8").startswith("<!DOCTYPE html>")
    with pytest.raises(UsageError, match="does not exist"):
        run(Options(data=str(root), out=str(tmp_path / "no" / "where.html")), Console())


ENDLESS_SCRIPT = """
import signal, sys, time
from vitreous.cli.main import main
from vitreous.data.split import FileSplit
real = FileSplit.raw
FileSplit.raw = lambda split, sample: real(split, sample) if split.name(sample).endswith("0.png") else time.sleep(600)
signal.signal(signal.SIGINT, signal.default_int_handler)  # shells let background jobs ignore SIGINT
main(sys.argv[1:])
"""


def test_ctrl_c_leaves_no_page_and_no_process(tmp_path):
    root = write_scenes(tmp_path / "photos", {"train": 2, "test": 2})
    command = [
        sys.executable,
        "-c",
        ENDLESS_SCRIPT,
        "data",
        "check",
        str(root),
        "--workers",
        "2",
        "--out",
        str(tmp_path / "report.html"),
    ]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, start_new_session=True)
    assert process.stderr is not None and process.stderr.readline().startswith("check")
    os.killpg(process.pid, signal.SIGINT)
    assert process.wait(timeout=120) == 130
    assert "Traceback" not in process.stderr.read() and not list(tmp_path.glob("*report*"))
    with pytest.raises(ProcessLookupError):
        os.killpg(process.pid, 0)


def write_patient_images(root, count=12, images_per_patient=4):
    """Write root/CLASS/PATIENT_N.png with several images per patient; a patient has a single class."""
    for number in range(count):
        home = root / ("ant", "bee")[number % 2]
        home.mkdir(parents=True, exist_ok=True)
        for index in range(images_per_patient):
            draw_scene(10 * number + index, (16, 16)).save(home / f"patient{number}_{index}.png")
    return root


def get_patient_ids(split):
    return {os.path.basename(split.name(sample)).split("_")[0] for sample in range(len(split))}


def test_groups_stay_together_in_train_resume_and_evaluate(tmp_path):
    root = write_patient_images(tmp_path / "photos")
    ungrouped = open_data(root)
    # without groups they are split
    assert get_patient_ids(ungrouped.splits["train"]) & get_patient_ids(ungrouped.splits["val"])
    opened = open_data(root, 0, r"(patient\d+)_")
    assert not get_patient_ids(opened.splits["train"]) & get_patient_ids(opened.splits["val"]) and get_patient_ids(
        opened.splits["val"]
    )
    assert sum(map(len, opened.splits.values())) == 48 and "by 12 groups" in opened.notes[-1]
    split_data = opened.with_holdout(0.3, 1).splits
    assert (
        not get_patient_ids(split_data["train"]) & get_patient_ids(split_data["val"])
        and len(get_patient_ids(split_data["val"])) > 2
    )
    options = {**TINY_RUN, "epochs": 1.0, "workers": 0, "ema": 0.0, "mixup": 0.0}
    summary = train(str(root), out=str(tmp_path / "run"), group_by=r"(patient\d+)_", **options)
    stored = RunFolder(tmp_path / "run").run().data
    assert stored.group_by == r"(patient\d+)_" and stored.fingerprint == opened.fingerprint()
    assert (
        evaluate(tmp_path / "run", split="val")["val"]["images"]
        == len(opened.splits["val"])
        == summary["val"]["images"]
    )
    (tmp_path / "run" / "summary.json").unlink()
    train(str(root), out=str(tmp_path / "run"), resume=True, **options)
    with pytest.raises(UsageError, match="group_by"):
        (tmp_path / "run" / "summary.json").unlink()
        train(str(root), out=str(tmp_path / "run"), resume=True, group_by="(ant|bee)", override=True, **options)


def test_grid_trials_keep_groups_together_and_apply_exclusions(tmp_path):
    root = write_patient_images(tmp_path / "photos")
    (tmp_path / "list.csv").write_text(f"path,duplicate_of,reason,score\n{root}/ant/patient0_1.png,x,hash,1\n")
    options = TrainOptions(
        str(root), group_by=r"(patient\d+)_", exclude=str(tmp_path / "list.csv"), lr_grid=(1e-3, 1e-2), **TINY_RUN
    )
    opened, run, inputs = prepare_data(str(root), None, options, NullListener())
    assert (
        len(opened.groups) == len(opened.splits["train"]) == run.data.images == 47
        and len(set(opened.groups.tolist())) == 12
    )
    held_out = hold_out_inputs(opened, inputs, 0.25, 0)
    assert not get_patient_ids(held_out.train) & get_patient_ids(held_out.val) and get_patient_ids(held_out.val)


def test_invalid_group_expressions_are_rejected(tmp_path):
    root = write_patient_images(tmp_path / "photos", 4)
    for expression, message in (
        ("(", "not a valid regular expression"),
        ("patient", "0 capture groups"),
        ("(a)(b)", "2 capture groups"),
    ):
        with pytest.raises(UsageError, match=message):
            open_data(root, 0, expression)
    draw_scene(1).save(root / "ant" / "stray.png")
    with pytest.raises(DataError, match=r"does not match ant/stray\.png"):
        open_data(root, 0, r"(patient\d+)")
    for opened in (partial(open_data, group_by="group"), partial(check_to_document, workers=0, group_by="group")):
        with pytest.raises(UsageError, match=r"has 0 capture groups[^\n]*\n  for a column, open a CSV file"):
            opened(root)
    # the expression applies to the path below the source
    assert split_by_groups(open_data(root), r"^(\w+)/", root, 0).groups.max() == 1


def test_groups_shared_by_provided_splits_are_reported_and_rejected(tmp_path):
    root = tmp_path / "photos"
    for split, numbers in (("train", range(6)), ("val", (6, 7)), ("test", (5, 8))):
        for number in numbers:
            for label in ("ant", "bee"):
                (root / split / label).mkdir(parents=True, exist_ok=True)
                draw_scene(1000 * number + 10 * len(split) + ord(label[0])).save(
                    root / split / label / f"p{number}.png"
                )
    document = check_to_document(root, workers=0, group_by=r"(p\d+)\.")
    assert (
        document["groups"]["across_splits"] == [{"splits": ["train", "test"], "groups": 1, "names": ["p5"]}]
        and not document["passed"]
    )
    assert check_to_document(root, workers=0)["passed"]
    with pytest.raises(DataError, match=r"1 groups are in train and in test \(p5\)"):
        open_data(root, 0, r"(p\d+)\.")
    rows = [("path", "label", "split", "group")]
    rows += [
        (path.relative_to(root).as_posix(), path.parent.name, path.parts[-3], path.stem)
        for path in sorted(root.glob("*/*/*"))
    ]
    with open(root / "table.csv", "w", newline="") as file:
        csv.writer(file).writerows(rows)
    assert (
        get_findings_by_code(check_to_document(root / "table.csv", workers=0, group_by="group"))["groups"]["level"]
        == "error"
    )
    with pytest.raises(DataError, match="more than one split"):
        open_data(root / "table.csv", 0, "group")
    (root / "table.csv").write_text((root / "table.csv").read_text().replace(",group", ",patient"))
    assert check_to_document(root / "table.csv", workers=0)["passed"]
    assert (
        get_findings_by_code(check_to_document(root / "table.csv", workers=0, group_by="patient"))["groups"]["level"]
        == "error"
    )


def test_digests_are_sha_256(tmp_path):
    root = write_scenes(tmp_path / "photos", {"": 2})
    split = open_checked_dataset(str(root)).splits["train"]
    records, _ = scan_split(split, 0)
    for sample in range(len(split)):
        assert records["digest"][sample].tobytes() == hashlib.sha256(split.paths[sample].read_bytes()).digest()[:16]
    assert not (records["traits"] & ImageTrait.WRONG_EXTENSION).any()


def test_checking_and_dedup_need_no_pytorch():
    """Importing PyTorch would take longer than most checks."""
    modules = ("check", "checks.page", "dedup")
    code = (
        f"import sys, {', '.join(f'vitreous.apps.curation.{name}' for name in modules)}; print('torch' in sys.modules)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "False"
