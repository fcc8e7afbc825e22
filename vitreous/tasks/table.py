"""The table of all tasks, and the conversion of a task to and from its description in `model.json` and exported
files."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from vitreous.config import Json
from vitreous.errors import WeightsError
from vitreous.tasks.base import Task
from vitreous.tasks.classification import Classification
from vitreous.tasks.detection import Detection
from vitreous.tasks.features import FeatureExtraction
from vitreous.tasks.generation import Generation
from vitreous.tasks.regression import Regression
from vitreous.tasks.segmentation import Segmentation

#: tasks that this version supports, by name; files of other tasks require a newer vitreous
TASKS: dict[str, type[Task]] = {
    task_class.name: task_class
    for task_class in (Classification, FeatureExtraction, Segmentation, Detection, Generation, Regression)
}


def infer_task(config: Any, classes: tuple[str, ...]) -> Task:
    """Infer the task of weights that have no description, from the model's config and classes."""
    if config.finds_objects:
        return Detection(classes, config.masks)
    if config.generates_images:
        return Generation(classes)
    return Classification(classes) if classes else FeatureExtraction()


def task_of_run(config: Any, run: Mapping[str, Any], origin: str) -> Task:
    """Create the task of an unfinished run from its model config and the contents of its config.yaml, `run`. Raises
    WeightsError for settings that the task does not support; `origin`, the name of the file, is part of the message."""
    objective, data = run["objective"], run["data"]
    names = tuple(data["classes"]) if config.classes else ()
    task_class = TASKS.get(objective["name"]) or type(infer_task(config, names))
    return task_class.from_run({**objective, "targets": data.get("targets", [])}, names, origin)


def replace_task_classes(task: Task, classes: tuple[str, ...]) -> Task:
    """Return the task of a model whose head is replaced by one for other `classes`.

    Without classes it is feature extraction. Feature extraction with classes becomes classification. Generation stays
    generation.
    """
    if isinstance(task, Classification | Generation):
        new_task = replace(task, classes=classes)
    else:
        new_task = Classification(classes)
    return new_task if classes or isinstance(task, Generation) else FeatureExtraction()


def task_to_json(task: Task) -> dict[str, Any]:
    """Convert a task to the keys of a description in `model.json`: its name and its settings."""
    return {"task": {"name": task.name}, **task.settings()}


def task_to_card(task: Task) -> dict[str, Any]:
    """Convert a task to the keys of a model card: those of a description, but without the name of a classification."""
    document = task_to_json(task)
    if isinstance(task, Classification):
        del document["task"]
    return document


def list_task_keys(task: Task) -> set[str]:
    """List the keys of a model card that describe the task, including those of earlier cards without a task name."""
    return {*task_to_json(task), *task_to_json(Classification(()))}


def task_from_json(description: dict[str, Any], origin: str) -> Task:
    """Create the task of a description in `model.json`. Without the key `task` it is a classification, or feature
    extraction if there are no classes.

    Raises WeightsError for an unknown task and for invalid settings; `origin`, the name of the file, is part of the
    message.
    """
    classes: Json | tuple[Any, ...] = description.get("classes")
    if not isinstance(classes, list | tuple) or not all(isinstance(name, str) for name in classes):
        raise WeightsError(f"{origin}: invalid classes {classes}", "classes must be a list of names")
    tag: Json = description.get("task", {"name": "classification" if classes else "features"})
    name = tag.get("name") if isinstance(tag, dict) else None
    if name not in TASKS:
        raise WeightsError(f"{origin}: task {name} is not one of {', '.join(TASKS)}", "install a newer vitreous")
    return TASKS[name].from_settings(description, tuple(classes), origin)


class TaskMixin:
    """Shortcuts to the classes and temperature of a classification in `self.task`. Other tasks have no classes, and a
    temperature of 1."""

    task: Task

    @property
    def classification(self) -> Classification:
        """The task if it is a classification; otherwise a classification without classes."""
        return self.task if isinstance(self.task, Classification) else Classification(())

    @property
    def classes(self) -> tuple[str, ...]:
        """The class names in the order of the logits."""
        return self.classification.classes
