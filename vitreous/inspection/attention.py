"""Raw attention of a block, as seen from where the answer is read (arXiv:2010.11929, appendix A).

B batch, P prefix tokens, N patch tokens, T = P + N, h heads.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from vitreous.errors import UsageError
from vitreous.inspection.hooks import AttentionCall, watch
from vitreous.models.zoo import Model

INSTEAD = "distance, filters, positions, fourier, features and similarity work for it"


def attention(model: Model, images: Tensor, layers: Iterable[int], queries: Tensor | None = None) -> dict[int, Tensor]:
    """Block -> (B, h, T) float32: what each head of those blocks (from 0) looks at; rows sum to one, prefix tokens
    first.

    The query is the class token, or the mean of the patches' queries: `start`; or `queries` (T,), a share of each.
    Raises UsageError for a model without attention, and for a block that sees rows, columns or windows.
    """
    wanted, weights = set(layers), {}

    def collect(look: AttentionCall) -> None:
        if look.layer in wanted:
            far_sighted(look, model)
            asked = start(model, look) if queries is None else queries.to(look.x.device)
            weights[look.layer] = row(look, asked.expand(len(look.x), -1))

    watch(model, images, collect)
    return weights


def start(model: Model, look: AttentionCall) -> Tensor:
    """(T,) float32, with the sum one: the tokens that the answer is read from, after the last block.

    The class token where that is what is pooled; else, with a mean or attention pooling or no class token, all patches
    alike. A distillation token is not counted.
    """
    config = model.config
    weights = torch.zeros(look.tokens, device=look.x.device)
    if config.pool in ("class", "distilled"):
        weights[0] = 1
    else:
        weights[look.prefix :] = 1 / (look.tokens - look.prefix)
    return weights


def row(look: AttentionCall, queries: Tensor) -> Tensor:
    """A share of each query (B, T) -> (B, h, T): sum_q queries[q] A[h, q]. Queries without a share are not computed."""
    asked = queries.any(0).nonzero()[:, 0]
    low, high = int(asked[0]), int(asked[-1]) + 1
    if high - low == 1:
        return look.weights(slice(low, high))[..., 0, :] * queries[:, None, low:high]
    return sum(
        (torch.einsum("bq,bhqt->bht", queries[:, some], weights) for some, weights in look.chunks()), torch.zeros(())
    )


def far_sighted(look: AttentionCall, model: Model) -> None:
    """Raises UsageError for a look that does not see all tokens, naming blocks that do."""
    if look.span == "all":
        return
    seen = {"row": "its row and then its column", "column": "its row and then its column"}.get(look.span, "its window")
    blocks = getattr(model.config, "global_blocks", ())
    hint = f"attention works for blocks {', '.join(map(str, blocks))}, distance for all" if blocks else INSTEAD
    raise UsageError(f"in block {look.layer} of this model a token sees {seen} only, not the whole image", hint)
