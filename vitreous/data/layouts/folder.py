"""Image folders: one folder per class, with or without split folders around them."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from vitreous.data.decoding.decode import IMAGE_FILE_SUFFIXES, describe_exception
from vitreous.data.decoding.volumes import VOLUME_ONLY_SUFFIXES
from vitreous.data.layouts.classes import (
    natural_sort_key,
    one_class_note,
    sort_class_names,
    too_few_classes_error,
    unknown_classes_error,
)
from vitreous.data.layouts.file_names import normalise_name
from vitreous.data.layouts.split_names import (
    NO_CLASS_WORDS,
    find_split_folders,
    has_role_name,
    is_system_name,
    role_names_note,
)
from vitreous.data.split import Data, FileSplit, Paths, Split, create_empty_labels, ensure_val_split
from vitreous.errors import DataError, escape_unprintable, format_first_names

FOLDER_LAYOUT_HINT = (
    "use DIR/CLASS/*.jpg, or DIR/train/CLASS/*.jpg with val/ and test/ next to it, or a CSV file with columns "
    "path,label"
)
#: suffixes of image files that Pillow may read but this package does not
UNSUPPORTED_SUFFIXES = (
    ".dib",
    ".ppm",
    ".pgm",
    ".pbm",
    ".pnm",
    ".pfm",
    ".tga",
    ".jp2",
    ".j2k",
    ".jpx",
    ".jxl",
    ".ico",
    ".dds",
    ".sgi",
)
FLAT_FOLDER_HINT = (
    "put each image into a folder of its class, or write a CSV file with columns path,label; predict, embed and "
    "dedup accept it unchanged"
)


def open_image_folder(root: Path, split_seed: int = 0) -> Data:
    """Open class folders of images: `{train,val|valid|validation,test}/CLASS/*`, or `CLASS/*`.

    If there is no `val`, a tenth of `train` is held out. If there are fewer than two classes, all images below each
    folder, at any depth, are opened without labels. Classes are in natural order (2 before 10), which does not depend
    on the file system. Raises DataError if there are no images, for splits without `train`, and for a class that
    `train` does not have.
    """
    split_folders, skipped = resolve_split_folders(root), Counter[str]()
    lister = partial(list_files_by_suffix, skipped=skipped)
    data = build_classification_data(
        root,
        split_folders,
        {name: list_class_files(folder, lister) for name, folder in split_folders.items()},
        split_seed,
    )
    return replace(data, notes=[*skipped_notes(skipped), *siblings_note(root, split_folders), *data.notes])


@dataclass(frozen=True)
class SampleFiles(FileSplit):
    """Split of files that are not images, such as volumes or signals, with labels (n,) int64 or (n, K) float32. `kind`
    is the noun for the samples (`Preprocess.noun`), `axes` their number of axes."""

    kind: str = "images"
    axes: int = 2

    def take(self, indices: np.ndarray, labels: np.ndarray | None = None) -> SampleFiles:
        """Return a split of the files at `indices` (m,), in this order; `labels` replaces their labels."""
        return replace(super().take(indices, labels), kind=self.kind, axes=self.axes)

    def update(self, digest: Any) -> None:
        """Update a hashlib digest with the paths of the files, and with `kind`."""
        super().update(digest)
        digest.update(self.kind.encode())


def open_class_folders(
    root: Path, split_seed: int, suffixes: frozenset[str], convert: Callable[[FileSplit], Split]
) -> Data:
    """Open class folders of files with these `suffixes`, with or without split folders, by the rules of
    `open_image_folder`.

    `convert` turns each split of files into the split class of the modality. Raises DataError as
    `open_image_folder`.
    """
    split_folders, list_files = resolve_split_folders(root), partial(list_files_by_suffix, suffixes=suffixes)
    paths_by_split = {name: list_class_files(folder, list_files) for name, folder in split_folders.items()}
    data = build_classification_data(root, split_folders, paths_by_split, split_seed, list_files)
    splits = {name: convert(split) for name, split in data.splits.items()}  # type: ignore[arg-type]
    return replace(data, splits=splits, full_train_split=data.full_train_split and convert(data.full_train_split))  # type: ignore[arg-type]


def resolve_split_folders(root: Path) -> dict[str, Path]:
    """Return {split: folder} of a dataset folder. `root` itself is `train` if there are no split folders, or if `train`
    is the name of a class, as in `bus`, `car`, `train`. Raises DataError for split folders without `train`."""
    split_folders = find_split_folders(root)
    if split_folders and "train" not in split_folders:
        raise DataError(
            f"{escape_unprintable(root)} has {', '.join(split_folders)} but no train folder", FOLDER_LAYOUT_HINT
        )
    if (
        list(split_folders) == ["train"]
        and contains_images(split_folders["train"])
        and any(map(contains_images, list_sibling_folders(split_folders["train"])))
    ):
        return {"train": root}
    return split_folders or {"train": root}


def list_sibling_folders(folder: Path) -> list[Path]:
    """List the folders next to a folder that are not named like splits, images or annotations, in natural order."""
    names = [
        entry.name for entry in list_entries(os.fspath(folder.parent)) if is_folder(entry) and entry.name != folder.name
    ]
    return [folder.parent / name for name in sorted(names, key=natural_sort_key) if not has_role_name(name)]


def contains_images(folder: Path) -> bool:
    """Return whether a folder directly contains image files."""
    return any(entry.name.lower().endswith(tuple(IMAGE_FILE_SUFFIXES)) for entry in list_entries(os.fspath(folder)))


def build_classification_data(
    root: Path,
    split_folders: dict[str, Path],
    paths_by_split: dict[str, dict[str, Paths]],
    split_seed: int,
    lister: Callable[[str], list[str]] | None = None,
) -> Data:
    """Build a classification dataset from `paths_by_split`, {split: {class: files}}.

    If `train` has fewer than two classes, the data have no labels and consist of all files below the split folders.
    `lister` lists the files below a folder, by default `list_files_by_suffix`. Raises DataError if there are no images,
    and for a class that `train` does not have.
    """
    lister = lister or list_files_by_suffix
    classes = sort_class_names(paths_by_split["train"])
    notes: list[str] = []
    splits: dict[str, Split]
    unlabelled = None
    if len(classes) < 2:
        folder = split_folders["train"]
        unlabelled = (
            too_few_classes_error(escape_unprintable(folder), classes, FOLDER_LAYOUT_HINT)
            if classes
            else no_classes_error(folder, lister)
        )
        paths = {name: Paths(lister(os.fspath(folder))) for name, folder in split_folders.items()}
        splits = {
            name: FileSplit(split_paths, create_empty_labels(len(split_paths))) for name, split_paths in paths.items()
        }
        notes, classes = one_class_note(classes), []
    else:
        unclassified = {
            name: lister(os.fspath(split_folders[name]))
            for name, paths_by_class in paths_by_split.items()
            if lacks_class_folders(paths_by_class, classes)
        }
        splits = {
            name: label_class_files(name, paths_by_class, classes)
            for name, paths_by_class in paths_by_split.items()
            if name not in unclassified
        }
        splits |= {name: FileSplit(paths, create_empty_labels(len(paths))) for name, paths in unclassified.items()}
    notes += role_names_note(classes)
    splits, full_train = ensure_val_split(splits, split_seed, notes)
    unsplit = split_folders["train"] == root
    return Data(
        escape_unprintable(root),
        tuple(classes),
        splits=splits,
        notes=notes,
        unsplit=unsplit,
        full_train_split=full_train,
        unlabelled=unlabelled,
    )


def lacks_class_folders(paths_by_class: dict[str, Paths], classes: Sequence[str]) -> bool:
    """Return whether a split has no class folders: it has no folders, or a single folder that is no class of `classes`
    and is named like a split or `unknown`, as in `test/test1` of competitions."""
    first_name = next(iter(paths_by_class), "")
    return not paths_by_class or (
        len(paths_by_class) == 1 and first_name not in classes and has_role_name(first_name, NO_CLASS_WORDS)
    )


def no_classes_error(folder: Path, lister: Callable[[str], list[str]]) -> DataError:
    """Return the error that explains why the images of a folder without class folders have no labels. Raises DataError
    if there are no images at all."""
    if count := len(lister(os.fspath(folder))):
        images = f"{count:,} image" + ("" if count == 1 else "s")
        problem = f"is a flat folder: {images} and no class folders, so there are no labels"
        return DataError(f"{escape_unprintable(folder)} {problem}", FLAT_FOLDER_HINT)
    if volumes := list_files_by_suffix(os.fspath(folder), VOLUME_ONLY_SUFFIXES):
        problem = f"{len(volumes)} volumes without masks; the first is {escape_unprintable(volumes[0])}"
        hint = (
            "move each into a folder of its class; or all into images/ and masks of the same names into "
            "masks/; predict accepts them unchanged"
        )
        raise DataError(f"no images in {escape_unprintable(folder)} but {problem}", hint)
    raise DataError(f"no images in {escape_unprintable(folder)}", FOLDER_LAYOUT_HINT)


def label_class_files(name: str, paths_by_class: dict[str, Paths], classes: list[str]) -> FileSplit:
    """Build the split `name` from the files of each class, with class indices (n,) int64 as labels. Raises DataError
    for a class that is not in `classes`, those of `train`."""
    train_name_by_normalised = {normalise_name(label): label for label in classes}
    paths_by_class = {
        train_name_by_normalised.get(normalise_name(label), label): paths for label, paths in paths_by_class.items()
    }
    class_set = set(classes)
    if unknown_classes := [label for label in sort_class_names(paths_by_class) if label not in class_set]:
        raise unknown_classes_error(name, unknown_classes, classes)
    counts = [len(paths_by_class.get(label, ())) for label in classes]
    paths = Paths.concatenate(paths_by_class[label] for label in classes if label in paths_by_class)
    return FileSplit(paths, np.repeat(np.arange(len(classes)), counts))


def list_class_files(folder: Path, list_files: Callable[[str], list[str]] | None = None) -> dict[str, Paths]:
    """Return {class: files}, the files below each class folder at any depth, in natural order. `list_files` lists the
    files below a folder, by default images. Hidden folders, and folders without such files, are left out."""
    folders = sorted(
        (entry for entry in list_entries(os.fspath(folder)) if is_folder(entry)), key=lambda entry: entry.name
    )
    return {
        entry.name: Paths(files) for entry in folders if (files := (list_files or list_files_by_suffix)(entry.path))
    }


def list_images(folder: Path) -> list[Path]:
    """List all image files below a folder, in natural order. A folder linked twice is visited once."""
    return [Path(path) for path in list_files_by_suffix(os.fspath(folder))]


def list_files_by_suffix(
    folder: str, suffixes: frozenset[str] = IMAGE_FILE_SUFFIXES, skipped: Counter[str] | None = None
) -> list[str]:
    """List the paths of the files below a folder whose names end in one of `suffixes`, as text in natural order. Image
    files in unsupported formats are counted by suffix in `skipped`, if passed."""
    endings, paths = tuple(suffixes), []
    for entry in iterate_files(folder):
        name = entry.name.lower()
        if name.endswith(endings):
            paths.append(entry.path.removeprefix("./"))
        elif skipped is not None and name.endswith(UNSUPPORTED_SUFFIXES):
            skipped[os.path.splitext(name)[1]] += 1
    return sorted(paths, key=natural_sort_key)


def skipped_notes(skipped: Counter[str]) -> list[str]:
    """Return the note about image files in unsupported formats, by suffix; empty if there are none."""
    if not skipped:
        return []
    counts_by_suffix = ", ".join(f"{count:,} {ending}" for ending, count in sorted(skipped.items()))
    return [f"{skipped.total():,} image files are skipped, as their formats are not supported: {counts_by_suffix}"]


def siblings_note(root: Path, split_folders: dict[str, Path]) -> list[str]:
    """Return the note about image folders next to the split folders, which are ignored; empty if there are none or if
    `root` has no split folders."""
    if split_folders["train"] == root:
        return []
    unread = [
        folder.name for folder in list_sibling_folders(split_folders["train"]) if next(iterate_images(folder), None)
    ]
    return [f"folders next to the splits are ignored: {format_first_names(unread, 5)}"] if unread else []


def iterate_images(folder: Path) -> Iterator[os.DirEntry[str]]:
    """Yield all image files below a folder, in file system order."""
    return (
        entry for entry in iterate_files(os.fspath(folder)) if entry.name.lower().endswith(tuple(IMAGE_FILE_SUFFIXES))
    )


def iterate_files(root: str) -> Iterator[os.DirEntry[str]]:
    """Yield all files below a folder that are not hidden. A folder linked twice is visited once."""
    visited_folders, pending = set[str](), [root]
    while pending:
        folder = pending.pop()
        real_path = os.path.realpath(folder)
        if real_path in visited_folders:
            continue
        visited_folders.add(real_path)
        for entry in list_entries(folder):
            if is_folder(entry):
                pending.append(entry.path)
            else:
                yield entry


def list_entries(folder: str) -> list[os.DirEntry[str]]:
    """List the entries of a folder that are neither hidden nor system files. Raises DataError if it cannot be read."""
    try:
        return [entry for entry in os.scandir(folder) if not is_system_name(entry.name)]
    except OSError as error:
        problem = f"{escape_unprintable(folder)}: cannot be read ({describe_exception(error)})"
        raise DataError(problem, "fix its permissions, or delete it") from None


def is_folder(entry: os.DirEntry[str]) -> bool:
    """Return whether an entry is a folder or a link to one; a link to itself is not."""
    try:
        return entry.is_dir()
    except OSError:
        return False
