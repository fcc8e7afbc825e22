"""Mask generators follow their papers, and each mask depends only on the key of its image."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest

from vitreous.data.augmentation.masks import (
    MASK_VECTOR,
    block_masks,
    corrupt_patches,
    ibot_masks,
    mark_intervals,
    random_masks,
)
from vitreous.data.keys import derive_keys, draw_uniform
from vitreous.errors import UsageError

TOKEN_GRIDS = [(14, 14), (7, 12), (4, 6, 8)]
SAMPLE_KEYS = derive_keys(0, np.arange(40))


def to_list(arrays) -> list[np.ndarray]:
    """Return one or several arrays as a list."""
    return [arrays] if isinstance(arrays, np.ndarray) else list(arrays)


@pytest.mark.parametrize("make", [random_masks, corrupt_patches, block_masks, ibot_masks])
@pytest.mark.parametrize("grid", TOKEN_GRIDS)
def test_masks_depend_only_on_their_key(make, grid):
    full_batch = to_list(make(SAMPLE_KEYS, grid))
    order = np.argsort(derive_keys(1, np.arange(len(SAMPLE_KEYS))))
    for masks, shuffled in zip(full_batch, to_list(make(SAMPLE_KEYS[order], grid)), strict=True):
        assert np.array_equal(masks[order], shuffled)
    single_masks = [to_list(make(SAMPLE_KEYS[row : row + 1], grid)) for row in range(3)]
    assert all(
        np.array_equal(batch_mask[row], single_mask[0])
        for row, row_masks in enumerate(single_masks)
        for batch_mask, single_mask in zip(full_batch, row_masks, strict=True)
    )
    assert len({row.tobytes() for row in full_batch[0]}) >= (12 if make is ibot_masks else 30)
    assert len(to_list(make(SAMPLE_KEYS[:0], grid))[0]) == 0


@pytest.mark.parametrize("grid", TOKEN_GRIDS)
@pytest.mark.parametrize("share", [0.75, 0.5, 0.9])
def test_random_masks_hide_all_but_a_permutations_beginning(grid, share):
    keep, mask = random_masks(SAMPLE_KEYS, grid, share)
    length = math.prod(grid)
    assert keep.shape == (40, int(length * (1 - share))) and mask.shape == (40, *grid)
    for kept_tokens, row in zip(keep, mask.reshape(40, -1), strict=True):
        is_hidden = np.ones(length, bool)
        for token in kept_tokens:
            is_hidden[token] = False
        assert np.array_equal(is_hidden, row) and len(set(kept_tokens.tolist())) == len(kept_tokens)
    assert (
        random_masks(SAMPLE_KEYS, (14, 14))[0].shape == (40, 49)
        and random_masks(SAMPLE_KEYS, (14, 14))[1].sum() == 40 * 147
    )


def test_random_masks_hide_tokens_uniformly():
    _, mask = random_masks(derive_keys(3, np.arange(20_000)), (4, 5))
    assert np.abs(mask.mean(0) - 0.75).max() < 0.015
    pairs = np.corrcoef(mask.reshape(-1, 20).T)[~np.eye(20, dtype=bool)]
    # with a fixed number of hidden tokens, two tokens have a correlation of -1/19
    assert np.abs(pairs + 1 / 19).max() < 0.03


@pytest.mark.parametrize("share", [0.0, 1.0, 0.99, -0.5, 2.0])
def test_masks_need_visible_and_hidden_tokens(share):
    with pytest.raises(UsageError, match="patches leaves"):
        random_masks(SAMPLE_KEYS, (4, 4), share)


def corrupt_patches_by_loop(
    k: np.ndarray, length: int, share: float, masked: float, swapped: float
) -> tuple[np.ndarray, np.ndarray]:
    """Corrupt patches for one key with a naive loop, as a reference for `corrupt_patches`."""
    order = [int(token) for token in random_masks(k[None], (length,), 1 - share - 1e-9).keep[0]]
    u, v = (draw_uniform(derive_keys(k, 0x6D61736C, draw)[None], length)[0] for draw in range(2))
    predicted, source = np.zeros(length, bool), np.arange(length)
    for token in order[: int(share * length)]:
        predicted[token] = True
        if u[token] < masked:
            source[token] = MASK_VECTOR
        elif u[token] < masked + swapped:
            source[token] = [*range(token + 1, length), *range(token)][int(v[token] * (length - 1))]
    return predicted, source


@pytest.mark.parametrize("shares", [(0.5, 0.8, 0.1), (0.25, 0.2, 0.7)])
def test_corruptions_match_a_naive_loop(shares):
    corrupted = corrupt_patches(SAMPLE_KEYS, (6, 7), *shares)
    for k, *rows in zip(SAMPLE_KEYS, *corrupted, strict=True):
        for row, expected in zip(rows, corrupt_patches_by_loop(k, 42, *shares), strict=True):
            assert np.array_equal(row.ravel(), expected)


def test_half_is_predicted_and_80_percent_of_it_masked():
    predicted, source = corrupt_patches(derive_keys(5, np.arange(3000)), (6, 8))
    tokens = np.arange(48).reshape(6, 8)
    assert (predicted.sum((1, 2)) == 24).all()
    assert np.array_equal(source[~predicted], np.broadcast_to(tokens, source.shape)[~predicted])
    corrupted_and_original = source[predicted], np.broadcast_to(tokens, source.shape)[predicted]
    masked, stayed = (
        (corrupted_and_original[0] == MASK_VECTOR).mean(),
        (corrupted_and_original[0] == corrupted_and_original[1]).mean(),
    )
    assert abs(masked - 0.8) < 0.006 and abs(stayed - 0.1) < 0.006
    differences = (corrupted_and_original[0] - corrupted_and_original[1])[
        (corrupted_and_original[0] != MASK_VECTOR) & (corrupted_and_original[0] != corrupted_and_original[1])
    ] % 48
    assert np.abs(np.bincount(differences, minlength=48)[1:] * 47 / len(differences) - 1).max() < 0.25
    with pytest.raises(UsageError, match="invalid shares"):
        corrupt_patches(SAMPLE_KEYS, (6, 8), 0.5, 0.8, 0.3)
    with pytest.raises(UsageError, match="invalid shares"):
        corrupt_patches(SAMPLE_KEYS, (1, 1))


def block_mask_by_loop(k: np.ndarray, height: int, width: int, share: float, least: int) -> np.ndarray:
    """Generate the mask of one key with a naive loop, as a reference for `block_masks`."""
    mask, room, failed, attempt = np.zeros((height, width), bool), int(share * height * width), 0, 0
    while room > 0 and failed < 10:
        u = draw_uniform(derive_keys(k, 0x6D61736D, attempt)[None], 4)[0]
        attempt += 1
        area = least + (room - least) * u[0]
        aspect = math.exp(math.log(0.3) + 2 * math.log(1 / 0.3) * u[1])
        tall, wide = round(math.sqrt(area * aspect)), round(math.sqrt(area / aspect))
        failed += 1
        if not (0 < tall < height and 0 < wide < width):
            continue
        top, left = int(u[2] * (height - tall + 1)), int(u[3] * (width - wide + 1))
        num_new = int((~mask[top : top + tall, left : left + wide]).sum())
        if 0 < num_new <= room:
            mask[top : top + tall, left : left + wide] = True
            room, failed = room - num_new, 0
    return mask


@pytest.mark.parametrize("grid", [(14, 14), (7, 12), (3, 20)])
@pytest.mark.parametrize(("share", "least"), [(0.4, 16), (0.3, 4), (0.9, 4), (0.0, 4), (0.02, 16)])
def test_block_masks_match_a_naive_loop(grid, share, least):
    masks = block_masks(SAMPLE_KEYS, grid, share, least)
    assert np.array_equal(masks, np.stack([block_mask_by_loop(k, *grid, share, least) for k in SAMPLE_KEYS]))
    assert masks.sum((1, 2)).max() <= share * math.prod(grid)


def test_beits_blocks_hide_nearly_two_fifths_in_few_pieces():
    masks = block_masks(derive_keys(2, np.arange(500)), (14, 14))
    assert 74 < masks.sum((1, 2)).mean() <= 78 and masks.sum((1, 2)).min() > 40
    edges = (masks[:, 1:] != masks[:, :-1]).sum() + (masks[:, :, 1:] != masks[:, :, :-1]).sum()
    scattered = random_masks(derive_keys(2, np.arange(500)), (14, 14), 0.4).mask
    assert edges < 0.5 * (
        (scattered[:, 1:] != scattered[:, :-1]).sum() + (scattered[:, :, 1:] != scattered[:, :, :-1]).sum()
    )


def test_block_masks_repeat_over_frames():
    clips = block_masks(SAMPLE_KEYS, (3, 14, 14))
    assert np.array_equal(clips, np.repeat(block_masks(SAMPLE_KEYS, (14, 14))[:, None], 3, 1))


def test_ibot_masks_half_of_the_images_by_10_to_50_percent():
    shares = ibot_masks(derive_keys(4, np.arange(4000)), (14, 14)).mean((1, 2))
    masked = shares[shares > 0]
    assert abs(len(masked) / 4000 - 0.5) < 0.03 and masked.max() <= 0.5
    assert abs(masked.mean() - 0.298) < 0.01  # mean share of DINOv2's generator
    assert abs(np.corrcoef(shares, draw_uniform(derive_keys(4, np.arange(4000)), 2)[:, 1])[0, 1]) < 0.05


def draw_reference_mask(draw: random.Random, side: int, count: int) -> np.ndarray:
    """Return one mask of `count` patches from a restatement of DINOv2's generator.

    Its blocks are smaller than the grid along both axes.
    """
    mask, left = np.zeros((side, side), bool), count
    while left > 0:
        for _ in range(10):
            area, ratio = draw.uniform(4, left), math.exp(draw.uniform(math.log(0.3), -math.log(0.3)))
            tall, wide = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
            if tall >= side or wide >= side:
                continue
            top, first = draw.randint(0, side - tall), draw.randint(0, side - wide)
            block = mask[top : top + tall, first : first + wide]
            if 0 < (num_new := int((~block).sum())) <= left:
                block[:] = True
                left -= num_new
                break
        else:
            break
    return mask


def compute_mask_statistics(masks: np.ndarray) -> dict[str, np.ndarray]:
    """Compute the share of patches, whether a row or column is full, and the number of unequal neighbours.

    `masks` is (n, h, w).
    """
    has_full_line = np.array([mask.all(0).any() or mask.all(1).any() for mask in masks])
    edges = (masks[:, 1:] != masks[:, :-1]).mean((1, 2)) + (masks[:, :, 1:] != masks[:, :, :-1]).mean((1, 2))
    return {"share": masks.mean((1, 2)), "whole line": has_full_line.astype(float), "edges": edges}


def compare_masks(draws: int) -> dict[str, tuple[float, float, float]]:
    """Compare masks of half of 14 x 14 patches with DINOv2's generator.

    Returns for each statistic: our mean, the reference mean, and the difference in standard errors.
    """
    generator = random.Random(0)
    theirs = compute_mask_statistics(np.stack([draw_reference_mask(generator, 14, 98) for _ in range(draws)]))
    ours = compute_mask_statistics(
        ibot_masks(derive_keys(7, np.arange(draws)), (14, 14), (0.5, 0.5), mask_probability=1.0)
    )
    errors = {name: math.sqrt((ours[name].var() + theirs[name].var()) / draws) for name in ours}
    means = {name: (float(ours[name].mean()), float(theirs[name].mean())) for name in ours}
    return {name: (*means[name], abs(means[name][0] - means[name][1]) / errors[name]) for name in ours}


def test_ibot_mask_statistics_match_the_reference_code():
    """If blocks could span the grid along an axis, 22 % of the masks would have a full row or column, not 17 %."""
    for name, (mean, expected, errors) in compare_masks(3000).items():
        assert errors < 4, f"{name}: {mean:.4f}, DINOv2 {expected:.4f}"


def test_masks_are_independent_of_augmentation():
    keys = derive_keys(6, np.arange(5000))
    hidden = random_masks(keys, (4, 4)).mask.reshape(-1, 16)
    draws = draw_uniform(keys, 16)
    assert np.abs(np.corrcoef(hidden.T, draws.T)[:16, 16:]).max() < 0.06


def test_mark_intervals_marks_ranges():
    assert mark_intervals(np.array([1, 0]), np.array([2, 4]), 4).tolist() == [[False, True, True, False], [True] * 4]
