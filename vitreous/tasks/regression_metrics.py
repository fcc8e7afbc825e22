"""Metrics of values: R2, mean absolute error, root mean squared error, Spearman's correlation.

In shapes, n is images, T targets, D draws of the bootstrap. NaN stands for a label that is missing.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from vitreous.errors import NonFiniteError
from vitreous.tasks.intervals import DRAWS, FEWEST, Interval, bootstrap, percentile_interval
from vitreous.tasks.report import Report

METRICS = ("r2", "mae", "rmse", "spearman")
MANY = 20_000  # values from which the bootstrap draws a tenth as often
LEAST = 2  # values of a target from which R2 and Spearman's correlation are defined


def measure_errors(predicted: np.ndarray, labels: np.ndarray, targets: tuple[str, ...], readable: np.ndarray) -> Report:
    """(n, T) predictions and labels in the targets' units, (n,) bool readable -> metrics and 95 % intervals.

    Each target is measured on the readable images that have its label; `figures` are the means over the targets for
    which a metric is defined, as scikit-learn's uniform average. R2 and Spearman's correlation of a target with one
    value are not. Raises NonFiniteError for predictions that are not finite.
    """
    if not np.isfinite(predicted[readable]).all():
        raise NonFiniteError("the model's outputs are not finite", "use a lower --lr, or --precision fp32")
    draws, rows = dict[str, list[np.ndarray]](), list[dict[str, Any]]()
    for place, name in enumerate(targets):
        present = readable & ~np.isnan(labels[:, place])
        true, own = labels[present, place].astype(np.float64), predicted[present, place].astype(np.float64)
        figures = {key: values.item() for key, values in weigh_errors(true, own, np.ones((len(true), 1))).items()}
        drawn = draw_errors(true, own)
        row: dict[str, Any] = {"target": name, "images": len(true)}
        row |= {key: value if np.isfinite(value) else None for key, value in figures.items()}
        row["interval"] = {key: interval_of(drawn.get(key), row[key]) for key in METRICS}
        rows.append(row)
        for key in METRICS:
            if row[key] is not None and key in drawn:
                draws.setdefault(key, []).append(drawn[key])
    means = {key: mean_of([row[key] for row in rows]) for key in METRICS}
    intervals = {key: interval_of(np.mean(draws[key], 0) if key in draws else None, means[key]) for key in METRICS}
    return Report(
        len(labels),
        int((~readable).sum()),
        figures=means,
        intervals=intervals,
        per_class=[],
        cells=None,
        figure="r2",
        details={"targets": rows},
    )


def mean_of(values: list[float | None]) -> float | None:
    """The mean of the values that are defined; None without one."""
    defined = [value for value in values if value is not None]
    return float(np.mean(defined)) if defined else None


def interval_of(drawn: np.ndarray | None, value: float | None) -> Interval | None:
    """The interval of (D,) draws of a metric; None where it, or a draw, is not defined."""
    if drawn is None or value is None or not np.isfinite(drawn).any():
        return None
    return percentile_interval(drawn[np.isfinite(drawn)])


def draw_errors(true: np.ndarray, predicted: np.ndarray) -> dict[str, np.ndarray]:
    """(n,) labels and predictions -> (D,) bootstrap draws of each metric; none for fewer than two values."""
    if len(true) < LEAST:
        return {}
    count = DRAWS if len(true) < MANY else FEWEST
    return bootstrap(lambda counts: weigh_errors(true, predicted, counts), len(true), count)


def weigh_errors(true: np.ndarray, predicted: np.ndarray, counts: np.ndarray) -> dict[str, np.ndarray]:
    """(n,) labels and predictions, (n, D) how often each image is drawn -> (D,) of each metric, NaN where it is not
    defined.

    R2 = 1 - sum (y - p)^2 / sum (y - mean y)^2. Spearman's correlation is Pearson's of the ranks, of equal values the
    mean of theirs.
    """
    counts = counts.astype(np.float64)
    number = np.maximum(counts.sum(0), 1)
    if not len(true):
        return dict.fromkeys(METRICS, np.full(int(counts.shape[1]), np.nan))
    errors = predicted - true
    squares, mean = errors**2 @ counts, true @ counts / number
    centred = true - true.mean()  # sums of squares of large values would lose their digits
    spread = centred**2 @ counts - number * (mean - true.mean()) ** 2
    scale = (centred**2).max(initial=0.0)
    with np.errstate(divide="ignore", invalid="ignore"):
        r2 = np.where(spread > 1e-12 * number * scale, 1 - squares / spread, np.nan)
    return {
        "r2": r2,
        "mae": np.abs(errors) @ counts / number,
        "rmse": np.sqrt(squares / number),
        "spearman": correlate_ranks(true, predicted, counts),
    }


def correlate_ranks(true: np.ndarray, predicted: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """(n,) labels and predictions, (n, D) counts -> (D,) Spearman's correlations, NaN where a side has one rank."""
    a, b = rank_values(true, counts), rank_values(predicted, counts)
    number = np.maximum(counts.sum(0), 1)
    a, b = a - (a * counts).sum(0) / number, b - (b * counts).sum(0) / number
    covariance = (a * b * counts).sum(0)
    spreads = (a * a * counts).sum(0) * (b * b * counts).sum(0)
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(spreads > 0, np.clip(covariance / np.sqrt(spreads), -1, 1), np.nan)


def rank_values(values: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """(n,) values, (n, D) how often each is drawn -> (n, D) ranks in each draw, the mean rank for equal values."""
    place = np.unique(values, return_inverse=True)[1]
    order = np.argsort(place, kind="stable")
    starts = np.flatnonzero(np.diff(place[order], prepend=-1))
    groups = np.add.reduceat(counts[order], starts)
    return (np.cumsum(groups, 0) - (groups - 1) / 2)[place]
