"""The output of `data dedup`: the list of duplicates as CSV, and the dataset without them.

A cell that a spreadsheet could interpret as a formula, or that begins with an apostrophe, is prefixed with an
apostrophe. Removing that apostrophe restores every name.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from vitreous.data.exclusions import find_kept_samples, restore_original_splits
from vitreous.data.layouts.video import ClipFiles
from vitreous.data.split import Data, FileSplit
from vitreous.errors import DataError, UsageError, escape_unprintable
from vitreous.system.disk import is_utf8
from vitreous.system.tables import FORMULA_PREFIXES, escape_formula, format_csv

LIST_COLUMNS = ["path", "duplicate_of", "reason", "score"]


class Copy(NamedTuple):
    """A sample, the sample that it duplicates, the reason, and their similarity (at most 1)."""

    sample: int
    original: int
    reason: str  # bytes, pixels or near
    score: float


def resolve_copies(exact_copies: dict[int, Copy], near_copies: list[Copy]) -> list[Copy]:
    """List one copy per duplicate sample, whose original is not a duplicate itself. A sample that is near only to
    duplicates is not listed."""
    listed: dict[int, Copy] = {}
    copies_by_sample: dict[int, list[Copy]] = {}
    for copy in near_copies:
        copies_by_sample.setdefault(copy.sample, []).append(copy)
    for sample in sorted({*exact_copies, *copies_by_sample}):
        if sample in exact_copies:
            root = listed.get(exact_copies[sample].original)
            listed[sample] = root._replace(sample=sample) if root else exact_copies[sample]
        elif remaining := [copy for copy in copies_by_sample[sample] if copy.original not in listed]:
            listed[sample] = max(remaining, key=lambda copy: (copy.score, -copy.original))
    return list(listed.values())


def copies_to_csv(copies: Sequence[dict[str, Any]]) -> str:
    """Format the `duplicates` of a document of `data dedup` as CSV."""
    csv_rows = (
        [escape_formula(copy["path"]), escape_formula(copy["duplicate_of"]), copy["reason"], f"{copy['score']:.4f}"]
        for copy in copies
    )
    return format_csv([LIST_COLUMNS, *csv_rows])


def remaining_to_csv(data: Data, names: frozenset[str], folder: Path) -> str:
    """Format the dataset without the samples in `names` as CSV with the columns of `train`: `path,label[,split]`.
    Numeric targets replace `label`; segments of clips add `start,end`. Paths are relative to `folder`.

    Raises UsageError for data that are not image files, DataError for a path or a class that CSV cannot store.
    """
    unstorable = [name for name in data.classes if "|" in name or name != name.strip() or not is_utf8(name)]
    if unstorable:
        problem = f"the class {escape_unprintable(unstorable[0])} cannot be written to a CSV file"
        raise DataError(problem, "rename the class, or use --exclude with the list")
    drops_split_column = data.unsplit and data.full_train_split is not None
    csv_rows = [["path", *(data.targets or ["label"]), "split"]]
    has_intervals = any(isinstance(split, ClipFiles) and split.segments is not None for split in data.splits.values())
    csv_rows[0] += ["start", "end"] if has_intervals else []
    for split_name, split in restore_original_splits(data).items():
        if not isinstance(split, FileSplit):
            problem = f"{data.name} does not consist of image files, which a CSV file needs"
            raise UsageError(problem, "use the list: vitreous train DATA --exclude LIST")
        for sample in find_kept_samples(split, names):
            path, label = os.path.relpath(split.paths[sample], folder), split.labels[sample]
            if not is_utf8(path):
                problem = f"{split.name(int(sample))}: a name that is not UTF-8 cannot be written to a CSV file"
                raise DataError(problem, "rename the file")
            csv_rows.append(
                [f"./{path}" if path.startswith(FORMULA_PREFIXES) else path, *write_label(data, label), split_name]
            )
            if has_intervals and isinstance(split, ClipFiles):
                start, end = split.get_segment(int(sample)) or (0.0, math.inf)
                csv_rows[-1] += [repr(start) if start else "", repr(end) if math.isfinite(end) else ""]
    split_column = csv_rows[0].index("split", 1 + len(data.targets))
    return format_csv(
        csv_row[:split_column] + csv_row[split_column + 1 :] if drops_split_column else csv_row for csv_row in csv_rows
    )


def write_label(data: Data, label: np.ndarray) -> list[str]:
    """Format a label of shape () or (K,) as cells: one cell with the class names, or one cell per numeric target, empty
    if its value is missing."""
    if data.targets:
        return ["" if math.isnan(value) else f"{value:.17g}" for value in label.tolist()]
    return ["|".join(data.classes[int(k)] for k in (np.flatnonzero(label) if label.ndim else [label]))]
