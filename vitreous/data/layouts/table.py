"""Images listed in a CSV file: `path[,label][,split][,group]` in a header, then one image a row.

    path,label,split,group
    birds/1.jpg,duck|water,train,video 7

A cell of labels has one, or several with `|` between them, or none. Paths are relative to the file's own folder. Images
of one group (a patient, a scene, a video) are never drawn apart.
"""

from __future__ import annotations

import csv
import io
import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

from vitreous.data.decoding.decode import read_regular
from vitreous.data.layouts.classes import WORDS, class_order, label_array, one_class_note, too_few_classes
from vitreous.data.split import Data, Files, Split, no_labels, with_val
from vitreous.errors import DataError, first_lines, nearest, printable

COLUMNS = ("path", "label", "split", "group")
EXPECTED = "expected a header path,label[,split][,group] and one image a row; several labels as a|b"


class Row(NamedTuple):
    """One image: its path as the file has it, its labels (None where there is no such column), its split and group (""
    where there is no such column), its line from 1."""

    path: str
    labels: tuple[str, ...] | None
    split: str
    group: str
    line: int


def table(source: Path, split_seed: int = 0) -> Data:
    """Open the data set that a CSV file (UTF-8) describes.

    Labels are (n,) int64 where every image has exactly one; else (n, K) float32, 1 where an image has the class.
    Without a column of labels, and with fewer than two classes, the images have none. Without rows for validation, a
    tenth of the training images is held out. Class order is natural; samples are in the order of the file. Raises
    DataError, with the line, for invalid cells, columns, splits and classes, for one image with two answers or groups,
    and for missing files.
    """
    name = printable(source)
    rows, notes = distinct(list(read(source, name)), name)
    home = source.parent.absolute() if any(os.path.isabs(row.path) for row in rows) else source.parent
    if missing := [row for row in rows if not os.path.lexists(os.path.join(home, row.path))]:
        problem = f"{len(missing)} of {len(rows)} files are not there:{listing(missing)}"
        raise DataError(f"{name}: {problem}", f"looked in {printable(home)}")
    parts = {split: [row for row in rows if row.split == split] for split in dict.fromkeys(row.split for row in rows)}
    unsplit = list(parts) == [""]
    if unsplit:
        parts = {"train": rows}
    if not parts.get("train"):
        problem = f"{', '.join(parts)} but no row of the split train" if rows else "no rows"
        raise DataError(f"{name} has {problem}", EXPECTED)
    classes = class_order(list({label for row in parts["train"] for label in row.labels or ()}))
    multiple = sum(len(row.labels or ()) > 1 for row in rows)
    none = sum(not row.labels for row in rows)
    multilabel = multiple + none > 0
    unlabelled = why_unlabelled(name, rows, classes, multilabel)
    if unlabelled is not None:
        notes += one_class_note(classes)
        classes = []
    elif multilabel:
        notes.append(f"multi-label: {multiple} of {len(rows)} images have several labels, {none} have none")
    splits: dict[str, Split] = {
        split: Files(
            [home / row.path for row in part],
            no_labels(len(part)) if unlabelled else labels_of(part, split, classes, multilabel, name),
        )
        for split, part in parts.items()
    }
    groups = read_groups(parts, notes)
    splits, whole = with_val(splits, split_seed, notes, groups)
    return Data(name, tuple(classes), splits, notes, unsplit, whole, groups=groups, unlabelled=unlabelled)


def why_unlabelled(name: str, rows: list[Row], classes: list[str], multilabel: bool) -> DataError | None:
    """Why the images have no labels: no column of them, or fewer than two classes; None where they have some."""
    if rows[0].labels is None:
        return DataError(f"{name}: no column label", EXPECTED)
    return too_few_classes(name, classes, EXPECTED) if len(classes) < (1 if multilabel else 2) else None


def read_groups(parts: dict[str, list[Row]], notes: list[str]) -> np.ndarray | None:
    """The groups of the training images, (n,) int64 or None; notes those that the file's own splits part."""
    if not parts["train"][0].group:
        return None
    homes: dict[str, set[str]] = {}
    for split, rows in parts.items():
        for row in rows:
            homes.setdefault(row.group, set()).add(split)
    if parted := [group for group, splits in homes.items() if len(splits) > 1]:
        notes.append(f"{len(parted)} groups are in more than one split; the first is {printable(min(parted))}")
    place = {group: index for index, group in enumerate(sorted(homes))}
    return np.array([place[row.group] for row in parts["train"]], dtype=np.int64)


def read(source: Path, name: str) -> Iterator[Row]:
    """The rows of a file, each checked by itself. Raises DataError with the line."""
    content = read_regular(source)
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise DataError(f"{name}, line {line}: not UTF-8", "save it as UTF-8") from None
    reader = csv.reader(io.StringIO(text, newline=""), strict=True)
    columns: list[str] = []
    line = 1
    try:
        for cells in reader:
            if cells and not columns:
                columns = header(cells, f"{name}, line {line}")
            elif cells:
                yield row_of(cells, columns, name, line)
            line = reader.line_num + 1
    except csv.Error as error:
        hint = "put cells with commas, quotes or line ends in double quotes"
        raise DataError(f"{name}, line {line}: not CSV ({error})", hint) from None
    if not columns:
        raise DataError(f"{name} is empty", EXPECTED)


def header(cells: list[str], where: str) -> list[str]:
    """The columns that a header names. Raises DataError for an unknown, a repeated or a missing one."""
    columns = [cell.strip() for cell in cells]
    for column in columns:
        if column not in COLUMNS:
            separated = ";" in column or "\t" in column
            hint = "separate cells with commas" if separated else nearest(column, COLUMNS) or EXPECTED
            raise DataError(f"{where}: unknown column {printable(column) or 'without a name'}", hint)
        if columns.count(column) > 1:
            raise DataError(f"{where}: two columns {column}", "keep one of them")
    if "path" not in columns:
        raise DataError(f"{where}: no column path", EXPECTED)
    return columns


def row_of(cells: list[str], columns: list[str], name: str, line: int) -> Row:
    """One row, checked. Raises DataError with the line."""
    where = f"{name}, line {line}"
    if len(cells) != len(columns):
        problem = f"{len(cells)} cells for {len(columns)} columns"
        raise DataError(f"{where}: {problem}", "put cells with commas in double quotes")
    row = dict(zip(columns, cells, strict=True))
    if not row["path"]:
        raise DataError(f"{where}: no path", EXPECTED)
    text = row.get("label", "").strip()
    labels = [label.strip() for label in text.split("|")] if text else []
    if "" in labels:
        hint = "take out the | that has nothing on one side"
        raise DataError(f"{where}: an empty label in {printable(row['label'])}", hint)
    word, group = row.get("split", "").strip(), row.get("group", "").strip()
    if "split" in row and word not in WORDS:
        problem = f"unknown split {printable(word)}" if word else "no split"
        raise DataError(f"{where}: {problem}", nearest(word, WORDS) or f"use {', '.join(WORDS)}")
    if "group" in row and not group:
        raise DataError(f"{where}: no group", "give an image that belongs to no other a name of its own")
    named = tuple(dict.fromkeys(labels)) if "label" in row else None
    return Row(row["path"], named, WORDS.get(word, ""), group, line)


def distinct(rows: list[Row], name: str) -> tuple[list[Row], list[str]]:
    """The rows without repetitions, and notes on those.

    An image in two splits stays in both, with a note. Raises DataError for an image with two different answers or
    groups.
    """
    first: dict[str, Row] = {}
    unique: dict[tuple[str, str], Row] = {}
    contrary: dict[str, list[Row]] = {"labels": [], "groups": []}
    shared = set()
    for row in rows:
        path = os.path.normpath(row.path)
        known = first.setdefault(path, row)
        if set(known.labels or ()) != set(row.labels or ()):
            contrary["labels"].append(row)
        if known.group != row.group:
            contrary["groups"].append(row)
        if known.split != row.split:
            shared.add(path)
        unique.setdefault((path, row.split), row)
    for field, faults in contrary.items():
        if faults:
            problem = f"{len(faults)} rows give an image other {field} than an earlier row:{listing(faults)}"
            raise DataError(f"{name}: {problem}", "keep one of them")
    notes = [f"{len(rows) - len(unique)} rows repeat another and are left out"] if len(unique) < len(rows) else []
    if shared:
        notes.append(f"{len(shared)} images are in more than one split; the first is {printable(min(shared))}")
    return list(unique.values()), notes


def listing(rows: list[Row]) -> str:
    """The first rows by line and path, and how many more there are."""
    return first_lines((f"line {row.line}: {printable(row.path)}" for row in rows), len(rows))


def labels_of(rows: list[Row], split: str, classes: list[str], multilabel: bool, name: str) -> np.ndarray:
    """Rows -> (n,) int64 classes, or (n, K) float32 if `multilabel`. Raises DataError for classes that train lacks."""
    known = set(classes)
    line = next((f", line {row.line}" for row in rows if not known.issuperset(row.labels or ())), "")
    codes = {label: code for code, label in enumerate(dict.fromkeys(row.labels or () for row in rows))}
    own = np.array([codes[row.labels or ()] for row in rows], dtype=np.int64)
    return label_array(f"{name}{line}: {split}", list(codes), own, classes, multilabel)
