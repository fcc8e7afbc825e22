"""Object detection and instance segmentation: boxes, and masks, of objects."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Self

from vitreous.errors import WeightsError
from vitreous.tasks.base import Task


@dataclass(frozen=True)
class Detection(Task):
    """Objects of named classes: `classes` in the order of their numbers; `masks`: each has a mask beside its box."""

    name: ClassVar[str] = "detection"
    does: ClassVar[str] = "finds objects"
    hub_task: ClassVar[str] = "object-detection"
    evaluate_options: ClassVar[frozenset[str]] = frozenset(("tiles",))
    protocol: ClassVar[str] = "coco"
    leading: ClassVar[str] = "ap"  # type: ignore[misc]

    classes: tuple[str, ...]
    masks: bool = False

    def settings(self) -> dict[str, Any]:
        """The names of the classes, and whether there are masks."""
        return {"classes": list(self.classes), "masks": self.masks}

    @classmethod
    def from_settings(cls, description: dict[str, Any], classes: tuple[str, ...], origin: str) -> Self:
        """The detection of a description. Raises WeightsError for `masks` that are neither true nor false."""
        masks = description.get("masks", False)
        if not isinstance(masks, bool):
            raise WeightsError(f"{origin}: masks {masks}", "it is true or false")
        return cls(classes, masks)

    @property
    def summary(self) -> str:
        """How many classes."""
        return f"finds objects of {len(self.classes)} classes"
