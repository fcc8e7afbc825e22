"""Classification: one class, or several, for an image."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Self, get_args

from vitreous.errors import WeightsError
from vitreous.tasks.base import Task

Loss = Literal["softmax", "sigmoid", "binary"]
LOSSES: tuple[str, ...] = get_args(Loss)


@dataclass(frozen=True)
class Classification(Task):
    """Logits of named classes: `classes` in their order.

    `multilabel`: an image may have any number of the classes. `loss`: what the model was trained with, which decides
    how logits become probabilities. `temperature`, above 0: what logits are divided by before that.
    """

    name: ClassVar[str] = "classification"
    does: ClassVar[str] = "names classes of images"
    hub_task: ClassVar[str] = "image-classification"

    classes: tuple[str, ...]
    multilabel: bool = False
    loss: Loss = "softmax"
    temperature: float = 1.0

    def settings(self) -> dict[str, Any]:
        """The fields under their names in files."""
        return {
            "classes": list(self.classes),
            "loss": self.loss,
            "multilabel": self.multilabel,
            "temperature": self.temperature,
        }

    @classmethod
    def from_settings(cls, description: dict[str, Any], classes: tuple[str, ...], origin: str) -> Self:
        """The classification of a description. Raises WeightsError for another loss or temperature."""
        loss, multilabel = description.get("loss", "softmax"), description.get("multilabel", False)
        temperature = description.get("temperature", 1.0)
        if loss not in LOSSES or not isinstance(multilabel, bool):
            raise WeightsError(
                f"{origin}: loss {loss}, multilabel {multilabel}", f"there are {', '.join(LOSSES)}; true, false"
            )
        if isinstance(temperature, bool) or not isinstance(temperature, int | float) or not 0 < temperature < math.inf:
            raise WeightsError(f"{origin}: temperature {temperature}", "it is a number above 0; 1 changes nothing")
        return cls(classes, multilabel, loss, float(temperature))

    @property
    def outputs(self) -> tuple[str, ...]:
        """The classes."""
        return self.classes

    @property
    def summary(self) -> str:
        """How many classes, and whether an image has several."""
        return f"names one of {len(self.classes)} classes" + ", or several" * self.multilabel
