"""Choose the task of a run for which no recipe is named, from what is known of the images: labels or annotations."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from vitreous.data.annotations.learnable import find_unlearnable
from vitreous.data.annotations.painted import first_target
from vitreous.data.annotations.target import AnnotatedSplit, Target, axes_of
from vitreous.data.split import Data
from vitreous.errors import UsageError
from vitreous.recipes.options import TrainOptions

#: options of `train` that classification alone has
CLASSIFICATION_OPTIONS = ("lr_grid", "loss", "class_weights", "label_smoothing", "mixup", "cutmix")


def choose_recipe(data: Data, options: TrainOptions, note: Callable[[str], None]) -> TrainOptions:
    """Return the options with the recipe of the task of the annotations, where the images have any and no recipe is
    named; else the options as they are. `note` is given the choice and how to choose otherwise.

    Raises DataError for annotations of which nothing can be learned, and UsageError for options that classification
    alone has, and for class folders beside annotations that they do not use.
    """
    if options.recipe is not None:
        return options
    classify = f"--recipe {'finetune' if options.init else 'photos'}"
    if data.unread_annotations is not None:
        problem = f"{data.name} has class folders, and annotations in {data.unread_annotations} that they do not use"
        hint = f"use {classify} to classify whole images, or train on the annotations: {data.unread_annotations}"
        raise UsageError(problem, hint)
    split = data.whole or data.split("train")
    if not isinstance(split, AnnotatedSplit):
        return options
    target = first_target(data)
    if target is None and (error := find_unlearnable(data)) is not None:
        raise error
    found, task, recipe, others = describe_task(target)
    if axes_of(split) == 2:
        others = (*others, f"for multi-label classification use {classify}")
    for name in CLASSIFICATION_OPTIONS:
        if getattr(options, name) is not None:
            problem = f"--{name.replace('_', '-')} is for classification, and {data.name} has {found}"
            raise UsageError(problem, f"leave it out, or add {classify} to classify whole images")
    note("; ".join([f"{data.name} has {found}: training {task} (--recipe {recipe})", *others]))
    return replace(options, recipe=recipe)


def describe_task(target: Target | None) -> tuple[str, str, str, tuple[str, ...]]:
    """Return the kind of annotations of a first target, the task that they are for, its recipe, and how to choose
    another task."""
    if target is not None and target.classes is not None:
        others = ("for instance segmentation use --recipe detect",) if len(target) else ()
        found = "class maps and objects" if len(target) else "class maps"
        return found, "semantic segmentation", "segment", others
    if target is not None and target.layers is not None:
        other = "for semantic segmentation use --recipe segment"
        return "masks of objects", "instance segmentation", "detect", (other,)
    return "boxes", "object detection", "detect", ()
