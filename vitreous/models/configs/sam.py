"""The image encoder of SAM (arXiv:2304.02643), after ViTDet (arXiv:2203.16527)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from vitreous.errors import UsageError
from vitreous.models.configs.vit import ViTConfig


@dataclass(frozen=True)
class SAMConfig(ViTConfig):
    """A ViT on a grid with decomposed relative positions, windows in most blocks, and a neck of convolutions. Windows
    are filled up with zeros, which are attended to. Raises
    UsageError for prefix tokens and other than two axes."""

    family: Literal["sam"] = "sam"  # pyright: ignore[reportIncompatibleVariableOverride]
    attention: Literal["decomposed"] = "decomposed"  # pyright: ignore[reportIncompatibleVariableOverride]
    neck: int = 0  # pyright: ignore[reportIncompatibleVariableOverride]  # channels of the convolutions after the last block; 0: none

    def __post_init__(self) -> None:
        if self.attention != "decomposed":
            raise UsageError("a neck goes with attention=decomposed")
        super().__post_init__()
        if self.neck < 0:
            raise UsageError("neck must be at least 0")

    @property
    def on_grid(self) -> bool:
        """The blocks take tokens as a grid."""
        return True

    @property
    def sees_whole_image(self) -> bool:
        """Whether no block is confined to windows."""
        return not self.windowed_blocks

    @property
    def width_out(self) -> int:
        """Channels of a token after the neck."""
        return self.neck or self.width
