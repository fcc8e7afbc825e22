"""The image encoder of SAM (arXiv:2304.02643), and the backbone of ViTDet (arXiv:2203.16527) that it is."""

from __future__ import annotations

from torch import nn

from vitreous.models.configs.sam import SAMConfig
from vitreous.models.vit import ViT
from vitreous.nn.block import Block
from vitreous.nn.layout import Windows
from vitreous.nn.neck import Neck
from vitreous.nn.propagation import ConvPropagation
from vitreous.nn.relative import GridAttention


class SAM(ViT):
    """A ViT with decomposed relative positions, windows in most blocks, and a neck or none."""

    config: SAMConfig

    def attention(self, index: int) -> nn.Module:
        """The attention of a block: over the whole grid, or within windows."""
        c = self.config
        if index not in c.windowed_blocks:
            return GridAttention(c.width, c.heads, (c.grid[0], c.grid[1]), c.qkv_bias)
        size = (c.window, c.window)
        return Windows(GridAttention(c.width, c.heads, size, c.qkv_bias), size, pad="zeros")

    def plain_block(self, index: int, drop_path: float) -> Block:
        """Attention, MLP, and in some blocks the convolutions by which information crosses windows."""
        block = super().plain_block(index, drop_path)
        block.after = ConvPropagation(self.config.width) if index in self.config.conv_blocks else None
        return block

    def build_neck(self) -> Neck | None:
        """The convolutions after the encoder."""
        c = self.config
        return Neck(c.width, c.neck, c.eps) if c.neck else None
