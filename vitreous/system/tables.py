"""Tables for spreadsheets: CSV, in which no name is taken for a formula."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import Any

from vitreous.system.disk import write_output

MARKED = tuple("=+-@'\t\r")


def as_csv(rows: Iterable[Sequence[Any]]) -> str:
    """Rows of cells as CSV, the cells as they are."""
    text = io.StringIO(newline="")
    csv.writer(text).writerows(rows)
    return text.getvalue()


def marked(name: str) -> str:
    """A name as a cell that no spreadsheet computes: taking the apostrophe in front away gives it back."""
    return "'" + name if name.startswith(MARKED) else name


def write_table(path: str, head: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    """A CSV file that is there whole or not at all, its cells marked but for numbers. Raises ResourceError."""
    table = [["" if cell is None else str(cell) for cell in row] for row in rows]
    write_output(path, as_csv([head, *([cell if number(cell) else marked(cell) for cell in row] for row in table)]))


def number(cell: str) -> bool:
    """Whether a cell is a number."""
    with suppress(ValueError):
        return math.isfinite(float(cell))
    return False
