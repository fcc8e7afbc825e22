"""Build the state of a run at step 0: model, initial weights, objective, flat weights and optimisers."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from vitreous.config import to_builtins
from vitreous.data.keys import derive_keys
from vitreous.models import zoo
from vitreous.models.zoo import Model
from vitreous.objectives.base import Objective
from vitreous.system.machine import DTYPES
from vitreous.training.batches import RunInputs, mean_sample_cost
from vitreous.training.compute import count_gradient_buffers
from vitreous.training.flat import FlatParameters
from vitreous.training.groups import choose_group
from vitreous.training.loop import TrainingState
from vitreous.training.optimizer import FlatOptimizer
from vitreous.training.ranks import Ranks
from vitreous.training.run import Run
from vitreous.training.sharded import ShardedParameters
from vitreous.training.tune import enable_block_recompute, prepare_fine_tuning
from vitreous.weights.adopt import load_pretrained_weights, open_objective_state
from vitreous.weights.objective_parts import load_into_objective
from vitreous.weights.options import WeightsSource

INITIAL_FP16_SCALE = 2.0**16  # loss scale at the start of a run in float16


def build_state(run: Run, inputs: RunInputs, ranks: Ranks, note: Callable[[str], None]) -> TrainingState:
    """Build the state of a run at step 0 in this process: model, objective, flat weights and optimiser.

    `note` receives messages about loaded weights and about the trainable parameters.
    """
    torch.manual_seed(int(derive_keys(run.seed)) >> 1)
    objective = build_objective(run, build_run_model(run, note), inputs, note)
    objective.reduce, objective.gather, objective.ring = ranks.mean, ranks.gather_samples, ranks
    flat = flatten_weights(run, objective, ranks)
    return TrainingState(
        run=run,
        objective=objective,
        flat=flat,
        optimizers=FlatOptimizer(run.optimizer, flat),
        ranks=ranks,
        sample_cost=mean_sample_cost(run, inputs),
        scale=INITIAL_FP16_SCALE if run.precision == "fp16" else 1.0,
    )


def build_run_model(run: Run, note: Callable[[str], None]) -> Model:
    """Build the model of a run with its initial weights, and freeze parameters or add LoRA adapters as `run.tune`
    specifies. `note` receives messages about loaded weights and trainable parameters."""
    model = zoo.build_model(run.model)
    run.objective.initialise(model)
    if run.init:
        names = run.objective.output_names(run.data.classes, run.data.targets)
        note(load_pretrained_weights(model, WeightsSource(run.init, source_size=run.init_source_size), names).text())
    if description := prepare_fine_tuning(model, run.tune):
        note(description)
    if run.recompute:
        enable_block_recompute(model)
    return model


def build_objective(run: Run, model: Model, inputs: RunInputs, note: Callable[[str], None]) -> Objective:
    """Build the objective of a run around its model.

    If `run.init` was trained with the same objective and contains its modules, such as a decoder or a projection head,
    these are loaded too. `note` then receives a message.
    """
    multilabel = inputs.train.labels.ndim == 2 and bool(run.data.classes)
    objective = run.objective.build(model, run.objective_setting(multilabel))
    objective_state = open_objective_state(run.init, run.model) if run.init else None
    if objective_state and objective_state.config["name"] == run.objective.name:
        config = to_builtins(run.objective) | {"classes": list(run.data.classes)}
        note(f"{run.objective.name} {load_into_objective(objective, config, objective_state).text()}")
    return objective


def flatten_weights(run: Run, objective: Objective, ranks: Ranks) -> FlatParameters:
    """Move the parameters of an objective into flat vectors on this process's device: complete vectors, or this
    process's shard with FSDP."""
    dtype, device = DTYPES[run.precision], torch.device(ranks.device(run.device))
    group = partial(choose_group, run.optimizer, run.model, objective)
    if ranks.is_initialised and run.parallel == "fsdp":
        return ShardedParameters(objective, dtype, device=device, ranks=ranks, ema=run.ema, group_of=group)
    return FlatParameters(
        objective, dtype, device=device, ema=run.ema, shards=count_gradient_buffers(run, ranks), group_of=group
    )
