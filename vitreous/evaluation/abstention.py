"""What is gained by not answering where the model is unsure: coverage, accuracy of what is answered, and the curve of
both.

In shapes, n is images. Confidence is the highest probability of an image, 0 for one that could not be read.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from vitreous.errors import UsageError
from vitreous.evaluation.classification import wilson

POINTS = 100  # of the curve in a document


def check_abstain(below: float | None) -> None:
    """Raise UsageError for a limit that is not above 0 and at most 1; None is no limit."""
    if below is not None and not 0 < below <= 1:
        raise UsageError(
            f"--abstain must be above 0 and at most 1, not {below}", "0.8 answers where the highest probability is 0.8"
        )


def abstained(confidence: np.ndarray, right: np.ndarray, below: float) -> dict[str, Any]:
    """(n,) confidence and (n,) whether the answer is right -> the figures of a model that says "unsure" below a
    confidence.

    `coverage` is the share of images answered, `top1` the accuracy on them (None for none) with its 95 % interval,
    `aurc` the area under the risk-coverage curve (arXiv:1705.08500), and `curve` some of its points, (coverage, share
    of wrong answers).
    """
    answered = confidence >= below
    count, hits = int(answered.sum()), int((answered & right).sum())
    risks = risk(confidence, right)
    places = np.unique(np.linspace(0, len(risks) - 1, min(POINTS, len(risks))).astype(int))
    return {
        "below": below,
        "answered": count,
        "unsure": len(confidence) - count,
        "coverage": count / len(confidence),
        "top1": hits / count if count else None,
        "interval": list(wilson(hits, count)) if count else None,
        "aurc": float(risks.mean()),
        "curve": [[(place + 1) / len(risks), float(risks[place])] for place in places],
    }


def risk(confidence: np.ndarray, right: np.ndarray) -> np.ndarray:
    """(n,) the share of wrong answers among the i + 1 most confident images, for each i.

    Images of equal confidence come in no order: each has their share of wrong answers.
    """
    order = np.argsort(-confidence, kind="stable")
    _, group, size = np.unique(-confidence[order], return_inverse=True, return_counts=True)
    wrong = np.bincount(group, weights=~right[order]) / size
    return np.cumsum(wrong[group]) / np.arange(1, len(order) + 1)
