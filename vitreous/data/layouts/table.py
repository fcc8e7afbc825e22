"""CSV files of images or clips: a header `path[,label][,split][,group][,start][,end]`, then one sample per row.

    path,label,split,group
    birds/1.jpg,duck|water,train,video 7

A label cell has one label, several separated by `|`, or none. Paths are relative to the folder of the CSV file. Images
of one group (a patient, a scene, a video) are never divided between splits; `--group-by COLUMN` selects another column
for the groups. Other columns are ignored if `path` and `label` are present.

    path,weight,height,split
    fish/1.jpg,1.25,34,train

Without a column `label`, numeric columns are regression targets; `--targets COLUMN` selects them among other columns. A
cell may be empty.

    path,label,start,end
    films/1.mp4,jump,2.5,4

If all files are volumes or signals (see `vitreous.data.layouts.volumes`), the data are volumes or signals. If all are
clips or folders of frames, the data are clips. `start` and `end`, in seconds, select a segment of a clip; an empty cell
is the start or end of the clip. If there is no group column, the segments of one file form a group.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from vitreous.data.layouts.classes import build_label_array, one_class_note, sort_class_names, too_few_classes_error
from vitreous.data.layouts.table_rows import (
    MAX_LISTED_COLUMNS,
    TABLE_FORMAT_HINT,
    SampleRow,
    drop_duplicate_rows,
    format_row_list,
    read_table_rows,
)
from vitreous.data.layouts.video import ClipFiles, are_clip_files, clips_note
from vitreous.data.layouts.volumes import ArrayFiles, arrays_note, detect_array_axes, no_arrays_error
from vitreous.data.split import Data, FileSplit, Split, create_empty_labels, ensure_val_split
from vitreous.errors import DataError, escape_unprintable, format_first_names

CLIP_FILES_KIND = -1  # result of `classify_table_files` for clips; for volumes and signals it is their number of axes


def open_table(
    source: Path,
    split_seed: int = 0,
    group_by: str | None = None,
    axes: int | None = None,
    targets: tuple[str, ...] = (),
) -> Data:
    """Open the dataset of a CSV file (UTF-8).

    `axes`: open files as signals (1), images (2) or volumes (3), if their suffixes and the first file are ambiguous.
    `group_by`: the column that defines the groups in place of `group`; a regular expression is ignored here, as
    `vitreous.data.grouping` handles it. `targets`: the columns whose values are the labels, (n, T) float64, NaN for an
    empty cell. They are all other numeric columns if there is no label column.

    Labels are (n,) int64 if every image has exactly one; else (n, K) float32, 1 for each class of an image. If there
    are fewer than two classes, images are unlabelled. If there are no validation rows, a tenth of the training images
    is held out. Classes are in natural order, samples in file order.

    Raises DataError, with the line, for invalid cells, columns, splits and classes, for one image with contradictory
    labels or groups, and for missing files.
    """
    name = escape_unprintable(source)
    header, rows = read_table_rows(source, group_by, targets, name)
    folder = source.parent.absolute() if any(os.path.isabs(row.path) for row in rows) else source.parent
    rows, notes = drop_duplicate_rows([row.with_stored_path(folder) for row in rows], name)
    if missing := [row for row in rows if not os.path.lexists(os.path.join(folder, row.path))]:
        problem = f"{len(missing)} of {len(rows)} files are missing:{format_row_list(missing)}"
        hint = f"restore them below {escape_unprintable(folder)}, or correct the paths"
        raise DataError(f"{name}: {problem}", hint)
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


def encode_table_labels(
    rows_by_split: dict[str, list[SampleRow]], rows: list[SampleRow], name: str, notes: list[str]
) -> tuple[tuple[str, ...], dict[str, np.ndarray], DataError | None]:
    """Encode the label cells of a table. Returns the classes of `train`; the labels of each split, (n,) int64, (n, K)
    float32 or (n, 0); and, if the data have no labels, the error that explains why. Appends to `notes`."""
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


def collect_target_values(rows: list[SampleRow], targets: tuple[str, ...]) -> np.ndarray:
    """Collect the values of regression targets in the rows of a split: (n, T) float64, NaN for an empty cell; (n, 0) if
    all are empty."""
    values = np.array([row.values for row in rows], np.float64).reshape(len(rows), len(targets))
    return create_empty_labels(len(rows)) if np.isnan(values).all() else values


def values_notes(rows: list[SampleRow]) -> list[str]:
    """Return the note about images without a value of any target; empty if there are none."""
    num_empty = sum(all(map(math.isnan, row.values)) for row in rows)
    return [f"{num_empty:,} of {len(rows):,} images have no value"] if num_empty else []


def classify_table_files(rows: list[SampleRow], folder: Path, name: str, axes: int | None) -> int:
    """Detect the modality of the files of a table: CLIP_FILES_KIND for clips, 3 for volumes, 1 for signals, 0 for
    images. `axes` decides ambiguous cases. Raises DataError, with the line, for a segment of a file that is not a clip,
    and for files that cannot have `axes` axes."""
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
    """Build a split from n rows, with labels (n,) int64 or (n, K) float32, and paths relative to `folder`. `file_kind`
    is the result of `classify_table_files`."""
    paths = [folder / row.path for row in rows]
    if file_kind != CLIP_FILES_KIND:
        return ArrayFiles(paths, labels, file_kind) if file_kind else FileSplit(paths, labels)
    segments = np.array([(row.start, row.end) for row in rows], np.float64).reshape(-1, 2)
    return ClipFiles(paths, labels, segments if any(row.is_clip_segment for row in rows) else None)


def explain_missing_labels(name: str, rows: list[SampleRow], classes: list[str], multilabel: bool) -> DataError | None:
    """Return the error that explains why the images have no labels: there is no label column, or there are fewer than
    two classes. Returns None if they have labels."""
    if rows[0].labels is None:
        return DataError(f"{name}: no column label", TABLE_FORMAT_HINT)
    return too_few_classes_error(name, classes, TABLE_FORMAT_HINT) if len(classes) < (1 if multilabel else 2) else None


def encode_groups(rows_by_split: dict[str, list[SampleRow]], notes: list[str]) -> np.ndarray | None:
    """Encode the groups of the training images as indices, (n,) int64; None if there are no groups. Appends a note
    about groups in several splits to `notes`. If there is no group column, the segments of one file form a group."""
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


def has_any_label(rows: list[SampleRow]) -> bool:
    """Return whether any row has a label."""
    return any(row.labels for row in rows)


def encode_row_labels(
    rows: list[SampleRow], split: str, classes: Sequence[str], multilabel: bool, name: str
) -> np.ndarray:
    """Encode the labels of the rows of a split as class indices (n,) int64, or (n, K) float32 if `multilabel`. They are
    (n, 0) if `classes` is empty, and for a held-out split without any label. Raises DataError, with the line, for
    labels that are not in `classes`, those of `train`."""
    if not classes or (split != "train" and not has_any_label(rows)):
        return create_empty_labels(len(rows))
    class_set = set(classes)
    line = next((f", line {row.line}" for row in rows if not class_set.issuperset(row.labels or ())), "")
    codes = {label: code for code, label in enumerate(dict.fromkeys(row.labels or () for row in rows))}
    label_indices = np.array([codes[row.labels or ()] for row in rows], dtype=np.int64)
    return build_label_array(f"{name}{line}: {split}", list(codes), label_indices, classes, multilabel)
