"""Diffusion Transformer (arXiv:2212.09748): a ViT that outputs an image, conditioned on a diffusion time and a class.

    images (B, C, *image) -> project (B, *grid, D) -> add_positions (B, N, D) -> encode (B, N, C' prod(patch))
        -> unpatchify (B, C', *image)

Shapes: B batch, C input channels, C' output channels, N tokens, D width, K classes; image and grid are one length per
axis. For clips, T time slots and S tokens of a slot.

The condition (B, D) is computed from the sum of the embeddings of time and class. The model draws no random numbers:
the objective drops classes in training.
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
    """Diffusion Transformer of adaLN-Zero blocks, initialised as in the paper's code.

    Linear layers are Xavier uniform with bias 0; the time embedding's layers and the class embeddings are N(0, 0.02^2).
    The layers applied to the condition and the last layer are 0, so a new model outputs 0, and each of its blocks is
    the identity.

    The last class embedding, with index K, means no class (classifier-free guidance, arXiv:2207.12598). Positions are
    fixed sines and cosines for the input's grid. For clips, `alternating` blocks attend alternately to the tokens of a
    time slot and to the tokens of the same position in all slots (Latte, arXiv:2401.03048, variant 1).
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
        """Build the block at `index`; with the arrangement `alternating`, blocks with an odd index attend over time."""
        c = self.config
        block_class = AdaLNTemporalBlock if c.arrangement == "alternating" and index % 2 else AdaLNBlock
        attention = (QKNormAttention if c.qk_norm else Attention)(c.width, c.heads)
        mlp = Mlp(c.width, c.hidden, gelu="tanh")
        for linear in (mlp.fc1, mlp.fc2):
            nn.init.zeros_(linear.bias)
        return block_class(c.width, attention, mlp, c.eps)

    def forward(self, images: Tensor, time: Tensor, labels: Tensor | None = None) -> Tensor:
        """Predict an image for each noisy image: images (B, C, *image), time (B,) float, labels (B,) int64 ->
        (B, C', *image).

        If `labels` is None, images have no class. Raises ValueError for a wrong number of channels, and for labels if
        the model has no classes.
        """
        tokens = self.project(images)
        grid = tuple(tokens.shape[1:-1])
        x = self.encode(self.add_positions(tokens), self.condition(time, labels), grid)
        return unpatchify(torch.unflatten(x, 1, grid), self.config.patch)

    def first_layer(self) -> nn.Module:
        """Return the patch projection, whose input is the image."""
        return self.projection

    def blocks(self) -> list[nn.Module]:
        """Return the residual blocks in order."""
        return list(self.encoder.blocks)

    def project(self, images: Tensor) -> Tensor:
        """Project the patches linearly to tokens: (B, C, *image) -> (B, *grid, D)."""
        self.check_images(images)
        return self.projection(patchify(images, self.config.patch))

    def add_positions(self, tokens: Tensor) -> Tensor:
        """Add the positions of the grid and flatten: (B, *grid, D) -> (B, N, D)."""
        table = get_device_table(sincos_position_table, tokens.device, tuple(tokens.shape[1:-1]), self.config.width)
        return (tokens + (table.to(tokens.dtype) if self.training else table)).flatten(1, -2)

    def condition(self, time: Tensor, labels: Tensor | None = None) -> Tensor:
        """Compute the condition of every block, the SiLU of time embedding plus class embedding: time (B,), labels (B,)
        int64 -> (B, D).

        Label K means no class. Raises ValueError for labels if the model has no classes.
        """
        embedded = self.time(time)
        if self.classes is None:
            if labels is not None:
                raise ValueError("labels were passed, but the model has no classes: leave them out")
            return F.silu(embedded)
        labels = torch.full_like(time, self.config.classes, dtype=torch.int64) if labels is None else labels
        return F.silu(embedded + self.classes(labels).to(embedded.dtype))

    def encode(self, tokens: Tensor, condition: Tensor, grid: tuple[int, ...] | None = None) -> Tensor:
        """Run the blocks and the last layer: tokens (B, N, D), condition (B, D) -> (B, N, C' prod(patch)). `grid` is
        the tokens' grid, by default the native grid."""
        x = self.encoder(self.split_time_slots(tokens, grid or self.config.grid), condition)
        return self.last(x.flatten(1, -2), condition)

    def split_time_slots(self, tokens: Tensor, grid: tuple[int, ...]) -> Tensor:
        """Return the blocks' input for tokens (B, N, D): (B, T, S, D) if blocks alternate, else unchanged."""
        return torch.unflatten(tokens, 1, (grid[0], -1)) if self.config.arrangement == "alternating" else tokens

    def features_after(
        self, images: Tensor, depths: Sequence[int], time: Tensor, labels: Tensor | None = None
    ) -> list[Tensor]:
        """Compute every token after t blocks, for each depth t: images (B, C, *image), time (B,), labels (B,) int64 ->
        list of (B, N, D).

        Raises ValueError for a depth that is not in 0 .. number of blocks.
        """
        tokens = self.project(images)
        x = self.split_time_slots(self.add_positions(tokens), tuple(tokens.shape[1:-1]))
        outputs = self.encoder.features(x, depths, self.condition(time, labels))
        return [output.flatten(1, -2) for output in outputs]
