"""How unlike the training images an image is, by the features that the head reads.

The relative Mahalanobis distance (arXiv:2106.09022): how much farther a feature x lies from the nearest class, m_k with
the covariance S that all classes share, than from the training images as a whole, m with their covariance R,

    score(x) = min_k (x - m_k)' S^-1 (x - m_k) - (x - m)' R^-1 (x - m)

in squared standard deviations. Higher is less familiar; 0 is as near to a class as to all images. In shapes, n is
images, d features, K classes.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from vitreous.errors import DataError

CHUNK = 4096  # images in memory at a time


@dataclass(frozen=True)
class GaussianStats:
    """Points around means: `means` (K, d) and `whiten` (d, d), which turns distances into standard deviations."""

    means: np.ndarray
    whiten: np.ndarray

    def distances(self, features: np.ndarray) -> np.ndarray:
        """(n, d) -> (n,): squared Mahalanobis distance from the nearest mean."""
        points, means = features @ self.whiten.T, self.means @ self.whiten.T
        squared = (points**2).sum(1)[:, None] - 2 * points @ means.T + (means**2).sum(1)
        return np.maximum(squared.min(1), 0.0)


@dataclass(frozen=True)
class MahalanobisDetector:
    """What training images look like. `classes` is None where images have several labels: then all are one cloud."""

    classes: GaussianStats | None
    whole: GaussianStats

    def scores(self, features: np.ndarray) -> np.ndarray:
        """(n, d) -> (n,) float64: the score of the file's head; without classes, the squared distance from the mean of
        all."""
        parts = [features[start : start + CHUNK].astype(np.float64) for start in range(0, len(features), CHUNK)]
        found = [self.whole.distances(part) if self.classes is None else self.relative(part) for part in parts]
        return np.concatenate(found) if found else np.zeros(0)

    def relative(self, features: np.ndarray) -> np.ndarray:
        """(n, d) float64 -> (n,)."""
        assert self.classes is not None
        return self.classes.distances(features) - self.whole.distances(features)


def familiar(features: np.ndarray, labels: np.ndarray, classes: int) -> MahalanobisDetector:
    """(n, d) features of training images, and labels (n,) or (n, K) -> what is familiar. Raises DataError for fewer
    than two images."""
    if len(features) < 2:
        raise DataError(f"{len(features)} training images do not tell what is usual", "two at least are needed")
    whole = cloud(features, np.zeros(len(features), dtype=np.int64), 1)
    return MahalanobisDetector(None if labels.ndim == 2 else cloud(features, labels, classes), whole)


def cloud(features: np.ndarray, labels: np.ndarray, classes: int) -> GaussianStats:
    """The means of the classes that have images, and what makes the covariance around them the identity.

    The covariance is shrunk towards a multiple of the identity as Ledoit and Wolf (2004) have it, so that it can be
    inverted however few the images: (1 - a) S + a trace(S) / d I, with

        a = min(1, (sum |x|^4 / n - |S|^2) / n / |S - trace(S) / d I|^2)        x: the distance from the own mean

    Features are read chunk by chunk, twice.
    """
    count, width = features.shape
    sums, sizes = np.zeros((classes, width)), np.bincount(labels, minlength=classes)
    places = [slice(start, start + CHUNK) for start in range(0, count, CHUNK)]
    for rows in places:
        np.add.at(sums, labels[rows], features[rows])
    means = sums / np.maximum(sizes, 1)[:, None]
    scatter, fourth = np.zeros((width, width)), 0.0
    for rows in places:
        away = features[rows] - means[labels[rows]]
        scatter += away.T @ away
        fourth += ((away**2).sum(1) ** 2).sum()
    scatter /= count
    level = np.trace(scatter) / width
    spread, noise = ((scatter - level * np.eye(width)) ** 2).sum(), (fourth / count - (scatter**2).sum()) / count
    shrinkage = min(1.0, max(0.0, noise / spread)) if spread > 0 else 1.0
    level = level or np.finfo(np.float32).tiny  # all features alike
    covariance = (1 - shrinkage) * scatter + max(shrinkage, 1e-9) * level * np.eye(width)
    return GaussianStats(means[sizes > 0], np.linalg.inv(np.linalg.cholesky(covariance)))


def separation(usual: np.ndarray, other: np.ndarray) -> dict[str, float]:
    """Scores of images that are like the training images, (n,), and of others, (m,) -> how well they are told apart.

    `auroc`: the probability that an image of the others scores higher, equal scores count half. `fpr95`: the share of
    the others that passes for usual where the limit lets 95 % of the usual images pass.
    """
    order = np.sort(usual)
    below, at = np.searchsorted(order, other, side="left"), np.searchsorted(order, other, side="right")
    limit = order[int(np.ceil(0.95 * len(order))) - 1]
    return {
        "auroc": float((below + at).mean() / 2 / len(usual)),
        "fpr95": float((other <= limit).mean()),
        "limit": float(limit),
    }
