"""Where the images and the masks of each split are: folders named by their role, or names inside one folder."""

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

MAX_PROBED_MASKS = 3  # files of which one decides whether they are masks
MAX_MASK_VALUES = 64  # different values up to which a file without loss is taken for a mask
MAX_PROBED_FILES, MAX_PROBED_FOLDERS = (
    2_000,
    5,
)  # files of a folder, and folders, that are searched for masks beside images


class ImageMaskReader(NamedTuple):
    """What finds and reads images of so many `axes` and their masks: the files below a folder, a path without its
    ending, the size of an image, the numbers or colours of a mask, the classes of a mask on the grid of its image of
    this size; `names` those of the folder of images and of the folder of masks."""

    axes: int
    names: tuple[tuple[str, ...], tuple[str, ...]]
    files: Callable[[Path], list[Path]]
    stem: Callable[[Path], Path]
    size: Callable[[Path], tuple[int, ...]]
    mask: Callable[[Path], np.ndarray]
    align: Callable[[np.ndarray, Path, Path, tuple[int, ...]], np.ndarray]


class MaskLocation(NamedTuple):
    """The folder of the images of a split and that of their class maps, which may be the same; without the latter
    `images` contains a folder for each image, or images without masks."""

    images: Path
    masks: Path | None


def locate_masks(root: Path, reader: ImageMaskReader) -> dict[str, MaskLocation]:
    """Split -> where its images and masks are; nothing where a folder has none. Raises DataError as
    `locate_sibling_masks`."""
    return locate_named_masks(root, reader) or (locate_sibling_masks(root) if reader.axes == 2 else {})


def locate_named_masks(root: Path, reader: ImageMaskReader) -> dict[str, MaskLocation]:
    """The places in folders that have the names of the reader, and those of a mask for each object; nothing without
    such folders."""
    homes = find_split_folders(root)
    if any(
        find_mask_folder(home, reader) or (reader.axes == 2 and find_object_folders(home)) for home in homes.values()
    ):
        return {
            name: MaskLocation(find_image_folder(home, reader), folder)
            if (folder := find_mask_folder(home, reader))
            else MaskLocation(home, None)
            for name, home in homes.items()
        }
    if folder := find_mask_folder(root, reader):
        return locate_masks_by_split(find_image_folder(root, reader), folder)
    return {"train": MaskLocation(root, None)} if reader.axes == 2 and find_object_folders(root) else {}


def locate_masks_by_split(images: Path, masks: Path) -> dict[str, MaskLocation]:
    """The places of the splits inside a folder of images and one of masks; all are `train` without such folders."""
    inner, others = find_split_folders(images), find_split_folders(masks)
    places = {name: MaskLocation(home, others.get(name, masks / name)) for name, home in inner.items()}
    return places or {"train": MaskLocation(images, masks)}


def find_image_folder(home: Path, reader: ImageMaskReader) -> Path:
    """The folder of images below a folder; it need not be there."""
    return next((home / name for name in reader.names[0] if (home / name).is_dir()), home / reader.names[0][0])


def find_mask_folder(home: Path, reader: ImageMaskReader) -> Path | None:
    """The folder of class maps beside `images`, None where there is none. YOLO's `labels`, of txt files, are not."""
    if not find_image_folder(home, reader).is_dir():
        return None
    return next((home / name for name in reader.names[1] if (home / name).is_dir() and reader.files(home / name)), None)


def find_object_folders(home: Path) -> list[Path]:
    """The folders below that have `images` and `masks` of one image each; none as soon as a folder has no `masks`, nor
    for one folder of several images, which is a data set itself."""
    folders = []
    for place in list_subfolders(home):
        if not (place / "masks").is_dir():
            return []
        folders.append(place)
    inner = folders[0] / "images" if len(folders) == 1 else None
    return [] if inner and not (inner.is_dir() and len(list(islice(iterate_images(inner), 2))) == 1) else folders


def list_subfolders(home: Path) -> list[Path]:
    """The folders directly below a folder, by name; none where it is no folder."""
    if not home.is_dir():
        return []
    return [
        Path(entry.path)
        for entry in sorted(list_entries(os.fspath(home)), key=lambda one: one.name)
        if is_folder(entry)
    ]


def locate_sibling_masks(root: Path) -> dict[str, MaskLocation]:
    """The places in folders that lie beside each other and are named by split and role: `train` and `trainannot`,
    `leftImg8bit` and `gtFine`, or `masks` beside one other folder; else those of `locate_mixed_masks`. Raises DataError
    where several folders may be meant, and for masks beside the images of class folders."""
    roles = {place: parse_folder_role(place.name) for place in list_subfolders(root)}
    maps = [place for place, role in roles.items() if role.role == "masks" and are_masks_below(place)]
    if not maps:
        return locate_mixed_masks(find_split_folders(root) or {"train": root})
    by_split: dict[str | None, list[Path]] = {}
    for place in maps:
        by_split.setdefault(roles[place].split, []).append(place)
    for split, places in by_split.items():
        if len(places) > 1:
            problem = f"{escape_unprintable(root)} has {len(places)} folders of masks{f' of {split}' if split else ''}"
            names = format_first_names([place.name for place in places], 3)
            raise DataError(f"{problem}: {names}", "move all but one to another folder")
    if None not in by_split:
        images = {
            split: find_role_folder(root, roles, FolderRole(split, "images")) for split in ("train", "val", "test")
        }
        return {
            split: MaskLocation(home, by_split.get(split, [root / f"{home.name}_masks"])[0])
            for split, home in images.items()
            if home is not None
        }
    masks = by_split[None][0]
    images = find_role_folder(root, roles, FolderRole(None, "images"))
    if images is not None:
        return locate_masks_by_split(images, masks)
    if homes := find_split_folders(root):
        others = find_split_folders(masks)
        if len(homes) == 1 and not others:
            return {name: MaskLocation(home, masks) for name, home in homes.items()}
        places = {name: MaskLocation(home, others.get(name, masks / name)) for name, home in homes.items()}
        return places if others else {}
    plain = [place for place, role in roles.items() if role == (None, None) and next(iterate_images(place), None)]
    if len(plain) > 1:
        problem = (
            f"{escape_unprintable(masks)} may belong to {len(plain)} folders: "
            f"{format_first_names([p.name for p in plain], 3)}"
        )
        raise DataError(problem, "rename the folder of its images to images")
    return locate_masks_by_split(plain[0], masks) if plain else {}


def find_role_folder(root: Path, roles: dict[Path, FolderRole], wanted: FolderRole) -> Path | None:
    """The folder of a split and role; None without one. Raises DataError where there are several."""
    places = [place for place, role in roles.items() if role == wanted and next(iterate_images(place), None)]
    if len(places) > 1:
        problem = (
            f"{escape_unprintable(root)} has {len(places)} folders of "
            f"images{f' of {wanted.split}' if wanted.split else ''}"
        )
        names = format_first_names([place.name for place in places], 3)
        raise DataError(f"{problem}: {names}", "move all but one to another folder")
    return places[0] if places else None


def are_masks_below(home: Path) -> bool:
    """Whether the first image files below a folder are masks."""
    return are_mask_files([Path(entry.path) for entry in islice(iterate_images(home), MAX_PROBED_MASKS)])


def are_mask_files(places: Sequence[Path]) -> bool:
    """Whether files are masks: few different values, or black and white but for lossy compression. Files that cannot be
    read do not count."""
    for place in places[:MAX_PROBED_MASKS]:
        try:
            if is_lossy(place):
                return are_lossy_binary([place])
            values = to_numbers_if_grey(read_mask(place))
        except DataError:
            continue
        return len(np.unique(values if values.ndim == 2 else encode_colours(values))) <= MAX_MASK_VALUES
    return False


def locate_mixed_masks(homes: dict[str, Path]) -> dict[str, MaskLocation]:
    """The places of splits whose folders contain images and masks, such as `a.jpg` and `a_mask.png`. Raises DataError
    where class folders do."""
    if any(map(find_masks_beside_images, homes.values())):
        return {name: MaskLocation(home, home) for name, home in homes.items()}
    for home in homes.values():
        class_folders = [
            place for place in list_subfolders(home)[:MAX_PROBED_FOLDERS] if find_masks_beside_images(place)
        ]
        if len(class_folders) > 1 or (
            class_folders and not parse_split_name(class_folders[0].name) and len(list_subfolders(home)) > 1
        ):
            problem = f"{escape_unprintable(class_folders[0])} is a class folder with masks beside its images"
            example = escape_unprintable(find_masks_beside_images(class_folders[0])[0].name)
            hint = "put images into images/ and masks into masks/ to learn masks, or move the masks away to classify"
            raise DataError(f"{problem}, such as {example}", hint)
    return {}


def find_masks_beside_images(home: Path) -> list[Path]:
    """The masks among the first files directly in a folder whose image lies beside them; none where they are others."""
    endings = tuple(IMAGE_FILE_SUFFIXES)
    try:
        with os.scandir(home) as listed:
            names = sorted(
                entry.name for entry in islice(listed, MAX_PROBED_FILES) if entry.name.lower().endswith(endings)
            )
    except OSError:  # named by the layout that reads the folder
        return []
    stems = [os.path.splitext(name)[0] for name in names]
    images = {parse_file_key(stem, "images").key for stem in stems if not is_mask_stem(stem)}
    masks = [
        home / name
        for name, stem in zip(names, stems, strict=True)
        if is_mask_stem(stem) and parse_file_key(stem, "masks").key in images
    ]
    return masks if masks and are_mask_files(masks) else []


def is_mask_stem(stem: str) -> bool:
    """Whether the name of a file, without its ending, has a word of masks: `a_mask`, `a_gt`, `mask_a`."""
    return any(word in MASK_STEM_WORDS - {"l"} for word in parse_file_key(stem, "masks").words)
