"""The device of the GPU tests, comparisons with detailed messages, and training sessions on that device.

With `VITREOUS_GPU_TESTS=cpu` the tests run on a CPU, to find faults in the tests themselves.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor

from tests.objectives import sessions
from tests.objectives.test_distillation import CLASSES
from vitreous.data.augmentation.augment import Augment
from vitreous.data.modalities.images import ImagePreprocess
from vitreous.data.options import DataOptions
from vitreous.data.split import ArraySplit
from vitreous.training.batches import RunInputs
from vitreous.training.flat import FlatParameters
from vitreous.training.folder import RunFolder
from vitreous.training.loop import run_training_loop
from vitreous.training.run import OptimizerConfig, Run, ScheduleConfig
from vitreous.training.session import Session

DEVICE = "cpu" if os.environ.get("VITREOUS_GPU_TESTS") == "cpu" else "cuda:0"
ON_GPU = DEVICE.startswith("cuda")
OBJECTIVE_NAMES = ("supervised", *sessions.OBJECTIVE_CONFIGS)

#: maximum relative error of a loss and a gradient, compared with a CPU in float32
LOSS_LIMIT = {"fp32": 1e-4, "bf16": 3e-2}
GRADIENT_LIMIT = {"fp32": 1e-3, "bf16": 0.1}


def compute_relative_error(actual: Any, expected: Any) -> float:
    """|actual - expected| / |expected| in float64, for tensors on any device, arrays or numbers."""
    a, b = (torch.as_tensor(value).detach().cpu().double() for value in (actual, expected))
    assert a.shape == b.shape, f"shapes differ: {tuple(a.shape)} and {tuple(b.shape)}"
    if not a.numel():
        return 0.0
    return float((a - b).norm() / b.norm().clamp_min(1e-30))


def check_close(name: str, actual: Any, expected: Any, limit: float) -> None:
    """Fail if the relative error exceeds `limit`; the message has all numbers."""
    error = compute_relative_error(actual, expected)
    if error <= limit:
        return
    a, b = (torch.as_tensor(value).detach().cpu().double().flatten() for value in (actual, expected))
    worst = (a - b).abs().nan_to_num(torch.inf).argmax()
    raise AssertionError(
        f"{name}: relative error {error:.3g} is above {limit:g} on {DEVICE}; largest difference at flat index "
        f"{int(worst)} of {len(a)}: {a[worst]:.6g}, expected {b[worst]:.6g}; norms {a.norm():.6g} and {b.norm():.6g}; "
        f"not finite: {int((~a.isfinite()).sum())} and {int((~b.isfinite()).sum())}; "
        f"dtypes {getattr(actual, 'dtype', type(actual))} and {getattr(expected, 'dtype', type(expected))}"
    )


def check_tensors_close(name: str, actual: Mapping[str, Tensor], expected: Mapping[str, Tensor], limit: float) -> None:
    """Fail if the tensors of a mapping, as one vector, differ by more than `limit`; the message lists the five most
    different tensors."""
    assert actual.keys() == expected.keys(), f"{name}: names differ: {sorted(actual.keys() ^ expected.keys())}"
    names = sorted(expected)
    joined, reference = (torch.cat([t[n].detach().cpu().double().flatten() for n in names]) for t in (actual, expected))
    error = compute_relative_error(joined, reference)
    if error <= limit:
        return
    errors = {n: compute_relative_error(actual[n], expected[n]) for n in names}
    total = float(reference.norm())
    worst = sorted(names, key=lambda n: -float((actual[n].cpu().double() - expected[n].cpu().double()).norm()))[:5]
    lines = [f"{n}: {errors[n]:.3g} (norm {float(expected[n].double().norm()) / total:.2g} of all)" for n in worst]
    raise AssertionError(f"{name}: relative error {error:.3g} is above {limit:g} on {DEVICE}; most: {'; '.join(lines)}")


def check_bit_identical(name: str, actual: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    """Fail unless all tensors are bit-identical; the message lists how many elements differ, and by how much."""
    assert actual.keys() == expected.keys(), f"{name}: names differ: {sorted(actual.keys() ^ expected.keys())}"
    different = []
    for key in expected:
        a, b = actual[key].detach().cpu(), expected[key].detach().cpu()
        if not torch.equal(a, b):
            different.append(f"{key}: {int((a != b).sum())} of {b.numel()}, {compute_relative_error(a, b):.3g}")
    assert not different, f"{name}: {len(different)} of {len(expected)} tensors differ on {DEVICE}: {different[:8]}"


def move_to(value: Any, device: str, dtype: torch.dtype | None = None) -> Any:
    """Move tensors in lists and dicts to a device; floating-point tensors to `dtype`, if set."""
    if isinstance(value, Tensor):
        return value.to(device, dtype if dtype and value.is_floating_point() else value.dtype)
    if isinstance(value, list | tuple):
        return [move_to(entry, device, dtype) for entry in value]
    return {key: move_to(entry, device, dtype) for key, entry in value.items()} if isinstance(value, dict) else value


def create_supervised_session(folder: Path, images: Tensor | None = None, **changes: Any) -> tuple[Session, Any]:
    """A supervised session on patterned images in memory, and its state: 20 steps of 8 images, deterministic forward
    pass.

    `images`: (n, H, W, 3) uint8 replaces the images; `labels` (n,) or (n, K) replaces the labels. Other `changes` are
    fields of the run.
    """
    split = sessions.make_image_split()
    pixels = split.pixels if images is None else images.numpy()
    labels = changes.pop("labels", None)
    if labels is None:
        labels = split.labels if images is None else np.arange(len(pixels)) % 3
    split, size = ArraySplit(pixels, labels), pixels.shape[1:3]
    model = sessions.MODEL_CONFIG.with_options(image=size, classes=3, positions={"kind": "learned"})
    run = Run(
        data=DataOptions("synthetic", CLASSES, len(pixels), "", cache=True),
        model=model,
        preprocess=ImagePreprocess(size),
        views=Augment(flip=0.5),
        optimizer=OptimizerConfig(name="sgd", lr=0.05),
        schedule=ScheduleConfig(2),
        batch_size=8,
        epochs=5.0,
    )
    run = replace(run, **{name: c(getattr(run, name)) if callable(c) else c for name, c in changes.items()})
    cached = torch.from_numpy(pixels.transpose(0, 3, 1, 2).copy())
    session = Session(run, RunInputs(split, None, cached), RunFolder(folder))
    state = session.build()
    fill_zero_parameters(state.flat)
    return session, state


def fill_zero_parameters(flat: FlatParameters) -> None:
    """Randomise parameters that start at zero, such as heads: an encoder has no gradient behind a zero head."""
    generator = torch.Generator().manual_seed(3)
    for _, view in sorted(flat.views(flat.master).items()):
        drawn = torch.randn(view.shape, generator=generator)
        if not view.any():
            view.copy_(0.1 * drawn)
    flat.working_copy.copy_(flat.master)
    flat.average.copy_(flat.master)


def create_objective_session(name: str, folder: Path, **changes: Any) -> tuple[Session, Any]:
    """A session of `supervised` or of an objective of `tests.objectives.sessions`, trained with SGD: unlike AdamW's,
    its steps do not depend on the sign of gradients near 0."""
    if name == "supervised":
        return create_supervised_session(folder, **changes)
    clip_by = "tensor" if name == "dino" else "part" if name.startswith("dinov2") else "all"
    sgd = OptimizerConfig(name="sgd", lr=0.05, clip=3.0, clip_by=clip_by)
    session, state = sessions.create_session(name, folder, **{"optimizer": sgd, **changes})
    fill_zero_parameters(state.flat)
    return session, state


def record_steps(session: Session, state: Any, steps: int | None = None) -> tuple[list[float], list[dict[str, Tensor]]]:
    """Train `steps` steps, or all; returns the loss of each forward pass and the gradient of each step, by parameter
    name, on the CPU."""
    losses: list[Tensor] = []
    gradients: list[dict[str, Tensor]] = []
    step_optimizers = state.optimizers.step

    def record_loss(module, inputs, outputs) -> None:
        losses.append(outputs["loss"].detach().clone())

    def record_gradient(*arguments: Any) -> None:
        views = state.flat.views(state.flat.master_grad)
        gradients.append({name: view.detach().to("cpu", copy=True) for name, view in views.items()})
        step_optimizers(*arguments)

    handle = state.objective.register_forward_hook(record_loss)
    state.optimizers.step = record_gradient
    with mock.patch.dict(os.environ, {"VITREOUS_CUDA_GRAPHS": "0"}):  # a CUDA graph calls no hooks
        run_training_loop(state, session.batches(state), stop_after(steps))
    state.optimizers.step = step_optimizers
    handle.remove()
    return [float(loss) for loss in losses], gradients


def stop_after(steps: int | None) -> list[tuple[int, Callable[[Any], None]]]:
    """Hooks of `run_training_loop` that end it after this step."""
    return [] if steps is None else [(1, lambda state: setattr(state, "should_stop", state.step >= steps))]


def copy_state(state: Any) -> dict[str, Tensor]:
    """The content of a checkpoint on the CPU: master weights, average, optimiser state and the objective's tensors."""
    tensors = {f"master/{name}": view for name, view in state.flat.views(state.flat.master).items()}
    tensors |= {f"average/{name}": view for name, view in state.flat.views(state.flat.average).items()}
    tensors |= {f"optimizer/{name}": view for name, view in state.optimizers.get_state().items()}
    tensors |= {f"objective/{name}": view for name, view in state.objective.state_dict().items()}
    return {name: tensor.detach().to("cpu", copy=True) for name, tensor in tensors.items()}
