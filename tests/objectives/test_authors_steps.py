"""Twenty steps of DINO and DINOv2 match the optimisation of the authors' code, restated with PyTorch.

Both sides use the objective's forward and backward passes. The comparison covers schedules, parameter groups, weight
decay, freezing, clipping and the teacher's update. `python -m tests.objectives.test_authors_steps` prints the
differences.
"""

from __future__ import annotations

import copy
import tempfile
from collections import defaultdict
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.objectives.sessions import MODEL_CONFIG, OBJECTIVE_CONFIGS, collect_losses, create_session
from vitreous.objectives.base import TrainingProgress
from vitreous.training.loop import run_training_loop
from vitreous.training.run import OptimizerConfig, RampConfig, ScheduleConfig

NUM_STEPS, FROZEN_STEPS, WARMUP_STEPS = 20, 5, 6
BASE_LR, FINAL_LR, MAX_GRAD_NORM, LAYER_DECAY, PATCH_FACTOR = 2e-3, 1e-6, 0.05, 0.9, 0.2
ADAM_EPS = 1e-6  # Adam with a small eps would normalise gradients that are rounding error
WEIGHT_DECAY, TEACHER_MOMENTUM = (0.4, 1.0), (0.9, 1.0)
TEACHER_TEMPERATURE = (0.04, 0.07, 8)
INPUT_PARAMETERS = ("mask_token", "model.projection.", "model.position.", "model.prefix", "model.slots")


def cosine_schedule(base, final, total, warmup=0):
    """Return `total` values: numpy.linspace from 0 to `base` during warm-up, then a cosine from `base` to `final`."""
    shares = np.arange(total - warmup) / (total - warmup)
    curve = final + 0.5 * (base - final) * (1 + np.cos(np.pi * shares))
    return np.concatenate([np.linspace(0, base, warmup), curve])


def is_prototype(name):
    return name.endswith(("prototypes.weight", "lengths"))


def build_parameter_groups(module, name):
    """Return one optimiser group per parameter, with `decays`, `factor` and `prototype`."""
    groups = []
    for key, parameter in module.named_parameters():
        if not parameter.requires_grad:
            continue
        factor = 1.0
        if name == "dino":  # vectors and biases have no weight decay
            decays = not key.endswith(".bias") and parameter.ndim > 1
        else:  # biases, norms and layer scales have no weight decay
            decays = not (key.endswith((".bias", ".scale")) or "norm" in key)
            layer = MODEL_CONFIG.depth + 1
            if key.startswith(INPUT_PARAMETERS):
                layer = 0
            elif ".blocks." in key:
                layer = 1 + int(key.partition(".blocks.")[2].partition(".")[0])
            factor = LAYER_DECAY ** (MODEL_CONFIG.depth + 1 - layer) * (PATCH_FACTOR if "projection" in key else 1.0)
        groups.append({"params": [parameter], "decays": decays, "factor": factor, "prototype": is_prototype(key)})
    return groups


def clip_gradients(module, name):
    """Clip gradients: for DINO each tensor; for DINOv2 the backbone with its mask token, and each head."""
    groups = defaultdict(list)
    for key, parameter in module.named_parameters():
        if parameter.grad is not None:
            module_name = "model" if key == "mask_token" else key.partition(".")[0]
            groups[key if name == "dino" else module_name].append(parameter)
    for parameters in groups.values():
        torch.nn.utils.clip_grad_norm_(parameters, MAX_GRAD_NORM)


def train_authors_reference(module, batches, name):
    """Train a copy of an objective on prepared batches by the restated code; return the loss of each step."""
    lr, momentum = (
        cosine_schedule(BASE_LR, FINAL_LR, NUM_STEPS, WARMUP_STEPS),
        cosine_schedule(*TEACHER_MOMENTUM, NUM_STEPS),
    )
    decay, losses = cosine_schedule(*WEIGHT_DECAY, NUM_STEPS), []
    start, end, ramp = TEACHER_TEMPERATURE
    temperatures = np.concatenate([np.linspace(start, end, ramp), np.full(NUM_STEPS - ramp, end)])
    optimizer = torch.optim.AdamW(build_parameter_groups(module, name), betas=(0.9, 0.999), eps=ADAM_EPS)
    pairs = {"model": "teacher", "head": "teacher_head", "patch_head": "teacher_patch_head"}
    for step, batch in enumerate(batches):
        for group in optimizer.param_groups:
            is_frozen = name != "dino" and group["prototype"] and step < FROZEN_STEPS
            group["lr"] = 0.0 if is_frozen else lr[step] * group["factor"]
            group["weight_decay"] = decay[step] * group["decays"]
        module.temperature.fill_(temperatures[step])
        optimizer.zero_grad()
        loss = module(batch)["loss"]
        loss.backward()
        clip_gradients(module, name)
        if name == "dino" and step < FROZEN_STEPS:
            for key, parameter in module.named_parameters():
                if is_prototype(key):
                    parameter.grad = None
        optimizer.step()
        with torch.no_grad():
            for student in dict(module.named_children()).keys() & pairs:
                teacher = getattr(module, pairs[student])
                for weight, follower in zip(getattr(module, student).parameters(), teacher.parameters(), strict=True):
                    follower.mul_(momentum[step]).add_((1 - momentum[step]) * weight)
            module.after_step(TrainingProgress(values={"momentum": 1.0}))  # updates only the centres
        losses.append(loss.item())
    return losses


def compare_runs(name, home):
    """Return the largest relative difference of a loss, and of each trained tensor after all steps."""
    objective = replace(OBJECTIVE_CONFIGS[name], frozen=FROZEN_STEPS / NUM_STEPS, unit_prototypes=False)
    optimizer = OptimizerConfig(
        lr=BASE_LR, eps=ADAM_EPS, weight_decay=WEIGHT_DECAY[0], clip=MAX_GRAD_NORM, decay_on="multi-axis"
    )
    optimizer = replace(optimizer, clip_by="tensor" if name == "dino" else "part")
    if name != "dino":
        optimizer = replace(optimizer, layer_decay=LAYER_DECAY, rates=(("model.projection.", PATCH_FACTOR),))
    ramps = {
        "weight_decay": RampConfig(*WEIGHT_DECAY),
        "momentum": RampConfig(*TEACHER_MOMENTUM),
        "teacher_temperature": RampConfig(
            *TEACHER_TEMPERATURE[:2], "linear", TEACHER_TEMPERATURE[2], includes_end=True
        ),
    }
    model = MODEL_CONFIG.with_options(registers=1, positions={"kind": "learned"}, norm={"layer_scale": 0.5})
    schedule = ScheduleConfig(WARMUP_STEPS, end=FINAL_LR / BASE_LR, warmup_includes_base=True)
    changes = {"optimizer": optimizer, "schedule": schedule, "schedules": ramps, "model": model}
    session, state = create_session(name, home, objective=objective, **changes)
    reference_objective = copy.deepcopy(session.build().objective)
    batches = [copy.deepcopy(batch) for _, batch in session.batches(session.build())]
    for parameter in reference_objective.parameters():
        parameter.grad = None
    expected = train_authors_reference(reference_objective, batches, name)
    curve = collect_losses(session, state)
    loss = max(abs(a - b) / abs(b) for a, b in zip(curve, expected, strict=True))
    trained = dict(state.objective.named_parameters())
    tensors = {
        key: ((trained[key] - parameter).norm() / parameter.norm()).item()
        for key, parameter in reference_objective.named_parameters()
        if not key.endswith("qkv.bias")  # gradients of key biases are rounding error, which Adam normalises
    }
    counts = {key: int(count) for key, count in state.optimizers.get_state().items() if key.startswith("step/")}
    assert {count for key, count in counts.items() if "frozen" in key} == {
        NUM_STEPS - FROZEN_STEPS if name == "dino" else NUM_STEPS
    }
    assert {count for key, count in counts.items() if "frozen" not in key} == {NUM_STEPS}
    return loss, tensors


@pytest.mark.parametrize("name", ["dino", "dinov2", "dinov2-sinkhorn"])
def test_twenty_steps_match_the_authors_code(name, tmp_path):
    loss, tensors = compare_runs(name, tmp_path)
    assert loss < 1e-5
    assert max(tensors.values()) < 1e-5, max(tensors, key=lambda key: tensors[key])


def compare_averaged_weights(home, **changes):
    """Return the relative difference between our averaged weights and DiT's `update_ema` after 20 steps."""
    session, state = create_session("diffusion", home, ema=0.99, **changes)
    expected = state.flat.master.clone()
    run_training_loop(
        state, session.batches(state), [(1, lambda s: expected.mul_(0.99).add_(s.flat.master, alpha=0.01))]
    )
    return ((state.flat.average - expected).norm() / expected.norm()).item()


def test_the_average_without_a_warm_up_is_dits(tmp_path):
    assert compare_averaged_weights(tmp_path, ema_warmup=False) < 1e-6
    assert compare_averaged_weights(tmp_path, ema_warmup=True) > 1e-3


if __name__ == "__main__":
    torch.set_num_threads(1)
    for name in ("dino", "dinov2", "dinov2-sinkhorn"):
        with tempfile.TemporaryDirectory() as scratch:
            loss, tensors = compare_runs(name, Path(scratch))
        ranked = sorted(tensors, key=lambda key: -tensors[key])
        print(f"{name}: loss {loss:.1e}; tensors", {key: f"{tensors[key]:.1e}" for key in ranked[:6]})
    with tempfile.TemporaryDirectory() as scratch:
        averages = {warms: compare_averaged_weights(Path(scratch), ema_warmup=warms) for warms in (True, False)}
        print("averaged weights, by EMA warm-up:", {warms: f"{value:.1e}" for warms, value in averages.items()})
