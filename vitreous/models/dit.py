"""The Diffusion Transformer (arXiv:2212.09748): a ViT that outputs an image, conditioned on a time and a class.

B batch, C channels, N tokens, D width; image and grid are one length per axis.

    images (B, C, *image) -> project (B, *grid, D) -> place (B, N, D) -> encode (B, N, D) -> head (B, C', *image)

The condition (B, D) is the sum of a time's and a class's embedding. The model draws no random numbers: the objective
drops classes in training.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitreous.models.base import VisionModel
from vitreous.models.configs.dit import DiTConfig
from vitreous.nn.attention import Attention, QKNormAttention
from vitreous.nn.block import Mlp
from vitreous.nn.condition import AdaLNBlock, AdaLNHead, AdaLNTemporalBlock, TimeEmbedding
from vitreous.nn.encoder import Encoder, build_blocks
from vitreous.nn.grid import patchify, unpatchify
from vitreous.nn.position import sincos_position_table
from vitreous.system.machine import get_device_table


class DiT(VisionModel[DiTConfig]):
    """A Transformer of adaLN-Zero blocks, initialised as in the paper's code.

    Linear layers are Xavier uniform with bias 0; the layers of the time and the table of classes are N(0, 0.02^2). The
    layers on the condition and the last layer are 0, so a fresh model outputs 0, and each of its blocks is the
    identity.

    Entry `classes` of the table of classes means no class (classifier-free guidance, arXiv:2207.12598). Positions are
    fixed sines and cosines for the input's grid. For clips, `alternating` blocks attend alternately to the tokens of a
    time slot and of a position (Latte, arXiv:2401.03048, variant 1).
    """

    def __init__(self, config: DiTConfig) -> None:
        super().__init__()
        self.config = c = config
        self.projection = nn.Linear(c.channels * math.prod(c.patch), c.width)
        self.time = TimeEmbedding(c.width, shift=c.time_shift)
        self.classes = nn.Embedding(c.classes + 1, c.width) if c.classes else None
        self.encoder = Encoder(c.width, build_blocks(c.depth, lambda index, rate: self.build_block(index)), norm=False)
        self.last = AdaLNHead(c.width, c.out_channels * math.prod(c.patch), c.eps)
        nn.init.xavier_uniform_(self.projection.weight)
        nn.init.zeros_(self.projection.bias)
        if self.classes is not None:
            nn.init.normal_(self.classes.weight, std=0.02)

    def build_block(self, index: int) -> AdaLNBlock:
        """Build one block of the stack: over time if blocks alternate and the index is odd."""
        c = self.config
        block_class = AdaLNTemporalBlock if c.arrangement == "alternating" and index % 2 else AdaLNBlock
        attention = (QKNormAttention if c.qk_norm else Attention)(c.width, c.heads)
        mlp = Mlp(c.width, c.hidden, gelu="tanh")
        for linear in (mlp.fc1, mlp.fc2):
            nn.init.zeros_(linear.bias)
        return block_class(c.width, attention, mlp, c.eps)

    def forward(self, images: Tensor, time: Tensor, labels: Tensor | None = None) -> Tensor:
        """(B, C, *image), (B,) float, (B,) int64 -> (B, C', *image) in the images' size.

        Without `labels`, images have no class. Raises ValueError for a wrong number of channels, and for labels if the
        model has no classes.
        """
        tokens = self.project(images)
        grid = tuple(tokens.shape[1:-1])
        x = self.encode(self.add_positions(tokens), self.condition(time, labels), grid)
        return unpatchify(torch.unflatten(x, 1, grid), self.config.patch)

    def first_layer(self) -> nn.Module:
        """The layer that is applied to the image."""
        return self.projection

    def blocks(self) -> list[nn.Module]:
        """The residual blocks in order."""
        return list(self.encoder.blocks)

    def project(self, images: Tensor) -> Tensor:
        """(B, C, *image) -> (B, *grid, D): a linear projection of patches."""
        self.check_images(images)
        return self.projection(patchify(images, self.config.patch))

    def add_positions(self, tokens: Tensor) -> Tensor:
        """(B, *grid, D) -> (B, N, D): add positions of the grid, and flatten."""
        table = get_device_table(sincos_position_table, tokens.device, tuple(tokens.shape[1:-1]), self.config.width)
        return (tokens + (table.to(tokens.dtype) if self.training else table)).flatten(1, -2)

    def condition(self, time: Tensor, labels: Tensor | None = None) -> Tensor:
        """(B,), (B,) int64 -> (B, D): SiLU of the sum of both embeddings, the condition of every block. Label K means
        no class."""
        embedded = self.time(time)
        if self.classes is None:
            if labels is not None:
                raise ValueError("the model has no classes, but labels were passed")
            return F.silu(embedded)
        labels = torch.full_like(time, self.config.classes, dtype=torch.int64) if labels is None else labels
        return F.silu(embedded + self.classes(labels).to(embedded.dtype))

    def encode(self, tokens: Tensor, condition: Tensor, grid: tuple[int, ...] | None = None) -> Tensor:
        """(B, N, D), (B, D) -> (B, N, patch x C'): the blocks, on tokens of this grid or of the native one, and the
        last layer."""
        x = self.encoder(self.split_time_slots(tokens, grid or self.config.grid), condition)
        return self.last(x.flatten(1, -2), condition)

    def split_time_slots(self, tokens: Tensor, grid: tuple[int, ...]) -> Tensor:
        """(B, N, D) -> the blocks' input: unchanged, or (B, T, S, D) if blocks alternate."""
        return torch.unflatten(tokens, 1, (grid[0], -1)) if self.config.arrangement == "alternating" else tokens

    def features_after(
        self, images: Tensor, depths: Sequence[int], time: Tensor, labels: Tensor | None = None
    ) -> list[Tensor]:
        """(B, C, *image), (B,), (B,) int64 -> for each depth t, (B, N, D): every token after t blocks. Raises
        ValueError."""
        tokens = self.project(images)
        x = self.split_time_slots(self.add_positions(tokens), tuple(tokens.shape[1:-1]))
        outputs = self.encoder.features(x, depths, self.condition(time, labels))
        return [output.flatten(1, -2) for output in outputs]
