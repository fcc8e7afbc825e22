"""Families that change one component of the ViT: Axial-ViT and hybrids (arXiv:2010.11929), and the image encoders of
CLIP (arXiv:2103.00020) and SAM (arXiv:2304.02643)."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from vitreous.models.configs.hybrid import ConvStemConfig, HybridConfig
from vitreous.models.configs.vit_variants import SAMConfig
from vitreous.models.vit import ViT
from vitreous.nn.block import Block
from vitreous.nn.convstem import ConvStem
from vitreous.nn.grid import patchify
from vitreous.nn.layout import AxialBlock, WindowedAttention
from vitreous.nn.pool import Neck
from vitreous.nn.relative import GridAttention
from vitreous.nn.resnet import ResNetStem
from vitreous.nn.windows import ConvPropagation


class AxialViT(ViT):
    """ViT whose blocks attend along the rows of the grid, then along its columns."""

    def build_block(self, index: int, drop_path: float) -> AxialBlock:
        """Build a block along rows and a block along columns."""
        return AxialBlock(self.plain_block(index, drop_path), self.plain_block(index, drop_path))


class CLIP(ViT):
    """CLIP's image encoder: a ViT with a LayerNorm before the first block."""

    def build_first_norm(self) -> nn.Module:
        """Build the LayerNorm of prefix and patch tokens."""
        return nn.LayerNorm(self.config.width, eps=self.config.norm.eps)


class SAM(ViT):
    """SAM's image encoder: a ViT with decomposed relative positions, windows in most blocks, and optionally a neck."""

    config: SAMConfig

    def build_attention(self, index: int) -> nn.Module:
        """Build the attention of the block at `index`, over the whole grid or within windows."""
        c = self.config
        if index not in c.windowed_blocks:
            return GridAttention(c.width, c.heads, (c.grid[0], c.grid[1]), c.attention.qkv_bias)
        size = (c.attention.window, c.attention.window)
        return WindowedAttention(GridAttention(c.width, c.heads, size, c.attention.qkv_bias), size, pad="zeros")

    def plain_block(self, index: int, drop_path: float) -> Block:
        """Build a block, in some blocks with convolutions after it that propagate information between windows."""
        block = super().plain_block(index, drop_path)
        block.after = ConvPropagation(self.config.width) if index in self.config.conv_blocks else None
        return block

    def build_neck(self) -> Neck | None:
        """Build the convolutions after the encoder; None without a neck."""
        c = self.config
        return Neck(c.width, c.neck, c.norm.eps) if c.neck else None


class Hybrid(ViT):
    """ViT whose patches are cut from the map of a convolutional stem or ResNet instead of the image."""

    config: HybridConfig

    def build_stem(self) -> ConvStem | ResNetStem:
        """Build the stem: (B, C, H, W) -> (B, *map, channels)."""
        stem, channels = self.config.stem, self.config.channels
        if isinstance(stem, ConvStemConfig):
            return ConvStem(stem.widths, stem.blocks, channels)
        return ResNetStem(stem.blocks, stem.width, channels, stem.numerics)

    def features_at(self, images: Tensor, strides: Sequence[int]) -> list[Tensor]:
        """Compute the maps of these strides, in pixels: (B, C, *image) -> (B, h, w, D) per stride.

        The maps are those of the stem's stages, and the patch tokens after the last block, before the last norm;
        `config.levels` lists them. Blocks are computed only if their tokens are requested. Raises ValueError if no map
        has a stride.
        """
        self.config.check_strides(strides)
        self.check_images(images)
        assert self.stem is not None
        stages = self.stem.maps(images.to(next(self.stem.parameters()).dtype))
        maps = dict(zip((level.stride for level in self.config.stem.levels), stages, strict=True))
        if self.config.patch[0] in strides:
            tokens = self.projection(patchify(stages[-1].movedim(-1, 1), self.cell))
            maps[self.config.patch[0]] = self.last_map(tokens)
        return [maps[stride] for stride in strides]
