"""Class maps for data whose objects have masks alone: the pixels of an object are its class, the rest is background."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from vitreous.data.annotations.target import AnnotatedSplit, Target
from vitreous.data.split import Data, Split
from vitreous.errors import DataError

BACKGROUND = "background"


@dataclass(frozen=True, eq=False)
class Painted:
    """A split whose targets have class maps, painted from masks: class 0 is the background, then those of the data."""

    split: AnnotatedSplit

    @property
    def labels(self) -> np.ndarray:
        """(n, 1 + K) float32, 1 for each class that an image holds; the background is one."""
        own = self.split.labels
        return np.concatenate([np.ones((len(own), 1), np.float32), own], 1)

    def __len__(self) -> int:
        return len(self.split)

    def raw(self, sample: int) -> bytes | np.ndarray:
        """The bytes of an image file, or pixels (H, W[, C]). Raises DataError."""
        return self.split.raw(sample)

    def name(self, sample: int) -> str:
        return self.split.name(sample)

    def take(self, rows: np.ndarray, labels: np.ndarray | None = None) -> Painted:
        """The samples at these positions (m,), in this order."""
        return Painted(self.split.take(rows))  # type: ignore[arg-type]

    def update(self, digest: Any) -> None:
        self.split.update(digest)

    def target(self, sample: int) -> Target:
        """Read what is on an image, with a class map. Raises DataError."""
        own = self.split.target(sample)
        own = replace(own, labels=own.labels + 1)
        return replace(own, classes=own.class_map(background=0))


def paint_classes(data: Data) -> Data:
    """Return the data with a class map for every image: as they are where the first image has one, else painted from
    the masks of its objects, with a class for the background in front.

    Raises DataError for data without annotations, and for objects that have boxes alone.
    """
    for split in data.splits.values():
        if not isinstance(split, AnnotatedSplit):
            raise DataError(
                f"{data.name} does not say what is where on its images",
                "name data with masks, such as a folder with images/ and masks/",
            )
    first = first_target(data)
    if first is None or first.classes is not None:
        return data
    if first.layers is None:
        raise DataError(f"{data.name} has boxes, no masks", "segmentation needs masks; boxes are for detection")
    splits: dict[str, Split] = {name: Painted(split) for name, split in data.splits.items()}  # type: ignore[arg-type]
    whole = None if data.whole is None else Painted(data.whole)  # type: ignore[arg-type]
    return replace(data, classes=(BACKGROUND, *data.classes), splits=splits, whole=whole)


def first_target(data: Data) -> Target | None:
    """Return the first target that says anything: one with a class map or with objects; None where there is none.
    Images whose target cannot be read are left to whoever reads them."""
    for split in data.splits.values():
        for sample in range(len(split)):
            try:
                target = split.target(sample)  # type: ignore[attr-defined]
            except DataError:
                continue
            if target.classes is not None or len(target):
                return target
    return None
