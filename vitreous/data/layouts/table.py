"""Images listed in a CSV file: `path,label[,split][,group]` in a header, then one image a row.

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
from vitreous.data.layouts.folder import SPLITS, class_order
from vitreous.data.split import Data, Files, Split, with_val
from vitreous.errors import DataError, first_lines, nearest, printable

COLUMNS = ("path", "label", "split", "group")
EXPECTED = "expected a header path,label[,split][,group] and one image a row; several labels as a|b"
SHOWN = 20  # faults that a message names
MOST = 2**33  # bytes of the labels of all images, where images have several


class Row(NamedTuple):
    """One image: its path as the file has it, its labels, its split and group ("" where there is no such column), its
    line from 1."""

    path: str
    labels: tuple[str, ...]
    split: str
    group: str
    line: int


def table(source: Path, split_seed: int = 0) -> Data:
    """The data set that a CSV file (UTF-8) describes.

    Labels are (n,) int64 where every image has exactly one; else (n, K) float32, 1 where an image has the class.
    Without rows for validation, a tenth of the training images is held out. Class order is natural; samples stand in
    the order of the file. Raises DataError, with the line, for what cannot be: cells, columns, splits or classes out of
    place, one image with two answers or groups, files that are not there.
    """
    name = printable(source)
    rows, notes = distinct(list(read(source, name)), name)
    home = source.parent.absolute() if any(os.path.isabs(row.path) for row in rows) else source.parent
    missing = [row for row in rows if not os.path.lexists(os.path.join(home, row.path))]
    if missing:
        raise DataError(
            f"{name}: {len(missing)} of {len(rows)} files are not there:{listing(missing)}",
            f"looked in {printable(home)}",
        )
    parts = {split: [row for row in rows if row.split == split] for split in dict.fromkeys(row.split for row in rows)}
    unsplit = list(parts) == [""]
    if unsplit:
        parts = {"train": rows}
    if not parts.get("train"):
        raise DataError(
            f"{name} has " + (f"{', '.join(parts)} but no row of the split train" if rows else "no rows"), EXPECTED
        )
    classes = class_order(list({label for row in parts["train"] for label in row.labels}))
    multiple = sum(len(row.labels) > 1 for row in rows)
    none = sum(not row.labels for row in rows)
    if multiple or none:
        notes.append(f"multi-label: {multiple} of {len(rows)} images have several labels, {none} have none")
    if len(classes) < (1 if multiple or none else 2):
        one = f"one class only ({printable(classes[0])}); a classifier needs two" if classes else "no labels"
        raise DataError(f"{name} has {one}", EXPECTED)
    splits: dict[str, Split] = {
        split: Files([home / row.path for row in part], label_array(part, split, classes, bool(multiple or none), name))
        for split, part in parts.items()
    }
    groups, group_notes = read_groups(parts)
    notes += group_notes
    splits, whole = with_val(splits, split_seed, notes, groups)
    return Data(name, tuple(classes), splits, notes, unsplit, whole, groups=groups)


def read_groups(parts: dict[str, list[Row]]) -> tuple[np.ndarray | None, list[str]]:
    """The groups of the training images, (n,) int64 or None, and what there is to say of those that the file's own
    splits part."""
    if not parts["train"][0].group:
        return None, []
    homes: dict[str, set[str]] = {}
    for split, rows in parts.items():
        for row in rows:
            homes.setdefault(row.group, set()).add(split)
    parted = [group for group, splits in homes.items() if len(splits) > 1]
    notes = (
        [f"{len(parted)} groups are in more than one split; the first is {printable(min(parted))}"] if parted else []
    )
    place = {group: index for index, group in enumerate(sorted(homes))}
    return np.array([place[row.group] for row in parts["train"]], dtype=np.int64), notes


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
        raise DataError(
            f"{name}, line {line}: not CSV ({error})", "put cells with commas, quotes or line ends in double quotes"
        ) from None
    if not columns:
        raise DataError(f"{name} is empty", EXPECTED)


def header(cells: list[str], where: str) -> list[str]:
    """The columns that a header names. Raises DataError for an unknown, a repeated or a missing one."""
    columns = [cell.strip() for cell in cells]
    for column in columns:
        if column not in COLUMNS:
            hint = (
                "separate cells with commas"
                if ";" in column or "\t" in column
                else nearest(column, COLUMNS) or EXPECTED
            )
            raise DataError(f"{where}: unknown column {printable(column) or 'without a name'}", hint)
        if columns.count(column) > 1:
            raise DataError(f"{where}: two columns {column}", "keep one of them")
    lacking = [column for column in COLUMNS[:2] if column not in columns]
    if lacking:
        raise DataError(f"{where}: no column {' and no column '.join(lacking)}", EXPECTED)
    return columns


def row_of(cells: list[str], columns: list[str], name: str, line: int) -> Row:
    """One row, checked."""
    where = f"{name}, line {line}"
    if len(cells) != len(columns):
        raise DataError(
            f"{where}: {len(cells)} cells for {len(columns)} columns", "put cells with commas in double quotes"
        )
    row = dict(zip(columns, cells, strict=True))
    if not row["path"]:
        raise DataError(f"{where}: no path", EXPECTED)
    labels = [label.strip() for label in row["label"].split("|")] if row["label"].strip() else []
    if "" in labels:
        raise DataError(
            f"{where}: an empty label in {printable(row['label'])}", "take out the | that has nothing on one side"
        )
    split = ""
    if "split" in row:
        word = row["split"].strip()
        split = next((own for own, names in SPLITS.items() if word in names), "")
        known = [word for names in SPLITS.values() for word in names]
        if not split:
            problem = f"unknown split {printable(word)}" if word else "no split"
            raise DataError(f"{where}: {problem}", nearest(word, known) or f"use {', '.join(known)}")
    group = row.get("group", "").strip()
    if "group" in row and not group:
        raise DataError(f"{where}: no group", "give an image that belongs to no other a name of its own")
    return Row(row["path"], tuple(dict.fromkeys(labels)), split, group, line)


def distinct(rows: list[Row], name: str) -> tuple[list[Row], list[str]]:
    """The rows without repetitions, and what there is to say of those.

    An image in two splits stays in both, and is told. Raises DataError for an image with two different answers or
    groups.
    """
    first: dict[str, Row] = {}
    unique: dict[tuple[str, str], Row] = {}
    contrary: dict[str, list[Row]] = {"labels": [], "groups": []}
    shared = set()
    for row in rows:
        path = os.path.normpath(row.path)
        known = first.setdefault(path, row)
        if set(known.labels) != set(row.labels):
            contrary["labels"].append(row)
        if known.group != row.group:
            contrary["groups"].append(row)
        if known.split != row.split:
            shared.add(path)
        unique.setdefault((path, row.split), row)
    for field, faults in contrary.items():
        if faults:
            raise DataError(
                f"{name}: {len(faults)} rows give an image other {field} than an earlier row:{listing(faults)}",
                "keep one of them",
            )
    notes = [f"{len(rows) - len(unique)} rows repeat another and are left out"] if len(unique) < len(rows) else []
    if shared:
        notes.append(f"{len(shared)} images are in more than one split; the first is {printable(min(shared))}")
    return list(unique.values()), notes


def listing(rows: list[Row]) -> str:
    """The first rows by line and path, and how many more there are."""
    return first_lines((f"line {row.line}: {printable(row.path)}" for row in rows), len(rows), SHOWN)


def label_array(rows: list[Row], split: str, classes: list[str], multilabel: bool, name: str) -> np.ndarray:
    """Rows -> (n,) int64 classes, or (n, K) float32 if `multilabel`. Raises DataError for classes that train lacks."""
    place = {label: index for index, label in enumerate(classes)}
    unknown = [(row.line, label) for row in rows for label in row.labels if label not in place]
    if unknown:
        line, label = unknown[0]
        names = ", ".join(map(printable, list(dict.fromkeys(label for _, label in unknown))[:SHOWN]))
        raise DataError(
            f"{name}, line {line}: {split} has classes that train lacks: {names}",
            nearest(label, classes) or "rename or remove them",
        )
    if not multilabel:
        return np.array([place[row.labels[0]] for row in rows], dtype=np.int64)
    if 4 * len(rows) * len(classes) > MOST:
        raise DataError(
            f"{name}: {len(rows):,} images times {len(classes):,} classes are more than memory holds",
            "are these class names?",
        )
    labels = np.zeros((len(rows), len(classes)), dtype=np.float32)
    images = np.repeat(np.arange(len(rows)), [len(row.labels) for row in rows])
    labels[images, [place[label] for row in rows for label in row.labels]] = 1
    return labels
