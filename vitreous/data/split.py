"""Splits of samples with or without labels, and datasets that consist of splits.

A `Split` returns each of its samples by index, undecoded: as the bytes of a file, or as pixels. Loaders decode samples
and build batches (`vitreous.data.loader`).
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

    `labels` are one of:

    - (n,) int64: indices in the dataset's class list
    - (n, K) float32: 1 for each class of an image (multi-label)
    - (n, T) float64: values of T regression targets, NaN if missing
    - (n, 0) float32: no labels
    """

    @property
    def labels(self) -> np.ndarray:
        """The labels of the samples, in one of the forms above, (n,) or (n, K)."""
        ...

    def __len__(self) -> int: ...

    def raw(self, sample: int) -> bytes | np.ndarray:
        """Return the stored bytes of an image file, or pixels (H, W[, C]). Raises DataError if they cannot be read."""
        ...

    def name(self, sample: int) -> str:
        """Return the name of a sample for messages: its path, or its number."""
        ...

    def take(self, indices: np.ndarray, labels: np.ndarray | None = None) -> Split:
        """Return a split of the samples at these indices (m,), in this order; `labels` replaces their labels."""
        ...

    def update(self, digest: Any) -> None:
        """Update a hashlib digest with the identities of the samples, labels excluded."""
        ...


def is_labelled(split: Split) -> bool:
    """Return whether the samples of a split have labels."""
    return split.labels.ndim == 1 or split.labels.shape[1] > 0


def has_target_values(labels: np.ndarray) -> bool:
    """Return whether labels are values of regression targets, (n, T) float64, rather than classes."""
    return labels.dtype == np.float64


def decode_sample(split: Split, sample: int, channels: int) -> Image.Image:
    """Decode a sample as a PIL image of mode `RGB` for 3 channels, or `L` for 1. Raises DataError."""
    return decode_to_pillow(split.raw(sample), channels, split.name(sample))


class Paths(Sequence[Path]):
    """Sequence of paths, stored in one byte string that forked processes share without copying. A million paths take
    about 100 MB."""

    def __init__(self, paths: Iterable[str | bytes | os.PathLike[str]]) -> None:
        encoded_paths = [os.fsencode(path) for path in paths]
        self._ends = np.cumsum([len(encoded_path) for encoded_path in encoded_paths], dtype=np.int64)
        self._bytes = b"".join(encoded_paths)

    @classmethod
    def concatenate(cls, sequences: Iterable[Paths]) -> Paths:
        """Concatenate sequences of paths."""
        sequences, result = list(sequences), cls(())
        starts = np.cumsum([0, *(len(sequence._bytes) for sequence in sequences)])
        ends = [sequence._ends + start for sequence, start in zip(sequences, starts, strict=False)]
        result._ends = np.concatenate([result._ends, *ends])
        result._bytes = b"".join(sequence._bytes for sequence in sequences)
        return result

    def __len__(self) -> int:
        return len(self._ends)

    @overload
    def __getitem__(self, index: int) -> Path: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Path]: ...
    def __getitem__(self, index: int | slice) -> Path | Sequence[Path]:
        positions = range(len(self))[index]
        return Path(self.text(positions)) if isinstance(positions, int) else [self[position] for position in positions]

    def encoded_path(self, index: int) -> bytes:
        """Return a path as bytes in the system's encoding."""
        return self._bytes[int(self._ends[index - 1]) if index else 0 : int(self._ends[index])]

    def text(self, index: int) -> str:
        """Return a path as text, which is faster: creating a `Path` takes as long as opening the file."""
        return os.fsdecode(self.encoded_path(index))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Paths) and self._bytes == other._bytes and np.array_equal(self._ends, other._ends)


def strip_common_folder(paths: list[str]) -> list[str]:
    """Return paths relative to their innermost common folder. This takes less time and memory than
    `os.path.commonpath`."""
    if os.sep != "/" or any(mark in f"{path}/" for path in paths for mark in ("//", "/./", "/../")):
        root = os.path.commonpath(paths)
        return [os.path.relpath(path, root) for path in paths]
    root = os.path.commonprefix([min(paths, default=""), max(paths, default="")])  # noqa: RUF071 (cut below)
    if not all(f"{path}/".startswith(f"{root}/") for path in paths):
        root = root[: root.rfind("/") + 1]
    return [path[len(root) :].removeprefix("/") or "." for path in paths]


@dataclass(frozen=True)
class FileSplit:
    """Split of image files, with labels (n,) int64 or (n, K) float32. `paths` may be any iterable of paths; it is
    stored as a `Paths`."""

    paths: Any
    labels: np.ndarray

    def __post_init__(self) -> None:
        if not isinstance(self.paths, Paths):
            object.__setattr__(self, "paths", Paths(self.paths))

    def __len__(self) -> int:
        return len(self.paths)

    def raw(self, sample: int) -> bytes | np.ndarray:
        """Return the bytes of an image file. Raises DataError if it cannot be read."""
        return read_input_file(self.path(sample))

    def name(self, sample: int) -> str:
        """Return the path of a sample for messages, with unprintable characters escaped."""
        return escape_unprintable(self.path(sample))

    def path(self, sample: int) -> str:
        """Return the path of a sample as text."""
        return self.paths.text(sample)

    def take(self, indices: np.ndarray, labels: np.ndarray | None = None) -> Self:
        """Return a split of the files at `indices` (m,), in this order; `labels` replaces their labels."""
        paths = Paths(self.paths.encoded_path(int(index)) for index in indices)
        return type(self)(paths, self.labels[indices] if labels is None else labels)

    def update(self, digest: Any) -> None:
        """Update a hashlib digest with the paths of the files, relative to their common folder."""
        paths = [self.path(sample) for sample in range(len(self))]
        digest.update("\n".join(strip_common_folder(paths)).encode("utf-8", "surrogateescape"))


@dataclass(frozen=True)
class ArraySplit:
    """Split of images of equal size in memory, (n, H, W) or (n, H, W, C), with labels (n,) int64 or (n, K) float32."""

    pixels: np.ndarray
    labels: np.ndarray

    def __len__(self) -> int:
        return len(self.pixels)

    def raw(self, sample: int) -> np.ndarray:
        """Return the pixels of an image, (H, W) or (H, W, C)."""
        return self.pixels[sample]

    def name(self, sample: int) -> str:
        """Return the number of a sample for messages."""
        return f"sample {sample}"

    def take(self, indices: np.ndarray, labels: np.ndarray | None = None) -> ArraySplit:
        """Return a split of the images at `indices` (m,), in this order; `labels` replaces their labels."""
        return ArraySplit(self.pixels[indices], self.labels[indices] if labels is None else labels)

    def update(self, digest: Any) -> None:
        """Update a hashlib digest with the pixels of all images."""
        digest.update(self.pixels.tobytes())


class Store(Protocol):
    """Random access to images that are not separate files, such as those of archives and tables. A row is one image."""

    def read(self, index: int) -> bytes | np.ndarray:
        """Return the stored bytes of an image file, or pixels (H, W[, C]). Raises DataError."""
        ...

    def name(self, index: int) -> str:
        """Return the name of the image in a row, for messages."""
        ...

    def update(self, digest: Any, indices: np.ndarray) -> None:
        """Update a hashlib digest with the identities of the rows at `indices` (n,)."""
        ...


S = TypeVar("S", bound=Store)


@dataclass(frozen=True, eq=False)
class StoreSplit(Generic[S]):
    """Split of images in a store: the indices of the store's rows (n,) int64, and labels (n,) int64 or (n, K)
    float32."""

    store: S
    row_indices: np.ndarray
    labels: np.ndarray

    def __len__(self) -> int:
        return len(self.row_indices)

    def raw(self, sample: int) -> bytes | np.ndarray:
        """Return the stored bytes or pixels of an image. Raises DataError."""
        return self.store.read(int(self.row_indices[sample]))

    def name(self, sample: int) -> str:
        """Return the store's name of a sample, for messages."""
        return self.store.name(int(self.row_indices[sample]))

    def take(self, indices: np.ndarray, labels: np.ndarray | None = None) -> StoreSplit[S]:
        """Return a split of the images at `indices` (m,), in this order; `labels` replaces their labels."""
        return StoreSplit(self.store, self.row_indices[indices], self.labels[indices] if labels is None else labels)

    def update(self, digest: Any) -> None:
        """Update a hashlib digest with the identities of the images in the store."""
        self.store.update(digest, self.row_indices)


@dataclass(frozen=True)
class Data:
    """A dataset: ordered class or target names, splits and metadata."""

    name: str
    classes: tuple[str, ...]
    splits: dict[str, Split]
    notes: list[str] = field(default_factory=list)
    unsplit: bool = False  # the source has no predefined splits, so `val` was drawn from the images
    # all training images, `train` and `val` together, if `val` was drawn from them or is a predefined subset (VTAB-1k)
    full_train_split: Split | None = None
    # class -> human-readable title, for classes with coded names (synsets)
    titles: dict[str, str] = field(default_factory=dict)
    # class -> rare, common or frequent, if a federated dataset's files define it
    frequency: dict[str, str] = field(default_factory=dict)
    # (n,) int64, of `full_train_split` or else of `train`: images of the same group are not divided between splits
    groups: np.ndarray | None = None
    group_column: str | None = None  # the table column that defines the groups
    identity: str = ""  # the fingerprint before an exclusion list was applied, if any
    unlearnable: DataError | None = None  # the reason why no training image has a usable annotated object
    unlabelled: DataError | None = None  # the reason why the images have no labels; None if labelled or self-evident
    unread_annotations: str | None = None  # an unused annotation file next to class folders
    latents: Latents | None = None  # description of latents, if the samples are latents
    targets: tuple[str, ...] = ()  # names of the regression targets; `classes` is then empty
    label_column: str = "label"  # the table column with the labels

    def split(self, name: str) -> Split:
        """Return the split of that name. Raises DataError, with the available splits, if there is none."""
        if name not in self.splits:
            raise DataError(f"{self.name} has no {name} split", f"its splits are {', '.join(self.splits)}: use --split")
        return self.splits[name]

    @property
    def labelled(self) -> bool:
        """Whether the images have labels; if not, `classes` is empty and labels are (n, 0) float32."""
        return is_labelled(next(iter(self.splits.values())))

    @property
    def multilabel(self) -> bool:
        """Whether labels are (n, K) float32: an image may have any number of classes."""
        return self.labelled and not self.targets and next(iter(self.splits.values())).labels.ndim == 2

    @property
    def label_kind(self) -> LabelKind:
        """The operations for single-label or for multi-label data, whichever the data are."""
        return get_label_kind(self.multilabel)

    def with_holdout(self, share: float | None, split_seed: int) -> Data:
        """Hold out a share of all training images as `val`, drawn within each class.

        Images that were drawn for validation before are returned to `train` first. 0 holds nothing out and keeps a
        predefined `val`. None returns the data unchanged.
        """
        if share is None:
            return self
        train, notes, groups = self.full_train_split or self.split("train"), self.notes, self.groups
        new_splits: dict[str, Split] = {"train": train}
        if share:
            indices_by_split = draw_stratified_splits(train.labels, split_seed, {"val": share}, groups)
            new_splits = {name: train.take(indices) for name, indices in indices_by_split.items()}
            groups = groups[indices_by_split["train"]] if groups is not None else None
            notes = [
                f"held out {len(indices_by_split['val'])} of {len(train)} training images (split seed {split_seed})"
            ]
        elif self.full_train_split:
            notes = ["no images are held out for validation"]
        else:
            new_splits |= {name: split for name, split in self.splits.items() if name == "val"}
        new_splits |= {name: split for name, split in self.splits.items() if name == "test"}
        return replace(self, splits=new_splits, notes=notes, full_train_split=None, groups=groups)

    def fingerprint(self) -> str:
        """Compute the SHA-256 of class names, splits, sample names and labels, without file contents. It does not
        change if samples are excluded by an exclusion list."""
        if self.identity:
            return self.identity
        digest = hashlib.sha256("\n".join(self.classes or self.targets).encode())
        for name, split in self.splits.items():
            digest.update(f"\n{name} {len(split)}\n".encode())
            digest.update(split.labels.tobytes())
            split.update(digest)
        return digest.hexdigest()


def create_empty_labels(count: int) -> np.ndarray:
    """Return the labels of `count` samples without labels, (count, 0) float32."""
    return np.zeros((count, 0), np.float32)


def require_labels(data: Data) -> None:
    """Raise DataError, with the reason, if the images have no labels."""
    if not data.labelled:
        raise data.unlabelled or data.unlearnable or DataError(f"{data.name} has no labels", "use data with classes")
    if data.targets and not any(is_labelled(split) for split in data.splits.values()):
        raise DataError(f"{data.name}: no image has a value of {', '.join(data.targets)}", "fill in some")
    if not data.targets and not any(data.label_kind.has_label(split.labels) for split in data.splits.values()):
        raise data.unlearnable or DataError(f"{data.name}: no image has a label", "add the classes of the images")


def ensure_val_split(
    splits: dict[str, Split], seed: int, notes: list[str], groups: np.ndarray | None = None
) -> tuple[dict[str, Split], Split | None]:
    """Drop unusable splits, draw a missing `val` from `train`, and order the splits. Returns the splits and, if `val`
    was drawn, the complete `train`.

    Appends a note for a drawn `val` to `notes`. `groups`, (n,) int64, are not divided between splits. Raises DataError
    if `train` has no images.
    """
    splits, full_train = drop_unusable_splits(splits, notes), None
    if "val" not in splits:
        full_train = splits["train"]
        drawn_splits, note = hold_out_val(full_train, seed, groups)
        splits = splits | drawn_splits
        notes.append(note)
    return {name: splits[name] for name in ("train", "val", "test") if name in splits}, full_train


def drop_unusable_splits(splits: dict[str, Split], notes: list[str]) -> dict[str, Split]:
    """Drop splits that cannot be evaluated: empty splits, and unlabelled splits if `train` has labels.

    Appends a note for each to `notes`. Layouts mark unlabelled splits by `create_empty_labels`; only this function
    decides whether they are used. Raises DataError if `train` has no images.
    """
    if not len(splits["train"]):
        other_splits = ", ".join(name for name, split in splits.items() if len(split))
        problem = f"the train split has no images{f', {other_splits} has' if other_splits else ''}"
        raise DataError(problem, "put the training images into train, or choose another folder")
    usable = dict[str, Split]()
    for name, split in splits.items():
        if not len(split):
            notes.append(f"{name} has no images and is ignored")
        elif is_labelled(splits["train"]) and not is_labelled(split):
            notes.append(f"{name} has {len(split):,} images without labels and is ignored")
        else:
            usable[name] = split
    return usable


def hold_out_val(full_train: Split, seed: int, groups: np.ndarray | None = None) -> tuple[dict[str, Split], str]:
    """Hold out a tenth of the training images as `val`, by complete groups (n,) if passed. Returns {split name: split}
    of `train` and `val`, and a note. If there are too few images, there is no `val`."""
    indices_by_split = draw_stratified_splits(full_train.labels, seed, {"val": 0.1}, groups)
    if not len(indices_by_split["val"]):
        return {"train": full_train}, "too few images to hold any out for validation"
    note = (
        f"held out {len(indices_by_split['val'])} of {len(full_train)} training "
        f"images for validation (split seed {seed})"
    )
    if groups is not None:
        note += f", by {len(np.unique(groups)):,} groups"
    return {name: full_train.take(indices) for name, indices in indices_by_split.items()}, note


def hash_file_times(split: Split, digest: Any) -> None:
    """Update a hashlib digest with the sizes and modification times of a split's files. Splits without separate files
    leave it unchanged."""
    if isinstance(split, FileSplit):
        for path in split.paths:
            try:
                status = os.stat(path)
                digest.update(b"%d %d\n" % (status.st_size, status.st_mtime_ns))
            except OSError:
                digest.update(b"none\n")
