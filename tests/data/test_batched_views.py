"""Views generated for whole batches in memory have the distribution of views generated from files."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image, ImageFilter
from torchvision.transforms.v2 import functional as tv

from tests.conftest import make_image
from vitreous.data.augmentation import batched
from vitreous.data.augmentation.batched import (
    DRAWS_PER_VIEW,
    apply_axis_matrices,
    create_bicubic_matrices,
    create_gaussian_matrices,
    draw_box_sizes,
    jitter_batch_colours,
    rgb_to_grey,
)
from vitreous.data.augmentation.crops import AreaCrop
from vitreous.data.augmentation.views import DINO_VIEWS, MultiCrop
from vitreous.data.keys import derive_keys, draw_uniform, fork_torch_rng
from vitreous.data.modalities.base import image_to_tensor
from vitreous.data.modalities.images import ImagePreprocess

IMAGE_SIZE, LOCAL_SIZE = (20, 24), (8, 10)
IDENTITY_OPTIONS: dict[str, Any] = {
    "flip": 0.0,
    "jitter_probability": 0.0,
    "grey": 0.0,
    "blur": (0.0,) * 3,
    "solarise": (0.0,) * 3,
}
FULL_CROP_OPTIONS: dict[str, Any] = {"global_area": (1.0, 1.0), "local_area": (1.0, 1.0), "ratio": (1.2, 1.2)}


@pytest.fixture(scope="module")
def pixel_batch():
    return torch.stack([image_to_tensor(make_image(i, IMAGE_SIZE[::-1])) for i in range(70)])


def to_row_major(images: torch.Tensor) -> torch.Tensor:
    return images.permute(0, 2, 1, 3).float()


@pytest.mark.parametrize("channels", [1, 3, 4])
def test_batched_views_depend_only_on_each_key(pixel_batch, channels):
    pixel_batch = pixel_batch[:, [0] if channels == 1 else [0, 1, 2, 0][:channels]]
    crops, keys = MultiCrop(3, LOCAL_SIZE), derive_keys(0, np.arange(len(pixel_batch)))
    rows = crops.augment_batch(pixel_batch, keys)
    assert rows.dtype == torch.uint8
    for row in (0, 41, 69):
        assert torch.equal(crops.augment_batch(pixel_batch[row : row + 1], keys[row : row + 1])[0], rows[row])
    batch = crops.unpack_batch(rows, ImagePreprocess(IMAGE_SIZE, channels))
    assert batch["images"].shape == (70, 2, channels, *IMAGE_SIZE) and batch["local"].shape == (
        70,
        3,
        channels,
        *LOCAL_SIZE,
    )
    globals_only = replace(crops, locals=0).augment_batch(pixel_batch, keys)
    assert torch.equal(globals_only, batch["images"].flatten(1))
    assert len({view.numpy().tobytes() for view in batch["local"].flatten(0, 1)}) > 205


def test_without_any_change_the_image_itself_is_a_view(pixel_batch):
    crops = MultiCrop(1, IMAGE_SIZE, **IDENTITY_OPTIONS, **FULL_CROP_OPTIONS)
    rows = crops.augment_batch(pixel_batch, np.arange(70)).unflatten(1, (3, 3, *IMAGE_SIZE))
    assert (rows == pixel_batch[:, None]).all()
    mirrored = replace(crops, flip=1.0).augment_batch(pixel_batch, np.arange(70)).unflatten(1, (3, 3, *IMAGE_SIZE))
    assert (mirrored == pixel_batch[:, None].flip(-1)).all()
    floats = torch.rand(5, 2, *IMAGE_SIZE) * 1000
    assert torch.allclose(
        crops.augment_batch(floats, np.arange(5)).unflatten(1, (3, 2, *IMAGE_SIZE)), floats[:, None], rtol=1e-5
    )


@pytest.mark.parametrize("size", [(20, 24), (8, 10), (40, 50)])
def test_box_resampling_matches_torch_antialiased_bicubic(pixel_batch, size):
    top, left, tall, wide = (np.array(v, float) for v in ([0, 3, 9], [5, 0, 14], [20, 11, 6], [12, 24, 10]))
    resampled = apply_axis_matrices(
        to_row_major(pixel_batch[:3]),
        create_bicubic_matrices(top, tall, 20, size[0]),
        create_bicubic_matrices(left, wide, 24, size[1]),
    )
    for row in range(3):
        y, x, h, w = (int(v[row]) for v in (top, left, tall, wide))
        box = pixel_batch[row : row + 1, :, y : y + h, x : x + w].float()
        expected = F.interpolate(box, size, mode="bicubic", antialias=True)[0]
        assert torch.allclose(resampled[row].permute(1, 0, 2), expected, atol=1e-2)


def test_box_sizes_are_distributed_as_in_torchvision():
    crop, sides = AreaCrop(LOCAL_SIZE, (0.1, 0.6), (3 / 4, 4 / 3), "bicubic"), []
    for k in range(1500):
        with fork_torch_rng(k):
            left, top, right, bottom = crop.draw_box(30, 20)
        sides.append((bottom - top, right - left))
    box_sizes = np.stack(
        draw_box_sizes(draw_uniform(np.arange(6000), DRAWS_PER_VIEW), 20, 30, crop.area, crop.ratio), 1
    )
    assert box_sizes.min() >= 1 and (box_sizes <= (20, 30)).all() and (box_sizes == box_sizes.round()).all()
    assert np.allclose(box_sizes.mean(0), np.mean(sides, 0), atol=0.2)
    assert np.allclose(box_sizes.std(0), np.std(sides, 0), atol=0.2)
    clamped_size = np.stack(draw_box_sizes(np.full((1, DRAWS_PER_VIEW), 0.99), 20, 200, (1.0, 1.0), crop.ratio), 1)
    assert clamped_size.tolist() == [[20, 27]]  # the largest box with the allowed aspect nearest to the image's


@pytest.mark.parametrize(
    ("operation_index", "strength", "change"),
    [
        (batched.BRIGHTNESS, (0.4, 0, 0, 0), lambda x, a: tv.adjust_brightness(x, 1 + a)),
        (batched.CONTRAST, (0, 0.4, 0, 0), lambda x, a: tv.adjust_contrast(x, 1 + a)),
        (batched.SATURATION, (0, 0, 0.9, 0), lambda x, a: tv.adjust_saturation(x, 1 + a)),
        (batched.HUE, (0, 0, 0, 0.4), lambda x, a: tv.adjust_hue(x, a)),
    ],
)
def test_jitter_matches_torchvision(pixel_batch, operation_index, strength, change):
    u = np.linspace(0.01, 0.99, 70)[:, None].repeat(4, 1)
    rows = jitter_batch_colours(to_row_major(pixel_batch), np.random.default_rng(0).random((70, 4)), u, strength)
    for row in range(0, 70, 7):
        amount = float((2 * u[row, operation_index] - 1) * strength[operation_index])
        expected = change(pixel_batch[row].float() / 255, amount) * 255
        assert torch.allclose(rows[row].permute(1, 0, 2), expected, atol=0.1), row


def test_jitter_applies_operations_in_the_drawn_order(pixel_batch):
    """Brightness before contrast and contrast before brightness both match torchvision's functions."""
    rows, u = to_row_major(pixel_batch[:2]), np.full((2, 4), 0.9)
    order = np.array([[0.0, 0.1, 0.2, 0.3], [0.1, 0.0, 0.2, 0.3]])
    jittered = jitter_batch_colours(rows, order, u, (0.5, 0.5, 0.0, 0.0))
    image = pixel_batch[:2].float() / 255
    brightness_first = tv.adjust_contrast(tv.adjust_brightness(image[0], 1.4), 1.4)
    assert torch.allclose(jittered[0].permute(1, 0, 2), brightness_first * 255, atol=0.1)
    contrast_first = tv.adjust_brightness(tv.adjust_contrast(image[1], 1.4), 1.4)
    assert torch.allclose(jittered[1].permute(1, 0, 2), contrast_first * 255, atol=0.1)


def test_blur_is_gaussian_with_edge_padding(pixel_batch):
    radius = np.array([0.5, 1.5, 2.0])
    down, across = create_gaussian_matrices(radius, 20), create_gaussian_matrices(radius, 24)
    assert torch.allclose(down.sum(-1), torch.ones(3, 20))
    blurred = apply_axis_matrices(to_row_major(pixel_batch[:3]), down, across).permute(0, 2, 1, 3)
    for row in range(3):
        image = Image.fromarray(pixel_batch[row].permute(1, 2, 0).numpy())
        pillows = image_to_tensor(image.filter(ImageFilter.GaussianBlur(float(radius[row])))).float()
        assert (blurred[row] - pillows).abs().mean() < 1.5  # Pillow approximates the Gaussian by three box filters


def test_grey_and_solarise_have_their_probabilities(pixel_batch):
    keys = derive_keys(7, np.arange(70))
    grey = (
        MultiCrop(2, IMAGE_SIZE, **{**IDENTITY_OPTIONS, "grey": 0.2}, **FULL_CROP_OPTIONS)
        .augment_batch(pixel_batch, keys)
        .unflatten(1, (4, 3, *IMAGE_SIZE))
    )
    shades = grey.float().std(2).amax((2, 3)) < 1
    assert 0.1 < float(shades.float().mean()) < 0.3
    gray_positions = shades.nonzero()[0]
    assert (
        grey[gray_positions[0], gray_positions[1], 0].float()
        - rgb_to_grey(to_row_major(pixel_batch[gray_positions[:1]]))[0, :, 0]
    ).abs().max() <= 0.5
    inverted = replace(
        DINO_VIEWS,
        locals=2,
        local_image=IMAGE_SIZE,
        **{**IDENTITY_OPTIONS, "solarise": DINO_VIEWS.solarise},
        **FULL_CROP_OPTIONS,
    )
    rows = inverted.augment_batch(pixel_batch, keys).unflatten(1, (4, 3, *IMAGE_SIZE))
    changed = (rows != pixel_batch[:, None]).flatten(2).any(-1).float().mean(0)
    assert changed[0] == 0 and 0.08 < changed[1] < 0.35 and changed[2] == changed[3] == 0
    assert (rows <= torch.maximum(pixel_batch, 255 - pixel_batch)[:, None]).all()


def test_batched_view_colours_are_distributed_like_file_views(pixel_batch):
    """Compare mean, std and share of extreme values of 200 DINO views generated both ways."""
    crops = replace(DINO_VIEWS, locals=1, local_image=LOCAL_SIZE)
    stacked = crops.unpack_batch(
        crops.augment_batch(pixel_batch, derive_keys(1, np.arange(70))), ImagePreprocess(IMAGE_SIZE)
    )
    single_views = [
        crops.draw_views(Image.fromarray(p.permute(1, 2, 0).numpy()), IMAGE_SIZE, k) for k, p in enumerate(pixel_batch)
    ]
    for ours, theirs in (
        (stacked["images"], torch.stack([torch.stack(views[:2]) for views in single_views])),
        (stacked["local"], torch.stack([views[2] for views in single_views])),
    ):
        for measure in (torch.mean, torch.std):
            assert abs(float(measure(ours.float())) - float(measure(theirs.float()))) < 4
