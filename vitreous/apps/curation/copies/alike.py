"""Images that are the same, byte for byte or nearly: the quick search of `data check`.

It searches and verifies as `data dedup` does, but compares whole images with whole images only, and verifies the most
alike: images that were cut, or shifted by more than a little, are left to `data dedup`. Clips are compared frame by
frame, at the same parts of their lengths: a part of a clip is no copy of it.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from vitreous.apps.curation.copies.scan import READABLE, ConcatenatedSplits, ScanJob, scan_samples
from vitreous.apps.curation.copies.search import find_first_equal, search_candidates
from vitreous.apps.curation.copies.verification import (
    COPY_THRESHOLD,
    MIN_SMALL_VIEW_COSINE,
    align_pairs,
    compact_indices,
    score_pairs,
)
from vitreous.apps.curation.copies.windows import LARGER_VIEW_SIZE, VIEW_SIZE, is_distinctive

MIN_IMAGE_CONTRAST = 4.0  # mean standard deviation of the channels below which an image shows nothing to compare
MIN_WHOLE_COSINE, NUM_SEARCHED_LISTS = (
    0.9,
    4,
)  # cosine from which whole images are compared, and the lists that are searched for each
MIN_COPIED_FRAME_SHARE = 0.75  # share of the frames of two clips that have to be copies
MIN_MOTION_CORRELATION, STILL_CLIP_STD = (
    0.5,
    1.0,
)  # correlation of what changes; grey levels of its deviation below which hardly anything does
REREAD_IMAGES, REREAD_SHARE = 300, 0.02  # images that are read again: more of them found hardly more copies
# rows of images that are alike, each in rising order; groups in the order of their first rows
CopyGroups = list[np.ndarray]


def group_exact_copies(records: np.ndarray) -> CopyGroups:
    """Group the readable images of (n,) RECORD by equal bytes, or equal pixels where pixels are stored."""
    rows = np.flatnonzero(records["state"] == READABLE)
    return group_by_number(rows, find_first_equal(records["digest"][rows]))


def group_near_copies(
    pool: ConcatenatedSplits,
    records: np.ndarray,
    job: ScanJob,
    workers: int,
    progress: Callable[[int, int], None],
    slow: bool = False,
) -> CopyGroups:
    """Group images or clips of (n,) RECORD that look alike: those that may be copies are read again by `job`, and
    compared. `slow` is that of `scan_samples`."""
    samples, pairs = compact_indices(propose_near_pairs(records))
    again, _ = scan_samples(
        pool, samples.tolist(), job=job, workers=workers, progress=lambda done: progress(done, len(samples)), slow=slow
    )
    views = again["view"]
    pairs, _ = verify_frame_pairs(pairs, views if views.ndim == 4 else views[:, None])
    return group_connected_samples(samples[np.stack([pairs["sample"], pairs["of"]])])


def propose_near_pairs(records: np.ndarray) -> np.ndarray:
    """Find in (n,) RECORD the pairs that may be near copies, whole images only, the most alike first: (p,) CANDIDATE.

    They are of READ images or SHARE of all, whichever is more, as each is read again. Images of hardly any contrast are
    left out. Of images of the same bytes the first stands for all.
    """
    rows = find_comparable_samples(records)
    pairs = search_whole_pairs(records, rows, rows)
    pairs = pairs[np.argsort(-pairs["cosine"], kind="stable")]
    new = np.zeros(2 * len(pairs), bool)
    new[np.unique(np.stack([pairs["sample"], pairs["of"]], 1), return_index=True)[1]] = True
    return pairs[new.reshape(-1, 2).sum(1).cumsum() <= max(REREAD_IMAGES, int(REREAD_SHARE * len(records)))]


def find_contrasting_samples(records: np.ndarray) -> np.ndarray:
    """The rows of (n,) RECORD that show something to compare, (m,) rising."""
    return np.flatnonzero((records["state"] == READABLE) & (records["std"].mean(1) >= MIN_IMAGE_CONTRAST))


def find_comparable_samples(records: np.ndarray) -> np.ndarray:
    """The rows (m,) of (n,) RECORD that show something to compare, of the same bytes the first alone."""
    rows = find_contrasting_samples(records)
    return rows[find_first_equal(records["digest"][rows]) == np.arange(len(rows))]


def search_whole_pairs(records: np.ndarray, asked: np.ndarray, known: np.ndarray) -> np.ndarray:
    """Find for rows `asked` of (n,) RECORD earlier ones in `known` that look alike as a whole: (p,) CANDIDATE."""
    wholes = records["whole"].astype(np.float32)
    wholes /= np.maximum(np.linalg.norm(wholes, axis=1, keepdims=True), 1e-6)
    return search_candidates(
        wholes,
        lambda numbers: wholes[numbers][:, None],
        queries=asked,
        known=known,
        floor=MIN_WHOLE_COSINE,
        probed=NUM_SEARCHED_LISTS,
    )


def verify_frame_pairs(
    pairs: np.ndarray, views: np.ndarray, threshold: float = COPY_THRESHOLD
) -> tuple[np.ndarray, np.ndarray]:
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
        shown = is_distinctive(own)
        shows = np.stack([shown[pairs["sample"]], shown[pairs["of"]]])
        rows = np.flatnonzero(shows.all(0))
        sides += shows
        scores = score_frame_pairs(pairs[rows], own)
        both[rows] += 1
        total[rows] += scores
        alike[rows] += scores >= threshold
    copied = np.flatnonzero((both > 0) & (alike >= MIN_COPIED_FRAME_SHARE * both) & (2 * both >= sides.max(0)))
    copied = copied[has_similar_motion(pairs[copied], views)]
    return pairs[copied], total[copied] / both[copied]


def has_similar_motion(pairs: np.ndarray, views: np.ndarray) -> np.ndarray:
    """Whether what changes is alike in (p,) CANDIDATE, positions in (n, T, LARGER, LARGER) views: (p,) bool.

    The correlation of both clips, each without the mean of its frames, is at least MOTION: before a camera that stands
    still all clips have the same background. True where one of them hardly changes.
    """
    alike = np.ones(len(pairs), bool)
    for row, pair in enumerate(pairs):
        one, other = (clip - clip.mean(0) for clip in views[[pair["sample"], pair["of"]]].astype(np.float32))
        one = one[..., ::-1] if pair["mirrored"] else one
        least = min(one.std(), other.std())
        alike[row] = least < STILL_CLIP_STD or (one * other).mean() >= MIN_MOTION_CORRELATION * one.std() * other.std()
    return alike


def score_frame_pairs(pairs: np.ndarray, views: np.ndarray) -> np.ndarray:
    """How alike (p,) CANDIDATE, positions in (n, LARGER, LARGER) views, are: (p,) float32, up to 1; 0 where a quick
    look says that they are not."""
    small = views.reshape(
        len(views), VIEW_SIZE, LARGER_VIEW_SIZE // VIEW_SIZE, VIEW_SIZE, LARGER_VIEW_SIZE // VIEW_SIZE
    ).mean((2, 4), dtype=np.float32)
    cosines, boxes = align_pairs(small, pairs)
    promising, scores = cosines >= MIN_SMALL_VIEW_COSINE, np.zeros(len(pairs), np.float32)
    scores[promising] = score_pairs(views, pairs[promising], boxes[promising])
    return scores


def group_connected_samples(pairs: np.ndarray) -> CopyGroups:
    """Group the rows of (2, p) pairs that are alike, directly or by way of others."""
    if not pairs.size:
        return []
    from scipy.sparse import coo_array  # half a second, which most data sets have no need of
    from scipy.sparse.csgraph import connected_components

    rows, places = np.unique(pairs, return_inverse=True)
    one, other = places.reshape(2, -1)
    edges = coo_array((np.ones(len(one), bool), (one, other)), (len(rows), len(rows)))
    return group_by_number(rows, connected_components(edges, directed=False)[1])


def group_by_number(rows: np.ndarray, number: np.ndarray) -> CopyGroups:
    """Split (n,) rising rows into groups of two and more with the same (n,) number."""
    counts = np.bincount(number, minlength=1)
    shared = counts[number] > 1
    rows, number = rows[shared], number[shared]
    order = np.argsort(number, kind="stable")
    groups = np.split(rows[order], np.flatnonzero(np.diff(number[order])) + 1) if len(rows) else []
    return sorted(groups, key=lambda group: int(group[0]))
