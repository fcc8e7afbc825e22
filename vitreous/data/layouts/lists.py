"""Folders with lists of images: the copies of VTAB-1k's tasks (arXiv:1910.04867), and any other with such lists.

    DIR/train800.txt   images/train/000001.jpg 5

A line has a path below DIR and the number of a class.
"""

from __future__ import annotations

import os
from itertools import chain
from pathlib import Path
from typing import NamedTuple

import numpy as np

from vitreous.data.layouts.classes import too_few_classes
from vitreous.data.split import Data, Files, Split, with_val
from vitreous.data.text_files import read_lines
from vitreous.errors import DataError, first_lines, printable

ALL = "train800val200"  # the 1,000 images that the last training of a task is allowed
LISTS = {"train": ("train800", "train"), "val": ("val200", "val", "valid", "validation"), "test": ("test",)}
EXPECTED = "expected a path below the folder and the number of a class in every line: images/train/000001.jpg 5"


class Line(NamedTuple):
    """One image: its path as the list has it, the number of its class, where it is listed."""

    path: str
    label: int
    where: str


def are_lists(root: Path) -> bool:
    """Whether a folder has a list of training images, and no folder of them by classes."""
    return any((root / f"{name}.txt").is_file() for name in LISTS["train"]) and not (root / "train").is_dir()


def lists(root: Path, split_seed: int = 0) -> Data:
    """The data set that `train800.txt`, `val200.txt` and `test.txt` describe, or `train.txt` and the files beside it.

    `Data.whole` is `train800val200.txt` where there is one. Classes are the numbers in the lists, in order, named by
    the lines of `classes.txt` if there is one; a note tells how many have no training image. Without a list for
    validation, a tenth of the training images is held out. Raises DataError, with file and line, for invalid lines and
    classes, one image with two classes, missing files.
    """
    names = {
        split: next((name for name in names if (root / f"{name}.txt").is_file()), "") for split, names in LISTS.items()
    }
    parts = {split: read(root, name) for split, name in names.items() if name}
    whole = read(root, ALL) if names["train"] == "train800" and (root / f"{ALL}.txt").is_file() else None
    if whole is not None:
        check_agreement(parts, whole)
    lines = list(chain(*parts.values()))
    if missing := [line for line in lines if not os.path.lexists(root / line.path)]:
        listing = first_lines((f"{line.where}: {printable(line.path)}" for line in missing), len(missing))
        raise DataError(f"{len(missing)} listed files are not there:{listing}", f"looked in {printable(root)}")
    numbers = sorted({line.label for line in lines})
    classes = class_names(root, numbers, lines)
    splits: dict[str, Split] = {split: files(root, part, numbers) for split, part in parts.items()}
    unseen = len(numbers) - len(np.unique(splits["train"].labels))
    notes = [f"{unseen} of {len(numbers)} classes have no image to train on"] if unseen else []
    splits, undrawn = with_val(splits, split_seed, notes)
    if undrawn is None and whole:
        undrawn = files(root, whole, numbers)
    return Data(printable(root), classes, splits, notes, whole=undrawn)


def read(root: Path, name: str) -> list[Line]:
    """The lines of a list; one that repeats another is left out. Raises DataError, with the line."""
    source = printable(root / f"{name}.txt")
    lines: dict[str, Line] = {}
    for number, words in enumerate(read_lines(root / f"{name}.txt"), 1):
        if not words.strip():
            continue
        path, _, label = words.strip().rpartition(" " if "\t" not in words else "\t")
        where = f"{source}, line {number}"
        if not path or not (label.isascii() and label.isdecimal()) or len(label) > 9:
            raise DataError(f"{where}: {printable(words[:80])} is not an image and its class", EXPECTED)
        path = os.path.normpath(path.strip())
        if os.path.isabs(path) or path.startswith(".."):
            raise DataError(f"{where}: {printable(path)} is not below {printable(root)}", EXPECTED)
        line = lines.setdefault(path, Line(path, int(label), where))
        if line.label != int(label):
            stated = f"of class {label}, but of {line.label} in {line.where}"
            raise DataError(f"{where}: {printable(path)} is {stated}", "keep one of them")
    if not lines:
        raise DataError(f"{source} lists no image", EXPECTED)
    return list(lines.values())


def check_agreement(parts: dict[str, list[Line]], whole: list[Line]) -> None:
    """Raise DataError where the list of all training images is not what the lists of its parts are together."""
    together = {line.path: line for split in ("train", "val") for line in parts.get(split, [])}
    known = {line.path: line for line in whole}
    for line in chain(whole, together.values()):
        other = (together if known.get(line.path) is line else known).get(line.path)
        if other is None or other.label != line.label:
            stated = f"of class {other.label} in {other.where}" if other else "not in the others"
            hint = f"{ALL}.txt lists the images of train800.txt and val200.txt; without it, they are read by themselves"
            raise DataError(f"{line.where}: {printable(line.path)} is of class {line.label}, but {stated}", hint)


def class_names(root: Path, numbers: list[int], lines: list[Line]) -> tuple[str, ...]:
    """The names of the classes: their lines in `classes.txt`, counted from 0, or their numbers. Raises DataError, with
    the line."""
    if len(numbers) < 2:
        raise too_few_classes(printable(root), list(map(str, numbers)), EXPECTED)
    file = root / "classes.txt"
    if not file.is_file():
        return tuple(map(str, numbers))
    names = [name.strip() for name in read_lines(file)]
    if strange := next((line for line in lines if line.label >= len(names)), None):
        hint = "a class is the number of its line there, counted from 0"
        raise DataError(f"{strange.where}: class {strange.label}, but classes.txt has {len(names)} names", hint)
    classes = tuple(names[number] for number in numbers)
    if not all(classes) or len(set(classes)) < len(classes):
        raise DataError(f"{printable(file)}: a name is empty or there twice", "give every class a name of its own")
    return classes


def files(root: Path, lines: list[Line], numbers: list[int]) -> Files:
    """The images of a list, in its order."""
    labels = np.searchsorted(numbers, [line.label for line in lines]).astype(np.int64)
    return Files([os.path.join(root, line.path) for line in lines], labels)
