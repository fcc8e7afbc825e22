"""Values as labels: (n, T) float64 for T targets, NaN where an image has no value of a target.

Only labels of values are float64: class numbers are int64, and labels of several classes float32.
"""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np

from vitreous.data.split import Data, Split, create_empty_labels, has_target_values, hold_out_val
from vitreous.errors import DataError, escape_unprintable, format_first_names

MISSING_VALUE_CELLS = ("", "nan", "na", "n/a", "null", "none")  # cells without a value
#: how notes on a split that was drawn within classes begin
DRAWN_NOTES = ("held out ", "multi-label: ", "too few images to hold any out")
MANY_NUMBERS = 20  # different numbers as labels from which they may be counts
FEW_IMAGES = 5  # of a number, below which it is hardly a class


def is_numeric_text(text: str) -> bool:
    """Whether a text, as the name of a class, is a finite number."""
    try:
        return math.isfinite(float(text))
    except ValueError:
        return False


def is_value(cell: str) -> bool:
    """Whether a cell is a finite number, or empty."""
    return cell.strip().lower() in MISSING_VALUE_CELLS or is_numeric_text(cell)


def parse_value(cell: str, column: str, where: str) -> float:
    """The value in a cell, NaN for none. Raises DataError, naming `where`, for anything else."""
    if cell.strip().lower() in MISSING_VALUE_CELLS:
        return math.nan
    if not is_numeric_text(cell):
        hint = "leave the cell empty where there is no value"
        hint = f"write decimals with a point; {hint}" if "," in cell else hint
        raise DataError(
            f"{where}: {escape_unprintable(column)} is {escape_unprintable(cell)}, which is no number", hint
        )
    return float(cell)


def are_measurements(data: Data) -> bool:
    """Whether classes are measurements or counts: numbers of which one is no integer, or of which at least
    `MANY_NUMBERS` occur and most on fewer than `FEW_IMAGES` images. An image may have one or none."""
    if len(data.classes) < 2 or not all(map(is_numeric_text, data.classes)):
        return False
    splits = data.splits.values()
    if any(split.labels.ndim == 2 and (split.labels.sum(1) > 1).any() for split in splits):
        return False
    has_fraction = any(not float(name).is_integer() for name in data.classes)
    images = sum(len(split) for split in splits)
    return has_fraction or (len(data.classes) >= MANY_NUMBERS and images < FEW_IMAGES * len(data.classes))


def convert_classes_to_values(data: Data, target: str, split_seed: int) -> Data:
    """The data with the numbers that their classes are named by as values of one target. A validation split that was
    drawn within classes is drawn anew.

    Raises DataError for classes that are no numbers, for images of several classes, and for data without labels.
    """
    hint = "name the columns with the values: --targets COLUMN"
    if not data.classes or any(has_target_values(split.labels) for split in data.splits.values()):
        raise data.unlabelled or DataError(f"{data.name} has no values", hint)
    if other := next((name for name in data.classes if not is_numeric_text(name)), None):
        raise DataError(f"{data.name} has classes, such as {escape_unprintable(other)}, and no values", hint)
    numbers = np.array(list(map(float, data.classes)))

    def convert(split: Split) -> Split:
        labels = split.labels
        if labels.ndim == 2 and not labels.shape[1]:
            return split
        if labels.ndim == 2 and (labels.sum(1) > 1).any():
            sample = int(np.argmax(labels.sum(1) > 1))
            raise DataError(f"{data.name}: {split.name(sample)} has several labels, and no one value", hint)
        if labels.ndim == 1:
            return split.take(np.arange(len(split)), numbers[labels][:, None])
        values = np.where(labels.any(1), numbers[labels.argmax(1)], np.nan)
        return split.take(np.arange(len(split)), values[:, None])

    whole = None if data.whole is None else convert(data.whole)
    splits, notes = {name: convert(split) for name, split in data.splits.items()}, data.notes
    if whole is not None:
        drawn, news = hold_out_val(whole, split_seed, data.groups)
        splits = drawn | {name: split for name, split in splits.items() if name == "test"}
        notes = [*(note for note in notes if not note.startswith(DRAWN_NOTES)), news]
    return replace(data, classes=(), targets=(target,), splits=splits, whole=whole, notes=notes, titles={})


def with_targets(data: Data, targets: tuple[str, ...], split_seed: int) -> Data:
    """The data with values of these targets; where a layout has no columns, as `convert_classes_to_values`. Raises
    DataError as that, and for several targets."""
    if not targets or data.targets:
        return data
    if len(targets) > 1:
        problem = f"{data.name} has no columns {format_first_names(targets, 5)}"
        raise DataError(problem, "several targets are columns of a CSV or Parquet file")
    return convert_classes_to_values(data, next(iter(targets)), split_seed)


def empty_if_all_missing(values: np.ndarray) -> np.ndarray:
    """(n, T) float64 values -> the same, or (n, 0) where there is none at all: a split that cannot be evaluated."""
    return create_empty_labels(len(values)) if np.isnan(values).all() else values


def require_values(data: Data) -> None:
    """Raise DataError for targets without values on training images, or with the same value on all of them."""
    values = data.split("train").labels
    for place, name in enumerate(data.targets):
        present = values[:, place][~np.isnan(values[:, place])]
        if not len(present):
            raise DataError(
                f"{data.name}: no training image has a value of {escape_unprintable(name)}", "leave the target out"
            )
        if present.min() == present.max():
            problem = (
                f"all {len(present):,} training images have the same value of "
                f"{escape_unprintable(name)}, {present[0]:g}"
            )
            raise DataError(f"{data.name}: {problem}", "leave the target out: there is nothing to learn")


def describe_targets(data: Data) -> str:
    """The targets and their number of values in training, for a note: `values of age (180 images), height (175)`."""
    values = data.split("train").labels
    counts = (~np.isnan(values)).sum(0).tolist()
    texts = [f"{escape_unprintable(name)} ({count:,} images)" for name, count in zip(data.targets, counts, strict=True)]
    return f"values of {format_first_names(texts, 5)}"
