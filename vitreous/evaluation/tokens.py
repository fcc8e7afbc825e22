"""Tokens of a frozen model that published linear protocols read: class tokens of the last blocks, the mean of patches.

B images, D width of the model, N numbers that are read of an image.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from vitreous.inference.engine import remove_head
from vitreous.models.zoo import Model


class Reading(NamedTuple):
    """What a head reads: class tokens of the last `blocks` blocks, and with `mean` the mean of the last patch tokens.

    0 `blocks` are what the model's own head reads.
    """

    blocks: int
    mean: bool = False


class TokenReader(nn.Module):
    """A model that returns, for every image, all that some heads read: (B, C, *image) -> (B, N).

    Class tokens come first, from the last block backwards, then the mean of the patch tokens. Tokens of every block go
    through the last norm, as in DINO's and DINOv2's `get_intermediate_layers`.
    """

    def __init__(self, model: Model, readings: tuple[Reading, ...]) -> None:
        super().__init__()
        self.most = max(reading.blocks for reading in readings)
        self.model, self.config = model if self.most else remove_head(model), model.config
        self.mean = any(reading.mean for reading in readings)

    def columns(self, reading: Reading) -> list[int]:
        """The positions of a head's inputs among the N numbers."""
        if not self.most:
            return list(range(self.config.features))
        width = self.config.width
        own = range(reading.blocks * width)
        return [*own, *range(self.most * width, (self.most + 1) * width)] if reading.mean else list(own)

    def forward(self, images: Tensor) -> Tensor:
        """(B, C, *image) -> (B, N)."""
        if not self.most:
            return self.model(images)
        model: Any = self.model
        taps = [self.config.depth - block for block in range(self.most)]
        tokens = [model.pooled_norm(model.encoder.norm(x)) for x in model.features_after(images, taps)]
        parts = [x[:, 0] for x in tokens]
        return torch.cat([*parts, tokens[0][:, self.config.prefix :].mean(1)] if self.mean else parts, 1)
