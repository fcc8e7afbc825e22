"""Image lists: text files with one image and its class index per line, as in the tasks of VTAB-1k (arXiv:1910.04867).

    DIR/train800.txt   images/train/000001.jpg 5

A line has a path below DIR and a class index.
"""

from __future__ import annotations

import os
from itertools import chain
from pathlib import Path
from typing import NamedTuple

import numpy as np

from vitreous.data.layouts.classes import too_few_classes_error
from vitreous.data.layouts.file_names import resolve_unicode_path
from vitreous.data.layouts.split_names import SPLIT_NAMES, find_split_folders, match_split_names
from vitreous.data.split import Data, FileSplit, Split, create_empty_labels, ensure_val_split
from vitreous.data.text_files import read_lines
from vitreous.errors import DataError, escape_unprintable, format_first_lines

FULL_TRAIN_LIST = "train800val200"  # VTAB-1k's list of all 1,000 training images, for the final training of a task
VTAB_LISTS = {"train": "train800", "val": "val200"}  # VTAB-1k's list of each split, which other lists do not replace
NO_LABEL = -1
LIST_FORMAT_HINT = "write a path below the folder and a class index in every line: images/train/000001.jpg 5"


class ListedImage(NamedTuple):
    """A line of an image list: the path of the image, its class index (NO_LABEL if unlabelled), and the file and line
    for messages."""

    path: str
    label: int
    location: str


def has_image_lists(root: Path) -> bool:
    """Return whether a folder has a list of training images, but no folder `train` of class folders."""
    return "train" in find_image_lists(root) and "train" not in find_split_folders(root)


def find_image_lists(root: Path) -> dict[str, str]:
    """Return {split: name of its list without suffix}, in the order train, val, test. Raises DataError if two lists
    belong to one split."""
    names = [path.stem for path in root.glob("*.txt") if path.is_file()]
    list_names = match_split_names(names, escape_unprintable(root)) | {
        split: name for split, name in VTAB_LISTS.items() if name in names
    }
    return {split: list_names[split] for split in SPLIT_NAMES if split in list_names}


def open_image_lists(root: Path, split_seed: int = 0) -> Data:
    """Open a dataset of image lists: `train.txt`, `val.txt` and `test.txt`, or VTAB-1k's `train800.txt`, `val200.txt`
    and `test.txt`.

    `Data.full_train_split` has the images of `train800val200.txt` if that file exists. Classes are the indices in the
    lists, in order, named by the lines of `classes.txt` if it exists; a note counts classes without training images. If
    there is no validation list, a tenth of the training images is held out. Raises DataError, with file and line, for
    invalid lines and classes, one image with two classes, and missing files.
    """
    names = find_image_lists(root)
    lines_by_split = {split: read_image_list(root, name, split != "train") for split, name in names.items()}
    full_lines = (
        read_image_list(root, FULL_TRAIN_LIST)
        if names["train"] == "train800" and (root / f"{FULL_TRAIN_LIST}.txt").is_file()
        else None
    )
    if full_lines is not None:
        check_lists_agree(lines_by_split, full_lines)
    lines = list(chain(*lines_by_split.values()))
    if missing := [line for line in lines if not os.path.lexists(root / line.path)]:
        listing = format_first_lines(
            (f"{line.location}: {escape_unprintable(line.path)}" for line in missing), len(missing)
        )
        hint = f"restore them below {escape_unprintable(root)}, or correct the paths"
        raise DataError(f"{len(missing)} listed files are missing:{listing}", hint)
    class_indices = sorted({line.label for line in lines} - {NO_LABEL})
    classes = read_listed_classes(root, class_indices, lines)
    splits: dict[str, Split] = {
        split: build_listed_split(root, split_lines, class_indices) for split, split_lines in lines_by_split.items()
    }
    unseen = len(class_indices) - len(np.unique(splits["train"].labels))
    notes = [f"{unseen} of {len(class_indices)} classes have no training image"] if unseen else []
    splits, full_train = ensure_val_split(splits, split_seed, notes)
    if full_train is None and full_lines:
        full_train = build_listed_split(root, full_lines, class_indices)
    return Data(escape_unprintable(root), classes, splits, notes, full_train_split=full_train)


def read_image_list(root: Path, name: str, held_out: bool = False) -> list[ListedImage]:
    """Read an image list, `name`.txt in `root`, without duplicate lines. The list of a `held_out` split may be empty or
    contain paths only, whose label is then NO_LABEL. Raises DataError, with the line, for invalid lines."""
    source = escape_unprintable(root / f"{name}.txt")
    text_lines = read_lines(root / f"{name}.txt")
    lines: dict[str, ListedImage] = {}
    if held_out and (unlabelled := read_unlabelled_paths(root, text_lines)):
        return [ListedImage(path, NO_LABEL, source) for path in unlabelled]
    for line_number, line_text in enumerate(text_lines, 1):
        if not line_text.strip():
            continue
        path, _, label = line_text.strip().rpartition(" " if "\t" not in line_text else "\t")
        location = f"{source}, line {line_number}"
        if not path or not (label.isascii() and label.isdecimal()) or len(label) > 9:
            raise DataError(
                f"{location}: {escape_unprintable(line_text[:80])} is not a path and a class index", LIST_FORMAT_HINT
            )
        path = os.path.normpath(path.strip())
        if os.path.isabs(path) or path.startswith(".."):
            raise DataError(
                f"{location}: {escape_unprintable(path)} is not below {escape_unprintable(root)}", LIST_FORMAT_HINT
            )
        if not path.isascii() and (real_path := resolve_unicode_path(root / path)):
            path = os.path.relpath(real_path, root)
        line = lines.setdefault(path, ListedImage(path, int(label), location))
        if line.label != int(label):
            conflict = f"of class {label}, but of class {line.label} in {line.location}"
            raise DataError(f"{location}: {escape_unprintable(path)} is {conflict}", "keep only one of them")
    if not lines and not held_out:
        raise DataError(f"{source} lists no images", LIST_FORMAT_HINT)
    return list(lines.values())


def read_unlabelled_paths(root: Path, lines: list[str]) -> list[str]:
    """Return the distinct paths in the lines of an unlabelled list, in which each line is the path of an existing file
    below `root`; empty for any other list."""
    paths = [os.path.normpath(line.strip()) for line in lines if line.strip()]
    are_relative = all(not os.path.isabs(path) and not path.startswith("..") for path in paths)
    return list(dict.fromkeys(paths)) if are_relative and all(map(os.path.isfile, map(root.joinpath, paths))) else []


def check_lists_agree(lines_by_split: dict[str, list[ListedImage]], full_lines: list[ListedImage]) -> None:
    """Raise DataError if the list of all training images, `full_lines`, differs from the union of the `train` and `val`
    lists in paths or classes."""
    sublist_lines = {line.path: line for split in ("train", "val") for line in lines_by_split.get(split, [])}
    full_by_path = {line.path: line for line in full_lines}
    for line in chain(full_lines, sublist_lines.values()):
        counterpart = (sublist_lines if full_by_path.get(line.path) is line else full_by_path).get(line.path)
        if counterpart is None or counterpart.label != line.label:
            difference = (
                f"of class {counterpart.label} in {counterpart.location}" if counterpart else "not in the other lists"
            )
            hint = f"make {FULL_TRAIN_LIST}.txt the union of train800.txt and val200.txt, or delete it"
            raise DataError(
                f"{line.location}: {escape_unprintable(line.path)} is of class {line.label}, but {difference}", hint
            )


def read_listed_classes(root: Path, class_indices: list[int], lines: list[ListedImage]) -> tuple[str, ...]:
    """Return the names of the classes `class_indices`: the lines of `classes.txt`, counted from 0, or the indices
    themselves. Raises DataError for fewer than two classes, an index without a name, and invalid names."""
    if len(class_indices) < 2:
        raise too_few_classes_error(escape_unprintable(root), list(map(str, class_indices)), LIST_FORMAT_HINT)
    file = root / "classes.txt"
    if not file.is_file():
        return tuple(map(str, class_indices))
    names = [name.strip() for name in read_lines(file)]
    if unnamed_line := next((line for line in lines if line.label >= len(names)), None):
        hint = "add the missing names: line 1 of classes.txt is class 0"
        raise DataError(
            f"{unnamed_line.location}: class {unnamed_line.label}, but classes.txt has {len(names)} names", hint
        )
    classes = tuple(names[class_index] for class_index in class_indices)
    if not all(classes) or len(set(classes)) < len(classes):
        raise DataError(f"{escape_unprintable(file)}: a name is empty or repeated", "give every class a unique name")
    return classes


def build_listed_split(root: Path, lines: list[ListedImage], class_indices: list[int]) -> FileSplit:
    """Build the split of an image list, in the order of its lines; labels are positions in `class_indices`, (n,) int64,
    or (n, 0) if the list is unlabelled."""
    if not lines or lines[0].label == NO_LABEL:
        return FileSplit([os.path.join(root, line.path) for line in lines], create_empty_labels(len(lines)))
    labels = np.searchsorted(class_indices, [line.label for line in lines]).astype(np.int64)
    return FileSplit([os.path.join(root, line.path) for line in lines], labels)
