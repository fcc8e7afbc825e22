"""Clips: every format gives the same frames by index, and hostile files are rejected with one message."""

from __future__ import annotations

import io

import av
import numpy as np
import pytest
from PIL import Image

from tests.data.films import CODECS, encode_video, make_grey_frames, make_moving_square, write_clip
from vitreous.apps.curation.checks.findings import report_failures
from vitreous.data.augmentation.augment import Augment
from vitreous.data.decoding import clip, clips, video
from vitreous.data.decoding.clip import sample_frames_by_stride, sample_frames_evenly
from vitreous.data.decoding.clips import is_animated_gif, open_clip, parse_gif_durations
from vitreous.data.modalities.clips import ClipPreprocess
from vitreous.data.modalities.images import ImagePreprocess
from vitreous.errors import DataError, UsageError

#: format -> fraction of the file that is kept
TRUNCATION_FRACTIONS = {"mp4": 0.5, "mov": 0.8, "avi": 0.9, "mkv": 0.8, "webm": 0.8, "mpeg": 0.3, "gif": 0.7}


@pytest.mark.parametrize("file_format", [*CODECS, "gif", "folder"])
def test_frames_of_every_format_are_read_by_index(tmp_path, file_format):
    path = write_clip(tmp_path / ("clip" if file_format == "folder" else f"clip.{file_format}"), make_grey_frames(10))
    film = open_clip(path)
    assert len(film) == 10 and film.size == (16, 16)
    numbers = np.array([7, 0, 9, 0])
    frames = film.read_frames(numbers)
    assert frames.shape == (4, 16, 16, 3) and frames.dtype == np.uint8
    assert np.abs(frames.astype(int) - make_grey_frames(10)[numbers]).max() <= 4
    if file_format not in ("folder", "mpeg"):
        assert np.allclose(film.times, np.arange(10) / 10, atol=0.002)


def test_frames_are_indexed_as_decoded_at_any_frame_rate():
    film = open_clip(encode_video(make_grey_frames(10), "mkv", moments=[0, 1, 2, 7, 8, 9, 20, 21, 30, 45]))
    assert film.read_frames(np.arange(10))[:, 0, 0, 0].round(-1).tolist() == list(range(0, 200, 20))
    assert film.times[3] == pytest.approx(0.7) and film.times[-1] == pytest.approx(4.5)


def test_unbuffered_frames_are_decoded_again(monkeypatch):
    content = encode_video(make_moving_square(1, True), "webm")
    expected_frames = open_clip(content).read_frames(np.array([2, 5, 8]))
    monkeypatch.setattr(video, "MAX_BUFFERED_BYTES", 1500)
    film = open_clip(content)
    assert film.buffered_frames is None and np.array_equal(film.read_frames(np.array([2, 5, 8])), expected_frames)  # type: ignore[attr-defined]


@pytest.mark.parametrize("file_format", TRUNCATION_FRACTIONS)
def test_truncated_clips_are_rejected_by_name(tmp_path, file_format):
    path = write_clip(tmp_path / f"a.{file_format}", make_moving_square(3, True))
    path.write_bytes(path.read_bytes()[: int(TRUNCATION_FRACTIONS[file_format] * path.stat().st_size)])
    with pytest.raises(
        DataError, match=rf"a\.{file_format}: .*(cut short|cannot be read|damaged|no video stream)"
    ) as error:
        open_clip(path)
    assert error.value.hint


@pytest.mark.parametrize("file_format", ["mkv", "webm"])
def test_a_clip_truncated_to_one_frame_is_rejected(file_format):
    content = encode_video(make_moving_square(3, True, 30), file_format)
    for size in range(len(content), 300, -40):  # find the first cut that leaves one frame
        with av.open(io.BytesIO(content[:size]), format="matroska") as container:
            frames = len(list(container.decode(video=0)))
        if frames == 1:
            break
    else:
        pytest.fail("no truncation leaves exactly one frame")
    with pytest.raises(DataError, match=r"cut short, 0\.0 seconds of 3\.0"):
        open_clip(content[:size])
    assert len(open_clip(encode_video(make_moving_square(3, True, 1), file_format))) == 1


@pytest.mark.parametrize(("content", "problem"), [
    (b"", "empty file"), (b"x", "not a clip of a known format"), (b"<html>", "but an HTML page"),
    (b"\0\0\0\x18ftypmp42" + bytes(40), "cannot be read as a video"), (b"GIF89a", "cut short"),
    (b"\x1aE\xdf\xa3" + b"\xff" * 60, "cannot be read as a video"), (b"RIFF\0\0\0\0AVI LIST", "cannot be read as a video"),
    (b"#EXTM3U\n/etc/passwd\n", "not a clip of a known format"), (encode_video(make_grey_frames(1), sound=True), "only audio"),
    (b"GIF89a\x60\xea\x60\xea\0\0\0,\0\0\0\0\x60\xea\x60\xea\0\x02\0;", "60000 x 60000 pixels, more than"),
])  # fmt: skip
def test_hostile_clips_are_rejected_with_one_message(tmp_path, content, problem):
    path = tmp_path / "bad.mp4"
    path.write_bytes(content)
    with pytest.raises(DataError, match=rf"bad\.mp4: ?.*{problem}"):
        open_clip(path)


def test_large_frames_are_rejected_before_decoding(tmp_path):
    content = encode_video(make_grey_frames(2), "avi")
    # size fields of a JPEG frame and of the AVI header
    for marker in (b"\xff\xc0\0\x11\x08", b"\x10\0\0\0\x10\0\0\0\x01\0\x18\0"):
        offset = content.find(marker)
        while offset >= 0:
            size = b"\x40\0\x40\0" if marker[0] == 0xFF else b"\0\x40\0\0\0\x40\0\0"
            at = offset + 5 if marker[0] == 0xFF else offset
            content = content[:at] + size + content[at + len(size) :]
            offset = content.find(marker, offset + 1)
    (tmp_path / "wide.avi").write_bytes(content)
    with pytest.raises(DataError, match=r"wide\.avi: "):
        open_clip(tmp_path / "wide.avi")


def test_clip_limits_are_enforced(monkeypatch, tmp_path):
    path = write_clip(tmp_path / "a.gif", make_grey_frames(10))
    monkeypatch.setattr(clip, "MAX_CLIP_BYTES", 4 * 16 * 16 * 3)
    assert open_clip(path).read_frames(np.arange(4)).shape[0] == 4
    with pytest.raises(DataError, match=r"a\.gif: 5 frames of 16 x 16 pixels take 0 MiB"):
        open_clip(path).read_frames(np.arange(5))
    monkeypatch.setattr(clip, "MAX_FRAMES", 9)
    for source in (path, write_clip(tmp_path / "a.mp4", make_grey_frames(10))):
        with pytest.raises(DataError, match="more than 9 frames"):
            open_clip(source)


def test_without_pyav_only_gifs_are_read(monkeypatch, tmp_path):
    path, gif = (
        write_clip(tmp_path / "a.mp4", make_grey_frames(3)),
        write_clip(tmp_path / "a.gif", make_grey_frames(3)),
    )
    monkeypatch.setattr(video, "find_spec", lambda name: None)
    with pytest.raises(DataError, match=r"a\.mp4: .*need PyAV") as error:
        open_clip(path)
    assert "pip install 'vitreous[video]'" in error.value.hint and len(open_clip(gif)) == 3


def test_a_check_without_pyav_hints_at_the_extra():
    """The files are not damaged, so the hint is not to delete them."""
    document = dict.fromkeys(("layout_error", "target_error", "label_error"), None) | {
        "sample_type": "clips",
        "splits": {"train": {"images": 1}},
        "unreadable": [{"path": "a.mp4", "reason": video.MISSING_PYAV}],
    }
    _, code, _, hint = next(report_failures(document, "clips/"))
    assert (code, hint) == ("unreadable", "pip install 'vitreous[video]'")


def test_gif_durations_are_parsed(tmp_path):
    content = write_clip(tmp_path / "a.gif", make_moving_square(2, False, 7)).read_bytes()
    assert parse_gif_durations(content) == ([10] * 7, True) and is_animated_gif(content)
    Image.new("P", (5, 4)).save(tmp_path / "b.gif")
    assert parse_gif_durations((tmp_path / "b.gif").read_bytes()) == ([0], True)
    assert not any(parse_gif_durations(content[:end])[1] for end in range(13, len(content) - 1, 7))


def test_frame_folders_with_mixed_sizes_are_rejected(tmp_path):
    path = write_clip(tmp_path / "clip", make_grey_frames(5))
    Image.new("RGB", (9, 9)).save(path / "frame_003.png")
    with pytest.raises(DataError, match="clip: its frames have 2 sizes, 16 x 16 and 9 x 9"):
        open_clip(path).read_frames(np.arange(5))
    with pytest.raises(DataError, match="a folder without images is not a clip"):
        (tmp_path / "none").mkdir()
        open_clip(tmp_path / "none")
    with pytest.raises(DataError, match="4 x 5, are not a clip"):
        open_clip(np.zeros((4, 5), np.uint8))


def test_frame_indices_are_sampled_evenly_or_by_stride():
    for count in (1, 3, 8, 30):
        assert sample_frames_evenly(count, 8).tolist() == [(2 * t + 1) * count // 16 for t in range(8)]
        draws = np.random.default_rng(count).random(8)
        frame_indices = sample_frames_evenly(count, 8, draws)
        assert all(t * count / 8 - 1 < number <= (t + 1) * count / 8 for t, number in enumerate(frame_indices))
        assert (frame_indices < count).all() and (np.diff(frame_indices) >= 0).all()
    assert sample_frames_by_stride(10, 4, 2, 0).tolist() == [0, 2, 4, 6] and sample_frames_by_stride(
        10, 4, 2, 0.999
    ).tolist() == [3, 5, 7, 9]
    assert sample_frames_by_stride(3, 4, 2).tolist() == [0, 2, 2, 2]


def test_all_frames_share_one_view_drawn_by_the_key():
    constant_clip = np.repeat(make_moving_square(5, True, 1, 24), 12, 0)
    preprocess = ClipPreprocess((6, 16, 16))
    views = Augment(crop=(0.2, 1.0), flip=0.5, rand_layers=2, jitter=(0.4, 0.4, 0.4), rotate=20.0, erase=1.0, shift=0.1)
    augmented = [views.augment_image(open_clip(constant_clip), preprocess, sample_key) for sample_key in range(4)]
    assert all(view.shape == (3, 6, 16, 16) and (view == view[:, :1]).all() for view in augmented)
    assert (
        not (augmented[0] == augmented[1]).all()
        and (augmented[3] == views.augment_image(open_clip(constant_clip), preprocess, 3)).all()
    )
    rising = open_clip(make_grey_frames(12, 24))
    numbers = {tuple((Augment().augment_image(rising, preprocess, key)[0, :, 0, 0] // 20).tolist()) for key in range(9)}
    assert len(numbers) > 5 and all(number // 2 == t for row in numbers for t, number in enumerate(row))
    strided_preprocess = ClipPreprocess((4, 16, 16), stride=2)
    starts = {
        tuple((Augment().augment_image(rising, strided_preprocess, key)[0, :, 0, 0] // 20).tolist())
        for key in range(40)
    }
    assert starts == {(s, s + 2, s + 4, s + 6) for s in range(6)}


def test_clip_preprocessing_matches_images_per_frame(tmp_path):
    pixels = make_moving_square(4, True, 9, 20)
    preprocess, image_preprocess = ClipPreprocess((3, 8, 12), share=0.9), ImagePreprocess((8, 12), share=0.9)
    clip_tensor = preprocess.transform(pixels)
    assert clip_tensor.shape == (3, 3, 8, 12)
    for frame_index, number in enumerate((1, 4, 7)):
        assert (clip_tensor[:, frame_index] == image_preprocess.transform(pixels[number])).all()
    assert ClipPreprocess((2, 8, 8), channels=1, mean=(0.5,), std=(0.5,)).transform(pixels).shape == (1, 2, 8, 8)
    with pytest.raises(UsageError, match="invalid stride of -1 frames"):
        ClipPreprocess((2, 8, 8), stride=-1)
    with pytest.raises(UsageError, match=r"the size of clips has 3 axes \(T, H, W\), not 2"):
        ClipPreprocess((8, 8))
    with pytest.raises(DataError, match=r"a\.png: not a clip of a known format"):
        Image.fromarray(pixels[0]).save(tmp_path / "a.png")
        preprocess.transform(tmp_path / "a.png")
    assert clips.KNOWN_FORMATS_HINT
