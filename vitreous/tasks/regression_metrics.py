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

#: keys of the metrics that `compute_weighted_errors` returns, in the order of the table
REGRESSION_METRIC_KEYS = tuple(metric.key for metric in REGRESSION_METRICS)
LARGE_SAMPLE = 20_000  # number of values from which the bootstrap uses a tenth of the draws
MIN_VALUES = 2  # minimum number of values for R2 and Spearman's correlation


def evaluate_regression(
    predicted: np.ndarray, labels: np.ndarray, targets: tuple[str, ...], readable: np.ndarray
) -> Report:
    """Compute metrics and 95 % intervals of predictions and labels (n, T) in the targets' units. `readable` is (n,)
    bool.

    Each target is evaluated on the readable images that have its label. `metrics` of the report are means over the
    targets for which a metric is defined, like scikit-learn's uniform average. R2 and Spearman's correlation are
    undefined if all labels of a target are equal. Raises NonFiniteError if a prediction is not finite.
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
    """Compare the predicted values (n, T) of two models, in the targets' units, with labels (n, T).

    Each target is evaluated on the images that both models could read and that have its label. Metrics, differences and
    intervals are means over the targets; `details` contains those of each target.
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
    """Compare the predicted values (n,) of two models for one target with its labels (n,).

    Returns a row with each metric of both models, the difference, and its percentile interval over the same bootstrap
    draws for both. Also returns the differences (D,) of each defined metric in these draws.
    """
    unit_counts = np.ones((len(true), 1))
    metrics_a, metrics_b = (compute_weighted_errors(true, values, unit_counts) for values in (values_a, values_b))
    # both use the same draws, because the bootstrap has a fixed seed
    draws_a, draws_b = (bootstrap_errors(true, values) for values in (values_a, values_b))
    metrics: dict[str, list[float | None]] = {}
    changes: dict[str, float | None] = {}
    intervals: dict[str, list[float] | None] = {}
    draws: dict[str, np.ndarray] = {}
    for key in REGRESSION_METRIC_KEYS:
        metric_pair = [model_metrics[key].item() for model_metrics in (metrics_a, metrics_b)]
        is_defined = bool(np.isfinite(metric_pair).all())
        metrics[key] = [value if np.isfinite(value) else None for value in metric_pair]
        changes[key] = metric_pair[1] - metric_pair[0] if is_defined else None
        if is_defined and key in draws_b:
            draws[key] = draws_b[key] - draws_a[key]
        interval = interval_of_draws(draws.get(key), changes[key])
        intervals[key] = None if interval is None else list(interval)
    return {"images": len(true), "metrics": metrics, "difference": changes, "interval": intervals}, draws


def mean_of_defined(values: list[float | None]) -> float | None:
    """Return the mean of the values that are not None; None if there are none."""
    defined = [value for value in values if value is not None]
    return float(np.mean(defined)) if defined else None


def interval_of_draws(draws: np.ndarray | None, value: float | None) -> Interval | None:
    """Return the 95 % interval of the finite bootstrap draws (D,) of a metric; None if its value or all draws are
    undefined."""
    if draws is None or value is None or not np.isfinite(draws).any():
        return None
    return percentile_interval(draws[np.isfinite(draws)])


def bootstrap_errors(true: np.ndarray, predicted: np.ndarray) -> dict[str, np.ndarray]:
    """Return bootstrap draws (D,) of each metric from labels and predictions (n,); empty for fewer than `MIN_VALUES`
    values."""
    if len(true) < MIN_VALUES:
        return {}
    count = DEFAULT_BOOTSTRAP_DRAWS if len(true) < LARGE_SAMPLE else MIN_BOOTSTRAP_DRAWS
    return bootstrap_metrics(lambda counts: compute_weighted_errors(true, predicted, counts), len(true), count)


def compute_weighted_errors(true: np.ndarray, predicted: np.ndarray, counts: np.ndarray) -> dict[str, np.ndarray]:
    """Compute each metric (D,) from labels and predictions (n,) and draw counts (n, D), which are the weights of the
    images; NaN if a metric is undefined.

    R2 = 1 - sum (y - p)^2 / sum (y - mean y)^2 with labels y and predictions p. Spearman's correlation is Pearson's
    correlation of the ranks; equal values share their mean rank.
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
    """Compute Spearman's correlation (D,) of labels and predictions (n,) in each of D bootstrap draws, where counts (n,
    D) has how often each image was drawn; NaN if all ranks are equal."""
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
    """Compute the ranks (n, D) of values (n,) in draws with counts (n, D). Equal values share their mean rank."""
    value_indices = np.unique(values, return_inverse=True)[1]
    order = np.argsort(value_indices, kind="stable")
    starts = np.flatnonzero(np.diff(value_indices[order], prepend=-1))
    groups = np.add.reduceat(counts[order], starts)
    return (np.cumsum(groups, 0) - (groups - 1) / 2)[value_indices]
