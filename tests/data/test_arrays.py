"""Volumes and signals with classes: detection of the modality, reading and augmentation."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from tests.data.annotations.solids import write_volume
from tests.data.arrays import make_ball, make_wave, write_balls, write_signal, write_waves
from vitreous.apps.curation.check import check_dataset
from vitreous.data.annotations.target import get_sample_noun
from vitreous.data.augmentation.volumes import VolumeViews
from vitreous.data.decoding.volumes import read_volume, read_volume_form
from vitreous.data.layouts.video import open_sample
from vitreous.data.loader import TrainLoader
from vitreous.data.modalities.images import ImagePreprocess
from vitreous.data.modalities.signals import SignalPreprocess
from vitreous.data.modalities.volumes import VolumePreprocess, crop_or_pad, resize_linear
from vitreous.data.sources import open_data
from vitreous.data.split import FileSplit
from vitreous.errors import DataError, UsageError

IDENTITY_VIEWS = VolumeViews(
    scale=(1.0, 1.0), rotate=0.0, contrast=0.0, shift=0.0, gamma=0.0, noise=0.0, border="zeros"
)


def write_classes(home: Path, ending: str, shape: tuple[int, ...], count: int = 2) -> Path:
    """Write two classes of files, all of one shape."""
    for number in range(2 * count):
        values = np.random.default_rng(number).integers(0, 200, shape).astype(np.uint8)
        path = home / "ab"[number % 2] / f"{number}{ending}"
        path.parent.mkdir(parents=True, exist_ok=True)
        (write_signal if ending == ".csv" else write_volume)(path, values)
    return home


@pytest.mark.parametrize(("ending", "shape", "modality"), [
    (".nii", (5, 6, 7), "volumes"), (".nii.gz", (5, 6, 7, 2), "volumes"), (".npz", (5, 6, 7), "volumes"),
    (".npz", (9,), "signals"), (".npz", (2, 9), "signals"), (".csv", (9,), "signals"), (".csv", (2, 9), "signals"),
    (".npy", (9,), "signals"), (".npy", (5, 6, 7, 2), "volumes"),
    # suffixes and shapes that are still read as images
    (".npy", (8, 9), "images"), (".npy", (8, 9, 3), "images"), (".npy", (4, 8, 9), "images"),
    (".tif", (4, 8, 9), "images"),
])  # fmt: skip
def test_suffixes_and_shapes_determine_the_modality(tmp_path, ending, shape, modality):
    data = open_data(write_classes(tmp_path / "data", ending, shape))
    assert {get_sample_noun(split) for split in data.splits.values()} == {modality} and data.classes == ("a", "b")
    assert any(note == f"the data are 4 {modality}" for note in data.notes) == (modality != "images")
    if modality == "images":
        assert type(data.split("train")) is FileSplit
    else:
        axes = 1 if modality == "signals" else 3
        channels, sides = read_volume_form(open_sample(data.split("train"), 0), axes=axes)
        assert sides == (shape[-1:] if axes == 1 else shape[:3]) and channels == (2 if len(shape) in (2, 4) else 1)


def test_axes_resolve_ambiguous_array_files(tmp_path):
    solid = write_classes(tmp_path / "solid", ".npy", (8, 8, 8))
    with pytest.raises(DataError, match="the channel axis of"):
        ImagePreprocess((8, 8)).decode(open_data(solid).split("train").raw(0))
    assert get_sample_noun(open_data(solid, axes=3).split("train")) == "volumes"
    assert (
        get_sample_noun(open_data(write_classes(tmp_path / "stacks", ".tif", (4, 8, 9)), axes=3).split("train"))
        == "volumes"
    )
    lines = write_classes(tmp_path / "lines", ".npy", (9,))
    assert get_sample_noun(open_data(lines, axes=2).split("train")) == "images"
    assert (
        get_sample_noun(open_data(write_classes(tmp_path / "two", ".npy", (2, 90)), axes=1).split("train")) == "signals"
    )
    with pytest.raises(DataError, match=r"axes=1: .* has no signals"):
        open_data(write_classes(tmp_path / "scans", ".nii", (5, 6, 7)), axes=1)
    with pytest.raises(UsageError, match="axes=4 is not 1, 2 or 3"):
        open_data(lines, axes=4)


def test_an_image_among_arrays_makes_the_data_images(tmp_path):
    home = write_classes(tmp_path, ".npz", (5, 6, 7))
    for label in "ab":
        Image.new("RGB", (8, 8)).save(home / label / "picture.png")
    data = open_data(home)
    assert get_sample_noun(data.split("train")) == "images" and sum(map(len, data.splits.values())) == 2


def test_tables_name_volumes_and_signals(tmp_path):
    write_balls(tmp_path / "balls", 2)
    write_waves(tmp_path / "waves", 2)
    balls = [f"balls/{label}/{number}" for label in ("large", "small") for number in ("0.nii.gz", "1.npz")]
    rows = [f"{path},{path.split('/')[1]},train,p{number}" for number, path in enumerate(balls)]
    (tmp_path / "balls.csv").write_text("path,label,split,group\n" + "\n".join(rows))
    data = open_data(tmp_path / "balls.csv")
    assert get_sample_noun(data.split("train")) == "volumes" and data.classes == ("large", "small")
    (tmp_path / "waves.csv").write_text("path,label\nwaves/fast/0.npy,fast\nwaves/slow/0.npy,slow\n")
    assert get_sample_noun(open_data(tmp_path / "waves.csv").split("train")) == "signals"
    with pytest.raises(DataError, match=r"line 2: axes=1: balls/large/0.nii.gz has no signals"):
        open_data(tmp_path / "balls.csv", axes=1)


def test_every_format_gives_the_same_signal(tmp_path):
    two = np.stack([make_wave(0, True), 3 * make_wave(1, False) + 5])
    expected = (two - two.mean(1, keepdims=True)) / two.std(1, keepdims=True)
    signal_files = [write_signal(tmp_path / f"a{ending}", two) for ending in (".npy", ".npz", ".csv")]
    signal_files.append(write_signal(tmp_path / "turned.npy", two.T))
    (tmp_path / "head.csv").write_text("left; right\n\n" + "\n".join(f"{a:.6f};{b:.6f}" for a, b in two.T))
    for signal_file in (*signal_files, tmp_path / "head.csv"):
        assert read_volume_form(signal_file, axes=1) == (2, (48,))
        for raw in (signal_file, signal_file.read_bytes()):
            np.testing.assert_allclose(read_volume(raw, 2, axes=1), expected, atol=1e-4)
        np.testing.assert_allclose(read_volume(signal_file, 2, axes=1, standardise=False), two, atol=1e-5)


@pytest.mark.parametrize(("name", "content", "problem"), [
    ("a.csv", b"", "empty file"), ("a.csv", b"1\n2,3\n", "line 2: 2 cells, but 1 in the lines before"),
    ("a.csv", b"1\nx\n", "line 2: x is not a number"), ("a.csv", b"1,2\n3,\n", "an empty cell is not a number"),
    ("a.csv", b"time\n", "no numbers"), ("a.csv", b"\xff\xfe\x00", "cannot be read as a signal"),
    ("a.csv", b"1\nnan\n3", "1 of its values are NaN or infinite"), ("a.csv", b"1\n1e300\n3", "NaN or infinite"),
    ("a.npy", np.zeros((3, 4, 5)), "an array of 3 x 4 x 5 is not a signal"), ("a.npy", np.zeros(0), "is not a signal"),
    ("a.npy", np.zeros((70, 90)), "70 channels"), ("a.npy", np.array(["a"]), "dtype <U1"),
    ("a.npy", np.zeros((3, 90)), "3 channels, but the model expects 1"), ("a.npy", "cut", "bytes of voxels, but the header states"),
])  # fmt: skip
def test_hostile_signals_are_rejected_by_name(tmp_path, name, content, problem):
    path = tmp_path / name
    if isinstance(content, bytes):
        path.write_bytes(content)
    else:
        np.save(path, np.zeros(9) if isinstance(content, str) else content)
    if isinstance(content, str):
        path.write_bytes(path.read_bytes()[:-5])
    with pytest.raises(DataError, match=f"^{path}: .*{problem}"):
        SignalPreprocess((48,), 1).decode(path)


def test_linear_resizing_matches_a_naive_loop():
    rng = np.random.default_rng(0)
    for length, size in ((9, 4), (4, 9), (7, 7), (16, 8)):
        values, ratio = rng.normal(size=length).astype(np.float32), length / size
        expected = []
        for i in range(size):
            weights = [max(0.0, 1 - abs(j + 0.5 - (i + 0.5) * ratio) / max(1, ratio)) for j in range(length)]
            expected.append(sum(w * v for w, v in zip(weights, values, strict=True)) / sum(weights))
        np.testing.assert_allclose(resize_linear(values[None], (size,))[0], expected, atol=1e-5)
    assert np.allclose(resize_linear(np.full((2, 5, 6, 7), 3, np.float32), (3, 9, 7)), 3)
    ramp = np.indices((8, 8, 8))[1][None].astype(np.float32)  # rises along its second axis only
    assert np.array_equal(resize_linear(ramp, (4, 8, 8))[0, 0], ramp[0, 0]) and resize_linear(
        ramp, (8, 4, 8)
    ).shape == (1, 8, 4, 8)


def test_views_are_crops_at_whole_voxels():
    volume, small = np.arange(1, 10 * 8 * 6 + 1, dtype=np.float32).reshape(1, 10, 8, 6), VolumePreprocess((4, 4, 4), 1)
    offsets = set()
    for key in range(30):
        view = IDENTITY_VIEWS.augment_image(volume, small, key)
        z, y, x = np.argwhere(volume[0] == view[0, 0, 0, 0].item())[0]
        assert np.array_equal(view, volume[:, z : z + 4, y : y + 4, x : x + 4])
        assert torch.equal(view, IDENTITY_VIEWS.augment_image(volume, small, key))
        offsets.add((z, y, x))
    assert len(offsets) > 20
    # the crop is the only random draw
    assert np.array_equal(IDENTITY_VIEWS.augment_image(volume, VolumePreprocess((10, 8, 6), 1), 0), volume)
    larger = IDENTITY_VIEWS.augment_image(volume, VolumePreprocess((12, 8, 6), 1), 3)
    assert (larger == 0).sum() == 2 * 8 * 6 and np.isin(volume, larger).all()


def test_signals_are_translated_and_flipped_only_on_request():
    signal, size = np.arange(1, 11, dtype=np.float32)[None], SignalPreprocess((10,), 1)
    augmented = [
        replace(IDENTITY_VIEWS, translate=0.2).augment_image(signal, size, key)[0].tolist() for key in range(60)
    ]
    assert {row.count(0) for row in augmented} == {0, 1, 2}
    assert all([value for value in row if value] == sorted(value for value in row if value) for row in augmented)
    flipped = [
        replace(IDENTITY_VIEWS, flip=(0, 0, 0.5)).augment_image(signal, size, key)[0].tolist() for key in range(30)
    ]
    assert {tuple(row) for row in flipped} == {tuple(range(1, 11)), tuple(range(10, 0, -1))}
    mirrored = replace(IDENTITY_VIEWS, translate=0.2, border="reflection").augment_image(signal, size, 1)
    assert (mirrored > 0).all()
    with pytest.raises(UsageError, match="need volumes or signals"):
        IDENTITY_VIEWS.augment_image(Image.new("L", (4, 4)), size, 0)


def test_views_of_resized_volumes_match_resizing_first():
    volume = np.random.default_rng(0).normal(size=(1, 9, 8, 12)).astype(np.float32)
    squash = VolumePreprocess((4, 4, 6), 1, fit="squash")
    opened_view = squash.open_view(volume[0], "volume", exact=True, as_region=False)
    assert np.array_equal(
        IDENTITY_VIEWS.augment_image(opened_view, squash, 7), resize_linear(squash.decode(volume[0]), (4, 4, 6))
    )
    assert np.array_equal(squash.to_array(volume), resize_linear(volume, (4, 4, 6)))
    assert np.array_equal(replace(squash, fit="crop").to_array(volume), crop_or_pad(volume, (4, 4, 6)))


def test_the_stream_is_identical_from_any_start_and_workers(tmp_path):
    split = open_data(write_balls(tmp_path, 4)).split("train")
    size, views = VolumePreprocess((8, 8, 8), 1), VolumeViews(translate=0.1, flip=(0.5, 0.5, 0.5))
    reference_images = torch.cat(
        [batch["images"] for batch in TrainLoader(split, size, views, seed=1).iterate_batches(0, 14, 5)]
    )
    assert len({image.numpy().tobytes() for image in reference_images}) == 14  # each epoch has its own views
    later = list(TrainLoader(split, size, views, seed=1, workers=2).iterate_batches(5, 14, 4))
    assert torch.equal(torch.cat([batch["images"] for batch in later]), reference_images[5:])


def test_a_one_slice_volume_is_predicted_like_its_image():
    from vitreous import create

    image_model = create("ViT-32x2/4", image_size=(8, 12), num_classes=3).eval()
    solid = create("ViT-32x2/1x4x4", image_size=(1, 8, 12), num_classes=3).eval()
    for parameter in image_model.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    solid.load_state_dict(
        {name: value.view_as(solid.state_dict()[name]) for name, value in image_model.state_dict().items()}
    )
    volumes = torch.randn(2, 3, 1, 8, 12)
    with torch.no_grad():
        assert torch.allclose(solid(volumes), image_model(volumes[:, :, 0]), atol=1e-5)


def test_check_reports_the_volumes_that_training_rejects(tmp_path):
    home = write_balls(tmp_path / "balls", 4, (".npz", ".nii.gz"))
    cut = home / "large" / "1.nii.gz"
    cut.write_bytes(cut.read_bytes()[:-400])
    np.savez(home / "small" / "0.npz", np.where(np.arange(1008).reshape(12, 6, 14) == 5, np.nan, 1.0))
    np.savez(home / "small" / "2.npz", np.zeros((5, 5)))
    # the same volume with two labels
    (home / "large" / "3.nii.gz").write_bytes((home / "small" / "3.nii.gz").read_bytes())
    document, subject = check_dataset(home, workers=0)
    reasons = {Path(row["path"]).name: row["reason"] for row in document["unreadable"]}
    assert (
        not document["passed"]
        and document["sample_type"] == "volumes"
        and set(reasons) == {"1.nii.gz", "0.npz", "2.npz"}
    )
    assert "cut short" in reasons["1.nii.gz"] and "NaN" in reasons["0.npz"] and "an array of 5 x 5" in reasons["2.npz"]
    assert document["exact_duplicates"]["across_splits"] or any(
        "two labels" in finding["message"] for finding in document["findings"]
    )
    assert document["image_sizes"]["slices"]["min"] == 12 and subject.classes == ("large", "small")

    waves = write_waves(tmp_path / "waves", 3, ".csv")
    (waves / "fast" / "0.csv").write_text("1\nword\n")
    document, _ = check_dataset(waves, workers=0)
    assert document["sample_type"] == "signals" and document["formats"] == {"TEXT": 5}
    assert [row["reason"] for row in document["unreadable"]] == [
        "cannot be read as a signal (line 2: word is not a number)"
    ]
    assert document["image_sizes"]["width"]["min"] == document["image_sizes"]["width"]["max"] == 48


def test_volumes_are_read_as_written(tmp_path):
    split = open_data(write_balls(tmp_path, 1), axes=3).split("train")
    raw = read_volume(open_sample(split, 0), 1, standardise=False)
    assert np.allclose(raw[0], make_ball(0, large=True))
