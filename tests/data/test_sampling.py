"""Balanced sampling and repeated augmentation: exact counts, determined by the stream position alone."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.conftest import make_folder
from vitreous.data.augmentation.augment import Augment
from vitreous.data.keys import derive_keys, draw_permutation, draw_uniform
from vitreous.data.loader import TrainLoader
from vitreous.data.modalities.images import ImagePreprocess
from vitreous.data.sampling import SampleOrder, compute_repeat_factors, draw_repeat_factor_order, get_stream_samples
from vitreous.data.sources import open_data
from vitreous.data.split import ArraySplit
from vitreous.errors import UsageError

# no samples of class 3
IMBALANCED_LABELS = np.random.default_rng(0).permutation([0] * 17 + [1] * 5 + [2] * 1 + [4] * 9)
NUM_SAMPLES = len(IMBALANCED_LABELS)
SAMPLE_ORDERS = {
    "even": SampleOrder(NUM_SAMPLES, 3),
    "balanced": SampleOrder(NUM_SAMPLES, 3, IMBALANCED_LABELS),
    "repeated": SampleOrder(NUM_SAMPLES, 3, repeats=3),
    "both": SampleOrder(NUM_SAMPLES, 3, IMBALANCED_LABELS, repeats=3),
    "factors": SampleOrder(NUM_SAMPLES, 3, factors=1 + np.arange(NUM_SAMPLES) / 8),
}


def test_an_even_epoch_is_one_permutation():
    samples, epochs, views = get_stream_samples(SAMPLE_ORDERS["even"], 0, 3 * NUM_SAMPLES)
    assert np.array_equal(samples, np.concatenate([draw_permutation(NUM_SAMPLES, 3, epoch) for epoch in range(3)]))
    assert np.array_equal(epochs, np.arange(3 * NUM_SAMPLES) // NUM_SAMPLES) and not views.any()


@given(st.sampled_from(sorted(SAMPLE_ORDERS)), st.integers(0, 5 * NUM_SAMPLES), st.integers(0, 3 * NUM_SAMPLES))
def test_any_range_of_the_stream_matches_the_whole_stream(name, start, length):
    full_stream = get_stream_samples(SAMPLE_ORDERS[name], 0, 8 * NUM_SAMPLES)
    for stream_range, all_of_it in zip(
        get_stream_samples(SAMPLE_ORDERS[name], start, start + length), full_stream, strict=True
    ):
        assert np.array_equal(stream_range, all_of_it[start : start + length])


def test_balanced_blocks_show_each_class_once():
    samples, epochs, _ = get_stream_samples(SAMPLE_ORDERS["balanced"], 0, 4 * NUM_SAMPLES)
    blocks = set()
    for epoch in range(4):
        epoch_labels = IMBALANCED_LABELS[samples[epochs == epoch]]
        for low in range(0, NUM_SAMPLES, 4):
            block = epoch_labels[low : low + 4].tolist()
            assert len(set(block)) == len(block) and set(block) <= {0, 1, 2, 4}
            blocks.add(tuple(block))
    assert len(blocks) > 12


def test_repeated_class_samples_get_new_views():
    samples, epochs, views = get_stream_samples(SAMPLE_ORDERS["balanced"], 0, 3 * NUM_SAMPLES)
    for epoch, label in itertools.product(range(3), (0, 1, 2, 4)):
        chosen = (epochs == epoch) & (IMBALANCED_LABELS[samples] == label)
        class_samples, members = samples[chosen], (label == IMBALANCED_LABELS).nonzero()[0]
        assert np.array_equal(views[chosen], np.arange(len(class_samples)) // len(members))
        for low in range(0, len(class_samples), len(members)):
            pass_samples = class_samples[low : low + len(members)]
            assert len(set(pass_samples)) == len(pass_samples)
    labels = np.array([0] * 95 + [1] * 5)
    samples, *_ = get_stream_samples(SampleOrder(100, 0, labels), 0, 100)
    rounds = samples[labels[samples] == 1].reshape(10, 5)
    assert (np.sort(rounds, 1) == np.arange(95, 100)).all() and len(set(map(tuple, rounds))) > 5


def test_a_single_sample_class_fills_its_balanced_share():
    labels = np.array([0] * 999 + [1])
    samples, _, views = get_stream_samples(SampleOrder(1000, 0, labels), 0, 1000)
    assert (labels[samples] == 1).sum() == 500
    assert len(set(views[samples == 999])) == 500
    assert len(set(samples[labels[samples] == 0])) == 500


@pytest.mark.parametrize("repeats", [2, 3, 5])
@pytest.mark.parametrize("count", [30, 31, 32])
def test_repeated_augmentation_repeats_images_consecutively(count, repeats):
    samples, epochs, views = get_stream_samples(SampleOrder(count, 1, repeats=repeats), 0, 2 * count)
    for epoch in range(2):
        epoch_samples, epoch_views = samples[epochs == epoch], views[epochs == epoch]
        expected = np.repeat(draw_permutation(count, 1, epoch)[: -(-count // repeats)], repeats)[:count]
        assert np.array_equal(epoch_samples, expected)
        assert np.array_equal(epoch_views, np.arange(count) % repeats)


def test_balanced_sampling_combines_with_repeats():
    samples, _, views = get_stream_samples(SAMPLE_ORDERS["both"], 0, NUM_SAMPLES)
    balanced_samples, _, balanced_views = get_stream_samples(SAMPLE_ORDERS["balanced"], 0, -(-NUM_SAMPLES // 3))
    assert np.array_equal(samples, np.repeat(balanced_samples, 3)[:NUM_SAMPLES])
    assert np.array_equal(views, (balanced_views[:, None] * 3 + np.arange(3)).ravel()[:NUM_SAMPLES])
    assert len(set(zip(samples, views, strict=True))) == NUM_SAMPLES


def make_array_split(labels):
    pixels = np.random.default_rng(1).integers(0, 256, (len(labels), 16, 16, 3), dtype=np.uint8)
    return ArraySplit(pixels, labels), torch.from_numpy(pixels.transpose(0, 3, 1, 2).copy())


def test_balanced_sampling_requires_one_class_per_image():
    split, _ = make_array_split(np.eye(4, dtype=np.float32))
    with pytest.raises(UsageError, match="one class per image"):
        TrainLoader(split, ImagePreprocess((16, 16)), Augment(), 0, sampling="balanced")
    with pytest.raises(UsageError, match="repeats"):
        TrainLoader(split, ImagePreprocess((16, 16)), Augment(), 0, repeats=0)


@pytest.mark.parametrize("memory", [False, True])
def test_multilabel_batches_keep_their_labels(memory):
    labels = np.random.default_rng(0).integers(0, 2, (10, 5)).astype(np.float32)
    split, cached = make_array_split(labels)
    loader = TrainLoader(split, ImagePreprocess((16, 16)), Augment(), 0, cached=cached if memory else None)
    for batch in loader.iterate_batches(0, 20, 4):
        assert batch["labels"].dtype == torch.float32 and torch.equal(
            batch["labels"], torch.from_numpy(labels)[batch["samples"]]
        )


@pytest.mark.parametrize("memory", [False, True])
def test_repeated_images_get_different_views(memory):
    split, cached = make_array_split(np.zeros(4, np.int64))
    loader = TrainLoader(
        split, ImagePreprocess((16, 16)), Augment(rotate=40), 0, cached=cached if memory else None, repeats=4
    )
    (batch,) = loader.iterate_batches(0, 4, 4)
    assert len(set(batch["samples"].tolist())) == 1
    assert all(not torch.equal(a, b) for a, b in itertools.combinations(batch["images"], 2))


@pytest.fixture(scope="module")
def train_split(tmp_path_factory):
    return open_data(make_folder(tmp_path_factory.mktemp("data") / "x", {"train": 5, "val": 1})).splits["train"]


def test_images_are_identical_for_any_workers_and_ranks(train_split):
    options = {"sampling": "balanced", "repeats": 2}
    single_process_loader = TrainLoader(
        train_split, ImagePreprocess((16, 16)), Augment(flip=0.5, rotate=20), 1, **options
    )
    reference_images = torch.cat([batch["images"] for batch in single_process_loader.iterate_batches(0, 36, 6)])
    loader = TrainLoader(train_split, ImagePreprocess((16, 16)), Augment(flip=0.5, rotate=20), 1, workers=2, **options)
    ranks = [
        torch.cat([b["images"] for b in loader.iterate_spans((low, low + 3) for low in range(3 * rank, 36, 6))])
        for rank in (0, 1)
    ]
    joined = torch.stack([rank_images.view(6, 3, *rank_images.shape[1:]) for rank_images in ranks], 1).flatten(0, 2)
    assert torch.equal(joined, reference_images)


@pytest.mark.parametrize("workers", [0, 1, "memory"])
def test_endless_streams_are_read_lazily(train_split, workers):
    requested = []

    def iterate_endless():
        for low in itertools.count(0, 4):
            requested.append(low)
            yield low, low + 4

    cached = torch.zeros(len(train_split), 3, 16, 16, dtype=torch.uint8) if workers == "memory" else None
    loader = TrainLoader(
        train_split,
        ImagePreprocess((16, 16)),
        Augment(),
        1,
        workers=workers if isinstance(workers, int) else 0,
        cached=cached,
    )
    batches = loader.iterate_spans(iterate_endless())
    assert not requested
    first = [next(batches)["samples"].tolist() for _ in range(5)]
    assert list(itertools.chain(*first)) == get_stream_samples(loader.sample_order, 0, 20)[0].tolist()
    assert len(requested) <= (10 if workers == 1 else 5)


@pytest.mark.parametrize("workers", [0, 1, "memory"])
def test_an_empty_span_gives_an_empty_batch(train_split, workers):
    cached = torch.zeros(len(train_split), 3, 16, 16, dtype=torch.uint8) if workers == "memory" else None
    loader = TrainLoader(
        train_split,
        ImagePreprocess((16, 16)),
        Augment(flip=0.5),
        1,
        workers=workers if isinstance(workers, int) else 0,
        cached=cached,
    )
    before, empty, after = loader.iterate_spans([(0, 2), (2, 2), (2, 4)])
    assert empty["images"].shape == (0, 3, 16, 16) and len(empty["labels"]) == len(empty["samples"]) == 0
    assert [*before["samples"].tolist(), *after["samples"].tolist()] == get_stream_samples(loader.sample_order, 0, 4)[
        0
    ].tolist()


def test_repeat_factors_match_a_naive_loop():
    labels = np.zeros((1000, 4), np.float32)
    labels[:500, 0] = labels[3:6, 1] = labels[5, 2] = 1
    factors, shares = compute_repeat_factors(labels, 0.01), labels.mean(0)
    for image in (0, 3, 5, 700):
        rates = [np.sqrt(0.01 / shares[k]) for k in range(4) if labels[image, k]]
        assert factors[image] == pytest.approx(max([1.0, *rates]), rel=1e-5)
    assert factors[5] == pytest.approx(np.sqrt(10)) and (factors[6:] == 1).all()
    assert np.array_equal(compute_repeat_factors(np.array([0] * 99 + [1]), 0.04), [1.0] * 99 + [2.0])
    assert (compute_repeat_factors(np.zeros((3, 0), np.float32), 0.001) == 1).all()
    with pytest.raises(UsageError, match="not between 0 and 1"):
        compute_repeat_factors(labels, 1.5)


def test_repeat_factor_epochs_match_a_naive_loop():
    factors = np.array([1.0, 2.25, 1.0, 3.5, 1.0])
    counts = np.zeros(5)
    for epoch in range(400):
        uniform, listed = draw_uniform(derive_keys(7, epoch, np.arange(5), 3), 1)[:, 0], set()
        for image in range(5):
            num_repeats = int(factors[image]) + (uniform[image] < factors[image] - int(factors[image]))
            listed |= {(image, view) for view in range(num_repeats)}
        order, views = draw_repeat_factor_order(factors, 7, epoch, 100)
        assert len(order) == len(listed) and set(zip(order.tolist(), views.tolist(), strict=True)) == listed
        cut, _ = SampleOrder(5, 7, factors=factors).draw_epoch(epoch)
        assert np.array_equal(cut, order[:5])
        counts += np.bincount(cut, minlength=5)
    assert counts / counts.sum() == pytest.approx(factors / factors.sum(), abs=0.03)


def test_repeat_factor_sampling_oversamples_rare_classes():
    labels = np.array([0] * 9 + [1])
    split = ArraySplit(np.zeros((10, 4, 4, 3), np.uint8), labels)
    loader = TrainLoader(split, ImagePreprocess((4, 4)), Augment(), 0, sampling="repeat-factor", repeat_threshold=0.9)
    samples = np.concatenate([batch["samples"].numpy() for batch in loader.iterate_batches(0, 2000, 100)])
    assert np.mean(samples == 9) == pytest.approx(3 / 12, abs=0.04)
