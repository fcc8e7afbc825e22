"""The image encoder of SAM (arXiv:2304.02643), and the backbone of ViTDet (arXiv:2203.16527) that it is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from vitreous.errors import UsageError
from vitreous.models.configs.vit import ViTConfig


@dataclass(frozen=True)
class SAMConfig(ViTConfig):
    """A ViT on a grid with decomposed relative positions, windows in most blocks, and a neck of convolutions in SAM.

    Windows are filled up with zeros, which are attended to. What crosses windows are the `global_blocks`, or a
    bottleneck of convolutions after each of the `conv_blocks` (ViTDet's two propagation strategies, section 3).
    Positions are a table of `position_grid`, that of pre-training in ViTDet. Raises UsageError for prefix tokens, other
    than two axes, and blocks that are not there.
    """

    family: Literal["sam"] = "sam"  # pyright: ignore[reportIncompatibleVariableOverride]
    attention: Literal["decomposed"] = "decomposed"  # pyright: ignore[reportIncompatibleVariableOverride]
    neck: int = 0  # pyright: ignore[reportIncompatibleVariableOverride]  # channels of the convolutions after the last block; 0: none
    conv_blocks: tuple[int, ...] = ()  # pyright: ignore[reportIncompatibleVariableOverride]  # counted from 0
    position_grid: tuple[int, ...] = ()  # pyright: ignore[reportIncompatibleVariableOverride]  # (): the native grid

    def __post_init__(self) -> None:
        if self.attention != "decomposed":
            raise UsageError("a neck, conv_blocks and position_grid go with attention=decomposed")
        super().__post_init__()
        if self.neck < 0:
            raise UsageError("neck must be at least 0")
        if not set(self.conv_blocks) <= set(range(self.depth)):
            raise UsageError(f"conv_blocks={self.conv_blocks} cannot be", f"blocks are from 0 to {self.depth - 1}")
        if self.position_grid and (len(self.position_grid) != 2 or min(self.position_grid) < 1):
            raise UsageError(f"position_grid={self.position_grid} is no grid", "name rows and columns: 14 14")

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
