"""How far probabilities can be believed: calibration error, temperature, and what abstaining gains.

In shapes, n is images, K classes, D draws of the bootstrap. Labels are (n,), one an image and a softmax over the
classes, or (n, K) in {0, 1} and a sigmoid for each.

**Calibration error** (ECE, arXiv:1706.04599). The figure is an average of absolute values, so chance alone makes it
larger: a perfectly calibrated model has an ECE above 0 on any finite set of images (arXiv:2012.08668). Images drawn
with replacement add the same bias once more, so percentiles of a plain bootstrap lie too high, sometimes wholly above
the figure. The interval here is of the error that infinitely many images would show.

Write g_b for the mean over all images of (right - confidence) in bin b, m_b for its expectation, T = sum |g_b| for the
figure and t = sum |m_b| for what it estimates. Then, for each bin, by the triangle inequality,

    sign(m_b) (g_b - m_b)  <=  |g_b| - |m_b|  <=  |g_b - m_b|

The left side has mean 0; the right side is reached by a calibrated bin. The bootstrap gives the distribution of both,
with draws g* - g in the place of g - m: S* = sum sign(g_b) (g*_b - g_b), and E*, the right side for bins whose g_b is
within sqrt(ln n) standard errors of 0 and the left side for the others, which cannot be calibrated (the rule is Andrews
and Soares', Econometrica 78, 2010). The interval is [T - q97.5(E*), T - q2.5(S*)]; it contains T. In simulations (300
sets of 60 to 180 images, 200 draws; the worlds of `tests/evaluation/test_calibration.py`) it held the true error of a
calibrated model in 93 to 94 % of the sets, of others in 98 % and more: where some bins are calibrated and some are not,
it is wider than it need be. Percentiles of the plain bootstrap held the error of a calibrated model in none.

**Temperature** (arXiv:1706.04599). One number for all logits, fitted by likelihood: logits divided by T > 1 give softer
probabilities, T < 1 sharper ones; their order stays, so no top-1 answer changes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import scipy

from vitreous.errors import DataError, UsageError
from vitreous.tasks.intervals import Interval, wilson_interval

MULTILABEL_THRESHOLD = 0.5  # probability above which a class of a multi-label model is predicted


def log_softmax(logits: np.ndarray) -> np.ndarray:
    """(n, K) logits -> (n, K) float64 log-probabilities."""
    return scipy.special.log_softmax(logits.astype(np.float64), axis=1)


def compute_probabilities(logits: np.ndarray, loss: str = "softmax") -> np.ndarray:
    """(n, K) logits -> (n, K) float64: softmax over the classes for the softmax loss, else a sigmoid for each."""
    return np.exp(log_softmax(logits)) if loss == "softmax" else scipy.special.expit(logits.astype(np.float64))


def check_abstain(below: float | None) -> None:
    """Raise UsageError for a limit that is not above 0 and at most 1; None is no limit."""
    if below is not None and not 0 < below <= 1:
        hint = "0.8 answers where the highest probability is 0.8"
        raise UsageError(f"--abstain must be above 0 and at most 1, not {below}", hint)


CALIBRATION_BINS = 15
MIN_TEMPERATURE, MAX_TEMPERATURE = 1e-3, 1e3  # temperatures between which the best one is searched
UNCHANGED_MODEL_HINT = "the model stays as it is; more images, or harder ones, would tell its temperature"
RISK_CURVE_POINTS = 100  # of the risk-coverage curve in a document


def compute_image_nll(logits: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """(n, K) logits -> (n,) negative log-likelihoods in nats, summed over classes for labels (n, K)."""
    if labels.ndim == 2:
        return (np.logaddexp(0, logits.astype(np.float64)) - (labels > 0) * logits).sum(1)
    return -log_softmax(logits)[np.arange(len(labels)), labels]


def confidence_bins(confidence: np.ndarray) -> np.ndarray:
    """(n,) probabilities -> (n,) bins of the calibration error, of equal width."""
    return np.minimum((confidence * CALIBRATION_BINS).astype(int), CALIBRATION_BINS - 1)


def expected_calibration_error(confidence: np.ndarray, right: np.ndarray) -> float:
    """Return the expected calibration error of (n,) confidences and (n,) bool `right`, n > 0."""
    gaps = np.bincount(confidence_bins(confidence), weights=right - confidence, minlength=CALIBRATION_BINS)
    return float(np.abs(gaps).sum() / len(confidence))


def compute_image_gaps(confidence: np.ndarray, right: np.ndarray) -> np.ndarray:
    """(n,) confidences and (n,) bool `right` -> (n, BINS): right - confidence in the column of the image's bin."""
    gaps = np.zeros((len(confidence), CALIBRATION_BINS))
    gaps[np.arange(len(confidence)), confidence_bins(confidence)] = right - confidence
    return gaps


@dataclass(frozen=True)
class CalibrationGaps:
    """The means g of one set of images, (BINS,), and whether each is too far from 0 for a calibrated bin."""

    values: np.ndarray
    uncalibrated: np.ndarray

    @classmethod
    def of_images(cls, gaps: np.ndarray) -> CalibrationGaps:
        """(n, BINS) `compute_image_gaps`, n > 0 -> their means.

        The standard error of a bin is at least that of a calibrated one, the root of sum c (1 - c) / n^2 with |gap| in
        the place of c: a bin whose few images are all right would have hardly any.
        """
        values, count, away = gaps.mean(0), len(gaps), np.abs(gaps)
        errors = np.sqrt(np.maximum(gaps.var(0), (away * (1 - away)).mean(0)) / count)
        return cls(values, np.abs(values) > math.sqrt(math.log(count)) * errors)

    def errors(self, draws: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(D, BINS) gaps of bootstrap draws -> least and greatest excess of each bin's |g|, (D, BINS) each."""
        moved = draws - self.values
        signed = moved * np.where(self.values < 0, -1, 1)
        return signed, np.where(self.uncalibrated, signed, np.abs(moved))

    def interval(self, draws: np.ndarray) -> Interval:
        """Return the 95 % interval of the calibration error from (D, BINS) gaps of bootstrap draws; it contains the
        figure."""
        least, most = (error.sum(1) for error in self.errors(draws))
        figure, high, low = float(np.abs(self.values).sum()), np.percentile(most, 97.5), np.percentile(least, 2.5)
        return max(0.0, figure - max(0.0, float(high))), figure - min(0.0, float(low))


def bound_difference_errors(
    first: CalibrationGaps, second: CalibrationGaps, before: np.ndarray, after: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return least and greatest excess of the second model's calibration error less the first's, (D,) each.

    `before` and `after` (D, BINS) are the gaps of the two models in the same draws. Each bin's error is bounded by
    those of both models and, with d = g_second - g_first, by 2 |d| + |d* - d|, since ||g_second| - |g_first|| <= |d|:
    the same model twice has no error.
    """
    (least_before, most_before), (least_after, most_after) = first.errors(before), second.errors(after)
    apart = second.values - first.values
    cap = 2 * np.abs(apart) + np.abs(after - before - apart)
    return np.maximum(least_after - most_before, -cap).sum(1), np.minimum(most_after - least_before, cap).sum(1)


def fit_temperature(logits: np.ndarray, labels: np.ndarray) -> float:
    """Return the temperature, 0.001 to 1000, of the least mean NLL of (n, K) logits and (n,) or (n, K) labels.

    The NLL is convex in 1 / T, so its slope there, the mean of sum_k p_k z_k - z_label, has one zero. Raises DataError
    where it has none: all images are answered right, or the answers are no better than chance.
    """
    scores = logits.astype(np.float64)
    if labels.ndim == 1:
        scores -= scores.mean(1, keepdims=True)  # changes no probability, and keeps digits of their spread
    target = ((labels > 0) * scores).sum(1) if labels.ndim == 2 else scores[np.arange(len(labels)), labels]
    loss = "softmax" if labels.ndim == 1 else "sigmoid"

    def slope(log_inverse: float) -> float:
        """The slope at ln(1 / T)."""
        inverse = math.exp(log_inverse)
        return float(((compute_probabilities(inverse * scores, loss) * scores).sum(1) - target).mean())

    low, high = math.log(1 / MAX_TEMPERATURE), math.log(1 / MIN_TEMPERATURE)
    if slope(high) <= 0:
        problem = "the sharper the probabilities, the better they fit"
        raise DataError(f"{problem}: the {len(labels)} images are all answered right", UNCHANGED_MODEL_HINT)
    if slope(low) >= 0:
        problem = f"the answers to the {len(labels)} images are no better than chance"
        raise DataError(f"{problem}: no temperature mends that", UNCHANGED_MODEL_HINT)
    return math.exp(-scipy.optimize.brentq(slope, low, high, xtol=1e-13))


def evaluate_abstention(confidence: np.ndarray, right: np.ndarray, below: float) -> dict[str, Any]:
    """Return the figures of a model that answers from a confidence on.

    (n,) confidence, 0 for an unreadable image; (n,) bool `right`. `coverage` is the share of images answered, `top1`
    the accuracy on them (None for none) with its 95 % interval, `aurc` the area under the risk-coverage curve
    (arXiv:1705.08500), and `curve` some of its points (coverage, share wrong).
    """
    answered = confidence >= below
    count, hits = int(answered.sum()), int((answered & right).sum())
    risks = selective_risk(confidence, right)
    places = np.unique(np.linspace(0, len(risks) - 1, min(RISK_CURVE_POINTS, len(risks))).astype(int))
    return {
        "below": below,
        "answered": count,
        "unsure": len(confidence) - count,
        "coverage": count / len(confidence),
        "top1": hits / count if count else None,
        "interval": list(wilson_interval(hits, count)) if count else None,
        "aurc": float(risks.mean()),
        "curve": [[(place + 1) / len(risks), float(risks[place])] for place in places],
    }


def selective_risk(confidence: np.ndarray, right: np.ndarray) -> np.ndarray:
    """Return (n,): the share of wrong answers among the i + 1 most confident images; equal confidences share theirs."""
    order = np.argsort(-confidence, kind="stable")
    _, group, size = np.unique(-confidence[order], return_inverse=True, return_counts=True)
    wrong = np.bincount(group, weights=~right[order]) / size
    return np.cumsum(wrong[group]) / np.arange(1, len(order) + 1)
