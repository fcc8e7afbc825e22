"""The objective of a run as it was at its end: its bundle's model, and the parts that lie beside it."""

from __future__ import annotations

import os
from pathlib import Path

import torch

from vitreous.config import from_plain
from vitreous.errors import UsageError, WeightsError
from vitreous.objectives.base import Objective, Setting
from vitreous.objectives.table import OBJECTIVES
from vitreous.weights.adopt import bundle_in
from vitreous.weights.bundle import DESCRIPTION, load_bundle
from vitreous.weights.parts import adopt_parts, load_parts

ABLE = "mae and masked-patches restore images"


def load_objective(source: str | os.PathLike[str]) -> Objective:
    """Return the objective of a run or bundle that restores images, in float32, in evaluation mode.

    Raises UsageError for weights without the parts of an objective, and for an objective that restores nothing;
    WeightsError where parts are damaged or of another model.
    """
    folder = bundle_in(Path(source))
    parts = load_parts(folder, folder / DESCRIPTION) if folder else None
    if folder is None or parts is None:
        hint = f"name a run, or its bundle; of vitreous's recipes {ABLE}"
        raise UsageError(f"{source} has no decoder to restore images with", hint)
    name = parts.config.get("name", "")
    if name not in OBJECTIVES:
        raise WeightsError(
            f"{folder} learned by {name!r}, which this version does not know", "install a newer vitreous"
        )
    config = from_plain(OBJECTIVES[name], parts.config)
    if not config.restoration():
        hint = f"{ABLE}: vitreous train DATA --recipe mae"
        raise UsageError(f"{source} learned by {name}, which restores no image", hint)
    bundle = load_bundle(folder)
    setting = Setting(normalisation=(bundle.preprocess.mean, bundle.preprocess.std))
    with torch.random.fork_rng(devices=[]):
        objective = config.build(bundle.model, setting)
    if left := adopt_parts(objective, parts).left:
        raise WeightsError(f"{folder}: {', '.join(left)} does not fit the model", "restore the bundle from a copy")
    return objective.eval()
