"""The task of feature extraction, for models without a head."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar, Self

import numpy as np

from vitreous.tasks.base import ExportRules, Task

MIN_COSINE = 0.99  # minimum cosine similarity of features that count as equal


@dataclass(frozen=True)
class FeatureExtraction(Task):
    """The task of a model without a head: one feature vector per image, the input of a head."""

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
        """Return an empty list of classes, so that readers without task support load the model as one without a
        head."""
        return {"classes": []}

    @classmethod
    def from_settings(cls, settings: dict[str, Any], classes: tuple[str, ...], origin: str) -> Self:
        """Create the task. It has no settings, so all arguments are ignored."""
        return cls()

    @property
    def summary(self) -> str:
        """The task as text: "extracts features; it has no head"."""
        return "extracts features; it has no head"

    @property
    def missing_outputs(self) -> tuple[str, str]:
        """Return the reason why there are no outputs, the missing head, and a hint."""
        problem = "has no head: it extracts features, not classes"
        return problem, "use `vitreous embed` or the method embed, or train a head"

    def compute(self, engine: Any, pixels: np.ndarray) -> np.ndarray:
        """Compute features (B, D) of pixels (B, C, *image)."""
        return engine.features(pixels)

    def output_shape(self, image_size: tuple[int, ...]) -> tuple[int | None, ...]:
        """Return the shape (D,) of the features of an image, whose length is not known."""
        return (None,)

    def measure_agreement(self, ours: np.ndarray, theirs: np.ndarray) -> float:
        """Return the share of images whose features (n, D) have a cosine of at least `MIN_COSINE` between a model and
        its export."""
        norms = np.linalg.norm(ours, axis=1) * np.linalg.norm(theirs, axis=1)
        return float(((ours * theirs).sum(1) >= MIN_COSINE * norms).mean())
