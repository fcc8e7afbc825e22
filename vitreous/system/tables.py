"""Tables for spreadsheets: CSV, in which no name is taken for a formula."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import Any

from vitreous.system.disk import write_output_file

FORMULA_PREFIXES = tuple("=+-@'\t\r")


def format_csv(rows: Iterable[Sequence[Any]]) -> str:
    """Rows of cells as CSV, the cells as they are."""
    text = io.StringIO(newline="")
    csv.writer(text).writerows(rows)
    return text.getvalue()


def escape_formula(name: str) -> str:
    """A name as a cell that no spreadsheet computes: taking the apostrophe in front away gives it back."""
    return "'" + name if name.startswith(FORMULA_PREFIXES) else name


def write_csv_file(path: str, head: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    """A CSV file that is there whole or not at all, its cells marked but for numbers. Raises ResourceError."""
    table = [["" if cell is None else str(cell) for cell in row] for row in rows]
    write_output_file(
        path,
        format_csv(
            [head, *([cell if is_number_text(cell) else escape_formula(cell) for cell in row] for row in table)]
        ),
    )


def is_number_text(cell: str) -> bool:
    """Whether a cell is a number."""
    with suppress(ValueError):
        return math.isfinite(float(cell))
    return False
