"""Views of scenes: an image and its class map move together, and chance is a function of the key."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image

from tests.data.annotations.scenery import write_maps
from vitreous.data.annotations.target import IGNORE, no_objects
from vitreous.data.augmentation.scenes import Scenes
from vitreous.data.loader import TrainLoader
from vitreous.data.preprocess import Preprocess
from vitreous.data.sources import open_data
from vitreous.errors import UsageError

STILL = Scenes(scale=(1.0, 1.0), flip=0.0)


def view_of(scenes, image=(24, 32), key=5):
    """A view of a picture of (24, 32) pixels that grow by 4 a row and 2 a column, each of which is its own class."""
    ramp = 4 * np.arange(24)[:, None] + 2 * np.arange(32)[None]
    picture = Image.fromarray(np.stack([ramp.astype(np.uint8)] * 3, -1))
    return scenes.scene(picture, no_objects((24, 32), ramp.astype(np.int32)), Preprocess(image), key), ramp


def test_a_view_of_the_images_own_size_is_the_image():
    view, classes = view_of(STILL)
    assert np.array_equal(view["images"].numpy(), np.stack([classes] * 3))
    assert np.array_equal(view["classes"].numpy(), classes)


@pytest.mark.parametrize("change", [
    {"flip": 1.0}, {"flip_vertical": 1.0}, {"turn": True}, {"scale": (0.5, 3.0)}, {"fit": "whole", "scale": (0.5, 2.0)},
])  # fmt: skip
def test_images_and_maps_move_together(change):
    scenes = replace(STILL, **change)
    moved = 0
    for key in range(12):
        view, classes = view_of(scenes, image=(32, 32), key=key)
        known, pixels = view["classes"] != IGNORE, view["images"][0].int()
        assert known.float().mean() > 0.05
        # half a pixel along both axes to the nearest one, and what a filter reads beyond the edge of the image
        assert (pixels - view["classes"])[known].abs().max() <= 6
        assert (pixels - view["classes"])[known].float().mean().abs() <= 3
        assert (pixels[~known] == 0).all()
        moved += not np.array_equal(view["classes"][:24].numpy(), classes)
    assert moved >= 4


def test_what_is_outside_the_image_is_ignored():
    view, classes = view_of(STILL, image=(48, 48))
    known = view["classes"] != IGNORE  # the image lies between pixels: those at its edges are not whole
    assert (24 - 1) * (32 - 1) <= known.sum() <= classes.size
    assert known.any(0).sum() * known.any(1).sum() == known.sum()
    assert (view["images"][:, view["classes"] == IGNORE] == 0).all()


def test_a_view_is_a_function_of_its_key_alone():
    scenes = Scenes(jitter=(0.3, 0.3, 0.3), turn=True, flip_vertical=0.5)
    views = [view_of(scenes, key=key)[0] for key in (1, 1, 2)]
    assert all(torch.equal(views[0][name], views[1][name]) for name in views[0])
    assert not torch.equal(views[0]["images"], views[2]["images"])


def test_workers_give_the_same_batches_and_empty_ones_have_their_shape(tmp_path):
    data = open_data(write_maps(tmp_path))
    loaders = [TrainLoader(data.splits["train"], Preprocess((16, 16)), Scenes(), 3, workers) for workers in (0, 2)]
    first, second = (list(loader.spans([(0, 4), (4, 4), (4, 7)])) for loader in loaders)
    for one, other in zip(first, second, strict=True):
        assert one.keys() == other.keys() == {"images", "classes", "samples"}
        assert all(torch.equal(one[name], other[name]) for name in one)
    assert first[1]["images"].shape == (0, 3, 16, 16) and first[1]["classes"].shape == (0, 16, 16)


@pytest.mark.parametrize(
    "change", [{"scale": (0.0, 1.0)}, {"scale": (2.0, 1.0)}, {"flip": 1.5}, {"jitter": (-1, 0, 0)}]
)
def test_numbers_that_cannot_be_are_refused(change):
    with pytest.raises(UsageError):
        Scenes(**change)
