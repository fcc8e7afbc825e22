"""The objective of a run as it was at its end, with the parts that the bundle's model does without."""

from __future__ import annotations

import json
import os
from pathlib import Path

import torch

from vitreous.errors import UsageError, WeightsError
from vitreous.models.zoo import build
from vitreous.objectives.base import Objective, Setting
from vitreous.training.checkpoint import quick_flaw
from vitreous.training.folder import Folder
from vitreous.training.run import Run
from vitreous.training.tune import prepare
from vitreous.weights.sharded import tensors_in

ABLE = "mae and masked-patches restore images"


def load_objective(source: str | os.PathLike[str]) -> Objective:
    """Return the objective of a run that restores images, in float32, in evaluation mode, from the run's checkpoint.

    Raises UsageError for what is no run, for an objective that restores nothing, and where no checkpoint is left;
    WeightsError for a checkpoint of another objective.
    """
    folder = run_of(Path(source))
    if folder is None:
        hint = f"name the folder of a run; of vitreous's recipes {ABLE}"
        raise UsageError(f"{source} has no decoder to restore images with", hint)
    run = folder.run()
    if not run.objective.restoration():
        hint = f"{ABLE}: vitreous train DATA --recipe mae"
        raise UsageError(f"{folder.path} learned by {run.objective.name}, which restores no image", hint)
    place = checkpoint_of(folder, run)
    if place is None:
        hint = "restore RUN/checkpoints, or train again and keep them"
        raise UsageError(f"{folder.path} has no checkpoint left, and with it no decoder to restore images with", hint)
    objective = build_objective(run)
    held = {name: tensor for part in ("frozen", "model", "ema") for name, tensor in tensors_in(place, part).items()}
    own = objective.state_dict()
    if lacking := [name for name, tensor in own.items() if name not in held or held[name].shape != tensor.shape]:
        raise WeightsError(f"{place} lacks {lacking[0]} of the shape that the run has", "is it of another run?")
    objective.load_state_dict({name: held[name] for name in own})
    return objective.eval()


def run_of(path: Path) -> Folder | None:
    """Return the run of a folder, or of a bundle in it; None for other weights."""
    places = (path, path.parent) if (path / "model.json").is_file() else (path,)
    return next((Folder(place) for place in places if (place / "config.yaml").is_file()), None)


def checkpoint_of(folder: Folder, run: Run) -> Path | None:
    """Return the checkpoint whose weights the bundle has: the newest, or with --keep-best the best."""
    store = folder.store(run.keep)
    summary = json.loads(folder.summary.read_text("utf-8")) if folder.summary.is_file() else {}
    best = (summary.get("selection") or {}).get("kept_step")
    places = [*([store.place(best)] if best else []), *store.places()]
    return next((place for place in places if quick_flaw(place) is None), None)


def build_objective(run: Run) -> Objective:
    """Return the objective of a run with weights that are yet to be loaded."""
    with torch.random.fork_rng(devices=[]):
        model = build(run.model)
        prepare(model, run.tune)
        normalisation = (run.preprocess.mean, run.preprocess.std)
        setting = Setting(run.seed, run.data.classes, False, run.views, run.data.repeats, torch.float32, normalisation)
        return run.objective.build(model, setting)
