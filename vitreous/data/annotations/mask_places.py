"""Locate the images and masks of each split: folders named by their role, or file names inside one folder."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import numpy as np

from vitreous.data.annotations.class_maps import encode_colours
from vitreous.data.annotations.mask_files import are_lossy_binary, is_lossy, read_mask, to_numbers_if_grey
from vitreous.data.annotations.mask_names import MASK_STEM_WORDS, FolderRole, parse_file_key, parse_folder_role
from vitreous.data.decoding.decode import IMAGE_FILE_SUFFIXES
from vitreous.data.layouts.folder import is_folder, iterate_images, list_entries
from vitreous.data.layouts.split_names import find_split_folders, parse_split_name
from vitreous.errors import DataError, escape_unprintable, format_first_names

MAX_PROBED_MASKS = 3  # number of files that are tried; the first readable file decides whether all are masks
MAX_MASK_VALUES = 64  # maximum number of distinct values of a losslessly compressed mask
#: number of files per folder, and of class folders, that are searched for masks next to images
MAX_PROBED_FILES, MAX_PROBED_FOLDERS = 2_000, 5


class ImageMaskReader(NamedTuple):
    """How to find and read images (`axes` 2) or volumes (`axes` 3) and their masks.

    - `names`: possible names of the image folder, and of the mask folder
    - `files(folder)`: the image or mask files below a folder
    - `stem(path)`: the path without suffix
    - `size(path)`: the size of an image
    - `mask(path)`: the indices or colours of a mask
    - `align(classes, mask_path, image_path, size)`: the classes of a mask on the grid of its image of that size
    """

    axes: int
    names: tuple[tuple[str, ...], tuple[str, ...]]
    files: Callable[[Path], list[Path]]
    stem: Callable[[Path], Path]
    size: Callable[[Path], tuple[int, ...]]
    mask: Callable[[Path], np.ndarray]
    align: Callable[[np.ndarray, Path, Path, tuple[int, ...]], np.ndarray]


class MaskLocation(NamedTuple):
    """The image folder of a split, and the folder of its class maps, which may be the same folder. If `masks` is None,
    `images` contains one folder per image, with a mask per object, or images without masks."""

    images: Path
    masks: Path | None


def locate_masks(root: Path, reader: ImageMaskReader) -> dict[str, MaskLocation]:
    """Locate the images and masks of each split, by all recognised names; empty if there are none. Raises DataError if
    several folders match."""
    return locate_named_masks(root, reader) or (locate_sibling_masks(root) if reader.axes == 2 else {})


def locate_named_masks(root: Path, reader: ImageMaskReader) -> dict[str, MaskLocation]:
    """Locate the images and masks of each split in folders named `images` and `masks` (`reader.names`), or in folders
    of single images with a mask per object; empty if there are none."""
    split_folders = find_split_folders(root)
    if any(
        find_mask_folder(split_folder, reader) or (reader.axes == 2 and find_object_folders(split_folder))
        for split_folder in split_folders.values()
    ):
        return {
            name: MaskLocation(find_image_folder(split_folder, reader), folder)
            if (folder := find_mask_folder(split_folder, reader))
            else MaskLocation(split_folder, None)
            for name, split_folder in split_folders.items()
        }
    if folder := find_mask_folder(root, reader):
        return locate_masks_by_split(find_image_folder(root, reader), folder)
    return {"train": MaskLocation(root, None)} if reader.axes == 2 and find_object_folders(root) else {}


def locate_masks_by_split(images: Path, masks: Path) -> dict[str, MaskLocation]:
    """Locate the split folders inside an image folder and a mask folder; all samples are `train` if there are none."""
    image_folders, mask_folders = find_split_folders(images), find_split_folders(masks)
    locations = {
        name: MaskLocation(folder, mask_folders.get(name, masks / name)) for name, folder in image_folders.items()
    }
    return locations or {"train": MaskLocation(images, masks)}


def find_image_folder(folder: Path, reader: ImageMaskReader) -> Path:
    """Return the image folder directly below a folder; if none exists, the path that it would have."""
    return next((folder / name for name in reader.names[0] if (folder / name).is_dir()), folder / reader.names[0][0])


def find_mask_folder(folder: Path, reader: ImageMaskReader) -> Path | None:
    """Return the folder of class maps next to the image folder; None if there is none. A folder without mask files,
    such as YOLO's `labels` with txt files, is not one."""
    if not find_image_folder(folder, reader).is_dir():
        return None
    return next(
        (folder / name for name in reader.names[1] if (folder / name).is_dir() and reader.files(folder / name)), None
    )


def find_object_folders(parent: Path) -> list[Path]:
    """List the subfolders that contain the `images` and `masks` of a single image each. Empty if a subfolder has no
    `masks`, or if there is only one subfolder, with several images, which is a dataset itself."""
    folders = []
    for folder in list_subfolders(parent):
        if not (folder / "masks").is_dir():
            return []
        folders.append(folder)
    images_folder = folders[0] / "images" if len(folders) == 1 else None
    return (
        []
        if images_folder and not (images_folder.is_dir() and len(list(islice(iterate_images(images_folder), 2))) == 1)
        else folders
    )


def list_subfolders(folder: Path) -> list[Path]:
    """List the folders directly below a folder, by name; empty if it is not a folder."""
    if not folder.is_dir():
        return []
    return [
        Path(entry.path)
        for entry in sorted(list_entries(os.fspath(folder)), key=lambda entry: entry.name)
        if is_folder(entry)
    ]


def locate_sibling_masks(root: Path) -> dict[str, MaskLocation]:
    """Locate images and masks in sibling folders whose names contain split and role: `train` and `trainannot`,
    `leftImg8bit` and `gtFine`, or `masks` next to a single other folder. If there are none, masks are searched next to
    their images (`locate_mixed_masks`). Raises DataError if several folders match, and for class folders with masks
    next to their images."""
    roles = {folder: parse_folder_role(folder.name) for folder in list_subfolders(root)}
    mask_folders = [folder for folder, role in roles.items() if role.role == "masks" and are_masks_below(folder)]
    if not mask_folders:
        return locate_mixed_masks(find_split_folders(root) or {"train": root})
    by_split: dict[str | None, list[Path]] = {}
    for folder in mask_folders:
        by_split.setdefault(roles[folder].split, []).append(folder)
    for split, folders in by_split.items():
        if len(folders) > 1:
            problem = f"{escape_unprintable(root)} has {len(folders)} folders of masks{f' of {split}' if split else ''}"
            names = format_first_names([folder.name for folder in folders], 3)
            raise DataError(f"{problem}: {names}", "move all but one to another folder")
    if None not in by_split:
        images = {
            split: find_role_folder(root, roles, FolderRole(split, "images")) for split in ("train", "val", "test")
        }
        return {
            split: MaskLocation(split_folder, by_split.get(split, [root / f"{split_folder.name}_masks"])[0])
            for split, split_folder in images.items()
            if split_folder is not None
        }
    masks = by_split[None][0]
    images = find_role_folder(root, roles, FolderRole(None, "images"))
    if images is not None:
        return locate_masks_by_split(images, masks)
    if split_folders := find_split_folders(root):
        mask_split_folders = find_split_folders(masks)
        if len(split_folders) == 1 and not mask_split_folders:
            return {name: MaskLocation(split_folder, masks) for name, split_folder in split_folders.items()}
        locations = {
            name: MaskLocation(split_folder, mask_split_folders.get(name, masks / name))
            for name, split_folder in split_folders.items()
        }
        return locations if mask_split_folders else {}
    other_folders = [
        folder for folder, role in roles.items() if role == (None, None) and next(iterate_images(folder), None)
    ]
    if len(other_folders) > 1:
        problem = (
            f"{escape_unprintable(masks)} may belong to {len(other_folders)} folders: "
            f"{format_first_names([p.name for p in other_folders], 3)}"
        )
        raise DataError(problem, "rename the folder of its images to images")
    return locate_masks_by_split(other_folders[0], masks) if other_folders else {}


def find_role_folder(root: Path, roles: dict[Path, FolderRole], folder_role: FolderRole) -> Path | None:
    """Return the folder of images whose name has the split and role `folder_role`; None if there is none. Raises
    DataError if there are several."""
    folders = [folder for folder, role in roles.items() if role == folder_role and next(iterate_images(folder), None)]
    if len(folders) > 1:
        problem = (
            f"{escape_unprintable(root)} has {len(folders)} folders of "
            f"images{f' of {folder_role.split}' if folder_role.split else ''}"
        )
        names = format_first_names([folder.name for folder in folders], 3)
        raise DataError(f"{problem}: {names}", "move all but one to another folder")
    return folders[0] if folders else None


def are_masks_below(folder: Path) -> bool:
    """Return whether the first image files below a folder are masks."""
    return are_mask_files([Path(entry.path) for entry in islice(iterate_images(folder), MAX_PROBED_MASKS)])


def are_mask_files(paths: Sequence[Path]) -> bool:
    """Return whether the first readable file is a mask: it has at most MAX_MASK_VALUES distinct values, or is black and
    white except for lossy compression."""
    for path in paths[:MAX_PROBED_MASKS]:
        try:
            if is_lossy(path):
                return are_lossy_binary([path])
            values = to_numbers_if_grey(read_mask(path))
        except DataError:
            continue
        return len(np.unique(values if values.ndim == 2 else encode_colours(values))) <= MAX_MASK_VALUES
    return False


def locate_mixed_masks(split_folders: dict[str, Path]) -> dict[str, MaskLocation]:
    """Locate splits whose folders contain both images and masks, such as `a.jpg` and `a_mask.png`. Raises DataError for
    class folders with masks next to their images."""
    if any(map(find_masks_beside_images, split_folders.values())):
        return {name: MaskLocation(split_folder, split_folder) for name, split_folder in split_folders.items()}
    for split_folder in split_folders.values():
        class_folders = [
            folder for folder in list_subfolders(split_folder)[:MAX_PROBED_FOLDERS] if find_masks_beside_images(folder)
        ]
        if len(class_folders) > 1 or (
            class_folders and not parse_split_name(class_folders[0].name) and len(list_subfolders(split_folder)) > 1
        ):
            problem = f"{escape_unprintable(class_folders[0])} is a class folder with masks next to its images"
            example = escape_unprintable(find_masks_beside_images(class_folders[0])[0].name)
            hint = "for segmentation, use folders images/ and masks/; for classification, move the masks away"
            raise DataError(f"{problem}, such as {example}", hint)
    return {}


def find_masks_beside_images(folder: Path) -> list[Path]:
    """List the masks that are next to their images, among the first files directly in a folder. Empty if the files that
    are named like masks contain no mask values."""
    endings = tuple(IMAGE_FILE_SUFFIXES)
    try:
        with os.scandir(folder) as entries:
            names = sorted(
                entry.name for entry in islice(entries, MAX_PROBED_FILES) if entry.name.lower().endswith(endings)
            )
    except OSError:  # reported by the layout that reads the folder
        return []
    stems = [os.path.splitext(name)[0] for name in names]
    images = {parse_file_key(stem, "images").key for stem in stems if not is_mask_stem(stem)}
    masks = [
        folder / name
        for name, stem in zip(names, stems, strict=True)
        if is_mask_stem(stem) and parse_file_key(stem, "masks").key in images
    ]
    return masks if masks and are_mask_files(masks) else []


def is_mask_stem(stem: str) -> bool:
    """Return whether the stem of a file begins or ends with a word for masks: `a_mask`, `a_gt`, `mask_a`."""
    return any(word in MASK_STEM_WORDS - {"l"} for word in parse_file_key(stem, "masks").words)
