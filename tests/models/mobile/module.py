"""The toy family's module.

images (B, C, H, W) -> stem (B, D, H / 4, W / 4) -> blocks (B, N, D) -> mean (B, D) -> logits
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from tests.models.mobile.config import MobileConfig
from vitreous.models.base import VisionModel, linear_head
from vitreous.nn.attention import Attention
from vitreous.nn.block import Block, Mlp
from vitreous.nn.encoder import Encoder


class Mobile(VisionModel[MobileConfig]):
    """Convolutions, blocks, mean, head."""

    def __init__(self, config: MobileConfig) -> None:
        super().__init__()
        self.config, self.any_size = config, True
        width = config.width
        self.stem = nn.Sequential(
            nn.Conv2d(config.channels, width, 3, 2, 1), nn.GELU(), nn.Conv2d(width, width, 3, 2, 1)
        )
        blocks = [Block(width, Attention(width, config.heads), Mlp(width, 2 * width)) for _ in range(config.depth)]
        self.encoder = Encoder(width, blocks)
        self.head = self.build_head()

    def build_head(self) -> nn.Module:
        return linear_head(self.config.width, self.config.classes)

    def project(self, images: Tensor) -> Tensor:
        """(B, C, H, W) -> (B, h, w, D)."""
        self.check_images(images)
        return self.stem(images.to(self.stem[0].weight.dtype)).movedim(1, -1)

    def features(self, images: Tensor) -> Tensor:
        return self.encoder(self.project(images).flatten(1, 2))

    def features_at(self, images: Tensor, strides: Sequence[int]) -> list[Tensor]:
        self.config.check_strides(strides)
        tokens = self.project(images)
        return [self.encoder.run_blocks(tokens.flatten(1, 2)).view(tokens.shape)] * len(strides)

    def last_norm(self, tokens: Tensor) -> Tensor:
        return self.encoder.norm(tokens)

    def blocks(self) -> list[nn.Module]:
        return list(self.encoder.blocks)

    def first_layer(self) -> nn.Module:
        return self.stem[0]
