"""Clips: frames of a folder as one sample of more axes than a picture has."""

from __future__ import annotations

import numpy as np
import pytest
from PIL import Image

from vitreous.data.layouts.video import clips
from vitreous.data.sources import open_data
from vitreous.data.split import picture_of
from vitreous.errors import DataError


@pytest.fixture
def films(tmp_path):
    """Two classes of 12 clips; frame f of a clip is grey f, and clip c of class k has 5 + c frames."""
    for label, kind in enumerate(("run", "walk")):
        for clip in range(12):
            home = tmp_path / kind / f"clip {clip}"
            home.mkdir(parents=True)
            for frame in range(5 + clip):
                Image.new("RGB", (6, 4), (frame, clip, label)).save(home / f"{frame}.png")
    return tmp_path


def test_frames_evenly_chosen_in_the_order_of_their_numbers(films):
    data = clips(films, frames=4).holding_out(0.0, 0)
    split = data.splits["train"]
    assert len(split) == 24 and data.classes == ("run", "walk")
    for sample in range(len(split)):
        pixels = split.raw(sample)
        assert pixels.shape == (4, 4, 6, 3)
        _, clip, label = pixels[0, 0, 0]
        assert label == split.labels[sample] and split.name(sample).endswith(f"clip {clip}")
        assert pixels[:, 0, 0, 0].tolist() == [int((2 * t + 1) / 8 * (5 + clip)) for t in range(4)]
    back = split.take(np.array([20, 3]))
    assert [np.array_equal(back.raw(new), split.raw(old)) for new, old in ((0, 20), (1, 3))] == [True, True]


def test_clips_are_held_out_whole_and_short_ones_repeat_frames(films):
    data = clips(films, frames=40)
    assert {name: len(split) for name, split in data.splits.items()} == {"train": 22, "val": 2}
    assert data.splits["val"].raw(0).shape[0] == 40
    assert data.fingerprint() != clips(films, frames=4).fingerprint()


def test_what_takes_pictures_refuses_a_clip(films):
    split = clips(films, frames=2).splits["train"]
    with pytest.raises(DataError, match=r"clip \d+: pixels of 4 axes are no picture"):
        picture_of(split, 0, 3)
    Image.new("RGB", (9, 9)).save(films / "run" / "clip 0" / "1.png")
    whole = clips(films, frames=5).holding_out(0.0, 0).splits["train"]
    with pytest.raises(DataError, match="clip 0: its frames are of 2 sizes"):
        whole.raw(0)


def test_video_files_are_refused_by_name(tmp_path):
    for kind in ("run", "walk"):
        (tmp_path / kind).mkdir()
        (tmp_path / kind / "1.mp4").write_bytes(b"x")
    with pytest.raises(DataError, match=r"2 videos, which are not read yet; the first is .*run/1\.mp4") as error:
        open_data(tmp_path)
    assert "ffmpeg" in error.value.hint
