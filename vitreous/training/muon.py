"""Muon (Jordan et al. 2024, kellerjordan.github.io/posts/muon): momentum whose matrices are made orthogonal before each
step.

The form and the defaults are those of `torch.optim.Muon`. It differs in how it computes: matrices of one shape go
through the iteration together, and in a type that the caller names. PyTorch's multiplies in bfloat16 always, which a
processor without it does a hundred times slower than float32.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # of the quintic that is iterated
ITERATIONS = 5
TOGETHER = 2**24  # elements that go through the iteration at once, at most


@torch.no_grad()
def muon(
    matrices: list[Tensor],
    grads: list[Tensor],
    momenta: list[Tensor],
    lr: float,
    weight_decay: float,
    momentum: float,
    dtype: torch.dtype,
) -> None:
    """One step, in place: `lr` times sqrt(max(1, rows / columns)) along the orthogonal part of the Nesterov momentum.

    Decay is decoupled. `dtype` is what the iteration multiplies in; matrices and momenta keep their own.
    """
    for places in alike(matrices):
        directions = [grads[i].lerp(momenta[i].lerp_(grads[i], 1 - momentum), momentum) for i in places]
        rows, columns = matrices[places[0]].shape
        rate = lr * max(1.0, rows / columns) ** 0.5
        for i, update in zip(places, orthogonal(torch.stack(directions), dtype), strict=True):
            matrices[i].mul_(1 - lr * weight_decay).sub_(update, alpha=rate)


def alike(matrices: Sequence[Tensor]) -> Iterator[list[int]]:
    """Places of matrices of one shape, so many at a time that they have at most `TOGETHER` elements, or one."""
    shapes: dict[torch.Size, list[int]] = defaultdict(list)
    for place, matrix in enumerate(matrices):
        shapes[matrix.shape].append(place)
    for shape, places in shapes.items():
        count = max(1, TOGETHER // shape.numel())
        yield from (places[i : i + count] for i in range(0, len(places), count))


def orthogonal(matrices: Tensor, dtype: torch.dtype, eps: float = 1e-7) -> Tensor:
    """(n, rows, columns) -> the same with all singular values near one: five Newton-Schulz steps in `dtype`.

    For each X, scaled to norm 1:  A = X X^T,  X <- a X + (b A + c A A) X.
    """
    a, b, c = COEFFICIENTS
    wide = matrices.shape[1] <= matrices.shape[2]
    x = (matrices if wide else matrices.mT).to(dtype)
    x = x / x.norm(dim=(1, 2), keepdim=True).clamp(min=eps)
    for _ in range(ITERATIONS):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return (x if wide else x.mT).to(matrices.dtype)
