"""Detect outliers and label errors from the features (the head's input) of training images.

In shapes, n is images, m training images, d features, K classes.

Relative Mahalanobis distance (arXiv:2106.09022), with class means m_k and their shared covariance S, and mean m and
covariance R of all training images: score(x) = min_k (x - m_k)' S^-1 (x - m_k) - (x - m)' R^-1 (x - m), in squared
standard deviations. Higher scores are less familiar.

A label is suspect if the model and the nearest training images both predict another class with confidence.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from vitreous.errors import DataError
from vitreous.evaluation.knn import find_nearest_neighbours

CHUNK_IMAGES = 4096  # images in memory at a time
NUM_NEIGHBOURS = 10  # nearest training images that vote
MIN_SUSPECT_CONFIDENCE = 0.5  # smallest probability, and share of the neighbours, of another class for a suspect label


@dataclass(frozen=True)
class GaussianStats:
    """Gaussian distributions with different means and a shared covariance: `means` (K, d) and `whiten` (d, d), which
    maps the covariance to the identity."""

    means: np.ndarray
    whiten: np.ndarray

    def distances(self, features: np.ndarray) -> np.ndarray:
        """Compute the squared Mahalanobis distances (n,) of features (n, d) to the nearest mean."""
        points, means = features @ self.whiten.T, self.means @ self.whiten.T
        squared = (points**2).sum(1)[:, None] - 2 * points @ means.T + (means**2).sum(1)
        return np.maximum(squared.min(1), 0.0)


@dataclass(frozen=True)
class MahalanobisDetector:
    """A detector of outliers: Gaussians fitted to each class and to all training images; `class_stats` is None for
    multi-label data."""

    class_stats: GaussianStats | None
    overall_stats: GaussianStats

    def scores(self, features: np.ndarray) -> np.ndarray:
        """Compute outlier scores (n,) float64 of (n, d) features; without classes, the squared distance to the overall
        mean."""
        chunks = [
            features[start : start + CHUNK_IMAGES].astype(np.float64) for start in range(0, len(features), CHUNK_IMAGES)
        ]
        classes, scores = self.class_stats, [self.overall_stats.distances(chunk) for chunk in chunks]
        if classes is not None:
            scores = [classes.distances(chunk) - overall for chunk, overall in zip(chunks, scores, strict=True)]
        return np.concatenate(scores) if scores else np.zeros(0)


def fit_mahalanobis_detector(features: np.ndarray, labels: np.ndarray, num_classes: int) -> MahalanobisDetector:
    """Fit the detector to the features (n, d) and labels, (n,) or (n, K), of training images. Raises DataError for
    fewer than two images."""
    if len(features) < 2:
        raise DataError(f"{len(features)} training images are too few to detect outliers", "use at least 2")
    overall = fit_gaussian(features, np.zeros(len(features), dtype=np.int64), 1)
    return MahalanobisDetector(None if labels.ndim == 2 else fit_gaussian(features, labels, num_classes), overall)


def fit_gaussian(features: np.ndarray, labels: np.ndarray, num_classes: int) -> GaussianStats:
    """Fit the means of classes with images, and the inverse square root of their shared covariance, to (n, d) features
    and (n,) labels.

    The covariance is shrunk towards a multiple of the identity (Ledoit and Wolf, 2004): (1 - a) S + a trace(S) / d I,
    with a = min(1, (sum |x|^4 / n - |S|^2) / n / |S - trace(S) / d I|^2), x the distance from the class mean. Features
    are read chunk by chunk, twice.
    """
    count, width = features.shape
    sums, sizes = np.zeros((num_classes, width)), np.bincount(labels, minlength=num_classes)
    chunk_slices = [slice(start, start + CHUNK_IMAGES) for start in range(0, count, CHUNK_IMAGES)]
    for chunk in chunk_slices:
        np.add.at(sums, labels[chunk], features[chunk])
    means = sums / np.maximum(sizes, 1)[:, None]
    scatter, fourth_moment = np.zeros((width, width)), 0.0
    for chunk in chunk_slices:
        deviations = features[chunk] - means[labels[chunk]]
        scatter += deviations.T @ deviations
        fourth_moment += ((deviations**2).sum(1) ** 2).sum()
    scatter /= count
    level = np.trace(scatter) / width
    spread, noise = ((scatter - level * np.eye(width)) ** 2).sum(), (fourth_moment / count - (scatter**2).sum()) / count
    shrinkage = min(1.0, max(0.0, noise / spread)) if spread > 0 else 1.0
    level = level or np.finfo(np.float32).tiny  # all features are equal
    covariance = (1 - shrinkage) * scatter + max(shrinkage, 1e-9) * level * np.eye(width)
    return GaussianStats(means[sizes > 0], np.linalg.inv(np.linalg.cholesky(covariance)))


def compute_outlier_separation(familiar_scores: np.ndarray, outlier_scores: np.ndarray) -> dict[str, float]:
    """Measure how well scores separate familiar images (n,) from outliers (m,). `auroc`: the probability that an
    outlier has a higher score than a familiar image; ties count half. `fpr95`: the share of outliers with scores up to
    `limit`, the 95 % quantile of the familiar scores."""
    sorted_scores = np.sort(familiar_scores)
    num_below, num_up_to = (
        np.searchsorted(sorted_scores, outlier_scores, side="left"),
        np.searchsorted(sorted_scores, outlier_scores, side="right"),
    )
    limit = sorted_scores[int(np.ceil(0.95 * len(sorted_scores))) - 1]
    return {
        "auroc": float((num_below + num_up_to).mean() / 2 / len(familiar_scores)),
        "fpr95": float((outlier_scores <= limit).mean()),
        "limit": float(limit),
    }


class SuspectLabel(NamedTuple):
    """An image whose label is probably wrong; classes are indices. `predicted_label` and `probability` are of the
    model; `neighbour` and `share` are of the nearest training images. `score`, 0 to 1: the margin of the predicted
    class over the label, averaged over probability and share."""

    sample: int
    label: int
    predicted_label: int
    probability: float
    neighbour: int
    share: float
    score: float


def find_suspect_labels(
    probabilities: np.ndarray, neighbour_shares: np.ndarray, labels: np.ndarray
) -> list[SuspectLabel]:
    """Find suspect labels among labels (n,), most certain first, from class probabilities (n, K) and shares of the
    neighbours (n, K). A label is suspect if model and neighbours both predict other classes, not always the same one,
    with a probability and a share of at least `MIN_SUSPECT_CONFIDENCE`."""
    indices = np.arange(len(labels))
    predicted, neighbour_label = probabilities.argmax(1), neighbour_shares.argmax(1)
    probability, share = probabilities[indices, predicted], neighbour_shares[indices, neighbour_label]
    is_suspect = (
        (predicted != labels)
        & (neighbour_label != labels)
        & (probability >= MIN_SUSPECT_CONFIDENCE)
        & (share >= MIN_SUSPECT_CONFIDENCE)
    )
    score = (probability - probabilities[indices, labels] + share - neighbour_shares[indices, labels]) / 2
    order = np.array([index for index in np.argsort(-score, kind="stable") if is_suspect[index]], dtype=np.int64)
    columns = (order, *(values[order] for values in (labels, predicted, probability, neighbour_label, share, score)))
    return [SuspectLabel(*fields) for fields in zip(*(column.tolist() for column in columns), strict=True)]


def compute_neighbour_shares(
    features: np.ndarray,
    memory: np.ndarray,
    labels: np.ndarray,
    num_classes: int,
    own_indices: np.ndarray | None = None,
    k: int = NUM_NEIGHBOURS,
) -> np.ndarray:
    """Compute the class shares (n, K) of the k nearest training images, by cosine similarity, for (n, d) features.

    `memory` (m, d) and `labels` (m,): features and labels of the training images. `own_indices` (n,): the index of each
    image among the training images, -1 for none; an image is not its own neighbour. If there are fewer than k others,
    all of them count; shares are 0 if there are none.
    """
    _, neighbours = find_nearest_neighbours(memory, features, min(k + 1, len(memory)))
    is_itself = neighbours == (np.full(len(features), -1) if own_indices is None else own_indices)[:, None]
    nearest = np.take_along_axis(neighbours, np.argsort(is_itself, axis=1, kind="stable"), 1)[
        :, :k
    ]  # the image itself sorts last
    is_counted = np.arange(nearest.shape[1])[None] < np.minimum(k, neighbours.shape[1] - is_itself.sum(1))[:, None]
    flat_indices = np.arange(len(features))[:, None] * num_classes + labels[nearest]
    shares = np.bincount(flat_indices[is_counted], minlength=len(features) * num_classes).reshape(
        len(features), num_classes
    )
    return shares / np.maximum(shares.sum(1, keepdims=True), 1)
