"""Order and augmentation depend only on (seed, epoch, sample, view)."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from PIL import Image

from tests.conftest import make_folder, make_image
from vitreous.data.augmentation.augment import Augment
from vitreous.data.keys import derive_key, derive_keys, draw_permutation, draw_uniform, fork_torch_rng
from vitreous.data.loader import TrainLoader
from vitreous.data.modalities.images import ImagePreprocess
from vitreous.data.sampling import SampleOrder, get_stream_samples
from vitreous.data.sources import open_data
from vitreous.data.split import decode_sample

FULL_AUGMENT = Augment(crop=(0.3, 1.0), shift=0.1, rotate=10, zoom=0.1, flip=0.5, rand_layers=2, erase=0.5)
PLAIN_PREPROCESS = ImagePreprocess((16, 16))


def test_keys_are_unique_and_depend_on_every_argument():
    grid = [
        derive_keys(seed, epoch, np.arange(1000), view)
        for seed, epoch, view in itertools.product(range(5), range(10), range(2))
    ]
    assert len(np.unique(np.concatenate(grid))) == 100_000
    assert derive_keys(1, 2) != derive_keys(2, 1)


def test_derive_key_matches_derive_keys():
    for values in [(0,), (1, 2, 3, 4), (-1, 5), (2**64 - 1, 2**63), tuple(np.arange(9)), (int(derive_keys(7)), 0)]:
        assert derive_key(*values) == int(derive_keys(*values))


def test_drawn_numbers_are_uniform():
    u = draw_uniform(derive_keys(0, np.arange(20_000)), 3)
    assert u.min() >= 0 and u.max() < 1
    assert np.abs(np.histogram(u, 10, (0, 1))[0] / u.size - 0.1).max() < 0.005
    assert np.abs(np.corrcoef(u.T) - np.eye(3)).max() < 0.02


def test_forked_rng_restores_the_global_state():
    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)
    first = torch.rand(1)
    with fork_torch_rng(1, 2):
        inside = torch.rand(1)
    assert torch.equal(torch.cat([first, torch.rand(1)]), expected)
    with fork_torch_rng(1, 2):
        assert torch.equal(torch.rand(1), inside)


def test_every_epoch_is_a_new_permutation():
    samples, epochs, views = get_stream_samples(SampleOrder(7, 0), 0, 21)
    for epoch in range(3):
        assert sorted(samples[7 * epoch : 7 * epoch + 7]) == list(range(7))
        assert (epochs[7 * epoch : 7 * epoch + 7] == epoch).all()
    assert len({tuple(draw_permutation(50, 0, epoch)) for epoch in range(10)}) == 10
    tail, *_ = get_stream_samples(SampleOrder(7, 0), 5, 21)
    assert np.array_equal(tail, samples[5:]) and not views.any()


@pytest.fixture(scope="module")
def train_split(tmp_path_factory):
    return open_data(make_folder(tmp_path_factory.mktemp("data") / "x", {"train": 8, "val": 1}, size=(24, 20))).splits[
        "train"
    ]


def concatenate_images(loader, *span):
    return torch.cat([batch["images"].float() for batch in loader.iterate_batches(*span)])


@pytest.mark.parametrize("workers", [1, 2])
def test_streams_do_not_depend_on_workers_batches_or_resuming(train_split, workers):
    loader = TrainLoader(train_split, PLAIN_PREPROCESS, FULL_AUGMENT, seed=1)
    reference_images = concatenate_images(loader, 0, 60, 7)
    assert torch.equal(
        concatenate_images(TrainLoader(train_split, PLAIN_PREPROCESS, FULL_AUGMENT, 1, workers=workers), 0, 60, 7),
        reference_images,
    )
    assert torch.equal(
        concatenate_images(TrainLoader(train_split, PLAIN_PREPROCESS, FULL_AUGMENT, 1, workers=workers), 31, 60, 4),
        reference_images[31:],
    )


def test_in_memory_streams_resume_at_any_position(train_split):
    cached = torch.stack(
        [PLAIN_PREPROCESS.to_tensor(decode_sample(train_split, i, 3)) for i in range(len(train_split))]
    )
    loader = TrainLoader(train_split, PLAIN_PREPROCESS, FULL_AUGMENT, seed=1, cached=cached)
    reference_images = concatenate_images(loader, 0, 60, 7)
    assert torch.allclose(concatenate_images(loader, 31, 60, 4), reference_images[31:], atol=1e-3)
    batches = list(loader.iterate_batches(0, 60, 7))
    assert [len(batch["labels"]) for batch in batches] == [7] * 8 + [4]
    for batch in batches:
        assert torch.equal(batch["labels"], torch.from_numpy(train_split.labels)[batch["samples"]])


def test_augmentation_differs_between_epochs_samples_and_seeds(train_split):
    views = [
        TrainLoader(train_split, PLAIN_PREPROCESS, FULL_AUGMENT, seed).load_sample(sample, epoch, 0)
        for seed in (0, 1)
        for epoch in (0, 1)
        for sample in (0, 1)
    ]
    assert all(not torch.equal(a, b) for a, b in itertools.combinations(views, 2))


def test_disabled_augmentation_changes_nothing():
    pixels = torch.from_numpy(np.stack([np.asarray(make_image(i)).transpose(2, 0, 1) for i in range(4)]).copy())
    unchanged = Augment().augment_batch(pixels, derive_keys(0, np.arange(4)))
    assert torch.equal(unchanged, pixels)
    assert torch.equal(Augment().augment_image(make_image(1), PLAIN_PREPROCESS, 5), pixels[1])


def test_flips_and_shifts_are_integer_translations():
    pixels = torch.from_numpy(np.asarray(make_image(0)).transpose(2, 0, 1).copy())[None].repeat(64, 1, 1, 1)
    flipped = Augment(flip=1.0).augment_batch(pixels, derive_keys(0, np.arange(64)))
    assert torch.equal(flipped, pixels.flip(-1))
    augmented = Augment(shift=0.125, border="zeros").augment_batch(pixels, derive_keys(0, np.arange(64)))
    offsets = set()
    for image in augmented:
        matches = [
            (dy, dx)
            for dy in range(-2, 3)
            for dx in range(-2, 3)
            if torch.equal(image[:, 2:-2, 2:-2], pixels[0].roll((dy, dx), (1, 2))[:, 2:-2, 2:-2])
        ]
        assert len(matches) == 1
        offsets.add(matches[0])
    assert len(offsets) > 15


def test_rotation_preserves_shapes_on_non_square_images():
    """A centred disc is unchanged by rotation for any aspect ratio of the image."""
    rows, columns = np.mgrid[:20, :40]
    disc = ((rows - 9.5) ** 2 + (columns - 19.5) ** 2 < 36).astype(np.uint8) * 255
    pixels = torch.from_numpy(disc)[None, None].repeat(16, 3, 1, 1)
    rotated = Augment(rotate=90, border="zeros").augment_batch(pixels, derive_keys(3, np.arange(16)))
    assert (rotated - pixels.float()).abs().mean() < 4


@pytest.mark.parametrize("options", [{"mixup": 0.8}, {"cutmix": 1.0}, {"mixup": 0.8, "cutmix": 1.0}])
def test_mixed_labels_are_distributions_determined_by_the_step(options):
    images, labels = torch.randn(6, 3, 8, 8), torch.arange(6) % 3
    augment = Augment(**options)
    mixed, soft = augment.mix_batch(images, labels, 3, seed=0, batch=4)
    repeated, _ = augment.mix_batch(images, labels, 3, seed=0, batch=4)
    next_batch, _ = augment.mix_batch(images, labels, 3, seed=0, batch=5)
    assert soft.shape == (6, 3) and torch.allclose(soft.sum(1), torch.ones(6))
    assert torch.equal(mixed, repeated) and not torch.equal(mixed, next_batch)
    assert not torch.equal(mixed, images)


@pytest.mark.parametrize("fit", ["crop", "squash"])
def test_preprocessing_sizes(fit):
    preprocess = ImagePreprocess((16, 24), fit=fit, share=0.9)
    for size in ((16, 24), (24, 16), (100, 30), (5, 200), (1, 1)):
        assert preprocess.to_tensor(Image.new("RGB", size)).shape == (3, 16, 24)


def test_a_centre_crop_takes_the_centre():
    pixels = np.zeros((20, 60, 3), np.uint8)
    pixels[:, 20:40] = 200
    assert (ImagePreprocess((20, 20)).to_tensor(Image.fromarray(pixels)) == 200).all()


def test_normalise_uses_mean_and_std_of_pixels_in_0_to_1():
    preprocess = ImagePreprocess((2, 2), mean=(0.5, 0.4, 0.3), std=(0.5, 0.2, 0.1))
    values = preprocess.normalise(torch.full((1, 3, 2, 2), 255, dtype=torch.uint8))
    assert torch.allclose(values[0, :, 0, 0], torch.tensor([1.0, 3.0, 7.0]), atol=1e-5)
