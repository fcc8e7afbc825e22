"""Exclusion lists: samples that are left out of a dataset, as written by `vitreous data dedup`."""

from __future__ import annotations

import csv
import io
import os

import numpy as np

from vitreous.data.split import Data, Split
from vitreous.data.text_files import read_text
from vitreous.errors import DataError, escape_unprintable


def read_exclusion_list(path: str | os.PathLike[str]) -> frozenset[str]:
    """Read the names of the samples in an exclusion list, a CSV file with a column `path`. Names are those of
    `Split.name`. Raises DataError, with the row, if the list is invalid."""
    name, hint = escape_unprintable(path), "create it with `vitreous data dedup`"
    try:
        rows = list(csv.reader(io.StringIO(read_text(path), newline=""), strict=True))
    except csv.Error as error:
        raise DataError(f"{name} is not valid CSV ({error})", hint) from None
    if not rows or "path" not in rows[0]:
        raise DataError(f"{name}: no column path", hint)
    for row_number, row in enumerate(rows, 1):
        if row and len(row) != len(rows[0]):
            problem = f"{name}, row {row_number}: {len(row)} cells for {len(rows[0])} columns"
            raise DataError(problem, "put cells with commas in quotes")
    column = rows[0].index("path")
    return frozenset(row[column].removeprefix("'") for row in rows[1:] if row)  # undo `escape_formula`


def find_kept_samples(split: Split, names: frozenset[str]) -> np.ndarray:
    """Return the indices of a split's samples that are not in an exclusion list, (n,) int64."""
    return np.array([sample for sample in range(len(split)) if split.name(sample) not in names], dtype=np.int64)


def restore_original_splits(data: Data) -> dict[str, Split]:
    """Return the splits of a dataset, with validation images that were drawn from `train` put back into `train`."""
    if data.full_train_split is None:
        return dict(data.splits)
    drawn_names = ("train", "val")
    return {
        "train": data.full_train_split,
        **{name: split for name, split in data.splits.items() if name not in drawn_names},
    }
