"""ImageNet's folders: classes named by synset (n01440764), as they are unpacked from ILSVRC2012, Kaggle's archive or
ImageNet-21k.

A class keeps the name of its folder. What people call it is its title, from a list beside the data.
"""

from __future__ import annotations

import csv
import hashlib
import io
import os
import re
from dataclasses import replace
from pathlib import Path

from vitreous.data.decoding.decode import read_regular
from vitreous.data.layouts.folder import classified, entries, is_folder, list_classes, split_folders, walk
from vitreous.data.layouts.split_names import find_split_folders
from vitreous.data.split import Data, Paths
from vitreous.data.text_files import read_lines, read_text
from vitreous.errors import DataError, printable

SYNSET = re.compile(r"n\d{8}")
KAGGLE = "ILSVRC/Data/CLS-LOC"
TITLES = ("LOC_synset_mapping.txt", "words.txt", "synset_words.txt")  # n01440764 tench, Tinca tinca
SOLUTION = "LOC_val_solution.csv"  # ILSVRC2012_val_00048981,n03995372 85 1 499 272
TRUTH = "ILSVRC2012_validation_ground_truth.txt"  # a number in each line, in the order of the images
DEVKIT = "ILSVRC2012_devkit_t12/data"
# SHA-256 of its 1,000 synsets, sorted, a line each
ILSVRC2012 = "385e0240499426c022b773be1ae4da780f057b89c9694c7f47199f62746b6edd"


def is_imagenet(root: Path) -> bool:
    """Whether the classes of a folder, or of its training images, are synsets, all of them."""
    home = tree(root)
    train = find_split_folders(home).get("train", home)
    names = [entry.name for entry in entries(os.fspath(train)) if is_folder(entry)]
    return bool(names) and all(SYNSET.fullmatch(name) for name in names)


def tree(root: Path) -> Path:
    """Where the images are: the folder itself, or within it as Kaggle's archive has them."""
    return next((root / inner for inner in (KAGGLE, "Data/CLS-LOC") if (root / inner).is_dir()), root)


def imagenet(root: Path, split_seed: int = 0) -> Data:
    """A folder of synsets, or of `train`, `val` (by synset, or flat beside its ground truth) and `test` (if it has
    labels).

    Raises DataError as a folder does, and for images to validate on without ground truth.
    """
    home = tree(root)
    homes = split_folders(home)
    places = [home, *list(home.absolute().parents)[: 3 if home.name == "CLS-LOC" else 1]]
    listed = {}
    for name, place in homes.items():
        classes = list_classes(place)
        loose = [] if classes or name == "train" else walk(os.fspath(place))
        if loose and name == "val":
            classes = classify_files(loose, places)
        listed[name] = classes
    data = classified(home, homes, listed, split_seed)
    return replace(data, name=printable(root), titles=titles_of(data.classes, places))


def classify_files(files: list[str], places: list[Path]) -> dict[str, Paths]:
    """Flat images to validate on -> those of each synset. Raises DataError where their ground truth is lacking."""
    truth = solution(places) or devkit(places)
    if not truth:
        problem = f"{len(files)} images without classes and no ground truth"
        hint = f"put {SOLUTION}, or {TRUTH} and meta.mat of the development kit, beside them"
        raise DataError(f"{printable(os.path.dirname(files[0]))} has {problem}", hint)
    stems = [os.path.splitext(os.path.basename(path))[0] for path in files]
    if unknown := [path for path, stem in zip(files, stems, strict=True) if stem not in truth]:
        problem = f"{len(unknown)} of {len(files)} images are not in the ground truth"
        raise DataError(f"{problem}; the first is {printable(unknown[0])}", "remove them")
    parts: dict[str, list[str]] = {}
    for path, stem in zip(files, stems, strict=True):
        parts.setdefault(truth[stem], []).append(path)
    return {synset: Paths(paths) for synset, paths in parts.items()}


def solution(places: list[Path]) -> dict[str, str]:
    """Image -> synset, from Kaggle's list; empty where there is none. Raises DataError for a damaged one."""
    file = find(places, (SOLUTION,))
    if not file:
        return {}
    rows = list(csv.reader(io.StringIO(read_text(file))))
    truth = {row[0]: row[1].split(" ", 1)[0] for row in rows[1:] if len(row) == 2}
    if not truth or not all(SYNSET.fullmatch(synset) for synset in truth.values()):
        problem = f"{printable(file)}: expected ImageId,PredictionString and a synset in every row"
        raise DataError(problem, "fetch it again")
    return truth


def devkit(places: list[Path]) -> dict[str, str]:
    """Image -> synset, from the development kit; empty where there is none. Raises DataError for a damaged one."""
    file, meta = find_devkit(places, TRUTH), find_devkit(places, "meta.mat")
    if not file or not meta:
        return {}
    synsets = {number: synset for number, synset, _ in synsets_of(meta)}
    lines = read_regular(file).decode("ascii", "replace").split()
    try:
        return {f"ILSVRC2012_val_{index:08d}": synsets[int(line)] for index, line in enumerate(lines, 1)}
    except (ValueError, KeyError) as error:
        problem = f"{printable(file)}: {error} is not the number of a synset in {printable(meta)}"
        raise DataError(problem, "fetch it again") from None


def synsets_of(meta: Path) -> list[tuple[int, str, str]]:
    """Number, synset and words of every class in a development kit's `meta.mat`. Raises DataError."""
    from scipy.io import loadmat  # comes with scikit-learn

    try:
        rows = loadmat(io.BytesIO(read_regular(meta)), squeeze_me=True)["synsets"]
        rows = [row for row in rows if not int(row["num_children"])]
        return [(int(row["ILSVRC2012_ID"]), str(row["WNID"]), str(row["words"])) for row in rows]
    except (KeyError, ValueError, TypeError, IndexError, NotImplementedError) as error:
        raise DataError(f"{printable(meta)} is not the meta.mat of ILSVRC2012 ({error})", "fetch it again") from None


def titles_of(classes: tuple[str, ...], places: list[Path]) -> dict[str, str]:
    """The usual names of the classes, where they are known: from a list beside the data, or torchvision's for
    ILSVRC2012's 1,000."""
    file, titles = find(places, TITLES), {}
    if file:
        for line in read_lines(file):
            synset, *rest = line.split(None, 1)[:2] if line.strip() else ("",)
            titles[synset] = rest[0].strip() if rest else ""
    elif meta := find_devkit(places, "meta.mat"):
        titles = {synset: words for _, synset, words in synsets_of(meta)}
    elif is_ilsvrc2012(classes):
        titles = dict(zip(classes, torchvision_names(), strict=True))
    return {name: titles[name] for name in classes if titles.get(name)}


def torchvision_names() -> list[str]:
    """The 1,000 names that torchvision's weights come with, in ImageNet's order."""
    from torchvision.models import ResNet18_Weights

    return list(ResNet18_Weights.DEFAULT.meta["categories"])


def is_ilsvrc2012(classes: tuple[str, ...]) -> bool:
    """Whether classes are the 1,000 synsets of ILSVRC2012 in their order, which is that of every usual head of 1,000
    numbers."""
    return hashlib.sha256("\n".join(classes).encode("utf-8", "surrogateescape")).hexdigest() == ILSVRC2012


def find(places: list[Path], names: tuple[str, ...]) -> Path | None:
    """The first of some files that is in one of some folders."""
    return next((place / name for name in names for place in places if (place / name).is_file()), None)


def find_devkit(places: list[Path], name: str) -> Path | None:
    """A file of a development kit in one of some folders."""
    return find([place / part for place in places for part in ("", DEVKIT, "data")], (name,))
