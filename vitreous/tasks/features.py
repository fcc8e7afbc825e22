"""Feature extraction: the task of a model without a head."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar, Self

import numpy as np

from vitreous.tasks.base import ExportRules, Task

MIN_COSINE = 0.99  # features with at least this cosine count as equal


@dataclass(frozen=True)
class FeatureExtraction(Task):
    """One feature vector per image: the input of a head."""

    name: ClassVar[str] = "features"
    verb_phrase: ClassVar[str] = "extracts features"
    hub_task: ClassVar[str] = "image-feature-extraction"
    verb: ClassVar[str] = "embed"
    endpoint: ClassVar[str] = "embed"
    has_head: ClassVar[bool] = False
    export_rules: ClassVar[ExportRules] = ExportRules(outputs="features")
    primary: ClassVar[str] = "rankme"

    classes: tuple[str, ...] = field(default=(), init=False, repr=False)

    def settings(self) -> dict[str, Any]:
        """Return no classes, so that readers without task support load it as a model without a head."""
        return {"classes": []}

    @classmethod
    def from_settings(cls, settings: dict[str, Any], classes: tuple[str, ...], origin: str) -> Self:
        """Create the task, which has no settings."""
        return cls()

    @property
    def summary(self) -> str:
        """That the model has no head."""
        return "extracts features; it has no head"

    @property
    def missing_outputs(self) -> tuple[str, str]:
        """Return that the model has no head."""
        problem = "has no head: it extracts features, not classes"
        return problem, "use `vitreous embed` or embed, or train a head"

    def compute(self, engine: Any, pixels: np.ndarray) -> np.ndarray:
        """Compute (B, D) features from (B, C, *image) pixels."""
        return engine.features(pixels)

    def output_shape(self, image_size: tuple[int, ...]) -> tuple[int | None, ...]:
        """Return (D,), of unknown length."""
        return (None,)

    def measure_agreement(self, ours: np.ndarray, theirs: np.ndarray) -> float:
        """Return the share of images whose (n, D) features have a cosine of at least `MIN_COSINE`."""
        norms = np.linalg.norm(ours, axis=1) * np.linalg.norm(theirs, axis=1)
        return float(((ours * theirs).sum(1) >= MIN_COSINE * norms).mean())
