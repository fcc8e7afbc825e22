"""Attention over space and over time (ViViT, arXiv:2103.15691, section 3.3), built from `Block` and `Attention`.

Shapes: B batch, T time slots of a clip, S tokens of a slot, prefix tokens included, Q queries, D width, h heads; tokens
are (B, T, S, D).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from vitreous.nn.attention import ALL_QUERIES, Attention, attention_probabilities, dot_product_attention, split_heads
from vitreous.nn.block import Block, ResidualBranch


class SpaceTimeBlock(Block):
    """Block with attention over the tokens of a slot, then attention over time, then the MLP (ViViT's model 3), each
    residual.

    Equivalent loops:

        for t in range(T): x[:, t] = attention(x[:, t])
        for s in range(S): x[:, :, s] = time(x[:, :, s])
        x = mlp(x)

    `block` is the block of an image model, whose parameters keep their names; `time` is the branch that attends over
    time.
    """

    def __init__(self, block: Block, time: ResidualBranch) -> None:
        nn.Module.__init__(self)
        self.attention, self.time, self.mlp, self.after = block.attention, time, block.mlp, block.after

    def forward(self, x: Tensor, *context: Any, queries: slice = ALL_QUERIES) -> Tensor:
        """Apply the block: (B, T, S, D) -> (B, T, Q, D), for the `queries` of each slot or all S tokens."""
        x = self.attention(x, *context, queries=queries)
        x = self.time(x.transpose(1, 2)).transpose(1, 2)
        return self.mlp(x)


class SpaceTimeHeads(Attention):
    """Attention whose first half of the heads attends over the tokens of a slot, and the second half over time
    (ViViT's model 4).

    The weights are those of `Attention`. With a single slot all heads attend over its tokens, so an image model's
    output for images does not change. Raises ValueError for an odd number of heads.
    """

    def __init__(self, width: int, heads: int, bias: bool = True) -> None:
        super().__init__(width, heads, bias)
        if heads % 2:
            raise ValueError(f"attention over space and time requires an even number of heads, got {heads}")

    def forward_before_output(self, x: Tensor, queries: slice = ALL_QUERIES) -> Tensor:
        """Compute the concatenated outputs of the heads: (B, T, S, D) -> (B, T, Q, D)."""
        if x.shape[1] == 1:
            return super().forward_before_output(x, queries=queries)
        half = self.heads // 2
        q, k, v = self.project_qkv(x)  # (B, T, h, S, d)
        space = dot_product_attention(q[:, :, :half, queries], k[:, :, :half], v[:, :, :half])
        # (B, Q, h / 2, T, d): a token attends to the tokens of its spatial position in all slots
        time_qkv = (tensor[:, :, half:, queries].transpose(1, 3) for tensor in (q, k, v))
        time = dot_product_attention(*time_qkv).transpose(1, 3)
        return torch.cat([space, time], 2).transpose(-3, -2).flatten(-2)

    def space_or_time_heads(self, over_time: bool) -> SpaceOrTimeHeads:
        """Return the heads that attend over time if `over_time`, else the heads that attend over space, as a module for
        the inspection of attention."""
        return SpaceOrTimeHeads(self, over_time)


class SpaceOrTimeHeads(nn.Module):
    """One half of the heads of `SpaceTimeHeads`, over space or over time, for the inspection of attention."""

    def __init__(self, attention: SpaceTimeHeads, over_time: bool) -> None:
        super().__init__()
        self.qkv, self.whole_heads, self.heads, self.is_temporal = (
            attention.qkv,
            attention.heads,
            attention.heads // 2,
            over_time,
        )

    def compute_weights(self, x: Tensor, queries: slice = ALL_QUERIES) -> Tensor:
        """Compute attention probabilities of this half of the heads: (..., N, D) -> (..., h / 2, Q, N), for the
        `queries` or all N tokens. Rows sum to one."""
        q, k, _ = split_heads(self.qkv(x), self.whole_heads)
        head_slice = slice(self.heads, None) if self.is_temporal else slice(self.heads)
        return attention_probabilities(q[..., head_slice, queries, :], k[..., head_slice, :, :])


def zero_output_layer(branch: ResidualBranch, layer: str) -> None:
    """Set the submodule's last layer, named `layer`, to 0, so that the branch adds nothing until it is trained."""
    for parameter in branch.part.get_submodule(layer).parameters():
        nn.init.zeros_(parameter)


def flatten_time_slots(x: Tensor, prefix: int) -> Tensor:
    """Average prefix tokens over time and concatenate the patch tokens of all slots: (B, T, P + K, D) ->
    (B, P + T K, D), with P = `prefix` and patch tokens in raster order."""
    return torch.cat([x[:, :, :prefix].mean(1), x[:, :, prefix:].flatten(1, 2)], 1)
