"""Where a token is: position embeddings added to a grid of tokens."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitreous.nn.grid import resize


def sincos(grid: tuple[int, ...], width: int, base: float = 10000.0) -> Tensor:
    """(*grid, width): sines and cosines of each axis' coordinate, an equal share of the channels to an axis.

    Along one axis with m = width / axes channels: [sin(w_i x) | cos(w_i x)], w_i = base^(-i / (m / 2)), i = 0 .. m / 2 - 1;
    the last axis comes first, as in MAE's two-dimensional form. Channels that do not divide stay zero.
    """
    axes = len(grid)
    half = width // (2 * axes)
    frequencies = base ** (-torch.arange(half) / half)
    parts = []
    for axis in reversed(range(axes)):
        angles = torch.arange(grid[axis])[:, None] * frequencies  # (length, half)
        waves = torch.cat([angles.sin(), angles.cos()], 1)
        parts.append(waves.view(*[-1 if a == axis else 1 for a in range(axes)], 2 * half).expand(*grid, 2 * half))
    return F.pad(torch.cat(parts, -1), (0, width - 2 * half * axes))


class Learned(nn.Module):
    """Learned 1-D positions (arXiv:2010.11929, Eq. 1): one vector per place of `grid`, drawn from N(0, 0.02^2).

    At another grid the table is resized (section 3.2), so a larger, smaller or non-square image needs no new model.
    """

    def __init__(self, grid: tuple[int, ...], width: int, how: str = "bicubic") -> None:
        super().__init__()
        self.how = how
        self.table = nn.Parameter(torch.empty(*grid, width).normal_(std=0.02))

    def forward(self, tokens: Tensor) -> Tensor:
        """(B, *grid, D) -> (B, *grid, D)."""
        return tokens + resize(self.table, tuple(tokens.shape[1:-1]), self.how)
