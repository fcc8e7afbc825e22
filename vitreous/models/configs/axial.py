"""Axial-ViT (arXiv:2010.11929, D.6): blocks along rows, then along columns."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from vitreous.errors import UsageError
from vitreous.models.configs.vit import ViTConfig


@dataclass(frozen=True)
class AxialConfig(ViTConfig):
    """A ViT whose blocks attend along the rows of the grid, then along its columns. Raises UsageError for prefix
    tokens, other than two axes, and another attention than the plain one."""

    family: Literal["axial"] = "axial"  # pyright: ignore[reportIncompatibleVariableOverride]
    axial = True

    def __post_init__(self) -> None:
        if self.attention != "plain":
            raise UsageError("axial goes with attention=plain")
        super().__post_init__()

    @property
    def on_grid(self) -> bool:
        """The blocks take tokens as a grid."""
        return True

    @property
    def sees_whole_image(self) -> bool:
        """A block sees rows, then columns."""
        return False
