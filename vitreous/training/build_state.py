"""Build the state of a run at step 0: model, initial weights, objective, flat weights and optimisers."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from vitreous.config import to_plain
from vitreous.data.keys import key
from vitreous.models import zoo
from vitreous.models.zoo import Model
from vitreous.objectives.base import Objective
from vitreous.system.machine import DTYPES
from vitreous.training.batches import Inputs, mean_work
from vitreous.training.compute import count_gradients
from vitreous.training.flat import Flat
from vitreous.training.groups import group_of
from vitreous.training.loop import State
from vitreous.training.optimizer import Optimizers
from vitreous.training.ranks import Ranks
from vitreous.training.run import Run
from vitreous.training.sharded import Sharded
from vitreous.training.tune import prepare, recompute_blocks
from vitreous.weights.adopt import adopt, parts_of
from vitreous.weights.objective_parts import adopt_parts
from vitreous.weights.options import WeightsSource

FP16_SCALE = 2.0**16  # of the loss, at the start of a run in float16


def build_state(run: Run, inputs: Inputs, ranks: Ranks, note: Callable[[str], None]) -> State:
    """Build the state of a run at step 0, in this process.

    `note` is called with texts about adopted weights and about the parameters that are trained.
    """
    torch.manual_seed(int(key(run.seed)) >> 1)
    objective = build_objective(run, build_model(run, note), inputs, note)
    objective.reduce, objective.gather = ranks.mean, ranks.gather_rows
    flat = flatten_weights(run, objective, ranks)
    return State(
        run=run,
        objective=objective,
        flat=flat,
        optimizers=Optimizers(run.optimizer, flat),
        ranks=ranks,
        work=mean_work(run, inputs),
        scale=FP16_SCALE if run.precision == "fp16" else 1.0,
    )


def build_model(run: Run, note: Callable[[str], None]) -> Model:
    """Build the model of a run with its initial weights, and freeze or adapt it as `run.tune` sets."""
    model = zoo.build_model(run.model)
    run.objective.initialise(model)
    if run.init:
        names = run.objective.output_names(run.data.classes, run.data.targets)
        note(adopt(model, WeightsSource(run.init, source_size=run.init_source_size), names).text())
    if description := prepare(model, run.tune):
        note(description)
    if run.recompute:
        recompute_blocks(model)
    return model


def build_objective(run: Run, model: Model, inputs: Inputs, note: Callable[[str], None]) -> Objective:
    """Build the objective of a run around its model. If the initial weights come with the parts of the same objective,
    such as a decoder or a projection head, it starts with these."""
    multilabel = inputs.train.labels.ndim == 2 and bool(run.data.classes)
    objective = run.objective.build(model, run.objective_setting(multilabel))
    parts = parts_of(run.init) if run.init else None
    if parts and parts.config["name"] == run.objective.name:
        config = to_plain(run.objective) | {"classes": list(run.data.classes)}
        note(f"{run.objective.name} {adopt_parts(objective, config, parts).text()}")
    return objective


def flatten_weights(run: Run, objective: Objective, ranks: Ranks) -> Flat:
    """Turn the parameters of an objective into flat vectors on this process's device, whole or sharded (FSDP)."""
    dtype, device = DTYPES[run.precision], torch.device(ranks.device(run.device))
    group = partial(group_of, run.optimizer, run.model, objective)
    if ranks.joined and run.parallel == "fsdp":
        return Sharded(objective, dtype, device=device, ranks=ranks, ema=run.ema, group_of=group)
    return Flat(objective, dtype, device=device, ema=run.ema, shards=count_gradients(run, ranks), group_of=group)
