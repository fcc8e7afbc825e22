"""Open a trained model: the bundle of a run folder, of a bundle's folder, or of foreign weights."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from vitreous.config import Json
from vitreous.data.modalities.base import Preprocess
from vitreous.data.modalities.native import NativePreprocess
from vitreous.errors import UsageError, check_path
from vitreous.models.dense import Dense
from vitreous.models.packed import check_packs
from vitreous.nn.sizes import grid_of
from vitreous.tasks.base import Task
from vitreous.tasks.classification import Classification
from vitreous.tasks.features import Features
from vitreous.tasks.table import TASKS
from vitreous.weights.adopt import bundle_in, open_weights
from vitreous.weights.bundle import DESCRIPTION, Bundle, load_bundle
from vitreous.weights.model_paths import find_newest_run, holds_images, is_run
from vitreous.weights.options import WeightsSource, known_of
from vitreous.weights.published import nearest_name, published_row


def open_bundle(
    run: str | os.PathLike[str],
    headless: bool = False,
    note: Callable[[str], None] = lambda text: None,
    dense: bool = False,
) -> Bundle:
    """Return the bundle of a run folder, of a bundle's folder, or of foreign weights. `note` is called with each
    assumption.

    A model without a head is refused unless `headless`. One that answers for pixels or with objects is refused unless
    `dense`; of it the backbone is returned where it may be `headless`. Raises WeightsError or UsageError.
    """
    bundle = find_bundle(run, note)
    if not bundle.task.reads_images:
        raise UsageError(f"{run} makes images, and answers nothing about others", f"use `vitreous sample {run}`")
    return check_task(run, bundle, headless, note, dense)


def open_generator(run: str | os.PathLike[str], note: Callable[[str], None] = lambda text: None) -> Bundle:
    """Return the bundle of a model that makes images. Raises UsageError for another, and as `open_bundle`."""
    bundle = find_bundle(run, note)
    if bundle.task.reads_images:
        raise UsageError(f"{run} answers about images, and makes none", "train one: vitreous train DATA --recipe dit")
    return bundle


def find_bundle(run: str | os.PathLike[str], note: Callable[[str], None]) -> Bundle:
    """Return the bundle of a run folder, of a bundle's folder, or of foreign weights, whatever it answers. Raises
    WeightsError or UsageError."""
    check_path(run, "a run")
    path = Path(run)
    if ":" not in os.fspath(run) and not path.exists() and not published_row(run):
        near, newest = nearest_name(os.fspath(run)), find_newest_run()
        hint = f"the newest run here is {newest}" if newest else "`vitreous train` makes one"
        raise UsageError(f"no run at {path}", f"did you mean {near}? {hint}" if near else hint)
    if not is_run(path) and holds_images(os.fspath(run)):
        newest = find_newest_run()
        hint = f"name one; the newest run here is {newest}" if newest else "`vitreous train` makes one"
        raise UsageError(f"{path} holds images, and is no model", hint)
    if (path / "config.yaml").is_file() and not (path / "model").is_dir():
        raise UsageError(f"the run in {path} did not finish", f"continue it: vitreous train --resume --out {path}")
    folder = bundle_in(path)
    bundle = load_bundle(folder) if folder and not known_of(run) else open_weights(run).bundle()
    for text in bundle.notes:
        note(text)
    bundle = replace(bundle, preprocess=preprocess_for(run, bundle))
    if not bundle.preprocess.stacks:
        bundle.model.any_size = True
    return bundle


def preprocess_for(run: str | os.PathLike[str], bundle: Bundle) -> Preprocess:
    """Return how a bundle reads pictures: at their own aspect ratio where the source of the weights says so. Raises
    UsageError for a model that cannot take such."""
    own, config = bundle.preprocess, bundle.model.config
    if not isinstance(run, WeightsSource) or not (run.native_aspect or run.tokens is not None):
        return own
    if not run.native_aspect and own.stacks:
        problem = f"--tokens is about pictures at their own aspect ratio, and {run} reads squares"
        raise UsageError(problem, "add --native-aspect, or leave it out")
    check_packs(config)
    tokens = run.tokens or own.count_tokens(grid_of(own.image, config.patch))
    return NativePreprocess.of(own, tokens, config.patch)


def check_task(
    run: str | os.PathLike[str], bundle: Bundle, headless: bool, note: Callable[[str], None], dense: bool
) -> Bundle:
    """Return the bundle, or that of its backbone, where it answers as it is asked to. Raises UsageError."""
    if isinstance(bundle.model, Dense):
        if dense:
            return bundle
        if not headless:
            hint = "use `vitreous evaluate RUN` and `vitreous predict RUN IMAGES --out FOLDER`"
            raise UsageError(f"{run} {bundle.task.missing_outputs[0]}", hint)
        note(f"of a model that {bundle.task.does}, its backbone alone is used")
        bundle = replace(bundle, model=bundle.model.backbone.eval(), task=Features())
    if not bundle.task.outputs and not headless:
        hint = f"use `vitreous embed`, or train one: vitreous train DATA --init {run}"
        raise UsageError(f"{run} {bundle.task.missing_outputs[0]}", hint)
    return bundle


def read_task(run: str | os.PathLike[str]) -> type[Task]:
    """Return the task of a run or a bundle from its `model.json` alone; classification where there is none."""
    try:
        folder = None if known_of(run) else bundle_in(Path(run))
        task: Json = json.loads((folder / DESCRIPTION).read_text("utf-8")).get("task") if folder else None
    except (OSError, ValueError, AttributeError, TypeError):
        task = None
    return TASKS.get(str(task.get("name")) if isinstance(task, dict) else "", Classification)
