"""Features: a model without a head."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Self

from vitreous.tasks.base import Task


@dataclass(frozen=True)
class Features(Task):
    """A vector per image: the input of a head."""

    name: ClassVar[str] = "features"
    does: ClassVar[str] = "gives features"
    hub_task: ClassVar[str] = "image-feature-extraction"
    leading: ClassVar[str] = "rankme"  # type: ignore[misc]

    def settings(self) -> dict[str, Any]:
        """No classes: so readers that know no tasks take it for a model without a head."""
        return {"classes": []}

    @classmethod
    def from_settings(cls, description: dict[str, Any], classes: tuple[str, ...], origin: str) -> Self:
        """The task, which has no settings."""
        return cls()

    @property
    def summary(self) -> str:
        """That there is no head."""
        return "gives features; it has no head"
