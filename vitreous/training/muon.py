"""Muon (Jordan et al. 2024, kellerjordan.github.io/posts/muon): momentum whose matrices are made orthogonal before each step.

The form and the defaults are those of `torch.optim.Muon`. It differs in how it computes: matrices of one shape go through the
iteration together, and in a type that the caller names. PyTorch's multiplies in bfloat16 always, which a processor without
it does a hundred times slower than float32.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor, nn

COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # of the quintic that is iterated
ITERATIONS = 5
TOGETHER = 2**24  # elements that go through the iteration at once, at most


class Muon(torch.optim.Optimizer):
    """Steps of `lr` times sqrt(max(1, rows / columns)) along the orthogonal part of the Nesterov momentum; decoupled decay.

    `dtype` is what the iteration multiplies in; parameters and momentum keep their own.
    """

    def __init__(
        self,
        matrices: Iterable[nn.Parameter],
        lr: float,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        dtype: torch.dtype = torch.bfloat16,
    ) -> None:
        super().__init__(list(matrices), {"lr": lr, "weight_decay": weight_decay, "momentum": momentum})
        self.dtype = dtype

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Move every matrix that has a gradient."""
        for group in self.param_groups:
            for matrices in alike([p for p in group["params"] if p.grad is not None]):
                directions = []
                for matrix in matrices:
                    grad, state = matrix.grad, self.state[matrix]
                    assert grad is not None
                    momentum = state.setdefault("momentum_buffer", torch.zeros_like(matrix)).lerp_(grad, 1 - group["momentum"])
                    directions.append(grad.lerp(momentum, group["momentum"]))
                rows, columns = matrices[0].shape
                rate = group["lr"] * max(1.0, rows / columns) ** 0.5
                for matrix, update in zip(matrices, orthogonal(torch.stack(directions), self.dtype), strict=True):
                    matrix.mul_(1 - group["lr"] * group["weight_decay"]).sub_(update, alpha=rate)


def alike(matrices: list[nn.Parameter]) -> Iterator[list[nn.Parameter]]:
    """Matrices of one shape, so many at a time that they have at most `TOGETHER` elements, or one."""
    shapes: dict[torch.Size, list[nn.Parameter]] = defaultdict(list)
    for matrix in matrices:
        shapes[matrix.shape].append(matrix)
    for same in shapes.values():
        count = max(1, TOGETHER // same[0].numel())
        yield from (same[i : i + count] for i in range(0, len(same), count))


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
