"""The patches that hold most of a head's attention (DINO, arXiv:2104.14294, Fig. 3)."""

from __future__ import annotations

import torch
from torch import Tensor

from vitreous.errors import UsageError


def segments(maps: Tensor, mass: float = 0.6) -> Tensor:
    """(..., N) weights of patches, at least zero -> (..., N) bool: the fewest patches whose weights are `mass` of the
    sum.

    The prefix tokens' share is to be left out before. Where all weights are zero no patch is kept. Raises UsageError
    for a mass that is not above 0 and at most 1. The loop it replaces, for each row:

        for patch in sorted(patches, key=weight, reverse=True):
            if sum(kept) < mass * sum(weights): kept.append(patch)
    """
    if not 0 < mass <= 1:
        raise UsageError(
            f"a mass of {mass} is no share", "use a number above 0 and at most 1; DINO's pictures have 0.6"
        )
    ordered, places = maps.double().sort(dim=-1, descending=True, stable=True)
    before = ordered.cumsum(-1) - ordered
    needed = before < mass * ordered.sum(-1, keepdim=True) * (1 - 1e-12)  # a sum has rounding errors
    return torch.zeros_like(needed).scatter(-1, places, needed & (ordered > 0))
