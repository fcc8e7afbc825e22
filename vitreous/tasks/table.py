"""The one table of tasks, and how `model.json` and exported files describe a task."""

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

#: names of tasks that files may have; a file of another one needs a newer vitreous
TASKS: dict[str, type[Task]] = {
    kind.name: kind for kind in (Classification, FeatureExtraction, Segmentation, Detection, Generation, Regression)
}


def infer_task(config: Any, classes: tuple[str, ...]) -> Task:
    """The task of weights that no description belongs to, whose model has this config and these classes."""
    if config.finds_objects:
        return Detection(classes, config.masks)
    if config.generates_images:
        return Generation(classes)
    return Classification(classes) if classes else FeatureExtraction()


def task_of_run(config: Any, run: Mapping[str, Any], origin: str) -> Task:
    """The task of a run that has not finished, whose model has this config, by the mapping in its config.yaml. Raises
    WeightsError, naming `origin`, for settings that the task does not have."""
    objective, data = run["objective"], run["data"]
    names = tuple(data["classes"]) if config.classes else ()
    kind = TASKS.get(objective["name"]) or type(infer_task(config, names))
    return kind.from_run({**objective, "targets": data.get("targets", [])}, names, origin)


def replace_task_classes(task: Task, classes: tuple[str, ...]) -> Task:
    """The task of a model whose head has other `classes`: a head without classes is none, and features with a head
    become a classification."""
    if isinstance(task, Classification | Generation):
        changed = replace(task, classes=classes)
    else:
        changed = Classification(classes)
    return changed if classes or isinstance(task, Generation) else FeatureExtraction()


def task_to_json(task: Task) -> dict[str, Any]:
    """The task as keys of a description: its name, and its settings beside it."""
    return {"task": {"name": task.name}, **task.settings()}


def task_to_card(task: Task) -> dict[str, Any]:
    """The task as keys of a card: those of a description, but for a classification's name."""
    document = task_to_json(task)
    if isinstance(task, Classification):
        del document["task"]
    return document


def list_task_keys(task: Task) -> set[str]:
    """The keys of a card that are the task's, or may be of an earlier one without a name."""
    return {*task_to_json(task), *task_to_json(Classification(()))}


def task_from_json(description: dict[str, Any], origin: str) -> Task:
    """The task of a description; one without a `task` key has classes or is one of features.

    Raises WeightsError, naming `origin`, for an unknown task and for settings that no task has.
    """
    classes: Json | tuple[Any, ...] = description.get("classes")
    if not isinstance(classes, list | tuple) or not all(isinstance(name, str) for name in classes):
        raise WeightsError(f"{origin}: classes {classes}", "they are a list of names")
    tag: Json = description.get("task", {"name": "classification" if classes else "features"})
    name = tag.get("name") if isinstance(tag, dict) else None
    if name not in TASKS:
        raise WeightsError(f"{origin}: task {name} is not one of {', '.join(TASKS)}", "install a newer vitreous")
    return TASKS[name].from_settings(description, tuple(classes), origin)


class TaskMixin:
    """Shorthands for a classification in `self.task`; other tasks have no classes, and a temperature of 1."""

    task: Task

    @property
    def classification(self) -> Classification:
        """The task, or a classification of no classes."""
        return self.task if isinstance(self.task, Classification) else Classification(())

    @property
    def classes(self) -> tuple[str, ...]:
        """Class names in the order of the logits."""
        return self.classification.classes
