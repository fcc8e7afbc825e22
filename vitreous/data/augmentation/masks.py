"""Patch masks for self-supervised training: MAE, VideoMAE, ViT's masked patch prediction, BEiT, iBOT and DINOv2.

Each image's mask is a function of its key, (seed, epoch, sample, view), alone: independent of its batch and of the
augmentation draws from the same key. It is computed with integers, so it is identical on every machine.

B images; `grid` is the number of patches per axis, (h, w) or (t, h, w), N in all; True is masked.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from vitreous.data.keys import derive_keys, draw_uniform
from vitreous.errors import UsageError

MASK_VECTOR = -1  # `PatchCorruption.source`: the learned mask vector
BLOCK_ASPECT_RATIO = (0.3, 1 / 0.3)  # height / width of a block
MAX_FAILED_BLOCKS = 10  # consecutive failed blocks after which a mask is accepted as it is

_ORDER, _KIND, _BLOCK, _SHARE = (0x6D61736B + i for i in range(4))  # distinct from the key components of augmentation


class PatchMask(NamedTuple):
    """A random mask: `keep` (B, k) int64, the visible patches in input order, and `mask` (B, *grid), the masked
    ones."""

    keep: np.ndarray
    mask: np.ndarray


class PatchCorruption(NamedTuple):
    """Patches to predict: `predicted` (B, *grid) bool, and `source` (B, *grid) int64, the patch whose value replaces
    each one, or MASK_VECTOR."""

    predicted: np.ndarray
    source: np.ndarray


def random_masks(keys: np.ndarray, grid: tuple[int, ...], mask_ratio: float = 0.75) -> PatchMask:
    """Mask all but int(N (1 - mask_ratio)) patches, uniformly without replacement (MAE, arXiv:2111.06377, section 3).

    Takes (B,) keys; `keep` is (B, k), `mask` (B, *grid). Raises UsageError for a ratio that leaves no visible or no
    masked patch.
    """
    length = math.prod(grid)
    order = shuffle_patches(keys, length)
    visible = int(length * (1 - mask_ratio))
    if not 0 < visible < length:
        problem = f"masking {mask_ratio} of {length} tokens leaves {max(visible, 0)} visible"
        raise UsageError(problem, "use a share between 0 and 1, or smaller patches")
    mask = np.ones((len(keys), length), dtype=bool)
    np.put_along_axis(mask, order[:, :visible], False, 1)
    return PatchMask(order[:, :visible], mask.reshape(-1, *grid))


def tube_masks(keys: np.ndarray, grid: tuple[int, ...], mask_ratio: float = 0.9) -> PatchMask:
    """Mask the same int(h w mask_ratio) positions in each of t time slots, uniformly without replacement (VideoMAE,
    arXiv:2203.12602, section 3.3, rounded as in its code).

    Takes (B,) keys and the grid (t, h, w); `keep` is (B, k), `mask` (B, t, h, w). Raises UsageError for a ratio that
    leaves no visible or no masked position.
    """
    slots, num_positions = grid[0], math.prod(grid[1:])
    masked = int(num_positions * mask_ratio)
    if not 0 < masked < num_positions:
        problem = f"masking {mask_ratio} of {num_positions} positions leaves {max(num_positions - masked, 0)} visible"
        raise UsageError(problem, "use a share between 0 and 1, or smaller patches")
    mask = np.zeros((len(keys), num_positions), dtype=bool)
    np.put_along_axis(mask, shuffle_patches(keys, num_positions)[:, :masked], True, 1)
    mask = np.tile(mask, slots)  # (B, t h w)
    return PatchMask(np.nonzero(~mask)[1].reshape(len(keys), -1), mask.reshape(-1, *grid))


def corrupt_patches(
    keys: np.ndarray, grid: tuple[int, ...], ratio: float = 0.5, masked: float = 0.8, swapped: float = 0.1
) -> PatchCorruption:
    """Corrupt int(ratio N) patches of each image for masked patch prediction (ViT, arXiv:2010.11929, appendix B.1.2).

    Takes (B,) keys; both results are (B, *grid). Each predicted patch is drawn independently: a share `masked` becomes
    the mask vector, `swapped` another patch of the same image (the paper does not define which), the rest is unchanged.
    Raises UsageError for an image of one patch, and for shares outside [0, 1].
    """
    length = math.prod(grid)
    if min(ratio, masked, swapped) < 0 or ratio > 1 or masked + swapped > 1 or length < 2:
        problem = f"invalid shares {ratio}, {masked} and {swapped} of {length} tokens"
        raise UsageError(problem, "use values from 0 to 1, also for the sum of the last two")
    tokens = np.arange(length)
    predicted = np.zeros((len(keys), length), dtype=bool)
    np.put_along_axis(predicted, shuffle_patches(keys, length)[:, : int(ratio * length)], True, 1)
    u, v = (draw_uniform(derive_keys(keys, _KIND, draw), length) for draw in range(2))
    swap_sources = (tokens + 1 + np.floor(v * (length - 1)).astype(np.int64)) % length
    source = np.where(u < masked, MASK_VECTOR, np.where(u < masked + swapped, swap_sources, tokens))
    source = np.where(predicted, source, tokens)
    return PatchCorruption(predicted.reshape(-1, *grid), source.reshape(-1, *grid))


def block_masks(
    keys: np.ndarray, grid: tuple[int, ...], mask_ratio: float | np.ndarray = 0.4, min_patches: int = 16
) -> np.ndarray:
    """Mask blocks until int(mask_ratio N) patches are masked (blockwise masking, BEiT, arXiv:2106.08254, algorithm 1).

    Takes (B,) keys and one ratio or (B,) ratios; the result is (B, *grid) bool. A block of at least `min_patches` lies
    in the last two axes and extends over the others; it may overlap others, but masks no more patches than remain. As
    in the code of BEiT, iBOT and DINOv2, a block is smaller than the grid along both axes, and a mask is accepted with
    fewer patches after ten consecutive blocks that do not fit. For one image:

        while room > 0 and fewer than 10 consecutive blocks did not fit:
            area, aspect = uniform in min_patches .. room, log-uniform in 0.3 .. 1 / 0.3
            tall, wide = round(sqrt(area aspect)), round(sqrt(area / aspect)); top, left = uniform over the grid
            if tall < height and wide < width and the block masks 1 to room more: mask them; room -= as many
    """
    height, width = grid[-2:]
    remaining = np.broadcast_to(np.floor(np.asarray(mask_ratio) * (height * width)).astype(np.int64), len(keys)).copy()
    mask = np.zeros((len(keys), height, width), dtype=bool)
    failed = np.zeros(len(keys), dtype=np.int64)
    attempt = 0
    while len(active := np.flatnonzero((remaining > 0) & (failed < MAX_FAILED_BLOCKS))):
        draws = draw_uniform(derive_keys(keys[active], _BLOCK, attempt), 4)
        top, left, block_heights, block_widths = propose_blocks(draws, remaining[active], min_patches, (height, width))
        is_inside = (block_heights > 0) & (block_widths > 0) & (block_heights < height) & (block_widths < width)
        block = (
            mark_intervals(top, block_heights, height)[:, :, None]
            & mark_intervals(left, block_widths, width)[:, None, :]
        )
        num_new = (block & ~mask[active]).sum((1, 2))
        is_accepted = is_inside & (num_new > 0) & (num_new <= remaining[active])
        mask[active[is_accepted]] |= block[is_accepted]
        remaining[active[is_accepted]] -= num_new[is_accepted]
        failed[active] = np.where(is_accepted, 0, failed[active] + 1)
        attempt += 1
    return np.broadcast_to(mask.reshape(-1, *(1,) * (len(grid) - 2), height, width), (len(keys), *grid)).copy()


def ibot_masks(
    keys: np.ndarray,
    grid: tuple[int, ...],
    mask_ratios: tuple[float, float] = (0.1, 0.5),
    mask_probability: float = 0.5,
    min_patches: int = 4,
) -> np.ndarray:
    """Mask an image with `mask_probability`, by blocks with a ratio uniform in `mask_ratios` (iBOT, arXiv:2111.07832,
    section 4.1).

    Takes (B,) keys; the result is (B, *grid) bool. Blocks have at least 4 patches and ratios are one range, as in
    DINOv2's code (arXiv:2304.07193). DINOv2 masks exactly half of each batch, and draws one ratio from each of equal
    intervals of `mask_ratios`; here each image is drawn independently, so that its mask does not depend on its batch.
    """
    mask_draws, u = draw_uniform(derive_keys(keys, _SHARE), 2).T
    low, high = mask_ratios
    return block_masks(keys, grid, np.where(mask_draws < mask_probability, low + (high - low) * u, 0.0), min_patches)


def propose_blocks(
    u: np.ndarray, remaining: np.ndarray, min_patches: int, grid: tuple[int, int]
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Draw top, left, height and width of a block, (B,) int64 each, from (B, 4) draws and (B,) remaining patches."""
    area = min_patches + (remaining - min_patches) * u[:, 0]
    low, high = np.log(BLOCK_ASPECT_RATIO)
    aspect = np.exp(low + (high - low) * u[:, 1])
    block_heights, block_widths = (
        np.rint(np.sqrt(extent)).astype(np.int64) for extent in (area * aspect, area / aspect)
    )
    top, left = (
        np.floor(v * np.maximum(extent - length + 1, 0)).astype(np.int64)
        for v, extent, length in ((u[:, 2], grid[0], block_heights), (u[:, 3], grid[1], block_widths))
    )
    return top, left, block_heights, block_widths


def mark_intervals(start: np.ndarray, length: np.ndarray, axis_length: int) -> np.ndarray:
    """Mark the positions along an axis that (B,) starts and lengths cover, (B, side) bool."""
    positions = np.arange(axis_length) - start[:, None]
    return (positions >= 0) & (positions < length[:, None])


def shuffle_patches(keys: np.ndarray, length: int) -> np.ndarray:
    """Permute the patches of each image by its key, (B,): (B, length) int64."""
    return np.argsort(derive_keys(keys[:, None], _ORDER, np.arange(length)[None]), axis=1, kind="stable")
