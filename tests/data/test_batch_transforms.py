"""Batched shifts, flips and erasing match a loop over the images."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from vitreous.data.augmentation.augment import Augment
from vitreous.data.augmentation.batch_transforms import apply_simple_crops, erase_random_boxes, shift_and_mirror
from vitreous.data.augmentation.crops import simple_crop_indices
from vitreous.data.keys import derive_keys, draw_uniform

NUMPY_PAD_MODES = {"reflection": "symmetric", "reflection inside": "reflect", "zeros": "constant"}


def make_image_batch(count: int, channels: int = 3, size=(20, 24)) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(0).integers(0, 256, (count, channels, *size), dtype=np.uint8))


@pytest.mark.parametrize("border", NUMPY_PAD_MODES)
@pytest.mark.parametrize("channels, size", [(3, (20, 24)), (1, (7, 5)), (3, (16, 36)), (4, (3, 2))])
def test_batched_shifts_match_a_loop_over_images(border, channels, size):
    images, random = make_image_batch(40, channels, size), np.random.default_rng(1)
    before, reach = images.clone(), 2 if border == "reflection" and min(size) == 2 else 1 if min(size) == 2 else 4
    x, y = random.integers(-reach, reach + 1, (2, 40))
    mirror = random.random(40) < 0.5
    shifted = shift_and_mirror(images, x, y, mirror, border)
    assert torch.equal(images, before) and shifted.is_contiguous()
    for image, dx, dy, is_mirrored, shifted_image in zip(images.numpy(), x, y, mirror, shifted.numpy(), strict=True):
        around = np.pad(image, [(0, 0), (reach, reach), (reach, reach)], NUMPY_PAD_MODES[border])
        expected = around[:, reach + dy :, reach + dx :][:, : size[0], : size[1]]
        assert np.array_equal(shifted_image, expected[:, :, ::-1] if is_mirrored else expected)


def test_zero_shifts_return_a_copy():
    images, zeros = make_image_batch(3), np.zeros(3, np.int64)
    shifted = shift_and_mirror(images, zeros, zeros, zeros.astype(bool), "zeros")
    assert torch.equal(shifted, images) and shifted.data_ptr() != images.data_ptr()


def test_a_shift_and_a_mirror_are_the_affine_map():
    """An integer shift and flip equals the affine map of the same key with bilinear sampling."""
    images, keys = make_image_batch(64), derive_keys(0, np.arange(64))
    for border in ("reflection", "zeros"):
        augment = Augment(shift=0.2, flip=0.5, border=border)
        affine_augment = Augment(shift=0.2, flip=0.5, border=border, zoom=1e-9)
        assert augment.augment_batch(images, keys).dtype == torch.uint8
        assert (
            augment.augment_batch(images, keys).float() - affine_augment.augment_batch(images, keys)
        ).abs().max() < 0.01


def test_windows_are_simple_crops():
    images, keys = make_image_batch(50), derive_keys(3, np.arange(50))
    u = draw_uniform(keys, 11)
    for image, row, column, cropped in zip(images, u[:, 9], u[:, 10], apply_simple_crops(images, keys), strict=True):
        assert torch.equal(
            cropped,
            image[:, torch.from_numpy(simple_crop_indices(20, 20, row))][
                :, :, torch.from_numpy(simple_crop_indices(24, 24, column))
            ],
        )


@pytest.mark.parametrize("noise", [False, True])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32])
def test_erased_boxes_depend_only_on_each_key(noise, dtype):
    """The erased box of an image depends only on its key, and has the specified size and frequency."""
    images, keys = torch.full((400, 3, 40, 40), 7).to(dtype), derive_keys(0, np.arange(400))
    erased = erase_random_boxes(images.clone(), keys, 0.4, noise)
    assert torch.equal(erase_random_boxes(images[300:].clone(), keys[300:], 0.4, noise), erased[300:])
    assert erased.dtype == dtype and erased.min() >= 0 and erased.max() <= 255
    holes = (erased != 7).any(1)
    has_hole = holes.flatten(1).any(1)
    assert 0.33 < has_hole.float().mean() < 0.47
    areas, box_positions = [], set()
    for hole in holes[has_hole]:
        rows, columns = hole.any(1).nonzero().flatten(), hole.any(0).nonzero().flatten()
        tall, wide = int(rows[-1] - rows[0]) + 1, int(columns[-1] - columns[0]) + 1
        areas.append(tall * wide / 1600)
        box_positions.add((int(rows[0]), int(columns[0])))
        assert 0.25 < tall / wide < 4
    assert (
        min(areas) < 0.06
        and max(areas) > 0.27
        and max(areas) < 0.37
        and abs(np.mean(areas) - 0.176) < 0.03
        and len(box_positions) > 100
    )
    inside = erased.permute(0, 2, 3, 1)[holes].float()
    if noise:
        assert 0.4 < inside.mean() / 255 < 0.5 and 0.19 < inside.std() / 255 < 0.25
    else:
        assert (inside == 128).all()
