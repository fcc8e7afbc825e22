"""Folders of classes, with or without folders of splits around them."""

from __future__ import annotations

import os
import re
import unicodedata
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from vitreous.data.decode import is_image, printable
from vitreous.data.split import Data, Files, Split, held_out
from vitreous.errors import DataError, nearest

SPLITS = {"train": ("train",), "val": ("val", "valid", "validation"), "test": ("test",)}
LAYOUT = "expected DIR/CLASS/*.jpg, or DIR/train/CLASS/*.jpg with val/ and test/ beside it, or a CSV file with columns path,label"


def folder(root: Path, split_seed: int = 0) -> Data:
    """`{train,val|valid|validation,test}/CLASS/*`, or `CLASS/*` with a tenth held out for validation.

    A split folder without `val` gives a tenth of `train` to validation; `test` is never used for it. Class order is
    natural (2 before 10), independent of file system, locale and hash seed.
    """
    found = {name: next((root / n for n in names if (root / n).is_dir()), None) for name, names in SPLITS.items()}
    if found["train"] is None and any(found.values()):
        present = ", ".join(name for name, path in found.items() if path)
        raise DataError(f"{printable(root)} has {present} but no train folder", LAYOUT)
    homes = {name: path for name, path in found.items() if path} or {"train": root}
    listed = {name: list_classes(path) for name, path in homes.items()}
    classes = class_order(listed["train"])
    notes: list[str] = []
    if not any(listed["train"].values()):
        raise DataError(f"no images in {printable(homes['train'])}", LAYOUT)
    if len(classes) < 2:
        raise DataError(f"{printable(homes['train'])} has one class only ({printable(classes[0])}); a classifier needs two", LAYOUT)
    splits: dict[str, Split] = {name: files_of(name, tree, classes) for name, tree in listed.items()}
    whole = splits["train"]
    if "val" not in splits:
        drawn, told = held_out(whole, split_seed)
        splits |= drawn
        notes.append(told)
    return Data(
        printable(root),
        tuple(classes),
        {name: splits[name] for name in SPLITS if name in splits},
        notes,
        "train" in homes and homes["train"] == root,
        None if "val" in homes else whole,
    )


def files_of(name: str, tree: dict[str, list[Path]], classes: list[str]) -> Files:
    """One split's files, labelled by class name. Raises DataError for a class that training does not have."""
    unknown = [c for c in class_order(tree) if c not in set(classes)]
    if unknown:
        listing = ", ".join(map(printable, unknown[:20]))
        raise DataError(f"{name} has classes that train lacks: {listing}", nearest(unknown[0], classes) or "rename or remove them")
    paths = [path for label in classes for path in tree.get(label, [])]
    labels = np.array([i for i, label in enumerate(classes) for _ in tree.get(label, [])], dtype=np.int64)
    return Files(paths, labels)


def list_classes(home: Path) -> dict[str, list[Path]]:
    """Class name -> its image files at any depth, sorted; hidden folders and folders without images are left out."""
    found = {}
    for entry in sorted(os.scandir(home), key=lambda e: e.name):
        if entry.is_dir() and not entry.name.startswith("."):
            files = list_images(Path(entry.path))
            if files:
                found[entry.name] = files
    return found


def list_images(home: Path) -> list[Path]:
    """Every image file below a folder, in natural order of its path. A folder linked twice is visited once."""
    files, seen, waiting = [], set(), [home]
    while waiting:
        place = waiting.pop()
        real = os.path.realpath(place)
        if real in seen:
            continue
        seen.add(real)
        for entry in os.scandir(place):
            path = Path(entry.path)
            if entry.name.startswith("."):
                continue
            if entry.is_dir():
                waiting.append(path)
            elif is_image(path):
                files.append(path)
    return sorted(files, key=lambda path: natural(os.fspath(path)))


def class_order(names: Sequence[str] | dict[str, list[Path]]) -> list[str]:
    """Class names in natural order. Raises DataError for two names that differ only in case or in Unicode form."""
    folded: dict[str, str] = {}
    for name in sorted(names, key=natural):
        same = unicodedata.normalize("NFC", name).casefold()
        if same in folded:
            raise DataError(f"classes {printable(folded[same])} and {printable(name)} differ only in case", "rename one of them")
        folded[same] = name
    return list(folded.values())


def natural(name: str) -> tuple[list[tuple[int, int, str]], str]:
    """A sort key in which 2 comes before 10; equal keys fall back to the name itself."""
    runs = re.findall(r"\d+|\D+", name)
    return [(0, int(run), "") if run.isdecimal() else (1, 0, run) for run in runs], name
