"""What is true of the values of a data set: their spread, those that are missing, and those far from the others."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from vitreous.apps.curation.checks.subject import CheckedDataset
from vitreous.errors import escape_unprintable

TUKEY_FENCE_RANGES = 3.0  # interquartile ranges beyond the quartiles from which a value is far out (Tukey, 1977)
MIN_FENCE_VALUES = 8  # values below which quartiles say little
MAX_LISTED_VALUES = 10_000  # images listed at most

ValueLocation = dict[str, Any]  # split, path and value


def summarise_targets(subject: CheckedDataset) -> list[dict[str, Any]]:
    """Return what is reported of each target, before it is judged; nothing for data without targets.

    `splits`: number of images, of values, and their spread. `compute_tukey_fences`: the limits beyond which training
    values are far out, None where there are too few; `outliers` lists these images, `outside` those of other splits
    that are beyond all training values.
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
                "outside": outside[:MAX_LISTED_VALUES],
            }
        )
    return facts


def get_target_values(subject: CheckedDataset, split: str, place: int) -> np.ndarray:
    """(n,) values of a target in a split, NaN for none."""
    labels = subject.splits[split].labels
    return labels[:, place] if labels.shape[1] else np.full(len(labels), np.nan)


def compute_tukey_fences(values: np.ndarray) -> tuple[float, float] | None:
    """(n,) values -> Tukey's outer fences; None for too few values, and where half of them are the same."""
    if len(values) < MIN_FENCE_VALUES:
        return None
    low, high = np.percentile(values, [25, 75])
    span = TUKEY_FENCE_RANGES * (high - low)
    return (float(low - span), float(high + span)) if span > 0 else None


def find_values_outside(
    subject: CheckedDataset, split: str, values: np.ndarray, ends: tuple[float, float]
) -> Iterator[ValueLocation]:
    """The images of a split with (n,) values below the first or above the second of the ends."""
    for sample in np.flatnonzero((values < ends[0]) | (values > ends[1])).tolist():
        yield {"split": split, "path": subject.splits[split].name(sample), "value": float(values[sample])}


def summarise_values(values: np.ndarray) -> dict[str, Any]:
    """Images, values, and minimum, median, maximum, mean and standard deviation of (n,) values, None where there are
    none."""
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
