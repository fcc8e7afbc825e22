"""CSV tables for spreadsheets, with names protected from evaluation as formulas."""

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
    """Format rows of cells as CSV, without escaping formulas."""
    text = io.StringIO(newline="")
    csv.writer(text).writerows(rows)
    return text.getvalue()


def escape_formula(name: str) -> str:
    """Return a name as a cell that spreadsheets do not evaluate; removing the leading apostrophe restores it."""
    return "'" + name if name.startswith(FORMULA_PREFIXES) else name


def write_csv_file(path: str, head: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    """Write a CSV file atomically, with all cells except numbers escaped. Raises ResourceError."""
    table = [["" if cell is None else str(cell) for cell in row] for row in rows]
    write_output_file(
        path,
        format_csv(
            [head, *([cell if is_number_text(cell) else escape_formula(cell) for cell in row] for row in table)]
        ),
    )


def is_number_text(cell: str) -> bool:
    """Return whether a cell is a number."""
    with suppress(ValueError):
        return math.isfinite(float(cell))
    return False
