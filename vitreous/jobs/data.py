"""Prepare the data of a run: open the dataset, split it, exclude images, and find unreadable images."""

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
from vitreous.data.exclusions import find_kept_samples, read_exclusion_list
from vitreous.data.options import DataOptions
from vitreous.data.pairs import require_pairs
from vitreous.data.screen import check_unreadable_images, find_readable_samples, screen_images
from vitreous.data.sources import open_data, open_run_source, resolve_source
from vitreous.data.split import ArraySplit, Data, require_labels
from vitreous.data.values import convert_classes_to_values, describe_targets, require_values
from vitreous.errors import DataError, EmptyImageError, UsageError, escape_unprintable
from vitreous.jobs.buckets import check_buckets, select_evaluated_samples
from vitreous.jobs.captions import encode_captions
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
MAX_SCREENED_IMAGES = 20_000  # maximum number of training images that are decoded before training to find bad files


def prepare_data(
    source: str | Data,
    config_run: Run | None,
    options: TrainOptions,
    listener: ProgressListener,
    folder: RunFolder | None = None,
) -> tuple[Data, Run, RunInputs]:
    """Open the dataset `source` unless it is open, complete the run, and build its inputs. Images of a small dataset
    are decoded once to find unreadable files.

    The run is derived from the data and the options, or is `config_run`, from a config or a run to resume, with the
    options applied. `folder` is the folder of a run to resume. Raises UsageError for conflicting options, DataError for
    data that cannot be used.
    """
    initial_weights = options.init or (config_run and config_run.init)
    if (options.resize or options.source_size) and (not initial_weights or initial_weights == INIT_FROM_SCRATCH):
        problem = "--resize and --source-size are for initial weights, but the run has none"
        raise UsageError(problem, "add --init, or leave --resize and --source-size out")
    seed, share, group_by = resolve_split_options(config_run, options)
    exclude = options.exclude or (config_run.data.exclude if config_run else None)
    axes = options.axes or (config_run.data.axes if config_run else None)
    ignore_index = (
        options.ignore_index if options.ignore_index is not None or not config_run else config_run.data.ignore_index
    )
    use_buckets = options.buckets is not None or bool(config_run and config_run.preprocess.has_buckets)
    if isinstance(source, Data):
        dataset = source
    else:
        targets = options.targets or (config_run.data.targets if config_run else ())
        open_arguments = (source, seed, group_by, use_buckets, axes, ignore_index, tuple(targets))
        dataset = open_run_source(folder.path, *open_arguments) if folder else open_data(*open_arguments)
    if config_run is None:
        options = choose_recipe(dataset, options, listener.note)
    objective = config_run.objective if config_run else get_objective_config(options)
    dataset = match_objective(dataset, objective, seed, options).with_holdout(share, seed)
    for note in dataset.notes:
        listener.note(note)
    if exclude:
        excluded = (
            json.loads((folder.path / "excluded.json").read_text("utf-8")) if folder else read_exclusion_list(exclude)
        )
        dataset = exclude_images(dataset, frozenset(excluded), exclude, listener)
    split_settings: dict[str, Any] = {
        "split_seed": seed,
        "hold_out": share,
        "group_by": group_by,
        "axes": axes,
        "exclude": exclude,
    }
    split_settings |= {"ignore_index": ignore_index, "targets": dataset.targets}
    workers = count_scan_workers(dataset, options)
    if config_run is None and use_buckets:
        check_buckets(options, dataset)
    forms = measure_sample_forms(dataset.split("train"), workers) if use_buckets else None
    if config_run is None:
        run = derive_run(dataset, options, split_settings, listener, forms)
    else:
        run = apply_train_options(config_run, options)
        if folder is None:
            run = replace(run, data=replace(run.data, source=resolve_source(dataset.name)))
        if (share, group_by, exclude) != (config_run.data.hold_out, config_run.data.group_by, config_run.data.exclude):
            num_images, fingerprint = len(dataset.split("train")), dataset.fingerprint()
            run = replace(run, data=replace(run.data, **split_settings, images=num_images, fingerprint=fingerprint))
    if run.objective.annotated == "objects":
        dataset = with_object_masks(dataset, getattr(run.objective, "masks", False))
    if run.objective.paired:
        dataset = encode_captions(dataset, run, folder)
    return dataset, *screen_inputs(dataset, run, workers, listener, forms)


def match_objective(
    dataset: Data, objective: ObjectiveConfig | type[ObjectiveConfig], seed: int, options: TrainOptions
) -> Data:
    """Return the dataset with labels or annotations of the type that the objective learns. Raises DataError if it has
    none, and the errors of `match_label_type`."""
    if objective.labelled:
        dataset = match_label_type(dataset, objective, seed, options)
        require_class_labels(dataset)
    if objective.of_values:
        require_values(dataset)
    if objective.annotated:
        require_learnable(dataset, "classes" if objective.annotated == "classes" else "objects")
        dataset = {"classes": paint_class_maps, "objects": keep_object_targets}[objective.annotated](dataset)
    if objective.paired:
        require_pairs(dataset)
    return dataset


def match_label_type(
    dataset: Data, objective: ObjectiveConfig | type[ObjectiveConfig], seed: int, options: TrainOptions
) -> Data:
    """Return the dataset with labels of the type that the objective learns. For a regression, numeric class names
    become values.

    Raises DataError if class names are not numbers. Raises UsageError if the dataset has values, but the objective
    learns classes.
    """
    if objective.of_values:
        return dataset if dataset.targets else convert_classes_to_values(dataset, dataset.label_column, seed)
    if dataset.targets:
        problem = (
            f"{options.recipe or objective.name} learns classes, but {dataset.name} has {describe_targets(dataset)}"
        )
        raise UsageError(problem, "use --recipe regression, or leave --recipe out")
    return dataset


def require_class_labels(dataset: Data) -> None:
    """Raise DataError if the dataset has no class labels; the hint lists commands that train without labels."""
    try:
        require_labels(dataset)
    except DataError as error:
        if dataset.labelled or dataset.unlearnable:
            raise
        sample_noun = get_sample_noun(dataset.splits["train"])
        names = {"images": SUGGESTED_UNLABELLED_RECIPES, "clips": ("videomae",)}.get(
            sample_noun, SUGGESTED_UNLABELLED_RECIPES[:1]
        )
        commands = "".join(f"\n    vitreous train {escape_unprintable(dataset.name)} --recipe {name}" for name in names)
        raise DataError(error.message, f"{error.hint}; or train without labels:{commands}") from None


def screen_inputs(
    dataset: Data, run: Run, workers: int, listener: ProgressListener, forms: np.ndarray | None = None
) -> tuple[Run, RunInputs]:
    """Build the inputs of the run: its images without unreadable training images, small images in memory, and their
    buckets.

    Returns the run with its number of images, and the inputs. All images of a small dataset are decoded once. `forms`
    (n, 3) are the forms of the training samples of a run with buckets: frames, height and width. Validation images of
    other sizes than the evaluation size are then dropped. Raises DataError for unreadable images unless the run skips
    them.
    """
    split = dataset.split("train")
    cached, unreadable, readable, val = None, {}, None, dataset.splits.get("val")
    is_small = len(split) <= MAX_SCREENED_IMAGES and not isinstance(split, ArraySplit)
    if run.data.cache or run.data.bad_images == "skip" or is_small or run.preprocess.may_be_void:
        cached, unreadable = screen_images(split, run.preprocess, workers, keep=run.data.cache)
    if unreadable:
        check_unreadable_images(unreadable, len(split), run.data.bad_images)
        num_empty = sum(isinstance(error, EmptyImageError) for error in unreadable.values())
        for count, problem in ((len(unreadable) - num_empty, "cannot be read"), (num_empty, "have no pixel with data")):
            if count:
                listener.note(f"{count} of {len(split)} training images {problem} and are left out")
        readable = find_readable_samples(split, unreadable)
        split, cached = split.take(readable), cached[readable] if cached is not None else None
        run = replace(run, data=replace(run.data, images=len(split)))
    if forms is None:
        return run, RunInputs(split, val, cached, readable)
    buckets = assign_buckets(forms if readable is None else forms[readable], run.preprocess)
    return run, RunInputs(
        split, val and select_evaluated_samples(val, run.preprocess, workers), cached, readable, buckets=buckets
    )


def exclude_images(data: Data, names: frozenset[str], exclude_path: str, listener: ProgressListener) -> Data:
    """Remove the images `names`, which the file `exclude_path` lists, from the training split. Raises DataError if no
    training image remains, or if the dataset contains none of the names."""
    split = data.split("train")
    kept_samples = find_kept_samples(split, names)
    if not len(kept_samples):
        raise DataError(
            f"{exclude_path} excludes every training image of {data.name}", "remove the images to keep from the list"
        )
    if (
        names
        and len(kept_samples) == len(split)
        and not any(len(find_kept_samples(any_split, names)) < len(any_split) for any_split in data.splits.values())
    ):
        first_name = escape_unprintable(min(names))
        raise DataError(
            f"{data.name} contains none of the {len(names)} names in {exclude_path}, the first of which is "
            f"{first_name}",
            "use the dataset for which the list was made",
        )
    listener.note(f"{len(split) - len(kept_samples)} of {len(split)} training images are excluded by {exclude_path}")
    # `groups` belong to `full_train_split`, if the training split was divided
    groups = data.groups[kept_samples] if data.groups is not None and data.full_train_split is None else data.groups
    return replace(
        data, splits=data.splits | {"train": split.take(kept_samples)}, groups=groups, identity=data.fingerprint()
    )


def resolve_split_options(config_run: Run | None, options: TrainOptions) -> tuple[int, float | None, str | None]:
    """Return the seed of the validation split, its share of the training images, and the grouping rule, from the
    options or else from the configured run.

    A share of None keeps the validation split of the data, or holds out the default 10 %. Groups are never divided
    between splits.
    """
    settings = {
        path.removeprefix("data."): values for path, values in options.settings.items() if path.startswith("data.")
    }
    config_data = config_run.data if config_run else DataOptions("", (), 0, "")
    data_options = set_dotted_paths(config_data, settings, "data.")
    seed = options.split_seed if options.split_seed is not None else data_options.split_seed
    share = data_options.hold_out if options.lr_grid is None else 0.0
    return seed, share, options.group_by or data_options.group_by
