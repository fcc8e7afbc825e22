"""Metrics of regression: R2, mean absolute error, root mean squared error, Spearman's correlation.

In shapes, n is images, T targets, D draws of the bootstrap. NaN marks a missing label.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from vitreous.errors import NonFiniteError
from vitreous.tasks.comparison import Comparison, ModelOutputs
from vitreous.tasks.intervals import (
    DEFAULT_BOOTSTRAP_DRAWS,
    MIN_BOOTSTRAP_DRAWS,
    Interval,
    bootstrap_metrics,
    percentile_interval,
)
from vitreous.tasks.metrics import REGRESSION_METRICS
from vitreous.tasks.report import Report

REGRESSION_METRIC_KEYS = tuple(
    metric.key for metric in REGRESSION_METRICS
)  # the keys of `compute_weighted_errors`, in the order of the table
LARGE_SAMPLE = 20_000  # from this number of values, the bootstrap uses a tenth of the draws
MIN_VALUES = 2  # smallest number of values for R2 and Spearman's correlation


def evaluate_regression(
    predicted: np.ndarray, labels: np.ndarray, targets: tuple[str, ...], readable: np.ndarray
) -> Report:
    """Compute metrics and 95 % intervals of (n, T) predictions and labels in the targets' units; `readable` (n,) bool.

    Each target is evaluated on the readable images that have its label. `metrics` are the means over the targets for
    which a metric is defined, as scikit-learn's uniform average. R2 and Spearman's correlation are undefined for a
    target with one value. Raises NonFiniteError for predictions that are not finite.
    """
    if not np.isfinite(predicted[readable]).all():
        raise NonFiniteError("the model's outputs are not finite", "use a lower --lr, or --precision fp32")
    draws, target_rows = dict[str, list[np.ndarray]](), list[dict[str, Any]]()
    for target_index, name in enumerate(targets):
        present = readable & ~np.isnan(labels[:, target_index])
        true, target_predictions = (
            labels[present, target_index].astype(np.float64),
            predicted[present, target_index].astype(np.float64),
        )
        metrics = {
            key: values.item()
            for key, values in compute_weighted_errors(true, target_predictions, np.ones((len(true), 1))).items()
        }
        metric_draws = bootstrap_errors(true, target_predictions)
        target_row: dict[str, Any] = {"target": name, "images": len(true)}
        target_row |= {key: value if np.isfinite(value) else None for key, value in metrics.items()}
        target_row["interval"] = {
            key: interval_of_draws(metric_draws.get(key), target_row[key]) for key in REGRESSION_METRIC_KEYS
        }
        target_rows.append(target_row)
        for key in REGRESSION_METRIC_KEYS:
            if target_row[key] is not None and key in metric_draws:
                draws.setdefault(key, []).append(metric_draws[key])
    means = {key: mean_of_defined([target_row[key] for target_row in target_rows]) for key in REGRESSION_METRIC_KEYS}
    intervals = {
        key: interval_of_draws(np.mean(draws[key], 0) if key in draws else None, means[key])
        for key in REGRESSION_METRIC_KEYS
    }
    return Report(
        len(labels),
        int((~readable).sum()),
        metrics=means,
        intervals=intervals,
        per_class=[],
        confusion_cells=None,
        primary="r2",
        details={"targets": target_rows},
    )


def compare_values(outputs_a: ModelOutputs, outputs_b: ModelOutputs, targets: tuple[str, ...]) -> Comparison:
    """Compare the values (n, T) of two models, in the targets' units, with labels (n, T).

    Each target is evaluated on the images that both models could read and that have its label. Metrics, differences and
    intervals are means over the targets; `details` has those of each target.
    """
    readable, target_rows = outputs_a.readable & outputs_b.readable, list[dict[str, Any]]()
    draws = dict[str, list[np.ndarray]]()
    for target_index, name in enumerate(targets):
        present = readable & ~np.isnan(outputs_a.labels[:, target_index])
        model_values = [model.logits[present, target_index] for model in (outputs_a, outputs_b)]
        target_row, metric_draws = compare_target(
            outputs_a.labels[present, target_index].astype(np.float64), *model_values
        )
        target_rows.append({"target": name, **target_row})
        for key in metric_draws:
            draws.setdefault(key, []).append(metric_draws[key])
    metrics = {
        key: tuple(
            mean_of_defined([target_row["metrics"][key][model] for target_row in target_rows]) for model in (0, 1)
        )
        for key in REGRESSION_METRIC_KEYS
    }
    changes = {
        key: mean_of_defined([target_row["difference"][key] for target_row in target_rows])
        for key in REGRESSION_METRIC_KEYS
    }
    intervals = {
        key: interval_of_draws(np.mean(draws[key], 0) if key in draws else None, changes[key])
        for key in REGRESSION_METRIC_KEYS
    }
    pairs = {key: (value_a, value_b) for key, (value_a, value_b) in metrics.items()}
    return Comparison("r2", pairs, differences=changes, intervals=intervals, details={"targets": target_rows})


def compare_target(
    true: np.ndarray, values_a: np.ndarray, values_b: np.ndarray
) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Compare the values of two models for one target with (n,) labels.

    Returns each metric of both models, its difference, and the percentile interval over the same bootstrap draws for
    both; and these draws, (D,) each, of the differences that are defined."""
    unit_counts = np.ones((len(true), 1))
    metrics_a, metrics_b = (compute_weighted_errors(true, side, unit_counts) for side in (values_a, values_b))
    draws_a, draws_b = (
        bootstrap_errors(true, side) for side in (values_a, values_b)
    )  # the same seed gives the same draws
    metrics: dict[str, list[float | None]] = {}
    changes: dict[str, float | None] = {}
    intervals: dict[str, list[float] | None] = {}
    draws: dict[str, np.ndarray] = {}
    for key in REGRESSION_METRIC_KEYS:
        values = [side[key].item() for side in (metrics_a, metrics_b)]
        defined = bool(np.isfinite(values).all())
        metrics[key] = [value if np.isfinite(value) else None for value in values]
        changes[key] = values[1] - values[0] if defined else None
        if defined and key in draws_b:
            draws[key] = draws_b[key] - draws_a[key]
        interval = interval_of_draws(draws.get(key), changes[key])
        intervals[key] = None if interval is None else list(interval)
    return {"images": len(true), "metrics": metrics, "difference": changes, "interval": intervals}, draws


def mean_of_defined(values: list[float | None]) -> float | None:
    """Return the mean of the values that are defined; None if there are none."""
    defined = [value for value in values if value is not None]
    return float(np.mean(defined)) if defined else None


def interval_of_draws(draws: np.ndarray | None, value: float | None) -> Interval | None:
    """Return the interval of (D,) draws of a metric; None if the value or a draw is undefined."""
    if draws is None or value is None or not np.isfinite(draws).any():
        return None
    return percentile_interval(draws[np.isfinite(draws)])


def bootstrap_errors(true: np.ndarray, predicted: np.ndarray) -> dict[str, np.ndarray]:
    """Return (D,) bootstrap draws of each metric from (n,) labels and predictions; empty for fewer than two values."""
    if len(true) < MIN_VALUES:
        return {}
    count = DEFAULT_BOOTSTRAP_DRAWS if len(true) < LARGE_SAMPLE else MIN_BOOTSTRAP_DRAWS
    return bootstrap_metrics(lambda counts: compute_weighted_errors(true, predicted, counts), len(true), count)


def compute_weighted_errors(true: np.ndarray, predicted: np.ndarray, counts: np.ndarray) -> dict[str, np.ndarray]:
    """Compute (D,) values of each metric from (n,) labels and predictions and draw counts (n, D); NaN where it is
    undefined.

    R2 = 1 - sum (y - p)^2 / sum (y - mean y)^2. Spearman's correlation is Pearson's correlation of the ranks; equal
    values share their mean rank.
    """
    counts = counts.astype(np.float64)
    num_drawn = np.maximum(counts.sum(0), 1)
    if not len(true):
        return dict.fromkeys(REGRESSION_METRIC_KEYS, np.full(int(counts.shape[1]), np.nan))
    errors = predicted - true
    squares, mean = errors**2 @ counts, true @ counts / num_drawn
    centred = true - true.mean()  # preserves precision in sums of squares of large values
    total_sum_squares = centred**2 @ counts - num_drawn * (mean - true.mean()) ** 2
    scale = (centred**2).max(initial=0.0)
    with np.errstate(divide="ignore", invalid="ignore"):
        r2 = np.where(total_sum_squares > 1e-12 * num_drawn * scale, 1 - squares / total_sum_squares, np.nan)
    return {
        "r2": r2,
        "mae": np.abs(errors) @ counts / num_drawn,
        "rmse": np.sqrt(squares / num_drawn),
        "spearman": correlate_ranks(true, predicted, counts),
    }


def correlate_ranks(true: np.ndarray, predicted: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Compute Spearman's correlations (D,) from (n,) labels and predictions and (n, D) counts, NaN for a single
    rank."""
    true_ranks, predicted_ranks = rank_values(true, counts), rank_values(predicted, counts)
    num_drawn = np.maximum(counts.sum(0), 1)
    true_ranks, predicted_ranks = (
        true_ranks - (true_ranks * counts).sum(0) / num_drawn,
        predicted_ranks - (predicted_ranks * counts).sum(0) / num_drawn,
    )
    covariance = (true_ranks * predicted_ranks * counts).sum(0)
    spreads = (true_ranks * true_ranks * counts).sum(0) * (predicted_ranks * predicted_ranks * counts).sum(0)
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(spreads > 0, np.clip(covariance / np.sqrt(spreads), -1, 1), np.nan)


def rank_values(values: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Compute (n, D) ranks of (n,) values in draws with counts (n, D); equal values share their mean rank."""
    value_indices = np.unique(values, return_inverse=True)[1]
    order = np.argsort(value_indices, kind="stable")
    starts = np.flatnonzero(np.diff(value_indices[order], prepend=-1))
    groups = np.add.reduceat(counts[order], starts)
    return (np.cumsum(groups, 0) - (groups - 1) / 2)[value_indices]
