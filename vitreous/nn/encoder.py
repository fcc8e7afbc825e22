"""The Transformer encoder: a stack of blocks and a final norm (arXiv:2010.11929, Eqs. 2-4).

Shapes: N tokens, D width, R leading tokens that the head uses (`num_output_tokens`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

from torch import Tensor, nn

from vitreous.system.torch_types import checkpoint, compile_module

M = TypeVar("M", bound=nn.Module)


class Encoder(nn.Module):
    """Blocks in sequence, then a LayerNorm over every token; `norm=False` omits the norm.

    `read` is the number R of leading tokens that the rest of the model uses (such as the class token), None for all. If
    a caller passes `all_tokens=False`, the last block computes only the outputs of these tokens.

    With `recompute`, training stores only the input of each block and recomputes the block in the backward pass
    (activation checkpointing, arXiv:1604.06174): activation memory of one block instead of all, for a third more
    compute.
    """

    recompute = False

    def __init__(
        self, width: int, blocks: Sequence[nn.Module], eps: float = 1e-6, norm: bool = True, *, read: int | None = None
    ) -> None:
        super().__init__()
        self.blocks, self.num_output_tokens = nn.ModuleList(blocks), read
        self.norm = nn.LayerNorm(width, eps=eps) if norm else nn.Identity()

    def forward(self, x: Tensor, *context: Any, all_tokens: bool = True) -> Tensor:
        """Encode tokens: (..., N, D) -> (..., N, D), or (..., R, D) if `all_tokens` is false; `context` is passed to
        every block."""
        return self.norm(self.run_blocks(x, *context, all_tokens=all_tokens))

    def run_blocks(self, x: Tensor, *context: Any, all_tokens: bool = True) -> Tensor:
        """Run the blocks without the final norm: (..., N, D) -> (..., N, D), or (..., R, D) if `all_tokens` is
        false."""
        for block in self.blocks:
            is_partial = self.num_output_tokens and not all_tokens and block is self.blocks[-1]
            x = self.step(partial(block, queries=slice(self.num_output_tokens)) if is_partial else block, x, *context)
        return x

    def features(self, x: Tensor, taps: Sequence[int], *context: Any) -> list[Tensor]:
        """Compute intermediate tokens: (..., N, D) -> for each tap t, (..., N, D) after t blocks, before the final
        norm.

        Tap 0 is the input itself. Blocks after the last tap are not computed. Raises ValueError if `taps` is empty or
        contains a depth that is not in 0 .. number of blocks.
        """
        if not taps or min(taps) < 0 or max(taps) > len(self.blocks):
            raise ValueError(f"taps must be one or more depths from 0 to {len(self.blocks)}, got {tuple(taps)}")
        outputs = {0: x}
        for depth, block in enumerate(self.blocks[: max(taps)], 1):
            outputs[depth] = x = self.step(block, x, *context)
        return [outputs[tap] for tap in taps]

    def step(self, block: Callable[..., Tensor], x: Tensor, *context: Any) -> Tensor:
        """Run a single block: (..., N, D) -> (..., N, D); in training with `recompute`, it is recomputed in the
        backward pass."""
        if self.recompute and self.training:
            return checkpoint(block, x, *context, use_reentrant=False)
        return block(x, *context)


def build_blocks(depth: int, block: Callable[[int, float], M], drop_path: float = 0.0, rises: bool = True) -> list[M]:
    """Build `depth` blocks by calling block(index, stochastic depth rate).

    The rate rises linearly from 0 to `drop_path` over the depth; if `rises` is false, it is `drop_path` for all blocks.
    """
    return [block(i, drop_path * i / max(depth - 1, 1) if rises else drop_path) for i in range(depth)]


def compile_blocks(module: nn.Module) -> None:
    """Compile every block of every encoder in a module, in place, by `torch.compile`.

    Blocks of the same shape share a graph, so compiling any depth takes the time of two or three blocks. Code around
    the blocks (masks, heads, losses) is not compiled. Parameter names do not change. Deep copies are not compiled.
    """
    # dynamo counts all graphs of a block's code: of student and teacher, two image sizes, with and without drop path
    import torch._dynamo.config as dynamo

    dynamo.recompile_limit = max(64, dynamo.recompile_limit)
    for encoder in module.modules():
        if isinstance(encoder, Encoder):
            for block in encoder.blocks:
                compile_module(block)
