"""The image encoder of SAM (arXiv:2304.02643), after ViTDet (arXiv:2203.16527)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from vitreous.errors import UsageError
from vitreous.models.configs.vit import ViTConfig


@dataclass(frozen=True)
class SAMConfig(ViTConfig):
    """A ViT on a grid with decomposed relative positions, windows in most blocks, and a neck of convolutions. Raises
    UsageError for prefix tokens and other than two axes."""

    family: Literal["sam"] = "sam"  # pyright: ignore[reportIncompatibleVariableOverride]
    attention: Literal["decomposed"] = "decomposed"  # pyright: ignore[reportIncompatibleVariableOverride]
    window: int = 0  # pyright: ignore[reportIncompatibleVariableOverride]  # tokens along a side of what a block sees; 0: everything
    global_blocks: tuple[int, ...] = ()  # those that see everything all the same, counted from 0
    neck: int = 0  # pyright: ignore[reportIncompatibleVariableOverride]  # channels of the convolutions after the last block; 0: none

    def __post_init__(self) -> None:
        if self.attention != "decomposed":
            raise UsageError("windows and a neck go with attention=decomposed")
        super().__post_init__()
        if min(self.window, self.neck) < 0:
            raise UsageError("window and neck must be at least 0")

    @property
    def on_grid(self) -> bool:
        """The blocks take tokens as a grid."""
        return True

    @property
    def sees_whole_image(self) -> bool:
        """Whether no block is confined to windows."""
        return not self.window or set(range(self.depth)) <= set(self.global_blocks)

    @property
    def width_out(self) -> int:
        """Channels of a token after the neck."""
        return self.neck or self.width
