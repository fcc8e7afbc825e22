"""Verification of duplicates: align one image to the other, and compare the overlap.

p pairs of views (a, b), each (p, side, side) float32: a, mirrored or not, matches a part of b, except at its edges.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from vitreous.apps.curation.copies.windows import average_cells, compute_weighted_spectrum

MIN_BOX_SIDE, MAX_BOX_SIDE = 0.55, 1.1  # width and height of a box
MAX_BOX_OUTSIDE = 0.15  # of a side, by which a box may exceed the view
# minimum cosines of 8 and of 16 cells; 99 % of duplicates reach 0.86 and 0.67
MIN_ALIGNMENT_COSINES = (0.75, 0.5)
MIN_SMALL_VIEW_COSINE = 0.65  # minimum cosine of small views for a comparison of larger ones
COPY_THRESHOLD = 0.54  # minimum similarity of duplicates
DETAIL_CELLS, BLOCK_CELLS = 32, 4  # cells per side of the detailed comparison, and of its blocks
BLOCK_NOISE_VARIANCE = 0.002  # variance of a block, relative to the image, below which its pattern has little weight
MIN_SIGNIFICANCE, MAX_SIGNIFICANCE = (
    6.0,
    25.0,
)  # standard deviations from chance: minimum of a duplicate, and saturation
FINITE_DIFFERENCE_STEP, MAX_BOX_MOVE = (
    0.008,
    0.05,
)  # fractions of the view: step of the finite difference, and largest move of a box
PAIR_BLOCK_SIZE = 4096  # pairs compared at a time


def align_pairs(
    views: np.ndarray, pairs: np.ndarray, progress: Callable[[int, int], None] = lambda done, total: None
) -> tuple[np.ndarray, np.ndarray]:
    """Apply `align_views` to (p,) CANDIDATE, indices into (n, side, side) small views: (p,) cosines and (p, 4)
    boxes."""
    cosines, boxes = np.empty(len(pairs), np.float32), np.empty((len(pairs), 4), np.float32)
    for low in range(0, len(pairs), PAIR_BLOCK_SIZE):
        block = slice(low, low + PAIR_BLOCK_SIZE)
        cosines[block], boxes[block] = align_views(*gather_pairs(views, pairs[block]), pairs["box"][block])
        progress(min(low + PAIR_BLOCK_SIZE, len(pairs)), len(pairs))
    return cosines, boxes


def score_pairs(views: np.ndarray, pairs: np.ndarray, boxes: np.ndarray) -> np.ndarray:
    """Apply `score_similarity` to (p,) CANDIDATE and (p, 4) boxes, indices into (n, side, side) larger views: (p,)."""
    spans = [slice(low, low + PAIR_BLOCK_SIZE) for low in range(0, len(pairs), PAIR_BLOCK_SIZE)]
    scores = [score_similarity(*gather_pairs(views, pairs[span]), boxes[span]) for span in spans]
    return np.concatenate([np.empty(0, np.float32), *scores])


def compact_indices(pairs: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the samples in (p,) CANDIDATE, (n,) sorted, and a copy of the pairs with indices into them."""
    samples, positions = np.unique(np.stack([pairs["sample"], pairs["of"]]), return_inverse=True)
    pairs = pairs.copy()
    pairs["sample"], pairs["of"] = positions.reshape(2, -1)
    return samples, pairs


def gather_pairs(views: np.ndarray, pairs: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the inner image of each of (p,) CANDIDATE, mirrored if needed, and the outer: (p, side, side) float32."""
    sample_views, reference_views = views[pairs["sample"]].astype(np.float32), views[pairs["of"]].astype(np.float32)
    inner = pairs["inner"][:, None, None]
    a, b = np.where(inner, sample_views, reference_views), np.where(inner, reference_views, sample_views)
    return np.where(pairs["mirrored"][:, None, None], a[:, :, ::-1], a), b


def refine_boxes(
    a: np.ndarray, b: np.ndarray, boxes: np.ndarray, count: int, steps: int
) -> tuple[np.ndarray, np.ndarray]:
    """Move and scale (p, 4) boxes to maximise the similarity of that part of `b` to `a`: (p,) cosines of `count` cells
    per side, and boxes.

    Parts of `a` outside of `b` are ignored. Damped Gauss-Newton steps minimise the difference of both spectra; the best
    box of all steps is kept.
    """
    best_cosines, best_boxes, boxes = np.full(len(a), -1, np.float32), boxes.copy(), boxes.copy()
    moves = np.eye(4, dtype=np.float32) * FINITE_DIFFERENCE_STEP
    for step in range(steps + 1):
        overlap = compute_overlap_boxes(boxes)
        spectrum_a = compute_weighted_spectrum(a, overlap, count).reshape(len(a), count * count)
        spectrum_b = compute_weighted_spectrum(b, compose_boxes(boxes, overlap), count).reshape(len(a), count * count)
        cosine = (spectrum_a * spectrum_b).sum(1)
        is_better = cosine > best_cosines
        best_cosines[is_better], best_boxes[is_better] = cosine[is_better], boxes[is_better]
        if step == steps:
            break
        moved_spectra = [
            compute_weighted_spectrum(b, compose_boxes(boxes + move, overlap), count).reshape(len(a), count * count)
            for move in moves
        ]
        slopes = (np.stack(moved_spectra, 1) - spectrum_b[:, None]) / FINITE_DIFFERENCE_STEP  # (p, 4, count * count)
        normal = slopes @ slopes.transpose(0, 2, 1)
        damping = 1e-3 * np.trace(normal, axis1=1, axis2=2) / 4 + 1e-6
        box_change = np.linalg.solve(
            normal + damping[:, None, None] * np.eye(4, dtype=np.float32),
            slopes @ (spectrum_a - spectrum_b)[:, :, None],
        )[:, :, 0]
        boxes = limit_boxes(boxes + box_change.clip(-MAX_BOX_MOVE, MAX_BOX_MOVE))
    return best_cosines, best_boxes


def limit_boxes(boxes: np.ndarray) -> np.ndarray:
    """Limit (p, 4) boxes to sides of MIN_BOX_SIDE to MAX_BOX_SIDE, and to MAX_BOX_OUTSIDE outside of the view."""
    size = boxes[:, 2:].clip(MIN_BOX_SIDE, MAX_BOX_SIDE)
    return np.concatenate([np.minimum(boxes[:, :2].clip(-MAX_BOX_OUTSIDE), 1 + MAX_BOX_OUTSIDE - size), size], 1)


def compute_overlap_boxes(boxes: np.ndarray) -> np.ndarray:
    """Compute the part of `a` inside `b`, as (p, 4) boxes of `a`, from the (p, 4) boxes of `a` in `b`."""
    start, end = boxes[:, :2].clip(0), (boxes[:, :2] + boxes[:, 2:]).clip(None, 1)
    return np.concatenate([(start - boxes[:, :2]) / boxes[:, 2:], (end - start) / boxes[:, 2:]], 1)


def compose_boxes(boxes: np.ndarray, inner_boxes: np.ndarray) -> np.ndarray:
    """Convert parts (p, 4) of boxes (p, 4), in fractions of each box, to boxes of the view."""
    return np.concatenate([boxes[:, :2] + inner_boxes[:, :2] * boxes[:, 2:], inner_boxes[:, 2:] * boxes[:, 2:]], 1)


def align_views(a: np.ndarray, b: np.ndarray, boxes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Align small views from the (p, 4) boxes that a search found: (p,) cosines, 0 for dropped pairs, and boxes.

    Coarse cells come first, since their steps converge from larger distances.
    """
    cosine, boxes = refine_boxes(a, b, boxes, 8, 2)
    for min_cosine, steps in ((MIN_ALIGNMENT_COSINES[0], 0), (MIN_ALIGNMENT_COSINES[1], 3)):
        remaining = np.flatnonzero(cosine >= min_cosine)
        cosine[cosine < min_cosine] = 0
        cosine[remaining], boxes[remaining] = refine_boxes(a[remaining], b[remaining], boxes[remaining], 16, steps)
    return cosine, boxes


def score_similarity(a: np.ndarray, b: np.ndarray, boxes: np.ndarray) -> np.ndarray:
    """Return the similarity of larger views for the (p, 4) boxes of `align_views`: (p,), at most 1; 0 if the similarity
    is not significant.

    It sums two terms: the correlation of patterns block by block, which is low for two images of similar objects, and
    the significance of the overall agreement, which is low for two drawings of a few strokes. Duplicates reach
    COPY_THRESHOLD.
    """
    _, boxes = refine_boxes(a, b, boxes, 16, 2)
    overlap = compute_overlap_boxes(boxes)
    significance = compute_significance(
        compute_weighted_spectrum(a, overlap, 16, 1.0),
        compute_weighted_spectrum(b, compose_boxes(boxes, overlap), 16, 1.0),
    )
    _, boxes = refine_boxes(a, b, boxes, DETAIL_CELLS, 1)
    overlap = compute_overlap_boxes(boxes)
    correlation = correlate_blocks(
        average_cells(a, overlap, DETAIL_CELLS), average_cells(b, compose_boxes(boxes, overlap), DETAIL_CELLS)
    )
    return np.where(
        significance >= MIN_SIGNIFICANCE,
        (correlation + 0.02 * np.minimum(significance, MAX_SIGNIFICANCE)) / (1 + 0.02 * MAX_SIGNIFICANCE),
        0,
    )


def compute_significance(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Return the distance of the cosine of spectra (p, c, c) of length 1 from chance, in standard deviations, (p,).

    A cosine r over d frequencies is atanh(r) * sqrt(d - 3) standard deviations from 0 (Fisher's transformation). d is
    counted as (sum t)^2 / sum t^2 over the terms t of r.
    """
    terms = a * b
    cosine = terms.sum((1, 2))
    shared = cosine**2 / np.maximum((terms**2).sum((1, 2)), 1e-9)
    return np.arctanh(cosine.clip(-0.9999, 0.9999)) * np.sqrt((shared - 3).clip(0))


def correlate_blocks(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Return the mean correlation of blocks of (p, c, c) greys, (p,); near 0 where both are uniform."""

    def normalise_blocks(views: np.ndarray) -> np.ndarray:
        count, num_blocks = len(views), views.shape[1] // BLOCK_CELLS
        scaled = views / np.maximum(views.reshape(count, -1).std(1), 1e-3)[:, None, None]
        cells = (
            scaled.reshape(count, num_blocks, BLOCK_CELLS, num_blocks, BLOCK_CELLS)
            .transpose(0, 1, 3, 2, 4)
            .reshape(count, num_blocks * num_blocks, -1)
        )
        return cells - cells.mean(2, keepdims=True)

    x, y = normalise_blocks(a), normalise_blocks(b)
    variances = ((x**2).mean(2) + BLOCK_NOISE_VARIANCE) * ((y**2).mean(2) + BLOCK_NOISE_VARIANCE)
    return ((x * y).mean(2) / np.sqrt(variances)).mean(1)
