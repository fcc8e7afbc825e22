"""Few-shot classification by ridge regression on frozen features (arXiv:2010.11929, section 4.1, "Metrics").

Details are those of big_vision's evaluators/fewshot_lsr.py. n images, d numbers of a feature, K classes.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

SHOTS = (1, 5, 10, 25)
L2 = 2.0**10
BIAS = 100.0  # the constant feature: so large that the penalty hardly touches its weight
SPREAD = 1e-5  # added to deviations
CHUNK = 8_192  # images scored at a time


@dataclass(frozen=True)
class Ridge:
    """A linear map of standardised features: `weight` (d + 1, K), its last row that of the constant feature."""

    mean: np.ndarray
    deviation: np.ndarray
    weight: np.ndarray

    def scores(self, features: np.ndarray) -> np.ndarray:
        """(m, d) -> (m, K) float64, about 1 for a class and -1 for the others."""
        parts = [features[low : low + CHUNK] for low in range(0, len(features), CHUNK)]
        return np.concatenate([self.standard(part) @ self.weight for part in parts])

    def standard(self, features: np.ndarray) -> np.ndarray:
        """(m, d) -> (m, d + 1) float64."""
        return standardised(features, self.mean, self.deviation)


def ridge(features: np.ndarray, labels: np.ndarray, classes: int, l2: float = L2) -> Ridge:
    """The map that minimises |X W - Y|^2 + l2 |W|^2 for X (n, d + 1), and Y (n, K) 1 for a class and -1 for the others.

    W = (X^T X + l2 I)^-1 X^T Y = X^T (X X^T + l2 I)^-1 Y, by the eigenvectors of the smaller matrix.
    """
    known = np.asarray(features, dtype=np.float64)
    mean, deviation = known.mean(0), known.std(0) + SPREAD
    x, y = standardised(known, mean, deviation), 2.0 * np.eye(classes)[labels] - 1.0
    if len(x) >= x.shape[1]:
        values, q = np.linalg.eigh(x.T @ x)
        left, right = q, q.T @ (x.T @ y)
    else:
        values, q = np.linalg.eigh(x @ x.T)
        left, right = x.T @ q, q.T @ y
    return Ridge(mean, deviation, (left / (values + l2)) @ right)


def standardised(features: np.ndarray, mean: np.ndarray, deviation: np.ndarray) -> np.ndarray:
    """(m, d) -> (m, d + 1) float64: standardised, with the constant feature added."""
    return np.pad((features - mean) / deviation, ((0, 0), (0, 1)), constant_values=BIAS)


def draws(labels: np.ndarray, classes: int, seed: int) -> list[np.ndarray]:
    """Return the rows of each class of (n,) labels in the order a seed draws them: the first `shots` are the training
    set."""
    generator = np.random.default_rng(seed)
    return [generator.permutation(np.flatnonzero(labels == label)) for label in range(classes)]
