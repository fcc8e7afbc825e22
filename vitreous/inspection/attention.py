"""Attention maps of a block from the readout token (arXiv:2010.11929, appendix A), and attention mass thresholds.

B batch, P prefix tokens, N patch tokens, T = P + N, h heads.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from vitreous.errors import UsageError
from vitreous.inspection.hooks import AttentionCall, visit_attention_calls
from vitreous.models.base import VisionModel

ALTERNATIVES_HINT = "use distance, filters, positions, features or similarity"


def compute_attention_maps(
    model: VisionModel[Any], images: Tensor, layers: Iterable[int], queries: Tensor | None = None
) -> dict[int, Tensor]:
    """Return block index -> (B, h, T) float32 attention of each head in `layers` (from 0); rows sum to one, prefix
    tokens first.

    The query is the readout of the model (`get_readout_weights`), or `queries` (T,), a weight per token. Raises
    UsageError for a model without attention, and for blocks whose tokens only attend to rows, columns or windows.
    """
    selected_layers, weights = set(layers), {}

    def store_attention_map(call: AttentionCall) -> None:
        if call.layer in selected_layers:
            require_global_attention(call, model)
            query_weights = get_readout_weights(model, call) if queries is None else queries.to(call.x.device)
            weights[call.layer] = average_query_attention(call, query_weights.expand(len(call.x), -1))

    visit_attention_calls(model, images, store_attention_map)
    return weights


def get_readout_weights(model: VisionModel[Any], call: AttentionCall) -> Tensor:
    """Return (T,) float32 weights with sum one: the tokens that the readout uses after the last block.

    The class token if it is pooled, else all patches equally. A distillation token is not counted.
    """
    config = model.config
    weights = torch.zeros(call.tokens, device=call.x.device)
    if config.pool in ("class", "distilled"):
        weights[0] = 1
    else:
        weights[call.prefix :] = 1 / (call.tokens - call.prefix)
    return weights


def average_query_attention(call: AttentionCall, queries: Tensor) -> Tensor:
    """Average attention over queries: (B, T) weights -> (B, h, T), sum_q queries[q] A[h, q]. Zero weights are
    skipped."""
    query_indices = queries.any(0).nonzero()[:, 0]
    low, high = int(query_indices[0]), int(query_indices[-1]) + 1
    if high - low == 1:
        return call.compute_weights(slice(low, high))[..., 0, :] * queries[:, None, low:high]
    chunks = (
        torch.einsum("bq,bhqt->bht", queries[:, chunk_slice], weights) for chunk_slice, weights in call.iterate_chunks()
    )
    return sum(chunks, torch.zeros(()))


def require_global_attention(call: AttentionCall, model: VisionModel[Any]) -> None:
    """Raise UsageError if the attention is not global; the hint lists the blocks with global attention."""
    if call.span == "all":
        return
    lines, slots = "its row and then its column", "its time slot and then the same position in all slots"
    attended = {"row": lines, "column": lines, "space": slots, "time": slots}.get(call.span, "its window")
    blocks = model.config.attention.global_blocks
    hint = (
        f"use attention for blocks {', '.join(map(str, blocks))}, or distance for all" if blocks else ALTERNATIVES_HINT
    )
    raise UsageError(f"in block {call.layer} of this model a token only attends to {attended}, not to all tokens", hint)


def threshold_attention_mass(maps: Tensor, mass: float = 0.6) -> Tensor:
    """Select the fewest patches with a share `mass` of the total weight: (..., N) nonnegative -> (..., N) bool.

    Exclude prefix tokens first. If all weights are zero, no patch is selected. Raises UsageError for a mass outside
    (0, 1].
    """
    if not 0 < mass <= 1:
        raise UsageError(
            f"a mass of {mass} is not a share", "use a number above 0 and at most 1; DINO's figures use 0.6"
        )
    ordered, sort_indices = maps.double().sort(dim=-1, descending=True, stable=True)
    preceding_mass = ordered.cumsum(-1) - ordered
    needed = preceding_mass < mass * ordered.sum(-1, keepdim=True) * (1 - 1e-12)  # tolerates rounding errors of the sum
    return torch.zeros_like(needed).scatter(-1, sort_indices, needed & (ordered > 0))
