"""Features: a model without a head."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar, Self

import numpy as np

from vitreous.tasks.base import ExportRules, Task

MIN_COSINE = 0.99  # of features that count as the same


@dataclass(frozen=True)
class FeatureExtraction(Task):
    """A vector per image: the input of a head."""

    name: ClassVar[str] = "features"
    does: ClassVar[str] = "gives features"
    hub_task: ClassVar[str] = "image-feature-extraction"
    verb: ClassVar[str] = "embed"
    endpoint: ClassVar[str] = "embed"
    has_head: ClassVar[bool] = False
    export_rules: ClassVar[ExportRules] = ExportRules(outputs="features")
    leading: ClassVar[str] = "rankme"

    classes: tuple[str, ...] = field(default=(), init=False, repr=False)

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

    @property
    def missing_outputs(self) -> tuple[str, str]:
        """That there is no head."""
        problem = "has no head: it gives features, not classes"
        return problem, "use `vitreous embed` or embed, or train a head"

    def compute(self, engine: Any, pixels: np.ndarray) -> np.ndarray:
        """(B, C, *image) pixels -> (B, D) features."""
        return engine.features(pixels)

    def output_shape(self, image: tuple[int, ...]) -> tuple[int | None, ...]:
        """(D,), whatever it is."""
        return (None,)

    def measure_agreement(self, ours: np.ndarray, theirs: np.ndarray) -> float:
        """(n, D) features of both -> the share of images with a cosine of at least `MIN_COSINE`."""
        norms = np.linalg.norm(ours, axis=1) * np.linalg.norm(theirs, axis=1)
        return float(((ours * theirs).sum(1) >= MIN_COSINE * norms).mean())
