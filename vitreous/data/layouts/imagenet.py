"""ImageNet's folders: classes named by synset (n01440764), as unpacked from ILSVRC2012, Kaggle's archive or
ImageNet-21k.

A class is named by its folder. Its human-readable title comes from a list next to the data.
"""

from __future__ import annotations

import csv
import hashlib
import io
import os
import re
from dataclasses import replace
from pathlib import Path

from vitreous.data.decoding.decode import read_input_file
from vitreous.data.layouts.folder import (
    build_classification_data,
    is_folder,
    list_class_files,
    list_entries,
    list_files_by_suffix,
    resolve_split_folders,
)
from vitreous.data.layouts.split_names import find_split_folders
from vitreous.data.split import Data, Paths
from vitreous.data.text_files import read_lines, read_text
from vitreous.errors import DataError, escape_unprintable

SYNSET_PATTERN = re.compile(r"n\d{8}")
KAGGLE_FOLDER = "ILSVRC/Data/CLS-LOC"
TITLE_FILES = ("LOC_synset_mapping.txt", "words.txt", "synset_words.txt")  # n01440764 tench, Tinca tinca
SOLUTION_FILE = "LOC_val_solution.csv"  # ILSVRC2012_val_00048981,n03995372 85 1 499 272
GROUND_TRUTH_FILE = "ILSVRC2012_validation_ground_truth.txt"  # one synset number per line, in the order of the images
DEVKIT_FOLDER = "ILSVRC2012_devkit_t12/data"
# SHA-256 of the 1,000 synsets of ILSVRC2012, sorted, one per line
ILSVRC2012_SHA256 = "385e0240499426c022b773be1ae4da780f057b89c9694c7f47199f62746b6edd"


def is_imagenet(root: Path) -> bool:
    """Return whether all class folders of a dataset folder, or of its `train` folder, are named by synsets."""
    folder = find_image_root(root)
    train = find_split_folders(folder).get("train", folder)
    names = [entry.name for entry in list_entries(os.fspath(train)) if is_folder(entry)]
    return bool(names) and all(SYNSET_PATTERN.fullmatch(name) for name in names)


def find_image_root(root: Path) -> Path:
    """Return the folder that contains the split or class folders: the subfolder of Kaggle's archive if it exists, else
    `root`."""
    return next(
        (root / subfolder for subfolder in (KAGGLE_FOLDER, "Data/CLS-LOC") if (root / subfolder).is_dir()), root
    )


def open_imagenet(root: Path, split_seed: int = 0) -> Data:
    """Open an ImageNet folder: class folders named by synset, or split folders `train`, `val` and `test` of them.

    `val` may also be a flat folder of images, with a ground-truth file nearby; an unlabelled `test` is ignored. Raises
    DataError as `open_image_folder`, and for validation images without ground truth.
    """
    image_root = find_image_root(root)
    split_folders = resolve_split_folders(image_root)
    search_folders = [image_root, *list(image_root.absolute().parents)[: 3 if image_root.name == "CLS-LOC" else 1]]
    paths_by_split = {}
    for name, folder in split_folders.items():
        classes = list_class_files(folder)
        unsorted_files = [] if classes or name == "train" else list_files_by_suffix(os.fspath(folder))
        if unsorted_files and name == "val":
            classes = group_by_synset(unsorted_files, search_folders)
        paths_by_split[name] = classes
    data = build_classification_data(image_root, split_folders, paths_by_split, split_seed)
    return replace(data, name=escape_unprintable(root), titles=read_class_titles(data.classes, search_folders))


def group_by_synset(files: list[str], search_folders: list[Path]) -> dict[str, Paths]:
    """Group validation images in a flat folder by synset, from a ground-truth file in one of `search_folders` ->
    {synset: paths}. Raises DataError if the file is missing or does not contain an image."""
    synset_by_stem = read_kaggle_solution(search_folders) or read_devkit_labels(search_folders)
    if not synset_by_stem:
        problem = f"{len(files)} images without class folders and without ground truth"
        hint = f"put {SOLUTION_FILE}, or {GROUND_TRUTH_FILE} and meta.mat of the development kit, next to them"
        raise DataError(f"{escape_unprintable(os.path.dirname(files[0]))} has {problem}", hint)
    stems = [os.path.splitext(os.path.basename(path))[0] for path in files]
    if unknown_paths := [path for path, stem in zip(files, stems, strict=True) if stem not in synset_by_stem]:
        problem = f"{len(unknown_paths)} of {len(files)} images are not in the ground truth"
        raise DataError(f"{problem}; the first is {escape_unprintable(unknown_paths[0])}", "remove these images")
    paths_by_synset: dict[str, list[str]] = {}
    for path, stem in zip(files, stems, strict=True):
        paths_by_synset.setdefault(synset_by_stem[stem], []).append(path)
    return {synset: Paths(paths) for synset, paths in paths_by_synset.items()}


def read_kaggle_solution(search_folders: list[Path]) -> dict[str, str]:
    """Read {image name without suffix: synset} of the validation images from Kaggle's `LOC_val_solution.csv`; empty if
    there is no such file. Raises DataError for a damaged file."""
    file = find_first_file(search_folders, (SOLUTION_FILE,))
    if not file:
        return {}
    rows = list(csv.reader(io.StringIO(read_text(file))))
    synset_by_stem = {row[0]: row[1].split(" ", 1)[0] for row in rows[1:] if len(row) == 2}
    if not synset_by_stem or not all(SYNSET_PATTERN.fullmatch(synset) for synset in synset_by_stem.values()):
        problem = f"{escape_unprintable(file)} has a row without ImageId or without a synset in PredictionString"
        raise DataError(problem, "download it again")
    return synset_by_stem


def read_devkit_labels(search_folders: list[Path]) -> dict[str, str]:
    """Read {image name without suffix: synset} of the validation images from the development kit; empty if its files do
    not exist. Raises DataError for damaged files."""
    file, meta = find_devkit_file(search_folders, GROUND_TRUTH_FILE), find_devkit_file(search_folders, "meta.mat")
    if not file or not meta:
        return {}
    synsets = {synset_index: synset for synset_index, synset, _ in read_devkit_synsets(meta)}
    lines = read_input_file(file).decode("ascii", "replace").split()
    try:
        return {f"ILSVRC2012_val_{index:08d}": synsets[int(line)] for index, line in enumerate(lines, 1)}
    except (ValueError, KeyError) as error:
        problem = f"{escape_unprintable(file)}: {error} is not a synset index in {escape_unprintable(meta)}"
        raise DataError(problem, "download it again") from None


def read_devkit_synsets(meta: Path) -> list[tuple[int, str, str]]:
    """Read the ILSVRC2012 number, the synset and the title of every class from a development kit's `meta.mat`. Raises
    DataError for a damaged file, and for one that is not the `meta.mat` of ILSVRC2012."""
    from scipy.io import loadmat  # a dependency of scikit-learn

    try:
        records = loadmat(io.BytesIO(read_input_file(meta)), squeeze_me=True)["synsets"]
        records = [record for record in records if not int(record["num_children"])]
        return [(int(record["ILSVRC2012_ID"]), str(record["WNID"]), str(record["words"])) for record in records]
    except (KeyError, ValueError, TypeError, IndexError, NotImplementedError) as error:
        raise DataError(
            f"{escape_unprintable(meta)} is not the meta.mat of ILSVRC2012 ({error})", "download it again"
        ) from None


def read_class_titles(classes: tuple[str, ...], search_folders: list[Path]) -> dict[str, str]:
    """Return {class: title} for the classes with a known title: from a file in one of `search_folders`, or from
    torchvision for the 1,000 classes of ILSVRC2012."""
    file, titles = find_first_file(search_folders, TITLE_FILES), {}
    if file:
        for line in read_lines(file):
            synset, *description = line.split(None, 1)[:2] if line.strip() else ("",)
            titles[synset] = description[0].strip() if description else ""
    elif meta := find_devkit_file(search_folders, "meta.mat"):
        titles = {synset: title for _, synset, title in read_devkit_synsets(meta)}
    elif is_ilsvrc2012(classes):
        titles = dict(zip(classes, get_torchvision_names(), strict=True))
    return {name: titles[name] for name in classes if titles.get(name)}


def get_torchvision_names() -> list[str]:
    """Return the 1,000 class names of torchvision's weights, in ImageNet's order."""
    from torchvision.models import ResNet18_Weights

    return list(ResNet18_Weights.DEFAULT.meta["categories"])


def is_ilsvrc2012(classes: tuple[str, ...]) -> bool:
    """Return whether classes are the 1,000 synsets of ILSVRC2012 in the order of the usual 1,000-class heads."""
    return hashlib.sha256("\n".join(classes).encode("utf-8", "surrogateescape")).hexdigest() == ILSVRC2012_SHA256


def find_first_file(search_folders: list[Path], names: tuple[str, ...]) -> Path | None:
    """Return the first existing file with one of `names` in one of `search_folders`, earlier names first; None if there
    is none."""
    return next((folder / name for name in names for folder in search_folders if (folder / name).is_file()), None)


def find_devkit_file(search_folders: list[Path], name: str) -> Path | None:
    """Return the file `name` of a development kit in or below one of `search_folders`; None if there is none."""
    return find_first_file(
        [folder / subfolder for folder in search_folders for subfolder in ("", DEVKIT_FOLDER, "data")], (name,)
    )
