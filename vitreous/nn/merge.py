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
    tokens: Tensor, metric: Tensor, sizes: Tensor, num_merged: int, num_protected: int = 0
) -> tuple[Tensor, Tensor]:
    """Merge the `num_merged` most similar pairs of tokens: tokens (B, N, D), `metric` (B, N, d), `sizes` (B, N, 1) ->
    tokens (B, N - num_merged, D), sizes (B, N - num_merged, 1).

    The size of a token is the number of original tokens in it. Bipartite soft matching (section 3 of the paper): the
    tokens after the first `num_protected` are assigned alternately to two sets. Each token of the first set is paired
    with the token of the second set that has the most similar metric by cosine. The `num_merged` most similar pairs are
    replaced by their mean, weighted by size. At most half of the tokens are merged.
    """
    num_merged = min(num_merged, (tokens.shape[1] - num_protected) // 2)
    if num_merged < 1:
        return tokens, sizes
    direction = F.normalize(metric[:, num_protected:].float(), dim=-1)
    similarity, partner = (direction[:, ::2] @ direction[:, 1::2].mT).max(-1)
    order = torch.argsort(similarity, dim=-1, descending=True, stable=True)
    merged_indices, kept_indices = order[:, :num_merged, None], order[:, num_merged:, None]
    target = partner[..., None].gather(1, merged_indices)

    def merge_values(values: Tensor) -> Tensor:
        """Add the values (B, N, C) of merged tokens to those of their targets and remove them."""
        sources, targets = values[:, num_protected::2], values[:, num_protected + 1 :: 2]
        width = values.shape[-1]
        targets = targets.scatter_add(
            1, target.expand(-1, -1, width), sources.gather(1, merged_indices.expand(-1, -1, width))
        )
        return torch.cat([values[:, :num_protected], sources.gather(1, kept_indices.expand(-1, -1, width)), targets], 1)

    merged_sizes = merge_values(sizes)
    return merge_values(tokens * sizes) / merged_sizes, merged_sizes


class TokenMergingEncoder(nn.Module):
    """Encoder of frozen blocks (`nn.frozen`) that merges `num_merged` tokens after the attention of each block.

    Attention is proportional: a merged token counts as many times as the original tokens in it. The leading
    `num_protected` tokens are never merged. With `uses_mean_pooling`, the output tokens are scaled so that their
    unweighted mean is the mean of all original tokens.
    """

    def __init__(self, encoder: Encoder, num_merged: int, num_protected: int, uses_mean_pooling: bool) -> None:
        super().__init__()
        self.blocks, self.norm, self.num_output_tokens = encoder.blocks, encoder.norm, encoder.num_output_tokens
        self.num_merged, self.num_protected, self.uses_mean_pooling = num_merged, num_protected, uses_mean_pooling

    def forward(self, x: Tensor, all_tokens: bool = True) -> Tensor:
        """Encode and merge tokens: (B, N, D) -> (B, M, D), M < N; the first R, (B, R, D), if `all_tokens` is false."""
        num_patches, sizes = x.shape[1] - self.num_protected, x.new_ones(*x.shape[:2], 1)
        for block in self.blocks:
            queries = slice(self.num_output_tokens) if not all_tokens and block is self.blocks[-1] else ALL_QUERIES
            assert isinstance(block, Block)
            branch = block.attention
            assert isinstance(branch, FrozenBranch) and isinstance(branch.part, Attention)
            q, k, v = branch.part.project_qkv(branch.norm(x))
            head_outputs = dot_product_attention(q[..., queries, :], k, v, sizes.log().to(q.dtype)[:, None].mT)
            x = branch.output_layer.forward_add_residual(head_outputs.transpose(-3, -2).flatten(-2), x[:, queries])
            if queries == ALL_QUERIES:
                x, sizes = merge_similar_tokens(x, k.mean(-3), sizes, self.num_merged, self.num_protected)
            x = block.mlp(x)
        x = self.norm(x)
        if self.uses_mean_pooling:
            weight = sizes[:, self.num_protected :] * ((x.shape[1] - self.num_protected) / num_patches)
            x = torch.cat([x[:, : self.num_protected], x[:, self.num_protected :] * weight], 1)
        return x
