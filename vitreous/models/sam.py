"""The image encoder of SAM (arXiv:2304.02643), after ViTDet (arXiv:2203.16527)."""

from __future__ import annotations

from torch import nn

from vitreous.models.configs.sam import SAMConfig
from vitreous.models.vit import ViT
from vitreous.nn.layout import Windows
from vitreous.nn.neck import Neck
from vitreous.nn.relative import GridAttention


class SAM(ViT):
    """A ViT with decomposed relative positions, windows in most blocks, and a neck."""

    config: SAMConfig

    def attention(self, index: int) -> nn.Module:
        """The attention of a block: over the whole grid, or within windows."""
        c = self.config
        if index not in c.windowed_blocks:
            return GridAttention(c.width, c.heads, (c.grid[0], c.grid[1]), c.qkv_bias)
        size = (c.window, c.window)
        return Windows(GridAttention(c.width, c.heads, size, c.qkv_bias), size, pad="zeros")

    def build_neck(self) -> Neck | None:
        """The convolutions after the encoder."""
        c = self.config
        return Neck(c.width, c.neck, c.eps) if c.neck else None
