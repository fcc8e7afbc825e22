"""Nearest-neighbour segmentation: the quality of patch features without training (arXiv:2306.01667).

A patch gets the classes of the most similar patches of labelled images. n memory patches, m evaluated patches, d
features, K classes, k neighbours.
"""

from __future__ import annotations

import numpy as np

from vitreous.data.annotations.target import IGNORE_INDEX
from vitreous.evaluation.knn import find_nearest_neighbours
from vitreous.evaluation.pixels import compute_pixel_confusion, compute_segmentation_metrics

PATCH_NEIGHBOURS, PATCH_VOTE_TEMPERATURE = 30, 0.02  # the settings of arXiv:2306.01667
VOTE_CHUNK = 65_536  # patches per chunk of the votes


def count_patch_classes(class_map: np.ndarray, grid: tuple[int, ...], num_classes: int) -> np.ndarray:
    """Count the pixels of each class in each patch of a grid that covers the image: (*image) int -> (*grid, K) int64.

    A pixel belongs to the patch that contains its centre. Pixels of the class IGNORE_INDEX are not counted.
    """
    patch_indices = np.zeros((), np.int64)
    for axis, (length, patches) in enumerate(zip(class_map.shape, grid, strict=True)):
        positions = (2 * np.arange(length) + 1) * patches // (2 * length)
        patch_indices = patch_indices[..., None] * patches + positions.reshape((1,) * axis + (length,))
    is_known = class_map != IGNORE_INDEX
    codes = patch_indices[is_known] * num_classes + class_map[is_known]
    counts = np.bincount(codes, minlength=int(np.prod(grid)) * num_classes)
    return counts.reshape(*grid, num_classes)


def get_patch_labels(counts: np.ndarray) -> np.ndarray:
    """Return the most frequent class of each patch, (...) int64, from counts (..., K); IGNORE_INDEX for a patch without
    labelled pixels."""
    return np.where(counts.sum(-1) > 0, counts.argmax(-1), IGNORE_INDEX)


def vote_patch_classes(
    memory: np.ndarray,
    memory_shares: np.ndarray,
    queries: np.ndarray,
    *,
    k: int = PATCH_NEIGHBOURS,
    temperature: float = PATCH_VOTE_TEMPERATURE,
    device: str = "cpu",
) -> np.ndarray:
    """Compute class shares (m, K) float32 of patch features `queries` (m, d): the mean of the shares of the k nearest
    patches of `memory` (n, d), each weighted by exp(cosine / temperature).

    `memory_shares` (n, K) has the share of each class in each memory patch. If there are fewer than k patches, all of
    them vote. Raises ValueError if `memory` is empty.
    """
    if not len(memory):
        raise ValueError("nearest neighbours need at least one labelled patch")
    cosines, neighbours = find_nearest_neighbours(memory, queries, min(k, len(memory)), device)
    weights = np.exp((cosines - cosines[:, :1]) / np.float32(temperature))
    weights /= weights.sum(1, keepdims=True)
    shares = np.zeros((len(queries), memory_shares.shape[1]), np.float32)
    for start in range(0, len(queries), VOTE_CHUNK):
        rows = slice(start, start + VOTE_CHUNK)
        for rank in range(weights.shape[1]):
            shares[rows] += weights[rows, rank, None] * memory_shares[neighbours[rows, rank]]
    return shares


def evaluate_patch_neighbours(
    memory: np.ndarray,
    memory_labels: np.ndarray,
    queries: np.ndarray,
    query_labels: np.ndarray,
    *,
    num_classes: int,
    k: int = PATCH_NEIGHBOURS,
    temperature: float = PATCH_VOTE_TEMPERATURE,
    device: str = "cpu",
) -> dict[str, float | None]:
    """Evaluate patch features by nearest-neighbour segmentation: `miou` and `accuracy` over patches.

    `memory` (n, d) and `queries` (m, d) are patch features, `memory_labels` (n,) and `query_labels` (m,) int64 their
    classes. Patches of the class IGNORE_INDEX are neither neighbours nor evaluated; both metrics are None without
    evaluated patches. Raises ValueError if no memory patch has a label.
    """
    is_labelled, is_evaluated = memory_labels != IGNORE_INDEX, query_labels != IGNORE_INDEX
    shares = np.eye(num_classes, dtype=np.float32)[memory_labels[is_labelled]]
    votes = vote_patch_classes(
        memory[is_labelled], shares, queries[is_evaluated], k=k, temperature=temperature, device=device
    )
    confusion = compute_pixel_confusion(query_labels[is_evaluated], votes.argmax(1), num_classes)
    metrics = compute_segmentation_metrics(confusion)
    return {"miou": metrics["miou"], "accuracy": metrics["pixel_accuracy"]}
