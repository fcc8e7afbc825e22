"""Checks of numeric targets: distribution, missing values and outliers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from vitreous.apps.curation.checks.subject import CheckedDataset
from vitreous.errors import escape_unprintable

TUKEY_FENCE_RANGES = 3.0  # interquartile ranges from the quartiles to the outer fences (Tukey, 1977)
MIN_FENCE_VALUES = 8  # with fewer values, quartiles are not meaningful
MAX_LISTED_VALUES = 10_000  # listed images

ValueLocation = dict[str, Any]  # split, path and value


def summarise_targets(subject: CheckedDataset) -> list[dict[str, Any]]:
    """Summarise each target; an empty list for data without targets.

    `splits`: number of images, of values, and their distribution. `compute_tukey_fences`: the limits beyond which
    training values are outliers, None for too few values; `outliers` lists these images, `out_of_range` those of other
    splits outside the range of training values.
    """
    if not subject.targets:
        return []
    first = "train" if "train" in subject.splits else next(iter(subject.splits))
    facts = []
    for place, name in enumerate(subject.targets):
        columns = {split: get_target_values(subject, split, place) for split in subject.splits}
        own = columns[first][~np.isnan(columns[first])]
        limits = compute_tukey_fences(own)
        outliers = (
            [row for split, values in columns.items() for row in find_values_outside(subject, split, values, limits)]
            if limits
            else []
        )
        ends = (float(own.min()), float(own.max())) if len(own) else None
        outside = [
            row
            for split, values in columns.items()
            if split != first and ends
            for row in find_values_outside(subject, split, values, ends)
        ]
        facts.append(
            {
                "target": escape_unprintable(name),
                "split": first,
                "splits": {split: summarise_values(values) for split, values in columns.items()},
                "fences": limits,
                "outliers": outliers[:MAX_LISTED_VALUES],
                "out_of_range": outside[:MAX_LISTED_VALUES],
            }
        )
    return facts


def get_target_values(subject: CheckedDataset, split: str, place: int) -> np.ndarray:
    """Return (n,) values of a target in a split, NaN for missing ones."""
    labels = subject.splits[split].labels
    return labels[:, place] if labels.shape[1] else np.full(len(labels), np.nan)


def compute_tukey_fences(values: np.ndarray) -> tuple[float, float] | None:
    """Return Tukey's outer fences of (n,) values; None for too few values, and if half of them are equal."""
    if len(values) < MIN_FENCE_VALUES:
        return None
    low, high = np.percentile(values, [25, 75])
    span = TUKEY_FENCE_RANGES * (high - low)
    return (float(low - span), float(high + span)) if span > 0 else None


def find_values_outside(
    subject: CheckedDataset, split: str, values: np.ndarray, ends: tuple[float, float]
) -> Iterator[ValueLocation]:
    """Yield the images of a split whose (n,) values are below the first or above the second of `ends`."""
    for sample in np.flatnonzero((values < ends[0]) | (values > ends[1])).tolist():
        yield {"split": split, "path": subject.splits[split].name(sample), "value": float(values[sample])}


def summarise_values(values: np.ndarray) -> dict[str, Any]:
    """Return images, values, and minimum, median, maximum, mean and standard deviation of (n,) values, None without
    values."""
    own = values[~np.isnan(values)]
    numbers: dict[str, float | None] = dict.fromkeys(("min", "median", "max", "mean", "std"))
    if len(own):
        numbers = {
            "min": float(own.min()),
            "median": float(np.median(own)),
            "max": float(own.max()),
            "mean": float(own.mean()),
            "std": float(own.std()),
        }
    return {"images": len(values), "values": len(own), **numbers}
