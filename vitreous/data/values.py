"""Regression labels: (n, T) float64 for T targets, NaN if an image has no value of a target.

Only regression labels are float64: class indices are int64, and multi-label labels float32.
"""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np

from vitreous.data.split import Data, Split, create_empty_labels, has_target_values, hold_out_val
from vitreous.errors import DataError, escape_unprintable, format_first_names

MISSING_VALUE_CELLS = ("", "nan", "na", "n/a", "null", "none")  # cells without a value
#: prefixes of the notes about a `val` that was drawn within classes, which no longer apply once it is drawn again
DRAWN_NOTES = ("held out ", "multi-label: ", "too few images to hold any out")
MANY_NUMBERS = 20  # minimum number of numeric class names that may be counts, such as ages
FEW_IMAGES = 5  # mean number of images per numeric class name below which the names are taken for counts


def is_numeric_text(text: str) -> bool:
    """Return whether a text, such as a class name, is a finite number."""
    try:
        return math.isfinite(float(text))
    except ValueError:
        return False


def is_value(cell: str) -> bool:
    """Return whether a table cell can be a target value: a finite number, or a missing value such as an empty cell or
    `nan`."""
    return cell.strip().lower() in MISSING_VALUE_CELLS or is_numeric_text(cell)


def parse_value(cell: str, column: str, location: str) -> float:
    """Parse the target value in a table cell; NaN for a missing value. Raises DataError, with `location` (file and
    line), for other text."""
    if cell.strip().lower() in MISSING_VALUE_CELLS:
        return math.nan
    if not is_numeric_text(cell):
        hint = "leave the cell empty if there is no value"
        hint = f"write decimals with a point; {hint}" if "," in cell else hint
        raise DataError(
            f"{location}: {escape_unprintable(column)} is {escape_unprintable(cell)}, which is not a number", hint
        )
    return float(cell)


def are_measurements(data: Data) -> bool:
    """Return whether the class names of a dataset are rather measurements or counts, so that regression fits better.

    All names must be numbers, and no image may have several labels. The names are measurements if one is a fraction.
    They are counts if there are at least `MANY_NUMBERS` names with fewer than `FEW_IMAGES` images each on average.
    """
    if len(data.classes) < 2 or not all(map(is_numeric_text, data.classes)):
        return False
    splits = data.splits.values()
    if any(split.labels.ndim == 2 and (split.labels.sum(1) > 1).any() for split in splits):
        return False
    has_fraction = any(not float(name).is_integer() for name in data.classes)
    images = sum(len(split) for split in splits)
    return has_fraction or (len(data.classes) >= MANY_NUMBERS and images < FEW_IMAGES * len(data.classes))


def convert_classes_to_values(data: Data, target: str, split_seed: int) -> Data:
    """Convert a dataset whose class names are numbers to regression data of one target, whose values are the numbers.

    A `val` that was drawn within classes is drawn again with `split_seed`. Raises DataError for class names that are
    not numbers, for images with several labels, and for data without labels.
    """
    hint = "choose the columns with the values: --targets COLUMN"
    if not data.classes or any(has_target_values(split.labels) for split in data.splits.values()):
        raise data.unlabelled or DataError(f"{data.name} has no values", hint)
    if text_class := next((name for name in data.classes if not is_numeric_text(name)), None):
        raise DataError(f"{data.name} has classes, such as {escape_unprintable(text_class)}, but no values", hint)
    class_values = np.array(list(map(float, data.classes)))

    def convert(split: Split) -> Split:
        labels = split.labels
        if labels.ndim == 2 and not labels.shape[1]:
            return split
        if labels.ndim == 2 and (labels.sum(1) > 1).any():
            sample = int(np.argmax(labels.sum(1) > 1))
            raise DataError(f"{data.name}: {split.name(sample)} has several labels instead of one value", hint)
        if labels.ndim == 1:
            return split.take(np.arange(len(split)), class_values[labels][:, None])
        values = np.where(labels.any(1), class_values[labels.argmax(1)], np.nan)
        return split.take(np.arange(len(split)), values[:, None])

    full_train = None if data.full_train_split is None else convert(data.full_train_split)
    splits, notes = {name: convert(split) for name, split in data.splits.items()}, data.notes
    if full_train is not None:
        drawn_splits, holdout_note = hold_out_val(full_train, split_seed, data.groups)
        splits = drawn_splits | {name: split for name, split in splits.items() if name == "test"}
        notes = [*(note for note in notes if not note.startswith(DRAWN_NOTES)), holdout_note]
    return replace(
        data, classes=(), targets=(target,), splits=splits, full_train_split=full_train, notes=notes, titles={}
    )


def with_targets(data: Data, targets: tuple[str, ...], split_seed: int) -> Data:
    """Return the data with the values of `targets` as labels. Data whose layout has not read them from columns must
    have numeric class names and a single target (`convert_classes_to_values`). Raises DataError otherwise."""
    if not targets or data.targets:
        return data
    if len(targets) > 1:
        problem = f"{data.name} has no columns {format_first_names(targets, 5)}"
        raise DataError(problem, "use a CSV or Parquet file with a column for each target")
    return convert_classes_to_values(data, next(iter(targets)), split_seed)


def empty_if_all_missing(values: np.ndarray) -> np.ndarray:
    """Return target values (n, T) float64 unchanged, or (n, 0) if all are missing, which marks a split as
    unlabelled."""
    return create_empty_labels(len(values)) if np.isnan(values).all() else values


def require_values(data: Data) -> None:
    """Raise DataError for targets without values on training images, or with the same value on all of them."""
    values = data.split("train").labels
    for target_index, name in enumerate(data.targets):
        present = values[:, target_index][~np.isnan(values[:, target_index])]
        if not len(present):
            raise DataError(
                f"{data.name}: no training image has a value of {escape_unprintable(name)}", "omit this target"
            )
        if present.min() == present.max():
            problem = (
                f"all {len(present):,} training images have the same value of "
                f"{escape_unprintable(name)}, {present[0]:g}"
            )
            raise DataError(f"{data.name}: {problem}", "omit this target, which is constant")


def describe_targets(data: Data) -> str:
    """Describe the targets for a note, with the number of training images that have a value: `values of age (180
    images), height (175 images)`."""
    values = data.split("train").labels
    counts = (~np.isnan(values)).sum(0).tolist()
    texts = [f"{escape_unprintable(name)} ({count:,} images)" for name, count in zip(data.targets, counts, strict=True)]
    return f"values of {format_first_names(texts, 5)}"
