"""Samples with or without labels, and the data sets that they make up.

A `Split` gives any of its samples at any time, as it is stored, and knows nothing of batches or tensors.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Generic, Protocol, Self, TypeVar, overload

import numpy as np
from PIL import Image

from vitreous.data.decoding.decode import decode_to_pillow, read_input_file
from vitreous.data.holdout import draw_stratified_splits
from vitreous.data.labels import LabelKind, get_label_kind
from vitreous.data.latents import Latents
from vitreous.errors import DataError, escape_unprintable


class Split(Protocol):
    """Samples and their labels, in a fixed order.

    `labels`: (n,) int64, positions in the data set's class list; (n, K) float32, 1 for each class that an image has;
    (n, T) float64, values of targets, NaN for none; or (n, 0) float32 where the data have no labels.
    """

    @property
    def labels(self) -> np.ndarray: ...

    def __len__(self) -> int: ...

    def raw(self, sample: int) -> bytes | np.ndarray:
        """The stored bytes of an image file, or pixels (H, W[, C]). Raises DataError where they cannot be read."""
        ...

    def name(self, sample: int) -> str:
        """Human-readable name of a sample for messages: its path, or its number."""
        ...

    def take(self, rows: np.ndarray, labels: np.ndarray | None = None) -> Split:
        """The samples at these positions (m,), in this order; with other labels, if they are given."""
        ...

    def update(self, digest: Any) -> None:
        """Update a hashlib digest with the identities of the samples, labels excluded."""
        ...


def is_labelled(split: Split) -> bool:
    """Whether the samples of a split have labels."""
    return split.labels.ndim == 1 or split.labels.shape[1] > 0


def has_target_values(labels: np.ndarray) -> bool:
    """Whether labels are values of targets, (n, T) float64, not classes."""
    return labels.dtype == np.float64


def decode_sample(split: Split, sample: int, channels: int) -> Image.Image:
    """The decoded image of one sample, `RGB` for 3 channels and `L` for 1. Raises DataError."""
    return decode_to_pillow(split.raw(sample), channels, split.name(sample))


class Paths(Sequence[Path]):
    """Paths in one byte string, which forked processes share without copying: a million take 100 MB."""

    def __init__(self, paths: Iterable[str | bytes | os.PathLike[str]]) -> None:
        words = [os.fsencode(path) for path in paths]
        self._ends = np.cumsum([len(word) for word in words], dtype=np.int64)
        self._bytes = b"".join(words)

    @classmethod
    def joined(cls, parts: Iterable[Paths]) -> Paths:
        """Concatenate sequences of paths."""
        parts, whole = list(parts), cls(())
        starts = np.cumsum([0, *(len(part._bytes) for part in parts)])
        ends = [part._ends + start for part, start in zip(parts, starts, strict=False)]
        whole._ends = np.concatenate([whole._ends, *ends])
        whole._bytes = b"".join(part._bytes for part in parts)
        return whole

    def __len__(self) -> int:
        return len(self._ends)

    @overload
    def __getitem__(self, index: int) -> Path: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Path]: ...
    def __getitem__(self, index: int | slice) -> Path | Sequence[Path]:
        places = range(len(self))[index]
        return Path(self.text(places)) if isinstance(places, int) else [self[place] for place in places]

    def encoded_path(self, index: int) -> bytes:
        """A path as the system has it."""
        return self._bytes[int(self._ends[index - 1]) if index else 0 : int(self._ends[index])]

    def text(self, index: int) -> str:
        """A path as text; to make a `Path` takes as long as to open the file."""
        return os.fsdecode(self.encoded_path(index))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Paths) and self._bytes == other._bytes and np.array_equal(self._ends, other._ends)


def strip_common_folder(paths: list[str]) -> list[str]:
    """Paths relative to the innermost folder that holds them all: `os.path.commonpath`, in less time and memory."""
    if os.sep != "/" or any(mark in f"{path}/" for path in paths for mark in ("//", "/./", "/../")):
        root = os.path.commonpath(paths)
        return [os.path.relpath(path, root) for path in paths]
    root = os.path.commonprefix([min(paths, default=""), max(paths, default="")])  # noqa: RUF071 (made one below)
    if not all(f"{path}/".startswith(f"{root}/") for path in paths):
        root = root[: root.rfind("/") + 1]
    return [path[len(root) :].removeprefix("/") or "." for path in paths]


@dataclass(frozen=True)
class FileSplit:
    """Image files with labels (n,) int64 or (n, K) float32; `paths` becomes a `Paths`."""

    paths: Any
    labels: np.ndarray

    def __post_init__(self) -> None:
        if not isinstance(self.paths, Paths):
            object.__setattr__(self, "paths", Paths(self.paths))

    def __len__(self) -> int:
        return len(self.paths)

    def raw(self, sample: int) -> bytes | np.ndarray:
        """The bytes of a file. Raises DataError."""
        return read_input_file(self.path(sample))

    def name(self, sample: int) -> str:
        return escape_unprintable(self.path(sample))

    def path(self, sample: int) -> str:
        """The path as text."""
        return self.paths.text(sample)

    def take(self, rows: np.ndarray, labels: np.ndarray | None = None) -> Self:
        paths = Paths(self.paths.encoded_path(int(row)) for row in rows)
        return type(self)(paths, self.labels[rows] if labels is None else labels)

    def update(self, digest: Any) -> None:
        words = [self.path(sample) for sample in range(len(self))]
        digest.update("\n".join(strip_common_folder(words)).encode("utf-8", "surrogateescape"))


@dataclass(frozen=True)
class ArraySplit:
    """Images in memory, (n, H, W) or (n, H, W, C), with labels (n,) int64 or (n, K) float32."""

    pixels: np.ndarray
    labels: np.ndarray

    def __len__(self) -> int:
        return len(self.pixels)

    def raw(self, sample: int) -> np.ndarray:
        """The pixels of an image, (H, W) or (H, W, C)."""
        return self.pixels[sample]

    def name(self, sample: int) -> str:
        return f"sample {sample}"

    def take(self, rows: np.ndarray, labels: np.ndarray | None = None) -> ArraySplit:
        return ArraySplit(self.pixels[rows], self.labels[rows] if labels is None else labels)

    def update(self, digest: Any) -> None:
        digest.update(self.pixels.tobytes())


class Store(Protocol):
    """Files that hold many images each; a row is one image."""

    def read(self, row: int) -> bytes | np.ndarray:
        """The stored bytes of an image file, or pixels (H, W[, C]). Raises DataError."""
        ...

    def name(self, row: int) -> str: ...

    def update(self, digest: Any, rows: np.ndarray) -> None:
        """Update a hashlib digest with the identities of rows (n,)."""
        ...


S = TypeVar("S", bound=Store)


@dataclass(frozen=True, eq=False)
class StoreSplit(Generic[S]):
    """Some images of a store: rows (n,) int64, and their labels (n,) int64 or (n, K) float32."""

    store: S
    rows: np.ndarray
    labels: np.ndarray

    def __len__(self) -> int:
        return len(self.rows)

    def raw(self, sample: int) -> bytes | np.ndarray:
        """The stored bytes or pixels of an image. Raises DataError."""
        return self.store.read(int(self.rows[sample]))

    def name(self, sample: int) -> str:
        return self.store.name(int(self.rows[sample]))

    def take(self, rows: np.ndarray, labels: np.ndarray | None = None) -> StoreSplit[S]:
        return StoreSplit(self.store, self.rows[rows], self.labels[rows] if labels is None else labels)

    def update(self, digest: Any) -> None:
        self.store.update(digest, self.rows)


@dataclass(frozen=True)
class Data:
    """A data set: its class names in order, or those of its targets, its splits, and a fingerprint of what it holds."""

    name: str
    classes: tuple[str, ...]
    splits: dict[str, Split]
    notes: list[str] = field(default_factory=list)
    unsplit: bool = False  # a folder of classes, or a table without splits: its splits were drawn here
    # all images to train on, where `val` is some of them: it was drawn here, or comes so (VTAB-1k)
    whole: Split | None = None
    # class -> what people call it, where the class has another name (a synset)
    titles: dict[str, str] = field(default_factory=dict)
    # class -> rare, common or frequent, where the files of a federated data set say so
    frequency: dict[str, str] = field(default_factory=dict)
    # (n,) int64, of `whole` or else of `train`: images of one number are never drawn apart
    groups: np.ndarray | None = None
    group_column: str | None = None  # of a table, that names them
    identity: str = ""  # the fingerprint that it had before images were left out of it by a list, where any were
    unlearnable: DataError | None = None  # why no annotated object of the training images can be learned
    unlabelled: DataError | None = None  # why the images have no labels; None where they have, or that is plain
    unread_annotations: str | None = None  # a file of annotations beside class folders, which do not use it
    latents: Latents | None = None  # of what, where the samples are latents
    targets: tuple[str, ...] = ()  # names of the values that images have in the place of classes
    label_column: str = "label"  # of a table, that holds the labels

    def split(self, name: str) -> Split:
        """The split of that name. Raises DataError, with those that there are."""
        if name not in self.splits:
            raise DataError(f"{self.name} has no {name} split", f"it has {', '.join(self.splits)}: use --split")
        return self.splits[name]

    @property
    def labelled(self) -> bool:
        """Whether the images have labels; without, `classes` is empty and labels are (n, 0) float32."""
        return is_labelled(next(iter(self.splits.values())))

    @property
    def multilabel(self) -> bool:
        """Whether labels are (n, K) float32: an image may have several, or none."""
        return self.labelled and not self.targets and next(iter(self.splits.values())).labels.ndim == 2

    @property
    def label_kind(self) -> LabelKind:
        """What differs between labels of one class an image and of several."""
        return get_label_kind(self.multilabel)

    def with_holdout(self, share: float | None, split_seed: int) -> Data:
        """The data with that share of all training images as `val`, drawn within each class; None: as they are.

        What was drawn for validation before goes back into training first. 0 holds nothing out: then a `val` of the
        data's own stays what it is.
        """
        if share is None:
            return self
        train, notes, groups = self.whole or self.split("train"), self.notes, self.groups
        drawn: dict[str, Split] = {"train": train}
        if share:
            parts = draw_stratified_splits(train.labels, split_seed, {"val": share}, groups)
            drawn = {name: train.take(rows) for name, rows in parts.items()}
            groups = groups[parts["train"]] if groups is not None else None
            notes = [f"held out {len(parts['val'])} of {len(train)} training images (split seed {split_seed})"]
        elif self.whole:
            notes = ["no image is kept for validation: the run trains on all"]
        else:
            drawn |= {name: split for name, split in self.splits.items() if name == "val"}
        drawn |= {name: split for name, split in self.splits.items() if name == "test"}
        return replace(self, splits=drawn, notes=notes, whole=None, groups=groups)

    def fingerprint(self) -> str:
        """SHA-256 over class names, splits, sample names and labels; file contents are not read. A list of exclusions
        changes nothing."""
        if self.identity:
            return self.identity
        digest = hashlib.sha256("\n".join(self.classes or self.targets).encode())
        for name, split in self.splits.items():
            digest.update(f"\n{name} {len(split)}\n".encode())
            digest.update(split.labels.tobytes())
            split.update(digest)
        return digest.hexdigest()


def create_empty_labels(count: int) -> np.ndarray:
    """The labels of `count` samples without labels, (count, 0) float32."""
    return np.zeros((count, 0), np.float32)


def require_labels(data: Data) -> None:
    """Raise DataError, with the reason, for data whose images have no labels."""
    if not data.labelled:
        raise data.unlabelled or data.unlearnable or DataError(f"{data.name} has no labels", "name data with classes")
    if data.targets and not any(is_labelled(split) for split in data.splits.values()):
        raise DataError(f"{data.name}: no image has a value of {', '.join(data.targets)}", "fill in some")
    if not data.targets and not any(data.label_kind.has_label(split.labels) for split in data.splits.values()):
        raise data.unlearnable or DataError(f"{data.name}: no image has a label", "name the classes of the images")


def ensure_val_split(
    splits: dict[str, Split], seed: int, notes: list[str], groups: np.ndarray | None = None
) -> tuple[dict[str, Split], Split | None]:
    """Order splits; leave out those that `drop_unusable_splits` names; draw a missing `val` from `train`, with a note,
    and then return that whole `train` too. `groups`, (n,) int64, are never drawn apart. Raises DataError where `train`
    has no images."""
    splits, whole = drop_unusable_splits(splits, notes), None
    if "val" not in splits:
        whole = splits["train"]
        drawn, note = hold_out_val(whole, seed, groups)
        splits = splits | drawn
        notes.append(note)
    return {name: splits[name] for name in ("train", "val", "test") if name in splits}, whole


def drop_unusable_splits(splits: dict[str, Split], notes: list[str]) -> dict[str, Split]:
    """The splits without those that nothing can be measured on, each with a note: a split without images, and one
    without labels where `train` has labels. A layout gives a split of which no image has a label the labels
    `create_empty_labels`; this is the one place that decides what becomes of it. Raises DataError where `train` has no
    images."""
    if not len(splits["train"]):
        others = ", ".join(name for name, split in splits.items() if len(split))
        problem = f"the train split has no images{f', {others} has' if others else ''}"
        raise DataError(problem, "put the training images into train, or name another folder")
    usable = dict[str, Split]()
    for name, split in splits.items():
        if not len(split):
            notes.append(f"{name} has no images and is left out")
        elif is_labelled(splits["train"]) and not is_labelled(split):
            notes.append(f"{name} has {len(split):,} images without labels and is left out")
        else:
            usable[name] = split
    return usable


def hold_out_val(whole: Split, seed: int, groups: np.ndarray | None = None) -> tuple[dict[str, Split], str]:
    """Hold out a tenth of the training images, in groups (n,) if given -> `train` and `val`, and a note."""
    parts = draw_stratified_splits(whole.labels, seed, {"val": 0.1}, groups)
    if not len(parts["val"]):
        return {"train": whole}, "too few images to hold any out for validation"
    note = f"held out {len(parts['val'])} of {len(whole)} training images for validation (split seed {seed})"
    if groups is not None:
        note += f", by {len(np.unique(groups)):,} groups"
    return {name: whole.take(rows) for name, rows in parts.items()}, note


def hash_file_times(split: Split, digest: Any) -> None:
    """Feed a digest of hashlib with the sizes and times of a split's files, where it is made of files."""
    if isinstance(split, FileSplit):
        for path in split.paths:
            try:
                status = os.stat(path)
                digest.update(b"%d %d\n" % (status.st_size, status.st_mtime_ns))
            except OSError:
                digest.update(b"none\n")
