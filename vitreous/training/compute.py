"""Forward and backward passes of an optimiser step: in one process, in several processes, or bit-identical for any
number of processes."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import pairwise

import torch
from torch import Tensor

from vitreous.data.batch import Batch, count_batch_samples, slice_batch
from vitreous.data.keys import derive_keys
from vitreous.nn.cuda_graphs import CudaGraphRunner, uses_cuda_graphs
from vitreous.nn.encoder import compile_blocks
from vitreous.objectives.base import Objective
from vitreous.system.machine import get_thread_pool
from vitreous.training.flat import FlatParameters
from vitreous.training.ranks import Ranks
from vitreous.training.run import Run
from vitreous.training.sharded import set_gradient_sync
from vitreous.training.shards import ForwardFunction, Scalars, Shards, add_scalars
from vitreous.training.slices import StepSlice, even_bounds


class GradientComputer:
    """Computes the gradients of a step into the flat vectors, for this process among `ranks`.

    Each process computes its slices of the step, and gradients are all-reduced once per step. If a step is a single
    backward pass, DDP overlaps the all-reduce with it; otherwise the all-reduce follows the last pass. FSDP reduces
    gradients in the last pass. A reproducible run computes every slice separately on one core and adds the gradients in
    the order of the slices. The result does not depend on the assignment of slices to processes.
    """

    def __init__(self, objective: Objective, flat: FlatParameters, run: Run, ranks: Ranks) -> None:
        self.objective, self.flat, self.run, self.ranks = objective, flat, run, ranks
        one_pass = (
            run.accumulate == 1 and run.micro_batch is None and not (run.reproducible or run.preprocess.has_buckets)
        )
        self.sharded = ranks.is_initialised and run.parallel == "fsdp"
        self.overlapped = ranks.is_initialised and not self.sharded and one_pass
        # DDP and FSDP average gradients over processes instead of adding them
        self.gradient_divisor = ranks.world if self.overlapped or self.sharded else 1
        forward = objective
        if run.compile:
            compile_blocks(objective)
        if self.overlapped:
            from torch.nn.parallel import DistributedDataParallel

            forward = DistributedDataParallel(objective, [ranks.local_rank] if flat.master.is_cuda else None)
        self.shards = Shards(objective, flat, forward)
        supports_graphs = run.precision != "fp16" and not (
            run.reproducible or run.recompute or not run.preprocess.stacks
        )
        if (
            supports_graphs
            and not ranks.is_initialised
            and objective.capturable
            and uses_cuda_graphs(flat.master.device)
        ):
            self.shards.captured = CudaGraphRunner(flat.master.device)

    def step(self, slices: Iterable[tuple[StepSlice, Batch]], step: int) -> tuple[Scalars, Tensor]:
        """Compute the gradient of a whole optimiser step in `flat.master_grad`.

        Args:
            slices: this process's slices of the step, each with its batch. Random numbers of a pass over a slice depend
                on (seed, step, offset of the slice).
            step: the number of the step, from 0.

        Returns:
            This process's share of the loss and of the other logged scalars, and the indices (n,) int64 of its samples.
        """
        if self.run.reproducible:
            return self.compute_reproducibly(slices, step)
        scalars, samples = [], []
        for step_slice, batch in slices:
            self.seed_pass(step, step_slice)
            self.objective.is_idle = not step_slice.share
            scalars.append(self.backward(batch, step_slice))
            if not (self.overlapped or self.sharded):
                self.flat.collect()
            samples.append(batch["samples"])
        if self.overlapped or self.sharded:
            self.flat.collect()
        else:
            self.flat.exchange(self.ranks)
        return add_scalars(scalars), torch.cat(samples)

    def seed_pass(self, step: int, step_slice: StepSlice) -> None:
        """Seed PyTorch's generator for the passes over a slice, from the run's seed, the step and the slice's
        offset."""
        torch.manual_seed(int(derive_keys(self.run.seed, step, step_slice.offset)) >> 1)

    def backward(self, batch: Batch, step_slice: StepSlice) -> Scalars:
        """Add the gradient of one slice to the flat vectors, in micro-batches, and return its logged scalars.

        All processes must run the same number of passes. If a process has fewer samples than passes, it repeats its
        first sample with weight 0. With size buckets, slices differ between processes, so passes are not synchronised.
        """
        size, passes = count_batch_samples(batch), 1
        if self.run.micro_batch:
            # first position of the batch, which all processes share, and the maximum number of its samples in a process
            batch_start = step_slice.start - step_slice.start % self.run.batch_size
            max_samples = -(-min(self.run.batch_size, self.run.total - batch_start) // self.ranks.world)
            max_samples = 0 if self.run.preprocess.has_buckets else max_samples
            passes = -(-max(max_samples, size) // self.run.micro_batch)
        scalars = []
        for index, (first, stop) in enumerate(pairwise(even_bounds(0, size, passes))):
            micro_batch = slice_batch(batch, first, max(stop, first + 1)) if passes > 1 else batch
            if self.sharded:
                set_gradient_sync(self.objective, step_slice.ends_step and index == passes - 1)
            scalars.append(
                self.shards.backward(micro_batch, step_slice.share * (stop - first) / size * self.gradient_divisor)
            )
        return {name: value / self.gradient_divisor for name, value in add_scalars(scalars).items()}

    def compute_reproducibly(self, slices: Iterable[tuple[StepSlice, Batch]], step: int) -> tuple[Scalars, Tensor]:
        """Compute the gradient of a step slice by slice, and add the gradients in the order of the slices.

        Returns this process's share of the logged scalars, and the indices (n,) int64 of its samples. On a CPU each
        slice uses one core. Slices run in parallel unless the model draws random numbers, because there is only one
        generator.
        """
        pairs = zip(self.shards.forwards, slices, strict=True)
        slice_arguments = [
            (forward, batch, step_slice) for forward, (step_slice, batch) in pairs if not step_slice.is_empty
        ]

        def compute_slice(forward: ForwardFunction, batch: Batch, step_slice: StepSlice) -> Scalars:
            """Compute the gradient of a slice into the gradient vector of `forward`, in micro-batches, and return its
            scalars."""
            self.seed_pass(step, step_slice)
            size = count_batch_samples(batch)
            chunk_size = self.run.micro_batch or size
            micro_batches = [
                (slice_batch(batch, first, first + chunk_size), min(chunk_size, size - first))
                for first in range(0, size, chunk_size)
            ]
            return add_scalars(
                self.shards.run_shard(forward, micro_batch, step_slice.share * count / size)
                for micro_batch, count in micro_batches
            )

        if self.flat.master.device.type != "cpu":
            scalars = [compute_slice(*arguments) for arguments in slice_arguments]
        elif self.run.draws_in_forward:
            scalars = [run_on_one_core(compute_slice, *arguments) for arguments in slice_arguments]
        elif slice_arguments:
            thread_pool = get_thread_pool(torch.get_num_threads())
            scalars = list(thread_pool.map(compute_slice, *zip(*slice_arguments, strict=True)))
        else:
            scalars = []
        self.flat.reduce_in_order(self.ranks)
        samples = [batch["samples"] for _, batch, _ in slice_arguments]
        return add_scalars(scalars), torch.cat(samples) if samples else torch.zeros(0, dtype=torch.int64)

    def finish(self, update: Callable[[], None]) -> None:
        """Call `update`, the optimiser's update after the backward passes. A reproducible run on a CPU runs it on one
        core, because rounding depends on the number of threads."""
        if self.run.reproducible and self.flat.master.device.type == "cpu":
            run_on_one_core(update)
        else:
            update()


def run_on_one_core(function: Callable, *arguments: object):
    """Call a function in a thread that uses one core, and return its result."""
    return get_thread_pool(torch.get_num_threads()).submit(function, *arguments).result()


def count_gradient_buffers(run: Run, ranks: Ranks) -> int:
    """Return the number of gradient vectors that this process needs: one for each shard of a batch that it computes."""
    if run.reproducible:
        return run.shards // ranks.world
    return 1 if ranks.is_initialised else run.shards
