"""Volumes and signals with classes: `[SPLIT/]CLASS/*.nii.gz`, and other files that hold an array each.

    .nii, .nii.gz, .npz    a folder of these alone is such data: volumes, or signals where the first has one or two axes
    .csv                   a folder of these alone has a signal in each
    .npy                   a folder of these alone has pictures, as long as the first of them may be one: it has two or
                           three axes. With one axis they are signals, with four volumes
    .tif                   pictures

`axes` 3 or 1 says that all such files are volumes or signals, whatever they could be taken for, and 2 that none is.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from vitreous.data.decoding.decode import SUFFIXES as PICTURES
from vitreous.data.decoding.volumes import OWN, SIGNALS, SUFFIXES, TEXT, array_axes
from vitreous.data.layouts.classes import natural
from vitreous.data.layouts.folder import entries, files_below, is_folder, open_class_folders, split_folders, walk
from vitreous.data.layouts.split_names import find_split_folders
from vitreous.data.split import Data, Files
from vitreous.errors import DataError, printable

PROBED = 16  # files that are looked into: the first that can be read says how many axes all have
ENDINGS = {1: frozenset(SIGNALS), 3: frozenset(SUFFIXES)}
NPY = ".npy"
ARRAYS = frozenset((*OWN, TEXT, NPY))  # endings of files that may be such data without a word


@dataclass(frozen=True)
class ArrayFiles(Files):
    """Files of volumes, of three `axes`, or signals, of one, with labels (n,) int64 or (n, K) float32."""

    axes: int = 3

    @property
    def kind(self) -> str:
        """What they are called."""
        return "signals" if self.axes == 1 else "volumes"

    def take(self, rows: np.ndarray, labels: np.ndarray | None = None) -> ArrayFiles:
        return replace(super().take(rows, labels), axes=self.axes)

    def update(self, digest: Any) -> None:
        super().update(digest)
        digest.update(b"axes %d" % self.axes)


def axes_of_files(paths: list[str], axes: int | None = None) -> int | None:
    """1 where files are signals, 3 where they are volumes, by their endings and the first that can be read; None where
    they are neither. With `axes` 1 or 3 they are such if their endings allow it."""
    endings = {ending_of(path) for path in paths}
    if axes is not None:
        return axes if axes in ENDINGS and endings and endings <= ENDINGS[axes] else None
    if not endings or not (endings <= OWN or endings in ({TEXT}, {NPY})):
        return None
    if endings == {TEXT}:
        return 1
    for place in np.linspace(0, len(paths) - 1, min(PROBED, len(paths))).astype(int):
        own = array_axes(paths[place])
        if own is not None:
            return {1: 1, 4: 3}.get(own) if endings == {NPY} else 1 if own < 3 else 3
    return None if endings == {NPY} else 3


def ending_of(path: str) -> str:
    """The ending of a file, in small letters: `.nii.gz` as a whole."""
    return ".nii.gz" if path.lower().endswith(".nii.gz") else os.path.splitext(path)[1].lower()


def array_folder_axes(root: Path, axes: int | None = None) -> int | None:
    """1 where all that the classes of a folder hold is signals, 3 where it is volumes; None for anything else. With
    `axes` 1 or 3 that is asked for, and other files, and files without classes, do not matter."""
    if axes is not None:
        return axes if axes in ENDINGS and walk(os.fspath(root), ENDINGS[axes]) else None
    paths = []
    for home in split_folders(root).values() if "train" in find_split_folders(root) else (root,):
        for entry in filter(is_folder, entries(os.fspath(home))):
            own = arrays_below(entry.path)
            if own is None:
                return None
            paths += own
    return axes_of_files(paths)


def arrays_below(home: str) -> list[str] | None:
    """The files below a folder that may be volumes or signals; None where there are pictures among them."""
    paths = []
    for entry in files_below(home):
        ending = ending_of(entry.name)
        if ending in ARRAYS:
            paths.append(entry.path.removeprefix("./"))
        elif ending in PICTURES:
            return None
    return sorted(paths, key=natural)


def arrays(root: Path, split_seed: int = 0, axes: int = 3) -> Data:
    """Open a folder of classes of volumes or, with one of `axes`, of signals, with or without folders of splits around
    them, as `folder` opens pictures; a tenth is `val` where there is none. Raises DataError as `folder` does."""
    data = open_class_folders(root, split_seed, ENDINGS[axes], partial(arrays_of, axes=axes))
    return replace(data, notes=[arrays_note(sum(map(len, data.splits.values())), axes), *data.notes])


def arrays_note(count: int, axes: int) -> str:
    """What is noted of data that are taken for volumes or signals."""
    return f"the data are {count:,} {'signals' if axes == 1 else 'volumes'}"


def arrays_of(split: Files, axes: int) -> ArrayFiles:
    """Files as volumes or signals."""
    return ArrayFiles(split.paths, split.labels, axes)


def no_arrays(source: str, axes: int) -> DataError:
    """Why data cannot be read with so many `axes`, 1 or 3."""
    kind, endings = "signals" if axes == 1 else "volumes", ", ".join(sorted(ENDINGS[axes]))
    return DataError(f"--axes {axes}: {printable(source)} holds no {kind}", f"their names end in {endings}")
