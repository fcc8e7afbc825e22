"""The table of all tasks, and the description of a task in `model.json` and exported files."""

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

#: task names that this version can read; files of other tasks need a newer vitreous
TASKS: dict[str, type[Task]] = {
    kind.name: kind for kind in (Classification, FeatureExtraction, Segmentation, Detection, Generation, Regression)
}


def infer_task(config: Any, classes: tuple[str, ...]) -> Task:
    """Infer the task of weights without a description from the model's config and classes."""
    if config.finds_objects:
        return Detection(classes, config.masks)
    if config.generates_images:
        return Generation(classes)
    return Classification(classes) if classes else FeatureExtraction()


def task_of_run(config: Any, run: Mapping[str, Any], origin: str) -> Task:
    """Create the task of an unfinished run from its model config and the mapping in its config.yaml. Raises
    WeightsError, naming `origin`, for settings that the task does not have."""
    objective, data = run["objective"], run["data"]
    names = tuple(data["classes"]) if config.classes else ()
    task_class = TASKS.get(objective["name"]) or type(infer_task(config, names))
    return task_class.from_run({**objective, "targets": data.get("targets", [])}, names, origin)


def replace_task_classes(task: Task, classes: tuple[str, ...]) -> Task:
    """Return the task of a model whose head has other `classes`: without classes it becomes feature extraction, and
    feature extraction with classes becomes classification."""
    if isinstance(task, Classification | Generation):
        changed = replace(task, classes=classes)
    else:
        changed = Classification(classes)
    return changed if classes or isinstance(task, Generation) else FeatureExtraction()


def task_to_json(task: Task) -> dict[str, Any]:
    """Return the task as keys of a description: its name and its settings."""
    return {"task": {"name": task.name}, **task.settings()}


def task_to_card(task: Task) -> dict[str, Any]:
    """Return the task as keys of a card: those of a description, but without the name of a classification."""
    document = task_to_json(task)
    if isinstance(task, Classification):
        del document["task"]
    return document


def list_task_keys(task: Task) -> set[str]:
    """List the keys of a card that describe the task, including those of earlier cards without a task name."""
    return {*task_to_json(task), *task_to_json(Classification(()))}


def task_from_json(description: dict[str, Any], origin: str) -> Task:
    """Create the task of a description; without a `task` key it is a classification, or features without classes.

    Raises WeightsError, naming `origin`, for an unknown task and for invalid settings.
    """
    classes: Json | tuple[Any, ...] = description.get("classes")
    if not isinstance(classes, list | tuple) or not all(isinstance(name, str) for name in classes):
        raise WeightsError(f"{origin}: classes {classes}", "classes must be a list of names")
    tag: Json = description.get("task", {"name": "classification" if classes else "features"})
    name = tag.get("name") if isinstance(tag, dict) else None
    if name not in TASKS:
        raise WeightsError(f"{origin}: task {name} is not one of {', '.join(TASKS)}", "install a newer vitreous")
    return TASKS[name].from_settings(description, tuple(classes), origin)


class TaskMixin:
    """Shortcuts to the classification in `self.task`; other tasks have no classes, and a temperature of 1."""

    task: Task

    @property
    def classification(self) -> Classification:
        """The task, or a classification without classes."""
        return self.task if isinstance(self.task, Classification) else Classification(())

    @property
    def classes(self) -> tuple[str, ...]:
        """The class names in the order of the logits."""
        return self.classification.classes
