"""Compare two models on the same images: differences, second minus first, and their significance.

In shapes, n is images, K classes, BINS confidence bins, D draws of the bootstrap.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from vitreous.tasks.calibration import (
    CALIBRATION_BINS,
    CalibrationGaps,
    bound_difference_errors,
    compute_image_gaps,
    compute_image_nll,
    log_softmax,
)
from vitreous.tasks.intervals import (
    DEFAULT_BOOTSTRAP_DRAWS,
    Interval,
    MetricFunction,
    bootstrap_metrics,
    mcnemar_p_value,
    paired_accuracy_interval,
)
from vitreous.tasks.intervals import percentile_interval as percentiles
from vitreous.tasks.metrics import METRICS, get_metric_label
from vitreous.tasks.multilabel_metrics import MeanAveragePrecision, choose_multilabel_draws

SIGNIFICANCE_LEVEL = 0.05  # p-values below it are significant


@dataclass(frozen=True)
class ModelOutputs:
    """The outputs of a model for n images: `logits` (n, K) or values of a regression, `labels` (n,) or (n, K) in the
    order of its outputs, and `readable` (n,) bool."""

    logits: np.ndarray
    labels: np.ndarray
    readable: np.ndarray

    @property
    def is_correct(self) -> np.ndarray:
        """Whether each image is predicted correctly, (n,) bool: it is readable, and its highest logit (the first of
        equal ones) is the label's."""
        return self.readable & (self.logits.argmax(1) == self.labels)


@dataclass(frozen=True)
class Comparison:
    """The comparison of two models on the same images.

    `metrics` has both values of each metric, by key; `differences` and `intervals` are second minus first. `counts` and
    `p` belong to McNemar's test, for single-label data. `details` are further entries of the evaluation document.
    """

    primary: str  # key of the primary metric
    metrics: dict[str, tuple[float | None, float | None]]
    differences: dict[str, float | None]
    intervals: dict[str, Interval | None]
    counts: dict[str, int] | None = None
    p: float | None = None
    details: dict[str, Any] = field(default_factory=dict[str, Any])

    @property
    def significant(self) -> bool:
        """Whether the difference of the primary metric is significant: by McNemar's test or, if there is none, because
        the interval excludes 0."""
        if self.p is not None:
            return self.p < SIGNIFICANCE_LEVEL
        ends = self.intervals[self.primary]
        return ends is not None and (ends[0] > 0 or ends[1] < 0)

    def verdict(self, name_a: str, name_b: str) -> str:
        """Describe the result in one sentence; `name_a` and `name_b` are the names of the models."""
        name = get_metric_label(self.primary)
        difference, ends = self.differences[self.primary], self.intervals[self.primary]
        if difference is None:
            return f"cannot compare: {name} is not defined for both models on these images"
        better, sign = (name_b, 1) if difference >= 0 else (name_a, -1)
        tests = []
        if ends:
            low, high = (self.format_amount(end) for end in sorted(sign * end for end in ends))
            tests = [f"95 % interval {low} to {high}"]
        tests += [f"McNemar p {format_p_value(self.p)}"] if self.p is not None else []
        points = "points of " if METRICS[self.primary].is_share else ""
        difference_text = f"{self.format_amount(abs(difference))} {points}{name} ({', '.join(tests)})"
        if self.significant:
            return f"{better} is better by {difference_text}"
        ahead = (
            f"{better} is ahead by {difference_text}"
            if difference
            else f"both have the same {name} ({', '.join(tests)})"
        )
        return f"no significant difference: {ahead}"

    def format_amount(self, value: float) -> str:
        """Format a difference of the primary metric, in percentage points if it is a share."""
        metric = METRICS[self.primary]
        return f"{100 * value:.1f}" if metric.is_share else format(value, metric.format_spec)


def compare_classifiers(outputs_a: ModelOutputs, outputs_b: ModelOutputs) -> Comparison:
    """Compare two classifiers on the same images in the same order, with intervals and tests of the differences.

    Accuracies have McNemar's exact test and an interval of the difference. mAP and NLL have percentile intervals over
    the same bootstrap draws for both models; ECE has an interval from the same draws with bounds of its bias. An
    unreadable image counts as wrong, and for mAP as never retrieved. NLL and ECE use the images that both models could
    read. Intervals cover 95 %. Both models have labels (n,), or (n, K) in the same order of classes.
    """
    both_readable, multilabel = outputs_a.readable & outputs_b.readable, outputs_a.labels.ndim == 2
    metric_functions = [make_probability_metrics(outputs, both_readable) for outputs in (outputs_a, outputs_b)]
    unit_counts = np.ones((len(both_readable), 1), np.float32)
    metrics_a, metrics_b = (
        {name: float(value[0]) for name, value in compute_metrics(unit_counts).items()}
        for compute_metrics in metric_functions
    )
    metrics: dict[str, tuple[float | None, float | None]] = {
        name: (metrics_a[name], metrics_b[name]) for name in metrics_a
    }
    differences: dict[str, float | None] = {name: metrics_b[name] - metrics_a[name] for name in metrics_a}
    intervals: dict[str, Interval | None] = dict.fromkeys(metrics_a)
    if both_readable.sum() > 1:
        intervals |= bootstrap_difference_intervals(metric_functions, outputs_a, outputs_b, both_readable, differences)
    for name in metrics_a:
        if name != "map" and not both_readable.any():
            metrics[name], differences[name], intervals[name] = (None, None), None, None
    if multilabel:
        return Comparison("map", metrics, differences=differences, intervals=intervals)
    correct_a, correct_b = outputs_a.is_correct, outputs_b.is_correct
    cells = {
        "both": correct_a & correct_b,
        "only_a": correct_a & ~correct_b,
        "only_b": ~correct_a & correct_b,
        "neither": ~correct_a & ~correct_b,
    }
    counts = {name: int(is_in_cell.sum()) for name, is_in_cell in cells.items()}
    gained, lost = counts["only_b"], counts["only_a"]
    return Comparison(
        "top1",
        {"top1": (float(correct_a.mean()), float(correct_b.mean())), **metrics},
        differences={"top1": (gained - lost) / len(correct_a), **differences},
        intervals={"top1": paired_accuracy_interval(gained, lost, len(correct_a)), **intervals},
        counts=counts,
        p=mcnemar_p_value(lost, gained),
    )


def bootstrap_difference_intervals(
    metric_functions: list[MetricFunction],
    outputs_a: ModelOutputs,
    outputs_b: ModelOutputs,
    both_readable: np.ndarray,
    differences: dict[str, float | None],
) -> dict[str, Interval | None]:
    """Return bootstrap intervals of the differences of metrics between two models.

    `metric_functions` are the functions of both models from `make_probability_metrics`. `both_readable` (n,) bool marks
    the images that both models could read. `differences` are the differences on all images.
    """
    multilabel = outputs_a.labels.ndim == 2
    gaps = (
        []
        if multilabel
        else [compute_paired_calibration_gaps(outputs, both_readable) for outputs in (outputs_a, outputs_b)]
    )
    mean_gaps = [CalibrationGaps.of_images(model_gaps[both_readable]) for model_gaps in gaps]

    def compute_differences(counts: np.ndarray) -> dict[str, np.ndarray]:
        """Compute the differences of metrics, and the bounds of the error of the ECE's difference, (D,) each, from draw
        counts (n, D)."""
        metrics_a, metrics_b = (compute_metrics(counts) for compute_metrics in metric_functions)
        draws = {name: metrics_b[name] - metrics_a[name] for name in metrics_a}
        if not multilabel:
            num_drawn = np.maximum(both_readable @ counts, 1)
            draws_a, draws_b = ((model_gaps.T @ counts / num_drawn).T for model_gaps in gaps)
            gaps_a, gaps_b = mean_gaps
            draws["ece_lower"], draws["ece_upper"] = bound_difference_errors(gaps_a, gaps_b, draws_a, draws_b)
        return draws

    draws = bootstrap_metrics(
        compute_differences,
        len(both_readable),
        choose_multilabel_draws(outputs_a.logits.size) if multilabel else DEFAULT_BOOTSTRAP_DRAWS,
    )
    intervals: dict[str, Interval | None] = {name: percentiles(draw) for name, draw in draws.items()}
    lower_excess, upper_excess = intervals.pop("ece_lower", None), intervals.pop("ece_upper", None)
    ece = differences.get("ece")
    if lower_excess and upper_excess and ece is not None:
        intervals["ece"] = ece - max(0.0, upper_excess[1]), ece - min(0.0, lower_excess[0])
    return intervals


def make_probability_metrics(outputs: ModelOutputs, both_readable: np.ndarray) -> MetricFunction:
    """Return a function that computes a model's metrics, (D,) each, from draw counts (n, D) of the bootstrap.

    Single-label models: NLL and ECE over the images that both models could read (`both_readable`, (n,) bool).
    Multi-label models: mAP over all images, and NLL over the images that both could read.
    """
    indices, loss = np.flatnonzero(both_readable), np.zeros(len(both_readable))
    loss[indices] = compute_image_nll(outputs.logits[indices], outputs.labels[indices])
    if outputs.labels.ndim == 2:
        scores = np.where(outputs.readable[:, None], outputs.logits, -np.inf)
        mean_ap = MeanAveragePrecision(scores, outputs.labels > 0)
        return lambda counts: {"map": mean_ap(counts), "nll": loss @ counts / np.maximum(both_readable @ counts, 1)}
    gaps = compute_paired_calibration_gaps(outputs, both_readable)

    def compute_nll_and_ece(counts: np.ndarray) -> dict[str, np.ndarray]:
        """Compute NLL and ECE, (D,) each, from draw counts (n, D)."""
        num_drawn = np.maximum(both_readable @ counts, 1)
        return {"nll": loss @ counts / num_drawn, "ece": np.abs(gaps.T @ counts).sum(0) / num_drawn}

    return compute_nll_and_ece


def compute_paired_calibration_gaps(outputs: ModelOutputs, both_readable: np.ndarray) -> np.ndarray:
    """Compute the calibration gaps of each image (n, BINS) (`compute_image_gaps`), with zeros for images that are not
    in `both_readable` (n,)."""
    gaps, indices = np.zeros((len(both_readable), CALIBRATION_BINS)), np.flatnonzero(both_readable)
    gaps[indices] = compute_image_gaps(np.exp(log_softmax(outputs.logits[indices]).max(1)), outputs.is_correct[indices])
    return gaps


def format_p_value(p: float) -> str:
    """Format a p-value as `= 0.012` or `< 0.0001`."""
    return "< 0.0001" if p < 1e-4 else f"= {p:.2g}" if p < 0.995 else "= 1"
