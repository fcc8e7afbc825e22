"""Shards of a micro-batch that a CPU computes in parallel: each in a thread with separate cores and gradients.

This is more efficient than splitting each matrix product among all cores, because the threads of a product wait for
each other at its end.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from itertools import pairwise

import torch
from torch import Tensor, nn

from vitreous.data.batch import Batch, count_batch_samples, slice_batch
from vitreous.nn.cuda_graphs import CudaGraphRunner
from vitreous.system.cores import count_usable_cores
from vitreous.system.machine import get_thread_pool
from vitreous.training.flat import FlatParameters, iterate_named_tensors

ForwardFunction = Callable[[Batch], dict[str, Tensor]]
Scalars = dict[str, float | Tensor]  # "loss", and other logged scalars of an objective
MAX_SHARDS = 8  # limit, because each shard needs memory for a gradient


class Shards:
    """An objective and copies of it that share weights and state, one copy for each gradient vector of `flat`. More
    than one is possible only if the samples of a batch are independent."""

    def __init__(self, objective: nn.Module, flat: FlatParameters, forward: ForwardFunction | None = None) -> None:
        self.forwards = [objective if forward is None else forward]
        for grad in flat.grads[1:]:
            replica, weights, gradients = copy.deepcopy(objective), flat.views(flat.working_copy), flat.views(grad)
            live = dict(iterate_named_tensors(objective))
            for name, tensor in iterate_named_tensors(replica):
                tensor.data = weights[name] if name in weights else live[name].data
                if name in weights:
                    tensor.grad = gradients[name]
            self.forwards.append(replica)
        # whether passes return scalars as numbers; otherwise as device tensors, which avoids synchronisation
        self.on_host = True
        self.scale = 1.0  # loss scale of the backward pass: prevents underflow of float16 gradients
        self.captured: CudaGraphRunner | None = None  # set if passes run as CUDA graphs

    def backward(self, batch: Batch, share: float) -> Scalars:
        """Add the gradient of `share` times the mean loss of a batch to the gradient vectors.

        Returns the loss and the other logged scalars, times `share`.
        """
        size = count_batch_samples(batch)
        count = min(len(self.forwards), size)
        if count == 1:
            return self.run_shard(self.forwards[0], batch, share)
        bounds = [size * i // count for i in range(count + 1)]
        chunks = [slice_batch(batch, first, stop) for first, stop in pairwise(bounds)]
        shares = [share * (stop - first) / size for first, stop in pairwise(bounds)]
        return add_scalars(
            get_thread_pool(len(self.forwards)).map(self.run_shard, self.forwards[:count], chunks, shares)
        )

    def run_shard(self, forward: ForwardFunction, batch: Batch, share: float) -> Scalars:
        """Run forward and backward passes of one shard, with loss and gradient times `share`, as a CUDA graph if
        enabled. Returns the logged scalars times `share`."""
        if self.captured is not None:
            return dict(self.captured.run(lambda static_batch: self.passes(forward, static_batch, share), batch, share))
        return {name: float(v) if self.on_host else v for name, v in self.passes(forward, batch, share).items()}

    def passes(self, forward: ForwardFunction, batch: Batch, share: float) -> dict[str, Tensor]:
        """Run the forward and backward pass of one shard. Returns the logged scalars times `share` as scalar tensors on
        the device."""
        outputs = {name: value * share for name, value in forward(batch).items()}
        (outputs["loss"] * self.scale).backward()
        return {name: value.detach() for name, value in outputs.items()}


def add_scalars(chunks: Iterable[Scalars]) -> Scalars:
    """Add up logged scalars by name, in the order of the chunks."""
    total: Scalars = {}
    for scalars in chunks:
        for name, value in scalars.items():
            total[name] = total.get(name, 0) + value
    return total


def choose_shard_count(device: str, batch_size: int, min_images: int = 8) -> int:
    """Return the number of shards of a batch. On a CPU it is one per core, at most MAX_SHARDS, each with at least
    `min_images` images; on other devices 1."""
    return (
        max(1, min(torch.get_num_threads(), count_usable_cores(), MAX_SHARDS, batch_size // min_images))
        if device == "cpu"
        else 1
    )
