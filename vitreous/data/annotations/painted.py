"""Convert annotations to the targets that an objective requires: class maps, drawn from object masks if necessary, or
objects only."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any, Self

import numpy as np

from vitreous.data.annotations.target import IGNORE_INDEX, AnnotatedSplit, Target, stack_masks
from vitreous.data.decoding.spectral import BAND_SUFFIXES, decode_void_mask
from vitreous.data.split import Data, Split
from vitreous.errors import DataError

BACKGROUND_CLASS = "background"  # class 0 of class maps that are drawn from object masks
BOXES_ONLY_HINT = "train on boxes only: --objective.masks false"


@dataclass(frozen=True, eq=False)
class TargetSplitWrapper:
    """Wrapper of an annotated split whose subclasses convert the targets when they are read."""

    split: AnnotatedSplit

    @property
    def labels(self) -> np.ndarray:
        """The labels (n, K) float32, 1 for each class that an image contains."""
        return self.split.labels

    def __len__(self) -> int:
        return len(self.split)

    def raw(self, sample: int) -> bytes | np.ndarray:
        """Return the bytes of an image file, or pixels (H, W[, C]). Raises DataError if they cannot be read."""
        return self.split.raw(sample)

    def name(self, sample: int) -> str:
        """Return the name of a sample for messages."""
        return self.split.name(sample)

    def take(self, indices: np.ndarray, labels: np.ndarray | None = None) -> Self:
        """Return a split of the samples at `indices` (m,), in this order; `labels` is ignored."""
        return replace(self, split=self.split.take(indices))

    def update(self, digest: Any) -> None:
        """Update a hashlib digest with the identities of the samples and their annotations."""
        self.split.update(digest)

    def target(self, sample: int) -> Target:
        """Read the annotations of an image. Raises DataError."""
        return self.split.target(sample)


@dataclass(frozen=True, eq=False)
class ClassMapSplit(TargetSplitWrapper):
    """Split whose targets have class maps that are drawn from object masks. Class 0 is the background; the classes of
    the data follow."""

    @property
    def labels(self) -> np.ndarray:
        """The labels (n, 1 + K) float32, 1 for each class that an image contains, and for the background."""
        labels = self.split.labels
        return np.concatenate([np.ones((len(labels), 1), np.float32), labels], 1)

    def target(self, sample: int) -> Target:
        """Read the annotations of an image, with a class map. Raises DataError if they cannot be read."""
        target = self.split.target(sample)
        target = replace(target, labels=target.labels + 1)
        classes = target.class_map(background=0)
        if self.split.name(sample).lower().endswith(BAND_SUFFIXES):
            void = decode_void_mask(self.split.raw(sample), self.split.name(sample))
            classes = classes if void is None else np.where(void, np.int32(IGNORE_INDEX), classes)
        return replace(target, classes=classes)


@dataclass(frozen=True, eq=False)
class ObjectSplit(TargetSplitWrapper):
    """Split whose targets have objects but no class maps; objects have masks if `masks`, else boxes only."""

    masks: bool

    def target(self, sample: int) -> Target:
        """Read the annotations of an image. Raises DataError if masks are required but the image has only boxes."""
        target = replace(self.split.target(sample), classes=None)
        if not self.masks:
            return target.without_masks()
        if target.layers is None and len(target):
            raise DataError(f"{self.split.name(sample)} has objects without masks", BOXES_ONLY_HINT)
        return target if target.layers is not None else replace(target, layers=stack_masks([], target.size))


def paint_class_maps(data: Data) -> Data:
    """Return the data with a class map for every image, for semantic segmentation.

    Data are unchanged if the first annotated image has a class map. Otherwise class maps are drawn from object masks,
    with a background class at index 0. Raises DataError for data without annotations, and for objects that have only
    boxes.
    """
    require_annotations(data, "masks, such as a folder with images/ and masks/")
    first_target = find_first_target(data.splits.values())
    if first_target is None or first_target.classes is not None:
        return data
    if first_target.layers is None:
        raise DataError(f"{data.name} has boxes but no masks", "train a detector: --recipe detect")
    return replace(wrap_splits(data, ClassMapSplit), classes=(BACKGROUND_CLASS, *data.classes))


def keep_object_targets(data: Data) -> Data:
    """Return the data without class maps, for object detection and instance segmentation.

    Objects have masks if those of the first annotated image have. Raises DataError for data without annotations, and
    for class maps without objects.
    """
    require_annotations(data, "boxes, such as COCO JSON, Pascal VOC or YOLO txt")
    first_target = find_first_target(data.splits.values())
    if first_target is not None and first_target.classes is not None and not len(first_target):
        hint = "train a segmentation model: --recipe segment"
        raise DataError(f"{data.name} has class maps but no objects", hint)
    return wrap_splits(
        data, lambda split: ObjectSplit(split, first_target is not None and first_target.layers is not None)
    )


def with_object_masks(data: Data, masks: bool) -> Data:
    """Return data from `keep_object_targets` with the object masks kept, or dropped unless `masks`. Raises DataError if
    masks are required but missing."""
    if masks and not has_object_masks(data):
        raise DataError(f"{data.name} has boxes but no masks", BOXES_ONLY_HINT)
    return wrap_splits(data, lambda split: replace(split, masks=masks))  # type: ignore[type-var]


def has_object_masks(data: Data) -> bool:
    """Return whether data are from `keep_object_targets`, with object masks."""
    return all(isinstance(split, ObjectSplit) and split.masks for split in data.splits.values())


def wrap_splits(data: Data, change: Callable[[AnnotatedSplit], Split]) -> Data:
    """Return the data with `change` applied to every split."""
    splits: dict[str, Split] = {name: change(split) for name, split in data.splits.items()}  # type: ignore[arg-type]
    full = data.full_train_split
    return replace(data, splits=splits, full_train_split=None if full is None else change(full))  # type: ignore[arg-type]


def require_annotations(data: Data, hint: str) -> None:
    """Raise DataError for data without annotations; `hint` describes suitable data."""
    if not all(isinstance(split, AnnotatedSplit) for split in data.splits.values()):
        raise DataError(f"{data.name} has no boxes, masks or class maps", f"use data with {hint}")


def find_first_target(splits: Iterable[Split]) -> Target | None:
    """Return the first target with a class map or with an object in the splits; None if there is none. Unreadable
    targets are skipped."""
    for split in splits:
        assert isinstance(split, AnnotatedSplit)
        for sample in range(len(split)):
            try:
                target = split.target(sample)
            except DataError:
                continue
            if target.classes is not None or len(target):
                return target
    return None
