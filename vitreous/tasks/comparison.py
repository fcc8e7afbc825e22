"""Differences between two models on the same images, the second's figure less the first's, and their significance.

In shapes, n is images, K classes, D draws of the bootstrap.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from vitreous.tasks.calibration import BINS, Gaps, difference_errors, image_gaps, log_softmax, losses
from vitreous.tasks.intervals import DRAWS, Figures, Interval, bootstrap, mcnemar, paired_interval
from vitreous.tasks.intervals import percentile_interval as percentiles
from vitreous.tasks.metrics import METRICS, label_metric
from vitreous.tasks.multilabel_metrics import MeanAveragePrecision, draw_count

LEVEL = 0.05  # p-values below it are significant


@dataclass(frozen=True)
class Answers:
    """A model's outputs for n images: logits or values (n, K), labels (n,) or (n, K) in the order of its outputs,
    readable (n,) bool."""

    logits: np.ndarray
    labels: np.ndarray
    readable: np.ndarray

    @property
    def right(self) -> np.ndarray:
        """(n,) bool: the image is readable, and the first of the highest logits is the label's."""
        return self.readable & (self.logits.argmax(1) == self.labels)


@dataclass(frozen=True)
class Comparison:
    """The metrics of two models on the same images: `figures` has each model's, by key. `counts` and `p` are of
    McNemar's test, which needs one label an image; `details` are further entries of the document."""

    figure: str  # the leading one
    figures: dict[str, tuple[float | None, float | None]]
    differences: dict[str, float | None]
    intervals: dict[str, Interval | None]
    counts: dict[str, int] | None = None
    p: float | None = None
    details: dict[str, Any] = field(default_factory=dict[str, Any])

    @property
    def significant(self) -> bool:
        """Whether one model is better beyond chance: by McNemar's test or, without it, by the interval."""
        if self.p is not None:
            return self.p < LEVEL
        ends = self.intervals[self.figure]
        return ends is not None and (ends[0] > 0 or ends[1] < 0)

    def verdict(self, first: str, second: str) -> str:
        """Return one sentence for people; `first` and `second` are the models' names."""
        name = label_metric(self.figure)
        difference, ends = self.differences[self.figure], self.intervals[self.figure]
        if difference is None:
            return f"no difference can be told: {name} is not defined for both on these images"
        better, sign = (second, 1) if difference >= 0 else (first, -1)
        tests = []
        if ends:
            low, high = (self.format_amount(end) for end in sorted(sign * end for end in ends))
            tests = [f"95 % interval {low} to {high}"]
        tests += [f"McNemar p {format_p(self.p)}"] if self.p is not None else []
        points = "points of " if METRICS[self.figure].is_share else ""
        amount = f"{self.format_amount(abs(difference))} {points}{name} ({', '.join(tests)})"
        if self.significant:
            return f"{better} is better by {amount}"
        ahead = f"{better} is ahead by {amount}" if difference else f"both have the same {name} ({', '.join(tests)})"
        return f"no difference can be told: {ahead}"

    def format_amount(self, value: float) -> str:
        """Format a difference of the leading metric: in points where it is a share."""
        metric = METRICS[self.figure]
        return f"{100 * value:.1f}" if metric.is_share else format(value, metric.form)


def compare_classifiers(first: Answers, second: Answers) -> Comparison:
    """Compare two classifiers on the same images in the same order, with intervals and tests of the differences.

    Accuracies: McNemar's exact test, and an interval of their difference. mAP, NLL: percentile intervals over the same
    bootstrap draws for both; ECE: from the same draws, with bounds of its bias. An unreadable image is wrong (or never
    retrieved); NLL and ECE are of the images that both could read. Intervals cover 95 %. Labels of both are (n,), or
    both (n, K) in one order of the classes.
    """
    both, multilabel = first.readable & second.readable, first.labels.ndim == 2
    parts = [soft_figures(answers, both) for answers in (first, second)]
    once = np.ones((len(both), 1), np.float32)
    before, after = ({name: float(value[0]) for name, value in part(once).items()} for part in parts)
    figures: dict[str, tuple[float | None, float | None]] = {name: (before[name], after[name]) for name in before}
    differences: dict[str, float | None] = {name: after[name] - before[name] for name in before}
    intervals: dict[str, Interval | None] = dict.fromkeys(before)
    if both.sum() > 1:
        intervals |= difference_intervals(parts, first, second, both, differences)
    for name in before:
        if name != "map" and not both.any():
            figures[name], differences[name], intervals[name] = (None, None), None, None
    if multilabel:
        return Comparison("map", figures, differences=differences, intervals=intervals)
    right, also = first.right, second.right
    cells = {"both": right & also, "only_a": right & ~also, "only_b": ~right & also, "neither": ~right & ~also}
    counts = {name: int(part.sum()) for name, part in cells.items()}
    gained, lost = counts["only_b"], counts["only_a"]
    return Comparison(
        "top1",
        {"top1": (float(right.mean()), float(also.mean())), **figures},
        differences={"top1": (gained - lost) / len(right), **differences},
        intervals={"top1": paired_interval(gained, lost, len(right)), **intervals},
        counts=counts,
        p=mcnemar(lost, gained),
    )


def difference_intervals(
    parts: list[Figures], first: Answers, second: Answers, both: np.ndarray, differences: dict[str, float | None]
) -> dict[str, Interval | None]:
    """Return bootstrap intervals of differences; `parts` are `soft_figures` of both models, `both` (n,) bool."""
    multilabel = first.labels.ndim == 2
    gaps = [] if multilabel else [bin_gaps(answers, both) for answers in (first, second)]
    measured = [Gaps.of_images(part[both]) for part in gaps]

    def values(counts: np.ndarray) -> dict[str, np.ndarray]:
        """(n, D) how often each image is drawn -> differences, and what the ECE's is too high by, (D,) each."""
        before, after = (part(counts) for part in parts)
        draws = {name: after[name] - before[name] for name in before}
        if not multilabel:
            drawn = np.maximum(both @ counts, 1)
            first_draws, second_draws = ((part.T @ counts / drawn).T for part in gaps)
            errors = difference_errors(measured[0], measured[1], first_draws, second_draws)
            draws["least"], draws["most"] = errors
        return draws

    draws = bootstrap(values, len(both), draw_count(first.logits.size) if multilabel else DRAWS)
    intervals: dict[str, Interval | None] = {name: percentiles(draw) for name, draw in draws.items()}
    least, most, ece = intervals.pop("least", None), intervals.pop("most", None), differences.get("ece")
    if least and most and ece is not None:
        intervals["ece"] = ece - max(0.0, most[1]), ece - min(0.0, least[0])
    return intervals


def soft_figures(answers: Answers, both: np.ndarray) -> Figures:
    """Return a function of draw counts (n, D): a model's bootstrapped figures, (D,) each.

    One label an image: NLL and ECE over the images that `both` (n,) models could read; multilabel: mAP over all, NLL
    over those.
    """
    rows, loss = np.flatnonzero(both), np.zeros(len(both))
    loss[rows] = losses(answers.logits[rows], answers.labels[rows])
    if answers.labels.ndim == 2:
        scores = np.where(answers.readable[:, None], answers.logits, -np.inf)
        mean_ap = MeanAveragePrecision(scores, answers.labels > 0)
        return lambda counts: {"map": mean_ap(counts), "nll": loss @ counts / np.maximum(both @ counts, 1)}
    gaps = bin_gaps(answers, both)

    def figures(counts: np.ndarray) -> dict[str, np.ndarray]:
        drawn = np.maximum(both @ counts, 1)
        return {"nll": loss @ counts / drawn, "ece": np.abs(gaps.T @ counts).sum(0) / drawn}

    return figures


def bin_gaps(answers: Answers, both: np.ndarray) -> np.ndarray:
    """Return `image_gaps` (n, BINS) with zeros for images not in `both` (n,)."""
    gaps, rows = np.zeros((len(both), BINS)), np.flatnonzero(both)
    gaps[rows] = image_gaps(np.exp(log_softmax(answers.logits[rows]).max(1)), answers.right[rows])
    return gaps


def format_p(p: float) -> str:
    """Format a p-value: `= 0.012`, `< 0.0001`."""
    return "< 0.0001" if p < 1e-4 else f"= {p:.2g}" if p < 0.995 else "= 1"
