"""Class names in order, and labels as arrays, for all layouts."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable, Sequence

import numpy as np

from vitreous.data.layouts.file_names import normalise_name
from vitreous.errors import DataError, escape_unprintable, format_first_names, suggest_nearest

INVALID_NAME_CATEGORIES = (
    "Cc",
    "Cs",
    "Zl",
    "Zp",
)  # of Unicode's categories: control, half of a pair or no UTF-8, ends of lines
MAX_LABEL_ARRAY_BYTES = 2**33  # bytes of the labels of all images, (n, K) float32


def natural_sort_key(name: str) -> tuple[list[tuple[int, int, str]], str]:
    """A sort key in which 2 comes before 10; equal keys fall back to the name itself."""
    runs = re.findall(r"\d+|\D+", name)
    return [(0, int(run), "") if run.isdecimal() else (1, 0, run) for run in runs], name


def sort_class_names(names: Iterable[str]) -> list[str]:
    """Class names in natural order. Raises DataError for names that differ only in case or Unicode form, or are no line
    of text."""
    folded: dict[str, str] = {}
    for name in sorted(names, key=natural_sort_key):
        if any(unicodedata.category(letter) in INVALID_NAME_CATEGORIES for letter in name):
            raise DataError(
                f"class {escape_unprintable(name)} has a name that is no line of text in UTF-8", "rename it"
            )
        other = folded.setdefault(unicodedata.normalize("NFC", name).casefold(), name)
        if other != name:
            both = f"{escape_unprintable(other)} and {escape_unprintable(name)}"
            raise DataError(f"classes {both} differ only in case or accents", "rename one of them")
    return list(folded.values())


def too_few_classes_error(where: str, classes: Sequence[str], hint: str = "") -> DataError:
    """The refusal of data of one class or none: why there are no labels."""
    problem = f"one class only ({escape_unprintable(classes[0])}); a classifier needs two" if classes else "no labels"
    return DataError(f"{where} has {problem}", hint)


def one_class_note(classes: Sequence[str]) -> list[str]:
    """The note on images that are all of one class; none where there are no classes."""
    return [f"all images are of one class, {escape_unprintable(classes[0])}: there are no labels"] if classes else []


def unknown_classes_error(
    where: str, unknown: Iterable[str], classes: Iterable[str], listed: bool = False
) -> DataError:
    """The refusal of classes that training, or if `listed` a list of classes, does not have."""
    names = list(dict.fromkeys(unknown))
    lacking = "are not in the list of classes" if listed else "train lacks"
    hint = suggest_nearest(names[0], classes) or "rename or remove them"
    return DataError(f"{where} has classes that {lacking}: {format_first_names(names)}", hint)


def build_label_array(
    where: str,
    words: Sequence[tuple[str, ...]],
    own: np.ndarray,
    classes: Sequence[str],
    multilabel: bool,
    listed: bool = False,
) -> np.ndarray:
    """The labels of n images, (n,) int64, or (n, K) float32 if `multilabel`.

    `own`: their positions (n,) in `words`, the distinct labels, of one class or several each; `listed` as in
    `unknown_classes_error`.

    Raises DataError for other classes than `classes`, and for labels that would not fit into memory.
    """
    place = {normalise_name(name): number for number, name in enumerate(classes)}
    words = [tuple(map(normalise_name, label)) for label in words]
    unknown = [name for label in np.unique(own).tolist() for name in words[label] if name not in place]
    if unknown:
        raise unknown_classes_error(where, unknown, classes, listed)
    if not multilabel:
        return np.array([place.get(label[0], -1) for label in words], dtype=np.int64)[own]
    if 4 * len(own) * len(classes) > MAX_LABEL_ARRAY_BYTES:
        problem = f"{len(own):,} images times {len(classes):,} classes are more than memory holds"
        raise DataError(f"{where}: {problem}", "are these class names?")
    table = np.zeros((len(words), len(classes)), dtype=np.float32)
    for row, label in enumerate(words):
        table[row, [place[name] for name in label if name in place]] = 1
    return table[own]
