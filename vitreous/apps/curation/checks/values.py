"""Checks of numeric targets: distribution, missing values, and outliers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from vitreous.apps.curation.checks.subject import CheckedDataset
from vitreous.errors import escape_unprintable

TUKEY_FENCE_RANGES = 3.0  # distance of the outer fences from the quartiles, in interquartile ranges (Tukey, 1977)
MIN_FENCE_VALUES = 8  # no outliers are reported for fewer values: their quartiles are not meaningful
MAX_LISTED_VALUES = 10_000  # maximum listed images

ValueLocation = dict[str, Any]  # split, path and value


def summarise_targets(subject: CheckedDataset) -> list[dict[str, Any]]:
    """Summarise each numeric target for the document; an empty list for data without targets.

    `splits` has the number of images and values and their distribution. `fences` are the limits beyond which training
    values are outliers, None for too few values. `outliers` lists the images beyond them, `out_of_range` the images of
    other splits outside of the range of training values.
    """
    if not subject.targets:
        return []
    reference_split = "train" if "train" in subject.splits else next(iter(subject.splits))
    summaries = []
    for target_index, name in enumerate(subject.targets):
        columns = {split: get_target_values(subject, split, target_index) for split in subject.splits}
        valid_values = columns[reference_split][~np.isnan(columns[reference_split])]
        limits = compute_tukey_fences(valid_values)
        outliers = (
            [
                location
                for split, values in columns.items()
                for location in find_values_outside(subject, split, values, limits)
            ]
            if limits
            else []
        )
        value_range = (float(valid_values.min()), float(valid_values.max())) if len(valid_values) else None
        out_of_range = [
            location
            for split, values in columns.items()
            if split != reference_split and value_range
            for location in find_values_outside(subject, split, values, value_range)
        ]
        summaries.append(
            {
                "target": escape_unprintable(name),
                "split": reference_split,
                "splits": {split: summarise_values(values) for split, values in columns.items()},
                "fences": limits,
                "outliers": outliers[:MAX_LISTED_VALUES],
                "out_of_range": out_of_range[:MAX_LISTED_VALUES],
            }
        )
    return summaries


def get_target_values(subject: CheckedDataset, split: str, target_index: int) -> np.ndarray:
    """Return the (n,) values of a target in a split; missing values are NaN."""
    labels = subject.splits[split].labels
    return labels[:, target_index] if labels.shape[1] else np.full(len(labels), np.nan)


def compute_tukey_fences(values: np.ndarray) -> tuple[float, float] | None:
    """Return the lower and upper outer fence (Tukey, 1977) of (n,) values. None for fewer than `MIN_FENCE_VALUES`
    values, and if the quartiles are equal."""
    if len(values) < MIN_FENCE_VALUES:
        return None
    low, high = np.percentile(values, [25, 75])
    span = TUKEY_FENCE_RANGES * (high - low)
    return (float(low - span), float(high + span)) if span > 0 else None


def find_values_outside(
    subject: CheckedDataset, split: str, values: np.ndarray, value_range: tuple[float, float]
) -> Iterator[ValueLocation]:
    """Yield the images of a split whose (n,) values are outside of `value_range`, (minimum, maximum)."""
    for sample in np.flatnonzero((values < value_range[0]) | (values > value_range[1])).tolist():
        yield {"split": split, "path": subject.splits[split].name(sample), "value": float(values[sample])}


def summarise_values(values: np.ndarray) -> dict[str, Any]:
    """Return the number of images and of values, and minimum, median, maximum, mean and standard deviation of (n,)
    values, in which NaN is missing. Without values, the statistics are None."""
    valid_values = values[~np.isnan(values)]
    statistics: dict[str, float | None] = dict.fromkeys(("min", "median", "max", "mean", "std"))
    if len(valid_values):
        statistics = {
            "min": float(valid_values.min()),
            "median": float(np.median(valid_values)),
            "max": float(valid_values.max()),
            "mean": float(valid_values.mean()),
            "std": float(valid_values.std()),
        }
    return {"images": len(values), "values": len(valid_values), **statistics}
