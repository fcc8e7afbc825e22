"""CSV files of image-text pairs: a header `path,caption[,split]`, then one pair per row.

    path,caption,split
    photos/1.jpg,"a dog, asleep on a sofa",train
    photos/1.jpg,a brown dog,train

An image may have several rows, each with a caption. Paths are relative to the folder of the CSV file. The columns may
also be named as in `IMAGE_COLUMNS` and `CAPTION_COLUMNS`; other columns are ignored.
"""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np

from vitreous.data.layouts.file_names import resolve_unicode_path
from vitreous.data.layouts.split_names import SPLIT_OF_NAME, parse_split_name
from vitreous.data.layouts.table_rows import read_csv_lines
from vitreous.data.pairs import build_pair_data
from vitreous.data.split import Data, FileSplit, create_empty_labels
from vitreous.errors import DataError, escape_unprintable, format_first_lines, suggest_nearest

IMAGE_COLUMNS = ("path", "image", "filepath", "file_name", "image_path", "filename", "file")
CAPTION_COLUMNS = ("caption", "text", "title", "description")
MAX_HEADER_CHARS = 10_000  # maximum length of the first line
PAIR_TABLE_HINT = "use a header path,caption[,split] and one image and caption per row"


def find_pair_columns(columns: list[str]) -> tuple[int, int] | None:
    """Return the indices of the image and caption columns of a header; None if it has no such columns, or labels."""
    names = [column.strip().lower() for column in columns]
    image = next((names.index(name) for name in IMAGE_COLUMNS if name in names), None)
    caption = next((names.index(name) for name in CAPTION_COLUMNS if name in names), None)
    return None if image is None or caption is None or "label" in names else (image, caption)


def is_pair_table(path: Path) -> bool:
    """Return whether a CSV file has columns of images and captions, and no labels."""
    if not path.is_file():  # opening a pipe would block
        return False
    try:
        with open(path, encoding="utf-8-sig") as file:
            header = file.readline(MAX_HEADER_CHARS)
    except (OSError, UnicodeDecodeError):
        return False
    return find_pair_columns([cell.strip().strip('"') for cell in header.split(",")]) is not None


def open_pair_table(source: Path, split_seed: int = 0) -> Data:
    """Open the dataset of a CSV file of image-text pairs (UTF-8). If there are no validation rows, a tenth of the
    training images is held out.

    Raises DataError, with the line, for rows of another length, without a path or with an unknown split; and for
    missing files.
    """
    name = escape_unprintable(source)
    lines = read_csv_lines(source, name)
    _, header = next(lines)
    columns = find_pair_columns(header)
    if columns is None:
        raise DataError(f"{name} has no columns of images and captions", PAIR_TABLE_HINT)
    image_column, caption_column = columns
    names = [column.strip().lower() for column in header]
    split_column = names.index("split") if "split" in names else None
    index_by_path: dict[str, int] = {}
    first_lines: list[int] = []
    image_indices, captions, split_names = list[int](), list[str](), list[str]()
    for line, cells in lines:
        if len(cells) != len(header):
            problem = f"{name}, line {line}: {len(cells)} cells for {len(header)} columns"
            raise DataError(problem, "put captions with commas in double quotes")
        if not cells[image_column]:
            raise DataError(f"{name}, line {line}: no path", PAIR_TABLE_HINT)
        path = os.path.normpath(cells[image_column])
        if path not in index_by_path:
            index_by_path[path] = len(first_lines)
            first_lines.append(line)
        image_indices.append(index_by_path[path])
        captions.append(cells[caption_column])
        split_names.append("train" if split_column is None else parse_pair_split(cells[split_column], name, line))
    paths = [os.path.join(source.parent, path) for path in index_by_path]
    paths = [path if path.isascii() else resolve_unicode_path(path) or path for path in paths]
    if missing := [index for index, path in enumerate(paths) if not os.path.lexists(path)]:
        rows = (f"line {first_lines[index]}: {escape_unprintable(paths[index])}" for index in missing)
        problem = f"{len(missing)} of {len(paths)} files are missing:{format_first_lines(rows, len(missing))}"
        hint = f"restore them below {escape_unprintable(source.parent)}, or correct the paths"
        raise DataError(f"{name}: {problem}", hint)
    row_splits = np.array(split_names)
    return build_pair_data(
        name,
        FileSplit(paths, create_empty_labels(len(paths))),
        np.array(image_indices, np.int64),
        captions,
        pairs_by_split={split: np.flatnonzero(row_splits == split) for split in dict.fromkeys(split_names)},
        split_seed=split_seed,
        notes=[],
        unsplit=split_column is None,
    )


def parse_pair_split(cell: str, name: str, line: int) -> str:
    """Return the split in a cell. Raises DataError, with the line, for an unknown split."""
    split = parse_split_name(cell)
    if split is None:
        hint = suggest_nearest(cell.lower(), SPLIT_OF_NAME) or f"use {', '.join(SPLIT_OF_NAME)}"
        raise DataError(f"{name}, line {line}: unknown split {escape_unprintable(cell) or '(empty)'}", hint)
    return split
