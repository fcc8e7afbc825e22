"""Attention maps of a block from the readout token (arXiv:2010.11929, appendix A), and attention mass thresholds.

The readout tokens are those that the model pools after the last block: the class token or the patches.

Shapes: B batch, C channels, P prefix tokens, N patch tokens, T = P + N, h heads, Q queries.
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
    """Compute the attention from the readout tokens to all tokens in blocks `layers` (from 0): block index -> (B, h, T)
    float32.

    Rows sum to one, prefix tokens first. `queries` (T,), a weight per token, replaces the readout
    (`get_readout_weights`). Raises UsageError for a model without attention, and for blocks whose tokens attend only to
    rows, columns or windows.
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
    """Return the weights (T,) float32, with sum one, of the tokens that the model pools after the last block.

    If the class token is pooled, it has the weight 1; otherwise all patches have equal weights. A distillation token is
    not counted.
    """
    config = model.config
    weights = torch.zeros(call.tokens, device=call.x.device)
    if config.pool in ("class", "distilled"):
        weights[0] = 1
    else:
        weights[call.prefix :] = 1 / (call.tokens - call.prefix)
    return weights


def average_query_attention(call: AttentionCall, queries: Tensor) -> Tensor:
    """Average the attention of a block over queries with weights (B, T): sum_q queries[q] A[h, q] -> (B, h, T).

    Queries with zero weight are not computed where possible.
    """
    query_indices = queries.any(0).nonzero()[:, 0]
    low, high = int(query_indices[0]), int(query_indices[-1]) + 1
    if high - low == 1:
        return call.compute_weights(slice(low, high))[..., 0, :] * queries[:, None, low:high]
    chunks = (
        torch.einsum("bq,bhqt->bht", queries[:, chunk_slice], weights) for chunk_slice, weights in call.iterate_chunks()
    )
    return sum(chunks, torch.zeros(()))


def require_global_attention(call: AttentionCall, model: VisionModel[Any]) -> None:
    """Raise UsageError if the tokens of a block do not attend to all tokens; the hint names the blocks with global
    attention."""
    if call.span == "all":
        return
    row_and_column, slot_and_time = "its row and its column", "its time slot and the same position in all slots"
    attended_tokens = {
        "row": row_and_column,
        "column": row_and_column,
        "space": slot_and_time,
        "time": slot_and_time,
    }.get(call.span, "its window")
    blocks = model.config.attention.global_blocks
    hint = (
        f"use attention for blocks {', '.join(map(str, blocks))}, or distance for all blocks"
        if blocks
        else ALTERNATIVES_HINT
    )
    problem = f"in block {call.layer} of this model a token attends only to {attended_tokens}, not to all tokens"
    raise UsageError(problem, hint)


def threshold_attention_mass(maps: Tensor, mass: float = 0.6) -> Tensor:
    """Select the fewest patches that contain a share `mass` of the total weight: (..., N) nonnegative -> (..., N) bool.

    Prefix tokens must be excluded before. If all weights are zero, no patch is selected. Raises UsageError for a mass
    outside (0, 1].
    """
    if not 0 < mass <= 1:
        raise UsageError(
            f"mass must be above 0 and at most 1, got {mass}", "use a share of the attention; DINO's figures use 0.6"
        )
    ordered, sort_indices = maps.double().sort(dim=-1, descending=True, stable=True)
    preceding_mass = ordered.cumsum(-1) - ordered
    # 1e-12 tolerates rounding errors of the sum
    is_selected = preceding_mass < mass * ordered.sum(-1, keepdim=True) * (1 - 1e-12)
    return torch.zeros_like(is_selected).scatter(-1, sort_indices, is_selected & (ordered > 0))
