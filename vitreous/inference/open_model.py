"""Open a trained model as a bundle: from a run folder, a bundle folder, or foreign weights."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from vitreous.config import Json
from vitreous.data.modalities.base import Preprocess
from vitreous.data.modalities.native import NativePreprocess
from vitreous.errors import UsageError, check_path_argument
from vitreous.models.dense import BackboneWithHead
from vitreous.models.packed import check_can_pack
from vitreous.nn.sizes import patch_grid
from vitreous.tasks.base import Task
from vitreous.tasks.classification import Classification
from vitreous.tasks.features import FeatureExtraction
from vitreous.tasks.table import TASKS
from vitreous.weights.adopt import locate_bundle, open_weights
from vitreous.weights.bundle import DESCRIPTION_FILE, Bundle, load_bundle
from vitreous.weights.model_paths import find_newest_run, is_finished_run, is_image_source
from vitreous.weights.options import WeightsSource, get_label_source, get_source_fields
from vitreous.weights.published import find_published_weights, nearest_published_name
from vitreous.weights.zero_shot import build_zero_shot_bundle, get_zero_shot_labels


def open_bundle(
    run: str | os.PathLike[str],
    headless: bool = False,
    note: Callable[[str], None] = lambda text: None,
    dense: bool = False,
) -> Bundle:
    """Open a model that predicts, as a bundle: a run folder, a bundle folder, or foreign weights.

    `note` is called with each assumption. A model without a head is rejected unless `headless`. A segmentation or
    detection model is rejected unless `dense`; with `headless` alone, its backbone is returned. Raises WeightsError for
    damaged or unsupported weights, UsageError for a rejected model or a missing run.
    """
    bundle = find_bundle(run, note)
    if not bundle.task.reads_images:
        raise UsageError(f"{run} generates images and does not predict", f"use `vitreous sample {run}`")
    return select_task_bundle(run, bundle, headless, note, dense)


def open_generator(run: str | os.PathLike[str], note: Callable[[str], None] = lambda text: None) -> Bundle:
    """Open a generative model as a bundle. Raises UsageError for other models, and the errors of `open_bundle`."""
    bundle = find_bundle(run, note)
    if bundle.task.reads_images:
        raise UsageError(f"{run} does not generate images", "train a model that does: vitreous train DATA --recipe dit")
    return bundle


def find_bundle(run: str | os.PathLike[str], note: Callable[[str], None]) -> Bundle:
    """Open a model of any task as a bundle: a run folder, a bundle folder, or foreign weights. `note` is called with
    each assumption. Raises WeightsError for damaged or unsupported weights, UsageError for a path that is not a
    model."""
    check_path_argument(run, "a run")
    zero_shot = get_zero_shot_labels(run)  # raises errors before weights are opened
    path = Path(run)
    if ":" not in os.fspath(run) and not path.exists() and not find_published_weights(run):
        nearest_name, newest = nearest_published_name(os.fspath(run)), find_newest_run()
        hint = f"the newest run here is {newest}" if newest else "train one with `vitreous train`"
        raise UsageError(f"no run at {path}", f"did you mean {nearest_name}? {hint}" if nearest_name else hint)
    if not is_finished_run(path) and is_image_source(os.fspath(run)):
        newest = find_newest_run()
        hint = f"use a run; the newest one here is {newest}" if newest else "train one with `vitreous train`"
        raise UsageError(f"{path} is a folder of images, not a model", hint)
    if (path / "config.yaml").is_file() and not (path / "model").is_dir():
        raise UsageError(f"the run in {path} did not finish", f"resume it: vitreous train --resume --out {path}")
    folder = locate_bundle(path)
    bundle = load_bundle(folder) if folder and not get_source_fields(run) else open_weights(run).build_bundle()
    if zero_shot:
        bundle = build_zero_shot_bundle(bundle, zero_shot, os.fspath(run))
    for text in bundle.notes:
        note(text)
    bundle = replace(bundle, preprocess=preprocess_for(run, bundle))
    if not bundle.preprocess.stacks:
        bundle.model.any_size = True
    return bundle


def preprocess_for(run: str | os.PathLike[str], bundle: Bundle) -> Preprocess:
    """Return the preprocessing of a bundle, with native aspect ratios if the options in `run` request them. Raises
    UsageError for a model that does not support them, and for `tokens` without native aspect ratios."""
    preprocess, config = bundle.preprocess, bundle.model.config
    if not isinstance(run, WeightsSource) or not (run.native_aspect or run.tokens is not None):
        return preprocess
    if not run.native_aspect and preprocess.stacks:
        problem = f"--tokens is for images at their native aspect ratio, but {run} uses square images"
        raise UsageError(problem, "add --native-aspect, or leave --tokens out")
    check_can_pack(config)
    tokens = run.tokens or preprocess.count_tokens(patch_grid(preprocess.image, config.patch))
    return NativePreprocess.from_preprocess(preprocess, tokens, config.patch)


def select_task_bundle(
    run: str | os.PathLike[str], bundle: Bundle, headless: bool, note: Callable[[str], None], dense: bool
) -> Bundle:
    """Return the bundle, or that of its backbone, according to `headless` and `dense` as in `open_bundle`. Raises
    UsageError for a model that they reject."""
    if isinstance(bundle.model, BackboneWithHead):
        if dense:
            return bundle
        if not headless:
            hint = "use `vitreous evaluate RUN` and `vitreous predict RUN IMAGES --out FOLDER`"
            raise UsageError(f"{run} {bundle.task.missing_outputs[0]}", hint)
        note(f"only the backbone is used: the model {bundle.task.verb_phrase}")
        bundle = replace(bundle, model=bundle.model.backbone.eval(), task=FeatureExtraction())
    if not bundle.task.outputs and not headless:
        hint = f"use `vitreous embed`, or train one: vitreous train DATA --init {run}"
        if bundle.model.config.has_text:
            hint = (
                f'name the classes (--labels "cat" "dog"; for `evaluate`: --zero-shot, or `--protocol retrieval`), or '
                f"train one: vitreous train DATA --init {run}"
            )
        raise UsageError(f"{run} {bundle.task.missing_outputs[0]}", hint)
    return bundle


def read_task_type(run: str | os.PathLike[str]) -> type[Task]:
    """Read the task type of a run or a bundle from its `model.json`; classification if it has none."""
    try:
        folder = None if get_source_fields(run) or get_label_source(run) else locate_bundle(Path(run))
        task: Json = json.loads((folder / DESCRIPTION_FILE).read_text("utf-8")).get("task") if folder else None
    except (OSError, ValueError, AttributeError, TypeError):
        task = None
    return TASKS.get(str(task.get("name")) if isinstance(task, dict) else "", Classification)
