"""Token merging (ToMe, Bolya et al., arXiv:2210.09461): similar tokens are merged inside the encoder.

Merging is an inference option that trades accuracy for speed, by `count` tokens per block.

Shapes: B batch, N tokens, D width, R leading tokens that the head uses.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitreous.nn.attention import ALL_QUERIES, Attention, dot_product_attention
from vitreous.nn.block import Block
from vitreous.nn.encoder import Encoder
from vitreous.nn.frozen import FrozenBranch


def merge_similar_tokens(
    tokens: Tensor, metric: Tensor, sizes: Tensor, count: int, protected: int = 0
) -> tuple[Tensor, Tensor]:
    """Merge the `count` most similar pairs of tokens: tokens (B, N, D), `metric` (B, N, d), `sizes` (B, N, 1) -> tokens
    (B, N - count, D), sizes (B, N - count, 1).

    The size of a token is the number of original tokens in it. Bipartite soft matching (section 3 of the paper): the
    tokens after the first `protected` are assigned alternately to two sets. Each token of the first set is paired with
    the token of the second set that has the most similar metric by cosine. The `count` most similar pairs are replaced
    by their mean, weighted by size. At most half of the tokens are merged.
    """
    count = min(count, (tokens.shape[1] - protected) // 2)
    if count < 1:
        return tokens, sizes
    direction = F.normalize(metric[:, protected:].float(), dim=-1)
    similarity, partner = (direction[:, ::2] @ direction[:, 1::2].mT).max(-1)
    order = torch.argsort(similarity, dim=-1, descending=True, stable=True)
    merged_indices, kept_indices = order[:, :count, None], order[:, count:, None]
    target = partner[..., None].gather(1, merged_indices)

    def merge_values(values: Tensor) -> Tensor:
        """Add the values (B, N, C) of merged tokens to those of their targets and remove them."""
        sources, targets = values[:, protected::2], values[:, protected + 1 :: 2]
        width = values.shape[-1]
        targets = targets.scatter_add(
            1, target.expand(-1, -1, width), sources.gather(1, merged_indices.expand(-1, -1, width))
        )
        return torch.cat([values[:, :protected], sources.gather(1, kept_indices.expand(-1, -1, width)), targets], 1)

    merged_sizes = merge_values(sizes)
    return merge_values(tokens * sizes) / merged_sizes, merged_sizes


class TokenMergingEncoder(nn.Module):
    """Encoder of frozen blocks (`nn.frozen`) that merges `count` tokens after the attention of each block.

    Attention is proportional: a merged token counts as many times as the original tokens in it. The leading `protected`
    tokens are never merged. With `mean`, the output tokens are scaled so that their unweighted mean is the mean of all
    original tokens.
    """

    def __init__(self, encoder: Encoder, count: int, protected: int, mean: bool) -> None:
        super().__init__()
        self.blocks, self.norm, self.num_output_tokens = encoder.blocks, encoder.norm, encoder.num_output_tokens
        self.count, self.protected, self.mean = count, protected, mean

    def forward(self, x: Tensor, all_tokens: bool = True) -> Tensor:
        """Encode tokens: (B, N, D) -> (B, fewer tokens, D), or (B, R, D) if `all_tokens` is false."""
        patches, sizes = x.shape[1] - self.protected, x.new_ones(*x.shape[:2], 1)
        for block in self.blocks:
            queries = slice(self.num_output_tokens) if not all_tokens and block is self.blocks[-1] else ALL_QUERIES
            assert isinstance(block, Block)
            branch = block.attention
            assert isinstance(branch, FrozenBranch) and isinstance(branch.part, Attention)
            q, k, v = branch.part.split(branch.norm(x))
            heads = dot_product_attention(q[..., queries, :], k, v, sizes.log().to(q.dtype)[:, None].mT)
            x = branch.last.forward_add_residual(heads.transpose(-3, -2).flatten(-2), x[:, queries])
            if queries == ALL_QUERIES:
                x, sizes = merge_similar_tokens(x, k.mean(-3), sizes, self.count, self.protected)
            x = block.mlp(x)
        x = self.norm(x)
        if self.mean:
            weight = sizes[:, self.protected :] * ((x.shape[1] - self.protected) / patches)
            x = torch.cat([x[:, : self.protected], x[:, self.protected :] * weight], 1)
        return x
