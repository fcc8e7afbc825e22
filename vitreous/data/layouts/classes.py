"""Sort class names, build label arrays, and create the errors and notes about classes, for all layouts."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable, Sequence

import numpy as np

from vitreous.data.layouts.file_names import normalise_name
from vitreous.errors import DataError, escape_unprintable, format_first_names, suggest_nearest

# Unicode categories: control, surrogate, line and paragraph separators
INVALID_NAME_CATEGORIES = ("Cc", "Cs", "Zl", "Zp")
MAX_LABEL_ARRAY_BYTES = 2**33  # maximum bytes of the labels of all images, (n, K) float32


def natural_sort_key(name: str) -> tuple[list[tuple[int, int, str]], str]:
    """Return the key that sorts names in natural order, with 2 before 10; ties are broken by the name."""
    runs = re.findall(r"\d+|\D+", name)
    return [(0, int(run), "") if run.isdecimal() else (1, 0, run) for run in runs], name


def sort_class_names(names: Iterable[str]) -> list[str]:
    """Sort class names in natural order, without duplicates. Raises DataError for two names that differ only in case or
    Unicode form, and for a name that is not one line of text."""
    folded: dict[str, str] = {}
    for name in sorted(names, key=natural_sort_key):
        if any(unicodedata.category(letter) in INVALID_NAME_CATEGORIES for letter in name):
            raise DataError(
                f"class {escape_unprintable(name)} has a name that is not one line of UTF-8 text", "rename it"
            )
        previous_name = folded.setdefault(unicodedata.normalize("NFC", name).casefold(), name)
        if previous_name != name:
            name_pair = f"{escape_unprintable(previous_name)} and {escape_unprintable(name)}"
            raise DataError(f"classes {name_pair} differ only in case or accents", "rename one of them")
    return list(folded.values())


def too_few_classes_error(origin: str, classes: Sequence[str], hint: str = "") -> DataError:
    """Return the error for data with fewer than two `classes`, which explains why the data have no labels."""
    problem = f"one class only ({escape_unprintable(classes[0])}); a classifier needs two" if classes else "no labels"
    return DataError(f"{origin} has {problem}", hint)


def one_class_note(classes: Sequence[str]) -> list[str]:
    """Return the note for images of a single class; empty if there are no classes."""
    return [f"all images have one class, {escape_unprintable(classes[0])}: no labels"] if classes else []


def unknown_classes_error(
    origin: str, unknown: Iterable[str], classes: Iterable[str], listed: bool = False
) -> DataError:
    """Return the error for the classes `unknown` of the data `origin`, which are missing from `classes`: the classes of
    the train split, or, if `listed`, those of a list of class names."""
    names = list(dict.fromkeys(unknown))
    reason = "are not in the list of classes" if listed else "train lacks"
    hint = suggest_nearest(names[0], classes) or "rename or delete them"
    return DataError(f"{origin} has classes that {reason}: {format_first_names(names)}", hint)


def build_label_array(
    origin: str,
    distinct_labels: Sequence[tuple[str, ...]],
    label_indices: np.ndarray,
    classes: Sequence[str],
    multilabel: bool,
    listed: bool = False,
) -> np.ndarray:
    """Build the labels of n images, (n,) int64, or (n, K) float32 if `multilabel`.

    A label is a tuple of class names. `label_indices` (n,) are the indices of the images' labels in `distinct_labels`.
    Raises DataError for labels that are not in `classes` (see `unknown_classes_error` for `origin` and `listed`), and
    if the label array would be too large.
    """
    index_by_class = {normalise_name(name): index for index, name in enumerate(classes)}
    distinct_labels = [tuple(map(normalise_name, label)) for label in distinct_labels]
    unknown_names = [
        name
        for label in np.unique(label_indices).tolist()
        for name in distinct_labels[label]
        if name not in index_by_class
    ]
    if unknown_names:
        raise unknown_classes_error(origin, unknown_names, classes, listed)
    if not multilabel:
        return np.array([index_by_class.get(label[0], -1) for label in distinct_labels], dtype=np.int64)[label_indices]
    if 4 * len(label_indices) * len(classes) > MAX_LABEL_ARRAY_BYTES:
        problem = f"{len(label_indices):,} images x {len(classes):,} classes exceed the limit of a label array"
        raise DataError(f"{origin}: {problem}", "check that these are class names")
    table = np.zeros((len(distinct_labels), len(classes)), dtype=np.float32)
    for row, label in enumerate(distinct_labels):
        table[row, [index_by_class[name] for name in label if name in index_by_class]] = 1
    return table[label_indices]
