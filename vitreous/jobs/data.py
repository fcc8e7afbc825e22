"""Prepare the data of a run: open, split, exclude files, and screen for unreadable images."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import numpy as np

from vitreous.config import set_dotted_paths
from vitreous.data.annotations.learnable import require_learnable
from vitreous.data.annotations.painted import keep_object_targets, paint_class_maps, with_object_masks
from vitreous.data.annotations.target import get_sample_noun
from vitreous.data.buckets import assign_buckets, measure_sample_forms
from vitreous.data.exclusions import find_kept_samples
from vitreous.data.exclusions import read_exclusion_list as names_in
from vitreous.data.options import DataOptions
from vitreous.data.screen import check_unreadable_images, find_readable_samples, screen_images
from vitreous.data.sources import open_data, open_run_source, resolve_source
from vitreous.data.split import ArraySplit, Data, require_labels
from vitreous.data.values import convert_classes_to_values, describe_targets, require_values
from vitreous.errors import DataError, EmptyImageError, UsageError, escape_unprintable
from vitreous.jobs.buckets import check_buckets, select_evaluated_samples
from vitreous.jobs.derive_run import count_scan_workers, derive_run
from vitreous.objectives.base import ObjectiveConfig
from vitreous.progress import ProgressListener
from vitreous.recipes.derive import apply_train_options, get_objective_config
from vitreous.recipes.options import INIT_FROM_SCRATCH, TrainOptions
from vitreous.recipes.task import choose_recipe
from vitreous.training.batches import RunInputs
from vitreous.training.folder import RunFolder
from vitreous.training.run import Run

SUGGESTED_UNLABELLED_RECIPES = ("mae", "dino", "dinov2", "dit")  # recipes suggested for unlabelled images
MAX_SCREENED_IMAGES = 20_000  # largest dataset that is decoded once before training, to list unreadable files


def prepare_data(
    source: str | Data,
    base: Run | None,
    options: TrainOptions,
    listener: ProgressListener,
    folder: RunFolder | None = None,
) -> tuple[Data, Run, RunInputs]:
    """Open the dataset unless it is open, complete the run, and decode every image of a small dataset once.

    The run is derived from the data, or is `base` with the options applied. `folder` is the folder of a run to resume.
    Raises UsageError for conflicting options, DataError for unusable data.
    """
    initial_weights = options.init or (base and base.init)
    if (options.resize or options.source_size) and (not initial_weights or initial_weights == INIT_FROM_SCRATCH):
        message = "--resize and --source-size are for initial weights, and none are set"
        raise UsageError(message, "add --init, or leave them out")
    seed, share, group_by = resolve_split_options(base, options)
    exclude = options.exclude or (base.data.exclude if base else None)
    axes = options.axes or (base.data.axes if base else None)
    ignore_index = options.ignore_index if options.ignore_index is not None or not base else base.data.ignore_index
    use_buckets = options.buckets is not None or bool(base and base.preprocess.has_buckets)
    if isinstance(source, Data):
        opened = source
    else:
        targets = options.targets or (base.data.targets if base else ())
        open_arguments = (source, seed, group_by, use_buckets, axes, ignore_index, tuple(targets))
        opened = open_run_source(folder.path, *open_arguments) if folder else open_data(*open_arguments)
    if base is None:
        options = choose_recipe(opened, options, listener.note)
    objective = base.objective if base else get_objective_config(options)
    if objective.labelled:
        opened = match_label_type(opened, objective, seed, options)
        require_class_labels(opened)
    if objective.of_values:
        require_values(opened)
    if objective.annotated:
        require_learnable(opened, "classes" if objective.annotated == "classes" else "objects")
        opened = {"classes": paint_class_maps, "objects": keep_object_targets}[objective.annotated](opened)
    opened = opened.with_holdout(share, seed)
    for note in opened.notes:
        listener.note(note)
    if exclude:
        excluded_names = json.loads((folder.path / "excluded.json").read_text("utf-8")) if folder else names_in(exclude)
        opened = exclude_images(opened, frozenset(excluded_names), exclude, listener)
    split: dict[str, Any] = {
        "split_seed": seed,
        "hold_out": share,
        "group_by": group_by,
        "axes": axes,
        "exclude": exclude,
    }
    split |= {"ignore_index": ignore_index, "targets": opened.targets}
    workers = count_scan_workers(opened, options)
    if base is None and use_buckets:
        check_buckets(options, opened)
    forms = measure_sample_forms(opened.split("train"), workers) if use_buckets else None
    if base is None:
        run = derive_run(opened, options, split, listener, forms)
    else:
        run = apply_train_options(base, options)
        if folder is None:
            run = replace(run, data=replace(run.data, source=resolve_source(opened.name)))
        if (share, group_by, exclude) != (base.data.hold_out, base.data.group_by, base.data.exclude):
            data = replace(run.data, **split, images=len(opened.split("train")), fingerprint=opened.fingerprint())
            run = replace(run, data=data)
    if run.objective.annotated == "objects":
        opened = with_object_masks(opened, getattr(run.objective, "masks", False))
    return opened, *screen_inputs(opened, run, workers, listener, forms)


def match_label_type(
    opened: Data, objective: ObjectiveConfig | type[ObjectiveConfig], seed: int, options: TrainOptions
) -> Data:
    """Return the data with the label type of the objective; numeric class names become regression values. Raises
    DataError for class names that are not numbers, and UsageError if the data have values but the objective learns
    classes."""
    if objective.of_values:
        return opened if opened.targets else convert_classes_to_values(opened, opened.label_column, seed)
    if opened.targets:
        problem = f"{options.recipe or objective.name} learns classes, but {opened.name} has {describe_targets(opened)}"
        raise UsageError(problem, "use --recipe regression, or leave --recipe out")
    return opened


def require_class_labels(opened: Data) -> None:
    """Raise DataError if the data have no class labels; the hint lists commands that train without labels."""
    try:
        require_labels(opened)
    except DataError as error:
        if opened.labelled or opened.unlearnable:
            raise
        sample_noun = get_sample_noun(opened.splits["train"])
        names = {"images": SUGGESTED_UNLABELLED_RECIPES, "clips": ("videomae",)}.get(
            sample_noun, SUGGESTED_UNLABELLED_RECIPES[:1]
        )
        commands = "".join(f"\n    vitreous train {escape_unprintable(opened.name)} --recipe {name}" for name in names)
        raise DataError(error.message, f"{error.hint}; or train on unlabelled images:{commands}") from None


def screen_inputs(
    opened: Data, run: Run, workers: int, listener: ProgressListener, forms: np.ndarray | None = None
) -> tuple[Run, RunInputs]:
    """Return the run and its inputs without unreadable training images, or raise DataError; cache small images. Every
    image is decoded once if the dataset is small. `forms` (n, 3) are the image forms of a run with buckets: each image
    gets a bucket, and validation images outside the evaluation bucket are dropped."""
    split = opened.split("train")
    cached, bad, readable, val = None, {}, None, opened.splits.get("val")
    is_small = len(split) <= MAX_SCREENED_IMAGES and not isinstance(split, ArraySplit)
    if run.data.cache or run.data.bad_images == "skip" or is_small or run.preprocess.may_be_void:
        cached, bad = screen_images(split, run.preprocess, workers, keep=run.data.cache)
    if bad:
        check_unreadable_images(bad, len(split), run.data.bad_images)
        num_empty = sum(isinstance(error, EmptyImageError) for error in bad.values())
        for count, problem in ((len(bad) - num_empty, "cannot be read"), (num_empty, "have no pixel with data")):
            if count:
                listener.note(f"{count} of {len(split)} training images {problem} and are left out")
        readable = find_readable_samples(split, bad)
        split, cached = split.take(readable), cached[readable] if cached is not None else None
        run = replace(run, data=replace(run.data, images=len(split)))
    if forms is None:
        return run, RunInputs(split, val, cached, readable)
    buckets = assign_buckets(forms if readable is None else forms[readable], run.preprocess)
    return run, RunInputs(
        split, val and select_evaluated_samples(val, run.preprocess, workers), cached, readable, buckets=buckets
    )


def exclude_images(data: Data, names: frozenset[str], exclude_path: str, listener: ProgressListener) -> Data:
    """Drop the named images from the training split. Raises DataError if none remains or none matches."""
    split = data.split("train")
    kept_samples = find_kept_samples(split, names)
    if not len(kept_samples):
        raise DataError(f"{exclude_path} excludes every training image", "check that it lists files of these data")
    if (
        names
        and len(kept_samples) == len(split)
        and not any(len(find_kept_samples(any_split, names)) < len(any_split) for any_split in data.splits.values())
    ):
        first_name = escape_unprintable(min(names))
        raise DataError(
            f"none of the {len(names)} names in {exclude_path} is in the data; first: {first_name}",
            "use the path of the listed data",
        )
    listener.note(f"{len(split) - len(kept_samples)} of {len(split)} training images are excluded by {exclude_path}")
    # else they are those of `whole`
    groups = data.groups[kept_samples] if data.groups is not None and data.full_train_split is None else data.groups
    return replace(
        data, splits=data.splits | {"train": split.take(kept_samples)}, groups=groups, identity=data.fingerprint()
    )


def resolve_split_options(base: Run | None, options: TrainOptions) -> tuple[int, float | None, str | None]:
    """Return the split seed, the validation share of all training images, and the grouping rule. A share of None keeps
    the validation split of the data, or holds out the default 10 %. Groups are never divided between splits."""
    values = {
        path.removeprefix("data."): values for path, values in options.settings.items() if path.startswith("data.")
    }
    stored = set_dotted_paths(base.data if base else DataOptions("", (), 0, ""), values, "data.")
    seed = options.split_seed if options.split_seed is not None else stored.split_seed
    return seed, stored.hold_out if options.lr_grid is None else 0.0, options.group_by or stored.group_by
