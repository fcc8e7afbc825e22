"""Assign the samples of an optimiser step to processes.

A step covers `batch_size` x `accumulate` consecutive positions of the run's stream of samples. Usually each process
computes one slice of each batch. A reproducible run splits the whole step into `shards` slices and assigns consecutive
slices to each process, so that the slices do not depend on the number of processes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import KW_ONLY, dataclass
from itertools import pairwise

from vitreous.errors import UsageError
from vitreous.training import tune
from vitreous.training.ranks import Ranks
from vitreous.training.run import Run

#: (start, stop) -> boundaries, from `start` to `stop`, of consecutive ranges in which all images have one size
CutRange = Callable[[int, int], list[int]]


@dataclass(frozen=True)
class StepSlice:
    """Consecutive positions [start, stop) of the stream of samples, which one process computes as one batch.

    Args:
        start: the first position.
        stop: the position after the last one; `start` for an empty slice.
        share: the weight of the slice's mean loss in the loss of the step.
        offset: the first position relative to the start of the step.
        ends_step: whether it is the last slice of this process in the step.
    """

    start: int
    stop: int
    share: float
    _: KW_ONLY
    offset: int = 0
    ends_step: bool = True

    @property
    def is_empty(self) -> bool:
        """Whether the slice has no positions."""
        return self.stop == self.start


def uncut_range(start: int, stop: int) -> list[int]:
    """Return the boundaries [start, stop] of a range without size buckets, which is not cut."""
    return [start, stop]


def even_bounds(start: int, count: int, ranges: int) -> list[int]:
    """Return the `ranges` + 1 boundaries that divide [start, start + count) into ranges of almost equal length."""
    return [start + count * i // ranges for i in range(ranges + 1)]


def rank_slices(run: Run, ranks: Ranks, start: int, cut_range: CutRange = uncut_range) -> list[StepSlice]:
    """Return the slices of this process in the step that begins at position `start`.

    If the last batch has fewer images than there are processes, a process without images computes the first image of
    the batch with share 0, because all processes exchange gradients. The slices of a reproducible run may be empty
    instead.
    """
    stop = min(start + run.step_size, run.total)
    size = stop - start
    if run.reproducible:
        count = run.shards // ranks.world
        bounds = even_bounds(start, size, run.shards)[ranks.rank * count : (ranks.rank + 1) * count + 1]
        ranges = [(low, high, (high - low) / size) for low, high in pairwise(bounds)]
    else:
        ranges = []
        for batch_start in range(start, stop, run.batch_size):
            rank_bounds = even_bounds(batch_start, min(run.batch_size, stop - batch_start), ranks.world)
            rank_start, rank_stop = rank_bounds[ranks.rank : ranks.rank + 2]
            if rank_stop > rank_start:
                ranges += [(low, high, (high - low) / size) for low, high in pairwise(cut_range(rank_start, rank_stop))]
            else:
                ranges.append((batch_start, batch_start + 1, 0.0))
    return [
        StepSlice(low, high, share, offset=low - start, ends_step=index == len(ranges))
        for index, (low, high, share) in enumerate(ranges, 1)
    ]


def run_slices(run: Run, ranks: Ranks, start: int, cut_range: CutRange = uncut_range) -> Iterator[list[StepSlice]]:
    """Yield this process's slices (`rank_slices`) of every step from position `start` to the end of the run."""
    for position in range(start, run.total, run.step_size):
        yield rank_slices(run, ranks, position, cut_range)


def check_processes(run: Run, ranks: Ranks) -> None:
    """Raise UsageError if the run's options do not support its number of processes, or its model does not support the
    fine-tuning options."""
    tune.check_fine_tuning(run.model, run.tune)
    if run.reproducible and run.shards % ranks.world:
        divisors = ", ".join(str(n) for n in range(1, run.shards + 1) if run.shards % n == 0)
        raise UsageError(
            f"the {run.shards} shards of a reproducible run are not divisible by {ranks.world} processes",
            f"use {divisors} processes",
        )
    if run.batch_size < ranks.world:
        raise UsageError(
            f"--batch-size {run.batch_size} is below the number of processes, {ranks.world}", "raise --batch-size"
        )
    if run.parallel == "fsdp" and not ranks.is_initialised:
        raise UsageError(
            "--parallel fsdp requires torchrun", "start the run with torchrun --nproc-per-node N -m vitreous train …"
        )
    if run.parallel == "fsdp" and (run.reproducible or run.optimizer.name == "muon" or run.tune.lora_rank):
        raise UsageError("--parallel fsdp cannot be combined with --reproducible, Muon or LoRA", "use --parallel ddp")
    if run.parallel == "fsdp" and run.model.has_text:
        problem = (
            "--parallel fsdp cannot shard the scale of the logits of a model with a text encoder, which is a scalar"
        )
        raise UsageError(problem, "use --parallel ddp")
    if run.parallel == "fsdp" and run.preprocess.has_buckets:
        raise UsageError(
            "--parallel fsdp cannot be combined with buckets, which differ between processes", "use --parallel ddp"
        )
