"""The run that options and data give: weights to start from, recipe, channels, buckets and worker processes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from vitreous.data.annotations.map_statistics import MapStatistics, measure_maps
from vitreous.data.annotations.painted import has_masks
from vitreous.data.annotations.target import AnnotatedSplit, axes_of
from vitreous.data.augmentation.scenes import Scenes
from vitreous.data.pace import workers_for
from vitreous.data.screen import fits_in_memory
from vitreous.data.sources import resolve_source
from vitreous.data.split import Data, Split
from vitreous.errors import printable
from vitreous.jobs.buckets import with_buckets
from vitreous.jobs.default_weights import with_default_weights
from vitreous.progress import Listener
from vitreous.recipes.channels import detect_info, measure_channels
from vitreous.recipes.derive import advise_weights, derive
from vitreous.recipes.fit_to_data import advise_pretraining
from vitreous.recipes.options import TrainOptions
from vitreous.recipes.registry import find
from vitreous.system.cores import default_workers
from vitreous.system.machine import pick_device
from vitreous.training.run import Run
from vitreous.training.throughput import quick_peak
from vitreous.weights.adopt import starting_point

PARALLEL = 2_000  # pictures from which it pays to start processes for a first look at them
UTILISED = 0.6  # of the machine's peak that a training step reaches
FLIPS = {"views.flip", "views.flip_vertical", "views.turn"}


def derive_run(
    opened: Data, options: TrainOptions, split_settings: dict[str, Any], listener: Listener, forms: np.ndarray | None
) -> Run:
    """The run of a model or of weights on the training split, by the recipe and the options; in buckets, where the
    forms (n, 3) int64 of the samples are given."""
    options, split = with_default_weights(options, opened, listener), opened.split("train")
    start = starting_point(options.source(options.init)) if options.init else None
    for note in start.notes if start else ():
        listener.note(note)
    info = replace(detect_info(opened, options, start), masks=has_masks(opened))
    info = replace(info, images=options.images or info.images, maps=measure_for_recipe(opened, options))
    run = derive(options, opened, info, start, listener.note)
    for text in describe_choices(run, info.maps, options) if info.maps else ():
        listener.note(text)
    run = replace(run, objective=run.objective.located(run.model, run.data.classes))
    if forms is not None:
        run = with_buckets(run, options, forms, listener.note)
    for advice in (advise_weights(run), advise_pretraining(run, info, options)):
        if advice:
            listener.note(advice)
    run = measure_channels(
        run, info, split=split, start=start, options=options, workers=first_workers(opened, options), note=listener.note
    )
    data = replace(run.data, **split_settings, source=resolve_source(opened.name))
    data = replace(data, bad_images=options.bad_images, exact=options.exact, cache=can_cache(split, run))
    run = replace(run, data=data)
    if options.workers is None:
        run = replace(run, data=replace(run.data, workers=0 if run.data.cache else count_workers(run, split)))
    return run


def first_workers(opened: Data, options: TrainOptions) -> int:
    """Processes for the first pass over the images, before it is known what one costs."""
    few = len(opened.split("train")) <= PARALLEL
    return options.workers if options.workers is not None else 0 if few else default_workers()


def measure_for_recipe(opened: Data, options: TrainOptions) -> MapStatistics | None:
    """Measure the class maps of the training images where the recipe chooses by them, or balanced class weights are
    asked for; None elsewhere."""
    split = opened.split("train")
    named = find(options.recipe) if options.recipe else None
    if named is None or named.objective.annotated != "classes" or not isinstance(split, AnnotatedSplit):
        return None
    chooses = named.by_maps and axes_of(split) == 2
    return measure_maps(split, opened.classes) if chooses or options.class_weights == "balanced" else None


def describe_choices(run: Run, maps: MapStatistics, options: TrainOptions) -> list[str]:
    """What was chosen by the statistics of class maps and not set by options, a line each."""
    notes = []
    if find(run.recipe).by_maps and isinstance(run.views, Scenes) and not FLIPS & options.settings.keys():
        notes.append(maps.symmetry.text)
    weights = getattr(run.objective, "class_weights", ())
    if weights and options.class_weights is None and "objective.class_weights" not in options.settings:
        share, name = min((share, name) for share, name in zip(maps.shares, run.data.classes, strict=True) if share)
        text = f"class weights of the loss: {min(weights):.3g} to {max(weights):.3g}, as {printable(name)} has"
        notes.append(f"{text} {share:.2%} of the pixels; to have none, set --class-weights even")
    return notes


def can_cache(split: Split, run: Run) -> bool:
    """Whether the training images stay in memory: small ones, whose views need nothing but their pixels."""
    return not (run.objective.annotated or run.preprocess.has_buckets) and fits_in_memory(split, run.preprocess)


def count_workers(run: Run, split: Split) -> int:
    """Processes that decode for a run: by what its pictures cost, and what the model takes at a usual share of the
    machine's peak."""
    device = pick_device(run.device)
    rate = UTILISED * quick_peak(device, run.precision) / (3 * 2 * run.model.macs())
    return workers_for(split, run.preprocess, run.views, rate, shares_cores=device == "cpu", exact=run.data.exact)
