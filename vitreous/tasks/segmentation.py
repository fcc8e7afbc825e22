"""The task of semantic segmentation: a class for every pixel."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Self

import numpy as np

from vitreous.config import is_list
from vitreous.tasks.base import PredictionOptions, Task

if TYPE_CHECKING:
    from collections.abc import Callable


@dataclass(frozen=True)
class Segmentation(Task):
    """The task of semantic segmentation: per-pixel logits of named `classes`, in the order of the logits."""

    name: ClassVar[str] = "segmentation"
    verb_phrase: ClassVar[str] = "segments images"
    hub_task: ClassVar[str] = "image-segmentation"
    endpoint: ClassVar[str] = "segment"
    inspectable: ClassVar[bool] = False
    is_dense: ClassVar[bool] = True
    predict_options: ClassVar[frozenset[str]] = frozenset(("overlay",))
    export_tolerance: ClassVar[float] = 0.001  # the two highest logits of a pixel may be nearly equal
    primary: ClassVar[str] = "miou"
    evaluate_options: ClassVar[frozenset[str]] = frozenset(("boundary",))
    protocol: ClassVar[str] = "miou"

    classes: tuple[str, ...]

    @classmethod
    def example_command(cls, run: str, clips: bool) -> str:
        """Return a command that saves the class maps to a folder."""
        return f"{super().example_command(run, clips)} --out FOLDER"

    def settings(self) -> dict[str, Any]:
        """Return the class names by their key in files."""
        return {"classes": list(self.classes)}

    @classmethod
    def from_settings(cls, settings: dict[str, Any], classes: tuple[str, ...], origin: str) -> Self:
        """Create a segmentation task from stored settings."""
        return cls(classes)

    @property
    def summary(self) -> str:
        """The task with the number of classes: "segments images into 150 classes"."""
        return f"segments images into {len(self.classes)} classes"

    @property
    def overlay_classes(self) -> tuple[str, ...]:
        """The classes that are drawn over images: all classes."""
        return self.classes

    def predict_images(
        self, predictor: Any, images: Any, options: PredictionOptions, bad_images: str, on_images: Callable[[int], None]
    ) -> Any:
        """Segment images: a `ClassMap` for each image. Raises UsageError for options that only classifiers support."""
        self.check_predict_keywords(predictor.card.name, options)
        maps = predictor.segment(images, bad_images=bad_images)
        on_images(len(maps) if is_list(maps) else 1)
        return maps

    def output_shape(self, image_size: tuple[int, ...]) -> tuple[int | None, ...]:
        """Return the shape of the logits of an image, (K, *image)."""
        return (len(self.classes), *image_size)

    def measure_agreement(self, ours: np.ndarray, theirs: np.ndarray) -> float:
        """Return the share of pixels with the same class, from the logits (n, K, *image) of a model and of its exported
        file."""
        return float((ours.argmax(1) == theirs.argmax(1)).mean())

    def count_labels(self, labels: np.ndarray, cells: np.ndarray) -> np.ndarray:
        """Count the pixels of each class, (K,) int64, from the `Report.confusion_cells` (m, 3)."""
        return np.bincount(cells[:, 0], cells[:, 2], len(self.classes)).astype(np.int64)
