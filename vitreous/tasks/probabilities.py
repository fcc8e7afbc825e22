"""Probabilities of classes, from logits (n, K)."""

from __future__ import annotations

import numpy as np
import scipy

from vitreous.errors import UsageError

THRESHOLD = 0.5  # probability above which a class of a multi-label model is predicted


def log_softmax(logits: np.ndarray) -> np.ndarray:
    """(n, K) logits -> (n, K) float64 log-probabilities."""
    return scipy.special.log_softmax(logits.astype(np.float64), axis=1)


def probabilities(logits: np.ndarray, loss: str = "softmax") -> np.ndarray:
    """(n, K) logits -> (n, K) float64: softmax over the classes for the softmax loss, else a sigmoid for each."""
    return np.exp(log_softmax(logits)) if loss == "softmax" else scipy.special.expit(logits.astype(np.float64))


def check_abstain(below: float | None) -> None:
    """Raise UsageError for a limit that is not above 0 and at most 1; None is no limit."""
    if below is not None and not 0 < below <= 1:
        hint = "0.8 answers where the highest probability is 0.8"
        raise UsageError(f"--abstain must be above 0 and at most 1, not {below}", hint)
