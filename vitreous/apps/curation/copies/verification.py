"""Verification of candidate duplicates: align one image to the other, and compare the overlap.

Candidates are p pairs of dtype `CANDIDATE` (`copies.search`). Shapes: pairs of views (a, b), each (p, side, side)
float32. View a, mirrored or not, matches a box of view b, except at its edges. A box is (x, y, width, height) in
fractions of view b.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from vitreous.apps.curation.copies.windows import average_cells, compute_weighted_spectrum

MIN_BOX_SIDE, MAX_BOX_SIDE = 0.55, 1.1  # minimum and maximum width and height of a box
MAX_BOX_OUTSIDE = 0.15  # fraction of the view by which a box may exceed it
# minimum cosines with 8 and with 16 cells per side; 99 % of duplicates reach 0.86 and 0.67
MIN_ALIGNMENT_COSINES = (0.75, 0.5)
MIN_SMALL_VIEW_COSINE = 0.65  # pairs of small views with a lower cosine are not compared in larger views
COPY_THRESHOLD = 0.54  # minimum similarity of duplicates
DETAIL_CELLS, BLOCK_CELLS = 32, 4  # cells per side: of the view, and of a block, in the detailed comparison
BLOCK_NOISE_VARIANCE = 0.002  # blocks with less variance, relative to the image, have little weight
# standard deviations from chance: minimum for a duplicate, and limit that counts
MIN_SIGNIFICANCE, MAX_SIGNIFICANCE = 6.0, 25.0
# fractions of the view: step of the finite difference, and largest change of a box per step
FINITE_DIFFERENCE_STEP, MAX_BOX_MOVE = 0.008, 0.05
PAIR_BLOCK_SIZE = 4096  # pairs compared at a time


def align_pairs(
    views: np.ndarray, pairs: np.ndarray, progress: Callable[[int, int], None] = lambda done, total: None
) -> tuple[np.ndarray, np.ndarray]:
    """Apply `align_views` to (p,) pairs of dtype `CANDIDATE`, whose indices refer to (n, side, side) small views.
    Return (p,) cosines and (p, 4) boxes."""
    cosines, boxes = np.empty(len(pairs), np.float32), np.empty((len(pairs), 4), np.float32)
    for start in range(0, len(pairs), PAIR_BLOCK_SIZE):
        block = slice(start, start + PAIR_BLOCK_SIZE)
        cosines[block], boxes[block] = align_views(*gather_pairs(views, pairs[block]), pairs["box"][block])
        progress(min(start + PAIR_BLOCK_SIZE, len(pairs)), len(pairs))
    return cosines, boxes


def score_pairs(views: np.ndarray, pairs: np.ndarray, boxes: np.ndarray) -> np.ndarray:
    """Apply `score_similarity` to (p,) pairs of dtype `CANDIDATE` with (p, 4) boxes, whose indices refer to (n, side,
    side) larger views. Return (p,) similarities."""
    blocks = [slice(start, start + PAIR_BLOCK_SIZE) for start in range(0, len(pairs), PAIR_BLOCK_SIZE)]
    scores = [score_similarity(*gather_pairs(views, pairs[block]), boxes[block]) for block in blocks]
    return np.concatenate([np.empty(0, np.float32), *scores])


def compact_indices(pairs: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the sorted samples (n,) that occur in (p,) pairs of dtype `CANDIDATE`, and a copy of the pairs with
    indices into these samples."""
    samples, positions = np.unique(np.stack([pairs["sample"], pairs["of"]]), return_inverse=True)
    pairs = pairs.copy()
    pairs["sample"], pairs["of"] = positions.reshape(2, -1)
    return samples, pairs


def gather_pairs(views: np.ndarray, pairs: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return two views (p, side, side) float32 for each of (p,) pairs of dtype `CANDIDATE`: the one that matches a box
    of the other, mirrored if needed, and the other."""
    sample_views, reference_views = views[pairs["sample"]].astype(np.float32), views[pairs["of"]].astype(np.float32)
    inner = pairs["inner"][:, None, None]
    a, b = np.where(inner, sample_views, reference_views), np.where(inner, reference_views, sample_views)
    return np.where(pairs["mirrored"][:, None, None], a[:, :, ::-1], a), b


def refine_boxes(
    a: np.ndarray, b: np.ndarray, boxes: np.ndarray, count: int, steps: int
) -> tuple[np.ndarray, np.ndarray]:
    """Move and scale (p, 4) boxes so that each box of `b` becomes most similar to `a`. Return (p,) cosines of spectra
    with `count` cells per side, and the boxes.

    Damped Gauss-Newton steps minimise the difference of both spectra; the best box of all steps is kept. Regions of `a`
    outside of `b` are ignored.
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
    """Limit (p, 4) boxes to sides from `MIN_BOX_SIDE` to `MAX_BOX_SIDE`, and to at most `MAX_BOX_OUTSIDE` outside of
    the view."""
    size = boxes[:, 2:].clip(MIN_BOX_SIDE, MAX_BOX_SIDE)
    return np.concatenate([np.minimum(boxes[:, :2].clip(-MAX_BOX_OUTSIDE), 1 + MAX_BOX_OUTSIDE - size), size], 1)


def compute_overlap_boxes(boxes: np.ndarray) -> np.ndarray:
    """Compute the region of `a` that is inside `b`, as (p, 4) boxes of `a`, from the (p, 4) boxes of `a` in `b`."""
    start, end = boxes[:, :2].clip(0), (boxes[:, :2] + boxes[:, 2:]).clip(None, 1)
    return np.concatenate([(start - boxes[:, :2]) / boxes[:, 2:], (end - start) / boxes[:, 2:]], 1)


def compose_boxes(boxes: np.ndarray, inner_boxes: np.ndarray) -> np.ndarray:
    """Convert (p, 4) boxes inside boxes (p, 4), in fractions of the outer box, to boxes of the view."""
    return np.concatenate([boxes[:, :2] + inner_boxes[:, :2] * boxes[:, 2:], inner_boxes[:, 2:] * boxes[:, 2:]], 1)


def align_views(a: np.ndarray, b: np.ndarray, boxes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Align small views, starting from the (p, 4) boxes of a search. Return (p,) cosines, 0 for rejected pairs, and the
    aligned boxes.

    Coarse cells come first, since their steps converge from larger distances.
    """
    cosine, boxes = refine_boxes(a, b, boxes, 8, 2)
    for min_cosine, steps in ((MIN_ALIGNMENT_COSINES[0], 0), (MIN_ALIGNMENT_COSINES[1], 3)):
        remaining = np.flatnonzero(cosine >= min_cosine)
        cosine[cosine < min_cosine] = 0
        cosine[remaining], boxes[remaining] = refine_boxes(a[remaining], b[remaining], boxes[remaining], 16, steps)
    return cosine, boxes


def score_similarity(a: np.ndarray, b: np.ndarray, boxes: np.ndarray) -> np.ndarray:
    """Return the similarity (p,) of larger views, given the (p, 4) boxes of `align_views`. It is at most 1, and 0 if it
    is not significant. Duplicates reach `COPY_THRESHOLD`.

    It sums two terms. The correlation of patterns block by block is low for two images of similar objects. The
    significance of the overall agreement is low for two drawings of a few strokes.
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
    """Return how many standard deviations (p,) the cosine of spectra (p, c, c) of length 1 is from chance.

    A cosine r over d frequencies is atanh(r) * sqrt(d - 3) standard deviations from 0 (Fisher's transformation). The
    effective number of frequencies is d = (sum t)^2 / sum t^2 over the terms t of r.
    """
    terms = a * b
    cosine = terms.sum((1, 2))
    shared = cosine**2 / np.maximum((terms**2).sum((1, 2)), 1e-9)
    return np.arctanh(cosine.clip(-0.9999, 0.9999)) * np.sqrt((shared - 3).clip(0))


def correlate_blocks(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Return the mean correlation (p,) over blocks of (p, c, c) greys; uniform blocks correlate near 0."""

    def normalise_blocks(views: np.ndarray) -> np.ndarray:
        """Divide each view by its standard deviation, and subtract its mean from each block: (p, blocks, cells)."""
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
