"""Views follow DINO's recipe, depend only on their key and index, and keep their order in a batch."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image, ImageFilter, ImageOps

from tests.conftest import make_folder, make_image
from vitreous.config import from_yaml, to_yaml
from vitreous.data.augmentation.augment import Augment
from vitreous.data.augmentation.views import DINO_VIEWS, DINOV2_VIEWS, MultiCrop, blur_at_random
from vitreous.data.batch import count_batch_samples, slice_batch
from vitreous.data.decoding.decode import decode_to_pillow
from vitreous.data.keys import derive_keys
from vitreous.data.layouts.folder import open_image_folder
from vitreous.data.loader import TrainLoader
from vitreous.data.modalities.base import image_to_tensor
from vitreous.data.modalities.images import ImagePreprocess
from vitreous.errors import UsageError

IMAGE_SIZE, LOCAL_SIZE = (20, 24), (8, 10)
VIEW_PREPROCESS = ImagePreprocess(IMAGE_SIZE)
IDENTITY_OPTIONS: dict[str, Any] = {
    "flip": 0.0,
    "jitter_probability": 0.0,
    "grey": 0.0,
    "blur": (0.0,) * 3,
    "solarise": (0.0,) * 3,
}


def test_views_depend_only_on_key_and_index():
    image, two_locals, five_locals = make_image(0, (70, 50)), MultiCrop(2, LOCAL_SIZE), MultiCrop(5, LOCAL_SIZE)
    for k in range(5):
        views = five_locals.draw_views(image, IMAGE_SIZE, k)
        assert [tuple(view.shape) for view in views] == [(3, *IMAGE_SIZE)] * 2 + [(3, *LOCAL_SIZE)] * 5
        assert all(view.dtype == torch.uint8 for view in views)
        assert len({view.numpy().tobytes() for view in views}) == 7
        assert all(
            torch.equal(a, b) for a, b in zip(two_locals.draw_views(image, IMAGE_SIZE, k), views[:4], strict=True)
        )
    assert not torch.equal(
        five_locals.draw_views(image, IMAGE_SIZE, 0)[0], five_locals.draw_views(image, IMAGE_SIZE, 1)[0]
    )


@pytest.mark.parametrize("channels", [1, 3])
def test_grey_images_have_views(channels):
    views = DINO_VIEWS.draw_views(make_image(0, (70, 50)).convert("L" if channels == 1 else "RGB"), IMAGE_SIZE, 3)
    assert len(views) == 10 and all(view.shape[0] == channels for view in views)


@pytest.mark.parametrize("crops", [DINO_VIEWS, DINOV2_VIEWS])
def test_views_cover_their_share_of_the_image(crops):
    """The colours of the image are its coordinates, so a view's pixels give its position."""
    rows, columns = np.mgrid[0:200, 0:250]
    coordinate_image = Image.fromarray(np.stack([columns, rows, 0 * rows], -1).astype(np.uint8))
    identity_crops = MultiCrop(2, (32, 32), crops.global_area, crops.local_area, **IDENTITY_OPTIONS)
    areas: dict[int, list[float]] = {0: [], 2: []}
    for k in range(150):
        for view, pixels in enumerate(identity_crops.draw_views(coordinate_image, (32, 32), k)):
            reach = pixels.flatten(1).float().max(1).values - pixels.flatten(1).float().min(1).values
            assert pixels[0, 0, 0] < pixels[0, 0, -1] and pixels[1, 0, 0] < pixels[1, -1, 0]
            areas[0 if view < 2 else 2].append(float(reach[0] * reach[1]) * (32 / 31) ** 2 / 50_000)
    for group, (low, high) in ((0, crops.global_area), (2, crops.local_area)):
        assert low - 0.03 < min(areas[group]) < low + 0.06 and high - 0.12 < max(areas[group]) < high + 0.06
        # torchvision resamples boxes that do not fit
        assert abs(np.mean(areas[group]) - (low + high) / 2) < (high - low) / 6


def measure_view_rates(crops: MultiCrop, image: Image.Image, happened) -> np.ndarray:
    """Return how often `happened` is true, for each type of view."""
    counts = np.zeros(3)
    for k in range(250):
        counts += [happened(view) for view in crops.draw_views(image, IMAGE_SIZE, k)]
    return counts / 250


@pytest.mark.parametrize(
    ("option", "value", "expected"),
    [
        ("solarise", DINO_VIEWS.solarise, (0, 0.2, 0)),
        ("blur", DINO_VIEWS.blur, (1, 0.1, 0.5)),
        ("blur", DINOV2_VIEWS.blur, (0, 0.9, 0.5)),
        ("grey", 0.2, (0.2, 0.2, 0.2)),
        ("jitter_probability", 0.8, (0.8, 0.8, 0.8)),
    ],
)
def test_each_view_type_has_separate_probabilities(option, value, expected):
    crops = MultiCrop(
        1,
        IMAGE_SIZE,
        **{**IDENTITY_OPTIONS, option: value},
        global_area=(1.0, 1.0),
        local_area=(1.0, 1.0),
        ratio=(1.2, 1.2),
    )
    fine = np.full((20, 24, 3), (140, 90, 30), np.uint8)
    fine[::2, ::2] = (150, 60, 90)
    original = image_to_tensor(Image.fromarray(fine))
    rates = measure_view_rates(crops, Image.fromarray(fine), lambda view: not torch.equal(view, original))
    blur_of_nothing = 0.06 if option == "blur" else 0  # a radius near 0.1 changes no pixel
    assert (np.abs(rates - expected) < 0.06 + blur_of_nothing).all()


def test_solarise_and_blur_match_pillow():
    image = make_image(0, (24, 20))
    full_view_options = {"global_area": (1.0, 1.0), "ratio": (1.2, 1.2)}
    solar = MultiCrop(0, **{**IDENTITY_OPTIONS, "solarise": (1.0, 1.0, 1.0)}, **full_view_options)
    assert torch.equal(solar.draw_views(image, IMAGE_SIZE, 0)[0], image_to_tensor(ImageOps.solarize(image, 128)))
    assert blur_at_random(image, 1.0, (1.5, 1.5)).tobytes() == image.filter(ImageFilter.GaussianBlur(1.5)).tobytes()
    assert blur_at_random(image, 0.0, (1.5, 1.5)) is image


def test_bands_are_cropped_and_flipped_together():
    image, crops = make_image(0, (70, 50)), MultiCrop(3, LOCAL_SIZE, **{**IDENTITY_OPTIONS, "flip": 0.5})
    bands = image.split()
    for k in range(10):
        joint_views, band_views = (
            crops.draw_views(image, IMAGE_SIZE, k),
            MultiCrop(3, LOCAL_SIZE).draw_views((*bands, bands[0]), IMAGE_SIZE, k),
        )
        for joint_view, two in zip(joint_views, band_views, strict=True):
            assert torch.equal(joint_view, two[:3]) and torch.equal(joint_view[0], two[3])
    floats = tuple(Image.fromarray(np.asarray(band).astype(np.float32) * 10) for band in bands[:2])
    assert all(view.dtype == torch.float32 and view.max() > 300 for view in crops.draw_views(floats, IMAGE_SIZE, 0))


@pytest.mark.parametrize("locals", [3, 0])
def test_packed_views_are_unpacked_to_batches(locals):
    crops, images = MultiCrop(locals, LOCAL_SIZE), [make_image(i, (70, 50)) for i in range(4)]
    rows = torch.stack([crops.augment_image(image, VIEW_PREPROCESS, k) for k, image in enumerate(images)])
    batch = crops.unpack_batch(rows, VIEW_PREPROCESS)
    assert batch["images"].shape == (4, 2, 3, *IMAGE_SIZE) and batch["local"].shape == (4, locals, 3, *LOCAL_SIZE)
    for k, image in enumerate(images):
        views = crops.draw_views(image, IMAGE_SIZE, k)
        assert torch.equal(batch["images"][k], torch.stack(views[:2]))
        assert not locals or torch.equal(batch["local"][k], torch.stack(views[2:]))
    assert crops.unpack_batch(rows[:0], VIEW_PREPROCESS)["images"].shape == (0, 2, 3, *IMAGE_SIZE)


def test_views_survive_a_config_round_trip_and_are_validated():
    assert from_yaml(MultiCrop, to_yaml(DINOV2_VIEWS)) == DINOV2_VIEWS
    for options in (
        {"flip": 1.2},
        {"blur": (0.0, -0.1, 0.0)},
        {"local_area": (0.0, 0.4)},
        {"global_area": (0.9, 0.4)},
        {"locals": -1},
    ):
        with pytest.raises(UsageError):
            MultiCrop(**options)


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("memory", [False, True])
def test_loaders_give_batches_of_views(tmp_path, memory, workers):
    data = open_image_folder(make_folder(tmp_path, {"train": 4, "val": 1}, size=(24, 20)))
    split, crops = data.split("train"), MultiCrop(3, LOCAL_SIZE)
    images = [decode_to_pillow(split.raw(sample)) for sample in range(len(split))]
    cached = torch.stack([image_to_tensor(image) for image in images]) if memory else None
    loader = TrainLoader(split, VIEW_PREPROCESS, crops, 0, workers=workers, cached=cached)
    batches = list(loader.iterate_batches(10, 15, 3))
    assert [len(batch["samples"]) for batch in batches] == [3, 2]
    for batch in batches:
        count = len(batch["labels"])
        assert batch["images"].shape[:2] == (count, 2) and batch["local"].shape[:2] == (count, 3)
        assert (batch["labels"].numpy() == split.labels[batch["samples"].numpy()]).all()
    sample = int(batches[0]["samples"][0])
    key = derive_keys(loader.seed, 0, sample, 0)
    row = (
        crops.augment_batch(cached[sample : sample + 1], key[None])[0]
        if memory
        else crops.augment_image(images[sample], VIEW_PREPROCESS, key)
    )
    expected = crops.unpack_batch(row[None], VIEW_PREPROCESS)
    assert all(torch.equal(batches[0][name][0], expected[name][0]) for name in ("images", "local"))


@pytest.mark.parametrize("memory", [False, True])
def test_unlabelled_batches_have_no_labels(tmp_path, memory):
    split = open_image_folder(make_folder(tmp_path, {"train": 4, "val": 1}, size=(24, 20))).split("train")
    cached = (
        torch.stack([image_to_tensor(decode_to_pillow(split.raw(sample))) for sample in range(len(split))])
        if memory
        else None
    )
    unlabelled = split.take(np.arange(len(split)), np.zeros((len(split), 0), np.float32))
    for views, shape in ((MultiCrop(3, LOCAL_SIZE), (3, 2, 3, *IMAGE_SIZE)), (Augment(flip=0.5), (3, 3, *IMAGE_SIZE))):
        batch, labelled = (
            next(TrainLoader(s, VIEW_PREPROCESS, views, 0, workers=0, cached=cached).iterate_batches(0, 3, 3))
            for s in (unlabelled, split)
        )
        assert "labels" not in batch and "labels" in labelled
        assert (
            count_batch_samples(batch) == 3
            and batch["images"].shape == shape
            and batch.keys() == labelled.keys() - {"labels"}
        )
        assert all(torch.equal(batch[name], labelled[name]) for name in batch)
        assert (
            torch.equal(slice_batch(batch, 1, 3)["images"], batch["images"][1:])
            and count_batch_samples(slice_batch(batch, 1, 3)) == 2
        )
