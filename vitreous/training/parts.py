"""Which pictures of a step each process computes.

A step is `batch_size` x `accumulate` positions of the run's stream. Usually each batch is cut into one part a process;
a reproducible run cuts the whole step into `shards` parts, the same ones whoever computes them, and gives each process
its row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise

from vitreous.errors import UsageError
from vitreous.training import tune
from vitreous.training.ranks import Ranks
from vitreous.training.run import Run

#: start, stop -> where parts of [start, stop) that can be computed together begin and end
Cut = Callable[[int, int], list[int]]


def uncut(start: int, stop: int) -> list[int]:
    """All of it together."""
    return [start, stop]


@dataclass(frozen=True)
class Part:
    """Positions [start, stop) of the stream, and what they weigh: their share of the step's pictures."""

    start: int
    stop: int
    share: float


def ends(start: int, count: int, parts: int) -> list[int]:
    """Where `parts` parts of [start, start + count), as even as can be, begin and end."""
    return [start + count * i // parts for i in range(parts + 1)]


def parts(run: Run, ranks: Ranks, start: int, cut: Cut = uncut) -> list[Part]:
    """What this process computes of the step that begins at position `start`; each batch is cut further by `cut`, as
    images of different sizes have to be.

    Where a last short batch has fewer pictures than there are processes, those without one compute the batch's first
    for nothing: all have to be there when gradients are added up. A reproducible part may be empty instead.
    """
    stop = min(start + run.step_size, run.total)
    size = stop - start
    if run.reproducible:
        mine = run.shards // ranks.world
        cuts = ends(start, size, run.shards)[ranks.rank * mine : (ranks.rank + 1) * mine + 1]
        return [Part(a, b, (b - a) / size) for a, b in pairwise(cuts)]
    computed = []
    for low in range(start, stop, run.batch_size):
        count = min(run.batch_size, stop - low)
        a, b = ends(low, count, ranks.world)[ranks.rank : ranks.rank + 2]
        if b > a:
            computed += [Part(c, d, (d - c) / size) for c, d in pairwise(cut(a, b))]
        else:
            computed.append(Part(low, low + 1, 0.0))
    return computed


def spans(run: Run, ranks: Ranks, start: int, cut: Cut = uncut) -> Iterator[tuple[int, int]]:
    """The positions of every part of this process, from the step at `start` to the end of the run; empty parts left
    out."""
    while start < run.total:
        yield from ((part.start, part.stop) for part in parts(run, ranks, start, cut) if part.stop > part.start)
        start += run.step_size


def check(run: Run, ranks: Ranks) -> None:
    """Raise UsageError for a model that cannot be tuned as the run asks, or a number of processes that it cannot
    have."""
    tune.check(run.model, run.tune)
    if run.reproducible and run.shards % ranks.world:
        allowed = ", ".join(str(n) for n in range(1, run.shards + 1) if run.shards % n == 0)
        raise UsageError(
            f"{ranks.world} processes do not divide the {run.shards} shards of a reproducible run", f"use {allowed}"
        )
    if run.batch_size < ranks.world:
        raise UsageError(
            f"a batch of {run.batch_size} has fewer images than there are processes ({ranks.world})",
            "raise --batch-size",
        )
    if run.parallel == "fsdp" and not ranks.joined:
        raise UsageError(
            "--parallel fsdp needs processes", "start it with torchrun --nproc-per-node N -m vitreous train …"
        )
    if run.parallel == "fsdp" and (run.reproducible or run.optimizer.name == "muon" or run.tune.lora_rank):
        raise UsageError("--parallel fsdp goes with neither --reproducible, Muon nor LoRA", "use --parallel ddp")
    if run.parallel == "fsdp" and run.preprocess.buckets:
        raise UsageError(
            "--parallel fsdp makes equal passes in all processes, and buckets differ", "use --parallel ddp"
        )
