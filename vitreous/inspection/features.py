"""What tokens and whole images look like to a model: patch tokens as colours, and images that it finds alike.

B batch, D width.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from vitreous.inspection.hooks import eval_mode, run
from vitreous.inspection.principal import principal
from vitreous.models.zoo import Model

CUT = 0.01  # share of the patches at either end whose colour is that of the end: a few tokens are far from all others


class Colours(NamedTuple):
    """The first three principal components of patch tokens, as numbers in [0, 1].

    `all` (B, *grid, 3) of all patches together, `share` (3,) the part of their variance that each explains;
    `foreground` (B, *grid) bool; `inside` (B, *grid, 3) of the foreground's patches alone, the others 0.
    """

    all: Tensor
    share: Tensor
    foreground: Tensor
    inside: Tensor


def patches(model: Model, images: Tensor) -> Tensor:
    """(B, C, *image), the model's input -> (B, *grid, D) float32: patch tokens after the last norm, or the last map of
    a BiT."""
    grid = tuple(-(-i // p) for i, p in zip(images.shape[2:], model.config.patch, strict=True))
    with eval_mode(model):
        return run(model, images)[:, model.config.prefix :].float().unflatten(1, grid)


def pooled(model: Model, images: Tensor) -> Tensor:
    """(B, C, *image), the model's input -> (B, D) float32: what the head is given, before a representation layer."""
    with eval_mode(model):
        return model.pool(run(model, images)).float()


def colours(maps: Tensor) -> Colours:
    """(B, *grid, D) patch tokens of some images -> colours that mean the same in all of them, as DINOv2 shows them
    (arXiv:2304.07193).

    The first component is cut at its mean. Which side is the foreground is a matter of sign: here the one that has the
    smaller share of the grids' borders. Then the components are found anew within it.
    """
    rows = maps.flatten(0, -2)
    components = principal(rows, 3)
    scores = components.scores(rows)
    above = (scores[:, 0] > 0).view(maps.shape[:-1])
    edge = border(tuple(maps.shape[1:-1]))
    foreground = above if above[:, edge].float().mean() <= above[:, ~edge].float().mean() or edge.all() else ~above
    inside = torch.zeros(*maps.shape[:-1], 3)
    if foreground.sum() > 3:
        own = rows[foreground.flatten()]
        inside[foreground] = stretched(principal(own, 3).scores(own))
    return Colours(stretched(scores).view(*maps.shape[:-1], 3), padded(components.share), foreground, inside)


def border(grid: tuple[int, ...]) -> Tensor:
    """(*grid) bool: the places at an end of an axis."""
    edge = torch.ones(grid, dtype=torch.bool)
    if min(grid) > 2:
        edge[tuple(slice(1, -1) for _ in grid)] = False
    return edge


def stretched(scores: Tensor) -> Tensor:
    """(n, K) -> (n, 3) in [0, 1]: each component from its 1st to its 99th hundredth; components that are not there are
    0.5."""
    low, high = (scores.quantile(q, dim=0) for q in (CUT, 1 - CUT))
    even = ((scores - low) / (high - low).clamp(min=1e-12)).clamp(0, 1)
    return F.pad(even, (0, 3 - even.shape[1]), value=0.5)


def padded(share: Tensor) -> Tensor:
    """(K,) -> (3,)."""
    return F.pad(share, (0, 3 - len(share)))


def nearest(queries: Tensor, known: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """(Q, D), (n, D) -> (Q, k) cosine similarities, falling, and (Q, k) int64, the rows of `known`; k is `count`, or n
    if less."""
    similar = F.normalize(queries, dim=-1) @ F.normalize(known, dim=-1).T
    values, rows = similar.topk(min(count, len(known)), dim=-1)
    return values, rows
