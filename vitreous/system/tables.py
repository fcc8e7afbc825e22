"""CSV files for spreadsheets, in which texts are protected from evaluation as formulas."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import Any

from vitreous.system.disk import write_output_file

FORMULA_PREFIXES = tuple("=+-@'\t\r")  # first characters of cells that spreadsheets evaluate, and the escape character


def format_csv(rows: Iterable[Sequence[Any]]) -> str:
    """Format rows of cells as CSV, without escaping formulas."""
    text = io.StringIO(newline="")
    csv.writer(text).writerows(rows)
    return text.getvalue()


def escape_formula(name: str) -> str:
    """Return a text as a cell that spreadsheets do not evaluate: with a leading apostrophe if it looks like a formula.
    Removing the apostrophe restores it."""
    return "'" + name if name.startswith(FORMULA_PREFIXES) else name


def write_csv_file(path: str, head: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    """Write a CSV file atomically; all cells except numbers are escaped. Raises ResourceError if it cannot be
    written."""
    table = [["" if cell is None else str(cell) for cell in row] for row in rows]
    write_output_file(
        path,
        format_csv(
            [head, *([cell if is_number_text(cell) else escape_formula(cell) for cell in row] for row in table)]
        ),
    )


def is_number_text(cell: str) -> bool:
    """Return whether the text of a cell is a finite number."""
    with suppress(ValueError):
        return math.isfinite(float(cell))
    return False
