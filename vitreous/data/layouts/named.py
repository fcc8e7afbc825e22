"""torchvision's classification data sets by their names: `torchvision:CIFAR10`,
`torchvision:EMNIST?split=letters&root=DIR`.

torchvision knows where the files come from and how they lie; here is how to ask each set for its splits. Images that
are files are read by this package's own decoder, so that they are judged as any others.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
import urllib.parse
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from vitreous.data.layouts.portable import Patches, Portables
from vitreous.data.split import Arrays, Data, Files, Paths, Split, with_val
from vitreous.disk import cache
from vitreous.errors import DataError, UsageError, nearest, printable

DIGITS = tuple("0123456789")
Read = Callable[[Any], Split]


@dataclass(frozen=True)
class Named:
    """How to ask for the splits of a set, how to read one, its class names where torchvision has none (or others than
    people use), and the words that its class takes besides, each with the values there are, the usual one first."""

    splits: dict[str, dict[str, Any]]
    read: Read
    classes: tuple[str, ...] = ()
    words: dict[str, tuple[str, ...]] = field(default_factory=dict)


def numbers(labels: Any) -> np.ndarray:
    """Labels of any kind as (n,) int64."""
    return np.array([-1 if label is None else int(label) for label in labels], dtype=np.int64)


def arrays(dataset: Any) -> Split:
    """Pixels (n, H, W[, C]) in memory."""
    return Arrays(np.asarray(dataset.data), numbers(dataset.targets if hasattr(dataset, "targets") else dataset.labels))


def channels_first(dataset: Any) -> Split:
    """Pixels (n, C, H, W) in memory."""
    return Arrays(np.asarray(dataset.data).transpose(0, 2, 3, 1), numbers(dataset.labels))


def first_column(dataset: Any) -> Split:
    """QMNIST: the class stands first in a row of what is known of a digit."""
    return Arrays(np.asarray(dataset.data), np.asarray(dataset.targets)[:, 0].astype(np.int64))


def tensors(dataset: Any) -> Split:
    """FER2013: pairs of a picture and a label."""
    pictures, labels = zip(*dataset._samples, strict=True)
    return Arrays(np.stack([np.asarray(picture) for picture in pictures]), numbers(labels))


def lists(dataset: Any) -> Split:
    """Paths and labels in two lists."""
    return Files(dataset._images if hasattr(dataset, "_images") else dataset._image_files, numbers(dataset._labels))


def pairs(dataset: Any) -> Split:
    """Pairs of a path and a label in one list."""
    samples = next(getattr(dataset, name) for name in ("_samples", "samples", "imgs") if hasattr(dataset, name))
    return Files(Paths(path for path, _ in samples), numbers(label for _, label in samples))


def portable(dataset: Any) -> Split:
    """The same, of files that are plain pixels behind a header."""
    return Portables(pairs(dataset).paths, numbers(label for _, label in dataset._samples))  # type: ignore[attr-defined]


def scattered(dataset: Any) -> Split:
    """SUN397: lists in the order of the file system, which is no order."""
    files = sorted(zip(map(os.fspath, dataset._image_files), dataset._labels, strict=True))
    return Files(Paths(path for path, _ in files), numbers(label for _, label in files))


def caltech101(dataset: Any) -> Split:
    """Names made of the number of an image in its category."""
    home, rows = os.path.join(dataset.root, "101_ObjectCategories"), zip(dataset.y, dataset.index, strict=True)
    return Files(
        Paths(os.path.join(home, dataset.categories[y], f"image_{index:04d}.jpg") for y, index in rows),
        numbers(dataset.y),
    )


def caltech256(dataset: Any) -> Split:
    """Names made of the numbers of the category and of an image in it."""
    home, rows = os.path.join(dataset.root, "256_ObjectCategories"), zip(dataset.y, dataset.index, strict=True)
    return Files(
        Paths(os.path.join(home, dataset.categories[y], f"{y + 1:03d}_{index:04d}.jpg") for y, index in rows),
        numbers(dataset.y),
    )


def inaturalist(dataset: Any) -> Split:
    """Pairs of a category and a file name, in the order of the file system, which is no order."""
    rows = sorted(dataset.index)
    return Files(
        Paths(os.path.join(dataset.root, dataset.all_categories[y], file) for y, file in rows),
        numbers(y for y, _ in rows),
    )


def patches(dataset: Any) -> Split:
    """PCAM: pixels and labels in HDF5 files."""
    images, labels = (
        os.fspath(dataset._base_folder / dataset._FILES[dataset._split][kind][0]) for kind in ("images", "targets")
    )
    with dataset.h5py.File(labels) as file:
        return Patches(images, "x", np.asarray(file["y"]).reshape(-1).astype(np.int64), np.arange(len(file["y"])))


ONCE = {"train": {}}
BY_TRAIN = {"train": {"train": True}, "test": {"train": False}}
TWO, LAST_TWO = ({name: {"split": name} for name in names} for names in (("train", "test"), ("train", "val")))
THREE = {name: {"split": name} for name in ("train", "val", "test")}
FACES = ("angry", "disgust", "fear", "happy", "sad", "surprise", "neutral")
VERSIONS = ("2021_train", "2021_train_mini", "2019", "2018", "2017")
SETS = {
    "Caltech101": Named(ONCE, caltech101),
    "Caltech256": Named(ONCE, caltech256),
    "CIFAR10": Named(BY_TRAIN, arrays),
    "CIFAR100": Named(BY_TRAIN, arrays),
    "Country211": Named({"train": {"split": "train"}, "val": {"split": "valid"}, "test": {"split": "test"}}, pairs),
    "DTD": Named(THREE, lists, words={"partition": tuple(map(str, range(1, 11)))}),
    "EMNIST": Named(
        BY_TRAIN, arrays, words={"split": ("balanced", "byclass", "bymerge", "letters", "digits", "mnist")}
    ),
    "EuroSAT": Named(ONCE, pairs),
    "FashionMNIST": Named(BY_TRAIN, arrays),
    "FER2013": Named(TWO, tensors, FACES),
    "FGVCAircraft": Named(THREE, lists, words={"annotation_level": ("variant", "family", "manufacturer")}),
    "Flowers102": Named(THREE, lists),
    "Food101": Named(TWO, lists),
    "GTSRB": Named(TWO, portable, tuple(map(str, range(43)))),
    "ImageNet": Named(LAST_TWO, pairs),
    "Imagenette": Named(LAST_TWO, pairs, words={"size": ("full", "320px", "160px")}),
    "INaturalist": Named({"train": {}, "val": {"version": "2021_valid"}}, inaturalist, words={"version": VERSIONS}),
    "KMNIST": Named(BY_TRAIN, arrays),
    "MNIST": Named(BY_TRAIN, arrays, DIGITS),
    "OxfordIIITPet": Named({"train": {"split": "trainval"}, "test": {"split": "test"}}, lists),
    "PCAM": Named(THREE, patches, ("normal", "tumor")),
    "Places365": Named(
        {"train": {"split": "train-standard"}, "val": {"split": "val"}}, pairs, words={"small": ("False", "True")}
    ),
    "QMNIST": Named(BY_TRAIN, first_column, DIGITS),
    "RenderedSST2": Named(THREE, pairs),
    "SEMEION": Named(ONCE, arrays, DIGITS),
    "StanfordCars": Named(TWO, pairs),
    "STL10": Named(TWO, channels_first),
    "SUN397": Named(ONCE, scattered),
    "SVHN": Named(TWO, channels_first, DIGITS),
    "USPS": Named(BY_TRAIN, arrays, DIGITS),
}
BY_HAND = ("FER2013", "ImageNet", "StanfordCars")  # sets that torchvision cannot fetch


def named(source: str, split_seed: int = 0) -> Data:
    """A data set of torchvision, fetched where it is not there yet. Its own order of classes and images is kept.

    A set's own `val` is that; without one, a tenth of its training images is held out. `root` is
    `$XDG_CACHE_HOME/vitreous/torchvision` if not said. Raises UsageError for an unknown set or word, DataError where a
    set cannot be had or read.
    """
    name, known, root, words = parse_source(source)
    parts: dict[str, Split] = {}
    notes = [f"{name} in {printable(root)}"]
    classes: tuple[str, ...] = ()
    titles: dict[str, str] = {}
    for split, part in known.splits.items():
        if split != "train" and words.get("version", "").isdigit():
            continue  # INaturalist before 2021 has one part only
        dataset = load_dataset(name, root, {**words, **part})
        part = known.read(dataset)
        if split == "train":
            classes, titles = named_classes(known, dataset, part)
        if len(part) and (part.labels < 0).all():
            notes.append(f"{split} has no labels and is left out")
            continue
        parts[split] = part
    if "N/A" in classes[:1]:  # its letters count from 1
        classes, parts = (
            classes[1:],
            {split: part.take(np.arange(len(part)), part.labels - 1) for split, part in parts.items()},
        )
    strange = [
        split
        for split, part in parts.items()
        if len(part) and not 0 <= part.labels.min() <= part.labels.max() < len(classes)
    ]
    if strange or len(set(classes)) < len(classes):
        raise DataError(
            f"{source}: labels and class names of {name} do not fit each other",
            f"fetch it again: remove it from {root}",
        )
    parts, whole = with_val(parts, split_seed, notes)
    return Data(source, classes, parts, notes, len(known.splits) == 1, whole, titles)


def parse_source(source: str) -> tuple[str, Named, Path, dict[str, Any]]:
    """A source -> the set's name, how to ask for it, its root, and the words for its class. Raises UsageError."""
    name, _, query = source.removeprefix("torchvision:").partition("?")
    same = {known.lower(): known for known in SETS}
    if name.lower() not in same:
        advice = nearest(name.lower(), same)
        raise UsageError(
            f"torchvision has no classification data set {printable(name)}",
            f"did you mean torchvision:{same[advice[13:-1]]}?" if advice else f"there are {', '.join(SETS)}",
        )
    name = same[name.lower()]
    known = SETS[name]
    words: dict[str, Any] = {word: values[0] for word, values in known.words.items()}
    root = cache("torchvision")
    for word, value in urllib.parse.parse_qsl(query.replace("+", "%2B"), keep_blank_values=True):
        if word == "root" and value:
            root = Path(value).expanduser()
        elif word not in words:
            raise UsageError(
                f"torchvision:{name} takes no {printable(word)}", f"it takes {', '.join(['root', *words])}"
            )
        elif value not in known.words[word]:
            raise UsageError(
                f"torchvision:{name} has no {word} {printable(value)}", f"there are {', '.join(known.words[word])}"
            )
        else:
            words[word] = value
    plain = {"True": True, "False": False}
    return name, known, root, {w: int(v) if w == "partition" else plain.get(v, v) for w, v in words.items()}


def load_dataset(name: str, root: Path, words: dict[str, Any]) -> Any:
    """torchvision's own object of one part of a set, fetched if need be. Raises DataError where it cannot be."""
    import torchvision.datasets

    make = getattr(torchvision.datasets, name)
    quiet = {"download": False} if name == "SEMEION" else {}
    problem = ""
    try:
        return make(os.fspath(root), **words, **quiet)
    except ImportError as error:
        raise UsageError(f"torchvision:{name} needs another library ({error})", "install it") from None
    except (RuntimeError, OSError) as error:
        if "h5py" in str(error):
            raise UsageError(f"torchvision:{name} needs h5py, which is not installed", "pip install h5py") from None
        lacking, problem = f"torchvision:{name} is not whole in {printable(root)}", str(error)
        if name in BY_HAND:
            problem = re.sub(r"\s+", " ", problem)[:200]
            raise DataError(
                f"{lacking} ({problem})", f"fetch it by hand, and say where: torchvision:{name}?root=DIR"
            ) from None
    except Exception as error:  # what damaged files raise depends on the set
        raise damaged(name, root, error) from None
    try:
        os.makedirs(root, exist_ok=True)
        with contextlib.redirect_stdout(sys.stderr):  # a command's stdout is for its document
            return make(os.fspath(root), **words, download=True)
    except (RuntimeError, OSError, ValueError, EOFError) as error:
        if str(error) == problem:  # nothing was lacking, so nothing was fetched
            raise damaged(name, root, error) from None
        problem = re.sub(r"\s+", " ", str(error))[:200]
        advice = (
            f"check the network and the disk, or fetch it elsewhere and say where it is: torchvision:{name}?root=DIR"
        )
        raise DataError(f"{lacking} and could not be downloaded ({problem})", advice) from None
    except Exception as error:
        raise damaged(name, root, error) from None


def damaged(name: str, root: Path, error: Exception) -> DataError:
    """What to tell of files that are there and cannot be read."""
    problem = re.sub(r"\s+", " ", f"{type(error).__name__}: {error}")[:200]
    return DataError(
        f"torchvision:{name}: its files in {printable(root)} cannot be read ({problem})",
        "remove them, and they are fetched again",
    )


def named_classes(known: Named, dataset: Any, part: Split) -> tuple[tuple[str, ...], dict[str, str]]:
    """The classes of a set in the order of its labels, and their titles where the classes are synsets."""
    if hasattr(dataset, "wnids"):
        names: Sequence[Any] = dataset.classes
        return tuple(dataset.wnids), {
            synset: ", ".join(title) for synset, title in zip(dataset.wnids, names, strict=True)
        }
    own = next(
        (getattr(dataset, name) for name in ("classes", "categories", "all_categories") if hasattr(dataset, name)), ()
    )
    return known.classes or tuple(map(str, own)) or tuple(map(str, range(int(part.labels.max(initial=-1)) + 1))), {}
