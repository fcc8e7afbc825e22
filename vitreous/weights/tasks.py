"""What a model answers: one frozen dataclass per task, and how `model.json` and exported files describe it."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, get_args

from vitreous.errors import WeightsError
from vitreous.generation.process import Diffusion, Process, process_from_json, process_to_json

Loss = Literal["softmax", "sigmoid", "binary"]
LOSSES: tuple[str, ...] = get_args(Loss)


@dataclass(frozen=True)
class Classification:
    """Logits of named classes: `classes` in their order.

    `multilabel`: an image may have any number of the classes. `loss`: what the model was trained with, which decides
    how logits become probabilities. `temperature`, above 0: what logits are divided by before that.
    """

    name: ClassVar[str] = "classification"
    classes: tuple[str, ...]
    multilabel: bool = False
    loss: Loss = "softmax"
    temperature: float = 1.0

    def settings(self) -> dict[str, Any]:
        """The fields under their names in files, which are older than tasks."""
        return {
            "classes": list(self.classes),
            "loss": self.loss,
            "multilabel": self.multilabel,
            "temperature": self.temperature,
        }


@dataclass(frozen=True)
class Features:
    """A vector per image, what a head would read."""

    name: ClassVar[str] = "features"

    def settings(self) -> dict[str, Any]:
        """No classes: so readers that know no tasks take it for a model without a head."""
        return {"classes": []}


@dataclass(frozen=True)
class Segmentation:
    """Logits of named classes for every pixel: `classes` in their order."""

    name: ClassVar[str] = "segmentation"
    classes: tuple[str, ...]

    def settings(self) -> dict[str, Any]:
        """The names of the classes."""
        return {"classes": list(self.classes)}


@dataclass(frozen=True)
class Detection:
    """Objects of named classes: `classes` in the order of their numbers; `masks`: each has a mask beside its box."""

    name: ClassVar[str] = "detection"
    classes: tuple[str, ...]
    masks: bool = False

    def settings(self) -> dict[str, Any]:
        """The names of the classes, and whether there are masks."""
        return {"classes": list(self.classes), "masks": self.masks}


@dataclass(frozen=True)
class Generation:
    """Images of named classes: `classes` in the order of their numbers, none where images are of one kind; `process`:
    how noise was added to the images that the model learned from; `autoencoder`: of what folder or `hf:` name these
    were latents, "" where they were not, or it is not known."""

    name: ClassVar[str] = "generation"
    classes: tuple[str, ...] = ()
    process: Process = field(default_factory=Diffusion)
    autoencoder: str = ""

    def settings(self) -> dict[str, Any]:
        """The names of the classes, the process, and the autoencoder, if any."""
        latents = {"autoencoder": self.autoencoder} if self.autoencoder else {}
        return {"classes": list(self.classes), "process": process_to_json(self.process), **latents}


Task = Classification | Features | Segmentation | Detection | Generation
#: names of tasks that files may have; a file of another one needs a newer vitreous
TASKS: dict[str, type[Task]] = {
    kind.name: kind for kind in (Classification, Features, Segmentation, Detection, Generation)
}


def task_of(config: Any, classes: tuple[str, ...]) -> Task:
    """The task of weights that no description belongs to, whose model has this config and these classes."""
    if config.finds_objects:
        return Detection(classes, config.masks)
    if config.generates_images:
        return Generation(classes)
    return Classification(classes) if classes else Features()


def task_to_json(task: Task) -> dict[str, Any]:
    """The task as keys of a description: its name, and its settings beside it."""
    return {"task": {"name": task.name}, **task.settings()}


def task_from_json(description: dict[str, Any], origin: str) -> Task:
    """The task of a description; one without a `task` key has classes or is one of features.

    Raises WeightsError, naming `origin`, for an unknown task and for settings that no task has.
    """
    classes = description.get("classes")
    if not isinstance(classes, list | tuple) or not all(isinstance(name, str) for name in classes):
        raise WeightsError(f"{origin}: classes {classes}", "they are a list of names")
    tag = description.get("task", {"name": "classification" if classes else "features"})
    name = tag.get("name") if isinstance(tag, dict) else None
    if name not in TASKS:
        raise WeightsError(f"{origin}: task {name} is not one of {', '.join(TASKS)}", "install a newer vitreous")
    if name == Features.name:
        return Features()
    if name == Segmentation.name:
        return Segmentation(tuple(classes))
    if name == Generation.name:
        autoencoder = description.get("autoencoder", "")
        if not isinstance(autoencoder, str):
            raise WeightsError(f"{origin}: autoencoder {autoencoder}", "it is a folder or an hf: name")
        return Generation(tuple(classes), process_from_json(description.get("process"), origin), autoencoder)
    if name == Detection.name:
        masks = description.get("masks", False)
        if not isinstance(masks, bool):
            raise WeightsError(f"{origin}: masks {masks}", "it is true or false")
        return Detection(tuple(classes), masks)
    loss, multilabel = description.get("loss", "softmax"), description.get("multilabel", False)
    temperature = description.get("temperature", 1.0)
    if loss not in LOSSES or not isinstance(multilabel, bool):
        raise WeightsError(
            f"{origin}: loss {loss}, multilabel {multilabel}", f"there are {', '.join(LOSSES)}; true, false"
        )
    if isinstance(temperature, bool) or not isinstance(temperature, int | float) or not 0 < temperature < math.inf:
        raise WeightsError(f"{origin}: temperature {temperature}", "it is a number above 0; 1 changes nothing")
    return Classification(tuple(classes), multilabel, loss, float(temperature))


class WithTask:
    """Shorthands for the settings of `self.task`; a model of features has no classes."""

    task: Task

    @property
    def classification(self) -> Classification:
        """The task, or a classification of no classes."""
        return self.task if isinstance(self.task, Classification) else Classification(())

    @property
    def classes(self) -> tuple[str, ...]:
        """Class names in the order of the logits."""
        return self.classification.classes

    @property
    def pixel_classes(self) -> tuple[str, ...]:
        """Names of the classes that pixels get; none of a model that answers for whole images."""
        return self.task.classes if isinstance(self.task, Segmentation) else ()

    @property
    def object_classes(self) -> tuple[str, ...]:
        """Names of the classes of objects; none of a model that answers otherwise than with objects."""
        return self.task.classes if isinstance(self.task, Detection) else ()

    @property
    def generated_classes(self) -> tuple[str, ...]:
        """Names of the classes that images are made of; none of a model that makes none, or of one kind."""
        return self.task.classes if isinstance(self.task, Generation) else ()

    @property
    def makes_images(self) -> bool:
        """Whether the model makes images, rather than reads them."""
        return isinstance(self.task, Generation)

    @property
    def multilabel(self) -> bool:
        """Whether an image may have any number of the classes."""
        return self.classification.multilabel

    @property
    def loss(self) -> Loss:
        """The loss that the model was trained with."""
        return self.classification.loss

    @property
    def temperature(self) -> float:
        """What logits are divided by."""
        return self.classification.temperature
