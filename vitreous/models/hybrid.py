"""Hybrids: a ViT on the map of a ResNet (arXiv:2010.11929, 3.1) or of convolutions (arXiv:2106.14881)."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from vitreous.models.configs.hybrid import ConvStemConfig, HybridConfig
from vitreous.models.vit import ViT
from vitreous.nn.convstem import ConvStem
from vitreous.nn.grid import patchify
from vitreous.nn.resnet import Stem


class Hybrid(ViT):
    """A ViT whose tokens are cut from the map of its stem."""

    config: HybridConfig

    def build_stem(self) -> ConvStem | Stem:
        """The convolutions: (B, C, H, W) -> (B, *map, channels)."""
        stem, channels = self.config.stem, self.config.channels
        if isinstance(stem, ConvStemConfig):
            return ConvStem(stem.widths, stem.blocks, channels)
        return Stem(stem.blocks, stem.width, channels, stem.numerics)

    def features_at(self, images: Tensor, strides: Sequence[int]) -> list[Tensor]:
        """(B, C, *image) -> for each stride, in pixels, (B, h, w, D): the maps of the stem's stages, and the patch
        tokens after the last block, before any last norm; `config.levels` has them all.

        Blocks are not computed where the tokens are not asked for. Raises ValueError for a stride of no map.
        """
        self.config.check_strides(strides)
        self.check_images(images)
        stages = self.stem.maps(images.to(next(self.stem.parameters()).dtype))
        maps = dict(zip((level.stride for level in self.config.stem.levels), stages, strict=True))
        if self.config.patch[0] in strides:
            tokens = self.projection(patchify(stages[-1].movedim(-1, 1), self.cell))
            maps[self.config.patch[0]] = self.last_map(tokens)
        return [maps[stride] for stride in strides]
