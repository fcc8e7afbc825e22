"""Choose the task of a run without --recipe from the labels or annotations of its images."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from vitreous.data.annotations.learnable import find_unlearnable
from vitreous.data.annotations.painted import find_first_target
from vitreous.data.annotations.target import AnnotatedSplit, Target, get_sample_axes
from vitreous.data.layouts.split_names import has_role_name, parse_split_name
from vitreous.data.pairs import has_pairs
from vitreous.data.split import Data
from vitreous.data.values import are_measurements, describe_targets
from vitreous.errors import UsageError, escape_unprintable
from vitreous.recipes.options import TrainOptions

#: options of `train` that only classification supports
CLASSIFICATION_OPTIONS = ("lr_grid", "loss", "label_smoothing", "mixup", "cutmix")


def choose_recipe(data: Data, options: TrainOptions, note: Callable[[str], None]) -> TrainOptions:
    """Return the options with the recipe for the annotations or numeric labels of the data. Options with a recipe, and
    options for data with class labels, are returned unchanged.

    `note` receives the chosen task and the alternatives. Raises DataError for annotations that cannot be used,
    UsageError for options that only classification supports, and UsageError for ambiguous class folders
    (`check_class_folders`).
    """
    if options.recipe is not None:
        return options
    classify = f"--recipe {'finetune' if options.init else 'photos'}"
    if data.targets or are_measurements(data):
        content = describe_targets(data) if data.targets else describe_measurements(data)
        alternative = "" if data.targets else f"; to learn each number as a class, use {classify}"
        note(f"{data.name} has {content}: training regression (--recipe regression){alternative}")
        return replace(options, recipe="regression")
    if has_pairs(data):
        note(f"{data.name} has captions: training on image-text pairs (--recipe siglip; others: --recipe clip or lit)")
        return replace(options, recipe="siglip")
    split = data.full_train_split or data.split("train")
    if not isinstance(split, AnnotatedSplit):
        check_class_folders(data, classify)
        return options
    target = find_first_target(data.splits.values())
    if target is None and (error := find_unlearnable(data)) is not None:
        raise error
    content, task, recipe, alternatives = describe_task(target)
    if get_sample_axes(split) == 2:
        alternatives = (*alternatives, f"for multi-label classification, use {classify}")
    for name in CLASSIFICATION_OPTIONS:
        if getattr(options, name) is not None:
            option = f"--{name.replace('_', '-')}"
            problem = f"{option} is for classification, and {data.name} has {content}"
            raise UsageError(problem, f"leave {option} out, or add {classify} to classify whole images")
    note("; ".join([f"{data.name} has {content}: training {task} (--recipe {recipe})", *alternatives]))
    return replace(options, recipe=recipe)


def describe_measurements(data: Data) -> str:
    """Describe, for a message, data whose class labels are measurements: the number of distinct values, and an
    example."""
    fraction = next((name for name in data.classes if not float(name).is_integer()), data.classes[-1])
    images = sum(len(split) for split in data.splits.values())
    return f"{len(data.classes):,} different numbers as labels of {images:,} images, such as {fraction}"


def describe_task(target: Target | None) -> tuple[str, str, str, tuple[str, ...]]:
    """Return the annotation type, task name, recipe name, and hints for other tasks, for the annotations of a dataset;
    None for data with boxes."""
    if target is not None and target.classes is not None:
        alternatives = ("for instance segmentation, use --recipe detect",) if len(target) else ()
        content = "class maps and objects" if len(target) else "class maps"
        return content, "semantic segmentation", "segment", alternatives
    if target is not None and target.layers is not None:
        alternative = "for semantic segmentation, use --recipe segment"
        return "masks of objects", "instance segmentation", "detect", (alternative,)
    return "boxes", "object detection", "detect", ()


def check_class_folders(data: Data, classify: str) -> None:
    """Raise UsageError if class folders are ambiguous: if there are annotations that do not use them, or if a class has
    a name like images or masks. `classify` is the option, for the hint, that classifies by folders."""
    if data.unread_annotations is not None:
        problem = f"{data.name} has class folders, and annotations in {data.unread_annotations} that do not use them"
        hint = f"use {classify} to classify whole images, or train on the annotations: {data.unread_annotations}"
        raise UsageError(problem, hint)
    if name := next((name for name in data.classes if has_role_name(name) and parse_split_name(name) is None), None):
        problem = (
            f"{data.name} has class folders, and one of them, {escape_unprintable(name)}, is named like images or masks"
        )
        page = "docs/guides/annotations.md"
        hint = f"use {classify} if it is a class, or arrange images and annotations as {page} describes"
        raise UsageError(problem, hint)
