"""Judgements by the training images: how unlike them an image is, and which labels are probably wrong.

Both are by the features that the head reads. In shapes, n is images, m training images, d features, K classes.

The relative Mahalanobis distance (arXiv:2106.09022) of an image: how much farther its feature x lies from the nearest
class, m_k with the covariance S that all classes share, than from the training images as a whole, m with their
covariance R,

    score(x) = min_k (x - m_k)' S^-1 (x - m_k) - (x - m)' R^-1 (x - m)

in squared standard deviations. Higher is less familiar; 0 is as near to a class as to all images.

A label is suspect where the model and the nearest training images both name another class, with confidence.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from vitreous.errors import DataError
from vitreous.evaluation.knn import neighbours

CHUNK = 4096  # images in memory at a time
K = 10  # neighbours
CONFIDENT = 0.5  # probability, and share of the neighbours, that another class than the label's must have


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
        scores = [self.whole.distances(part) if self.classes is None else self.relative(part) for part in parts]
        return np.concatenate(scores) if scores else np.zeros(0)

    def relative(self, features: np.ndarray) -> np.ndarray:
        """(n, d) float64 -> (n,)."""
        assert self.classes is not None
        return self.classes.distances(features) - self.whole.distances(features)


def fit_detector(features: np.ndarray, labels: np.ndarray, classes: int) -> MahalanobisDetector:
    """(n, d) features of training images, and labels (n,) or (n, K) -> what is familiar. Raises DataError for fewer
    than two images."""
    if len(features) < 2:
        raise DataError(f"{len(features)} training images do not tell what is usual", "two at least are needed")
    whole = fit_gaussian(features, np.zeros(len(features), dtype=np.int64), 1)
    return MahalanobisDetector(None if labels.ndim == 2 else fit_gaussian(features, labels, classes), whole)


def fit_gaussian(features: np.ndarray, labels: np.ndarray, classes: int) -> GaussianStats:
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


@dataclass(frozen=True)
class Suspect:
    """An image whose label is probably wrong; classes are positions. `score`, 0 to 1: the mean of how far the model's
    probability and the neighbours' share of their class are above those of the label."""

    sample: int
    label: int
    answer: int
    probability: float
    neighbour: int
    share: float
    score: float


def find_suspects(p: np.ndarray, shares: np.ndarray, labels: np.ndarray) -> list[Suspect]:
    """(n, K) probabilities, (n, K) shares of the neighbours and (n,) labels -> the suspects, the surest first.

    A label is suspect where both name another class, each with `CONFIDENT` at least; they may name different ones.
    """
    rows = np.arange(len(labels))
    answer, neighbour = p.argmax(1), shares.argmax(1)
    probability, share = p[rows, answer], shares[rows, neighbour]
    suspicious = (answer != labels) & (neighbour != labels) & (probability >= CONFIDENT) & (share >= CONFIDENT)
    score = (probability - p[rows, labels] + share - shares[rows, labels]) / 2
    order = [int(sample) for sample in np.argsort(-score, kind="stable") if suspicious[sample]]
    return [
        Suspect(
            s,
            int(labels[s]),
            int(answer[s]),
            float(probability[s]),
            int(neighbour[s]),
            float(share[s]),
            float(score[s]),
        )
        for s in order
    ]


def neighbour_shares(
    features: np.ndarray,
    memory: np.ndarray,
    labels: np.ndarray,
    classes: int,
    own: np.ndarray | None = None,
    k: int = K,
) -> np.ndarray:
    """(n, d) features, (m, d) training features and their (m,) labels -> (n, K): the share of each class among the k
    nearest.

    Nearest is by cosine. `own` (n,): where each image itself is among the training images, -1 for none; it is no
    neighbour of its own. With fewer than k others, all of them are the neighbours; shares are 0 where there is none.
    """
    _, rows = neighbours(memory, features, min(k + 1, len(memory)))
    itself = rows == (np.full(len(features), -1) if own is None else own)[:, None]
    near = np.take_along_axis(rows, np.argsort(itself, axis=1, kind="stable"), 1)[:, :k]  # the image itself comes last
    counted = np.arange(near.shape[1])[None] < np.minimum(k, rows.shape[1] - itself.sum(1))[:, None]
    cells = np.arange(len(features))[:, None] * classes + labels[near]
    shares = np.bincount(cells[counted], minlength=len(features) * classes).reshape(len(features), classes)
    return shares / np.maximum(shares.sum(1, keepdims=True), 1)
