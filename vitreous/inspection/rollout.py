"""Attention rollout through all blocks (arXiv:2005.00928; arXiv:2010.11929, D.8, Figs. 6 and 14).

Shapes: B batch, C channels, L blocks, P prefix tokens, N patch tokens, T = P + N, h heads, Q queries.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from vitreous.errors import UsageError
from vitreous.inspection.attention import get_readout_weights, require_global_attention
from vitreous.inspection.hooks import AttentionCall, visit_attention_calls
from vitreous.models.base import VisionModel

HeadFusion = Literal["mean", "max", "min"]  # how the attention of several heads is combined


@dataclass(frozen=True)
class RolloutOptions:
    """Options that convert a block's attention A (h, T, T) to its mixing matrix M:

        F = fusion of A over the heads
        F[F < the (floor(discard T^2) + 1)-th smallest of F] = 0
        M = residual I + (1 - residual) F, rows divided by their sums

    The threshold is per image, over the full matrix, without exceptions; equal weights are all kept or all discarded.
    An empty row becomes the identity. The paper averages the heads and does not mention a residual; 0.5 is from Abnar
    and Zuidema. Raises UsageError for a `residual` outside [0, 1] or a `discard` outside [0, 1).
    """

    residual: float = 0.5
    fusion: HeadFusion = "mean"
    discard: float = 0.0

    def __post_init__(self) -> None:
        if not 0 <= self.residual <= 1:
            hint = "use a number from 0 to 1, for example 0.5"
            raise UsageError(f"--residual must be from 0 to 1, got {self.residual}", hint)
        if not 0 <= self.discard < 1:
            hint = "use a number from 0 to below 1, such as 0.9"
            raise UsageError(f"--discard must be at least 0 and below 1, got {self.discard}", hint)
        if self.fusion not in ("mean", "max", "min"):
            raise UsageError(f"unknown fusion {self.fusion}", "use mean, max or min")


@dataclass(frozen=True)
class AttentionRollout:
    """Rollout of the readout tokens: `joint` (B, L, T) float32 through blocks 0 to l combined, `single` (B, L, T)
    through block l only.

    Each row sums to one, prefix tokens first. `grid` is the layout of the N patches.
    """

    grid: tuple[int, ...]
    prefix: int
    joint: Tensor
    single: Tensor

    @property
    def maps(self) -> Tensor:
        """Return `joint` of the patches (B, L, *grid), without the prefix tokens and not renormalised."""
        return self.joint[..., self.prefix :].unflatten(-1, self.grid)

    @property
    def single_maps(self) -> Tensor:
        """Return `single` of the patches (B, L, *grid), without the prefix tokens and not renormalised."""
        return self.single[..., self.prefix :].unflatten(-1, self.grid)


def compute_rollout(
    model: VisionModel[Any], images: Tensor, options: RolloutOptions | None = None, queries: Tensor | None = None
) -> AttentionRollout:
    """Compute the attention rollout of images (B, C, *image) for the model's readout: the class token, or the patches
    that the model pools (`attention.get_readout_weights`).

    `queries` (T,), weights of tokens with sum one, replace the readout. Only the rows of the readout are computed, from
    the last block backwards; a T x T matrix is stored only if weights are discarded. Raises UsageError for a model
    without attention, or with blocks without global attention.
    """
    calls = collect_attention_calls(model, images)
    readout = get_readout_weights(model, calls[0]) if queries is None else queries.to(calls[0].x.device)
    joint, single = compute_rollout_rows(calls, readout, options or RolloutOptions())
    return AttentionRollout(calls[0].grid, calls[0].prefix, joint, single)


def collect_attention_calls(model: VisionModel[Any], images: Tensor) -> list[AttentionCall]:
    """Return the attention of every block for images (B, C, *image). Raises UsageError if an attention is not
    global."""
    calls: list[AttentionCall] = []

    def store_call(call: AttentionCall) -> None:
        require_global_attention(call, model)
        calls.append(call)

    visit_attention_calls(model, images, store_call)
    return calls


def compute_rollout_rows(
    calls: Sequence[AttentionCall], readout: Tensor, mixing: RolloutOptions
) -> tuple[Tensor, Tensor]:
    """Compute the products readout M_l ... M_1 and readout M_l for every block l, (B, L, T) each, from L attentions and
    the weights `readout` (T,)."""
    batch, tokens = len(calls[0].x), calls[0].tokens
    joint = readout.new_zeros(batch, 0, tokens)  # rows of the blocks visited so far, the last block first
    single = []
    for call in reversed(calls):
        query_rows = torch.cat([joint, readout.expand(batch, 1, -1)], 1)
        joint = torch.zeros_like(query_rows)
        for queries, mixing_rows in mix_with_residual(call, mixing):
            joint = joint + query_rows[..., queries] @ mixing_rows
        single.append(joint[:, -1])
    return joint.flip(1), torch.stack(single[::-1], 1)


def compute_rollout_matrix(calls: Sequence[AttentionCall], mixing: RolloutOptions) -> Tensor:
    """Compute the full rollout matrix (B, T, T) of L attentions: R_1 = M_1, R_l = M_l R_(l-1)."""
    joint = torch.eye(calls[0].tokens, device=calls[0].x.device)
    for call in calls:
        joint = torch.cat([mixing_rows @ joint for _, mixing_rows in mix_with_residual(call, mixing)], -2)
    return joint


def mix_with_residual(call: AttentionCall, mixing: RolloutOptions) -> Iterator[tuple[slice, Tensor]]:
    """Yield slices that cover all queries, with their rows (B, Q, T) of the mixing matrix M (`RolloutOptions`)."""
    fused = ((queries, fuse_heads(weights, mixing.fusion)) for queries, weights in call.iterate_chunks())
    if mixing.discard:
        fused = iter(
            [
                (
                    slice(0, call.tokens),
                    discard_smallest_weights(torch.cat([fused_rows for _, fused_rows in fused], -2), mixing.discard),
                )
            ]
        )
    for queries, fused_rows in fused:
        token_indices = torch.arange(call.tokens, device=fused_rows.device)[queries]
        mixing_rows = fused_rows * (1 - mixing.residual)
        mixing_rows[:, torch.arange(len(token_indices)), token_indices] += mixing.residual
        is_empty = mixing_rows.sum(-1) == 0
        mixing_rows[:, torch.arange(len(token_indices)), token_indices] += is_empty.to(mixing_rows)
        yield queries, mixing_rows / mixing_rows.sum(-1, keepdim=True)


def fuse_heads(weights: Tensor, fusion: HeadFusion) -> Tensor:
    """Fuse the heads of attention weights: (B, h, Q, T) -> (B, Q, T)."""
    return weights.mean(1) if fusion == "mean" else weights.amax(1) if fusion == "max" else weights.amin(1)


def discard_smallest_weights(fused: Tensor, discard: float) -> Tensor:
    """Set the smallest weights of each image to zero, a share `discard` of all: (B, T, T) -> (B, T, T)."""
    flat = fused.flatten(1)
    limits = flat.kthvalue(int(discard * flat.shape[1]) + 1, dim=1).values
    return fused.masked_fill(fused < limits[:, None, None], 0.0)
