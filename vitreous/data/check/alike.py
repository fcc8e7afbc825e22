"""Images that are the same, byte for byte or nearly, from their records alone."""

from __future__ import annotations

import numpy as np

from vitreous.data.check.record import READABLE
from vitreous.data.copies.hashes import first_equal, near

CONTRAST = 4.0  # standard deviation of the channels below which a perceptual hash is that of noise
LIKE = 0.95  # correlation of the small grey pictures of near copies
PAIRS = 4096  # verified at a time
Groups = list[np.ndarray]  # rows of images that are alike, each in rising order; groups in the order of their first rows


def exact(records: np.ndarray) -> Groups:
    """Readable images of the same bytes, or of the same pixels where pixels are stored."""
    rows = np.flatnonzero(records["state"] == READABLE)
    return gathered(rows, first_equal(records["digest"][rows]))


def hashed(records: np.ndarray, radius: int) -> np.ndarray:
    """(2, p) rows of pairs whose perceptual hashes differ in at most `radius` bits, 0 to 7: what may be near copies.

    Images of hardly any contrast have no hash to speak of, and are left out. Of images of the same bytes the first stands for all.
    """
    rows = np.flatnonzero((records["state"] == READABLE) & (records["std"].mean(1) >= CONTRAST))
    rows = rows[first_equal(records["digest"][rows]) == np.arange(len(rows))]
    one, other = near(records["hash"][rows], records["hash"][rows], radius)
    return rows[np.stack([one, other])[:, one < other]]


def correlated(pairs: np.ndarray, views: np.ndarray) -> np.ndarray:
    """(2, p) positions of pairs in (n, side, side) grey pictures -> those that are near copies."""
    flat = views.reshape(len(views), np.prod(views.shape[1:], dtype=int))
    kept = []
    for low in range(0, pairs.shape[1], PAIRS):
        one, other = (part - part.mean(1, keepdims=True) for part in flat[pairs[:, low : low + PAIRS]].astype(np.float32))
        size = np.sqrt((one**2).sum(1) * (other**2).sum(1))
        kept.append((one * other).sum(1) >= LIKE * size)
    return pairs[:, np.concatenate(kept)] if kept else pairs


def linked(pairs: np.ndarray, count: int) -> Groups:
    """(2, p) rows of pairs, of `count` rows -> the groups of those that are alike, directly or by way of others."""
    from scipy.sparse import coo_array
    from scipy.sparse.csgraph import connected_components

    links = coo_array((np.ones(pairs.shape[1], np.int8), (pairs[0], pairs[1])), shape=(count, count))
    return gathered(np.arange(count), connected_components(links, directed=False)[1])


def gathered(rows: np.ndarray, number: np.ndarray) -> Groups:
    """Rows in rising order and the number of each one's group -> the groups of two and more."""
    counts = np.bincount(number, minlength=1)
    shared = counts[number] > 1
    rows, number = rows[shared], number[shared]
    order = np.argsort(number, kind="stable")
    groups = np.split(rows[order], np.flatnonzero(np.diff(number[order])) + 1) if len(rows) else []
    return sorted(groups, key=lambda group: int(group[0]))
