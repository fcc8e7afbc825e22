"""Update rules that PyTorch lacks, or implements differently: LAMB, LARS and Muon.

- LAMB (arXiv:1904.00962): Adam's direction, with a step in proportion to the norm of the parameter (DeiT-III).
- LARS (arXiv:1708.03888): momentum, with a step in proportion to the norm of the parameter (MAE's linear protocol).
- Muon (Jordan et al. 2024, kellerjordan.github.io/posts/muon): momentum whose matrices are orthogonalised before each
  step. Formula and defaults are those of `torch.optim.Muon`, but matrices of the same shape are batched, and the caller
  sets the dtype. PyTorch's version always multiplies in bfloat16, which is a hundred times slower than float32 on a CPU
  without bfloat16 instructions.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from vitreous.training.run import OptimizerConfig

LARS_TRUST_COEFFICIENT = 0.001  # LARS: step length relative to the parameter's norm, before learning rate and momentum
NEWTON_SCHULZ_COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # Muon: coefficients of the iterated quintic polynomial
NEWTON_SCHULZ_ITERATIONS = 5
MAX_BATCH_ELEMENTS = 2**24  # Muon: maximum number of elements of matrices that are orthogonalised together


@torch.no_grad()
def lamb_direction(
    grad: Tensor,
    weight: Tensor,
    first_moment: Tensor,
    second_moment: Tensor,
    count: Tensor,
    options: OptimizerConfig,
    decay: float,
) -> Tensor:
    """Compute LAMB's update direction (n,) before its trust ratio: m / (sqrt(v) + eps) + decay w, with bias-corrected
    moments m and v.

    `grad`, `weight` and the moments have shape (n,). Both moments and `count`, the number of previous steps (a scalar),
    are updated in place.
    """
    beta1, beta2 = options.betas
    count.add_(1)
    first_moment.lerp_(grad, 1 - beta1)
    second_moment.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
    scale = second_moment.div(1 - beta2**count).sqrt_().add_(options.eps)
    update = first_moment.div(1 - beta1**count).div_(scale)
    return update.add_(weight, alpha=decay) if decay else update


def lamb_trust_ratios(weights: Tensor, updates: Tensor) -> Tensor:
    """Return LAMB's trust ratios (n,), the factors of the learning rate: |w| / |update|, or 1 if either norm is zero.
    `weights` and `updates` are the norms (n,) of the parameters and their updates."""
    return torch.where((weights > 0) & (updates > 0), weights / updates.clamp(min=1e-12), torch.ones_like(weights))


def lars_trust_ratios(weights: Tensor, updates: Tensor) -> Tensor:
    """Return LARS's trust ratios (n,), the factors of the gradients: LARS_TRUST_COEFFICIENT |w| / |g|, or 1 if either
    norm is zero. `weights` and `updates` are the norms (n,) of the parameters and of their gradients with weight
    decay."""
    return torch.where((weights > 0) & (updates > 0), LARS_TRUST_COEFFICIENT * weights / updates.clamp(min=1e-12), 1.0)


@torch.no_grad()
def muon_step(
    matrices: list[Tensor],
    grads: list[Tensor],
    momenta: list[Tensor],
    lr: float,
    weight_decay: float,
    momentum: float,
    dtype: torch.dtype,
) -> None:
    """Take one step of Muon on matrices (rows, columns), in place.

    Each matrix changes along the orthogonalised Nesterov momentum, by `lr` times sqrt(max(1, rows / columns)). Weight
    decay is decoupled. The orthogonalisation runs in `dtype`; matrices and momenta keep their dtype.
    """
    for indices in batch_by_shape(matrices):
        directions = [grads[i].lerp(momenta[i].lerp_(grads[i], 1 - momentum), momentum) for i in indices]
        rows, columns = matrices[indices[0]].shape
        step_size = lr * max(1.0, rows / columns) ** 0.5
        for i, update in zip(indices, orthogonalize_newton_schulz(torch.stack(directions), dtype), strict=True):
            matrices[i].mul_(1 - lr * weight_decay).sub_(update, alpha=step_size)


def batch_by_shape(matrices: Sequence[Tensor]) -> Iterator[list[int]]:
    """Yield lists of indices of matrices of equal shape. A list has at most `MAX_BATCH_ELEMENTS` matrix elements in
    total, or a single matrix."""
    shapes: dict[torch.Size, list[int]] = defaultdict(list)
    for index, matrix in enumerate(matrices):
        shapes[matrix.shape].append(index)
    for shape, indices in shapes.items():
        count = max(1, MAX_BATCH_ELEMENTS // shape.numel())
        yield from (indices[i : i + count] for i in range(0, len(indices), count))


def orthogonalize_newton_schulz(matrices: Tensor, dtype: torch.dtype, eps: float = 1e-7) -> Tensor:
    """Orthogonalise matrices (n, rows, columns): return matrices of the same shape with all singular values near 1,
    after five Newton-Schulz iterations in `dtype`.

    For each X, scaled to norm 1:  A = X X^T,  X <- a X + (b A + c A A) X.
    """
    a, b, c = NEWTON_SCHULZ_COEFFICIENTS
    is_wide = matrices.shape[1] <= matrices.shape[2]
    x = (matrices if is_wide else matrices.mT).to(dtype)
    x = x / x.norm(dim=(1, 2), keepdim=True).clamp(min=eps)
    for _ in range(NEWTON_SCHULZ_ITERATIONS):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return (x if is_wide else x.mT).to(matrices.dtype)
