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
GROUND_TRUTH_FILE = "ILSVRC2012_validation_ground_truth.txt"  # one synset index per line, in the order of the images
DEVKIT_FOLDER = "ILSVRC2012_devkit_t12/data"
# SHA-256 of its 1,000 synsets, sorted, one per line
ILSVRC2012_SHA256 = "385e0240499426c022b773be1ae4da780f057b89c9694c7f47199f62746b6edd"


def is_imagenet(root: Path) -> bool:
    """Return whether all classes of a folder, or of its training images, are synsets."""
    home = find_image_root(root)
    train = find_split_folders(home).get("train", home)
    names = [entry.name for entry in list_entries(os.fspath(train)) if is_folder(entry)]
    return bool(names) and all(SYNSET_PATTERN.fullmatch(name) for name in names)


def find_image_root(root: Path) -> Path:
    """Return the folder of the images: the folder itself, or the subfolder of Kaggle's archive."""
    return next((root / inner for inner in (KAGGLE_FOLDER, "Data/CLS-LOC") if (root / inner).is_dir()), root)


def open_imagenet(root: Path, split_seed: int = 0) -> Data:
    """Open a folder of synsets, or of `train`, `val` (by synset, or flat next to its ground truth) and `test` (if it
    has labels).

    Raises DataError as an image folder does, and for validation images without ground truth.
    """
    home = find_image_root(root)
    homes = resolve_split_folders(home)
    places = [home, *list(home.absolute().parents)[: 3 if home.name == "CLS-LOC" else 1]]
    listed = {}
    for name, place in homes.items():
        classes = list_class_files(place)
        loose = [] if classes or name == "train" else list_files_by_suffix(os.fspath(place))
        if loose and name == "val":
            classes = group_by_synset(loose, places)
        listed[name] = classes
    data = build_classification_data(home, homes, listed, split_seed)
    return replace(data, name=escape_unprintable(root), titles=read_class_titles(data.classes, places))


def group_by_synset(files: list[str], places: list[Path]) -> dict[str, Paths]:
    """Group flat validation images by synset. Raises DataError if ground truth is missing."""
    truth = read_kaggle_solution(places) or read_devkit_labels(places)
    if not truth:
        problem = f"{len(files)} images without class folders and without ground truth"
        hint = f"put {SOLUTION_FILE}, or {GROUND_TRUTH_FILE} and meta.mat of the development kit, next to them"
        raise DataError(f"{escape_unprintable(os.path.dirname(files[0]))} has {problem}", hint)
    stems = [os.path.splitext(os.path.basename(path))[0] for path in files]
    if unknown := [path for path, stem in zip(files, stems, strict=True) if stem not in truth]:
        problem = f"{len(unknown)} of {len(files)} images are not in the ground truth"
        raise DataError(f"{problem}; the first is {escape_unprintable(unknown[0])}", "remove them")
    parts: dict[str, list[str]] = {}
    for path, stem in zip(files, stems, strict=True):
        parts.setdefault(truth[stem], []).append(path)
    return {synset: Paths(paths) for synset, paths in parts.items()}


def read_kaggle_solution(places: list[Path]) -> dict[str, str]:
    """Read {image: synset} from Kaggle's list; empty if there is none. Raises DataError for a damaged one."""
    file = find_first_file(places, (SOLUTION_FILE,))
    if not file:
        return {}
    rows = list(csv.reader(io.StringIO(read_text(file))))
    truth = {row[0]: row[1].split(" ", 1)[0] for row in rows[1:] if len(row) == 2}
    if not truth or not all(SYNSET_PATTERN.fullmatch(synset) for synset in truth.values()):
        problem = f"{escape_unprintable(file)}: expected ImageId,PredictionString and a synset in every row"
        raise DataError(problem, "download it again")
    return truth


def read_devkit_labels(places: list[Path]) -> dict[str, str]:
    """Read {image: synset} from the development kit; empty if there is none. Raises DataError for a damaged one."""
    file, meta = find_devkit_file(places, GROUND_TRUTH_FILE), find_devkit_file(places, "meta.mat")
    if not file or not meta:
        return {}
    synsets = {number: synset for number, synset, _ in read_devkit_synsets(meta)}
    lines = read_input_file(file).decode("ascii", "replace").split()
    try:
        return {f"ILSVRC2012_val_{index:08d}": synsets[int(line)] for index, line in enumerate(lines, 1)}
    except (ValueError, KeyError) as error:
        problem = f"{escape_unprintable(file)}: {error} is not a synset index in {escape_unprintable(meta)}"
        raise DataError(problem, "download it again") from None


def read_devkit_synsets(meta: Path) -> list[tuple[int, str, str]]:
    """Read index, synset and words of every class in a development kit's `meta.mat`. Raises DataError."""
    from scipy.io import loadmat  # a dependency of scikit-learn

    try:
        rows = loadmat(io.BytesIO(read_input_file(meta)), squeeze_me=True)["synsets"]
        rows = [row for row in rows if not int(row["num_children"])]
        return [(int(row["ILSVRC2012_ID"]), str(row["WNID"]), str(row["words"])) for row in rows]
    except (KeyError, ValueError, TypeError, IndexError, NotImplementedError) as error:
        raise DataError(
            f"{escape_unprintable(meta)} is not the meta.mat of ILSVRC2012 ({error})", "download it again"
        ) from None


def read_class_titles(classes: tuple[str, ...], places: list[Path]) -> dict[str, str]:
    """Return the known titles of classes: from a list next to the data, or torchvision's for ILSVRC2012's 1,000."""
    file, titles = find_first_file(places, TITLE_FILES), {}
    if file:
        for line in read_lines(file):
            synset, *rest = line.split(None, 1)[:2] if line.strip() else ("",)
            titles[synset] = rest[0].strip() if rest else ""
    elif meta := find_devkit_file(places, "meta.mat"):
        titles = {synset: words for _, synset, words in read_devkit_synsets(meta)}
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


def find_first_file(places: list[Path], names: tuple[str, ...]) -> Path | None:
    """Return the first of some file names that exists in one of some folders."""
    return next((place / name for name in names for place in places if (place / name).is_file()), None)


def find_devkit_file(places: list[Path], name: str) -> Path | None:
    """Return a development kit's file in one of some folders."""
    return find_first_file([place / part for place in places for part in ("", DEVKIT_FOLDER, "data")], (name,))
