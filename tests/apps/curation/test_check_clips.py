"""`data check` of clips: faults, durations and duplicates."""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.apps.curation.test_check import get_findings_by_code
from tests.apps.curation.test_copies import draw_photo
from tests.data.films import encode_video, write_clip, write_moves
from vitreous.apps.curation.check import check_dataset
from vitreous.apps.curation.checks.page import render_check_page
from vitreous.apps.curation.copies import clips
from vitreous.apps.curation.copies import scan as scanning
from vitreous.apps.curation.copies.clips import open_clip_with_digest
from vitreous.cli.console import Console
from vitreous.cli.data_check import Options, run
from vitreous.data.decoding.clip import DEFAULT_CLIP_FRAMES
from vitreous.data.decoding.clips import open_clip
from vitreous.errors import DataError
from vitreous.models.names import choose_default_image_size


def make_clip_pixels(seed: int, count: int = 12, background: int | None = None) -> np.ndarray:
    """Return (T, 48, 64, 3) uint8 of a square that crosses a photo, different for each seed."""
    rng = np.random.default_rng(seed)
    photograph = draw_photo(1000 + seed if background is None else background).convert("RGB").resize((64, 48))
    pixels = np.repeat(np.asarray(photograph)[None], count, 0)
    (left, top), (width, height), colour = (rng.integers(0, 14, 2), rng.integers(14, 30, 2), rng.integers(0, 256, 3))
    for frame, share in enumerate(np.linspace(0, 1, count)[:: rng.choice((-1, 1))]):
        x, y = round(left + share * width), round(top + share * (height - 14))
        pixels[frame, y : y + 20, x : x + 20] = colour
    return pixels


@pytest.fixture(scope="module")
def faulty_clips(tmp_path_factory) -> Path:
    """Return a folder of two splits and two classes with clips of every fault."""
    faulty_clips = tmp_path_factory.mktemp("clips")
    for number in range(4):
        for class_index, label in enumerate(("left", "right")):
            write_clip(
                faulty_clips / "train" / label / f"{number}{('.gif', '.mp4', '', '.avi')[number]}",
                make_clip_pixels(2 * number + class_index),
            )
    write_clip(faulty_clips / "test" / "left" / "own.gif", make_clip_pixels(50))
    write_clip(faulty_clips / "test" / "right" / "own.mpeg", make_clip_pixels(51))
    write_clip(faulty_clips / "train" / "left" / "black.mp4", np.zeros((12, 48, 64, 3), np.uint8))
    write_clip(faulty_clips / "train" / "right" / "still.webm", make_clip_pixels(60)[[0] * 12])
    write_clip(faulty_clips / "train" / "right" / "short.gif", make_clip_pixels(61, 3))
    cut = write_clip(faulty_clips / "train" / "left" / "cut.mp4", make_clip_pixels(62))
    cut.write_bytes(cut.read_bytes()[: cut.stat().st_size // 2])
    (faulty_clips / "train" / "left" / "page.mp4").write_bytes(b"<html>")
    (faulty_clips / "train" / "notes.txt").write_text("")
    shutil.copy(faulty_clips / "train" / "right" / "0.gif", faulty_clips / "test" / "left" / "same.gif")
    shutil.copytree(faulty_clips / "train" / "left" / "2", faulty_clips / "test" / "left" / "same")
    write_clip(faulty_clips / "test" / "right" / "recoded.webm", make_clip_pixels(3))
    write_clip(faulty_clips / "test" / "left" / "mirrored.mp4", make_clip_pixels(2)[:, :, ::-1])
    return faulty_clips


@pytest.fixture(scope="module")
def checked_clips(faulty_clips):
    """Return the JSON document of a check, and the checked records."""
    return check_dataset(faulty_clips, workers=0, image_size=choose_default_image_size)


def get_base_names(rows):
    """Return the file names of paths."""
    return [os.path.basename(row["path"]) for row in rows]


def test_unreadable_clips_are_those_that_training_rejects(faulty_clips, checked_clips):
    document, _ = checked_clips
    assert document["sample_type"] == "clips" and not document["passed"]
    reasons = {}
    for path in (faulty_clips / "train" / "left" / "cut.mp4", faulty_clips / "train" / "left" / "page.mp4"):
        with pytest.raises(DataError) as error:
            open_clip(path)
        reasons[str(path)] = error.value.message.removeprefix(f"{path}: ")
    assert {row["path"]: row["reason"] for row in document["unreadable"]} == reasons
    assert (
        get_findings_by_code(document)["unreadable"]["message"]
        == f"2 of 19 clips cannot be read; the first: {next(iter(reasons))}"
    )


def test_clip_statistics_are_reported(faulty_clips, checked_clips):
    document, _ = checked_clips
    clip_statistics = document["clips"]
    assert (
        clip_statistics["frames"] == {"min": 3, "median": 12, "max": 12}
        and clip_statistics["frames_read"] == DEFAULT_CLIP_FRAMES
    )
    assert clip_statistics["seconds"]["max"] == pytest.approx(1.2, abs=0.01) and clip_statistics["frame_rate"][
        "max"
    ] == pytest.approx(25, rel=0.01)
    assert clip_statistics["frame_rate"]["min"] == pytest.approx(10, rel=0.01)
    assert (
        document["image_sizes"]["width"] == {"min": 64, "median": 64, "max": 64}
        and document["image_sizes"]["model_input"] == 48
    )
    assert document["splits"]["train"]["per_class"] == {"left": 7, "right": 6}
    frames = sum(path.stat().st_size for path in (faulty_clips / "test").rglob("*") if path.is_file())
    assert document["splits"]["test"]["bytes"] == frames
    assert document["formats"] == {"GIF": 5, "MOV": 4, "AVI": 2, "MATROSKA": 2, "MPEG": 1, "FRAMES": 3}
    assert "from 10 to 25 frames/s" in get_findings_by_code(document)["frame_rates"]["message"]


def test_blank_frozen_and_short_clips_are_reported(checked_clips):
    document, _ = checked_clips
    assert get_base_names(document["clips"]["one_colour"]) == ["black.mp4"]
    assert get_base_names(document["clips"]["without_motion"]) == ["still.webm"]
    assert get_base_names(document["clips"]["short"]) == ["short.gif"]
    for word, name in (("one_colour", "black.mp4"), ("without_motion", "still.webm"), ("short_clips", "short.gif")):
        finding = get_findings_by_code(document)[word]
        assert finding["level"] == "warning" and "1 clip " in finding["message"] and finding["message"].endswith(name)


def test_duplicate_clips_are_found_across_splits_and_classes(checked_clips):
    document, _ = checked_clips
    assert [set(get_base_names(group)) for group in document["exact_duplicates"]["listed_groups"]] == [
        {"0.gif", "same.gif"},
        {"2", "same"},
    ]
    assert (
        document["exact_duplicates"]["across_splits"] == {"train/test": 2}
        and document["exact_duplicates"]["conflicting_labels"] == 1
    )
    near_groups = {tuple(get_base_names(group)) for group in document["near_duplicates"]["listed_groups"]}
    assert near_groups == {("1.mp4", "mirrored.mp4"), ("1.mp4", "recoded.webm")}
    findings = get_findings_by_code(document)
    assert {word for word, finding in findings.items() if finding["level"] == "error"} == {
        "unreadable",
        "leak",
        "conflicting_labels",
    }
    assert findings["near_leak"]["message"].startswith(
        "2 clips of test are near-duplicates of train clips; the first: "
    )
    assert not any("data dedup" in finding["hint"] or "image" in finding["message"] for finding in findings.values())


def test_clips_of_one_camera_are_duplicates_only_with_equal_motion(tmp_path):
    for seed in range(5):
        write_clip(tmp_path / "ab"[seed % 2] / f"{seed}.gif", make_clip_pixels(seed, background=7))
    write_clip(tmp_path / "b" / "again.mp4", make_clip_pixels(2, background=7))
    document, _ = check_dataset(tmp_path, workers=0)
    assert [get_base_names(group) for group in document["near_duplicates"]["listed_groups"]] == [["2.gif", "again.mp4"]]
    assert document["near_duplicates"]["conflicting_labels"] == 1 and document["passed"]


def test_page_and_command_report_the_same_clip_findings(faulty_clips, checked_clips, tmp_path, capsys):
    document, subject = checked_clips
    text = render_check_page(document, subject)
    copies = sum(
        len(group) for key in ("exact_duplicates", "near_duplicates") for group in document[key]["listed_groups"]
    )
    assert text.count("data:image/jpeg;base64,") == copies + 3 and "Suspicious clips" in text
    assert "All clips were read" in text and "Frames: 3 to 12" in text
    body = text.split("<body>")[1].replace("data:image", "").replace("--bad-images", "")
    assert "image" not in body.replace("training images", "")
    command_document = run(Options(data=str(faulty_clips), workers=1, out=str(tmp_path / "a.html")), Console())
    assert command_document == document and (tmp_path / "a.html").read_text() == text
    output = capsys.readouterr().out
    assert "3 to 12 frames, median 12" in output and "warning: 1 clip without motion" in output
    assert output.endswith(f"report: {tmp_path / 'a.html'}\n") and "\nfailed\n" in output


def test_valid_clips_pass_and_other_files_are_counted(tmp_path):
    home = write_moves(tmp_path / "clips", 12, (".gif", ""))
    (home / "left" / "notes.txt").write_text("")
    write_clip(home / "stray.gif", make_clip_pixels(0))
    document, _ = check_dataset(home, workers=0, image_size=choose_default_image_size)
    assert document["passed"] and document["ignored_files"] == {"images": 1, ".txt": 1}
    assert set(get_findings_by_code(document)) == {"ignored_images", "ignored_files"}
    assert document["clips"]["frame_rate"]["max"] == pytest.approx(10) and document["image_sizes"]["model_input"] == 16


def test_flat_folders_and_folders_of_unreadable_clips_are_checked(tmp_path):
    write_clip(tmp_path / "flat" / "0.gif", make_clip_pixels(0))
    document, _ = check_dataset(tmp_path / "flat", workers=0)
    assert list(document["splits"]) == ["clips"] and "label_error" in get_findings_by_code(document)
    for label in ("a", "b"):
        (tmp_path / "bad" / label).mkdir(parents=True)
        (tmp_path / "bad" / label / "0.mp4").write_bytes(b"none")
    document, subject = check_dataset(tmp_path / "bad", workers=0)
    assert document["clips"]["frames"] is None and document["image_sizes"] is None and len(document["unreadable"]) == 2
    assert "2 of 2 clips cannot be read" in render_check_page(document, subject)


def test_patients_in_two_splits_are_reported(tmp_path):
    for split, patients in (("train", (1, 1, 2)), ("test", (2, 3))):
        for label in ("a", "b"):
            for number, patient in enumerate(patients):
                seed = sum(map(ord, split + label)) + number
                write_clip(tmp_path / split / label / f"patient{patient}_{number}.gif", make_clip_pixels(seed))
    document, _ = check_dataset(tmp_path, workers=0, group_by=r"patient(\d+)")
    assert document["groups"]["across_splits"] == [{"splits": ["train", "test"], "groups": 1, "names": ["2"]}]
    assert get_findings_by_code(document)["groups"]["level"] == "error"


def test_a_clip_that_times_out_is_the_only_one_skipped(tmp_path, monkeypatch):
    for label in ("a", "b"):
        write_clip(tmp_path / label / "0.gif", make_clip_pixels(ord(label)))
    monkeypatch.setattr(scanning, "SLOW_TASK_TIMEOUT", 0.3)
    monkeypatch.setattr(
        clips,
        "open_clip_with_digest",
        lambda split, sample: time.sleep(60) if "a/0" in split.path(sample) else open_clip_with_digest(split, sample),
    )
    document, _ = check_dataset(tmp_path, workers=1)
    assert [row["reason"] for row in document["unreadable"]] == ["takes longer than 0.3 s"]
    assert document["clips"]["frames"]["max"] == 12


def test_a_clip_with_mixed_frame_sizes_is_unreadable(tmp_path):
    path = write_clip(tmp_path / "a" / "clip", make_clip_pixels(0))
    write_clip(tmp_path / "b" / "clip", make_clip_pixels(1))
    Image.new("RGB", (9, 9)).save(path / "frame_003.png")
    (row,) = check_dataset(tmp_path, workers=0)[0]["unreadable"]
    assert row["reason"] == "its frames have 2 sizes, 64 x 48 and 9 x 9"
    content = encode_video(make_clip_pixels(3), "mp4", sound=True)
    (tmp_path / "b" / "sound.mp4").write_bytes(content)
    rows = check_dataset(tmp_path, workers=0)[0]["unreadable"]
    assert [os.path.basename(row["path"]) for row in rows] == ["clip", "sound.mp4"]
