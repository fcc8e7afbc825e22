"""Tar archives of clips: labels and splits as for images, training, evaluation and `data check`."""

from __future__ import annotations

import numpy as np
import pytest

import vitreous
from tests.conftest import make_image
from tests.data.films import encode_video, make_moving_square, write_clip
from tests.data.test_tars import encode_sample_image, write_tar
from tests.objectives.test_clips import TRAIN_OPTIONS
from vitreous.apps.curation.check import check_dataset
from vitreous.data.layouts.video import ClipFiles, StoredClips
from vitreous.data.modalities.clips import ClipPreprocess
from vitreous.data.sources import open_data
from vitreous.data.split import StoreSplit
from vitreous.errors import DataError
from vitreous.inference.sources import resolve_image_source


@pytest.fixture(autouse=True)
def isolated_cache(tmp_path, monkeypatch):
    """Give each test a separate cache."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def encode_clip(tmp_path, number: int, suffix: str = "mp4") -> bytes:
    """Return an encoded clip; in clips with odd numbers the square moves to the right."""
    pixels = make_moving_square(number, bool(number % 2))
    if suffix == "gif":
        return write_clip(tmp_path / f"{number}.gif", pixels).read_bytes()
    return encode_video(pixels, suffix)


def test_clip_archives_are_read_like_image_archives(tmp_path):
    suffixes = ("mp4", "gif", "webm")
    labelled_members = [member for n in range(12) for member in (
        (f"{n:03}.{suffixes[n % 3]}", encode_clip(tmp_path, n, suffixes[n % 3])), (f"{n:03}.cls", b"right" if n % 2 else b"left"))]  # fmt: skip
    folders = [(f"{split}/{'right' if n % 2 else 'left'}/{n}.mp4", encode_clip(tmp_path, n)) for split, numbers in
               (("train", range(8)), ("val", (8, 9))) for n in numbers]  # fmt: skip
    for members, sizes in ((labelled_members, {"train": 10, "val": 2}), (folders, {"train": 8, "val": 2})):
        data = open_data(write_tar(tmp_path / "a.tar", members))
        assert {name: len(split) for name, split in data.splits.items()} == sizes
        assert data.classes == ("left", "right") and data.notes[0].startswith(
            f"the data are {sum(sizes.values())} clips"
        )
        assert all(type(split) is StoredClips for split in data.splits.values())
    data = open_data(write_tar(tmp_path / "a.tar", labelled_members)).with_holdout(0.0, 0)
    split = data.split("train")
    assert isinstance(split, StoredClips) and split.name(1) == "a.tar/001.gif"
    subset = split.take(np.array([5, 1]))
    assert subset.labels.tolist() == [1, 1] and len(subset.open_clip(1)) == 10
    square_positions = np.array(
        [frame.argmax() for frame in subset.open_clip(1).read_frames(np.arange(10)).mean((1, 3))]
    )
    assert np.array_equal(square_positions, [frame.argmax() for frame in make_moving_square(1, True).mean((1, 3))])
    checked, _ = check_dataset(tmp_path / "a.tar", workers=0)
    assert checked["sample_type"] == "clips" and checked["clips"]["frames"]["max"] == 10
    assert checked["formats"] == {"MOV": 4, "MATROSKA": 4, "GIF": 4}


def test_archives_with_images_ignore_videos(tmp_path):
    mixed = write_tar(tmp_path / "a.tar", [("a/1.png", encode_sample_image(1)), ("a/2.png", encode_sample_image(2)), ("b/3.mp4", encode_clip(tmp_path, 3)), ("b/4.png", encode_sample_image(4))])  # fmt: skip
    data = open_data(mixed)
    assert all(type(split) is StoreSplit for split in data.splits.values())
    assert sum(map(len, data.splits.values())) == 3 and "1 videos among images are ignored" in data.notes
    cover = open_data(write_tar(tmp_path / "b.tar", [("a/1.mp4", encode_clip(tmp_path, 1)), ("a/1.jpg", encode_sample_image(1, "JPEG")), ("b/2.png", encode_sample_image(2))]))  # fmt: skip
    assert all(type(split) is StoreSplit for split in cover.splits.values())
    make_image(1).convert("P").save(tmp_path / "still.gif")
    still_gif = (tmp_path / "still.gif").read_bytes()
    for second, split_type in (
        (still_gif, StoreSplit),
        (encode_clip(tmp_path, 2, "gif"), StoreSplit),
        (encode_clip(tmp_path, 4), StoredClips),
    ):
        last = "b/2.mp4" if split_type is StoredClips else "b/2.gif"
        assert {type(s) for s in open_data(write_tar(tmp_path / "c.tar", [("a/1.gif", still_gif), (last, second)])).splits.values()} == {split_type}  # fmt: skip


def test_clip_archives_train_and_predict_like_files(tmp_path):
    members, home = [], tmp_path / "files"
    for n in range(6):
        content = encode_clip(tmp_path, n)
        path = home / ("right" if n % 2 else "left") / f"{n}.mp4"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
        members.append((f"{path.parent.name}/{n}.mp4", content))
    members.sort()  # as the folder is read
    archive, options = write_tar(tmp_path / "train-0.tar", members), {**TRAIN_OPTIONS, "steps": 2, "frames": 4, "model": "ViViT-32x2/8x2", "batch_size": 4}  # fmt: skip
    assert type(open_data(home).split("train")) is ClipFiles
    assert vitreous.train(str(archive), out=str(tmp_path / "run"), **options)["train"]["loss"] > 0
    predictor = vitreous.load(tmp_path / "run", device="cpu", precision="fp32")
    items = list(resolve_image_source([str(archive)], preprocess=ClipPreprocess))
    assert [item.name for item in items] == [f"{archive}/{name}" for name, _ in members]
    predictions = [row for chunk in predictor.predictions(items, predictor.prediction_format()) for row in chunk]
    assert [row.probabilities for row in predictions] == [row.probabilities for row in predictor.predict([str(home / name) for name, _ in members])]  # fmt: skip
    torn = write_tar(tmp_path / "torn.tar", [("a/1.mp4", b"none"), ("b/2.mp4", members[1][1])])
    with pytest.raises(DataError, match=r"torn\.tar/a/1\.mp4: not a clip of a known format"):
        open_data(torn).with_holdout(0.0, 0).split("train").open_clip(0)  # type: ignore[attr-defined]
