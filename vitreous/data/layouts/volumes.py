"""Class folders of volumes or signals: `[SPLIT/]CLASS/*.nii.gz`, and other files with one array each.

If all files of the classes have the suffixes of a row, the modality is:

    .nii, .nii.gz, .npz    signals if the first file has one or two axes, else volumes
    .csv                   signals, one per file
    .npy                   signals if the first file has one axis, images if it has two or three, volumes if it has four
    .tif                   images

`axes` 3 or 1 opens all such files as volumes or signals; 2 opens them as images.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from vitreous.data.decoding.decode import IMAGE_FILE_SUFFIXES
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

MAX_PROBED_ARRAYS = 16  # number of files that are inspected; the first readable file determines the number of axes
SUFFIXES_BY_AXES = {1: frozenset(SIGNAL_SUFFIXES), 3: frozenset(VOLUME_SUFFIXES)}
NPY_SUFFIX = ".npy"
# suffixes that are detected without `axes`
ARRAY_SUFFIXES = frozenset((*VOLUME_ONLY_SUFFIXES, TEXT_SUFFIX, NPY_SUFFIX))


@dataclass(frozen=True)
class ArrayFiles(FileSplit):
    """Split of files of volumes (`axes` 3) or signals (`axes` 1), with labels (n,) int64 or (n, K) float32."""

    axes: int = 3

    @property
    def kind(self) -> str:
        """The noun for the samples: signals or volumes."""
        return "signals" if self.axes == 1 else "volumes"

    def take(self, indices: np.ndarray, labels: np.ndarray | None = None) -> ArrayFiles:
        """Return a split of the files at `indices` (m,), in this order; `labels` replaces their labels."""
        return replace(super().take(indices, labels), axes=self.axes)

    def update(self, digest: Any) -> None:
        """Update a hashlib digest with the paths of the files, and with `axes`."""
        super().update(digest)
        digest.update(b"axes %d" % self.axes)


def detect_array_axes(paths: list[str], axes: int | None = None) -> int | None:
    """Detect the modality of files by their suffixes and the first readable file: 1 for signals, 3 for volumes, None
    for others. If `axes` is set, it is returned if the suffixes allow it."""
    endings = {get_file_suffix(path) for path in paths}
    if axes is not None:
        return axes if axes in SUFFIXES_BY_AXES and endings and endings <= SUFFIXES_BY_AXES[axes] else None
    if not endings or not (endings <= VOLUME_ONLY_SUFFIXES or endings in ({TEXT_SUFFIX}, {NPY_SUFFIX})):
        return None
    if endings == {TEXT_SUFFIX}:
        return 1
    for index in np.linspace(0, len(paths) - 1, min(MAX_PROBED_ARRAYS, len(paths))).astype(int):
        array_axes = count_array_axes(paths[index])
        if array_axes is not None:
            return {1: 1, 4: 3}.get(array_axes) if endings == {NPY_SUFFIX} else 1 if array_axes < 3 else 3
    return None if endings == {NPY_SUFFIX} else 3


def get_file_suffix(path: str) -> str:
    """Return the suffix of a file in lower case, `.nii.gz` included."""
    return ".nii.gz" if path.lower().endswith(".nii.gz") else os.path.splitext(path)[1].lower()


def detect_folder_axes(root: Path, axes: int | None = None) -> int | None:
    """Detect whether the class folders of a dataset folder contain only signals (1) or only volumes (3); None
    otherwise. If `axes` is 1 or 3, it is returned if there is any such file, regardless of other files."""
    if axes is not None:
        return (
            axes if axes in SUFFIXES_BY_AXES and list_files_by_suffix(os.fspath(root), SUFFIXES_BY_AXES[axes]) else None
        )
    paths = []
    for folder in resolve_split_folders(root).values() if "train" in find_split_folders(root) else (root,):
        for entry in filter(is_folder, list_entries(os.fspath(folder))):
            class_files = list_array_files(entry.path)
            if class_files is None:
                return None
            paths += class_files
    return detect_array_axes(paths)


def list_array_files(folder: str) -> list[str] | None:
    """List the files below a folder that may be volumes or signals, in natural order; None if there is an image among
    them."""
    paths = []
    for entry in iterate_files(folder):
        suffix = get_file_suffix(entry.name)
        if suffix in ARRAY_SUFFIXES:
            paths.append(entry.path.removeprefix("./"))
        elif suffix in IMAGE_FILE_SUFFIXES:
            return None
    return sorted(paths, key=natural_sort_key)


def open_array_folder(root: Path, split_seed: int = 0, axes: int = 3) -> Data:
    """Open class folders of volumes (`axes` 3) or signals (`axes` 1), with or without split folders, by the rules of
    `open_image_folder`. Raises DataError as that function."""
    data = open_class_folders(root, split_seed, SUFFIXES_BY_AXES[axes], partial(to_array_files, axes=axes))
    return replace(data, notes=[arrays_note(sum(map(len, data.splits.values())), axes), *data.notes])


def arrays_note(count: int, axes: int) -> str:
    """Return the note that data are opened as `count` volumes (`axes` 3) or signals (`axes` 1)."""
    return f"the data are {count:,} {'signals' if axes == 1 else 'volumes'}"


def to_array_files(split: FileSplit, axes: int) -> ArrayFiles:
    """Convert a split of files to one of volumes (`axes` 3) or signals (`axes` 1)."""
    return ArrayFiles(split.paths, split.labels, axes)


def no_arrays_error(source: str, axes: int) -> DataError:
    """Return the error for data that cannot be read with these `axes`, 1 or 3."""
    noun, endings = "signals" if axes == 1 else "volumes", ", ".join(sorted(SUFFIXES_BY_AXES[axes]))
    return DataError(f"--axes {axes}: {escape_unprintable(source)} has no {noun}", f"use files that end in {endings}")
