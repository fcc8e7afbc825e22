"""Folders of clips: detection of video data, and folders that stay image data."""

from __future__ import annotations

import shutil

import numpy as np
import pytest
from PIL import Image

from tests.data.films import make_grey_frames, make_moving_square, write_clip, write_moves
from vitreous.apps.curation.dedup import find_copies
from vitreous.apps.curation.pack import pack_dataset
from vitreous.data.layouts.video import ClipFiles
from vitreous.data.sources import open_data
from vitreous.data.split import FileSplit, create_empty_labels
from vitreous.errors import DataError, UsageError


def get_split_types(data):
    """Return the types of the splits of a dataset."""
    return {type(split) for split in data.splits.values()}


def test_a_folder_of_clips_in_any_format_is_video_data(tmp_path):
    data = open_data(write_moves(tmp_path, 12, (".mp4", ".gif", "", ".webm")))
    assert get_split_types(data) == {ClipFiles} and data.classes == ("left", "right")
    assert {name: len(split) for name, split in data.splits.items()} == {"train": 22, "val": 2}
    assert data.notes[0].startswith("the data are 24 clips; `--frames`")
    split = data.with_holdout(0.0, 0).splits["train"]
    assert split.name(2).endswith("clip2") and split.raw(2).shape == (10, 16, 16, 3)  # type: ignore[union-attr]
    assert isinstance(split.raw(0), bytes) and len(split.open_clip(1)) == 10  # type: ignore[attr-defined]
    subset = split.take(np.array([20, 3]))
    assert [subset.name(0), subset.name(1)] == [split.name(20), split.name(3)] and subset.labels.tolist() == [1, 0]


def test_clip_splits_and_single_class_folders_are_read(tmp_path):
    for name in ("train", "val", "test"):
        write_moves(tmp_path / name, 1, (".avi",))
    data = open_data(tmp_path)
    assert get_split_types(data) == {ClipFiles} and list(data.splits) == ["train", "val", "test"]
    class_data = open_data(tmp_path / "test" / "left")
    assert get_split_types(class_data) == {ClipFiles} and not class_data.labelled


def test_animated_gifs_are_clips(tmp_path):
    write_moves(tmp_path / "moving", 2, (".gif",))
    assert get_split_types(open_data(tmp_path / "moving")) == {ClipFiles}
    write_clip(tmp_path / "still" / "a" / "1.gif", make_grey_frames(1))
    write_clip(tmp_path / "still" / "b" / "1.gif", make_grey_frames(3))
    assert ClipFiles not in get_split_types(open_data(tmp_path / "still"))


@pytest.mark.parametrize("odd", ["left/photo.jpg", "left/clip2/x.png", "left/clip2/frame_012.png", "left/0001.png"])
def test_an_image_among_clips_makes_the_data_images(tmp_path, odd):
    home = write_moves(tmp_path, 3, (".gif", ".gif", ""))
    Image.new("RGB", (16, 16)).save(home / odd)
    assert ClipFiles not in get_split_types(open_data(home))


def test_image_folders_that_are_not_frames_stay_images(tmp_path):
    for name in ("a", "b"):
        write_clip(tmp_path / "flat" / name, make_grey_frames(3))  # numbered images of a class
        for number, side in enumerate((8, 9, 8)):
            path = tmp_path / "nested" / name / "c" / f"{number}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.new("RGB", (side, 8)).save(path)
    assert ClipFiles not in get_split_types(open_data(tmp_path / "flat")) | get_split_types(
        open_data(tmp_path / "nested")
    )


def test_image_only_commands_reject_clips(tmp_path):
    home = write_moves(tmp_path / "clips", 3, (".gif",))
    with pytest.raises(UsageError, match="the data are clips, but packs store images"):
        pack_dataset(home, tmp_path / "packed")
    Image.new("RGB", (16, 16)).save(tmp_path / "photo.png")
    image_split = FileSplit([tmp_path / "photo.png"], create_empty_labels(1))
    with pytest.raises(
        UsageError, match="the data are clips, but copies are found among images, or among clips, not across both"
    ):
        find_copies([open_data(home).split("train")], [image_split])


def test_an_unreadable_clip_is_reported_by_name(tmp_path):
    path = write_clip(tmp_path / "a" / "1.mp4", make_moving_square(0, True))
    path.write_bytes(b"none")
    write_clip(tmp_path / "b" / "1.mp4", make_moving_square(0, True))
    split = open_data(tmp_path).with_holdout(0.0, 0).splits["train"]
    with pytest.raises(DataError, match=r"a/1\.mp4: not a clip of a known format"):
        split.open_clip(0)  # type: ignore[attr-defined]


def test_frame_folders_without_classes_are_reported(tmp_path):
    for clip in ("one", "two", "three"):
        write_clip(tmp_path / clip, make_grey_frames(3))
    assert any("image names look like video frames" in note for note in open_data(tmp_path).notes)
    assert get_split_types(open_data(tmp_path)) == {FileSplit}
    for name in ("ant", "bee"):  # numbered photos, whose neighbours are no more similar than other pairs
        (tmp_path / "photos" / name).mkdir(parents=True)
        for number in range(12):
            pixels = np.random.default_rng(number).integers(0, 256, (4, 4), dtype=np.uint8)
            Image.fromarray(pixels).resize((16, 16)).save(tmp_path / "photos" / name / f"{number:04d}.jpg")
    assert not any("video frames" in note for note in open_data(tmp_path / "photos").notes)
    shutil.rmtree(tmp_path / "photos")
    for split in ("train", "test"):  # a folder name that occurs in both splits is a class
        for name in ("cat", "dog"):
            write_clip(tmp_path / "split" / split / name, make_grey_frames(3))
    assert not any("video frames" in note for note in open_data(tmp_path / "split").notes)
    shutil.rmtree(tmp_path / "split")
    (tmp_path / "all").mkdir()
    for clip in ("one", "two", "three"):
        (tmp_path / clip).rename(tmp_path / "all" / clip)
    # the layout that the note suggests
    assert get_split_types(open_data(tmp_path)) == {ClipFiles} and not open_data(tmp_path).labelled
    for frame_path in ("a/7.png", "a/8.png", "b/1.png", "b/2.png"):
        write_clip(tmp_path / "plain" / frame_path[:-4], make_grey_frames(1))
        (tmp_path / "plain" / frame_path[:-4] / "frame_000.png").rename(tmp_path / "plain" / frame_path)
        (tmp_path / "plain" / frame_path[:-4]).rmdir()
    assert not any("video frames" in note for note in open_data(tmp_path / "plain").notes)
