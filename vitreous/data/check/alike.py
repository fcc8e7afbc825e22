"""Images that are the same, byte for byte or nearly: the quick search of `data check`.

It searches and verifies as `data dedup` does, but compares whole images with whole images only, and verifies the most
alike: images that were cut, or shifted by more than a little, are left to `data dedup`.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from vitreous.data.copies.scan import READABLE, Job, Joined, scan
from vitreous.data.copies.search import candidates, first_equal
from vitreous.data.copies.verification import PROMISING, THRESHOLD, fit_pairs, renumbered, score_pairs
from vitreous.data.copies.windows import LARGER, SIDE, comparable

CONTRAST = 4.0  # mean standard deviation of the channels below which an image shows nothing to compare
QUICK, NEAREST = 0.9, 4  # cosine from which whole images are compared, and the lists that are searched for each
READ, SHARE = 300, 0.02  # images that are read again: more of them found hardly more copies
# rows of images that are alike, each in rising order; groups in the order of their first rows
Groups = list[np.ndarray]


def exact(records: np.ndarray) -> Groups:
    """Group the readable images of (n,) RECORD by equal bytes, or equal pixels where pixels are stored."""
    rows = np.flatnonzero(records["state"] == READABLE)
    return gathered(rows, first_equal(records["digest"][rows]))


def near(pool: Joined, records: np.ndarray, job: Job, workers: int, progress: Callable[[int, int], None]) -> Groups:
    """Group images of (n,) RECORD that look alike: those that may be copies are read again by `job`, and compared."""
    samples, pairs = renumbered(proposed(records))
    views, _ = scan(pool, samples.tolist(), job, workers, lambda done: progress(done, len(samples)))
    return linked(samples[verified(pairs, views["view"])])


def proposed(records: np.ndarray) -> np.ndarray:
    """Find in (n,) RECORD the pairs that may be near copies, whole images only, the most alike first: (p,) CANDIDATE.

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
    """Keep of (p,) CANDIDATE, positions in (n, LARGER, LARGER) views, the near copies: (2, q) positions."""
    shown = comparable(views)
    pairs = pairs[shown[pairs["sample"]] & shown[pairs["of"]]]
    small = views.reshape(len(views), SIDE, LARGER // SIDE, SIDE, LARGER // SIDE).mean((2, 4), dtype=np.float32)
    alike, boxes = fit_pairs(small, pairs)
    pairs, boxes = pairs[alike >= PROMISING], boxes[alike >= PROMISING]
    pairs = pairs[score_pairs(views, pairs, boxes) >= THRESHOLD]
    return np.stack([pairs["sample"], pairs["of"]])


def linked(pairs: np.ndarray) -> Groups:
    """Group the rows of (2, p) pairs that are alike, directly or by way of others."""
    if not pairs.size:
        return []
    from scipy.sparse import coo_array  # half a second, which most data sets have no need of
    from scipy.sparse.csgraph import connected_components

    rows, places = np.unique(pairs, return_inverse=True)
    one, other = places.reshape(2, -1)
    edges = coo_array((np.ones(len(one), bool), (one, other)), (len(rows), len(rows)))
    return gathered(rows, connected_components(edges, directed=False)[1])


def gathered(rows: np.ndarray, number: np.ndarray) -> Groups:
    """Split (n,) rising rows into groups of two and more with the same (n,) number."""
    counts = np.bincount(number, minlength=1)
    shared = counts[number] > 1
    rows, number = rows[shared], number[shared]
    order = np.argsort(number, kind="stable")
    groups = np.split(rows[order], np.flatnonzero(np.diff(number[order])) + 1) if len(rows) else []
    return sorted(groups, key=lambda group: int(group[0]))
