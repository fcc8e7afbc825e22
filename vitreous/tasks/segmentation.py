"""Semantic segmentation: a class for every pixel."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Self

from vitreous.tasks.base import Task


@dataclass(frozen=True)
class Segmentation(Task):
    """Logits of named classes for every pixel: `classes` in their order."""

    name: ClassVar[str] = "segmentation"
    does: ClassVar[str] = "gives a class to every pixel"
    hub_task: ClassVar[str] = "image-segmentation"
    evaluate_options: ClassVar[frozenset[str]] = frozenset(("boundary",))
    protocol: ClassVar[str] = "miou"
    leading: ClassVar[str] = "miou"  # type: ignore[misc]

    classes: tuple[str, ...]

    def settings(self) -> dict[str, Any]:
        """The names of the classes."""
        return {"classes": list(self.classes)}

    @classmethod
    def from_settings(cls, description: dict[str, Any], classes: tuple[str, ...], origin: str) -> Self:
        """The segmentation of a description."""
        return cls(classes)

    @property
    def summary(self) -> str:
        """How many classes."""
        return f"gives each pixel one of {len(self.classes)} classes"
