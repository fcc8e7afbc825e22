"""Views of volumes: voxels and classes move together, and randomness depends only on the key."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image

from tests.data.annotations.solids import write_solids
from vitreous.data.annotations.target import IGNORE_INDEX, create_empty_target
from vitreous.data.augmentation.augment import Augment
from vitreous.data.augmentation.scenes import SceneViews
from vitreous.data.augmentation.views import MultiCrop
from vitreous.data.augmentation.volumes import VolumeViews
from vitreous.data.loader import TrainLoader
from vitreous.data.modalities.images import ImagePreprocess
from vitreous.data.modalities.volumes import VolumePreprocess
from vitreous.data.sources import open_data
from vitreous.errors import UsageError

IDENTITY_VIEWS = VolumeViews((1.0, 1.0), 0.0, (0.0, 0.0, 0.0), 0.0, 0.0, 0.0, 0.0)
VOLUME_SIZE = (12, 16, 14)


def make_preprocess(image):
    """Return the preprocessing of volumes for this input size."""
    return VolumePreprocess(image, 1, (0.0,), (1.0,))


def make_ramp_view(scenes, image=VOLUME_SIZE, key=5):
    """Return a view of a volume that rises by 5, 3 and 2 along its axes; each value is a class."""
    ramp = sum(
        step * coordinate for step, coordinate in zip((5, 3, 2), np.ogrid[tuple(map(slice, VOLUME_SIZE))], strict=True)
    )
    target = create_empty_target(VOLUME_SIZE, ramp.astype(np.int32))
    return scenes.augment_scene(ramp[None].astype(np.float32), target, make_preprocess(image), key), ramp


def test_an_identity_view_is_the_volume():
    view, ramp = make_ramp_view(IDENTITY_VIEWS)
    assert view["images"][0].numpy() == pytest.approx(ramp, abs=1e-3)
    assert np.array_equal(view["classes"].numpy(), ramp)


@pytest.mark.parametrize("change", [
    {"flip": (1.0, 0.0, 0.0)}, {"flip": (0.0, 1.0, 1.0)}, {"scale": (0.6, 1.7)}, {"rotate": 40.0},
])  # fmt: skip
def test_voxels_and_classes_move_together(change):
    scenes, num_valid = replace(IDENTITY_VIEWS, **change), 0
    for key in range(8):
        view, ramp = make_ramp_view(scenes, key=key)
        is_valid = view["classes"] != IGNORE_INDEX
        assert is_valid.float().mean() > 0.1
        # a nearest-neighbour position is off by up to half a voxel along each axis
        difference = (view["images"][0] - view["classes"])[is_valid]
        assert difference.abs().max() <= 5.5 and difference.mean().abs() <= 1.5
        num_valid += not np.array_equal(view["classes"].numpy(), ramp)
    assert num_valid == 8


def test_volume_padding_is_reflected_and_ignored():
    view, ramp = make_ramp_view(IDENTITY_VIEWS, image=(20, 16, 14))
    is_valid = (view["classes"] != IGNORE_INDEX).all((1, 2))
    first = int(is_valid.nonzero()[0])
    assert is_valid.sum() in (11, 12) and is_valid[first : first + int(is_valid.sum())].all()
    inside = view["images"][0][is_valid]
    assert inside.min() >= ramp.min() - 0.01 and view["images"].max() <= ramp.max() + 0.01
    outside = view["images"][0][~is_valid]
    assert (
        outside.min() >= ramp.min() - 0.01 and (view["classes"][~is_valid] == IGNORE_INDEX).all() and outside.std() > 1
    )


def test_sampling_positions_match_a_loop_over_voxels():
    scenes, draws = replace(IDENTITY_VIEWS, scale=(0.5, 2.0), rotate=30.0), np.random.default_rng(0).random(19)
    positions = scenes.compute_sample_positions(VOLUME_SIZE, (4, 6, 5), draws)
    factors = 0.5 * 4.0 ** draws[:3]
    sides = np.array((4, 6, 5)) / factors
    room = np.array(VOLUME_SIZE) - sides
    centre = np.minimum(0, room) + np.abs(room) * draws[3:6] + sides / 2
    rotation = np.eye(3)
    for draw, (a, b) in zip(draws[6:9], ((1, 2), (0, 2), (0, 1)), strict=True):
        angle, axis_rotation = math.radians(30 * (2 * draw - 1)), np.eye(3)
        axis_rotation[[a, a, b, b], [a, b, a, b]] = math.cos(angle), -math.sin(angle), math.sin(angle), math.cos(angle)
        rotation = axis_rotation @ rotation
    for voxel in np.ndindex(4, 6, 5):
        offset = (np.array(voxel) + 0.5 - np.array((4, 6, 5)) / 2) / factors
        assert positions[(slice(None), *voxel)] == pytest.approx(centre + rotation @ offset)


def test_intensities_change_within_their_ranges():
    scenes = VolumeViews((1.0, 1.0), 0.0, (0.0, 0.0, 0.0), contrast=0.3, shift=0.2, gamma=0.5, noise=0.0)
    volume = np.random.default_rng(0).normal(size=(1, 8, 8, 8)).astype(np.float32)
    target = create_empty_target((8, 8, 8), np.zeros((8, 8, 8), np.int32))
    changed = [
        scenes.augment_scene(volume, target, make_preprocess((8, 8, 8)), key)["images"].numpy() for key in range(20)
    ]
    for volume_view in changed:  # voxels keep their order
        assert np.array_equal(np.argsort(volume_view.ravel(), kind="stable"), np.argsort(volume.ravel(), kind="stable"))
        low, high = sorted((volume.min() * 0.7, volume.min() * 1.3))
        assert low - 0.21 <= volume_view.min() <= high + 0.21
    assert np.std([volume_view.mean() for volume_view in changed]) > 0.05
    noisy = (
        replace(IDENTITY_VIEWS, noise=0.5)
        .augment_scene(volume, target, make_preprocess((8, 8, 8)), 3)["images"]
        .numpy()
        - volume
    )
    assert 0 < noisy.std() <= 0.55 and abs(noisy.mean()) < 0.1


def test_views_depend_only_on_their_key(tmp_path):
    data = open_data(write_solids(tmp_path, 5))
    with torch.random.fork_rng():
        torch.manual_seed(1)
        first = TrainLoader(data.split("train"), make_preprocess((8, 12, 8)), VolumeViews(), seed=3)
        batches = list(first.iterate_batches(0, 8, 3))
        torch.manual_seed(2)
        repeated = list(
            TrainLoader(data.split("train"), make_preprocess((8, 12, 8)), VolumeViews(), seed=3).iterate_batches(
                0, 8, 8
            )
        )
    assert [len(batch["samples"]) for batch in batches] == [3, 3, 2]
    for name in ("images", "classes"):
        assert torch.equal(torch.cat([batch[name] for batch in batches]), repeated[0][name])
    assert batches[0]["images"].shape == (3, 1, 8, 12, 8) and batches[0]["classes"].dtype == torch.int32
    next_epoch = next(
        iter(
            TrainLoader(data.split("train"), make_preprocess((8, 12, 8)), VolumeViews(), seed=4).iterate_batches(
                0, 8, 8
            )
        )
    )
    assert not torch.equal(next_epoch["images"], repeated[0]["images"])
    assert VolumeViews().collate([], make_preprocess((8, 12, 8)))["images"].shape == (0, 1, 8, 12, 8)


def test_invalid_volume_views_are_rejected():
    for options in ({"scale": (0.0, 1.0)}, {"flip": (0.5, 2.0, 0.0)}, {"noise": -1.0}, {"contrast": 1.0}):
        with pytest.raises(UsageError):
            VolumeViews(**options)
    volume, target = np.zeros((1, 4, 4, 4), np.float32), create_empty_target((4, 4), np.zeros((4, 4), np.int32))
    for views in (Augment(), MultiCrop(locals=0)):
        with pytest.raises(UsageError, match="volume"):
            views.augment_image(volume, ImagePreprocess((4, 4)), 0)
    with pytest.raises(UsageError, match="volume"):
        SceneViews().augment_scene(volume, target, ImagePreprocess((4, 4)), 0)
    with pytest.raises(UsageError, match="need volumes"):
        VolumeViews().augment_scene(Image.new("L", (4, 4)), target, make_preprocess((4, 4, 4)), 0)


@pytest.mark.parametrize("size", [(4, 20, 8), (9, 3, 8), (8, 8, 8)])
def test_other_sizes_are_centre_cropped_or_padded(size):
    volume = np.random.default_rng(0).normal(size=(2, *size)).astype(np.float32)
    fitted = make_preprocess((8, 8, 8)).to_array(volume)
    common_size = [min(8, side) for side in size]
    source_slices = tuple(
        slice((side - length) // 2, (side - length) // 2 + length)
        for side, length in zip(size, common_size, strict=True)
    )
    target_slices = tuple(slice((8 - length) // 2, (8 - length) // 2 + length) for length in common_size)
    assert fitted.shape == (2, 8, 8, 8) and np.array_equal(
        fitted[(slice(None), *target_slices)], volume[(slice(None), *source_slices)]
    )
    assert np.count_nonzero(fitted) == 2 * np.prod(common_size)
