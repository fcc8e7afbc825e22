"""Attention pooling of tokens to a vector, the two heads of a distilled DeiT, and the neck of SAM's encoder.

Shapes: B batch, N tokens, D width, h heads, d = D / h, K classes.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from vitreous.nn.attention import attend_unprojected, dot_product_attention, get_plain_parameters, split_parameters
from vitreous.nn.block import Mlp


class AttentionPool(nn.Module):
    """Multi-head attention pooling (arXiv:2106.04560, section 3.2): a learned query attends to all tokens, and a
    residual MLP follows, x + MLP(LN(x))."""

    def __init__(self, width: int, heads: int, hidden: int, eps: float = 1e-6, *, gelu: str = "none") -> None:
        super().__init__()
        self.heads = heads
        self.query = nn.Parameter(torch.empty(1, width))
        self.q, self.kv, self.out = nn.Linear(width, width), nn.Linear(width, 2 * width), nn.Linear(width, width)
        self.norm, self.mlp = nn.LayerNorm(width, eps=eps), Mlp(width, hidden, gelu=gelu)
        for matrix in (self.query, self.q.weight, *self.kv.weight.chunk(2), self.out.weight):
            nn.init.xavier_uniform_(matrix)
        for linear in (self.q, self.kv, self.out):
            nn.init.zeros_(linear.bias)

    def forward(self, tokens: Tensor) -> Tensor:
        """Pool tokens: (B, N, D) -> (B, D)."""
        q = self.q(self.query).unflatten(-1, (self.heads, -1)).transpose(0, 1)  # (h, 1, d)
        if (parameters := get_plain_parameters(self.kv)) is not None:
            y = attend_unprojected(q.to(tokens.dtype), tokens, *split_parameters(*parameters, 2, tokens.dtype))
        else:
            k, v = self.kv(tokens).unflatten(-1, (2, self.heads, -1)).permute(2, 0, 3, 1, 4)  # 2 x (B, h, N, d)
            y = dot_product_attention(q.expand(len(tokens), -1, -1, -1), k, v).transpose(1, 2).flatten(2)
        x = self.out(y)
        return (x + self.mlp(self.norm(x)))[:, 0]


class DistilledHeads(nn.Module):
    """Classifiers of the class token and of the distillation token, whose logits are averaged (DeiT,
    arXiv:2012.12877)."""

    def __init__(self, width: int, classes: int, bias: bool = True) -> None:
        super().__init__()
        self.label, self.teacher = nn.Linear(width, classes, bias), nn.Linear(width, classes, bias)

    def forward(self, pooled: Tensor) -> Tensor:
        """Compute logits of the concatenated class and distillation tokens: (B, 2 D) -> (B, K)."""
        label, teacher = pooled.chunk(2, -1)
        return (self.label(label) + self.teacher(teacher)) / 2


class Neck(nn.Module):
    """Layers after the last block that reduce the channels of a grid: 1 x 1 convolution, LayerNorm, 3 x 3 convolution,
    LayerNorm (ViTDet, arXiv:2203.16527; SAM's image encoder)."""

    def __init__(self, width: int, output_width: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.reduce, self.norm1 = nn.Linear(width, output_width, bias=False), nn.LayerNorm(output_width, eps=eps)
        self.mix, self.norm2 = (
            nn.Conv2d(output_width, output_width, 3, padding=1, bias=False),
            nn.LayerNorm(output_width, eps=eps),
        )

    def forward(self, x: Tensor) -> Tensor:
        """Reduce the channels of a grid of tokens: (B, h, w, D) -> (B, h, w, output_width)."""
        x = self.norm1(self.reduce(x)).to(self.mix.weight.dtype)
        return self.norm2(self.mix(x.movedim(-1, 1)).movedim(1, -1))
