"""Derive a run from the options and an open dataset: initial weights, recipe, channels, buckets and worker
processes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from vitreous.data.annotations.map_statistics import MapStatistics, measure_class_maps
from vitreous.data.annotations.painted import has_object_masks
from vitreous.data.annotations.target import AnnotatedSplit, get_sample_axes
from vitreous.data.augmentation.scenes import SceneViews
from vitreous.data.pace import choose_worker_count
from vitreous.data.screen import fits_in_memory
from vitreous.data.sources import resolve_source
from vitreous.data.split import Data, Split
from vitreous.errors import escape_unprintable
from vitreous.jobs.buckets import set_run_buckets
from vitreous.jobs.captions import add_text_info
from vitreous.jobs.default_weights import set_default_weights
from vitreous.models.names import config_from_name
from vitreous.progress import ProgressListener
from vitreous.recipes.channels import infer_dataset_info, measure_channel_moments
from vitreous.recipes.derive import advise_weights, derive_run_config, get_objective_config
from vitreous.recipes.fit_to_data import advise_pretraining
from vitreous.recipes.options import TrainOptions
from vitreous.recipes.registry import get_recipe
from vitreous.system.cores import default_worker_count
from vitreous.system.machine import pick_device
from vitreous.training.run import Run
from vitreous.training.throughput import measure_peak_flops
from vitreous.weights.adopt import read_weights_info

MIN_PARALLEL_IMAGES = 2_000  # number of images above which the first pass over the images uses several processes
ASSUMED_UTILISATION = 0.6  # share of the machine's peak throughput that a training step is assumed to reach
FLIP_SETTINGS = {"views.flip", "views.flip_vertical", "views.turn"}  # settings that replace the measured symmetry


def derive_run(
    dataset: Data,
    options: TrainOptions,
    split_settings: dict[str, Any],
    listener: ProgressListener,
    forms: np.ndarray | None,
) -> Run:
    """Build the run on the training split of a dataset from the recipe, the initial weights and the options.

    `split_settings` are fields of `DataOptions` that describe the split. With `forms` (n, 3) int64, the frames, heights
    and widths of the training samples, the run uses buckets. `listener` receives notes about derived settings.
    """
    options, split = set_default_weights(options, dataset, listener), dataset.split("train")
    reference = config_from_name(options.model) if options.model and options.init else None
    is_paired = get_objective_config(options).paired
    start = read_weights_info(options.source(options.init), reference, keep_text=is_paired) if options.init else None
    for note in start.notes if start else ():
        listener.note(note)
    info = replace(infer_dataset_info(dataset, options, start), masks=has_object_masks(dataset))
    info = replace(info, images=options.images or info.images, map_statistics=measure_recipe_maps(dataset, options))
    info = add_text_info(info, dataset, start) if is_paired else info
    run = derive_run_config(options, dataset, info, start, listener.note)
    for text in describe_map_choices(run, info.map_statistics, options) if info.map_statistics else ():
        listener.note(text)
    run = replace(run, objective=run.objective.with_absolute_paths(run.model, run.data.classes))
    if forms is not None:
        run = set_run_buckets(run, options, forms, listener.note)
    for advice in (advise_weights(run), advise_pretraining(run, info, options)):
        if advice:
            listener.note(advice)
    run = measure_channel_moments(
        run,
        info,
        split=split,
        start=start,
        options=options,
        workers=count_scan_workers(dataset, options),
        note=listener.note,
    )
    data = replace(run.data, **split_settings, source=resolve_source(dataset.name))
    data = replace(data, bad_images=options.bad_images, exact=options.exact, cache=can_cache_images(split, run))
    run = replace(run, data=data)
    if options.workers is None:
        run = replace(run, data=replace(run.data, workers=0 if run.data.cache else count_decode_workers(run, split)))
    return run


def count_scan_workers(dataset: Data, options: TrainOptions) -> int:
    """Return the number of processes for the first pass over the images of a dataset, before decoding is timed."""
    is_small = len(dataset.split("train")) <= MIN_PARALLEL_IMAGES
    return options.workers if options.workers is not None else 0 if is_small else default_worker_count()


def measure_recipe_maps(dataset: Data, options: TrainOptions) -> MapStatistics | None:
    """Measure the class maps of the training images if the recipe, or balanced class weights, require them; otherwise
    return None."""
    split = dataset.split("train")
    recipe = get_recipe(options.recipe) if options.recipe else None
    if recipe is None or recipe.objective.annotated != "classes" or not isinstance(split, AnnotatedSplit):
        return None
    recipe_needs_maps = recipe.by_maps and get_sample_axes(split) == 2
    if not (recipe_needs_maps or options.class_weights == "balanced"):
        return None
    return measure_class_maps(split, dataset.classes)


def describe_map_choices(run: Run, maps: MapStatistics, options: TrainOptions) -> list[str]:
    """Describe the settings that were derived from the class maps, one line each. Settings of the options are not
    described."""
    notes = []
    if (
        get_recipe(run.recipe).by_maps
        and isinstance(run.views, SceneViews)
        and not FLIP_SETTINGS & options.settings.keys()
    ):
        notes.append(maps.symmetry.text)
    weights = getattr(run.objective, "class_weights", ())
    if weights and options.class_weights is None and "objective.class_weights" not in options.settings:
        share, name = min(
            (share, name) for share, name in zip(maps.class_shares, run.data.classes, strict=True) if share
        )
        text = f"class weights of the loss: {min(weights):.3g} to {max(weights):.3g}; the rarest class, "
        text += (
            f"{escape_unprintable(name)}, has {share:.2%} of the pixels; for equal weights, set --class-weights even"
        )
        notes.append(text)
    return notes


def can_cache_images(split: Split, run: Run) -> bool:
    """Return whether the training images are kept in memory: small images whose views depend only on the pixels."""
    return not (run.objective.annotated or run.preprocess.has_buckets) and fits_in_memory(split, run.preprocess)


def count_decode_workers(run: Run, split: Split) -> int:
    """Return the number of processes that decode images, from the time to decode an image and the model's throughput at
    `ASSUMED_UTILISATION` of the machine's peak."""
    device = pick_device(run.device)
    throughput = ASSUMED_UTILISATION * measure_peak_flops(device, run.precision) / (3 * 2 * run.model.macs())
    return choose_worker_count(
        split, run.preprocess, run.views, throughput, shares_cores=device == "cpu", exact=run.data.exact
    )
