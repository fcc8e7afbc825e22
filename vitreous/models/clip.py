"""CLIP's image encoder (arXiv:2103.00020)."""

from __future__ import annotations

from torch import nn

from vitreous.models.vit import ViT


class CLIP(ViT):
    """A ViT with a LayerNorm before the first block."""

    def build_first_norm(self) -> nn.Module:
        """The norm of prefix and patch tokens."""
        return nn.LayerNorm(self.config.width, eps=self.config.eps)
