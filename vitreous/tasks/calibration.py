"""Calibration of probabilities: calibration error, temperature scaling, and selective prediction (abstention).

In shapes, n is images, K classes, D draws of the bootstrap. Labels are (n,), single-label with a softmax over the
classes, or (n, K) in {0, 1}, multi-label with one sigmoid per class.

**Calibration error** (ECE, arXiv:1706.04599). The ECE is an average of absolute values, so chance alone increases it:
a perfectly calibrated model has an ECE above 0 on any finite set of images (arXiv:2012.08668). Resampling with
replacement adds the same bias once more. Percentiles of a plain bootstrap are therefore too high, sometimes entirely
above the ECE itself. The interval here is for the error on infinitely many images.

Let g_b be the mean over all images of (right - confidence) in bin b, and m_b its expectation. The ECE is T = sum |g_b|
and estimates t = sum |m_b|. By the triangle inequality, for each bin,

    sign(m_b) (g_b - m_b)  <=  |g_b| - |m_b|  <=  |g_b - m_b|

The left side has mean 0; a calibrated bin attains the right side. The bootstrap gives the distribution of both sides,
with draws g* - g replacing g - m. S* = sum sign(g_b) (g*_b - g_b) is the left side. E* uses the right side for bins
whose g_b is within sqrt(ln n) standard errors of 0, and the left side for the other bins, which are not calibrated (the
rule is Andrews and Soares', Econometrica 78, 2010). The interval is [T - q97.5(E*), T - q2.5(S*)]; it contains T. In
simulations (300 sets of 60 to 180 images, 200 draws; the models of `tests/evaluation/test_calibration.py`) it covered
the true error of a calibrated model in 93-94 % of the sets, and of uncalibrated models in at least 98 %. If only some
bins are calibrated, it is wider than necessary. Percentiles of the plain bootstrap never covered the error of a
calibrated model.

**Temperature** (arXiv:1706.04599). One scalar for all logits, fitted by maximum likelihood: dividing by T > 1 gives
softer probabilities, T < 1 sharper ones. The order of the logits does not change, nor does the top-1 prediction.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import scipy

from vitreous.errors import DataError, UsageError
from vitreous.tasks.intervals import Interval, wilson_interval

MULTILABEL_THRESHOLD = 0.5  # a multi-label model predicts the classes above this probability


def log_softmax(logits: np.ndarray) -> np.ndarray:
    """Compute (n, K) float64 log-probabilities of (n, K) logits."""
    return scipy.special.log_softmax(logits.astype(np.float64), axis=1)


def compute_probabilities(logits: np.ndarray, loss: str = "softmax") -> np.ndarray:
    """Compute (n, K) float64 probabilities of (n, K) logits: softmax for the softmax loss, else one sigmoid per
    class."""
    return np.exp(log_softmax(logits)) if loss == "softmax" else scipy.special.expit(logits.astype(np.float64))


def check_abstain(threshold: float | None) -> None:
    """Raise UsageError for a confidence limit outside (0, 1]; None means no limit."""
    if threshold is not None and not 0 < threshold <= 1:
        hint = "for example 0.8: predictions with a lower confidence are rejected"
        raise UsageError(f"--abstain must be above 0 and at most 1, not {threshold}", hint)


CALIBRATION_BINS = 15
MIN_TEMPERATURE, MAX_TEMPERATURE = 1e-3, 1e3  # search range of the temperature
UNCHANGED_MODEL_HINT = "use more images, or harder ones; the model was not changed"
RISK_CURVE_POINTS = 100  # points of the risk-coverage curve in a document


def compute_image_nll(logits: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """Compute the negative log-likelihood (n,) of each image in nats; labels (n, K) are summed over classes."""
    if labels.ndim == 2:
        return (np.logaddexp(0, logits.astype(np.float64)) - (labels > 0) * logits).sum(1)
    return -log_softmax(logits)[np.arange(len(labels)), labels]


def confidence_bins(confidence: np.ndarray) -> np.ndarray:
    """Assign (n,) probabilities to the equal-width bins of the calibration error."""
    return np.minimum((confidence * CALIBRATION_BINS).astype(int), CALIBRATION_BINS - 1)


def expected_calibration_error(confidence: np.ndarray, correct: np.ndarray) -> float:
    """Return the expected calibration error of (n,) confidences and (n,) bool `correct` (correct), n > 0."""
    gaps = np.bincount(confidence_bins(confidence), weights=correct - confidence, minlength=CALIBRATION_BINS)
    return float(np.abs(gaps).sum() / len(confidence))


def compute_image_gaps(confidence: np.ndarray, correct: np.ndarray) -> np.ndarray:
    """Compute (n, BINS) gaps: right - confidence in the column of the image's bin, from (n,) confidences and bools."""
    gaps = np.zeros((len(confidence), CALIBRATION_BINS))
    gaps[np.arange(len(confidence)), confidence_bins(confidence)] = correct - confidence
    return gaps


@dataclass(frozen=True)
class CalibrationGaps:
    """The mean gaps g of one set of images, (BINS,), and whether each bin is too far from 0 to be calibrated."""

    values: np.ndarray
    uncalibrated: np.ndarray

    @classmethod
    def of_images(cls, gaps: np.ndarray) -> CalibrationGaps:
        """Compute the mean gaps from (n, BINS) `compute_image_gaps`, n > 0.

        The standard error of a bin is at least that of a calibrated bin, sqrt(sum c (1 - c)) / n with |gap| for c.
        Otherwise a bin with few images, all correct, would have a standard error near 0.
        """
        values, count, abs_gaps = gaps.mean(0), len(gaps), np.abs(gaps)
        std_errors = np.sqrt(np.maximum(gaps.var(0), (abs_gaps * (1 - abs_gaps)).mean(0)) / count)
        return cls(values, np.abs(values) > math.sqrt(math.log(count)) * std_errors)

    def compute_excess_bounds(self, draws: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the lower and the upper bound of the excess of each bin's |g|, from (D, BINS) gaps of bootstrap
        draws."""
        deviations = draws - self.values
        signed_deviations = deviations * np.where(self.values < 0, -1, 1)
        return signed_deviations, np.where(self.uncalibrated, signed_deviations, np.abs(deviations))

    def interval(self, draws: np.ndarray) -> Interval:
        """Return the 95 % interval of the calibration error from (D, BINS) gaps of bootstrap draws; it contains the
        estimate."""
        lower_excess, upper_excess = (error.sum(1) for error in self.compute_excess_bounds(draws))
        ece, high, low = (
            float(np.abs(self.values).sum()),
            np.percentile(upper_excess, 97.5),
            np.percentile(lower_excess, 2.5),
        )
        return max(0.0, ece - max(0.0, float(high))), ece - min(0.0, float(low))


def bound_difference_errors(
    gaps_a: CalibrationGaps, gaps_b: CalibrationGaps, draws_a: np.ndarray, draws_b: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Bound the excess of the difference in calibration error, second minus first: lower and upper bound, (D,) each.

    `draws_a` and `draws_b` (D, BINS) are the gaps of the two models in the same draws. Let d = g_second - g_first. Each
    bin's error is bounded by the errors of both models, and by 2 |d| + |d* - d| as ||g_second| - |g_first|| <= |d|.
    For two identical models the bound is 0.
    """
    (lower_a, upper_a), (lower_b, upper_b) = (
        gaps_a.compute_excess_bounds(draws_a),
        gaps_b.compute_excess_bounds(draws_b),
    )
    mean_difference = gaps_b.values - gaps_a.values
    cap = 2 * np.abs(mean_difference) + np.abs(draws_b - draws_a - mean_difference)
    return np.maximum(lower_b - upper_a, -cap).sum(1), np.minimum(upper_b - lower_a, cap).sum(1)


def fit_temperature(logits: np.ndarray, labels: np.ndarray) -> float:
    """Fit the temperature, 0.001 to 1000, that minimises the mean NLL of (n, K) logits and (n,) or (n, K) labels.

    The NLL is convex in 1 / T, so its slope, the mean of sum_k p_k z_k - z_label, has one zero. Raises DataError if it
    has none: all images are predicted correctly, or the predictions are no better than chance.
    """
    scores = logits.astype(np.float64)
    if labels.ndim == 1:
        scores -= scores.mean(1, keepdims=True)  # keeps all probabilities, and preserves precision of large logits
    target = ((labels > 0) * scores).sum(1) if labels.ndim == 2 else scores[np.arange(len(labels)), labels]
    loss = "softmax" if labels.ndim == 1 else "sigmoid"

    def compute_nll_slope(log_inverse: float) -> float:
        """Return the slope of the NLL at ln(1 / T)."""
        inverse = math.exp(log_inverse)
        return float(((compute_probabilities(inverse * scores, loss) * scores).sum(1) - target).mean())

    low, high = math.log(1 / MAX_TEMPERATURE), math.log(1 / MIN_TEMPERATURE)
    if compute_nll_slope(high) <= 0:
        problem = "cannot fit a temperature"
        raise DataError(f"{problem}: all {len(labels)} images are predicted correctly", UNCHANGED_MODEL_HINT)
    if compute_nll_slope(low) >= 0:
        problem = f"the predictions for the {len(labels)} images are no better than chance"
        raise DataError(f"cannot fit a temperature: {problem}", UNCHANGED_MODEL_HINT)
    return math.exp(-scipy.optimize.brentq(compute_nll_slope, low, high, xtol=1e-13))


def evaluate_abstention(confidence: np.ndarray, correct: np.ndarray, threshold: float) -> dict[str, Any]:
    """Compute coverage and accuracy of a model that rejects predictions below a confidence.

    (n,) confidence, 0 for an unreadable image; (n,) bool `correct`. `coverage` is the share of accepted images, and
    `top1` their accuracy (None if there are none) with its 95 % interval. `aurc` is the area under the risk-coverage
    curve (arXiv:1705.08500), and `curve` some of its points (coverage, error rate).
    """
    accepted = confidence >= threshold
    count, hits = int(accepted.sum()), int((accepted & correct).sum())
    risks = selective_risk(confidence, correct)
    curve_indices = np.unique(np.linspace(0, len(risks) - 1, min(RISK_CURVE_POINTS, len(risks))).astype(int))
    return {
        "threshold": threshold,
        "accepted": count,
        "rejected": len(confidence) - count,
        "coverage": count / len(confidence),
        "top1": hits / count if count else None,
        "interval": list(wilson_interval(hits, count)) if count else None,
        "aurc": float(risks.mean()),
        "curve": [[(index + 1) / len(risks), float(risks[index])] for index in curve_indices],
    }


def selective_risk(confidence: np.ndarray, correct: np.ndarray) -> np.ndarray:
    """Return the error rate (n,) of the i + 1 most confident images; images of equal confidence share theirs."""
    order = np.argsort(-confidence, kind="stable")
    _, group, size = np.unique(-confidence[order], return_inverse=True, return_counts=True)
    wrong = np.bincount(group, weights=~correct[order]) / size
    return np.cumsum(wrong[group]) / np.arange(1, len(order) + 1)
