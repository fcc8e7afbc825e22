"""The training loop: optimiser steps, their metrics, and hooks after steps."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from vitreous.data.batch import Batch
from vitreous.errors import NonFiniteError
from vitreous.objectives.base import Objective, TrainingProgress
from vitreous.system.machine import use_deterministic_kernels
from vitreous.training.compute import GradientComputer
from vitreous.training.flat import FlatParameters
from vitreous.training.optimizer import FlatOptimizer
from vitreous.training.ranks import SINGLE_PROCESS, Ranks
from vitreous.training.run import Run
from vitreous.training.schedule import ramp_value, schedule_factor
from vitreous.training.shards import Scalars
from vitreous.training.slices import StepSlice

MAX_LOSS_SCALE = 2.0**24  # maximum loss scale in float16
LOSS_SCALE_GROWTH_STEPS = 2000  # consecutive finite steps after which the loss scale doubles
#: a slice of a step, and its batch; {} for an empty slice
SliceBatch = tuple[StepSlice, Batch]


def defers_metrics(run: Run, device: torch.device) -> bool:
    """Return whether the loop reads the metrics of a step only after it has enqueued the next step.

    This is the case on CUDA, unless the next step depends on the metrics, as the loss scale in float16 and the number
    of skipped steps do.
    """
    return device.type == "cuda" and not (run.reproducible or run.skip_steps or run.precision == "fp16")


def sum_metrics(names: Sequence[str], scalars: Scalars, device: torch.device, ranks: Ranks) -> dict[str, float]:
    """Return the metrics `names` of a step, summed over all processes. `scalars` are this process's shares."""
    return {name: ranks.sum_number(float(scalars.get(name, 0.0)), str(device)) for name in names}


class DeferredMetrics:
    """The loss, other logged scalars and gradient norm of a step, summed over all processes, while they are copied from
    the device.

    A GPU runs behind the Python program. Reading a value immediately would synchronise with the GPU and leave it idle
    while the next step is prepared. The metrics of a step are therefore copied in the background and read after the
    next step has been enqueued.

    Args:
        step: the number of the step, from 1.
        names: the names of the metrics.
        scalars: this process's shares of the metrics by name, scalars.
        norm: the norm of the whole gradient, a scalar.
        samples: the sample indices of the step, (n,) int64, on the CPU.
        ranks: the processes to sum over.
    """

    def __init__(
        self, step: int, names: Sequence[str], scalars: Scalars, norm: Tensor, *, samples: Tensor, ranks: Ranks
    ) -> None:
        self.step, self.names, self.samples = step, names, samples
        zero = norm.new_zeros((), dtype=torch.float32)
        shares = [zero + scalars.get(name, 0.0) for name in names]
        values = torch.cat([ranks.sum(torch.stack(shares)), norm.detach().float()[None]])
        self.values = torch.empty(len(values), pin_memory=values.is_cuda)
        self.values.copy_(values, non_blocking=True)
        self.copy_event = torch.cuda.Event() if values.is_cuda else None
        if self.copy_event is not None:
            self.copy_event.record()

    def read(self) -> tuple[dict[str, float], float]:
        """Wait until the step is computed, and return its metrics by name and the norm of its gradient."""
        if self.copy_event is not None:
            self.copy_event.synchronize()
        *metrics, norm = self.values.tolist()
        return dict(zip(self.names, metrics, strict=True)), norm


@dataclass(kw_only=True)
class TrainingCounters:
    """The counters of a run in progress, which a checkpoint stores in addition to tensors."""

    step: int = 0  # optimiser steps so far
    images: int = 0  # samples so far, which is the position in the run's stream of samples
    losses: float = 0.0  # sum of the losses of the finite steps since the last log line
    counted: int = 0  # finite steps since the last log line
    updates: int = 0  # steps that updated the weights
    skipped: int = 0  # steps skipped because the loss or the gradient was not finite
    scale: float = 1.0  # loss scale in float16
    good: int = 0  # finite steps since the loss scale changed
    flops: float = 0.0  # FLOPs so far
    scalars: dict[str, float] = field(default_factory=dict)  # sums of the other logged scalars, like `losses`


@dataclass(kw_only=True)
class TrainingState(TrainingCounters):
    """A run in progress: the run, its objective, flat vectors, optimiser state and counters."""

    run: Run
    objective: Objective
    flat: FlatParameters
    optimizers: FlatOptimizer
    ranks: Ranks = SINGLE_PROCESS
    sample_cost: float = 1.0  # mean cost of a sample relative to a sample of the model's native size
    norm: float = math.nan  # norm of the last gradient
    learning_rate: float = 0.0  # the last learning rate
    waited: float = 0.0  # seconds that the loop waited for data
    should_stop: bool = False  # whether the loop ends after this step
    # metrics of the last steps, which the device may still compute
    pending_metrics: list[DeferredMetrics] = field(default_factory=list)

    @property
    def is_done(self) -> bool:
        """Whether the run has processed all its samples."""
        return self.images >= self.run.total

    @property
    def progress(self) -> TrainingProgress:
        """The progress of the run after its steps so far, with the current values of scheduled hyperparameters."""
        return training_progress_at(self.run, self.step)

    def pop_mean_metrics(self) -> tuple[float | None, dict[str, float]]:
        """Return the mean loss and the means of the other logged scalars over the steps since the last call, and reset
        the sums. The loss is None if no step was finite."""
        steps = max(self.counted, 1)
        loss = self.losses / self.counted if self.counted else None
        means = {name: total / steps for name, total in self.scalars.items()}
        self.losses, self.counted, self.scalars = 0.0, 0, {}
        return loss, means

    def read_metrics(self, keep: int = 0) -> None:
        """Record the metrics of the pending steps, except the last `keep` steps. Raises NonFiniteError if a loss or
        gradient was not finite and no more steps may be skipped."""
        while len(self.pending_metrics) > keep:
            metrics = self.pending_metrics.pop(0)
            record_step(self, metrics.step, *metrics.read(), metrics.samples)


def training_progress_at(run: Run, step: int) -> TrainingProgress:
    """Return the progress of a run after `step` optimiser steps, with the values of its scheduled hyperparameters."""
    values = {name: ramp_value(schedule, step, run.steps) for name, schedule in run.schedules.items()}
    return TrainingProgress(step, min(step * run.step_size, run.total), run.total, values)


Hook = Callable[[TrainingState], None]


def run_training_loop(
    state: TrainingState, slices: Iterator[SliceBatch], hooks: Sequence[tuple[int, Hook]] = ()
) -> None:
    """Train until the run is complete or a hook sets `state.should_stop`.

    Args:
        state: the state of the run.
        slices: this process's slices of the steps from `state.images` on, each with its batch (`training.slices`).
        hooks: (period, hook) pairs. A hook runs after every step that is a multiple of its period, and after the last
            step; the metrics of all steps are then recorded in the state. A hook of period 0 runs after every step and
            does not wait for the last metrics, which a GPU may still compute.

    If a loss or a gradient is NaN or infinite and no more steps may be skipped, raises NonFiniteError before any weight
    changes. On a GPU it is raised one step later, before anything is logged or saved (`DeferredMetrics`).
    """
    with use_deterministic_kernels(state.flat.master.device.type, state.run.reproducible):
        take_steps(state, slices, hooks)
    state.read_metrics()


def take_steps(state: TrainingState, slices: Iterator[SliceBatch], hooks: Sequence[tuple[int, Hook]]) -> None:
    """Run the optimiser steps and hooks of `run_training_loop`."""
    run = state.run
    state.objective.train()
    compute = GradientComputer(state.objective, state.flat, run, state.ranks)
    compute.shards.on_host = not defers_metrics(run, state.flat.master.device)
    slices = measure_waiting(slices, state)
    while not state.is_done and not state.should_stop:
        state.flat.zero_grad()
        compute.shards.scale = state.scale
        scalars, samples = compute.step(take_step_slices(slices), state.step)
        lr_factor = schedule_factor(run.schedule, state.step, run.steps)
        compute.finish(partial(optimizer_step, state, scalars, samples, lr_factor))
        size = min(run.step_size, run.total - state.images)
        state.flops += state.objective.flops(state.progress) * state.sample_cost * size
        state.step, state.images, state.learning_rate = (
            state.step + 1,
            state.images + size,
            run.optimizer.lr * lr_factor,
        )
        due = [(period, hook) for period, hook in hooks if not period or state.step % period == 0 or state.is_done]
        state.read_metrics(keep=0 if state.is_done or any(period for period, _ in due) else 1)
        for _, hook in due:
            hook(state)


def measure_waiting(slices: Iterator[SliceBatch], state: TrainingState) -> Iterator[SliceBatch]:
    """Yield the slices unchanged, and add the time spent waiting for each to `state.waited`."""
    while True:
        start_time = time.perf_counter()
        pair = next(slices, None)
        state.waited += time.perf_counter() - start_time
        if pair is None:
            return
        yield pair


def take_step_slices(slices: Iterator[SliceBatch]) -> Iterator[SliceBatch]:
    """Yield the slices of the current step only: up to the first slice that ends a step."""
    for step_slice, batch in slices:
        yield step_slice, batch
        if step_slice.ends_step:
            return


def optimizer_step(state: TrainingState, scalars: Scalars, samples: Tensor, lr_factor: float) -> None:
    """Update the weights from the summed gradients, at `lr_factor` times the base learning rate, and record the step.

    Args:
        state: the state of the run, with the gradients in its flat vectors.
        scalars: this process's shares of the loss and other logged scalars.
        samples: the sample indices of the step, (n,) int64.
        lr_factor: factor of the base learning rate.

    If the loss or a gradient is not finite, the weights do not change. On a GPU this is not known yet
    (`defers_metrics`).
    """
    flat, progress = state.flat, state.progress
    if state.scale != 1:
        flat.master_grad.mul_(1 / state.scale)
    options, names = state.run.optimizer, ("loss", *state.objective.logged)
    norm = flat.clip(options.clip, options.clip_by)
    if defers_metrics(state.run, flat.master.device):
        state.pending_metrics.append(
            DeferredMetrics(state.step + 1, names, scalars=scalars, norm=norm, samples=samples, ranks=state.ranks)
        )
    elif not record_step(
        state, state.step + 1, sum_metrics(names, scalars, flat.master.device, state.ranks), float(norm), samples
    ):
        return
    frozen = state.objective.frozen_update(progress)
    state.optimizers.step(lr_factor, progress.values.get("weight_decay"), frozen)
    state.updates += 1
    flat.sync(state.updates, progress.values.get("ema", None if state.run.ema_warmup else state.run.ema))
    with torch.no_grad():
        state.objective.after_step(progress)


def record_step(state: TrainingState, step: int, scalars: dict[str, float], norm: float, samples: Tensor) -> bool:
    """Add the metrics of a step to the sums since the last log line, and return whether loss and gradient norm are
    finite.

    If they are not finite, float16 training halves the loss scale; otherwise the step counts as skipped. Raises
    NonFiniteError, with the sample indices `samples` (n,) int64, if no more steps may be skipped.
    """
    loss, state.norm = scalars["loss"], norm
    if math.isfinite(loss + norm):
        state.losses, state.counted, state.good = state.losses + loss, state.counted + 1, state.good + 1
        for name in state.objective.logged:
            state.scalars[name] = state.scalars.get(name, 0.0) + scalars[name]
        if state.run.precision == "fp16" and state.good == LOSS_SCALE_GROWTH_STEPS:
            state.scale, state.good = min(2 * state.scale, MAX_LOSS_SCALE), 0
        return True
    if state.run.precision == "fp16" and state.scale > 1:
        state.scale, state.good = state.scale / 2, 0
        return False
    state.skipped += 1
    if state.skipped > state.run.skip_steps:
        sample_indices = torch.cat(state.ranks.gather(samples.to(state.flat.master.device)))[:20].tolist()
        raise NonFiniteError(
            f"step {step}: loss {loss}, gradient norm {norm}; the weights are unchanged (samples {sample_indices})"
            if step > state.step
            else f"step {step}: loss {loss}, gradient norm {norm}; nothing was saved since (samples {sample_indices})",
            "lower --lr, or train with --precision fp32",
        )
    return False
