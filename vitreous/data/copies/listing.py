"""The list that `data dedup` leaves: `path,copy_of,reason,score`, one copy a row, and the data set without them.

A cell that a spreadsheet would take for a formula, or that begins with an apostrophe, gets an apostrophe in front:
taking one away gives every name back.
"""

from __future__ import annotations

import csv
import io
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from vitreous.data.decoding.decode import read_regular
from vitreous.data.split import Data, Files, Split
from vitreous.disk import is_utf8
from vitreous.errors import DataError, UsageError, printable
from vitreous.tables import MARKED, as_csv, marked

HEADER = ["path", "copy_of", "reason", "score"]


def listed(copies: Sequence[dict[str, Any]]) -> str:
    """The copies of a document of `dedup`, as CSV."""
    rows = ([marked(copy["path"]), marked(copy["copy_of"]), copy["reason"], f"{copy['score']:.4f}"] for copy in copies)
    return as_csv([HEADER, *rows])


def excluded(path: str | os.PathLike[str]) -> frozenset[str]:
    """The names of the copies in a list, as `Split.name` says them. Raises DataError, with the line, for what is no
    such list."""
    name = printable(path)
    try:
        rows = list(csv.reader(io.StringIO(read_regular(path).decode("utf-8-sig"), newline=""), strict=True))
    except (UnicodeDecodeError, csv.Error) as error:
        raise DataError(f"{name}: not CSV in UTF-8 ({error})", "make it with `vitreous data dedup`") from None
    if not rows or "path" not in rows[0]:
        raise DataError(f"{name}: no column path", "make it with `vitreous data dedup`")
    column = rows[0].index("path")
    short = next((number for number, row in enumerate(rows, 1) if row and len(row) != len(rows[0])), 0)
    if short:
        raise DataError(
            f"{name}, row {short}: {len(rows[short - 1])} cells for {len(rows[0])} columns",
            "put cells with commas in quotes",
        )
    return frozenset(row[column].removeprefix("'") for row in rows[1:] if row)


def staying(split: Split, names: frozenset[str]) -> np.ndarray:
    """The positions, int64, of a split's samples whose names are not in a list."""
    return np.array([sample for sample in range(len(split)) if split.name(sample) not in names], dtype=np.int64)


def remaining(data: Data, names: frozenset[str], home: Path) -> str:
    """The data set without some samples, as the CSV `path,label[,split]` that `train` takes, its paths relative to
    `home`.

    Raises UsageError for data that are no image files, DataError where the format has no way to write a path or a
    class.
    """
    unsplit = data.unsplit and data.whole is not None
    parts = {"train": data.whole} if unsplit else dict(data.splits)
    if not unsplit and data.whole is not None:  # what was drawn for validation goes back
        parts = {"train": data.whole} | {
            name: split for name, split in data.splits.items() if name not in ("train", "val")
        }
    wrong = [name for name in data.classes if "|" in name or name != name.strip() or not is_utf8(name)]
    if wrong:
        raise DataError(
            f"the class {printable(wrong[0])} cannot be written to a CSV file",
            "rename it, or use --exclude with the list",
        )

    def rows() -> Iterator[list[str]]:
        yield ["path", "label"] if unsplit else ["path", "label", "split"]
        for part, split in parts.items():
            if not isinstance(split, Files):
                raise UsageError(
                    f"{data.name} has no image files to write down", "use the list: vitreous train DATA --exclude LIST"
                )
            for sample in staying(split, names):
                path = os.path.relpath(split.paths[sample], home)
                if not is_utf8(path):
                    raise DataError(
                        f"{split.name(int(sample))}: a name that is not UTF-8 cannot be written to a CSV file",
                        "rename it",
                    )
                label = split.labels[sample]
                known = [data.classes[int(k)] for k in (np.flatnonzero(label) if split.labels.ndim == 2 else [label])]
                row = [f"./{path}" if path.startswith(MARKED) else path, "|".join(known)]
                yield row if unsplit else [*row, part]

    return as_csv(rows())
