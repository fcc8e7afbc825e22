"""How far probabilities can be believed: one temperature for all logits, fitted by likelihood (arXiv:1706.04599).

Logits divided by T > 1 give softer probabilities, T < 1 sharper ones; their order stays, so no top-1 answer changes. In
shapes, n is images, K classes. Labels are (n,), one an image and a softmax over the classes, or (n, K) in {0, 1} and a
sigmoid for each.
"""

from __future__ import annotations

import math

import numpy as np

from vitreous.errors import DataError
from vitreous.evaluation.multilabel import sigmoid

LOW, HIGH = 1e-3, 1e3  # temperatures between which one is looked for
STEPS, EXACT = 100, 1e-12  # of the search at most, and the relative step at which it ends
LEAVE = "the model stays as it is; more images, or harder ones, would tell its temperature"


def log_softmax(logits: np.ndarray) -> np.ndarray:
    """(n, K) logits -> (n, K) float64 logarithms of probabilities."""
    shifted = logits.astype(np.float64) - logits.max(1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(1, keepdims=True))


def probabilities(logits: np.ndarray, loss: str = "softmax") -> np.ndarray:
    """(n, K) logits -> (n, K) float64: shared out among the classes by the softmax loss, by the others each for
    itself."""
    return np.exp(log_softmax(logits)) if loss == "softmax" else sigmoid(logits)


def losses(logits: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """(n,) negative log-likelihood of each image in nats, summed over classes where each is a question of its own."""
    if labels.ndim == 2:
        return (np.logaddexp(0, logits.astype(np.float64)) - (labels > 0) * logits).sum(1)
    return -log_softmax(logits)[np.arange(len(labels)), labels]


def fit_temperature(logits: np.ndarray, labels: np.ndarray) -> float:
    """The temperature, 0.001 to 1000, of the smallest mean NLL over these images.

    The NLL is convex in 1 / T, so its slope there, the mean of sum_k p_k z_k - z_label, has one zero, which Newton's
    method finds to the last digits; a step that leaves the interval known to hold it is replaced by halving that.
    Raises DataError where there is none: all images are answered right, so that sharper probabilities always fit
    better, or the answers are no better than chance.
    """
    scores = logits.astype(np.float64)
    if labels.ndim == 1:
        scores -= scores.mean(1, keepdims=True)  # changes no probability, and keeps digits of their spread
    target = ((labels > 0) * scores).sum(1) if labels.ndim == 2 else scores[np.arange(len(labels)), labels]

    def slope(inverse: float) -> tuple[float, float]:
        """The slope, and how fast it grows."""
        p = probabilities(inverse * scores, "softmax" if labels.ndim == 1 else "sigmoid")
        mean = (p * scores).sum(1)
        spread = (p * scores**2).sum(1) - mean**2 if labels.ndim == 1 else (p * (1 - p) * scores**2).sum(1)
        return float((mean - target).mean()), float(spread.mean())

    low, high, inverse = 1 / HIGH, 1 / LOW, 1.0
    if slope(high)[0] <= 0:
        raise DataError(
            f"the sharper the probabilities, the better they fit: the {len(labels)} images are all answered right",
            LEAVE,
        )
    if slope(low)[0] >= 0:
        raise DataError(
            f"the answers to the {len(labels)} images are no better than chance: no temperature mends that", LEAVE
        )
    for _ in range(STEPS):
        height, growth = slope(inverse)
        low, high = (low, inverse) if height > 0 else (inverse, high)
        step = inverse - height / growth if growth > 0 else low
        before, inverse = inverse, step if low <= step <= high else math.sqrt(low * high)
        if abs(inverse - before) <= EXACT * before:
            break
    return 1 / inverse
