"""Patch masks for self-supervised training: MAE, VideoMAE, ViT's masked patch prediction, BEiT, iBOT and DINOv2.

A mask depends only on the random key of its image, which is derived from (seed, epoch, sample, view). It is independent
of the other images of the batch, and of the augmentation, which uses the same key. Random numbers are computed with
integers, so masks are identical on every machine.

In shapes, B is images. `grid` is the number of patches per axis, (h, w) or (t, h, w); N is their product. In a mask,
True is a masked patch.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from vitreous.data.keys import derive_keys, draw_uniform
from vitreous.errors import UsageError

MASK_VECTOR = -1  # value in `PatchCorruption.source`: the patch is replaced by the learned mask vector
BLOCK_ASPECT_RATIO = (0.3, 1 / 0.3)  # range of height / width of a block
MAX_FAILED_BLOCKS = 10  # consecutive rejected blocks after which no more blocks are drawn

#: key components, which separate the random numbers of this module from those of augmentation
_ORDER, _CORRUPTION, _BLOCK, _RATIO = (0x6D61736B + i for i in range(4))


class PatchMask(NamedTuple):
    """Masks of a batch: `keep` (B, k) int64, the indices of the k visible patches, and `mask` (B, *grid) bool."""

    keep: np.ndarray
    mask: np.ndarray


class PatchCorruption(NamedTuple):
    """Patches to predict, and their replacements in the model's input.

    `predicted` (B, *grid) bool: whether a patch is predicted. `source` (B, *grid) int64: the index of the patch that is
    used in its position, its own index if it is unchanged, or MASK_VECTOR.
    """

    predicted: np.ndarray
    source: np.ndarray


def random_masks(keys: np.ndarray, grid: tuple[int, ...], mask_ratio: float = 0.75) -> PatchMask:
    """Draw masks in which int(N (1 - mask_ratio)) patches stay visible, uniformly without replacement (MAE,
    arXiv:2111.06377, section 3).

    `keys` are (B,), `keep` of the result is (B, k) in random order, `mask` is (B, *grid). Raises UsageError if no patch
    is visible, or none is masked.
    """
    length = math.prod(grid)
    order = shuffle_patches(keys, length)
    visible = int(length * (1 - mask_ratio))
    if not 0 < visible < length:
        problem = f"mask ratio {mask_ratio} of {length} patches leaves {max(visible, 0)} visible"
        raise UsageError(problem, "use a mask ratio between 0 and 1, or smaller patches")
    mask = np.ones((len(keys), length), dtype=bool)
    np.put_along_axis(mask, order[:, :visible], False, 1)
    return PatchMask(order[:, :visible], mask.reshape(-1, *grid))


def tube_masks(keys: np.ndarray, grid: tuple[int, ...], mask_ratio: float = 0.9) -> PatchMask:
    """Draw tube masks, which mask the same positions of a clip in all of its t time steps (VideoMAE, arXiv:2203.12602,
    section 3.3).

    int(h w mask_ratio) positions, rounded as in VideoMAE's code, are drawn uniformly without replacement. `keys` are
    (B,), `grid` is (t, h, w); `keep` of the result is (B, k) in increasing order, `mask` is (B, t, h, w). Raises
    UsageError if no position is visible, or none is masked.
    """
    time_steps, num_positions = grid[0], math.prod(grid[1:])
    masked = int(num_positions * mask_ratio)
    if not 0 < masked < num_positions:
        visible = max(num_positions - masked, 0)
        problem = f"mask ratio {mask_ratio} of {num_positions} positions leaves {visible} visible"
        raise UsageError(problem, "use a mask ratio between 0 and 1, or smaller patches")
    mask = np.zeros((len(keys), num_positions), dtype=bool)
    np.put_along_axis(mask, shuffle_patches(keys, num_positions)[:, :masked], True, 1)
    mask = np.tile(mask, time_steps)  # (B, t h w)
    return PatchMask(np.nonzero(~mask)[1].reshape(len(keys), -1), mask.reshape(-1, *grid))


def corrupt_patches(
    keys: np.ndarray, grid: tuple[int, ...], ratio: float = 0.5, masked: float = 0.8, swapped: float = 0.1
) -> PatchCorruption:
    """Choose int(ratio N) patches of each image to predict, and their replacements, for masked patch prediction (ViT,
    arXiv:2010.11929, appendix B.1.2).

    A predicted patch is replaced by the mask vector with probability `masked`, or by a random other patch of the image
    with probability `swapped`. Otherwise it is unchanged. The paper does not define which patches are swapped. `keys`
    are (B,); both arrays of the result are (B, *grid). Raises UsageError for an image of one patch, and for values
    outside [0, 1].
    """
    length = math.prod(grid)
    if min(ratio, masked, swapped) < 0 or ratio > 1 or masked + swapped > 1 or length < 2:
        problem = f"invalid shares for {length} patches: ratio {ratio}, masked {masked}, swapped {swapped}"
        raise UsageError(problem, "use values from 0 to 1, masked + swapped up to 1, and at least 2 patches")
    tokens = np.arange(length)
    predicted = np.zeros((len(keys), length), dtype=bool)
    np.put_along_axis(predicted, shuffle_patches(keys, length)[:, : int(ratio * length)], True, 1)
    u, v = (draw_uniform(derive_keys(keys, _CORRUPTION, draw), length) for draw in range(2))
    swap_sources = (tokens + 1 + np.floor(v * (length - 1)).astype(np.int64)) % length
    source = np.where(u < masked, MASK_VECTOR, np.where(u < masked + swapped, swap_sources, tokens))
    source = np.where(predicted, source, tokens)
    return PatchCorruption(predicted.reshape(-1, *grid), source.reshape(-1, *grid))


def block_masks(
    keys: np.ndarray, grid: tuple[int, ...], mask_ratio: float | np.ndarray = 0.4, min_patches: int = 16
) -> np.ndarray:
    """Draw masks of rectangular blocks, until int(mask_ratio N) patches are masked (blockwise masking, BEiT,
    arXiv:2106.08254, algorithm 1).

    `keys` are (B,), `mask_ratio` is a number or (B,); the result is (B, *grid) bool. A block has a height and a width
    in the last two axes of the grid, and covers all positions of the other axes. Blocks may overlap. As in the code of
    BEiT, iBOT and DINOv2, a block is smaller than the grid along both axes. After ten consecutive rejected blocks, the
    mask has fewer patches than requested. For each image:

        remaining = int(mask_ratio N)
        while remaining > 0 and fewer than 10 consecutive blocks were rejected:
            area, aspect = uniform in min_patches .. remaining, log-uniform in 0.3 .. 1 / 0.3
            h, w = round(sqrt(area aspect)), round(sqrt(area / aspect)); top, left = uniform over the grid
            if h < height and w < width and the block has 1 to remaining unmasked patches:
                mask them; remaining -= their number
            else: reject the block
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
        num_unmasked = (block & ~mask[active]).sum((1, 2))
        is_accepted = is_inside & (num_unmasked > 0) & (num_unmasked <= remaining[active])
        mask[active[is_accepted]] |= block[is_accepted]
        remaining[active[is_accepted]] -= num_unmasked[is_accepted]
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
    """Draw block masks for iBOT and DINOv2: an image is masked with `mask_probability`, at a ratio that is uniform in
    `mask_ratios` (iBOT, arXiv:2111.07832, section 4.1).

    `keys` are (B,); the result is (B, *grid) bool, all False for unmasked images. The defaults, blocks of at least 4
    patches and one range of ratios, are those of DINOv2's code (arXiv:2304.07193). DINOv2 masks exactly half of each
    batch, and divides `mask_ratios` into equal intervals, from which it draws one ratio each. Here each image is drawn
    independently, so that its mask does not depend on the other images of the batch.
    """
    mask_draws, u = draw_uniform(derive_keys(keys, _RATIO), 2).T
    low, high = mask_ratios
    return block_masks(keys, grid, np.where(mask_draws < mask_probability, low + (high - low) * u, 0.0), min_patches)


def propose_blocks(
    u: np.ndarray, remaining: np.ndarray, min_patches: int, grid: tuple[int, int]
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Draw a block for each image: top, left, height and width, (B,) int64 each.

    `u` (B, 4) are uniform random numbers in [0, 1); `remaining` (B,) is the number of patches still to mask, the
    maximum area of a block. A block may be larger than the (height, width) `grid`, and is then rejected by
    `block_masks`.
    """
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
    """Mark the positions of an axis that are in an interval: (B,) starts and lengths -> (B, axis_length) bool."""
    positions = np.arange(axis_length) - start[:, None]
    return (positions >= 0) & (positions < length[:, None])


def shuffle_patches(keys: np.ndarray, length: int) -> np.ndarray:
    """Draw a random permutation of the patch indices of each image by its key: (B,) -> (B, length) int64."""
    return np.argsort(derive_keys(keys[:, None], _ORDER, np.arange(length)[None]), axis=1, kind="stable")
