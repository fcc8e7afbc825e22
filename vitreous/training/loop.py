"""The one loop."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from vitreous.data.keys import key
from vitreous.errors import NonFiniteError
from vitreous.training.flat import Flat
from vitreous.training.optimizer import Optimizers
from vitreous.training.run import Run
from vitreous.training.schedule import factor
from vitreous.training.shards import Shards


@dataclass
class State:
    """A run in progress. What a checkpoint keeps of it: the flat vectors, the optimisers' state, and the numbers below."""

    run: Run
    objective: nn.Module
    flat: Flat
    optimizers: Optimizers
    step: int = 0
    images: int = 0  # seen so far: the position in the stream
    losses: float = 0.0  # summed over the steps since the last log
    counted: int = 0
    norm: float = math.nan  # of the last gradient
    rate: float = 0.0  # the last learning rate
    halt: bool = field(default=False)  # ends the loop after this step


Hook = Callable[[State], None]


def fit(state: State, batches: Iterator[dict[str, Tensor]], hooks: Sequence[tuple[int, Hook]] = ()) -> None:
    """Train until the run is complete or a hook sets `state.halt`.

    `batches` gives the micro-batches from `state.images` on, `accumulate` to a step, the last of the run shorter; each
    weighs as many images as it has. A hook runs after every step that its period divides, and after the last. Raises
    NonFiniteError before any weight is touched if a loss or a gradient is NaN or infinite.
    """
    run = state.run
    state.objective.train()
    shards = Shards(state.objective, state.flat, torch.compile(state.objective) if run.compile else None)
    while state.step < run.steps and not state.halt:
        size, seen, loss, samples = min(run.step_size, run.total - state.images), 0, 0.0, []
        state.flat.zero()
        while seen < size:
            batch = next(batches)
            torch.manual_seed(int(key(run.seed, state.step, seen)) >> 1)
            loss += shards.backward(batch, len(batch["samples"]) / size)
            state.flat.collect()
            seen += len(batch["samples"])
            samples.append(batch["samples"])
        norm = float(state.flat.clip(run.optimizer.clip))
        if not math.isfinite(loss + norm):
            names = torch.cat(samples)[:20].tolist()
            raise NonFiniteError(
                f"step {state.step + 1}: loss {loss}, gradient norm {norm}; the weights were not touched (samples {names})",
                "lower --lr, or train with --precision fp32",
            )
        scale = factor(run.schedule, state.step, run.steps)
        state.optimizers.step(scale)
        state.step, state.images = state.step + 1, state.images + size
        state.flat.publish(state.step)
        state.losses, state.counted = state.losses + loss, state.counted + 1
        state.norm, state.rate = norm, run.optimizer.lr * scale
        for period, hook in hooks:
            if state.step % period == 0 or state.step == run.steps:
                hook(state)
