"""The objective of a run as it was at its end: its model, and the parts that lie beside it."""

from __future__ import annotations

import os

import torch

from vitreous.config import from_plain
from vitreous.errors import UsageError, WeightsError
from vitreous.objectives.base import Objective, Setting
from vitreous.objectives.table import OBJECTIVES
from vitreous.weights.adopt import open_weights, parts_of
from vitreous.weights.objective_parts import adopt_parts

ABLE = "mae and masked-patches restore images"


def load_objective(source: str | os.PathLike[str]) -> Objective:
    """Return the objective of a run, a bundle or others' MAE that restores images, in float32, in evaluation mode.

    Raises UsageError for weights without the parts of an objective, and for an objective that restores nothing;
    WeightsError where parts are damaged or of another model.
    """
    parts = parts_of(source)
    if parts is None:
        hint = f"name a run, its bundle, or MAE's weights with their decoder; of vitreous's recipes {ABLE}"
        raise UsageError(f"{source} has no decoder to restore images with", hint)
    name = parts.config.get("name", "")
    if name not in OBJECTIVES:
        raise WeightsError(
            f"{source} learned by {name!r}, which this version does not know", "install a newer vitreous"
        )
    config = from_plain(OBJECTIVES[name], parts.config)
    if not config.restoration():
        hint = f"{ABLE}: vitreous train DATA --recipe mae"
        raise UsageError(f"{source} learned by {name}, which restores no image", hint)
    bundle = open_weights(source).bundle()
    setting = Setting(normalisation=(bundle.preprocess.mean, bundle.preprocess.std))
    with torch.random.fork_rng(devices=[]):
        objective = config.build(bundle.model, setting)
    if left := adopt_parts(objective, parts.config, parts).left:
        raise WeightsError(f"{source}: {', '.join(left)} does not fit the model", "restore the bundle from a copy")
    return objective.eval()
