"""The Transformer encoder: a stack of blocks and a final norm (arXiv:2010.11929, Eqs. 2-4)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


class Encoder(nn.Module):
    """Blocks one after the other, then a LayerNorm over every token. `norm=False` leaves the norm to what comes after.

    With `recompute` set, training keeps each block's input alone and computes the rest again in the backward pass
    (arXiv:1604.06174): memory for one block instead of all, for a third more work.
    """

    recompute = False

    def __init__(self, width: int, blocks: Sequence[nn.Module], eps: float = 1e-6, norm: bool = True) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)
        self.norm = nn.LayerNorm(width, eps=eps) if norm else nn.Identity()

    def forward(self, x: Tensor, *context: Any) -> Tensor:
        """(..., N, D) -> (..., N, D); `context` goes to every block."""
        for block in self.blocks:
            x = checkpoint(block, x, *context, use_reentrant=False) if self.recompute and self.training else block(x, *context)
        return self.norm(x)


def stack(depth: int, block: Callable[[int, float], nn.Module], drop_path: float = 0.0, rises: bool = True) -> list[nn.Module]:
    """`depth` blocks, each made from its number and its stochastic depth rate: it rises linearly from 0 to `drop_path`, or is that."""
    return [block(i, drop_path * i / max(depth - 1, 1) if rises else drop_path) for i in range(depth)]
