"""Tables of clips: whole files, segments with start and end, and groups that are never split."""

from __future__ import annotations

import math
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import vitreous
from tests.apps.curation.test_check_clips import make_clip_pixels
from tests.data.films import encode_video, make_grey_frames, make_moving_square, write_clip
from tests.objectives.test_clips import TRAIN_OPTIONS, StoppingListener
from vitreous.apps.curation.check import check_dataset
from vitreous.data.decoding.clip import ClipSegment
from vitreous.data.decoding.clips import open_clip
from vitreous.data.layouts.video import ClipFiles
from vitreous.data.sources import open_data
from vitreous.data.split import FileSplit
from vitreous.errors import DataError
from vitreous.weights.bundle import load_bundle


def write_table(path: Path, *rows: str) -> Path:
    """Write a CSV file with these rows."""
    path.write_text("\n".join(rows) + "\n")
    return path


def get_clip_split(data, name="train") -> ClipFiles:
    """Return a split after checking that it consists of clips."""
    split = data.split(name)
    assert isinstance(split, ClipFiles)
    return split


def write_greys(path: Path, pixels: np.ndarray) -> None:
    """Write a GIF of 10 frames/s with exactly the grey values (T, H, W) uint8."""
    first, *later_frames = map(Image.fromarray, pixels)
    first.save(path, save_all=True, append_images=later_frames, duration=100)


def test_a_clip_table_is_video_data(tmp_path):
    for name in ("1.mp4", "2.gif", "frames"):
        write_clip(tmp_path / name, make_grey_frames(10))
    data = open_data(write_table(tmp_path / "a.csv", "path,label", "1.mp4,a", "2.gif,b", "frames,a"))
    train_split = data.full_train_split or data.split("train")
    assert isinstance(train_split, ClipFiles) and train_split.segments is None and data.groups is None
    assert data.notes[0].startswith("the data are 3 clips; `--frames`") and len(train_split.open_clip(2)) == 10
    assert [os.path.basename(train_split.name(row)) for row in range(3)] == ["1.mp4", "2.gif", "frames"]
    Image.new("RGB", (8, 8)).save(tmp_path / "photo.png")
    image_data = open_data(write_table(tmp_path / "b.csv", "path,label", "2.gif,b", "photo.png,a"))
    assert type(image_data.full_train_split or image_data.split("train")) is FileSplit


def test_start_and_end_cut_a_clip(tmp_path):
    write_clip(tmp_path / "1.gif", make_grey_frames(10))
    (tmp_path / "2.mkv").write_bytes(
        encode_video(make_grey_frames(10), "mkv", moments=[0, 1, 2, 7, 8, 9, 20, 21, 30, 45])
    )
    rows = "path,label,start,end", "1.gif,a,,0.5", "1.gif,b,0.5,", "1.gif,a,,", "2.mkv,b,0.7,2.05", "1.gif,a,,0.50"
    data = open_data(write_table(tmp_path / "a.csv", *rows)).with_holdout(0.0, 0)
    split = get_clip_split(data)
    assert [split.open_clip(row).read_frames(np.arange(len(split.open_clip(row))))[:, 0, 0, 0].round(-1).tolist() for row in range(4)] == [
        [0, 20, 40, 60, 80], [100, 120, 140, 160, 180], list(range(0, 200, 20)), [60, 80, 100, 120],
    ]  # fmt: skip
    assert split.open_clip(3).times == pytest.approx([0, 0.1, 0.2, 1.3], abs=0.002)
    names = [split.name(row).removeprefix(f"{tmp_path}/") for row in range(4)]
    assert names == ["1.gif from 0 s to 0.5 s", "1.gif from 0.5 s", "1.gif", "2.mkv from 0.7 s to 2.05 s"]
    assert any("1 rows are duplicates" in note for note in open_data(tmp_path / "a.csv").notes)
    assert split.take(np.array([3, 0])).get_segment(0) == (0.7, 2.05) and split.get_segment(2) is None
    changed_data = open_data(write_table(tmp_path / "b.csv", rows[0], "1.gif,a,,0.6", *rows[2:5])).with_holdout(0.0, 0)
    assert changed_data.fingerprint() != data.fingerprint()


def test_segments_of_one_file_or_group_stay_together(tmp_path):
    rows, patients = ["path,label,start,end"], ["path,label,group,end"]
    for number in range(20):
        write_greys(tmp_path / f"{number}.gif", make_moving_square(number, True, 6)[..., 0])
        rows += [f"{number}.gif,a,0,0.3", f"{number}.gif,b,0.3,0.6"]
        patients.append(f"{number}.gif,{'ab'[number % 2]},p{number // 4},0.5")
    data = open_data(write_table(tmp_path / "a.csv", *rows))
    files = {name: {split.path(row) for row in range(len(split))} for name in ("train", "val") for split in (get_clip_split(data, name),)}  # fmt: skip
    assert files["val"] and not files["train"] & files["val"]
    data = open_data(write_table(tmp_path / "b.csv", *patients), group_by="group")
    numbers = {name: {int(Path(split.path(row)).stem) // 4 for row in range(len(split))} for name in ("train", "val") for split in (get_clip_split(data, name),)}  # fmt: skip
    assert numbers["val"] and not numbers["train"] & numbers["val"]
    grouped_table = write_table(
        tmp_path / "c.csv", "path,label,split,end", "0.gif,a,train,0.2", "1.gif,b,train,", "0.gif,a,test,"
    )
    assert any("1 groups are in more than one split" in note for note in open_data(grouped_table).notes)
    with pytest.raises(DataError, match="1 groups are in more than one split"):
        open_data(grouped_table, group_by="path")


@pytest.mark.parametrize(("rows", "problem"), [
    (["1.gif,a,x,"], r"line 2: start is x, not seconds from 0"), (["1.gif,a,-1,"], "start is -1, not seconds"),
    (["1.gif,a,,nan"], "end is nan, not seconds"), (["1.gif,a,,inf"], "end is inf, not seconds"),
    (["1.gif,a,2,1.5"], r"line 2: the end, 1.5 s, is not after the start, 2 s"),
    (["1.gif,a,0,1", "photo.png,b,,"], "line 2: start and end require that all files are clips"),
    (["1.gif,a,0,1", "1.gif,b,,1.0"], "1 rows contradict the labels"),
])  # fmt: skip
def test_invalid_clip_rows_are_reported(tmp_path, rows, problem):
    write_clip(tmp_path / "1.gif", make_grey_frames(10))
    Image.new("RGB", (8, 8)).save(tmp_path / "photo.png")
    with pytest.raises(DataError, match=problem):
        open_data(write_table(tmp_path / "a.csv", "path,label,start,end", *rows, "1.gif,b,3,4"))


def test_missing_clip_segments_are_reported(tmp_path):
    write_clip(tmp_path / "frames", make_grey_frames(10))
    write_clip(tmp_path / "1.gif", make_grey_frames(10))
    rows = "path,label,start,end", "frames,a,0,1", "1.gif,b,0.95,2", "1.gif,b,0.9,2"
    split = get_clip_split(open_data(write_table(tmp_path / "a.csv", *rows)).with_holdout(0.0, 0))
    with pytest.raises(DataError, match=r"frames from 0 s to 1 s: it has no frame times"):
        split.open_clip(0)
    with pytest.raises(
        DataError, match=r"1\.gif from 0\.95 s to 2 s: no frame is in this interval; the last of 10 is at 0\.9 s"
    ):
        split.open_clip(1)
    assert len(split.open_clip(2)) == 1
    with pytest.raises(DataError, match="no frame times"):
        ClipSegment(open_clip(make_grey_frames(3)), 0, math.inf)


def test_check_reads_clip_segments(tmp_path):
    write_clip(tmp_path / "1.gif", np.concatenate([make_clip_pixels(0, 10), make_clip_pixels(1, 10)]))
    rows = "path,label,split,start,end", "1.gif,a,train,,1", "1.gif,b,train,1,", "1.gif,a,test,,1", "1.gif,b,test,7,"
    document, _ = check_dataset(write_table(tmp_path / "a.csv", *rows), workers=0)
    assert document["clips"]["frames"] == {"min": 10, "median": 10, "max": 10}
    assert document["clips"]["seconds"]["max"] == pytest.approx(1)
    assert (
        document["exact_duplicates"]["across_splits"] == {"train/test": 1}
        and document["near_duplicates"]["groups"] == 0
    )
    assert [row["reason"] for row in document["unreadable"]] == [
        "no frame is in this interval; the last of 20 is at 1.9 s"
    ]


def test_training_on_segments_matches_training_on_cut_files(tmp_path):
    header = "path,label,split,start,end"
    segment_rows, files = [header], ["path,label,split"]
    for number in range(12):
        split = ("train", "val", "test")[max(number - 9, 0)]
        left, right = (
            make_moving_square(2 * number, False, 8)[..., 0],
            make_moving_square(2 * number + 1, True, 8)[..., 0],
        )
        write_greys(tmp_path / f"{number}.gif", np.concatenate([left, right]))
        for label, pixels, ends in (("left", left, ",0.8"), ("right", right, "0.8,")):
            write_clip(tmp_path / f"{number}{label}", np.repeat(pixels[..., None], 3, -1))
            segment_rows.append(f"{number}.gif,{label},{split},{ends}")
            files.append(f"{number}{label},{label},{split}")
    cut, files_table = write_table(tmp_path / "parts.csv", *segment_rows), write_table(tmp_path / "files.csv", *files)
    options = {**TRAIN_OPTIONS, "model": "ViViT-32x2/8x2", "steps": 4, "save_every": 2, "frames": 4}
    vitreous.train(str(cut), out=str(tmp_path / "parts"), **options)
    with pytest.raises(KeyError):
        vitreous.train(str(cut), out=str(tmp_path / "stopped"), listener=StoppingListener(36), log_every=1, **options)
    vitreous.train(out=str(tmp_path / "stopped"), resume=True)
    states = [load_bundle(tmp_path / run / "model").model.state_dict() for run in ("parts", "stopped")]
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])
    evaluations = [
        vitreous.evaluate(str(tmp_path / "parts"), data, device="cpu", precision="fp32", split="test")
        for data in (None, str(files_table))
    ]
    assert evaluations[0]["test"]["nll"] == evaluations[1]["test"]["nll"] and evaluations[0]["test"]["images"] == 2
