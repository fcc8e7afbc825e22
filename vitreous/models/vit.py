"""The Vision Transformer, "An Image is Worth 16x16 Words" (arXiv:2010.11929).

B batch, C channels, N patch tokens, P prefix tokens, D width; image and grid are one length per axis.

    images (B, C, *image) -> project (B, *grid, D) -> place (B, N, D) -> encode (B, P + N, D) -> pool (B, D) -> logits
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitreous.models.config import ViTConfig, check_image
from vitreous.nn.block import Block
from vitreous.nn.encoder import Encoder, stack
from vitreous.nn.grid import grid_of, patchify
from vitreous.nn.pool import AttentionPool
from vitreous.nn.position import Learned


class ViT(nn.Module):
    """Eqs. 1-4, initialised as Google's code does it:

    | parameter | drawn from |
    |---|---|
    | patch projection | LeCun normal, cut at two deviations; bias 0 |
    | class token, positions, registers | 0; N(0, 0.02^2); N(0, 0.02^2) |
    | q, k, v, attention output, MLP matrices | Xavier uniform, each on its own matrix; biases 0, those of the MLP N(0, 1e-6^2) |
    | representation layer | LeCun normal; bias 0 |
    | head | 0 |
    """

    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        self.config = config
        width, representation = config.width, config.representation or config.width
        self.projection = nn.Linear(config.channels * math.prod(config.patch), width)
        self.position = Learned(config.grid, width, config.resize)
        self.prefix = nn.Parameter(torch.empty(config.prefix, width).normal_(std=0.02)) if config.prefix else None
        if self.prefix is not None and config.class_token:
            nn.init.zeros_(self.prefix.data[0])
        has_position = config.class_token and config.class_position
        self.class_position = nn.Parameter(torch.empty(1, width).normal_(std=0.02)) if has_position else None
        self.encoder = Encoder(width, stack(config.depth, self.block, config.drop_path), config.eps, config.norm == "tokens")
        self.pooling = AttentionPool(width, config.heads, config.hidden, config.eps, config.gelu) if config.pool == "attention" else None
        self.pooled_norm = nn.LayerNorm(width, eps=config.eps) if config.norm == "pooled" else nn.Identity()
        self.representation = nn.Linear(width, representation) if config.representation else None
        self.head = nn.Linear(representation, config.classes) if config.classes else nn.Identity()
        for linear in filter(None, (self.projection, self.representation)):
            deviation = linear.in_features**-0.5 / 0.87962566103423978  # what cutting at two deviations takes away
            nn.init.trunc_normal_(linear.weight, std=deviation, a=-2 * deviation, b=2 * deviation)
            nn.init.zeros_(linear.bias)
        for parameter in self.head.parameters():
            nn.init.zeros_(parameter)

    def block(self, drop_path: float) -> Block:
        """One block of the stack, with its own stochastic depth rate."""
        c = self.config
        return Block(c.width, c.heads, c.hidden, c.dropout, drop_path, c.layer_scale, c.eps, c.gelu, c.qkv_bias)

    def forward(self, images: Tensor) -> Tensor:
        """(B, C, *image) -> (B, classes): logits."""
        return self.classify(self.pool(self.features(images)))

    def features(self, images: Tensor) -> Tensor:
        """(B, C, *image) -> (B, P + N, D): every token after the last norm."""
        return self.encode(self.place(self.project(images)))

    def project(self, images: Tensor) -> Tensor:
        """(B, C, *image) -> (B, *grid, D): linear projection of flattened patches, E in Eq. 1."""
        if images.shape[1] != self.config.channels:
            raise ValueError(f"the model takes {self.config.channels} channels, the images have {images.shape[1]}")
        check_image(self.config, tuple(images.shape[2:]))
        return self.projection(patchify(images, self.config.patch))

    def place(self, tokens: Tensor) -> Tensor:
        """(B, *grid, D) -> (B, N, D): add positions, resized to whatever grid arrives, and flatten."""
        placed = self.position(tokens).flatten(1, -2)
        return F.dropout(placed, self.config.dropout, self.training)

    def encode(self, tokens: Tensor) -> Tensor:
        """(B, N, D) -> (B, P + N, D): prefix tokens in front, blocks, final norm. Any N, in any order."""
        prefix = self.prefix
        if prefix is not None:
            if self.class_position is not None:
                prefix = torch.cat([prefix[:1] + self.class_position, prefix[1:]])
            prefix = F.dropout(prefix.expand(tokens.shape[0], -1, -1), self.config.dropout, self.training)
            tokens = torch.cat([prefix, tokens], dim=1)
        return self.encoder(tokens)

    def pool(self, tokens: Tensor) -> Tensor:
        """(B, P + N, D) -> (B, D): the class token (Eq. 4), the mean of the patch tokens, or attention pooling."""
        if self.pooling is not None:
            pooled = self.pooling(tokens)
        elif self.config.pool == "mean":
            pooled = tokens[:, self.config.prefix :].mean(1)
        else:
            pooled = tokens[:, 0]
        return self.pooled_norm(pooled)

    def classify(self, pooled: Tensor) -> Tensor:
        """(B, D) -> (B, classes): the tanh representation layer where there is one (section 3.2), then the linear head."""
        if self.representation is not None:
            pooled = self.representation(pooled).tanh()
        return self.head(pooled)


def macs(config: ViTConfig, image: tuple[int, ...] | None = None) -> int:
    """Multiply-adds of one forward pass for one image, attention products included, softmax, norms and GELU left out.

    N P^2 C D + L (T (4 D^2 + 2 D M) + 2 T^2 D) + K D with T = P + N tokens. FLOPs are twice this; a training step costs
    three forward passes.
    """
    patches = math.prod(grid_of(image or config.image, config.patch))
    tokens, width = patches + config.prefix, config.width
    block = tokens * (4 * width**2 + 2 * width * config.hidden) + 2 * tokens**2 * width
    pool = tokens * 2 * width**2 + 2 * tokens * width + 2 * width**2 + 2 * width * config.hidden
    head = (config.representation or 0) * width + config.classes * (config.representation or width)
    embed = patches * math.prod(config.patch) * config.channels * width
    return embed + config.depth * block + pool * (config.pool == "attention") + head
