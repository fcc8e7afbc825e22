"""CSV files of images or clips: a header `path[,label][,split][,group][,start][,end]`, then one sample per row.

    path,label,split,group
    birds/1.jpg,duck|water,train,video 7

A label cell has one label, several separated by `|`, or none. Paths are relative to the folder of the file. Images of
one group (a patient, a scene, a video) are never divided between splits. Another column may define the groups
(`--group-by COLUMN`). Other columns are ignored if `path` and `label` are present.

    path,weight,height,split
    fish/1.jpg,1.25,34,train

Without a column `label`, numeric columns are regression targets; `--targets COLUMN` selects them among other columns. A
cell may be empty.

    path,label,start,end
    films/1.mp4,jump,2.5,4

If all files are volumes or signals (see `vitreous.data.layouts.volumes`), so are the data. If all are clips or folders
of frames, the data are video. `start` and `end`, in seconds, select a segment; an empty cell is the clip's start or
end. Without groups, segments of one file are never divided between splits.
"""

from __future__ import annotations

import csv
import difflib
import io
import math
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from vitreous.data.layouts.classes import build_label_array, one_class_note, sort_class_names, too_few_classes_error
from vitreous.data.layouts.file_names import normalise_name, resolve_unicode_path
from vitreous.data.layouts.split_names import SPLIT_OF_NAME, parse_split_name
from vitreous.data.layouts.video import ClipFiles, are_clip_files, clips_note
from vitreous.data.layouts.volumes import ArrayFiles, arrays_note, detect_array_axes, no_arrays_error
from vitreous.data.split import Data, FileSplit, Split, create_empty_labels, ensure_val_split
from vitreous.data.text_files import read_text
from vitreous.data.values import is_numeric_text, is_value, parse_value
from vitreous.errors import DataError, escape_unprintable, format_first_lines, format_first_names, suggest_nearest

CLIP_FILES_KIND = -1  # stands for clips where other kinds have their number of axes
KNOWN_COLUMNS = ("path", "label", "split", "group", "start", "end")
DEFAULT_GROUP_COLUMN = "group"
MAX_LISTED_COLUMNS = 12  # columns listed in a note
MISSPELLING_SIMILARITY = 0.85  # similarity above which a column is taken for a misspelt known one: `splits`, not `site`
TABLE_FORMAT_HINT = (
    "expected a header path,label[,split][,group][,start,end] and one image or clip per row; several labels as a|b"
)


class TableHeader(NamedTuple):
    """The columns of a file in order, the group column if there is one, and the target columns."""

    columns: list[str]
    group: str
    targets: tuple[str, ...] = ()

    @property
    def unread_columns(self) -> list[str]:
        """The columns that are ignored."""
        read = {*KNOWN_COLUMNS, self.group, *self.targets} - (
            {DEFAULT_GROUP_COLUMN} if self.group != DEFAULT_GROUP_COLUMN else set()
        )
        read -= {"label"} if self.targets and "label" not in self.targets else set()
        return [column for column in self.columns if column not in read]


class SampleRow(NamedTuple):
    """One sample of a table.

    `path` is as written, `labels` is None without a label column, `split` and `group` are "" without such a column.
    `line` counts from 1. `start` and `end` of a clip are in seconds. `values` are the targets, NaN if missing.
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
        """The file, and the segment of it, that the row refers to."""
        return os.path.normpath(self.path), self.start, self.end

    def with_stored_path(self, folder: Path) -> SampleRow:
        """Return the row with its path in the Unicode form of an existing file below `folder`."""
        path = None if self.path.isascii() else resolve_unicode_path(os.path.join(folder, self.path))
        return self if path is None else self._replace(path=os.path.relpath(path, folder))

    @property
    def is_clip_segment(self) -> bool:
        """Whether the row refers to a segment of a file."""
        return (self.start, self.end) != (0.0, math.inf)


def open_table(
    source: Path,
    split_seed: int = 0,
    group_by: str | None = None,
    axes: int | None = None,
    targets: tuple[str, ...] = (),
) -> Data:
    """Open the dataset of a CSV file (UTF-8).

    `axes`: files are signals (1), images (2) or volumes (3), if suffixes and the first file are ambiguous. `group_by`:
    the column that defines the groups in place of `group`, or a regular expression, which `vitreous.data.grouping`
    handles. `targets`: the columns whose values are the labels; () without a label column: all other numeric columns.
    Labels are then (n, T) float64, NaN for an empty cell.

    Labels are (n,) int64 if every image has exactly one; else (n, K) float32, 1 for each class of an image. Without a
    label column, or with fewer than two classes, images are unlabelled. Without validation rows, a tenth of the
    training images is held out. Class order is natural; samples are in file order.

    Raises DataError, with the line, for invalid cells, columns, splits and classes, for one image with contradictory
    labels or groups, and for missing files.
    """
    name = escape_unprintable(source)
    header, rows = read_table_rows(source, group_by, targets, name)
    folder = source.parent.absolute() if any(os.path.isabs(row.path) for row in rows) else source.parent
    rows, notes = drop_duplicate_rows([row.with_stored_path(folder) for row in rows], name)
    if missing := [row for row in rows if not os.path.lexists(os.path.join(folder, row.path))]:
        problem = f"{len(missing)} of {len(rows)} files are missing:{format_row_list(missing)}"
        raise DataError(f"{name}: {problem}", f"looked in {escape_unprintable(folder)}")
    rows_by_split = {
        split: [row for row in rows if row.split == split] for split in dict.fromkeys(row.split for row in rows)
    }
    unsplit = list(rows_by_split) == [""]
    if unsplit:
        rows_by_split = {"train": rows}
    if not rows_by_split.get("train"):
        problem = f"{', '.join(rows_by_split)} but no rows of the split train" if rows else "no rows"
        raise DataError(f"{name} has {problem}", TABLE_FORMAT_HINT)
    if header.targets:
        classes, unlabelled = (), None
        labels = {
            split: collect_target_values(split_rows, header.targets) for split, split_rows in rows_by_split.items()
        }
        notes += values_notes(rows)
    else:
        classes, labels, unlabelled = encode_table_labels(rows_by_split, rows, name, notes)
    file_kind = classify_table_files(rows, folder, name, axes)
    splits: dict[str, Split] = {
        split: build_table_split(split_rows, folder, labels[split], file_kind)
        for split, split_rows in rows_by_split.items()
    }
    notes[:0] = (
        [clips_note(len(rows)) if file_kind == CLIP_FILES_KIND else arrays_note(len(rows), file_kind)]
        if file_kind
        else []
    )
    notes += (
        [f"ignored columns: {format_first_names(header.unread_columns, MAX_LISTED_COLUMNS)}"]
        if header.unread_columns
        else []
    )
    groups = encode_groups(rows_by_split, notes)
    splits, full_train = ensure_val_split(splits, split_seed, notes, groups)
    column = header.group if header.group in header.columns else None
    return Data(
        name,
        classes,
        splits=splits,
        notes=notes,
        unsplit=unsplit,
        full_train_split=full_train,
        groups=groups,
        group_column=column,
        unlabelled=unlabelled,
        targets=header.targets,
    )


def read_table_rows(
    source: Path, group_by: str | None, targets: tuple[str, ...], name: str
) -> tuple[TableHeader, list[SampleRow]]:
    """Return the header of a file, with its target columns, and its validated rows. Raises DataError with the line."""
    lines = read_csv_lines(source, name)
    line, cells = next(lines)
    header, rows = parse_table_header(line, cells, group_by, name, targets), list(lines)
    if not header.targets and "label" not in header.columns:
        header = header._replace(targets=find_numeric_columns(header, rows, f"{name}, line {line}"))
    return header, [parse_table_row(cells, header, name, line) for line, cells in rows]


def encode_table_labels(
    rows_by_split: dict[str, list[SampleRow]], rows: list[SampleRow], name: str, notes: list[str]
) -> tuple[tuple[str, ...], dict[str, np.ndarray], DataError | None]:
    """Return the training classes, the labels of each split, (n,) int64 or (n, K) float32, and any reason for missing
    labels; append to the notes."""
    classes = sort_class_names(list({label for row in rows_by_split["train"] for label in row.labels or ()}))
    labelled = [
        row
        for split, split_rows in rows_by_split.items()
        if split == "train" or has_any_label(split_rows)
        for row in split_rows
    ]
    num_multiple = sum(len(row.labels or ()) > 1 for row in labelled)
    num_unlabelled = sum(not row.labels for row in labelled)
    multilabel = num_multiple + num_unlabelled > 0
    unlabelled = explain_missing_labels(name, rows, classes, multilabel)
    if unlabelled is not None:
        notes += one_class_note(classes)
        classes = []
    elif multilabel:
        notes.append(
            f"multi-label: {num_multiple} of {len(labelled)} images have several labels, {num_unlabelled} have none"
        )
    labels = {
        split: encode_row_labels(split_rows, split, classes, multilabel, name)
        for split, split_rows in rows_by_split.items()
    }
    return tuple(classes), labels, unlabelled


def find_numeric_columns(header: TableHeader, rows: list[tuple[int, list[str]]], location: str) -> tuple[str, ...]:
    """Return the other columns of a file without labels as targets. Raises DataError for a non-numeric column."""
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


def collect_target_values(rows: list[SampleRow], targets: tuple[str, ...]) -> np.ndarray:
    """Collect the target values of rows: (n, T) float64, NaN for an empty cell; (n, 0) if all are empty."""
    values = np.array([row.values for row in rows], np.float64).reshape(len(rows), len(targets))
    return create_empty_labels(len(rows)) if np.isnan(values).all() else values


def values_notes(rows: list[SampleRow]) -> list[str]:
    """Return the note about images without values; empty if there are none."""
    num_empty = sum(all(map(math.isnan, row.values)) for row in rows)
    return [f"{num_empty:,} of {len(rows):,} images have no value"] if num_empty else []


def classify_table_files(rows: list[SampleRow], folder: Path, name: str, axes: int | None) -> int:
    """Return CLIP_FILES_KIND, the axes of volumes or signals, or 0 for images. Raises DataError, with the line, for a
    segment of a non-clip, and for files that cannot have these `axes`."""
    paths = list(dict.fromkeys(os.path.join(folder, row.path) for row in rows))
    if axes is None and are_clip_files(paths):
        return CLIP_FILES_KIND
    if segment_rows := [row for row in rows if row.is_clip_segment]:
        problem = f"{name}, line {segment_rows[0].line}: start and end require that all files are clips"
        raise DataError(problem, "remove the columns, or list only clips")
    array_axes = detect_array_axes(paths, axes)
    if axes in (1, 3) and array_axes is None:
        invalid_row = next(
            row for row, path in zip(rows, paths, strict=False) if detect_array_axes([path], axes) is None
        )
        raise DataError(
            f"{name}, line {invalid_row.line}: {no_arrays_error(invalid_row.path, axes).message}",
            no_arrays_error("", axes).hint,
        )
    return array_axes or 0


def build_table_split(rows: list[SampleRow], folder: Path, labels: np.ndarray, file_kind: int) -> FileSplit:
    """Build the split of n rows, with labels (n,) int64 or (n, K) float32, for a kind from `classify_table_files`."""
    paths = [folder / row.path for row in rows]
    if file_kind != CLIP_FILES_KIND:
        return ArrayFiles(paths, labels, file_kind) if file_kind else FileSplit(paths, labels)
    segments = np.array([(row.start, row.end) for row in rows], np.float64).reshape(-1, 2)
    return ClipFiles(paths, labels, segments if any(row.is_clip_segment for row in rows) else None)


def explain_missing_labels(name: str, rows: list[SampleRow], classes: list[str], multilabel: bool) -> DataError | None:
    """Return why the images have no labels: no label column, or fewer than two classes; None if they have labels."""
    if rows[0].labels is None:
        return DataError(f"{name}: no column label", TABLE_FORMAT_HINT)
    return too_few_classes_error(name, classes, TABLE_FORMAT_HINT) if len(classes) < (1 if multilabel else 2) else None


def encode_groups(rows_by_split: dict[str, list[SampleRow]], notes: list[str]) -> np.ndarray | None:
    """Encode the groups of the training images, (n,) int64 or None; add a note about groups in several splits. Without
    a group column, segments of one file form a group."""
    if not rows_by_split["train"][0].group and not any(
        row.is_clip_segment for rows in rows_by_split.values() for row in rows
    ):
        return None
    splits_by_group: dict[str, set[str]] = {}
    for split, rows in rows_by_split.items():
        for row in rows:
            splits_by_group.setdefault(row.group or row.sample[0], set()).add(split)
    if shared_groups := [group for group, splits in splits_by_group.items() if len(splits) > 1]:
        notes.append(
            f"{len(shared_groups)} groups are in more than one split; the first "
            f"is {escape_unprintable(min(shared_groups))}"
        )
    index_by_group = {group: index for index, group in enumerate(sorted(splits_by_group))}
    return np.array([index_by_group[row.group or row.sample[0]] for row in rows_by_split["train"]], dtype=np.int64)


def read_csv_lines(source: Path, name: str) -> Iterator[tuple[int, list[str]]]:
    """Yield line number and cells of the header and of each row. Raises DataError with the line."""
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
    """Parse a header. Raises DataError for a missing, repeated or misspelt column, and for unknown columns if there is
    no path.

    `group_by` is the group column, or, with parentheses, a regular expression.
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
    """Parse and validate one row. Raises DataError with the line."""
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
    """Parse the seconds in a cell; the default if it is empty. Raises DataError for other text."""
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
    """Drop duplicate rows, and return notes about them.

    An image in two splits stays in both, with a note. Raises DataError for an image with contradictory labels or
    groups.
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


def has_any_label(rows: list[SampleRow]) -> bool:
    """Return whether any row has a label."""
    return any(row.labels for row in rows)


def format_row_list(rows: list[SampleRow]) -> str:
    """Format the first rows by line and path, and the number of further rows."""
    return format_first_lines((f"line {row.line}: {escape_unprintable(row.path)}" for row in rows), len(rows))


def encode_row_labels(
    rows: list[SampleRow], split: str, classes: Sequence[str], multilabel: bool, name: str
) -> np.ndarray:
    """Encode row labels as (n,) int64 classes, or (n, K) float32 if `multilabel`; (n, 0) without classes, and for an
    unlabelled held-out split. Raises DataError for classes that train does not have."""
    if not classes or (split != "train" and not has_any_label(rows)):
        return create_empty_labels(len(rows))
    class_set = set(classes)
    line = next((f", line {row.line}" for row in rows if not class_set.issuperset(row.labels or ())), "")
    codes = {label: code for code, label in enumerate(dict.fromkeys(row.labels or () for row in rows))}
    label_indices = np.array([codes[row.labels or ()] for row in rows], dtype=np.int64)
    return build_label_array(f"{name}{line}: {split}", list(codes), label_indices, classes, multilabel)
