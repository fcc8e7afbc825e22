"""Labelled images: what a data set is, and the layouts that it is read from.

A `Split` answers three questions (how many, which label, which picture) and knows nothing of batches or tensors.
"""

from __future__ import annotations

import hashlib
import os
import re
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Protocol

import numpy as np
from PIL import Image

from vitreous.data.decode import decode, is_image, printable
from vitreous.data.keys import key
from vitreous.errors import DataError, UsageError, nearest

SPLITS = {"train": ("train",), "val": ("val", "valid", "validation"), "test": ("test",)}
LAYOUT = "expected DIR/CLASS/*.jpg, or DIR/train/CLASS/*.jpg with val/ and test/ beside it, or a CSV file with columns path,label"


class Split(Protocol):
    """Pictures with labels, in a fixed order."""

    @property
    def labels(self) -> np.ndarray:
        """(n,) int64, positions in the data set's class list; or (n, K) float32, 1 for each class that an image has."""
        ...

    def __len__(self) -> int: ...

    def picture(self, sample: int, channels: int) -> Image.Image:
        """The decoded picture of one sample, `RGB` for 3 channels and `L` for 1. Raises DataError."""
        ...

    def name(self, sample: int) -> str:
        """What to call a sample when speaking to a person: its path, or its number."""
        ...


@dataclass(frozen=True)
class Files:
    """Image files with labels."""

    paths: Sequence[Path]
    labels: np.ndarray

    def __len__(self) -> int:
        return len(self.paths)

    def picture(self, sample: int, channels: int) -> Image.Image:
        return decode(self.paths[sample], channels)

    def name(self, sample: int) -> str:
        return printable(self.paths[sample])


@dataclass(frozen=True)
class Arrays:
    """Pictures in memory: (n, height, width) or (n, height, width, 3) uint8."""

    pixels: np.ndarray
    labels: np.ndarray

    def __len__(self) -> int:
        return len(self.pixels)

    def picture(self, sample: int, channels: int) -> Image.Image:
        return Image.fromarray(self.pixels[sample]).convert("L" if channels == 1 else "RGB")

    def name(self, sample: int) -> str:
        return f"sample {sample}"


@dataclass(frozen=True)
class Data:
    """A data set: its class names in order, its splits, and a fingerprint of what it holds."""

    name: str
    classes: tuple[str, ...]
    splits: dict[str, Split]
    notes: list[str] = field(default_factory=list)
    unsplit: bool = False  # a folder of classes, or a table without splits: its splits were drawn here
    whole: Split | None = None  # the training images before `val` was drawn from them here; None where nothing was drawn

    def split(self, name: str) -> Split:
        """The split of that name. Raises DataError, with those that there are."""
        if name not in self.splits:
            raise DataError(f"{self.name} has no {name} split", f"it has {', '.join(self.splits)}: use --split")
        return self.splits[name]

    @property
    def several(self) -> bool:
        """Whether an image has several labels, or none: then labels are (n, K)."""
        return next(iter(self.splits.values())).labels.ndim == 2

    def holding_out(self, share: float | None, split_seed: int) -> Data:
        """The data with that share of all training images as `val`, drawn within each class; None: as they are.

        What was drawn for validation before goes back into training first. 0 holds nothing out: then a `val` of the data's own
        stays what it is.
        """
        if share is None:
            return self
        train, notes = self.whole or self.split("train"), self.notes
        drawn: dict[str, Split] = {"train": train}
        if share:
            parts = hold_out(train.labels, split_seed, {"val": share})
            drawn = {name: take(train, rows) for name, rows in parts.items()}
            notes = [f"held out {len(parts['val'])} of {len(train)} training images (split seed {split_seed})"]
        elif self.whole:
            notes = ["no image is kept for validation: the run trains on all"]
        else:
            drawn |= {name: split for name, split in self.splits.items() if name == "val"}
        drawn |= {name: split for name, split in self.splits.items() if name == "test"}
        return replace(self, splits=drawn, notes=notes, whole=None)

    def fingerprint(self) -> str:
        """SHA-256 over class names, splits, sample names and labels; file contents are not read."""
        digest = hashlib.sha256("\n".join(self.classes).encode())
        for name, split in self.splits.items():
            digest.update(f"\n{name} {len(split)}\n".encode())
            digest.update(split.labels.tobytes())
            if isinstance(split, Arrays):
                digest.update(split.pixels.tobytes())
            elif isinstance(split, Files):
                root = os.path.commonpath(split.paths) if split.paths else ""
                digest.update("\n".join(os.path.relpath(path, root) for path in split.paths).encode("utf-8", "surrogateescape"))
        return digest.hexdigest()


def take(split: Split, rows: np.ndarray) -> Split:
    """The samples at these positions, in this order."""
    if isinstance(split, Files):
        return Files([split.paths[row] for row in rows], split.labels[rows])
    assert isinstance(split, Arrays)
    return Arrays(split.pixels[rows], split.labels[rows])


def open_data(source: str | os.PathLike[str], split_seed: int = 0) -> Data:
    """Open a data set: `digits`, a folder with splits, a folder with classes, or a CSV file.

    `split_seed` chooses the held-out tenth(s) where the source has no split of its own. Raises DataError for a missing
    or empty folder, fewer than two classes, or a class that only a held-out split has; UsageError for an unknown name.
    """
    name = os.fspath(source)
    if name == "digits":
        return digits(split_seed)
    path = Path(name)
    if path.is_dir():
        return folder(path, split_seed)
    if path.suffix.lower() == ".csv" and os.path.lexists(path):
        from vitreous.data.table import table

        return table(path, split_seed)
    if path.exists():
        raise DataError(f"{printable(path)} is a file, not a data set", LAYOUT)
    if "/" not in name and os.sep not in name and nearest(name, ["digits"]):
        raise DataError(f"no folder and no data set named {printable(name)}", nearest(name, ["digits"]))
    if ":" in name:
        raise UsageError(f"data source {name} is not supported yet", LAYOUT)
    raise DataError(f"no such {'file' if path.suffix.lower() == '.csv' else 'folder'}: {printable(path)}", LAYOUT)


def digits(split_seed: int = 0) -> Data:
    """scikit-learn's handwritten digits (1,797 greys of 8 x 8), split 80/10/10 within each class."""
    table = digits_table()
    pixels = np.rint(table[:, :-1].reshape(-1, 8, 8) * (255 / 16)).astype(np.uint8)
    labels = table[:, -1].astype(np.int64)
    parts = hold_out(labels, split_seed, {"val": 0.1, "test": 0.1})
    splits: dict[str, Split] = {name: Arrays(pixels[rows], labels[rows]) for name, rows in parts.items()}
    rest = np.sort(np.concatenate([parts["train"], parts["val"]]))
    return Data("digits", tuple(map(str, range(10))), splits, whole=Arrays(pixels[rest], labels[rest]))


def digits_table() -> np.ndarray:
    """(1797, 65) float64: 64 pixels from 0 to 16, then the label. Read from scikit-learn's own file, since importing its
    data sets takes longer than an epoch; through its function where the file is not found."""
    spec = find_spec("sklearn")
    for place in (spec.submodule_search_locations or ()) if spec else ():
        file = Path(place) / "datasets" / "data" / "digits.csv.gz"
        if file.is_file():
            return np.loadtxt(file, delimiter=",")
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    return np.column_stack([images, labels])


def hold_out(labels: np.ndarray, seed: int, shares: dict[str, float]) -> dict[str, np.ndarray]:
    """Row numbers of `train` and of each held-out split, drawn within each class; every part keeps the original order.

    A class gives round(share * its size) samples to each held-out split, and always keeps at least one for training. Where
    samples have several labels, (n, K), they are drawn over all of them.
    """
    if labels.ndim == 2:
        return hold_out_of_all(labels, seed, shares)
    rows: dict[str, list[np.ndarray]] = {name: [] for name in ("train", *shares)}
    for label in np.unique(labels):
        members = np.flatnonzero(labels == label)
        members = members[np.argsort(key(seed, label, np.arange(len(members))), kind="stable")]
        for name, share in shares.items():
            count = min(round(share * len(labels[labels == label])), len(members) - 1)
            rows[name].append(members[:count])
            members = members[count:]
        rows["train"].append(members)
    return {name: np.sort(np.concatenate(parts)) for name, parts in rows.items()}


def hold_out_of_all(labels: np.ndarray, seed: int, shares: dict[str, float]) -> dict[str, np.ndarray]:
    """The same for (n, K) labels: round(share * n) samples to each held-out split, but none that is the last of a class."""
    wanted = [name for name, share in shares.items() for _ in range(round(share * len(labels)))]
    left = labels.sum(0)
    drawn: dict[str, list[int]] = {name: [] for name in shares}
    rest = []
    for row in np.argsort(key(seed, np.arange(len(labels))), kind="stable"):
        if wanted and (left[labels[row] > 0] > 1).all():
            drawn[wanted.pop()].append(row)
            left -= labels[row]
        else:
            rest.append(row)
    return {name: np.sort(np.array(rows, dtype=np.int64)) for name, rows in (("train", rest), *drawn.items())}


def held_out(whole: Split, seed: int) -> tuple[dict[str, Split], str]:
    """Training images without a split for validation -> `train` and `val`, a tenth of them, and what to say of it."""
    parts = hold_out(whole.labels, seed, {"val": 0.1})
    if not len(parts["val"]):
        return {"train": whole}, "too few images to hold any out for validation"
    told = f"held out {len(parts['val'])} of {len(whole)} training images for validation (split seed {seed})"
    return {name: take(whole, rows) for name, rows in parts.items()}, told


def folder(root: Path, split_seed: int = 0) -> Data:
    """`{train,val|valid|validation,test}/CLASS/*`, or `CLASS/*` with a tenth held out for validation.

    A split folder without `val` gives a tenth of `train` to validation; `test` is never used for it. Class order is
    natural (2 before 10), independent of file system, locale and hash seed.
    """
    found = {name: next((root / n for n in names if (root / n).is_dir()), None) for name, names in SPLITS.items()}
    if found["train"] is None and any(found.values()):
        present = ", ".join(name for name, path in found.items() if path)
        raise DataError(f"{printable(root)} has {present} but no train folder", LAYOUT)
    homes = {name: path for name, path in found.items() if path} or {"train": root}
    listed = {name: list_classes(path) for name, path in homes.items()}
    classes = class_order(listed["train"])
    notes: list[str] = []
    if not any(listed["train"].values()):
        raise DataError(f"no images in {printable(homes['train'])}", LAYOUT)
    if len(classes) < 2:
        raise DataError(f"{printable(homes['train'])} has one class only ({printable(classes[0])}); a classifier needs two", LAYOUT)
    splits: dict[str, Split] = {name: files_of(name, tree, classes) for name, tree in listed.items()}
    whole = splits["train"]
    if "val" not in splits:
        drawn, told = held_out(whole, split_seed)
        splits |= drawn
        notes.append(told)
    return Data(
        printable(root),
        tuple(classes),
        {name: splits[name] for name in SPLITS if name in splits},
        notes,
        "train" in homes and homes["train"] == root,
        None if "val" in homes else whole,
    )


def files_of(name: str, tree: dict[str, list[Path]], classes: list[str]) -> Files:
    """One split's files, labelled by class name. Raises DataError for a class that training does not have."""
    unknown = [c for c in class_order(tree) if c not in set(classes)]
    if unknown:
        listing = ", ".join(map(printable, unknown[:20]))
        raise DataError(f"{name} has classes that train lacks: {listing}", nearest(unknown[0], classes) or "rename or remove them")
    paths = [path for label in classes for path in tree.get(label, [])]
    labels = np.array([i for i, label in enumerate(classes) for _ in tree.get(label, [])], dtype=np.int64)
    return Files(paths, labels)


def list_classes(home: Path) -> dict[str, list[Path]]:
    """Class name -> its image files at any depth, sorted; hidden folders and folders without images are left out."""
    found = {}
    for entry in sorted(os.scandir(home), key=lambda e: e.name):
        if entry.is_dir() and not entry.name.startswith("."):
            files = list_images(Path(entry.path))
            if files:
                found[entry.name] = files
    return found


def list_images(home: Path) -> list[Path]:
    """Every image file below a folder, in natural order of its path. A folder linked twice is visited once."""
    files, seen, waiting = [], set(), [home]
    while waiting:
        place = waiting.pop()
        real = os.path.realpath(place)
        if real in seen:
            continue
        seen.add(real)
        for entry in os.scandir(place):
            path = Path(entry.path)
            if entry.name.startswith("."):
                continue
            if entry.is_dir():
                waiting.append(path)
            elif is_image(path):
                files.append(path)
    return sorted(files, key=lambda path: natural(os.fspath(path)))


def class_order(names: Sequence[str] | dict[str, list[Path]]) -> list[str]:
    """Class names in natural order. Raises DataError for two names that differ only in case or in Unicode form."""
    folded: dict[str, str] = {}
    for name in sorted(names, key=natural):
        same = unicodedata.normalize("NFC", name).casefold()
        if same in folded:
            raise DataError(f"classes {printable(folded[same])} and {printable(name)} differ only in case", "rename one of them")
        folded[same] = name
    return list(folded.values())


def natural(name: str) -> tuple[list[tuple[int, int, str]], str]:
    """A sort key in which 2 comes before 10; equal keys fall back to the name itself."""
    runs = re.findall(r"\d+|\D+", name)
    return [(0, int(run), "") if run.isdecimal() else (1, 0, run) for run in runs], name
