"""The report of an evaluation: its metrics, and the score by which two evaluations are ranked."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from vitreous.tasks.metrics import METRICS, get_metric_label

MAX_MATRIX_CLASSES = 2000  # maximum number of classes for a full confusion matrix

MetricDirection = Literal["higher", "lower"]
TIE_BREAKER = "nll"  # metric that ranks evaluations with equal primary metrics; lower is better


@dataclass(frozen=True)
class Report:
    """The result of an evaluation; `summary` is its content for output and files.

    - `images`, `unreadable`: the number of evaluated images, and of those that could not be read.
    - `metrics`, `intervals`: metrics and 95 % intervals by key.
    - `per_class`: one row per class.
    - `confusion_cells`: (m, 3) int64 of label, prediction, count; None for multi-label data and objects.
    - `primary`, `better`: key and direction of the primary metric, by which evaluations are compared. If it is equal,
      the NLL decides.
    - `details`: further JSON values by key.
    """

    images: int
    unreadable: int
    metrics: dict[str, float | None]
    intervals: dict[str, tuple[float, float] | None]
    per_class: list[dict[str, Any]]
    confusion_cells: np.ndarray | None
    primary: str = "top1"
    better: MetricDirection = "higher"
    details: dict[str, Any] = field(default_factory=dict[str, Any])

    @property
    def multilabel(self) -> bool:
        """Whether images have several labels; also true for tasks without a confusion matrix."""
        return self.confusion_cells is None

    @property
    def confusion(self) -> np.ndarray | None:
        """The confusion matrix (K, K) int64, with labels as rows. None for multi-label data, or for more than
        `MAX_MATRIX_CLASSES` classes."""
        if self.confusion_cells is None or len(self.per_class) > MAX_MATRIX_CLASSES:
            return None
        matrix = np.zeros((len(self.per_class),) * 2, np.int64)
        matrix[self.confusion_cells[:, 0], self.confusion_cells[:, 1]] = self.confusion_cells[:, 2]
        return matrix

    @property
    def headline(self) -> tuple[str, float]:
        """Label and value of the primary metric; the value is 0 if nothing was evaluated."""
        return get_metric_label(self.primary), self.metrics[self.primary] or 0.0

    @property
    def headline_text(self) -> str:
        """The primary metric as text for a progress line, such as `top-1 93.1%` or `RankMe 27.4`."""
        name, value = self.headline
        return f"{name} {value:{METRICS[self.primary].short_form if self.primary in METRICS else '.1%'}}"

    @property
    def score(self) -> tuple[float, float]:
        """A sort key: the better of two evaluations has the larger score."""
        return get_report_score(self.metrics | {"primary": self.primary, "better": self.better})

    @property
    def interval_lists(self) -> dict[str, list[float] | None]:
        """The intervals as lists by key, as files store them."""
        return {name: None if interval is None else list(interval) for name, interval in self.intervals.items()}

    def summary(self) -> dict[str, Any]:
        """Return the content of the report for output and files: metrics, number of images, 95 % intervals, and the
        primary metric with its direction."""
        return {
            **self.metrics,
            "images": self.images,
            "unreadable": self.unreadable,
            "interval": self.interval_lists,
            "primary": self.primary,
            "better": self.better,
        }


def get_primary_key(summary: Mapping[str, Any]) -> str:
    """Return the key of the primary metric of a `Report.summary`. If the summary does not contain it, mAP or top-1 is
    inferred."""
    return summary.get("primary") or ("map" if summary.get("map") is not None else "top1")


def get_report_score(summary: Mapping[str, Any]) -> tuple[float, float]:
    """Return the score of a `Report.summary`: the primary metric, negated if lower is better, and the negated NLL.

    A missing or non-finite metric is worse than any other value.
    """
    sign = -1.0 if summary.get("better") == "lower" else 1.0
    pairs = ((get_primary_key(summary), sign), (TIE_BREAKER, -1.0))
    values = [(summary.get(name), sign) for name, sign in pairs]
    leading_score, tie_score = (
        -math.inf if value is None or not math.isfinite(value) else sign * value for value, sign in values
    )
    return leading_score, tie_score
