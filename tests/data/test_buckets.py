"""Size buckets: each image uses the nearest size, each batch has one size, each image occurs once per epoch."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from tests.data.films import make_moving_square, write_clip
from vitreous.data.augmentation.augment import Augment
from vitreous.data.buckets import (
    BUCKET_ASPECT_RATIOS,
    choose_buckets,
    find_nearest_buckets,
    list_clip_lengths,
    measure_sample_forms,
    parse_buckets,
)
from vitreous.data.keys import draw_permutation
from vitreous.data.loader import TrainLoader
from vitreous.data.modalities.clips import ClipPreprocess
from vitreous.data.sampling import SampleOrder, find_bucket_boundaries, get_stream_samples
from vitreous.data.sources import open_data
from vitreous.data.split import FileSplit
from vitreous.errors import UsageError

CLIP_BUCKETS = ((8, 32, 32), (4, 32, 32), (1, 32, 32), (8, 24, 40), (1, 24, 40), (1, 64, 64), (4, 40, 24))
FORM_GENERATOR = np.random.default_rng(0)
SAMPLE_FORMS = np.stack(
    [FORM_GENERATOR.integers(1, 14, 400), FORM_GENERATOR.integers(8, 200, 400), FORM_GENERATOR.integers(8, 200, 400)], 1
)


def find_nearest_bucket_by_loop(form, buckets, stride):
    """Return the nearest bucket by the loop in the docstring of `find_nearest_buckets`."""
    frames, height, width = map(int, form)
    sizes = [(1, *bucket) if len(bucket) == 2 else bucket for bucket in buckets]
    fill = 1 + (frames - 1) // stride if stride else frames
    length = max((t for t, _, _ in sizes if t <= fill), default=min(t for t, _, _ in sizes))
    best, chosen = (math.inf, math.inf), -1
    for number, (t, h, w) in enumerate(sizes):
        distance = round(abs(math.log(width / height) - math.log(w / h)), 9), abs(math.log(height * width / (h * w)))
        if t == length and distance < best:
            best, chosen = distance, number
    return chosen


@pytest.mark.parametrize("stride", [0, 1, 3])
@pytest.mark.parametrize("buckets", [CLIP_BUCKETS, tuple(size[1:] for size in CLIP_BUCKETS[2:])])
def test_nearest_buckets_match_a_naive_loop(buckets, stride):
    assert find_nearest_buckets(SAMPLE_FORMS, buckets, stride).tolist() == [
        find_nearest_bucket_by_loop(form, buckets, stride) for form in SAMPLE_FORMS
    ]


def test_typical_forms_get_the_expected_buckets():
    def find_bucket(*form):
        return CLIP_BUCKETS[int(find_nearest_buckets(np.array([form]), CLIP_BUCKETS)[0])]

    assert (
        find_bucket(1, 480, 640) == (1, 24, 40)
        and find_bucket(1, 1000, 1000) == (1, 64, 64)
        and find_bucket(1, 30, 30) == (1, 32, 32)
    )
    assert (
        find_bucket(100, 480, 480) == (8, 32, 32)
        and find_bucket(7, 480, 480) == (4, 32, 32)
        and find_bucket(3, 9, 16) == (1, 24, 40)
    )
    # eight frames with a stride of three span 22 frames
    assert int(find_nearest_buckets(np.array([[22, 32, 32]]), CLIP_BUCKETS, 3)[0]) == 0
    assert int(find_nearest_buckets(np.array([[21, 32, 32]]), CLIP_BUCKETS, 3)[0]) == 1


def test_chosen_buckets_fit_the_data():
    photographs = np.array([(1, 480, 640)] * 60 + [(1, 640, 480)] * 25 + [(1, 500, 500)] * 14 + [(1, 50, 900)])
    buckets = choose_buckets(photographs, (64, 64), (4, 4))
    assert buckets == ((56, 76), (76, 56), (64, 64))  # the panorama is assigned to the widest bucket
    assert all(abs(math.log(h * w / 64**2)) < 0.05 for h, w in buckets)
    films = np.array([(30, 90, 160)] * 8 + [(1, 90, 160)] * 3 + [(3, 90, 160)] * 2)
    assert choose_buckets(films, (8, 32, 32), (1, 4, 4)) == ((8, 24, 44), (1, 24, 44), (2, 24, 44))
    assert choose_buckets(np.zeros((0, 3), np.int64), (64, 64), (4, 4)) and len(BUCKET_ASPECT_RATIOS) == 13
    assert (
        list_clip_lengths(16, 2) == [16, 8, 4, 2]
        and list_clip_lengths(6, 2) == [6, 2]
        and list_clip_lengths(1, 1) == [1]
    )


def test_bucket_strings_are_parsed_and_validated():
    assert parse_buckets(("64x48", "48X64", "64x48"), 2) == ((64, 48), (48, 64))
    for word, axes in (("64", 2), ("64x48", 3), ("8x64x48", 2), ("0x64", 2), ("axb", 2), ("", 2), ("6.5x4", 2)):
        with pytest.raises(UsageError, match=f"buckets[= ]'?{word}'? is not a valid size"):
            parse_buckets((word,), axes)
    with pytest.raises(UsageError, match="65 buckets exceed the limit"):
        parse_buckets(tuple(f"4x{side}" for side in range(1, 66)), 2)


@given(
    st.lists(st.integers(0, 4), min_size=1, max_size=70), st.integers(1, 9), st.integers(0, 5), st.integers(0, 2**20)
)
def test_bucketed_epochs_show_every_image_once(buckets, batch, epochs, seed):
    assigned_buckets = np.array(buckets)
    order, n = (
        SampleOrder(len(assigned_buckets), seed, None, 1, factors=None, buckets=assigned_buckets, batch=batch),
        len(assigned_buckets),
    )
    samples, _, views = get_stream_samples(order, 0, (epochs + 1) * n)
    assert not views.any()
    assert all(sorted(samples[low : low + n]) == list(range(n)) for low in range(0, len(samples), n))
    for low in range(0, len(samples), batch):
        ends = find_bucket_boundaries(order, low, min(low + batch, len(samples)))
        assert ends[0] == low and ends[-1] == min(low + batch, len(samples)) and ends == sorted(set(ends))
        batch_buckets = [assigned_buckets[samples[a:b]] for a, b in itertools.pairwise(ends)]
        assert all(len(set(bucket_indices.tolist())) == 1 for bucket_indices in batch_buckets)
        assert all(before[-1] != after[0] for before, after in itertools.pairwise(batch_buckets))


def test_most_bucketed_batches_have_a_single_size():
    assigned_buckets = FORM_GENERATOR.integers(0, 4, 1000)
    order = SampleOrder(1000, 3, None, 1, factors=None, buckets=assigned_buckets, batch=16)
    samples = get_stream_samples(order, 0, 5000)[0]
    mixed = [len(find_bucket_boundaries(order, low, low + 16)) > 2 for low in range(0, 4992, 16)]
    assert sum(mixed) < 5 * 4  # an epoch ends with the remainder of each of four buckets
    assert not np.array_equal(samples[:1000], samples[1000:2000])


def test_a_single_bucket_keeps_the_unbucketed_order():
    order = SampleOrder(50, 7, None, 1, factors=None, buckets=np.zeros(50, np.int64), batch=8)
    assert np.array_equal(
        get_stream_samples(order, 0, 150)[0], np.concatenate([draw_permutation(50, 7, epoch) for epoch in range(3)])
    )


@pytest.fixture(scope="module")
def mixed_folder(tmp_path_factory):
    """Return a folder of two classes with GIFs, video files, frame folders, and images of several sizes."""
    home = tmp_path_factory.mktemp("mixed")
    for right, name in enumerate(("left", "right")):
        for number, suffix in enumerate((".gif", ".mp4", "", ".gif")):
            write_clip(
                home / name / f"clip{number}{suffix}", make_moving_square(number, bool(right), 8 if number < 3 else 3)
            )
        for number, (height, width) in enumerate([(16, 16), (16, 16), (12, 24), (24, 12), (16, 32)]):
            pixels = np.random.default_rng(number).integers(0, 255, (height, width, 3)).astype(np.uint8)
            Image.fromarray(pixels).save(home / name / f"{number:04}.png")
    return home


def test_buckets_allow_clips_and_images_in_one_folder(mixed_folder, tmp_path):
    data = open_data(mixed_folder, stills=True)
    train = data.full_train_split
    assert train is not None and len(train) == 18 and data.classes == ("left", "right")
    assert any("18 clips, 10 of them images, read as one frame" in note for note in data.notes)
    forms = {
        name.split("/")[-1]: form
        for name, form in zip(map(train.name, range(18)), measure_sample_forms(train).tolist(), strict=True)
    }
    assert forms["clip0.gif"] == forms["clip1.mp4"] == forms["clip2"] == [8, 16, 16]
    assert forms["clip3.gif"] == [3, 16, 16] and forms["0002.png"] == [1, 12, 24]
    # without buckets, one photo among clips makes the dataset an image dataset
    assert type(open_data(mixed_folder).split("train")) is FileSplit
    # a folder of images stays an image dataset, also with numbered files and with splits
    for split in ("train", "val"):
        for name in ("a", "b"):
            for number in range(3):
                path = tmp_path / split / name / f"{number:03}.png"
                path.parent.mkdir(parents=True, exist_ok=True)
                Image.new("RGB", (16, 16), (number, 0, 0)).save(path)
    assert type(open_data(tmp_path, stills=True).split("train")) is FileSplit


def test_unreadable_files_have_no_form(mixed_folder, tmp_path):
    (tmp_path / "a").mkdir()
    for name, content in (("bad.png", b"not an image"), ("empty.png", b"")):
        (tmp_path / "a" / name).write_bytes(content)
    Image.new("RGB", (20, 10)).save(tmp_path / "a" / "good.png")
    split = FileSplit(
        [tmp_path / "a" / name for name in ("bad.png", "empty.png", "good.png")], np.zeros((3, 0), np.float32)
    )
    assert measure_sample_forms(split).tolist() == [[0, 0, 0], [0, 0, 0], [1, 10, 20]]


def test_bucketed_samples_match_a_run_at_that_size(mixed_folder):
    split = open_data(mixed_folder, stills=True).full_train_split
    assert split is not None
    sizes = ((8, 16, 16), (1, 16, 16), (1, 12, 24), (1, 24, 12))
    assigned_buckets = find_nearest_buckets(measure_sample_forms(split), sizes)
    preprocess = ClipPreprocess((8, 16, 16), buckets=sizes)
    loader = TrainLoader(split, preprocess, Augment(flip=0.5), 5, buckets=assigned_buckets, batch_size=4)
    spans = [
        (a, b)
        for low in range(0, 36, 4)
        for ends in [find_bucket_boundaries(loader.sample_order, low, low + 4)]
        for a, b in itertools.pairwise(ends)
    ]
    positions = []
    for batch in loader.iterate_spans(spans):
        (bucket,) = set(assigned_buckets[batch["samples"].numpy()].tolist())
        assert batch["images"].shape[1:] == (3, *sizes[bucket])
        positions += batch["samples"].tolist()
        single_loader = TrainLoader(split, ClipPreprocess(sizes[bucket]), Augment(flip=0.5), 5)
        epoch = (len(positions) - 1) // 18
        if (len(positions) - len(batch["samples"])) // 18 == epoch:
            images: list[Any] = [single_loader.load_sample(sample, epoch, 0) for sample in batch["samples"].tolist()]
            assert torch.equal(batch["images"], torch.stack(images))
    assert sorted(positions) == sorted([*range(18)] * 2)
