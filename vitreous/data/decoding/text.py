"""Numbers in text: a table with a row on each line, its cells between commas, semicolons, tabs or spaces."""

from __future__ import annotations

import numpy as np


def parse_numbers(content: bytes) -> np.ndarray:
    """The bytes of a table in UTF-8 as (rows, columns) float64; a first line that has a word in it is a header, and
    empty lines stand for nothing. Raises ValueError, with the line, for anything else."""
    lines = [(number, line.strip()) for number, line in enumerate(content.decode("utf-8-sig").splitlines(), 1)]
    rows = [(number, [cell.strip('"') for cell in split_cells(line)]) for number, line in lines if line]
    if rows and any(cell and not is_number(cell) for cell in rows[0][1]):
        del rows[0]
    if not rows:
        raise ValueError("no numbers")
    for number, row in rows:
        if len(row) != len(rows[0][1]):
            raise ValueError(f"line {number}: {len(row)} cells, {len(rows[0][1])} in the lines before")
        if wrong := [cell for cell in row if not is_number(cell)]:
            raise ValueError(f"line {number}: {wrong[0][:40] or 'an empty cell'} is no number")
    return np.array([[float(cell) for cell in row] for _, row in rows])


def split_cells(line: str) -> list[str]:
    """The cells of a line: between commas, semicolons or tabs where it has any, else between spaces."""
    mark = next((mark for mark in ",;\t" if mark in line), None)
    return [cell.strip() for cell in line.split(mark)]


def is_number(cell: str) -> bool:
    """Whether a cell holds a number."""
    try:
        float(cell)
    except ValueError:
        return False
    return True
