"""Token merging (ToMe, Bolya et al., arXiv:2210.09461): alike tokens become one on their way through the encoder.

B batch, N tokens, D width. An option at inference that trades accuracy for speed, by `count` tokens a block.
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
    """(B, N, D) tokens, a (B, N, d) metric and (B, N, 1) sizes -> `count` fewer tokens, and their sizes.

    Bipartite soft matching (section 3 there): the tokens after the first `protected` go to two sets in turn, each of
    the first is joined to the one of the second whose metric has the nearest direction, and the `count` nearest pairs
    become their mean, weighted by size. At most half of the tokens go.
    """
    count = min(count, (tokens.shape[1] - protected) // 2)
    if count < 1:
        return tokens, sizes
    direction = F.normalize(metric[:, protected:].float(), dim=-1)
    nearness, partner = (direction[:, ::2] @ direction[:, 1::2].mT).max(-1)
    order = torch.argsort(nearness, dim=-1, descending=True, stable=True)
    gone, stay = order[:, :count, None], order[:, count:, None]
    target = partner[..., None].gather(1, gone)

    def joined(values: Tensor) -> Tensor:
        first, second = values[:, protected::2], values[:, protected + 1 :: 2]
        width = values.shape[-1]
        second = second.scatter_add(1, target.expand(-1, -1, width), first.gather(1, gone.expand(-1, -1, width)))
        return torch.cat([values[:, :protected], first.gather(1, stay.expand(-1, -1, width)), second], 1)

    total = joined(sizes)
    return joined(tokens * sizes) / total, total


class TokenMergingEncoder(nn.Module):
    """An encoder of frozen blocks (`nn.frozen`) that merges `count` tokens after the attention of each block.

    Attention is proportional: a token that stands for several counts as several. `protected` tokens in front never
    merge. With `mean`, the tokens that come out are scaled so that their plain mean is that of all the tokens they
    stand for.
    """

    def __init__(self, encoder: Encoder, count: int, protected: int, mean: bool) -> None:
        super().__init__()
        self.blocks, self.norm, self.read = encoder.blocks, encoder.norm, encoder.read
        self.count, self.protected, self.mean = count, protected, mean

    def forward(self, x: Tensor, whole: bool = True) -> Tensor:
        """(B, N, D) -> (B, fewer, D), or (B, read, D) where not the `whole` is asked for."""
        patches, sizes = x.shape[1] - self.protected, x.new_ones(*x.shape[:2], 1)
        for block in self.blocks:
            few = slice(self.read) if not whole and block is self.blocks[-1] else ALL_QUERIES
            assert isinstance(block, Block)
            branch = block.attention
            assert isinstance(branch, FrozenBranch) and isinstance(branch.part, Attention)
            q, k, v = branch.part.split(branch.norm(x))
            heads = dot_product_attention(q[..., few, :], k, v, sizes.log().to(q.dtype)[:, None].mT)
            x = branch.last.forward_add_residual(heads.transpose(-3, -2).flatten(-2), x[:, few])
            if few == ALL_QUERIES:
                x, sizes = merge_similar_tokens(x, k.mean(-3), sizes, self.count, self.protected)
            x = block.mlp(x)
        x = self.norm(x)
        if self.mean:
            weight = sizes[:, self.protected :] * ((x.shape[1] - self.protected) / patches)
            x = torch.cat([x[:, : self.protected], x[:, self.protected :] * weight], 1)
        return x
