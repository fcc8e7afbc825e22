"""LARS (arXiv:1708.03888): momentum whose steps are as long as the parameter is large. MAE's linear protocol trains
with it."""

from __future__ import annotations

import torch
from torch import Tensor

TRUST = 0.001  # a step's length as a share of the parameter's norm, before rate and momentum


def adaptation(weights: Tensor, updates: Tensor) -> Tensor:
    """(n,) norms of parameters and of their gradients with decay -> (n,) factors of these: TRUST |w| / |g|, 1 where one
    is zero."""
    return torch.where((weights > 0) & (updates > 0), TRUST * weights / updates.clamp(min=1e-12), 1.0)
