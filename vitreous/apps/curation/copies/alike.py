"""Images that are the same, byte for byte or nearly: the quick search of `data check`.

It searches and verifies as `data dedup` does, but compares whole images with whole images only, and verifies the most
alike: images that were cut, or shifted by more than a little, are left to `data dedup`. Clips are compared frame by
frame, at the same parts of their lengths: a part of a clip is no copy of it.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from vitreous.apps.curation.copies.scan import READABLE, Job, Joined, scan
from vitreous.apps.curation.copies.search import candidates, first_equal
from vitreous.apps.curation.copies.verification import PROMISING, THRESHOLD, fit_pairs, renumbered, score_pairs
from vitreous.apps.curation.copies.windows import LARGER, SIDE, comparable

CONTRAST = 4.0  # mean standard deviation of the channels below which an image shows nothing to compare
QUICK, NEAREST = 0.9, 4  # cosine from which whole images are compared, and the lists that are searched for each
MATCHED = 0.75  # share of the frames of two clips that have to be copies
MOTION, STILL = 0.5, 1.0  # correlation of what changes; grey levels of its deviation below which hardly anything does
READ, SHARE = 300, 0.02  # images that are read again: more of them found hardly more copies
# rows of images that are alike, each in rising order; groups in the order of their first rows
Groups = list[np.ndarray]


def exact(records: np.ndarray) -> Groups:
    """Group the readable images of (n,) RECORD by equal bytes, or equal pixels where pixels are stored."""
    rows = np.flatnonzero(records["state"] == READABLE)
    return gathered(rows, first_equal(records["digest"][rows]))


def near(
    pool: Joined, records: np.ndarray, job: Job, workers: int, progress: Callable[[int, int], None], slow: bool = False
) -> Groups:
    """Group images or clips of (n,) RECORD that look alike: those that may be copies are read again by `job`, and
    compared. `slow` is that of `scan`."""
    samples, pairs = renumbered(proposed(records))
    again, _ = scan(
        pool, samples.tolist(), job=job, workers=workers, progress=lambda done: progress(done, len(samples)), slow=slow
    )
    views = again["view"]
    pairs, _ = verified(pairs, views if views.ndim == 4 else views[:, None])
    return linked(samples[np.stack([pairs["sample"], pairs["of"]])])


def proposed(records: np.ndarray) -> np.ndarray:
    """Find in (n,) RECORD the pairs that may be near copies, whole images only, the most alike first: (p,) CANDIDATE.

    They are of READ images or SHARE of all, whichever is more, as each is read again. Images of hardly any contrast are
    left out. Of images of the same bytes the first stands for all.
    """
    rows = comparable_rows(records)
    pairs = alike_pairs(records, rows, rows)
    pairs = pairs[np.argsort(-pairs["cosine"], kind="stable")]
    new = np.zeros(2 * len(pairs), bool)
    new[np.unique(np.stack([pairs["sample"], pairs["of"]], 1), return_index=True)[1]] = True
    return pairs[new.reshape(-1, 2).sum(1).cumsum() <= max(READ, int(SHARE * len(records)))]


def shown_rows(records: np.ndarray) -> np.ndarray:
    """The rows of (n,) RECORD that show something to compare, (m,) rising."""
    return np.flatnonzero((records["state"] == READABLE) & (records["std"].mean(1) >= CONTRAST))


def comparable_rows(records: np.ndarray) -> np.ndarray:
    """The rows (m,) of (n,) RECORD that show something to compare, of the same bytes the first alone."""
    rows = shown_rows(records)
    return rows[first_equal(records["digest"][rows]) == np.arange(len(rows))]


def alike_pairs(records: np.ndarray, asked: np.ndarray, known: np.ndarray) -> np.ndarray:
    """Find for rows `asked` of (n,) RECORD earlier ones in `known` that look alike as a whole: (p,) CANDIDATE."""
    wholes = records["whole"].astype(np.float32)
    wholes /= np.maximum(np.linalg.norm(wholes, axis=1, keepdims=True), 1e-6)
    return candidates(
        wholes, lambda numbers: wholes[numbers][:, None], queries=asked, known=known, floor=QUICK, probed=NEAREST
    )


def verified(pairs: np.ndarray, views: np.ndarray, threshold: float = THRESHOLD) -> tuple[np.ndarray, np.ndarray]:
    """Keep of (p,) CANDIDATE, positions in (n, T, LARGER, LARGER) views of T frames, the near copies, (q,), and their
    likeness (q,): the mean over the frames where both show something.

    MATCHED of these frames are copies of each other, of a likeness of at least `threshold`, and they are half or more
    of those where one shows something; what changes from frame to frame is alike, too.
    """
    alike, both = np.zeros((2, len(pairs)), np.int64)
    total = np.zeros(len(pairs))
    sides = np.zeros((2, len(pairs)), np.int64)
    for frame in range(views.shape[1]):
        own = np.ascontiguousarray(views[:, frame])
        shown = comparable(own)
        shows = np.stack([shown[pairs["sample"]], shown[pairs["of"]]])
        rows = np.flatnonzero(shows.all(0))
        sides += shows
        scores = likenesses(pairs[rows], own)
        both[rows] += 1
        total[rows] += scores
        alike[rows] += scores >= threshold
    copied = np.flatnonzero((both > 0) & (alike >= MATCHED * both) & (2 * both >= sides.max(0)))
    copied = copied[move_alike(pairs[copied], views)]
    return pairs[copied], total[copied] / both[copied]


def move_alike(pairs: np.ndarray, views: np.ndarray) -> np.ndarray:
    """Whether what changes is alike in (p,) CANDIDATE, positions in (n, T, LARGER, LARGER) views: (p,) bool.

    The correlation of both clips, each without the mean of its frames, is at least MOTION: before a camera that stands
    still all clips have the same background. True where one of them hardly changes.
    """
    alike = np.ones(len(pairs), bool)
    for row, pair in enumerate(pairs):
        one, other = (clip - clip.mean(0) for clip in views[[pair["sample"], pair["of"]]].astype(np.float32))
        one = one[..., ::-1] if pair["mirrored"] else one
        least = min(one.std(), other.std())
        alike[row] = least < STILL or (one * other).mean() >= MOTION * one.std() * other.std()
    return alike


def likenesses(pairs: np.ndarray, views: np.ndarray) -> np.ndarray:
    """How alike (p,) CANDIDATE, positions in (n, LARGER, LARGER) views, are: (p,) float32, up to 1; 0 where a quick
    look says that they are not."""
    small = views.reshape(len(views), SIDE, LARGER // SIDE, SIDE, LARGER // SIDE).mean((2, 4), dtype=np.float32)
    cosines, boxes = fit_pairs(small, pairs)
    promising, scores = cosines >= PROMISING, np.zeros(len(pairs), np.float32)
    scores[promising] = score_pairs(views, pairs[promising], boxes[promising])
    return scores


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
