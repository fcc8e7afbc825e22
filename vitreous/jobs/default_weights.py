"""The published weights that a run on few photographs starts from where none are named.

A classifier, a detector or a segmenter of fewer than `FEW_PHOTOGRAPHS` photographs starts from them if they are in the
cache or can be downloaded. `--init none` trains from scratch.
"""

from __future__ import annotations

import urllib.request
from dataclasses import replace
from pathlib import Path
from threading import Thread

from vitreous.data.annotations.target import get_sample_noun
from vitreous.data.split import Data
from vitreous.errors import VitreousError
from vitreous.models.names import MAX_SMALL_IMAGE_SIDE, config_from_name
from vitreous.progress import ProgressListener, is_distributed_launch
from vitreous.recipes.channels import infer_dataset_info
from vitreous.recipes.derive import get_objective_config
from vitreous.recipes.options import INIT_FROM_SCRATCH, TrainOptions
from vitreous.weights.fetch import get_cache_paths, get_offline_variable, resolve_mirror
from vitreous.weights.published import PUBLISHED_WEIGHTS, PublishedWeights

FEW_PHOTOGRAPHS = 2_000  # training images below which published weights are the default
PREFERRED_WEIGHTS = (
    "vit-s16-augreg",
    "vit-ti16-augreg",
    "vit-b16-augreg",
    "deit-s16",
    "deit-b16",
)  # where no model is named
DEFAULT_WEIGHTS_RECIPES = (None, "segment", "detect", "regression")
PROBE_TIMEOUT = 3.0  # seconds that a server may take to say whether it has a file, name resolution included


def set_default_weights(options: TrainOptions, opened: Data, listener: ProgressListener) -> TrainOptions:
    """The options with the weights that the run starts from: those that were named, or published ones if the data are
    few photographs and the weights are at hand, which `listener` is told."""
    if options.init:
        return replace(options, init=None) if options.init == INIT_FROM_SCRATCH else options
    if not should_start_pretrained(options, opened):
        return options
    if not (
        row := find_available_weights(
            list_candidate_weights(options), probe=not (options.dry_run or is_distributed_launch())
        )
    ):
        return options
    images = len(opened.split("train"))
    how = "cached" if is_cached(row) else "downloading"
    listener.note(
        f"{images:,} photographs are few: training starts from the published weights {row.name} ({how}); "
        f"use --init {INIT_FROM_SCRATCH} to train from scratch"
    )
    return replace(options, init=row.name)


def should_start_pretrained(options: TrainOptions, opened: Data) -> bool:
    """Whether a run is one on few photographs that published weights fit: it learns from labels, masks or boxes, by no
    published recipe, which may need other weights, and neither its size nor its patches are changed."""
    split, objective = opened.split("train"), get_objective_config(options)
    if len(split) >= FEW_PHOTOGRAPHS or get_sample_noun(split) != "images":
        return False
    if options.recipe not in DEFAULT_WEIGHTS_RECIPES or not (objective.annotated or objective.labelled):
        return False
    if options.patch_size or options.native_aspect or any(path.startswith("model.") for path in options.settings):
        return False
    if (options.image_size or MAX_SMALL_IMAGE_SIDE + 1) <= MAX_SMALL_IMAGE_SIDE:
        return False
    facts = infer_dataset_info(opened, options)
    return (
        facts.template.has_colours
        and facts.channels == 3
        and facts.latents is None
        and max(facts.size) > MAX_SMALL_IMAGE_SIDE
    )


def list_candidate_weights(options: TrainOptions) -> list[PublishedWeights]:
    """The published weights for the model of a run, the preferred ones first; those of the Hugging Face Hub are left
    out, whose cache is not this package's."""
    rows = {row.name: row for row in PUBLISHED_WEIGHTS if not row.source.startswith("hf:")}
    if not options.model:
        return [rows[name] for name in PREFERRED_WEIGHTS]
    model = config_from_name(options.model).name()
    return [row for row in rows.values() if row.model == model]


def find_available_weights(rows: list[PublishedWeights], probe: bool) -> PublishedWeights | None:
    """The first of the published weights that the cache or a folder of VITREOUS_MIRROR has, else the first that its
    server has, if `probe`; None for none. Waits for a server for PATIENCE seconds at most."""
    if row := next(filter(is_cached, rows), None):
        return row
    return next((row for row in rows[:1] if probe and not get_offline_variable() and is_reachable(row)), None)


def is_cached(row: PublishedWeights) -> bool:
    """Whether weights can be opened without a download."""
    target, record = get_cache_paths(row)
    if target.is_file() and record.is_file():
        return True
    try:
        return isinstance(resolve_mirror(row.source), Path)
    except VitreousError:
        return False


def is_reachable(row: PublishedWeights) -> bool:
    """Whether the server of published weights answers for their file within PATIENCE seconds."""
    try:
        address = resolve_mirror(row.source)
    except VitreousError:
        return False
    answers: list[bool] = []

    def ask() -> None:
        try:
            with urllib.request.urlopen(
                urllib.request.Request(str(address), method="HEAD"), timeout=PROBE_TIMEOUT
            ) as answer:
                answers.append(answer.status == 200)
        except (OSError, ValueError):
            answers.append(False)

    thread = Thread(target=ask, name="reachable", daemon=True)
    thread.start()
    thread.join(PROBE_TIMEOUT)
    return answers == [True]
