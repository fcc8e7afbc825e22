"""The forward and backward passes of a step: by one process, by several, or reproducibly by any number of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise

import torch
from torch import Tensor

from vitreous.data.batch import Batch, batch_size, rows
from vitreous.data.keys import key
from vitreous.nn.cuda_graphs import CapturedPasses, uses_graphs
from vitreous.nn.encoder import compile_blocks
from vitreous.objectives.base import Objective
from vitreous.system.machine import thread_pool
from vitreous.training.flat import Flat
from vitreous.training.parts import Part, ends
from vitreous.training.ranks import Ranks
from vitreous.training.run import Run
from vitreous.training.shards import Forward, Scalars, Shards, add_scalars


class Compute:
    """What adds a step's gradients to the flat vectors, for one process among `ranks`.

    With several processes each computes its parts, and gradients are added up once a step: by DDP while the backward
    pass still runs where a step is one pass, by FSDP in the last of its passes, else when the last is done. A
    reproducible run computes every part by itself on one core, and adds gradients in the order of the parts, so that
    nothing depends on who computes what.
    """

    def __init__(self, objective: Objective, flat: Flat, run: Run, ranks: Ranks) -> None:
        self.objective, self.flat, self.run, self.ranks = objective, flat, run, ranks
        one_pass = run.accumulate == 1 and run.micro_batch is None and not (run.reproducible or run.preprocess.buckets)
        self.sharded = ranks.joined and run.parallel == "fsdp"
        self.overlapped = ranks.joined and not self.sharded and one_pass
        self.mean = ranks.world if self.overlapped or self.sharded else 1  # they take the mean over processes
        forward = objective
        if run.compile:
            compile_blocks(objective)
        if self.overlapped:
            from torch.nn.parallel import DistributedDataParallel

            forward = DistributedDataParallel(objective, [ranks.local] if flat.master.is_cuda else None)
        self.shards = Shards(objective, flat, forward)
        fixed = run.precision != "fp16" and not (run.reproducible or run.recompute or run.preprocess.native)
        if fixed and not ranks.joined and objective.capturable and uses_graphs(flat.master.device):
            self.shards.captured = CapturedPasses(flat.master.device)

    def step(self, parts: Sequence[Part], batches: Iterator[Batch], step: int, origin: int) -> tuple[Scalars, Tensor]:
        """Leave the gradient of the whole step in `flat.master_grad`; returns this process's share of the loss and of
        what else is logged, and its samples.

        `origin` is the position of the step; a pass at offset o from it draws from (seed, step, o).
        """
        if self.run.reproducible:
            return self.canonical(parts, batches, step, origin)
        scalars, samples = [], []
        for part in parts:
            batch = next(batches)
            torch.manual_seed(int(key(self.run.seed, step, part.start - origin)) >> 1)
            self.objective.idle = not part.share
            scalars.append(self.backward(batch, part, last=part is parts[-1]))
            if not (self.overlapped or self.sharded):
                self.flat.collect()
            samples.append(batch["samples"])
        if self.overlapped or self.sharded:
            self.flat.collect()
        else:
            self.flat.exchange(self.ranks)
        return add_scalars(scalars), torch.cat(samples)

    def backward(self, batch: Batch, part: Part, last: bool) -> Scalars:
        """Add a part's gradient, in micro-batches.

        All processes make as many passes: one that has fewer rows than passes computes its first row again, for
        nothing. Parts of buckets are of any sizes, and are not waited for.
        """
        size, passes = batch_size(batch), 1
        if self.run.micro_batch:
            first = part.start - part.start % self.run.batch_size  # of the whole batch, which all processes share
            most = -(-min(self.run.batch_size, self.run.total - first) // self.ranks.world)
            most = 0 if self.run.preprocess.buckets else most
            passes = -(-max(most, size) // self.run.micro_batch)
        scalars = []
        for number, (a, b) in enumerate(pairwise(ends(0, size, passes))):
            piece = rows(batch, a, max(b, a + 1)) if passes > 1 else batch
            if self.sharded:
                self.objective.set_requires_gradient_sync(last and number == passes - 1)  # type: ignore[operator]
            scalars.append(self.shards.backward(piece, part.share * (b - a) / size * self.mean))
        return {name: value / self.mean for name, value in add_scalars(scalars).items()}

    def canonical(
        self, parts: Sequence[Part], batches: Iterator[Batch], step: int, origin: int
    ) -> tuple[Scalars, Tensor]:
        """Each part by itself: on one core of a CPU, side by side unless the model draws at random, which it does from
        one generator. Returns scalars and (n,) int64 samples, as `step`."""
        full = [(forward, part) for forward, part in zip(self.shards.forwards, parts, strict=True) if part.share]
        work = [(forward, next(batches), part) for forward, part in full]

        def compute(forward: Forward, batch: Batch, part: Part) -> Scalars:
            torch.manual_seed(int(key(self.run.seed, step, part.start - origin)) >> 1)
            size = batch_size(batch)
            whole = self.run.micro_batch or size
            pieces = [(rows(batch, a, a + whole), min(whole, size - a)) for a in range(0, size, whole)]
            return add_scalars(self.shards.part(forward, piece, part.share * count / size) for piece, count in pieces)

        if self.flat.master.device.type != "cpu":
            scalars = [compute(*item) for item in work]
        elif self.run.draws_in_forward:
            scalars = [on_one_core(compute, *item) for item in work]
        else:
            scalars = list(thread_pool(torch.get_num_threads()).map(compute, *zip(*work, strict=True))) if work else []
        self.flat.in_order(self.ranks)
        samples = [batch["samples"] for _, batch, _ in work]
        return add_scalars(scalars), torch.cat(samples) if samples else torch.zeros(0, dtype=torch.int64)

    def finish(self, act: Callable[[], None]) -> None:
        """Do what follows the backward passes: on one core if the run is reproducible, since threads round at other
        places."""
        if self.run.reproducible and self.flat.master.device.type == "cpu":
            on_one_core(act)
        else:
            act()


def on_one_core(act: Callable, *arguments: object):
    """Call a function on a thread that computes with one core."""
    return thread_pool(torch.get_num_threads()).submit(act, *arguments).result()


def count_gradients(run: Run, ranks: Ranks) -> int:
    """How many gradients the flat vectors need for this process: one for each shard that it computes."""
    if run.reproducible:
        return run.shards // ranks.world
    return 1 if ranks.joined else run.shards
