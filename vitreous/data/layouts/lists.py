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

from vitreous.data.decoding.decode import read_regular
from vitreous.data.split import Data, Files, Paths, Split, with_val
from vitreous.errors import DataError, first_lines, printable

ALL = "train800val200"  # the 1,000 images that the last training of a task is allowed
LISTS = {"train": ("train800", "train"), "val": ("val200", "val", "valid", "validation"), "test": ("test",)}
EXPECTED = "expected a path below the folder and the number of a class in every line: images/train/000001.jpg 5"
SHOWN = 20  # faults that a message names


class Line(NamedTuple):
    """One image: its path as the list has it, the number of its class, where it is listed."""

    path: str
    label: int
    where: str


def are_lists(root: Path) -> bool:
    """Whether a folder has a list of training images, and no folder of them by classes."""
    return any((root / f"{name}.txt").is_file() for name in LISTS["train"]) and not (root / "train").is_dir()


def lists(root: Path, split_seed: int = 0) -> Data:
    """The data set that `train800.txt`, `val200.txt` and `test.txt` describe, or `train.txt` and what is beside it.

    What there is to train on as a whole (`Data.whole`) is `train800val200.txt` where there is one. Classes are the
    numbers that are found, in their order, under the names of the lines of `classes.txt` if there is one; some may have
    no image to train on, which is told. Without a list for validation, a tenth of the training images is held out.
    Raises DataError, with file and line, for what cannot be: lines, classes, one image with two answers, missing files.
    """
    names = {
        split: next((name for name in names if (root / f"{name}.txt").is_file()), "") for split, names in LISTS.items()
    }
    parts = {split: read(root, name) for split, name in names.items() if name}
    whole = read(root, ALL) if names["train"] == "train800" and (root / f"{ALL}.txt").is_file() else None
    if whole is not None:
        check_agreement(root, parts, whole)
    missing = [line for line in chain(*parts.values()) if not os.path.lexists(root / line.path)]
    if missing:
        listing = first_lines((f"{line.where}: {printable(line.path)}" for line in missing), len(missing), SHOWN)
        raise DataError(f"{len(missing)} listed files are not there:{listing}", f"looked in {printable(root)}")
    numbers = sorted({line.label for line in chain(*parts.values())})
    classes = class_names(root, numbers, list(chain(*parts.values())))
    splits: dict[str, Split] = {split: files(root, lines, numbers) for split, lines in parts.items()}
    unseen = len(numbers) - len(np.unique(splits["train"].labels))
    notes = [f"{unseen} of {len(numbers)} classes have no image to train on"] if unseen else []
    everything: Split | None = files(root, whole, numbers) if whole else None
    splits, undrawn = with_val(splits, split_seed, notes)
    return Data(printable(root), classes, splits, notes, whole=everything if undrawn is None else undrawn)


def read(root: Path, name: str) -> list[Line]:
    """The lines of a list; one that repeats another is left out. Raises DataError, with the line."""
    source = printable(root / f"{name}.txt")
    try:
        text = read_regular(root / f"{name}.txt").decode("utf-8-sig")
    except UnicodeDecodeError:
        raise DataError(f"{source}: not UTF-8", "save it as UTF-8") from None
    lines: dict[str, Line] = {}
    for number, words in enumerate(text.splitlines(), 1):
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
            raise DataError(
                f"{where}: {printable(path)} is of class {label}, but of {line.label} in {line.where}",
                "keep one of them",
            )
    if not lines:
        raise DataError(f"{source} lists no image", EXPECTED)
    return list(lines.values())


def check_agreement(root: Path, parts: dict[str, list[Line]], whole: list[Line]) -> None:
    """Raise DataError where the list of all training images is not what the lists of its parts are together."""
    together = {line.path: line for split in ("train", "val") for line in parts.get(split, [])}
    known = {line.path: line for line in whole}
    for line in chain(whole, together.values()):
        other = (together if known.get(line.path) is line else known).get(line.path)
        if other is None or other.label != line.label:
            stated = f"of class {other.label} in {other.where}" if other else "not in the others"
            one = f"{line.where}: {printable(line.path)} is of class {line.label}, but {stated}"
            raise DataError(
                one,
                f"{ALL}.txt lists the images of train800.txt and val200.txt; without it, they are read by themselves",
            )


def class_names(root: Path, numbers: list[int], lines: list[Line]) -> tuple[str, ...]:
    """The names of the classes: their lines in `classes.txt`, counted from 0, or their numbers. Raises DataError, with
    the line."""
    if len(numbers) < 2:
        raise DataError(f"{printable(root)} has one class only ({numbers[0]}); a classifier needs two", EXPECTED)
    if not (root / "classes.txt").is_file():
        return tuple(map(str, numbers))
    names = [name.strip() for name in read_regular(root / "classes.txt").decode("utf-8-sig", "replace").splitlines()]
    if strange := next((line for line in lines if line.label >= len(names)), None):
        hint = "a class is the number of its line there, counted from 0"
        raise DataError(f"{strange.where}: class {strange.label}, but classes.txt has {len(names)} names", hint)
    classes = tuple(names[number] for number in numbers)
    if not all(classes) or len(set(classes)) < len(classes):
        raise DataError(
            f"{printable(root / 'classes.txt')}: a name is empty or there twice", "give every class a name of its own"
        )
    return classes


def files(root: Path, lines: list[Line], numbers: list[int]) -> Files:
    """The images of a list, in its order."""
    labels = np.searchsorted(numbers, [line.label for line in lines]).astype(np.int64)
    return Files(Paths(os.path.join(root, line.path) for line in lines), labels)
