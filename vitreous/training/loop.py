"""The one loop."""

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
from vitreous.objectives.base import Objective, Progress
from vitreous.system.machine import deterministic_kernels
from vitreous.training.compute import Compute
from vitreous.training.figures import HeldFigures, reads_late, sum_on_host
from vitreous.training.flat import Flat
from vitreous.training.optimizer import Optimizers
from vitreous.training.parts import Cut, parts, uncut
from vitreous.training.ranks import ALONE, Ranks
from vitreous.training.run import Run
from vitreous.training.schedule import factor, ramp
from vitreous.training.shards import Scalars

LARGEST, PATIENCE = 2.0**24, 2000  # of the loss's scale in float16; good steps until it doubles


@dataclass
class Counters:
    """What a checkpoint keeps of a run in progress beside tensors."""

    step: int = 0
    images: int = 0  # seen so far: the position in the stream
    losses: float = 0.0  # summed over the steps since the last log
    counted: int = 0
    updates: int = 0  # steps that moved the weights
    skipped: int = 0  # steps that did not, since they were not finite
    scale: float = 1.0  # of the loss, in float16
    good: int = 0  # steps since the scale changed
    flops: float = 0.0  # so far
    scalars: dict[str, float] = field(default_factory=dict)  # what else the objective logs, summed as `losses`


@dataclass
class State(Counters):
    """A run in progress: the numbers, the flat vectors and the optimisers' state, and what they are of."""

    run: Run = field(kw_only=True)
    objective: Objective = field(kw_only=True)
    flat: Flat = field(kw_only=True)
    optimizers: Optimizers = field(kw_only=True)
    ranks: Ranks = field(default=ALONE, kw_only=True)
    cut: Cut = field(default=uncut, kw_only=True)  # what of a step is computed together
    work: float = field(default=1.0, kw_only=True)  # of a sample, in those of the model's own size
    norm: float = math.nan  # of the last gradient
    rate: float = 0.0  # the last learning rate
    waited: float = 0.0  # seconds that the loop waited for data
    halt: bool = False  # ends the loop after this step
    unread: list[HeldFigures] = field(default_factory=list)  # of the last steps, still on the device

    @property
    def done(self) -> bool:
        """Whether the run has seen all its samples."""
        return self.images >= self.run.total

    @property
    def progress(self) -> Progress:
        """How far the run is."""
        return progress_at(self.run, self.step)

    def settle(self, but: int = 0) -> None:
        """Read the figures of all steps `but` the last; raises NonFiniteError where one was not finite."""
        while len(self.unread) > but:
            step = self.unread.pop(0)
            count(self, step.number, *step.read(), step.samples)


def progress_at(run: Run, step: int) -> Progress:
    """How far a run is after so many steps."""
    values = {name: ramp(schedule, step, run.steps) for name, schedule in run.schedules.items()}
    return Progress(step, min(step * run.step_size, run.total), run.total, values)


Hook = Callable[[State], None]


def fit(state: State, batches: Iterator[Batch], hooks: Sequence[tuple[int, Hook]] = ()) -> None:
    """Train until the run is complete or a hook sets `state.halt`.

    `batches` gives this process's parts of the steps from `state.images` on (`training.parts`); each weighs as many
    images as it has. A hook runs after every step that its period divides, and after the last; the state then has the
    losses of all steps. A hook of period 0 runs after every step and does not wait for the last loss, which a GPU may
    still compute. Raises NonFiniteError before any weight is touched if a loss or a gradient is NaN or infinite, unless
    the run may skip the step; on a GPU one step later, before anything is logged or saved (`training.figures`).
    """
    with deterministic_kernels(state.flat.master.device.type, state.run.reproducible):
        take_steps(state, batches, hooks)
    state.settle()


def take_steps(state: State, batches: Iterator[Batch], hooks: Sequence[tuple[int, Hook]]) -> None:
    """The steps of `fit`."""
    run = state.run
    state.objective.train()
    compute = Compute(state.objective, state.flat, run, state.ranks)
    compute.shards.on_host = not reads_late(run, state.flat.master.device)
    batches = timed(batches, state)
    while not state.done and not state.halt:
        state.flat.zero()
        compute.shards.scale = state.scale
        own = parts(run, state.ranks, state.images, state.cut)
        scalars, samples = compute.step(own, batches, state.step, state.images)
        rate = factor(run.schedule, state.step, run.steps)
        compute.finish(partial(move, state, scalars, samples, rate))
        size = min(run.step_size, run.total - state.images)
        state.flops += state.objective.flops(state.progress) * state.work * size
        state.step, state.images, state.rate = state.step + 1, state.images + size, run.optimizer.lr * rate
        due = [(period, hook) for period, hook in hooks if not period or state.step % period == 0 or state.done]
        state.settle(but=0 if state.done or any(period for period, _ in due) else 1)
        for _, hook in due:
            hook(state)


def move(state: State, scalars: Scalars, samples: Tensor, rate: float) -> None:
    """From summed gradients to new weights, at `rate` times the base learning rate; nothing where they or the loss are
    known not to be finite. `samples` (n,) int64 are those of the step."""
    flat, progress = state.flat, state.progress
    if state.scale != 1:
        flat.master_grad.mul_(1 / state.scale)
    options, names = state.run.optimizer, ("loss", *state.objective.logged)
    norm = flat.clip(options.clip, options.clip_by)
    if reads_late(state.run, flat.master.device):
        state.unread.append(
            HeldFigures(state.step + 1, names, scalars=scalars, norm=norm, samples=samples, ranks=state.ranks)
        )
    elif not count(
        state, state.step + 1, sum_on_host(names, scalars, flat.master.device, state.ranks), float(norm), samples
    ):
        return
    frozen = state.objective.frozen_update(progress)
    state.optimizers.step(rate, progress.values.get("weight_decay"), frozen)
    state.updates += 1
    flat.sync(state.updates, progress.values.get("ema", None if state.run.ema_warmup else state.run.ema))
    with torch.no_grad():
        state.objective.after_step(progress)


def count(state: State, step: int, scalars: dict[str, float], norm: float, samples: Tensor) -> bool:
    """Add the figures of a step to those since the last log, and return whether they are finite.

    Where they are not: half the scale in float16, else one of the steps that the run may skip. Raises NonFiniteError,
    which names `samples` (n,) int64, where no more may be skipped.
    """
    loss, state.norm = scalars["loss"], norm
    if math.isfinite(loss + norm):
        state.losses, state.counted, state.good = state.losses + loss, state.counted + 1, state.good + 1
        for name in state.objective.logged:
            state.scalars[name] = state.scalars.get(name, 0.0) + scalars[name]
        if state.run.precision == "fp16" and state.good == PATIENCE:
            state.scale, state.good = min(2 * state.scale, LARGEST), 0
        return True
    if state.run.precision == "fp16" and state.scale > 1:
        state.scale, state.good = state.scale / 2, 0
        return False
    state.skipped += 1
    if state.skipped > state.run.skip_steps:
        names = torch.cat(state.ranks.gather(samples.to(state.flat.master.device)))[:20].tolist()
        raise NonFiniteError(
            f"step {step}: loss {loss}, gradient norm {norm}; the weights were not touched (samples {names})"
            if step > state.step
            else f"step {step}: loss {loss}, gradient norm {norm}; nothing was saved since (samples {names})",
            "lower --lr, or train with --precision fp32",
        )
    return False


def timed(batches: Iterator[Batch], state: State) -> Iterator[Batch]:
    """The same batches, with the time that each was waited for added to `state.waited`."""
    while True:
        started = time.perf_counter()
        batch = next(batches, None)
        state.waited += time.perf_counter() - started
        if batch is None:
            return
        yield batch
