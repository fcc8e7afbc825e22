"""LAMB (arXiv:1904.00962): Adam's direction, with a step as long as the parameter is large. DeiT-III trains with it."""

from __future__ import annotations

import torch
from torch import Tensor

from vitreous.training.run import Optimizer


@torch.no_grad()
def direction(
    grad: Tensor, weight: Tensor, first: Tensor, second: Tensor, count: Tensor, options: Optimizer, decay: float
) -> Tensor:
    """Renew both moments in place and return m / (sqrt(v) + eps) + decay w, bias-corrected; `count` steps were made
    before.

    All are vectors of shape (n,).
    """
    beta1, beta2 = options.betas
    count.add_(1)
    first.lerp_(grad, 1 - beta1)
    second.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
    scale = second.div(1 - beta2**count).sqrt_().add_(options.eps)
    update = first.div(1 - beta1**count).div_(scale)
    return update.add_(weight, alpha=decay) if decay else update


def trust(weights: Tensor, updates: Tensor) -> Tensor:
    """(n,) norms of parameters and of their updates -> (n,) factors of the learning rate: their quotient, 1 where one
    is zero."""
    return torch.where((weights > 0) & (updates > 0), weights / updates.clamp(min=1e-12), torch.ones_like(weights))
