"""Images that are the same, byte for byte or nearly: the quick look of `data check`.

It searches and verifies as `data dedup` does, but compares whole pictures with whole ones alone, and verifies the most
alike: what was cut, or shifted by more than a little, is for `data dedup`.
"""

from __future__ import annotations

import numpy as np
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components

from vitreous.data.check.record import LARGER, READABLE
from vitreous.data.copies.grey import comparable
from vitreous.data.copies.search import candidates, first_equal
from vitreous.data.copies.verification import PROMISING, THRESHOLD, fit, laid, likeness
from vitreous.data.copies.windows import SIDE

CONTRAST = 4.0  # standard deviation of the channels below which a picture shows nothing to compare
QUICK, NEAREST = 0.9, 4  # cosine from which whole pictures are compared, and the lists that are searched for each
READ, SHARE = 300, 0.02  # images that are read again: more of them found hardly more copies
PAIRS = 4096  # verified at a time
# rows of images that are alike, each in rising order; groups in the order of their first rows
Groups = list[np.ndarray]


def exact(records: np.ndarray) -> Groups:
    """Readable images of the same bytes, or of the same pixels where pixels are stored."""
    rows = np.flatnonzero(records["state"] == READABLE)
    return gathered(rows, first_equal(records["digest"][rows]))


def proposed(records: np.ndarray) -> np.ndarray:
    """(p,) CANDIDATE, by row: the pairs that may be near copies, whole pictures compared with whole ones, the most
    alike first.

    They are of READ images or SHARE of all, whichever is more, as each is read again. Images of hardly any contrast are
    left out. Of images of the same bytes the first stands for all.
    """
    rows = np.flatnonzero((records["state"] == READABLE) & (records["std"].mean(1) >= CONTRAST))
    rows = rows[first_equal(records["digest"][rows]) == np.arange(len(rows))]
    wholes = records["whole"].astype(np.float32)
    wholes /= np.maximum(np.linalg.norm(wholes, axis=1, keepdims=True), 1e-6)
    pairs = candidates(wholes, lambda numbers: wholes[numbers][:, None], rows, rows, QUICK, NEAREST)
    pairs = pairs[np.argsort(-pairs["cosine"], kind="stable")]
    new = np.zeros(2 * len(pairs), bool)
    new[np.unique(np.stack([pairs["sample"], pairs["of"]], 1), return_index=True)[1]] = True
    return pairs[new.reshape(-1, 2).sum(1).cumsum() <= max(READ, int(SHARE * len(records)))]


def verified(pairs: np.ndarray, views: np.ndarray) -> np.ndarray:
    """(p,) CANDIDATE, by position in (n, LARGER, LARGER) views -> (2, q) positions of the pairs that are near
    copies."""
    shown = comparable(views)
    pairs = pairs[shown[pairs["sample"]] & shown[pairs["of"]]]
    small = views.reshape(len(views), SIDE, LARGER // SIDE, SIDE, LARGER // SIDE).mean((2, 4), dtype=np.float32)
    good = np.zeros(len(pairs), bool)
    for low in range(0, len(pairs), PAIRS):
        part = pairs[low : low + PAIRS]
        alike, boxes = fit(*laid(small, part), part["box"])
        promising = np.flatnonzero(alike >= PROMISING)
        good[low + promising] = likeness(*laid(views, part[promising]), boxes[promising]) >= THRESHOLD
    return np.stack([pairs["sample"][good], pairs["of"][good]])


def linked(pairs: np.ndarray) -> Groups:
    """(2, p) rows of pairs -> the groups of those that are alike, directly or by way of others."""
    rows, places = np.unique(pairs, return_inverse=True)
    one, other = places.reshape(2, -1)
    edges = coo_array((np.ones(len(one), bool), (one, other)), (len(rows), len(rows)))
    return gathered(rows, connected_components(edges, directed=False)[1])


def gathered(rows: np.ndarray, number: np.ndarray) -> Groups:
    """Rows in rising order and the number of each one's group -> the groups of two and more."""
    counts = np.bincount(number, minlength=1)
    shared = counts[number] > 1
    rows, number = rows[shared], number[shared]
    order = np.argsort(number, kind="stable")
    groups = np.split(rows[order], np.flatnonzero(np.diff(number[order])) + 1) if len(rows) else []
    return sorted(groups, key=lambda group: int(group[0]))
