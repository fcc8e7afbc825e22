"""Read and check the header and the rows of a CSV file of samples, whose format `table` describes."""

from __future__ import annotations

import csv
import difflib
import io
import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

from vitreous.data.layouts.file_names import normalise_name, resolve_unicode_path
from vitreous.data.layouts.split_names import SPLIT_OF_NAME, parse_split_name
from vitreous.data.text_files import read_text
from vitreous.data.values import is_numeric_text, is_value, parse_value
from vitreous.errors import DataError, escape_unprintable, format_first_lines, format_first_names, suggest_nearest

KNOWN_COLUMNS = ("path", "label", "split", "group", "start", "end")
DEFAULT_GROUP_COLUMN = "group"
MAX_LISTED_COLUMNS = 12  # columns listed in a note
#: similarity to the name of a known column above which a column is taken for a misspelling: `splits`, but not `site`
MISSPELLING_SIMILARITY = 0.85
TABLE_FORMAT_HINT = (
    "use a header path,label[,split][,group][,start,end] and one image or clip per row; several labels as a|b"
)


class TableHeader(NamedTuple):
    """The header of a table: its columns in order, the name of the group column, which may be missing, and the columns
    of regression targets."""

    columns: list[str]
    group: str
    targets: tuple[str, ...] = ()

    @property
    def unread_columns(self) -> list[str]:
        """The columns that are ignored, in order."""
        read = {*KNOWN_COLUMNS, self.group, *self.targets} - (
            {DEFAULT_GROUP_COLUMN} if self.group != DEFAULT_GROUP_COLUMN else set()
        )
        read -= {"label"} if self.targets and "label" not in self.targets else set()
        return [column for column in self.columns if column not in read]


class SampleRow(NamedTuple):
    """A row of a table: one sample.

    `path` is the path as written in the file. `labels` is None, and `split` and `group` are "", if there is no such
    column. `line` counts from 1. `start` and `end` of a clip are in seconds. `values` are those of the regression
    targets, NaN if missing.
    """

    path: str
    labels: tuple[str, ...] | None
    split: str
    group: str
    line: int
    start: float = 0.0
    end: float = math.inf
    values: tuple[float, ...] = ()

    @property
    def sample(self) -> tuple[str, float, float]:
        """The normalised path, start and end, which identify the sample."""
        return os.path.normpath(self.path), self.start, self.end

    def with_stored_path(self, folder: Path) -> SampleRow:
        """Return the row with its path as the file system spells it, which may differ in Unicode form; unchanged if
        there is no such file below `folder`."""
        path = None if self.path.isascii() else resolve_unicode_path(os.path.join(folder, self.path))
        return self if path is None else self._replace(path=os.path.relpath(path, folder))

    @property
    def is_clip_segment(self) -> bool:
        """Whether the row refers to a segment of a clip, rather than to a complete file."""
        return (self.start, self.end) != (0.0, math.inf)


def read_table_rows(
    source: Path, group_by: str | None, targets: tuple[str, ...], name: str
) -> tuple[TableHeader, list[SampleRow]]:
    """Read and check a CSV file of samples. Returns its header, with the target columns, and its rows. `name` is the
    file's name for messages. Raises DataError, with the line, for invalid columns and cells."""
    lines = read_csv_lines(source, name)
    line, cells = next(lines)
    header, rows = parse_table_header(line, cells, group_by, name, targets), list(lines)
    if not header.targets and "label" not in header.columns:
        header = header._replace(targets=find_numeric_columns(header, rows, f"{name}, line {line}"))
    return header, [parse_table_row(cells, header, name, line) for line, cells in rows]


def find_numeric_columns(header: TableHeader, rows: list[tuple[int, list[str]]], location: str) -> tuple[str, ...]:
    """Return the columns of regression targets in a file without labels: all that have no other meaning. Raises
    DataError for a column among these that is not numeric."""
    numeric, other_columns = [], []
    for column in header.unread_columns:
        index = header.columns.index(column)
        cells = [cells[index] for _, cells in rows if len(cells) == len(header.columns)]
        is_numeric = column and all(map(is_value, cells)) and any(map(is_numeric_text, cells))
        (numeric if is_numeric else other_columns).append(column)
    if other_columns:
        separated = ";" in other_columns[0] or "\t" in other_columns[0]
        hint = (
            "separate cells with commas"
            if separated
            else suggest_nearest(other_columns[0], KNOWN_COLUMNS) or TABLE_FORMAT_HINT
        )
        hint = (
            f"for regression, choose columns in train, data check or data dedup: --targets {' '.join(numeric)}"
            if numeric
            else hint
        )
        raise DataError(f"{location}: unknown column {escape_unprintable(other_columns[0]) or 'without a name'}", hint)
    return tuple(numeric)


def read_csv_lines(source: Path, name: str) -> Iterator[tuple[int, list[str]]]:
    """Yield the line number and the cells of the header and of each row, without empty lines. Raises DataError, with
    the line, for an empty file and for invalid CSV."""
    reader = csv.reader(io.StringIO(read_text(source), newline=""), strict=True)
    line, is_empty = 1, True
    try:
        for cells in reader:
            if cells:
                yield line, cells
                is_empty = False
            line = reader.line_num + 1
    except csv.Error as error:
        hint = "put cells with commas, quotes or line ends in double quotes"
        raise DataError(f"{name}, line {line}: not CSV ({error})", hint) from None
    if is_empty:
        raise DataError(f"{name} is empty", TABLE_FORMAT_HINT)


def parse_table_header(
    line: int, cells: list[str], group_by: str | None, name: str, targets: tuple[str, ...] = ()
) -> TableHeader:
    """Parse and check the cells of a header.

    `group_by` is the name of the group column, or a regular expression (recognised by its parentheses), which is
    ignored here. Raises DataError for a missing, repeated or misspelt column, and for unknown columns if there is no
    column `path`.
    """
    columns, location = [cell.strip() for cell in cells], f"{name}, line {line}"
    is_pattern = group_by is not None and "(" in group_by and group_by not in columns
    header = TableHeader(columns, DEFAULT_GROUP_COLUMN if group_by is None or is_pattern else group_by, targets)
    if missing := [target for target in targets if target not in columns]:
        problem = f"{name} has no column {escape_unprintable(missing[0])}"
        raise DataError(
            problem,
            suggest_nearest(missing[0], columns) or f"columns: {format_first_names(columns, MAX_LISTED_COLUMNS)}",
        )
    if reserved_targets := [target for target in targets if target in KNOWN_COLUMNS and target != "label"]:
        raise DataError(f"{name}: the column {reserved_targets[0]} cannot be a target", "choose columns with values")
    for column in columns:
        if columns.count(column) > 1 and (column in (*KNOWN_COLUMNS, *targets) or column == header.group):
            raise DataError(f"{location}: two columns {escape_unprintable(column)}", "delete one of them")
    absent = [column for column in KNOWN_COLUMNS if column not in columns]
    for column in header.unread_columns:
        close_matches = difflib.get_close_matches(column.lower(), absent, 1, MISSPELLING_SIMILARITY)
        if close_matches or "path" not in columns:
            separated = ";" in column or "\t" in column
            hint = "separate cells with commas" if separated else suggest_nearest(column, absent) or TABLE_FORMAT_HINT
            raise DataError(f"{location}: unknown column {escape_unprintable(column) or 'without a name'}", hint)
    if "path" not in columns:
        raise DataError(f"{location}: no column path", TABLE_FORMAT_HINT)
    if group_by is not None and not is_pattern and group_by not in columns:
        hint_text = (
            f"columns: {format_first_names(columns, MAX_LISTED_COLUMNS)}; a "
            f"regular expression for paths needs parentheses"
        )
        raise DataError(
            f"{name} has no column {escape_unprintable(group_by)}", suggest_nearest(group_by, columns) or hint_text
        )
    return header


def parse_table_row(cells: list[str], header: TableHeader, name: str, line: int) -> SampleRow:
    """Parse and check the cells of a row. Raises DataError, with the line, for an invalid cell."""
    location = f"{name}, line {line}"
    if len(cells) != len(header.columns):
        problem = f"{len(cells)} cells for {len(header.columns)} columns"
        raise DataError(f"{location}: {problem}", "put cells with commas in double quotes")
    row = dict(zip(header.columns, cells, strict=True))
    if not row["path"]:
        raise DataError(f"{location}: no path", TABLE_FORMAT_HINT)
    text = "" if header.targets else row.get("label", "").strip()
    labels = [normalise_name(label.strip()) for label in text.split("|")] if text else []
    if "" in labels:
        hint = "delete the extra |"
        raise DataError(f"{location}: an empty label in {escape_unprintable(row['label'])}", hint)
    split_name, group = row.get("split", "").strip(), row.get(header.group, "").strip()
    split = parse_split_name(split_name)
    if "split" in row and not split:
        problem = f"unknown split {escape_unprintable(split_name)}" if split_name else "no split"
        raise DataError(
            f"{location}: {problem}",
            suggest_nearest(split_name.lower(), SPLIT_OF_NAME) or f"use {', '.join(SPLIT_OF_NAME)}",
        )
    if header.group in row and not group:
        raise DataError(
            f"{location}: no {escape_unprintable(header.group)}", "give an image without a group a unique name"
        )
    row_labels = tuple(dict.fromkeys(labels)) if "label" in row else None
    values = tuple(parse_value(row[target], target, location) for target in header.targets)
    start, end = (
        parse_seconds(row.get(column, ""), column, default, location)
        for column, default in (("start", 0.0), ("end", math.inf))
    )
    if end <= start:
        raise DataError(f"{location}: the end, {end:g} s, is not after the start, {start:g} s", "correct start and end")
    return SampleRow(
        row["path"], row_labels, split=split or "", group=group, line=line, start=start, end=end, values=values
    )


def parse_seconds(cell: str, column: str, default: float, location: str) -> float:
    """Parse the seconds in a cell; an empty cell is `default`. Raises DataError, with `location`, for other text and
    for negative numbers."""
    try:
        value = float(cell) if cell.strip() else default
    except ValueError:
        value = math.nan
    if not value >= 0 or (cell.strip() and not math.isfinite(value)):
        raise DataError(
            f"{location}: {column} is {escape_unprintable(cell)}, not seconds from 0", "write seconds as 2.5"
        )
    return value


def drop_duplicate_rows(rows: list[SampleRow], name: str) -> tuple[list[SampleRow], list[str]]:
    """Drop rows with the same sample and split as an earlier row. Returns the other rows, and notes about duplicates.

    A sample in two splits stays in both, with a note. Raises DataError for a sample with contradictory labels, values
    or groups.
    """
    first_by_sample: dict[tuple[str, float, float], SampleRow] = {}
    unique: dict[tuple[tuple[str, float, float], str], SampleRow] = {}
    contradictions: dict[str, list[SampleRow]] = {"labels": [], "values": [], "groups": []}
    shared_paths = set()
    for row in rows:
        first_row = first_by_sample.setdefault(row.sample, row)
        if set(first_row.labels or ()) != set(row.labels or ()):
            contradictions["labels"].append(row)
        if not np.array_equal(first_row.values, row.values, equal_nan=True):
            contradictions["values"].append(row)
        if first_row.group != row.group:
            contradictions["groups"].append(row)
        if first_row.split != row.split:
            shared_paths.add(row.sample[0])
        unique.setdefault((row.sample, row.split), row)
    for field, conflicting_rows in contradictions.items():
        if conflicting_rows:
            problem = (
                f"{len(conflicting_rows)} rows contradict the {field} of an earlier "
                f"row:{format_row_list(conflicting_rows)}"
            )
            raise DataError(f"{name}: {problem}", "keep one row per image")
    notes = [f"{len(rows) - len(unique)} rows are duplicates and are ignored"] if len(unique) < len(rows) else []
    if shared_paths:
        notes.append(
            f"{len(shared_paths)} images are in more than one split; the first "
            f"is {escape_unprintable(min(shared_paths))}"
        )
    return list(unique.values()), notes


def format_row_list(rows: list[SampleRow]) -> str:
    """Format the lines and paths of the first rows for a message, with the number of further rows."""
    return format_first_lines((f"line {row.line}: {escape_unprintable(row.path)}" for row in rows), len(rows))
