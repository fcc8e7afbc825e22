"""Targets: the annotations of an image, in the common form of all readers and writers of annotation formats.

In shapes, n is the number of objects on an image. Its `size` is (height, width), or (depth, height, width) for a
volume.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import KW_ONLY, dataclass, replace
from typing import Any, Protocol, Self, runtime_checkable

import numpy as np

from vitreous.data.split import FileSplit, Paths, Split
from vitreous.errors import UsageError

IGNORE_INDEX = -1  # class of the pixels of a class map that training and evaluation ignore


@dataclass(frozen=True, eq=False)
class VerifiedClasses:
    """The verified classes of an image in a federated dataset, such as LVIS (arXiv:1908.03195), in which each image is
    annotated for some classes only.

    `absent` (a,) int64: classes that are verified as absent. `partial` (b,) int64: classes of which not all objects are
    annotated. Other classes without an object are unverified.
    """

    absent: np.ndarray
    partial: np.ndarray

    def take(self, order: np.ndarray) -> VerifiedClasses:
        """Renumber the classes: class k becomes `order[k]`, for `order` (K,) int64."""
        return VerifiedClasses(order[self.absent], order[self.partial])


@dataclass(frozen=True, eq=False)
class Target:
    """The annotations of an image: its objects, and the class of each pixel.

    - `labels` (n,) int64: indices in the dataset's class list
    - `boxes` (n, 4) float32: left, top, right, bottom in pixels. The image extends from 0 to its width and height, so
      that a box of one pixel has width and height 1.
    - `crowd` (n,) bool: whether the object is a group that is not divided into objects
    - `layers` (L, *size) int32: the object masks. A pixel is 1 + the index of its object, 0 for none; overlapping
      objects are in different layers. None if objects have only boxes.
    - `classes` (*size) int32: the class map, the class of each pixel or IGNORE_INDEX; None if there is none
    - `verified`: the verified classes, if the annotations are not exhaustive

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
            raise ValueError(f"{n} labels do not match boxes {self.boxes.shape} and crowd {self.crowd.shape}")
        if self.layers is not None and self.layers.shape[1:] != self.size:
            raise ValueError(f"layers {self.layers.shape} do not match an image of {self.size}")
        if self.classes is not None and self.classes.shape != self.size:
            raise ValueError(f"class map {self.classes.shape} does not match an image of {self.size}")

    def __len__(self) -> int:
        return len(self.labels)

    def mask(self, index: int) -> np.ndarray:
        """Return the mask of one object, (*size) bool. Raises ValueError if objects have only boxes."""
        if self.layers is None:
            raise ValueError("the objects have boxes but no masks")
        return (self.layers == index + 1).any(0)

    def masks(self) -> np.ndarray:
        """Return the masks of all objects, (n, *size) bool. Raises ValueError if objects have only boxes."""
        return np.stack([self.mask(index) for index in range(len(self))]) if len(self) else self.create_empty_masks()

    def create_empty_masks(self) -> np.ndarray:
        """Return the masks of an image without objects, (0, *size) bool."""
        return np.zeros((0, *self.size), bool)

    def class_map(self, background: int | None = None) -> np.ndarray:
        """Return the class of each pixel, (*size) int32: the class map if there is one, else a map drawn from the
        object masks.

        A drawn map has the class `background` outside objects, and IGNORE_INDEX at crowds. The smaller of two
        overlapping objects is on top. Raises ValueError if there is neither a class map nor masks, or no `background`
        for a drawn map.
        """
        if self.classes is not None:
            return self.classes
        if background is None or (self.layers is None and len(self)):
            raise ValueError("no class map, no masks to draw one from, or no background class")
        painted = np.full(self.size, background, np.int32)
        if not len(self):
            return painted
        masks = self.masks()
        for index in np.argsort(-masks.reshape(len(masks), -1).sum(1), kind="stable"):
            painted[masks[index]] = IGNORE_INDEX if self.crowd[index] else self.labels[index]
        return painted

    def take(self, indices: np.ndarray) -> Target:
        """Return a target with the objects at `indices` (m,) int64, in this order; the class map is unchanged."""
        layers = self.layers
        if layers is not None:
            new_values = np.zeros(len(self) + 1, np.int32)
            new_values[np.asarray(indices) + 1] = np.arange(len(indices), dtype=np.int32) + 1
            layers = new_values[layers]
        return Target(
            self.size,
            self.labels[indices],
            self.boxes[indices],
            self.crowd[indices],
            layers=layers,
            classes=self.classes,
            verified=self.verified,
        )

    def without_masks(self) -> Target:
        """Return the target without object masks."""
        return replace(self, layers=None)

    @property
    def nbytes(self) -> int:
        """The size of the arrays in bytes."""
        arrays = (self.labels, self.boxes, self.crowd, self.layers, self.classes)
        return sum(array.nbytes for array in arrays if array is not None)


def stack_masks(masks: Iterable[np.ndarray], size: tuple[int, ...]) -> np.ndarray:
    """Combine object masks, each (*size) bool, into layers (L, *size) int32 (see `Target.layers`). A mask is put into
    the first layer in which it overlaps no other mask; there is at least one layer."""
    layers = [np.zeros(size, np.int32)]
    for index, mask in enumerate(masks):
        layer = next((layer for layer in layers if not layer[mask].any()), None)
        if layer is None:
            layers.append(layer := np.zeros(size, np.int32))
        layer[mask] = index + 1
    return np.stack(layers)


def mask_to_box(mask: np.ndarray) -> np.ndarray:
    """Compute the bounding box (4,) float32 of a mask (H, W) bool; zeros for an empty mask."""
    rows, columns = np.flatnonzero(mask.any(1)), np.flatnonzero(mask.any(0))
    if not len(rows):
        return np.zeros(4, np.float32)
    return np.array([columns[0], rows[0], columns[-1] + 1, rows[-1] + 1], np.float32)


def masks_to_boxes(masks: Iterable[np.ndarray]) -> np.ndarray:
    """Compute the bounding boxes of n masks, (H, W) bool each: (n, 4) float32."""
    return np.stack([*(mask_to_box(mask) for mask in masks), np.zeros(4, np.float32)])[:-1]


def create_empty_target(size: tuple[int, ...], classes: np.ndarray | None = None) -> Target:
    """Create the target of an image of `size` without objects, with the class map `classes`, (H, W) or (D, H, W) int32,
    if passed."""
    no_labels = np.zeros(0, np.int64)
    return Target(
        size, no_labels, boxes=np.zeros((0, 4), np.float32), crowd=np.zeros(0, bool), layers=None, classes=classes
    )


class Annotations(Protocol):
    """The annotations of images in any format; the index is that of the image."""

    def read(self, index: int) -> Target:
        """Read the annotations of an image. Raises DataError, with the file and the location in it, if they are
        invalid."""
        ...

    def update(self, digest: Any, indices: np.ndarray) -> None:
        """Update a hashlib digest with the annotations of the images at `indices` (n,)."""
        ...


@runtime_checkable
class AnnotatedSplit(Split, Protocol):
    """Split of images with annotations. `labels` (n, K) float32 has 1 for each class that an image contains."""

    def target(self, sample: int) -> Target:
        """Read the annotations of an image. Raises DataError."""
        ...


def get_sample_axes(split: Split) -> int:
    """Return the number of axes of a split's images: 2, or 3 for volumes or clips."""
    return getattr(split, "axes", 2)


def get_sample_noun(split: Split) -> str:
    """Return the noun for the samples of a split: images, volumes, signals or clips (see `Preprocess.noun`)."""
    return getattr(split, "kind", "volumes" if get_sample_axes(split) == 3 else "images")


def check_image_samples(splits: Iterable[Split], rule: str) -> None:
    """Raise UsageError if samples are not images, such as volumes. `rule` is a clause that states why images are
    required."""
    for noun in {get_sample_noun(split) for split in splits} - {"images"}:
        raise UsageError(f"the data are {noun}, but {rule}", f"use the data unchanged: `train` reads {noun}")


@dataclass(frozen=True)
class AnnotatedFiles(FileSplit):
    """Split of image files with annotations. `annotation_indices` (n,) int64 are the indices of the images in
    `annotations`; `labels` are (n, K) float32, see `AnnotatedSplit`."""

    annotation_indices: np.ndarray
    annotations: Annotations

    @property
    def axes(self) -> int:
        """Number of axes of an image: 2, or 3 for volumes."""
        return getattr(self.annotations, "axes", 2)

    def target(self, sample: int) -> Target:
        """Read the annotations of an image. Raises DataError."""
        return self.annotations.read(int(self.annotation_indices[sample]))

    def take(self, indices: np.ndarray, labels: np.ndarray | None = None) -> Self:
        """Return a split of the images at `indices` (m,), in this order; `labels`, (m, K), replaces their labels."""
        paths = Paths(self.paths.encoded_path(int(index)) for index in indices)
        return type(self)(
            paths,
            self.labels[indices] if labels is None else labels,
            self.annotation_indices[indices],
            self.annotations,
        )

    def update(self, digest: Any) -> None:
        """Update a hashlib digest with the paths and the annotations of the images."""
        super().update(digest)
        self.annotations.update(digest, self.annotation_indices)
