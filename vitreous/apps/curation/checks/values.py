"""What is true of the values of a data set: their spread, those that are missing, and those far from the others."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from vitreous.apps.curation.checks.subject import Subject
from vitreous.errors import printable

FENCE = 3.0  # interquartile ranges beyond the quartiles from which a value is far out (Tukey, 1977)
LEAST = 8  # values below which quartiles say little
LISTED = 10_000  # images listed at most

Place = dict[str, Any]  # split, path and value


def value_facts(subject: Subject) -> list[dict[str, Any]]:
    """Return what is reported of each target, before it is judged; nothing for data without targets.

    `splits`: number of images, of values, and their spread. `fences`: the limits beyond which training values are far
    out, None where there are too few; `outliers` lists these images, `outside` those of other splits that are beyond
    all training values.
    """
    if not subject.targets:
        return []
    first = "train" if "train" in subject.splits else next(iter(subject.splits))
    facts = []
    for place, name in enumerate(subject.targets):
        columns = {split: column_of(subject, split, place) for split in subject.splits}
        own = columns[first][~np.isnan(columns[first])]
        limits = fences(own)
        outliers = (
            [row for split, values in columns.items() for row in list_images(subject, split, values, limits)]
            if limits
            else []
        )
        ends = (float(own.min()), float(own.max())) if len(own) else None
        outside = [
            row
            for split, values in columns.items()
            if split != first and ends
            for row in list_images(subject, split, values, ends)
        ]
        facts.append(
            {
                "target": printable(name),
                "split": first,
                "splits": {split: spread_of(values) for split, values in columns.items()},
                "fences": limits,
                "outliers": outliers[:LISTED],
                "outside": outside[:LISTED],
            }
        )
    return facts


def column_of(subject: Subject, split: str, place: int) -> np.ndarray:
    """(n,) values of a target in a split, NaN for none."""
    labels = subject.splits[split].labels
    return labels[:, place] if labels.shape[1] else np.full(len(labels), np.nan)


def fences(values: np.ndarray) -> tuple[float, float] | None:
    """(n,) values -> Tukey's outer fences; None for too few values, and where half of them are the same."""
    if len(values) < LEAST:
        return None
    low, high = np.percentile(values, [25, 75])
    span = FENCE * (high - low)
    return (float(low - span), float(high + span)) if span > 0 else None


def list_images(subject: Subject, split: str, values: np.ndarray, ends: tuple[float, float]) -> Iterator[Place]:
    """The images of a split with (n,) values below the first or above the second of the ends."""
    for sample in np.flatnonzero((values < ends[0]) | (values > ends[1])).tolist():
        yield {"split": split, "path": subject.splits[split].name(sample), "value": float(values[sample])}


def spread_of(values: np.ndarray) -> dict[str, Any]:
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
