"""Which tokens are hidden from a model or taken from it: masks for self-supervision, as data.

Each picture's mask is a function of its key, (seed, epoch, sample, view), and neither of its batch nor of what
augmentation draws from the same key. Integers decide, so a mask is the same on every machine.

B pictures; `grid` is one number per axis, (h, w) or (t, h, w), of N tokens in all; True is hidden.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from vitreous.data.keys import key, uniform
from vitreous.errors import UsageError

MASK = -1  # in `Corruption.source`: the learned mask vector
ASPECT = (0.3, 1 / 0.3)  # of a block, height / width
PATIENCE = 10  # blocks in a row that may not fit before a mask is left as it is

_ORDER, _KIND, _BLOCK, _SHARE = (0x6D61736B + i for i in range(4))  # far from the numbers of augmentation's draws


class Hidden(NamedTuple):
    """What a masked autoencoder sees: `keep`, (B, k) int64, the tokens it is given, in that order; `mask`, (B, *grid),
    the others."""

    keep: np.ndarray
    mask: np.ndarray


class Corruption(NamedTuple):
    """Tokens to restore: `predicted`, (B, *grid), where; `source`, (B, *grid) int64, whose value stands there, or
    MASK."""

    predicted: np.ndarray
    source: np.ndarray


def random_masks(keys: np.ndarray, grid: tuple[int, ...], share: float = 0.75) -> Hidden:
    """(B,) keys -> masks that hide all but int(N (1 - share)) tokens, any as likely as another (MAE, arXiv:2111.06377).

    for row in range(B): keep[row] = the first k of the tokens, sorted by their keys; mask[row].flat[keep[row]] = False
    Raises UsageError for a share that leaves nothing to see or nothing to restore.
    """
    length = math.prod(grid)
    order = shuffled(keys, length)
    visible = int(length * (1 - share))
    if not 0 < visible < length:
        raise UsageError(
            f"hiding {share} of {length} tokens leaves {max(visible, 0)} to see",
            "use a share between 0 and 1, or smaller patches",
        )
    mask = np.ones((len(keys), length), dtype=bool)
    np.put_along_axis(mask, order[:, :visible], False, 1)
    return Hidden(order[:, :visible], mask.reshape(-1, *grid))


def corruptions(
    keys: np.ndarray, grid: tuple[int, ...], share: float = 0.5, masked: float = 0.8, swapped: float = 0.1
) -> Corruption:
    """(B,) keys -> masked patch prediction (arXiv:2010.11929, B.1.2): int(share N) tokens of each picture are to be
    restored.

    Of those, each by itself, `masked` become the mask vector, `swapped` the value of another token of the picture, the
    rest stay:

    for token in the first int(share N) in the order of their keys: u, v = uniform(its key)
        source = MASK if u < masked else any other token (v) if u < masked + swapped else token
    The paper does not say which other token; it is one of the same picture, never itself. Raises UsageError for a
    picture of one token and shares that are none.
    """
    length = math.prod(grid)
    if min(share, masked, swapped) < 0 or share > 1 or masked + swapped > 1 or length < 2:
        raise UsageError(
            f"shares of {share}, {masked} and {swapped} of {length} tokens cannot be",
            "each is from 0 to 1, the last two together",
        )
    tokens = np.arange(length)
    predicted = np.zeros((len(keys), length), dtype=bool)
    np.put_along_axis(predicted, shuffled(keys, length)[:, : int(share * length)], True, 1)
    u, v = (uniform(key(keys, _KIND, draw), length) for draw in range(2))
    others = (tokens + 1 + np.floor(v * (length - 1)).astype(np.int64)) % length
    source = np.where(u < masked, MASK, np.where(u < masked + swapped, others, tokens))
    source = np.where(predicted, source, tokens)
    return Corruption(predicted.reshape(-1, *grid), source.reshape(-1, *grid))


def block_masks(
    keys: np.ndarray, grid: tuple[int, ...], shares: float | np.ndarray = 0.4, least: int = 16
) -> np.ndarray:
    """(B,) keys -> (B, *grid): blocks of at least `least` tokens until `shares` are hidden (BEiT, arXiv:2106.08254,
    algorithm 1).

    `shares`: of all pictures, or (B,). Blocks lie in the last two axes, and go through those before. A block may
    overlap others, and hides no more than is still to be hidden; as in the authors' code, a mask that ten blocks in a
    row do not fit is left as it is, a little short. For one picture:

    while room > 0 and fewer than 10 blocks in a row did not fit:
        area, aspect = between least and room, log-uniform in 0.3 .. 1 / 0.3
        tall, wide = round(sqrt(area aspect)), round(sqrt(area / aspect)); top, left = anywhere in the grid
        if the block is inside and hides 1 to room more: hide them; room -= as many
    """
    height, width = grid[-2:]
    room = np.broadcast_to(np.floor(np.asarray(shares) * (height * width)).astype(np.int64), len(keys)).copy()
    mask = np.zeros((len(keys), height, width), dtype=bool)
    failed = np.zeros(len(keys), dtype=np.int64)
    attempt = 0
    while len(active := np.flatnonzero((room > 0) & (failed < PATIENCE))):
        top, left, tall, wide = proposed(
            uniform(key(keys[active], _BLOCK, attempt), 4), room[active], least, (height, width)
        )
        inside = (tall > 0) & (wide > 0) & (tall <= height) & (wide <= width)
        block = within(top, tall, height)[:, :, None] & within(left, wide, width)[:, None, :]
        more = (block & ~mask[active]).sum((1, 2))
        fits = inside & (more > 0) & (more <= room[active])
        mask[active[fits]] |= block[fits]
        room[active[fits]] -= more[fits]
        failed[active] = np.where(fits, 0, failed[active] + 1)
        attempt += 1
    through = mask.reshape(-1, *(1,) * (len(grid) - 2), height, width)
    return np.broadcast_to(through, (len(keys), *grid)).copy()


def proposed(
    u: np.ndarray, room: np.ndarray, least: int, grid: tuple[int, int]
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """(B, 4) draws and (B,) tokens still to hide -> top, left, height and width of a block, (B,) int64 each."""
    area = least + (room - least) * u[:, 0]
    low, high = np.log(ASPECT)
    aspect = np.exp(low + (high - low) * u[:, 1])
    tall, wide = (np.rint(np.sqrt(side)).astype(np.int64) for side in (area * aspect, area / aspect))
    top, left = (
        np.floor(v * np.maximum(side - own + 1, 0)).astype(np.int64)
        for v, side, own in ((u[:, 2], grid[0], tall), (u[:, 3], grid[1], wide))
    )
    return top, left, tall, wide


def within(start: np.ndarray, length: np.ndarray, side: int) -> np.ndarray:
    """(B,) starts and lengths -> (B, side): the places along a side that they cover."""
    places = np.arange(side) - start[:, None]
    return (places >= 0) & (places < length[:, None])


def ibot_masks(
    keys: np.ndarray,
    grid: tuple[int, ...],
    shares: tuple[float, float] = (0.1, 0.5),
    probability: float = 0.5,
    least: int = 4,
) -> np.ndarray:
    """(B,) keys -> (B, *grid): with `probability` blocks over a share drawn from `shares`, else nothing (iBOT,
    arXiv:2111.07832).

    DINOv2 (arXiv:2304.07193) masks exactly half of each batch, and draws one share from each of as many equal parts of
    `shares`; here each picture draws for itself, whichever batch it is in.
    """
    happens, share = uniform(key(keys, _SHARE), 2).T
    return block_masks(
        keys, grid, np.where(happens < probability, shares[0] + (shares[1] - shares[0]) * share, 0.0), least
    )


def shuffled(keys: np.ndarray, length: int) -> np.ndarray:
    """(B,) keys -> (B, length) int64: the tokens of each picture in an order of its own."""
    return np.argsort(key(keys[:, None], _ORDER, np.arange(length)[None]), axis=1, kind="stable")
