"""Axial-ViT (arXiv:2010.11929, D.6)."""

from __future__ import annotations

from vitreous.models.vit import ViT
from vitreous.nn.layout import Axial


class AxialViT(ViT):
    """A ViT whose blocks attend along rows, then along columns."""

    def block(self, index: int, drop_path: float) -> Axial:
        """A block for the rows and one for the columns."""
        return Axial(self.plain_block(index, drop_path), self.plain_block(index, drop_path))
