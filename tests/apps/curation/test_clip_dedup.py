"""`data dedup` of clips finds equal files and clips with equal appearance and motion, but not clips of one camera."""

from __future__ import annotations

import csv
import shutil
from pathlib import Path

import numpy as np
import pytest

from tests.apps.curation.test_check_clips import make_clip_pixels
from tests.data.films import encode_video, write_clip
from vitreous.apps.curation.dedup import find_copies
from vitreous.cli.console import Console
from vitreous.cli.data_dedup import Options, run
from vitreous.data.sources import open_data
from vitreous.errors import DataError, UsageError


def read_copy_list(path: Path) -> dict[str, tuple[str, str]]:
    """Map the name of each duplicate to (name of the original, reason)."""
    with open(path, newline="") as file:
        return {Path(row["path"]).name: (Path(row["duplicate_of"]).name, row["reason"]) for row in csv.DictReader(file)}


@pytest.fixture(scope="module")
def clip_folders(tmp_path_factory) -> tuple[Path, Path]:
    """Return a folder of clips of two classes and a second folder, with duplicates within and between them."""
    home, reference_folder = tmp_path_factory.mktemp("own"), tmp_path_factory.mktemp("other")
    for number in range(4):
        for class_index, label in enumerate(("left", "right")):
            write_clip(
                home / label / f"{number}{('.gif', '.mp4', '', '.avi')[number]}",
                make_clip_pixels(2 * number + class_index),
            )
            write_clip(reference_folder / label / f"x{number}.mkv", make_clip_pixels(30 + 2 * number + class_index))
    shutil.copy(home / "left" / "0.gif", home / "right" / "same.gif")
    shutil.copytree(home / "left" / "2", home / "left" / "again")
    (home / "right" / "mirrored.mp4").write_bytes(encode_video(np.ascontiguousarray(make_clip_pixels(1)[:, :, ::-1])))
    # duplicate of a clip in the other folder
    write_clip(home / "left" / "recoded.webm", make_clip_pixels(30).repeat(2, 1).repeat(2, 2))
    # the background of another clip with a different square
    write_clip(home / "left" / "camera.gif", make_clip_pixels(70, background=31))
    write_clip(reference_folder / "left" / "camera.mp4", make_clip_pixels(71, background=31))
    (home / "left" / "torn.mp4").write_bytes(b"none")
    return home, reference_folder


def test_each_duplicate_clip_is_listed_once_and_excluded(clip_folders, tmp_path):
    home, reference_folder = clip_folders
    out, table = tmp_path / "copies.csv", tmp_path / "rest.csv"
    options = Options(data=str(home), out=str(out), within=True, against=(str(reference_folder),), against_split="all", apply_to=str(table), workers=0)  # fmt: skip
    document = run(options, Console())
    copies = read_copy_list(out)
    pairs = {(frozenset((name, original)), reason) for name, (original, reason) in copies.items()}
    assert pairs == {
        (frozenset({"same.gif", "0.gif"}), "bytes"), (frozenset({"again", "2"}), "bytes"),
        (frozenset({"recoded.webm", "x0.mkv"}), "near"), (frozenset({"mirrored.mp4", "0.gif"}), "near"),
    }  # fmt: skip
    assert copies["recoded.webm"][0] == "x0.mkv" and document["counts"] == {"bytes": 2, "near": 2}
    assert [Path(line.split(":")[0]).name for line in document["unreadable"]] == ["torn.mp4"]
    assert all(0.54 <= row["score"] <= 1 for row in document["duplicates"])
    remaining = open_data(table)
    assert remaining.notes[0].startswith("the data are 10 clips")
    only = find_copies([open_data(home).with_holdout(0.0, 0).split("train")], [open_data(reference_folder).with_holdout(0.0, 0).split("train")], workers=0)  # fmt: skip
    assert [Path(copy["path"]).name for copy in only["duplicates"]] == ["recoded.webm"]
    strict = find_copies(
        [open_data(home).with_holdout(0.0, 0).split("train")], [], within=True, threshold=1.0, workers=0
    )
    assert {copy["reason"] for copy in strict["duplicates"]} == {"bytes"}


def test_clip_segments_are_written_with_start_and_end_seconds(clip_folders, tmp_path):
    home = clip_folders[0]
    rows = "path,label,start,end", f"{home}/left/0.gif,a,0.1,0.5", f"{home}/left/1.mp4,b,,0.7", f"{home}/right/same.gif,a,0.1,0.5"  # fmt: skip
    (tmp_path / "table.csv").write_text("\n".join(rows) + "\n")
    options = Options(data=str(tmp_path / "table.csv"), out=str(tmp_path / "list.csv"), within=True, apply_to=str(tmp_path / "rest.csv"), workers=0)  # fmt: skip
    assert len(run(options, Console())["duplicates"]) == 1
    segments = open_data(tmp_path / "rest.csv").with_holdout(0.0, 0).split("train")
    assert [segments.get_segment(row) for row in range(len(segments))] == [(0.1, 0.5), (0.0, 0.7)]  # type: ignore[attr-defined]


def test_unsupported_clip_comparisons_are_rejected(clip_folders, tmp_path):
    split = open_data(clip_folders[0]).split("train")
    with pytest.raises(UsageError, match="model compares features of images"):
        find_copies([split], [], within=True, workers=0, embedder=object())  # type: ignore[arg-type]
    for name in ("a", "b"):
        write_clip(tmp_path / name / "1.mp4", make_clip_pixels(1)).write_bytes(b"none")
    with pytest.raises(DataError, match=r"none of 2 images can be read; .*1\.mp4"):
        find_copies([open_data(tmp_path).with_holdout(0.0, 0).split("train")], [], within=True, workers=0)
