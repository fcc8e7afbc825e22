"""Choose published weights as the default initial weights of runs on few photographs.

Classifiers, regressions, detectors and segmentation models with fewer than `FEW_PHOTOGRAPHS` photographs start from
published weights that are cached or can be downloaded. `--init none` trains from scratch.
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

FEW_PHOTOGRAPHS = 2_000  # number of training images below which published weights are the default
#: published weights for runs without --model, best first
PREFERRED_WEIGHTS = ("vit-s16-augreg", "vit-ti16-augreg", "vit-b16-augreg", "deit-s16", "deit-b16")
DEFAULT_WEIGHTS_RECIPES = (None, "segment", "detect", "regression")  # values of --recipe with default weights
PROBE_TIMEOUT = 3.0  # maximum seconds to wait for a server's response, including name resolution


def set_default_weights(options: TrainOptions, dataset: Data, listener: ProgressListener) -> TrainOptions:
    """Return the options with the initial weights: those of `--init`, or published weights if the dataset has few
    photographs and weights are available. The choice is noted to `listener`."""
    if options.init:
        return replace(options, init=None) if options.init == INIT_FROM_SCRATCH else options
    if not should_start_pretrained(options, dataset):
        return options
    if not (
        weights := find_available_weights(
            list_candidate_weights(options), probe=not (options.dry_run or is_distributed_launch())
        )
    ):
        return options
    images = len(dataset.split("train"))
    availability = "cached" if is_cached(weights) else "downloading"
    listener.note(
        f"{images:,} photographs are a small dataset: training starts from the published weights {weights.name} "
        f"({availability}); "
        f"use --init {INIT_FROM_SCRATCH} to train from scratch"
    )
    return replace(options, init=weights.name)


def should_start_pretrained(options: TrainOptions, dataset: Data) -> bool:
    """Return whether a run starts from published weights by default.

    It does if the images are few, in colour and above `MAX_SMALL_IMAGE_SIDE`, and labels, masks or boxes are learned.
    A published recipe (it may require other weights), --patch-size, --native-aspect or a model setting prevents it.
    """
    split, objective = dataset.split("train"), get_objective_config(options)
    if len(split) >= FEW_PHOTOGRAPHS or get_sample_noun(split) != "images":
        return False
    if options.recipe not in DEFAULT_WEIGHTS_RECIPES or not (objective.annotated or objective.labelled):
        return False
    if options.patch_size or options.native_aspect or any(path.startswith("model.") for path in options.settings):
        return False
    if (options.image_size or MAX_SMALL_IMAGE_SIDE + 1) <= MAX_SMALL_IMAGE_SIDE:
        return False
    dataset_info = infer_dataset_info(dataset, options)
    return (
        dataset_info.template.has_colours
        and dataset_info.channels == 3
        and dataset_info.latents is None
        and max(dataset_info.size) > MAX_SMALL_IMAGE_SIDE
    )


def list_candidate_weights(options: TrainOptions) -> list[PublishedWeights]:
    """List the published weights for the model of a run, preferred ones first. Weights of the Hugging Face Hub are
    excluded, because they are stored in another cache."""
    candidates = {weights.name: weights for weights in PUBLISHED_WEIGHTS if not weights.source.startswith("hf:")}
    if not options.model:
        return [candidates[name] for name in PREFERRED_WEIGHTS]
    model = config_from_name(options.model).name()
    return [weights for weights in candidates.values() if weights.model == model]


def find_available_weights(candidates: list[PublishedWeights], probe: bool) -> PublishedWeights | None:
    """Return the first weights that are in the cache or in a folder of VITREOUS_MIRROR.

    If there are none and `probe` is true, return the first candidate if its server responds within PROBE_TIMEOUT
    seconds. Returns None if no weights are available.
    """
    if weights := next(filter(is_cached, candidates), None):
        return weights
    return next(
        (weights for weights in candidates[:1] if probe and not get_offline_variable() and is_reachable(weights)), None
    )


def is_cached(weights: PublishedWeights) -> bool:
    """Return whether published weights can be opened without a download."""
    target, record = get_cache_paths(weights)
    if target.is_file() and record.is_file():
        return True
    try:
        return isinstance(resolve_mirror(weights.source), Path)
    except VitreousError:
        return False


def is_reachable(weights: PublishedWeights) -> bool:
    """Return whether the server of published weights has their file and responds within PROBE_TIMEOUT seconds."""
    try:
        address = resolve_mirror(weights.source)
    except VitreousError:
        return False
    results: list[bool] = []

    def send_request() -> None:
        """Append to `results` whether the server has the file."""
        try:
            with urllib.request.urlopen(
                urllib.request.Request(str(address), method="HEAD"), timeout=PROBE_TIMEOUT
            ) as response:
                results.append(response.status == 200)
        except (OSError, ValueError):
            results.append(False)

    thread = Thread(target=send_request, name="reachable", daemon=True)
    thread.start()
    thread.join(PROBE_TIMEOUT)
    return results == [True]
