"""Tables for spreadsheets."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from vitreous.data.copies.listing import marked
from vitreous.disk import write_text
from vitreous.errors import ResourceError


def write_table(path: str, head: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
    """A CSV file that is there whole or not at all; no spreadsheet computes what is in it. Raises ResourceError."""
    text = io.StringIO()
    writer = csv.writer(text)
    writer.writerow(head)
    for row in rows:
        cells = ["" if cell is None else str(cell) for cell in row]
        writer.writerow([cell if number(cell) else marked(cell) for cell in cells])
    try:
        write_text(Path(path), text.getvalue())
    except OSError as error:
        raise ResourceError(f"cannot write {path}: {error.strerror}", "choose another file") from None


def number(cell: str) -> bool:
    """Whether a cell is a number."""
    with suppress(ValueError):
        return bool(np.isfinite(float(cell)))
    return False
