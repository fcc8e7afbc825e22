"""Text encoder: the Transformer of CLIP (arXiv:2103.00020, section 2.4) and of SigLIP (arXiv:2303.15343).

    tokens (B, N) -> embed_tokens (B, N, D) -> encode (B, N, D) -> pool (B, D) -> project (B, E)

Shapes: B texts, N tokens of a text, D width, E channels of the embedding.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from vitreous.models.configs.text import TextConfig
from vitreous.nn.attention import Attention
from vitreous.nn.block import Block, Mlp
from vitreous.nn.encoder import Encoder, build_blocks


class TextEncoder(nn.Module):
    """Transformer over token ids, with learned positions and pre-norm blocks.

    Token embeddings are drawn from N(0, 0.02^2) and positions from N(0, 0.01^2), as in CLIP; the projection from
    N(0, 1 / D), blocks as those of a ViT.
    """

    def __init__(self, config: TextConfig) -> None:
        super().__init__()
        self.config = c = config
        self.embedding = nn.Embedding(c.vocabulary, c.width)
        self.positions = nn.Parameter(torch.empty(c.length, c.width).normal_(std=0.01))
        blocks = build_blocks(c.depth, self.build_block)
        self.encoder = Encoder(c.width, blocks, c.eps)
        self.projection = nn.Linear(c.width, c.embedding, c.projection_bias) if c.projection else nn.Identity()
        nn.init.normal_(self.embedding.weight, std=0.02)
        if isinstance(self.projection, nn.Linear):
            nn.init.normal_(self.projection.weight, std=c.width**-0.5)
            if c.projection_bias:
                nn.init.zeros_(self.projection.bias)

    def build_block(self, index: int, drop_path: float) -> Block:
        """Build the block at `index`; `drop_path` is its stochastic depth rate."""
        c = self.config
        return Block(
            c.width,
            Attention(c.width, c.heads),
            mlp=Mlp(c.width, c.hidden, gelu=c.gelu),
            drop_path=drop_path,
            eps=c.eps,
        )

    def forward(self, tokens: Tensor) -> Tensor:
        """Compute embeddings, which are not normalised: (B, N) int64 -> (B, E). Raises ValueError for tokens of another
        shape or too many tokens."""
        return self.projection(self.pool(self.encode(tokens), tokens))

    def encode(self, tokens: Tensor) -> Tensor:
        """Encode every token, up to the last norm: (B, N) int64 -> (B, N, D). Raises the errors of `forward`."""
        c = self.config
        if tokens.ndim != 2 or tokens.is_floating_point():
            raise ValueError(f"expected token ids (B, N) int64, got {tuple(tokens.shape)} {tokens.dtype}")
        count = tokens.shape[1]
        if count > c.length or (c.pool == "last" and count != c.length):
            bound = "exactly" if c.pool == "last" else "at most"
            raise ValueError(f"expected {bound} {c.length} tokens per text, got {count}")
        x = self.embedding(tokens) + self.positions[:count]
        if not c.causal:
            return self.encoder(x)
        mask = torch.ones(count, count, dtype=torch.bool, device=tokens.device).tril()
        return self.encoder(x, mask[None])

    def pool(self, x: Tensor, tokens: Tensor) -> Tensor:
        """Select or average the encoded tokens that represent a text: x (B, N, D), tokens (B, N) int64 -> (B, D)."""
        if self.config.pool == "last":
            return x[:, -1]
        if self.config.pool == "end":
            return x[torch.arange(len(x), device=x.device), tokens.argmax(1)]
        is_text = (tokens != self.config.pad_id)[..., None].to(x.dtype)
        return (x * is_text).sum(1) / is_text.sum(1).clamp(min=1)
