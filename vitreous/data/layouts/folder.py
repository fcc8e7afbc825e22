"""Folders of classes, with or without folders of splits around them."""

from __future__ import annotations

import os
import re
import unicodedata
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from vitreous.data.decoding.decode import SUFFIXES, reason
from vitreous.data.split import Data, Files, Paths, Split, no_labels, with_val
from vitreous.errors import DataError, nearest, printable

SPLITS = {"train": ("train",), "val": ("val", "valid", "validation"), "test": ("test",)}
LAYOUT = (
    "expected DIR/CLASS/*.jpg, or DIR/train/CLASS/*.jpg with val/ and test/ beside it, or a CSV file with "
    "columns "
    "path,label"
)
FLAT = (
    "put each image into a folder of its class, or write a CSV file with columns path,label; predict, embed and "
    "dedup take it as it is"
)
NO_TEXT = ("Cc", "Cs", "Zl", "Zp")  # of Unicode's categories: control, half of a pair or no UTF-8, ends of lines
VIDEOS = frozenset({".mp4", ".avi", ".mkv", ".mov", ".webm", ".mpg", ".mpeg", ".m4v", ".wmv"})


def folder(root: Path, split_seed: int = 0) -> Data:
    """`{train,val|valid|validation,test}/CLASS/*`, or `CLASS/*` with a tenth held out for validation.

    With one class, or none, all images below each folder, at any depth, are data without labels.
    A split folder without `val` gives a tenth of `train` to validation; `test` is never used for it. Class order is
    natural (2 before 10), independent of file system, locale and hash seed.
    """
    homes = split_folders(root)
    return classified(root, homes, {name: list_classes(home) for name, home in homes.items()}, split_seed)


def split_folders(root: Path) -> dict[str, Path]:
    """The folders of the splits; the folder itself as `train` where it has none. Raises DataError for splits without
    `train`."""
    paths = {name: next((root / n for n in names if (root / n).is_dir()), None) for name, names in SPLITS.items()}
    homes = {name: path for name, path in paths.items() if path}
    if homes and "train" not in homes:
        raise DataError(f"{printable(root)} has {', '.join(homes)} but no train folder", LAYOUT)
    return homes or {"train": root}


def classified(root: Path, homes: dict[str, Path], listed: dict[str, dict[str, Paths]], split_seed: int) -> Data:
    """The data set of the files of each class in each split, with a tenth held out for validation where `val` is
    lacking; images without labels where there are fewer than two classes. Raises DataError where there are no
    images."""
    classes = class_order(listed["train"])
    notes: list[str] = []
    splits: dict[str, Split]
    unlabelled = None
    if len(classes) < 2:
        unlabelled = one_class(homes["train"], classes[0]) if classes else no_classes(homes["train"])
        paths = {name: Paths(walk(os.fspath(home))) for name, home in homes.items()}
        splits = {name: Files(part, no_labels(len(part))) for name, part in paths.items() if len(part)}
        notes += [f"all images are of one class, {printable(classes[0])}: there are no labels"] if classes else []
    else:
        splits = {name: files_of(name, tree, classes) for name, tree in listed.items()}
    splits, whole = with_val(splits, split_seed, notes)
    names = tuple(classes) if unlabelled is None else ()
    return Data(printable(root), names, splits, notes, homes["train"] == root, whole, unlabelled=unlabelled)


def one_class(home: Path, name: str) -> DataError:
    """Why a folder with one class folder has no labels."""
    return DataError(f"{printable(home)} has one class only ({printable(name)}); a classifier needs two", LAYOUT)


def no_classes(home: Path) -> DataError:
    """Why a folder without class folders, in which all images lie, has no labels. Raises DataError where there are no
    images."""
    if count := len(walk(os.fspath(home))):
        images = f"{count:,} image" + ("" if count == 1 else "s")
        return DataError(
            f"{printable(home)} is a flat folder: {images} and no class folders, so there are no labels", FLAT
        )
    clips = walk(os.fspath(home), VIDEOS)
    if not clips:
        raise DataError(f"no images in {printable(home)}", LAYOUT)
    raise DataError(
        f"no images in {printable(home)} but {len(clips)} videos, which are not read yet; the first is "
        f"{printable(clips[0])}",
        "take out their frames: ffmpeg -i CLIP.mp4 -vf fps=4 CLASS/CLIP/%05d.jpg",
    )


def files_of(name: str, tree: dict[str, Paths], classes: list[str]) -> Files:
    """One split's files, labelled by class name. Raises DataError for a class that training does not have."""
    known = set(classes)
    unknown = [c for c in class_order(tree) if c not in known]
    if unknown:
        listing = ", ".join(map(printable, unknown[:20]))
        raise DataError(
            f"{name} has classes that train lacks: {listing}", nearest(unknown[0], classes) or "rename or remove them"
        )
    counts = [len(tree.get(label, ())) for label in classes]
    return Files(
        Paths.joined(tree[label] for label in classes if label in tree), np.repeat(np.arange(len(classes)), counts)
    )


def list_classes(home: Path) -> dict[str, Paths]:
    """Class name -> its image files at any depth, sorted; hidden folders and folders without images are left out."""
    paths = {}
    for entry in sorted(entries(os.fspath(home)), key=lambda e: e.name):
        if is_folder(entry):
            files = walk(entry.path)
            if files:
                paths[entry.name] = Paths(files)
    return paths


def list_images(home: Path) -> list[Path]:
    """Every image file below a folder, in natural order of its path. A folder linked twice is visited once."""
    return [Path(path) for path in walk(os.fspath(home))]


def walk(home: str, suffixes: frozenset[str] = SUFFIXES) -> list[str]:
    """The same, of files whose names end so, as text."""
    files, seen, waiting = [], set(), [home]
    while waiting:
        place = waiting.pop()
        real = os.path.realpath(place)
        if real in seen:
            continue
        seen.add(real)
        for entry in entries(place):
            if is_folder(entry):
                waiting.append(entry.path)
            elif os.path.splitext(entry.name)[1].lower() in suffixes:
                files.append(entry.path.removeprefix("./"))
    return sorted(files, key=natural)


def entries(place: str) -> list[os.DirEntry[str]]:
    """What is in a folder, but for what is hidden. Raises DataError where it cannot be read."""
    try:
        return [entry for entry in os.scandir(place) if not entry.name.startswith(".")]
    except OSError as error:
        raise DataError(
            f"{printable(place)}: cannot be read ({reason(error)})", "mend its permissions, or remove it"
        ) from None


def is_folder(entry: os.DirEntry[str]) -> bool:
    """Whether an entry is a folder, or leads to one; a link that leads to itself does not."""
    try:
        return entry.is_dir()
    except OSError:
        return False


def class_order(names: Iterable[str]) -> list[str]:
    """Class names in natural order. Raises DataError for two names that differ only in case or in Unicode form, and for
    no text."""
    folded: dict[str, str] = {}
    for name in sorted(names, key=natural):
        if any(unicodedata.category(letter) in NO_TEXT for letter in name):
            raise DataError(f"class {printable(name)} has a name that is no line of text in UTF-8", "rename it")
        same = unicodedata.normalize("NFC", name).casefold()
        if same in folded:
            raise DataError(
                f"classes {printable(folded[same])} and {printable(name)} differ only in case or accents",
                "rename one of them",
            )
        folded[same] = name
    return list(folded.values())


def natural(name: str) -> tuple[list[tuple[int, int, str]], str]:
    """A sort key in which 2 comes before 10; equal keys fall back to the name itself."""
    runs = re.findall(r"\d+|\D+", name)
    return [(0, int(run), "") if run.isdecimal() else (1, 0, run) for run in runs], name
