"""Hashes of 64 bits that look alike where pictures do, and all pairs of them that differ in a few bits."""

from __future__ import annotations

from itertools import pairwise

import numpy as np

BANDS = 4  # of 16 bits each
STEP = 2**22  # pairs compared at a time

_ONES = np.array([bin(value).count("1") for value in range(2**16)], dtype=np.uint8)


def dct(side: int, kept: int) -> np.ndarray:
    """(kept, side): the first rows of the orthonormal discrete cosine transform (DCT-II)."""
    rows = np.arange(kept)[:, None]
    matrix = np.cos(np.pi * rows * (2 * np.arange(side) + 1) / (2 * side)) * np.sqrt(2 / side)
    matrix[0] /= np.sqrt(2)
    return matrix


def perceptual(views: np.ndarray) -> np.ndarray:
    """(n, side, side) greys -> (n,) uint64: which of the 8 x 8 lowest frequencies are above their median."""
    low = dct(views.shape[1], 8)
    hashes = np.empty(len(views), np.uint64)
    for start in range(0, len(views), 4096):
        waves = (low @ views[start : start + 4096].astype(np.float32) @ low.T).reshape(-1, 64)
        bits = waves > np.median(waves, axis=1, keepdims=True)
        hashes[start : start + 4096] = np.packbits(bits, axis=1).view(np.uint64)[:, 0]
    return hashes


def distance(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """(n,) uint64 each -> (n,) uint8: how many bits differ."""
    return _ONES[np.ascontiguousarray(a ^ b).view(np.uint16).reshape(-1, 4)].sum(1, dtype=np.uint8)


def near(queries: np.ndarray, known: np.ndarray, radius: int) -> tuple[np.ndarray, np.ndarray]:
    """All pairs (query, known) of hashes, as two (p,) int64 arrays of positions, that differ in at most `radius` bits, 0 to 7.

    Multi-index hashing (Norouzi et al., arXiv:1307.2982): of `radius` differing bits, one of four bands has at most a quarter,
    so only hashes are compared that agree in a band but for so many bits. It replaces the loop

        for i, query in enumerate(queries):
            for j, other in enumerate(known):
                if distance(query, other) <= radius: yield i, j
    """
    if not 0 <= radius < 2 * BANDS:
        raise ValueError(f"radius {radius} is not in 0..{2 * BANDS - 1}")
    flips = [0] if radius < BANDS else [0, *(1 << bit for bit in range(16))]
    asked, sought = bands(queries), bands(known)
    found: list[np.ndarray] = []
    for band in range(BANDS):
        order = np.argsort(sought[:, band], kind="stable")
        starts = np.searchsorted(sought[order, band], np.arange(2**16 + 1))
        for flip in flips:
            words = asked[:, band] ^ np.uint16(flip)
            first, count = starts[words], starts[words.astype(np.int64) + 1] - starts[words]
            for low, high in blocks(count, STEP):
                i = np.repeat(np.arange(low, high), count[low:high])
                inside = np.arange(len(i)) - np.repeat(np.cumsum(count[low:high]) - count[low:high], count[low:high])
                j = order[np.repeat(first[low:high], count[low:high]) + inside]
                close = distance(queries[i], known[j]) <= radius
                found.append(i[close] * len(known) + j[close])
    pairs = np.unique(np.concatenate(found)) if found else np.empty(0, np.int64)
    return pairs // max(len(known), 1), pairs % max(len(known), 1)


def bands(hashes: np.ndarray) -> np.ndarray:
    """(n,) uint64 -> (n, BANDS) uint16."""
    return np.ascontiguousarray(hashes).view(np.uint16).reshape(-1, BANDS)


def blocks(counts: np.ndarray, most: int) -> list[tuple[int, int]]:
    """Spans of rows whose counts add up to about `most`."""
    total = np.cumsum(counts)
    cuts = np.searchsorted(total, np.arange(most, int(total[-1]) if len(total) else 0, most), side="right")
    ends = np.unique(np.concatenate([[0], cuts, [len(counts)]]))
    return [(int(low), int(high)) for low, high in pairwise(ends)]


def first_equal(keys: np.ndarray) -> np.ndarray:
    """(n, 2) uint64 -> (n,) int64: for each row the first one that is equal to it, which may be itself."""
    order = np.lexsort((keys[:, 1], keys[:, 0]))  # stable: equal rows stay in their order
    ranked = keys[order]
    new = np.ones(len(keys), bool)
    new[1:] = (ranked[1:] != ranked[:-1]).any(1)
    first = np.empty(len(keys), np.int64)
    first[order] = order[np.maximum.accumulate(np.where(new, np.arange(len(keys)), 0))]
    return first
