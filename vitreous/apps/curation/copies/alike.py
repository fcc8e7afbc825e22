"""Exact and near-duplicates among whole images: the fast search of `data check`.

It searches and verifies as `data dedup` does, but compares only whole images, and verifies only the most similar pairs.
Crops and larger shifts need `data dedup`.

Clips are compared frame by frame, at the same fractions of their lengths. A segment of a clip is therefore not found as
its duplicate.

Records of images or clips have the dtype `RECORD` (`checks.record`), pairs of them the dtype `CANDIDATE`
(`copies.search`).
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from vitreous.apps.curation.copies.scan import READABLE, ConcatenatedSplits, ScanJob, scan_samples
from vitreous.apps.curation.copies.search import find_first_equal_rows, search_candidates
from vitreous.apps.curation.copies.verification import (
    COPY_THRESHOLD,
    MIN_SMALL_VIEW_COSINE,
    align_pairs,
    compact_indices,
    score_pairs,
)
from vitreous.apps.curation.copies.windows import LARGER_VIEW_SIZE, VIEW_SIZE, is_distinctive

MIN_IMAGE_CONTRAST = 4.0  # images with a lower standard deviation (mean of the channels) are not compared
# minimum cosine of a proposed pair; inverted lists (see `search`) that are searched per image
MIN_WHOLE_COSINE, NUM_SEARCHED_LISTS = 0.9, 4
MIN_COPIED_FRAME_SHARE = 0.75  # minimum share of duplicate frames in two duplicate clips
# minimum correlation of the motion of two clips; std of the motion in grey levels below which a clip is still
MIN_MOTION_CORRELATION, STILL_CLIP_STD = 0.5, 1.0
# maximum images that are read again, as a number and as a share; more found hardly any more duplicates
REREAD_IMAGES, REREAD_SHARE = 300, 0.02
# one array per group: sorted indices of similar images; groups are sorted by their first index
CopyGroups = list[np.ndarray]


def group_exact_copies(records: np.ndarray) -> CopyGroups:
    """Group the readable images of (n,) records of dtype `RECORD` by equal bytes, or by equal pixels if a dataset
    stores pixels."""
    indices = np.flatnonzero(records["state"] == READABLE)
    return group_by_number(indices, find_first_equal_rows(records["digest"][indices]))


def group_near_copies(
    pool: ConcatenatedSplits,
    records: np.ndarray,
    job: ScanJob,
    workers: int,
    progress: Callable[[int, int], None],
    slow: bool = False,
) -> CopyGroups:
    """Group the similar images or clips of (n,) records of dtype `RECORD`. Candidates are read again by `job` for
    larger views, which are compared. `slow` is that of `scan_samples`."""
    samples, pairs = compact_indices(propose_near_pairs(records))
    reread_records, _ = scan_samples(
        pool, samples.tolist(), job=job, workers=workers, progress=lambda done: progress(done, len(samples)), slow=slow
    )
    views = reread_records["view"]
    pairs, _ = verify_frame_pairs(pairs, views if views.ndim == 4 else views[:, None])
    return group_connected_samples(samples[np.stack([pairs["sample"], pairs["of"]])])


def propose_near_pairs(records: np.ndarray) -> np.ndarray:
    """Propose near-duplicate pairs of whole images in (n,) records of dtype `RECORD`, the most similar first: (p,) of
    dtype `CANDIDATE`.

    Each image of a pair is read again. Therefore the pairs contain at most `REREAD_IMAGES` images, or `REREAD_SHARE` of
    all if that is more. Images with hardly any contrast are skipped. Of images with the same bytes, only the first is
    proposed.
    """
    indices = find_comparable_samples(records)
    pairs = search_whole_pairs(records, indices, indices)
    pairs = pairs[np.argsort(-pairs["cosine"], kind="stable")]
    is_new = np.zeros(2 * len(pairs), bool)
    is_new[np.unique(np.stack([pairs["sample"], pairs["of"]], 1), return_index=True)[1]] = True
    return pairs[is_new.reshape(-1, 2).sum(1).cumsum() <= max(REREAD_IMAGES, int(REREAD_SHARE * len(records)))]


def find_contrasting_samples(records: np.ndarray) -> np.ndarray:
    """Return the sorted indices (m,) of readable images in (n,) records of dtype `RECORD` with enough contrast to
    compare."""
    return np.flatnonzero((records["state"] == READABLE) & (records["std"].mean(1) >= MIN_IMAGE_CONTRAST))


def find_comparable_samples(records: np.ndarray) -> np.ndarray:
    """Return the sorted indices (m,) of readable images in (n,) records of dtype `RECORD` with enough contrast to
    compare. Of images with the same bytes, only the first is returned."""
    indices = find_contrasting_samples(records)
    return indices[find_first_equal_rows(records["digest"][indices]) == np.arange(len(indices))]


def search_whole_pairs(records: np.ndarray, queries: np.ndarray, references: np.ndarray) -> np.ndarray:
    """Find pairs of whole images in (n,) records of dtype `RECORD`: a sample of `queries`, and a similar earlier sample
    of `references`. Return (p,) of dtype `CANDIDATE`."""
    wholes = records["whole"].astype(np.float32)
    wholes /= np.maximum(np.linalg.norm(wholes, axis=1, keepdims=True), 1e-6)
    return search_candidates(
        wholes,
        lambda indices: wholes[indices][:, None],
        queries=queries,
        references=references,
        floor=MIN_WHOLE_COSINE,
        probed=NUM_SEARCHED_LISTS,
    )


def verify_frame_pairs(
    pairs: np.ndarray, views: np.ndarray, threshold: float = COPY_THRESHOLD
) -> tuple[np.ndarray, np.ndarray]:
    """Keep the near-duplicates among (p,) pairs of dtype `CANDIDATE`, whose indices refer to (n, T, side, side) larger
    views of T frames. Return the (q,) kept pairs, and their similarity (q,): the mean over compared frames.

    Frames are compared if both have contrast. In a duplicate, at least `MIN_COPIED_FRAME_SHARE` of the compared frames
    have a similarity of at least `threshold`. Compared frames must be at least half of the frames with contrast of each
    clip. The motion must be similar, too.
    """
    num_copied_frames, num_shared_frames = np.zeros((2, len(pairs)), np.int64)
    total = np.zeros(len(pairs))
    num_contrast_frames = np.zeros((2, len(pairs)), np.int64)
    for frame in range(views.shape[1]):
        frame_views = np.ascontiguousarray(views[:, frame])
        distinctive = is_distinctive(frame_views)
        has_contrast = np.stack([distinctive[pairs["sample"]], distinctive[pairs["of"]]])
        compared = np.flatnonzero(has_contrast.all(0))
        num_contrast_frames += has_contrast
        scores = score_frame_pairs(pairs[compared], frame_views)
        num_shared_frames[compared] += 1
        total[compared] += scores
        num_copied_frames[compared] += scores >= threshold
    copy_indices = np.flatnonzero(
        (num_shared_frames > 0)
        & (num_copied_frames >= MIN_COPIED_FRAME_SHARE * num_shared_frames)
        & (2 * num_shared_frames >= num_contrast_frames.max(0))
    )
    copy_indices = copy_indices[has_similar_motion(pairs[copy_indices], views)]
    return pairs[copy_indices], total[copy_indices] / num_shared_frames[copy_indices]


def has_similar_motion(pairs: np.ndarray, views: np.ndarray) -> np.ndarray:
    """Return whether the motion is similar in each of (p,) pairs of dtype `CANDIDATE`, whose indices refer to (n, T,
    side, side) larger views: (p,) bool.

    All clips of a fixed camera share the background. Therefore the mean of its frames is subtracted from each clip, and
    the correlation of the remainders must reach a minimum. True if a clip hardly moves.
    """
    is_similar = np.ones(len(pairs), bool)
    for pair_index, pair in enumerate(pairs):
        first, second = (clip - clip.mean(0) for clip in views[[pair["sample"], pair["of"]]].astype(np.float32))
        first = first[..., ::-1] if pair["mirrored"] else first
        min_std = min(first.std(), second.std())
        is_similar[pair_index] = (
            min_std < STILL_CLIP_STD or (first * second).mean() >= MIN_MOTION_CORRELATION * first.std() * second.std()
        )
    return is_similar


def score_frame_pairs(pairs: np.ndarray, views: np.ndarray) -> np.ndarray:
    """Return the similarity of each of (p,) pairs of dtype `CANDIDATE`, whose indices refer to (n, side, side) larger
    views: (p,) float32, at most 1. It is 0 if a fast comparison of small views excludes a duplicate."""
    small_views = views.reshape(
        len(views), VIEW_SIZE, LARGER_VIEW_SIZE // VIEW_SIZE, VIEW_SIZE, LARGER_VIEW_SIZE // VIEW_SIZE
    ).mean((2, 4), dtype=np.float32)
    cosines, boxes = align_pairs(small_views, pairs)
    is_promising, scores = cosines >= MIN_SMALL_VIEW_COSINE, np.zeros(len(pairs), np.float32)
    scores[is_promising] = score_pairs(views, pairs[is_promising], boxes[is_promising])
    return scores


def group_connected_samples(pairs: np.ndarray) -> CopyGroups:
    """Group the samples in (2, p) pairs of indices into connected components."""
    if not pairs.size:
        return []
    from scipy.sparse import coo_array  # takes half a second, and most datasets do not need it
    from scipy.sparse.csgraph import connected_components

    indices, positions = np.unique(pairs, return_inverse=True)
    starts, ends = positions.reshape(2, -1)
    edges = coo_array((np.ones(len(starts), bool), (starts, ends)), (len(indices), len(indices)))
    return group_by_number(indices, connected_components(edges, directed=False)[1])


def group_by_number(indices: np.ndarray, group_ids: np.ndarray) -> CopyGroups:
    """Group (n,) sorted indices by their (n,) group numbers; groups of a single index are dropped."""
    counts = np.bincount(group_ids, minlength=1)
    shared = counts[group_ids] > 1
    indices, group_ids = indices[shared], group_ids[shared]
    order = np.argsort(group_ids, kind="stable")
    groups = np.split(indices[order], np.flatnonzero(np.diff(group_ids[order])) + 1) if len(indices) else []
    return sorted(groups, key=lambda group: int(group[0]))
