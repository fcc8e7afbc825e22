"""What is where on an image: the one form that every format of annotations is read into, and written from.

n objects on an image of `size`: (height, width), or (depth, height, width) of a volume.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import KW_ONLY, dataclass, replace
from typing import Any, Protocol, Self, runtime_checkable

import numpy as np

from vitreous.data.split import FileSplit, Paths, Split
from vitreous.errors import UsageError

IGNORE_INDEX = -1  # in a class map: nobody said what this pixel is; it is neither learned from nor measured


@dataclass(frozen=True, eq=False)
class VerifiedClasses:
    """What is known of an image of a federated data set, such as LVIS (arXiv:1908.03195), beside its objects: `absent`
    (a,) int64, classes of which nothing is there, and `partial` (b,) int64, classes of which not every object is named.
    Of other classes without an object nothing is known."""

    absent: np.ndarray
    partial: np.ndarray

    def take(self, order: np.ndarray) -> VerifiedClasses:
        """The same where class k has the number `order[k]`, (K,) int64."""
        return VerifiedClasses(order[self.absent], order[self.partial])


@dataclass(frozen=True, eq=False)
class Target:
    """The objects on an image, and the class of each of its pixels.

    `labels` (n,) int64: positions in the data set's class list. `boxes` (n, 4) float32: left, top, right, bottom in
    pixels; the image reaches from 0 to its width and height, so a box of one pixel has sides of 1. `crowd` (n,) bool:
    the object stands for many that nobody told apart. `layers` (L, *size) int32: 1 + the number of the object that a
    pixel belongs to, 0 for none; objects that overlap are in different layers; None where objects have boxes alone.
    `classes` (*size) int32: the class of each pixel, or IGNORE; None where there is no class map. `verified`: what else
    is known, where it is not known of every class whether it is there.
    Raises ValueError for arrays of other shapes.
    """

    size: tuple[int, ...]
    labels: np.ndarray
    boxes: np.ndarray
    crowd: np.ndarray
    _: KW_ONLY
    layers: np.ndarray | None = None
    classes: np.ndarray | None = None
    verified: VerifiedClasses | None = None

    def __post_init__(self) -> None:
        n = len(self.labels)
        if self.boxes.shape != (n, 4) or self.crowd.shape != (n,):
            raise ValueError(f"{n} labels, boxes {self.boxes.shape}, crowd {self.crowd.shape}")
        if self.layers is not None and self.layers.shape[1:] != self.size:
            raise ValueError(f"layers {self.layers.shape} on an image of {self.size}")
        if self.classes is not None and self.classes.shape != self.size:
            raise ValueError(f"a class map {self.classes.shape} on an image of {self.size}")

    def __len__(self) -> int:
        return len(self.labels)

    def mask(self, number: int) -> np.ndarray:
        """Return (*size) bool, the pixels of one object. Raises ValueError where objects have boxes alone."""
        if self.layers is None:
            raise ValueError("the objects have boxes, no masks")
        return (self.layers == number + 1).any(0)

    def masks(self) -> np.ndarray:
        """Return (n, *size) bool, the pixels of each object. Raises ValueError where objects have boxes alone."""
        return np.stack([self.mask(number) for number in range(len(self))]) if len(self) else self.create_empty_masks()

    def create_empty_masks(self) -> np.ndarray:
        """Return (0, *size) bool."""
        return np.zeros((0, *self.size), bool)

    def class_map(self, background: int | None = None) -> np.ndarray:
        """Return (*size) int32, the class of each pixel: the map where there is one, else painted from the objects.

        Painted maps have `background` where no object is, and IGNORE where a crowd is; where objects overlap, the
        smaller one is on top. Raises ValueError where there is neither a map nor masks, or no `background` is given
        for one that is painted.
        """
        if self.classes is not None:
            return self.classes
        if background is None or (self.layers is None and len(self)):
            raise ValueError("no class map, no masks to paint one from, or no class for what is between them")
        painted = np.full(self.size, background, np.int32)
        if not len(self):
            return painted
        masks = self.masks()
        for number in np.argsort(-masks.reshape(len(masks), -1).sum(1), kind="stable"):
            painted[masks[number]] = IGNORE_INDEX if self.crowd[number] else self.labels[number]
        return painted

    def take(self, rows: np.ndarray) -> Target:
        """Return the objects at these positions (m,) int64, in this order; the class map stays as it is."""
        layers = self.layers
        if layers is not None:
            numbers = np.zeros(len(self) + 1, np.int32)
            numbers[np.asarray(rows) + 1] = np.arange(len(rows), dtype=np.int32) + 1
            layers = numbers[layers]
        return Target(
            self.size,
            self.labels[rows],
            self.boxes[rows],
            self.crowd[rows],
            layers=layers,
            classes=self.classes,
            verified=self.verified,
        )

    def without_masks(self) -> Target:
        """Return the same without the masks of objects."""
        return replace(self, layers=None)

    @property
    def nbytes(self) -> int:
        """Bytes of the arrays."""
        arrays = (self.labels, self.boxes, self.crowd, self.layers, self.classes)
        return sum(array.nbytes for array in arrays if array is not None)


def stack_masks(masks: Iterable[np.ndarray], size: tuple[int, ...]) -> np.ndarray:
    """Stack the masks of objects, each (*size) bool, in as few layers as they do not overlap in, first fit: (L, *size)
    int32, at least one layer."""
    layers = [np.zeros(size, np.int32)]
    for number, mask in enumerate(masks):
        layer = next((layer for layer in layers if not layer[mask].any()), None)
        if layer is None:
            layers.append(layer := np.zeros(size, np.int32))
        layer[mask] = number + 1
    return np.stack(layers)


def mask_to_box(mask: np.ndarray) -> np.ndarray:
    """Return (4,) float32, the smallest box around the pixels of a mask (H, W) bool; zeros where it is empty."""
    rows, columns = np.flatnonzero(mask.any(1)), np.flatnonzero(mask.any(0))
    if not len(rows):
        return np.zeros(4, np.float32)
    return np.array([columns[0], rows[0], columns[-1] + 1, rows[-1] + 1], np.float32)


def masks_to_boxes(masks: Iterable[np.ndarray]) -> np.ndarray:
    """Return (n, 4) float32, the smallest box around each mask (H, W) bool."""
    return np.stack([*(mask_to_box(mask) for mask in masks), np.zeros(4, np.float32)])[:-1]


def create_empty_target(size: tuple[int, ...], classes: np.ndarray | None = None) -> Target:
    """Return the target of an image without objects; `classes`: its class map, (H, W) or (D, H, W) int32."""
    none = np.zeros(0, np.int64)
    return Target(size, none, boxes=np.zeros((0, 4), np.float32), crowd=np.zeros(0, bool), layers=None, classes=classes)


class Annotations(Protocol):
    """The annotations of images, in whatever files they are; a row is one image."""

    def read(self, row: int) -> Target:
        """Read what is on an image. Raises DataError, with the file and the place in it, where that cannot be told."""
        ...

    def update(self, digest: Any, rows: np.ndarray) -> None:
        """Update a hashlib digest with what is said of the images at `rows` (n,)."""
        ...


@runtime_checkable
class AnnotatedSplit(Split, Protocol):
    """Samples of which it is known what is where. `labels` (n, K) float32 has 1 for each class that an image holds."""

    def target(self, sample: int) -> Target:
        """Read what is on an image. Raises DataError."""
        ...


def get_sample_axes(split: Split) -> int:
    """The axes of the images of a split: 2, or 3 where they are volumes or clips."""
    return getattr(split, "axes", 2)


def get_sample_noun(split: Split) -> str:
    """What the samples of a split are called, as `Preprocess.noun` has it: images, volumes, signals or clips."""
    return getattr(split, "kind", "volumes" if get_sample_axes(split) == 3 else "images")


def check_image_samples(splits: Iterable[Split], rule: str) -> None:
    """Raise UsageError for volumes and clips, with the `rule` that they break: that something takes pictures."""
    for kind in {get_sample_noun(split) for split in splits} - {"images"}:
        raise UsageError(f"the data are {kind}, and {rule}", f"leave them as they are: `train` reads {kind}")


@dataclass(frozen=True)
class AnnotatedFiles(FileSplit):
    """Image files with annotations: `rows` (n,) int64 of `annotations`, and `labels` (n, K) float32 as above."""

    rows: np.ndarray
    annotations: Annotations

    @property
    def axes(self) -> int:
        """2 for pictures, 3 for volumes."""
        return getattr(self.annotations, "axes", 2)

    def target(self, sample: int) -> Target:
        """Read what is on an image. Raises DataError."""
        return self.annotations.read(int(self.rows[sample]))

    def take(self, rows: np.ndarray, labels: np.ndarray | None = None) -> Self:
        paths = Paths(self.paths.encoded_path(int(row)) for row in rows)
        return type(self)(paths, self.labels[rows] if labels is None else labels, self.rows[rows], self.annotations)

    def update(self, digest: Any) -> None:
        super().update(digest)
        self.annotations.update(digest, self.rows)
