"""One micro-batch computed in parts, side by side: each part by a thread, with cores and a gradient of its own.

On a CPU this wastes less than all cores sharing each product, since threads that share a product wait for each other at
its end.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from itertools import pairwise

import torch
from torch import Tensor, nn

from vitreous.cores import cores
from vitreous.machine import team
from vitreous.training.flat import Flat

Batch = dict[str, Tensor]
Forward = Callable[[Batch], dict[str, Tensor]]
MOST, FEWEST = 8, 8  # shards, since each costs memory for a gradient; images of one


class Shards:
    """An objective, and copies of it that compute with the same weights: as many as the flat vectors have gradients.

    Only for objectives whose loss is a mean over samples that do not see each other, and that draw nothing at random.
    """

    def __init__(self, objective: nn.Module, flat: Flat, forward: Forward | None = None) -> None:
        self.forwards = [objective if forward is None else forward]
        for grad in flat.grads[1:]:
            twin, weights, gradients = copy.deepcopy(objective), flat.views(flat.work), flat.views(grad)
            for name, parameter in twin.named_parameters():
                if name in weights:
                    parameter.data, parameter.grad = weights[name], gradients[name]
            self.forwards.append(twin)
        self.scale = 1.0  # of the loss in the backward pass: float16 gradients would vanish without it

    def backward(self, batch: Batch, share: float) -> float:
        """Add the gradient of `share` times the batch's loss to the flat gradients, and return that product.

        Every tensor of the batch has one row a sample.
        """
        rows = len(next(iter(batch.values())))
        count = min(len(self.forwards), rows)
        if count == 1:
            return self.part(self.forwards[0], batch, share)
        ends = [rows * i // count for i in range(count + 1)]
        parts = [{name: value[a:b] for name, value in batch.items()} for a, b in pairwise(ends)]
        shares = [share * (b - a) / rows for a, b in pairwise(ends)]
        return sum(team(len(self.forwards)).map(self.part, self.forwards[:count], parts, shares))

    def part(self, forward: Forward, batch: Batch, share: float) -> float:
        """Forward and backward of one part by itself."""
        loss = forward(batch)["loss"] * share
        (loss * self.scale).backward()
        return float(loss.detach())


def default_shards(device: str, batch_size: int) -> int:
    """One a core on a CPU, at most MOST, of at least FEWEST images each; one elsewhere."""
    return max(1, min(torch.get_num_threads(), cores(), MOST, batch_size // FEWEST)) if device == "cpu" else 1
