"""Hybrids: a ViT on the map of a ResNet (arXiv:2010.11929, 3.1) or of convolutions (arXiv:2106.14881)."""

from __future__ import annotations

from vitreous.models.configs.hybrid import ConvStemConfig, HybridConfig
from vitreous.models.vit import ViT
from vitreous.nn.convstem import ConvStem
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
