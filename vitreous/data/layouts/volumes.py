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

from vitreous.data.decoding.decode import IMAGE_FILE_SUFFIXES as PICTURES
from vitreous.data.decoding.volumes import (
    SIGNAL_SUFFIXES,
    TEXT_SUFFIX,
    VOLUME_ONLY_SUFFIXES,
    VOLUME_SUFFIXES,
    count_array_axes,
)
from vitreous.data.layouts.classes import natural_sort_key
from vitreous.data.layouts.folder import (
    is_folder,
    iterate_files,
    list_entries,
    list_files_by_suffix,
    open_class_folders,
    resolve_split_folders,
)
from vitreous.data.layouts.split_names import find_split_folders
from vitreous.data.split import Data, FileSplit
from vitreous.errors import DataError, escape_unprintable

MAX_PROBED_ARRAYS = 16  # files that are looked into: the first that can be read says how many axes all have
SUFFIXES_BY_AXES = {1: frozenset(SIGNAL_SUFFIXES), 3: frozenset(VOLUME_SUFFIXES)}
NPY_SUFFIX = ".npy"
ARRAY_SUFFIXES = frozenset(
    (*VOLUME_ONLY_SUFFIXES, TEXT_SUFFIX, NPY_SUFFIX)
)  # endings of files that may be such data without a word


@dataclass(frozen=True)
class ArrayFiles(FileSplit):
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


def detect_array_axes(paths: list[str], axes: int | None = None) -> int | None:
    """1 where files are signals, 3 where they are volumes, by their endings and the first that can be read; None where
    they are neither. With `axes` 1 or 3 they are such if their endings allow it."""
    endings = {get_file_suffix(path) for path in paths}
    if axes is not None:
        return axes if axes in SUFFIXES_BY_AXES and endings and endings <= SUFFIXES_BY_AXES[axes] else None
    if not endings or not (endings <= VOLUME_ONLY_SUFFIXES or endings in ({TEXT_SUFFIX}, {NPY_SUFFIX})):
        return None
    if endings == {TEXT_SUFFIX}:
        return 1
    for place in np.linspace(0, len(paths) - 1, min(MAX_PROBED_ARRAYS, len(paths))).astype(int):
        own = count_array_axes(paths[place])
        if own is not None:
            return {1: 1, 4: 3}.get(own) if endings == {NPY_SUFFIX} else 1 if own < 3 else 3
    return None if endings == {NPY_SUFFIX} else 3


def get_file_suffix(path: str) -> str:
    """The ending of a file, in small letters: `.nii.gz` as a whole."""
    return ".nii.gz" if path.lower().endswith(".nii.gz") else os.path.splitext(path)[1].lower()


def detect_folder_axes(root: Path, axes: int | None = None) -> int | None:
    """1 where all that the classes of a folder hold is signals, 3 where it is volumes; None for anything else. With
    `axes` 1 or 3 that is asked for, and other files, and files without classes, do not matter."""
    if axes is not None:
        return (
            axes if axes in SUFFIXES_BY_AXES and list_files_by_suffix(os.fspath(root), SUFFIXES_BY_AXES[axes]) else None
        )
    paths = []
    for home in resolve_split_folders(root).values() if "train" in find_split_folders(root) else (root,):
        for entry in filter(is_folder, list_entries(os.fspath(home))):
            own = list_array_files(entry.path)
            if own is None:
                return None
            paths += own
    return detect_array_axes(paths)


def list_array_files(home: str) -> list[str] | None:
    """The files below a folder that may be volumes or signals; None where there are pictures among them."""
    paths = []
    for entry in iterate_files(home):
        ending = get_file_suffix(entry.name)
        if ending in ARRAY_SUFFIXES:
            paths.append(entry.path.removeprefix("./"))
        elif ending in PICTURES:
            return None
    return sorted(paths, key=natural_sort_key)


def open_array_folder(root: Path, split_seed: int = 0, axes: int = 3) -> Data:
    """Open a folder of classes of volumes or, with one of `axes`, of signals, with or without folders of splits around
    them, as `folder` opens pictures; a tenth is `val` where there is none. Raises DataError as `folder` does."""
    data = open_class_folders(root, split_seed, SUFFIXES_BY_AXES[axes], partial(to_array_files, axes=axes))
    return replace(data, notes=[arrays_note(sum(map(len, data.splits.values())), axes), *data.notes])


def arrays_note(count: int, axes: int) -> str:
    """What is noted of data that are taken for volumes or signals."""
    return f"the data are {count:,} {'signals' if axes == 1 else 'volumes'}"


def to_array_files(split: FileSplit, axes: int) -> ArrayFiles:
    """Files as volumes or signals."""
    return ArrayFiles(split.paths, split.labels, axes)


def no_arrays_error(source: str, axes: int) -> DataError:
    """Why data cannot be read with so many `axes`, 1 or 3."""
    kind, endings = "signals" if axes == 1 else "volumes", ", ".join(sorted(SUFFIXES_BY_AXES[axes]))
    return DataError(f"--axes {axes}: {escape_unprintable(source)} holds no {kind}", f"their names end in {endings}")
