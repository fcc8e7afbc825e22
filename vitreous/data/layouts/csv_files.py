"""CSV files: which of the three formats a file has, and the files of a folder that have labels.

| columns | format |
|---|---|
| boxes | `annotations.box_table` |
| images and captions, no labels | `layouts.pair_table` |
| images and labels or values | `layouts.table` |
"""

from __future__ import annotations

from pathlib import Path

from vitreous.data.annotations.box_table import is_box_table, open_box_table
from vitreous.data.layouts.pair_table import MAX_HEADER_CHARS, is_pair_table, open_pair_table
from vitreous.data.layouts.table import open_table
from vitreous.data.split import Data


def open_csv_file(
    path: Path, split_seed: int = 0, group_by: str | None = None, axes: int | None = None, targets: tuple[str, ...] = ()
) -> Data:
    """Open the dataset of a CSV file by its columns: boxes, image-text pairs, or labels and values. `group_by`, `axes`
    and `targets` are those of `table.open_table`, and so are the errors."""
    if is_box_table(path):
        return open_box_table(path, split_seed)
    if not targets and is_pair_table(path):
        return open_pair_table(path, split_seed)
    return open_table(path, split_seed, group_by, axes, targets)


def find_label_table(folder: Path) -> Path | None:
    """Return the first CSV file directly in a folder with the columns path and label; None if there is none."""
    for path in sorted(folder.glob("*.csv")):
        try:
            with open(path, encoding="utf-8-sig") as file:
                columns = file.readline(MAX_HEADER_CHARS).strip().split(",")
        except (OSError, UnicodeDecodeError):
            continue
        if {"path", "label"} <= set(columns):
            return path
    return None
