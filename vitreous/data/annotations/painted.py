"""Targets as an objective takes them: class maps, painted where objects have masks alone, or objects alone."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any, Self

import numpy as np

from vitreous.data.annotations.target import IGNORE_INDEX, AnnotatedSplit, Target, stack_masks
from vitreous.data.decoding.spectral import BAND_SUFFIXES, decode_void_mask
from vitreous.data.split import Data, Split
from vitreous.errors import DataError

BACKGROUND_CLASS = "background"
BOXES_ONLY_HINT = "learn boxes alone: --objective.masks false"


@dataclass(frozen=True, eq=False)
class TargetSplitWrapper:
    """A split whose targets are changed when they are read."""

    split: AnnotatedSplit

    @property
    def labels(self) -> np.ndarray:
        """(n, K) float32, 1 for each class that an image holds."""
        return self.split.labels

    def __len__(self) -> int:
        return len(self.split)

    def raw(self, sample: int) -> bytes | np.ndarray:
        """The bytes of an image file, or pixels (H, W[, C]). Raises DataError."""
        return self.split.raw(sample)

    def name(self, sample: int) -> str:
        return self.split.name(sample)

    def take(self, rows: np.ndarray, labels: np.ndarray | None = None) -> Self:
        """The samples at these positions (m,), in this order."""
        return replace(self, split=self.split.take(rows))

    def update(self, digest: Any) -> None:
        self.split.update(digest)

    def target(self, sample: int) -> Target:
        """Read what is on an image. Raises DataError."""
        return self.split.target(sample)


@dataclass(frozen=True, eq=False)
class ClassMapSplit(TargetSplitWrapper):
    """A split whose targets have class maps, painted from masks: class 0 is the background, then those of the data."""

    @property
    def labels(self) -> np.ndarray:
        """(n, 1 + K) float32, 1 for each class that an image holds; the background is one."""
        own = self.split.labels
        return np.concatenate([np.ones((len(own), 1), np.float32), own], 1)

    def target(self, sample: int) -> Target:
        """Read what is on an image, with a class map. Raises DataError."""
        own = self.split.target(sample)
        own = replace(own, labels=own.labels + 1)
        classes = own.class_map(background=0)
        if self.split.name(sample).lower().endswith(BAND_SUFFIXES):
            void = decode_void_mask(self.split.raw(sample), self.split.name(sample))
            classes = classes if void is None else np.where(void, np.int32(IGNORE_INDEX), classes)
        return replace(own, classes=classes)


@dataclass(frozen=True, eq=False)
class ObjectSplit(TargetSplitWrapper):
    """A split whose targets are objects alone, with masks or with boxes alone as `masks` says."""

    masks: bool

    def target(self, sample: int) -> Target:
        """Read what is on an image. Raises DataError, where masks are asked for, for an image that has boxes alone."""
        own = replace(self.split.target(sample), classes=None)
        if not self.masks:
            return own.without_masks()
        if own.layers is None and len(own):
            raise DataError(f"{self.split.name(sample)} has objects without masks", BOXES_ONLY_HINT)
        return own if own.layers is not None else replace(own, layers=stack_masks([], own.size))


def paint_class_maps(data: Data) -> Data:
    """Return the data with a class map for every image: as they are where the first image has one, else painted from
    the masks of its objects, with a class for the background in front.

    Raises DataError for data without annotations, and for objects that have boxes alone.
    """
    require_annotations(data, "masks, such as a folder with images/ and masks/")
    first = find_first_target(data.splits.values())
    if first is None or first.classes is not None:
        return data
    if first.layers is None:
        raise DataError(f"{data.name} has boxes, no masks", "learn the boxes: --recipe detect")
    return replace(wrap_splits(data, ClassMapSplit), classes=(BACKGROUND_CLASS, *data.classes))


def keep_object_targets(data: Data) -> Data:
    """Return the data with targets that are objects alone, with masks if the first image with objects has them.

    Raises DataError for data without annotations, and for those that have class maps and no objects.
    """
    require_annotations(data, "boxes, such as COCO JSON, Pascal VOC or YOLO txt")
    first = find_first_target(data.splits.values())
    if first is not None and first.classes is not None and not len(first):
        hint = "learn the classes of pixels: --recipe segment"
        raise DataError(f"{data.name} has a class for every pixel, and no objects", hint)
    return wrap_splits(data, lambda split: ObjectSplit(split, first is not None and first.layers is not None))


def with_object_masks(data: Data, masks: bool) -> Data:
    """Return data of `keep_object_targets` with masks of objects, or without. Raises DataError for masks that are
    missing."""
    if masks and not has_object_masks(data):
        raise DataError(f"{data.name} has boxes, no masks", BOXES_ONLY_HINT)
    return wrap_splits(data, lambda split: replace(split, masks=masks))  # type: ignore[type-var]


def has_object_masks(data: Data) -> bool:
    """Whether the targets of data are objects with masks."""
    return all(isinstance(split, ObjectSplit) and split.masks for split in data.splits.values())


def wrap_splits(data: Data, change: Callable[[AnnotatedSplit], Split]) -> Data:
    """Return the data with every split changed."""
    splits: dict[str, Split] = {name: change(split) for name, split in data.splits.items()}  # type: ignore[arg-type]
    return replace(data, splits=splits, whole=None if data.whole is None else change(data.whole))  # type: ignore[arg-type]


def require_annotations(data: Data, hint: str) -> None:
    """Raise DataError for data without annotations; `hint`: what to name."""
    if not all(isinstance(split, AnnotatedSplit) for split in data.splits.values()):
        raise DataError(f"{data.name} does not say what is where on its images", f"name data with {hint}")


def find_first_target(splits: Iterable[Split]) -> Target | None:
    """Return the first target of splits with a class map or with objects; None where there is none.
    Images whose target cannot be read are left to whoever reads them."""
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
