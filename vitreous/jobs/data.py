"""The data of a run: opened, split, less what is excluded, and looked through for images that cannot be read."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import numpy as np

from vitreous.config import set_paths
from vitreous.data.annotations.learnable import require_learnable
from vitreous.data.annotations.map_statistics import MapStatistics, measure_maps
from vitreous.data.annotations.painted import find_objects, has_masks, paint_classes, with_masks
from vitreous.data.annotations.target import AnnotatedSplit, axes_of, kind_of
from vitreous.data.augmentation.scenes import Scenes
from vitreous.data.buckets import assign, measure_forms
from vitreous.data.exclusions import kept_samples
from vitreous.data.exclusions import read_excluded as names_in
from vitreous.data.options import DataOptions
from vitreous.data.pace import workers_for
from vitreous.data.screen import fits_in_memory, readable, screen, stop_at_unreadable
from vitreous.data.sources import open_data, open_data_of_run, resolve_source
from vitreous.data.split import Arrays, Data, Split, require_labels
from vitreous.errors import DataError, EmptyImageError, UsageError, printable
from vitreous.jobs.buckets import check_buckets, judged_at, with_buckets
from vitreous.jobs.default_weights import with_default_weights
from vitreous.models.cost import macs
from vitreous.progress import Listener
from vitreous.recipes.channels import detect_info, measure_channels
from vitreous.recipes.derive import advise_weights, apply, derive, objective_of
from vitreous.recipes.options import FROM_SCRATCH, TrainOptions
from vitreous.recipes.registry import find
from vitreous.recipes.small_sets import advise_pretraining
from vitreous.recipes.task import choose_recipe
from vitreous.system.cores import default_workers
from vitreous.system.machine import pick_device
from vitreous.training.batches import Inputs
from vitreous.training.folder import Folder
from vitreous.training.peak import quick_peak
from vitreous.training.run import Run
from vitreous.weights.adopt import starting_point

PARALLEL = 2_000  # pictures from which it pays to start processes for a first look at them
WITHOUT_LABELS = ("mae", "dino", "dinov2", "dit")  # recipes that are offered for pictures without labels
UTILISED = 0.6  # of the machine's peak that a training step reaches
FLIPS = {"views.flip", "views.flip_vertical", "views.turn"}
SCREENED = 20_000  # files up to which a data set is decoded once before training, to name what cannot be read


def prepare_data(
    source: str | Data, base: Run | None, options: TrainOptions, listener: Listener, folder: Folder | None = None
) -> tuple[Data, Run, Inputs]:
    """Open the data set, unless it is open, complete the run, and decode every image once where the data set is small.

    The run is derived from the data, or is `base` with the options applied. `folder` is that of a run to continue.
    Raises UsageError for options that do not go together, DataError for data that cannot be used.
    """
    named = options.init or (base and base.init)
    if (options.resize or options.source_size) and (not named or named == FROM_SCRATCH):
        message = "--resize and --source-size are about the weights of --init, and there are none"
        raise UsageError(message, "leave them out")
    seed, share, group_by = split_options(base, options)
    exclude = options.exclude or (base.data.exclude if base else None)
    axes = options.axes or (base.data.axes if base else None)
    ignore_index = options.ignore_index if options.ignore_index is not None or not base else base.data.ignore_index
    in_buckets = options.buckets is not None or bool(base and base.preprocess.buckets)
    if isinstance(source, Data):
        opened = source
    else:
        how = (source, seed, group_by, in_buckets, axes, ignore_index)
        opened = open_data_of_run(folder.path, *how) if folder else open_data(*how)
    if base is None:
        options = choose_recipe(opened, options, listener.note)
    objective = base.objective if base else objective_of(options)
    if objective.labelled:
        offer_objectives(opened)
    if objective.annotated:
        require_learnable(opened, "classes" if objective.annotated == "classes" else "objects")
        opened = {"classes": paint_classes, "objects": find_objects}[objective.annotated](opened)
    opened = opened.holding_out(share, seed)
    for note in opened.notes:
        listener.note(note)
    if exclude:
        listed = json.loads((folder.path / "excluded.json").read_text("utf-8")) if folder else names_in(exclude)
        opened = exclude_images(opened, frozenset(listed), exclude, listener)
    split = {"split_seed": seed, "hold_out": share, "group_by": group_by, "axes": axes, "exclude": exclude}
    split["ignore_index"] = ignore_index
    workers = first_workers(opened, options)
    if base is None and in_buckets:
        check_buckets(options, opened)
    forms = measure_forms(opened.split("train"), workers) if in_buckets else None
    if base is None:
        run = derive_run(opened, options, split, listener, forms)
    else:
        run = apply(base, options)
        if folder is None:
            run = replace(run, data=replace(run.data, source=resolve_source(opened.name)))
        if (share, group_by, exclude) != (base.data.hold_out, base.data.group_by, base.data.exclude):
            data = replace(run.data, **split, images=len(opened.split("train")), fingerprint=opened.fingerprint())
            run = replace(run, data=data)
    if run.objective.annotated == "objects":
        opened = with_masks(opened, getattr(run.objective, "masks", False))
    return opened, *screen_inputs(opened, run, workers, listener, forms)


def offer_objectives(opened: Data) -> None:
    """Raise DataError for data without labels, which a classifier needs, with the commands that learn without."""
    try:
        require_labels(opened)
    except DataError as error:
        if opened.labelled or opened.unlearnable:
            raise
        kind = kind_of(opened.splits["train"])
        names = {"pictures": WITHOUT_LABELS, "clips": ("videomae",)}.get(kind, WITHOUT_LABELS[:1])
        commands = "".join(f"\n    vitreous train {printable(opened.name)} --recipe {name}" for name in names)
        raise DataError(error.message, f"{error.hint}; or learn from images without labels:{commands}") from None


def first_workers(opened: Data, options: TrainOptions) -> int:
    """Processes for the first pass over the images, before it is known what one costs."""
    few = len(opened.split("train")) <= PARALLEL
    return options.workers if options.workers is not None else 0 if few else default_workers()


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
    return not (run.objective.annotated or run.preprocess.buckets) and fits_in_memory(split, run.preprocess)


def screen_inputs(
    opened: Data, run: Run, workers: int, listener: Listener, forms: np.ndarray | None = None
) -> tuple[Run, Inputs]:
    """Leave out, or refuse, training images that cannot be read, where all are decoded once; cache those that fit. With
    the forms (n, 3) of the images of a run in buckets, each gets one, and validation images of another size than the
    judged one are left out."""
    split = opened.split("train")
    cached, bad, rows, val = None, {}, None, opened.splits.get("val")
    of_bands = run.preprocess.numbers not in ("colours", "voxels")  # any of them may be without data
    few = len(split) <= SCREENED and not isinstance(split, Arrays)
    if run.data.cache or run.data.bad_images == "skip" or few or of_bands:
        cached, bad = screen(split, run.preprocess, workers, keep=run.data.cache)
    if bad:
        stop_at_unreadable(bad, len(split), run.data.bad_images)
        empty = sum(isinstance(error, EmptyImageError) for error in bad.values())
        for count, problem in ((len(bad) - empty, "cannot be read"), (empty, "have no pixel with data")):
            if count:
                listener.note(f"{count} of {len(split)} training images {problem} and are left out")
        rows = readable(split, bad)
        split, cached = split.take(rows), cached[rows] if cached is not None else None
        run = replace(run, data=replace(run.data, images=len(split)))
    if forms is None:
        return run, Inputs(split, val, cached, rows)
    buckets = assign(forms if rows is None else forms[rows], run.preprocess.buckets, run.preprocess.stride)
    return run, Inputs(split, val and judged_at(val, run.preprocess, workers), cached, rows, buckets=buckets)


def exclude_images(opened: Data, names: frozenset[str], exclude: str, listener: Listener) -> Data:
    """The data without the training images of these names. Raises DataError where none is left, or none is excluded."""
    split = opened.split("train")
    rows = kept_samples(split, names)
    if not len(rows):
        raise DataError(f"{exclude} leaves no training image", "is it the list of other data?")
    if (
        names
        and len(rows) == len(split)
        and not any(len(kept_samples(part, names)) < len(part) for part in opened.splits.values())
    ):
        first = printable(min(names))
        raise DataError(
            f"none of the {len(names)} names in {exclude} is in the data; the first is {first}", "name the data as then"
        )
    listener.note(f"{len(split) - len(rows)} of {len(split)} training images are left out, as {exclude} says")
    # else they are those of `whole`
    groups = opened.groups[rows] if opened.groups is not None and opened.whole is None else opened.groups
    return replace(
        opened, splits=opened.splits | {"train": split.take(rows)}, groups=groups, identity=opened.fingerprint()
    )


def count_workers(run: Run, split: Split) -> int:
    """Processes that decode for a run: by what its pictures cost, and what the model takes at a usual share of the
    machine's peak."""
    device = pick_device(run.device)
    rate = UTILISED * quick_peak(device, run.precision) / (3 * 2 * macs(run.model))
    return workers_for(split, run.preprocess, run.views, rate, shares_cores=device == "cpu", exact=run.data.exact)


def split_options(base: Run | None, options: TrainOptions) -> tuple[int, float | None, str | None]:
    """The seed of the split, the share of all training images that `val` is (None: the data's own, or the usual tenth),
    and what names the groups that are not to be drawn apart."""
    words = {path.removeprefix("data."): words for path, words in options.settings.items() if path.startswith("data.")}
    stored = set_paths(base.data if base else DataOptions("", (), 0, ""), words, "data.")
    seed = options.split_seed if options.split_seed is not None else stored.split_seed
    return seed, stored.hold_out if options.lr_grid is None else 0.0, options.group_by or stored.group_by
