"""KoLeo, the loss that keeps the features of a batch apart (arXiv:1806.03198), as DINOv2 has it (arXiv:2304.07193)."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

EPS = 1e-8
Gather = Callable[[Tensor], tuple[Tensor, int]]


def koleo_of_views(views: Tensor, gather: Gather, idle: bool = False) -> Tensor:
    """(B, V, D) features -> a scalar: the sum over the V views of `koleo` among the B images."""
    losses = [koleo(view, gather, idle) for view in views.unbind(1)]
    return torch.stack(losses).sum()


def koleo(features: Tensor, gather: Callable[[Tensor], tuple[Tensor, int]], idle: bool = False) -> Tensor:
    """(n, D) features -> a scalar, -mean_i ln(|x_i - x_j + eps| + eps), x of length one in float32, x_j the nearest
    other, eps 1e-8 (arXiv:1806.03198, as DINOv2's code has it); 0 of one feature alone.

        for i in range(n): j = argmax over j != i of x_i x_j; loss -= log((x_i - x_j + eps).norm() + eps) / n

    Neighbours are looked for among the features of all processes, and a feature is moved by those that it is the
    neighbour of, too. Features of an `idle` process are no neighbours.
    """
    own = F.normalize(features.float(), dim=-1, eps=EPS)[: 0 if idle else len(features)]
    everything, start = gather(own)
    count = len(everything)
    if count < 2 or idle:
        return 0.0 * features.float().sum()
    with torch.no_grad():
        nearest = (everything @ everything.T).fill_diagonal_(-2).argmax(1)
    rows = torch.cat([everything[:start], own, everything[start + len(own) :]])
    loss = -((rows - rows[nearest] + EPS).norm(dim=-1) + EPS).log().mean()
    # a process's loss weighs as its share of the samples: its part of the gradient of the whole must weigh one
    return loss.detach() + (loss - loss.detach()) * (count / len(own))
