"""Configs of families that change one component of the ViT: Axial-ViT (arXiv:2010.11929), and the image encoders of
CLIP (arXiv:2103.00020) and SAM (arXiv:2304.02643)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, Literal

from vitreous.errors import UsageError
from vitreous.models.configs.base import ImageSize, LayerGroups
from vitreous.models.configs.groups import AttentionConfig, check_groups
from vitreous.models.configs.vit import ViTConfig, change_config, parse_plain_vit
from vitreous.models.presets import NO_TOKENS, VIT_VARIANTS


@dataclass(frozen=True)
class AxialConfig(ViTConfig):
    """A ViT whose blocks attend along the rows of the grid, then along its columns.

    Raises UsageError for prefix tokens, for a number of axes other than two, and for any kind of attention except
    plain.
    """

    family: Literal["axial"] = "axial"
    module: ClassVar[str] = "vitreous.models.vit_variants:AxialViT"
    preset_names: ClassVar[tuple[str, ...]] = tuple(f"Axial-ViT-{name}" for name in VIT_VARIANTS["Axial-ViT"])
    axial = True
    on_grid: ClassVar[bool] = True
    sees_whole_image: ClassVar[bool] = False  # a block attends along rows, then columns

    @classmethod
    def parse_name(cls, name: str, image: ImageSize) -> ViTConfig | None:
        """Return the config of a name such as `Axial-ViT-B/16`; None for names of other families."""
        plain_name = name.lower().removeprefix("axial-vit-")
        if plain_name == name.lower():
            return None
        return change_config(parse_plain_vit(name[-len(plain_name) :]), NO_TOKENS | {"axial": True}, image)

    def name(self) -> str:
        """Return the model name, such as `Axial-ViT-B/16`."""
        return f"Axial-ViT-{self.size_name()}"

    @property
    def mlp_layers(self) -> int:
        """Return the number of MLPs of all blocks: one for rows and one for columns in each block."""
        return 2 * self.depth

    def attention_macs(self, grid: tuple[int, ...], index: int) -> int:
        """Count the multiply-adds of the attention of a block along rows and along columns."""
        tokens = math.prod(grid)
        return 2 * tokens * 4 * self.width**2 + 2 * tokens * sum(grid) * self.width

    def __post_init__(self) -> None:
        check_groups(self)
        if self.attention.kind != "plain":
            raise UsageError(
                f"axial=True does not support attention.kind={self.attention.kind}", "use attention.kind=plain"
            )
        super().__post_init__()


@dataclass(frozen=True)
class CLIPConfig(ViTConfig):
    """CLIP's image encoder: a ViT with a LayerNorm before the first block. Perception Encoders (arXiv:2504.13181) add
    rotary positions."""

    family: Literal["clip"] = "clip"
    module: ClassVar[str] = "vitreous.models.vit_variants:CLIP"
    preset_names: ClassVar[tuple[str, ...]] = tuple(
        f"{prefix}-{name}" for prefix in ("CLIP", "PE-Core", "PE-Spatial") for name in VIT_VARIANTS[prefix]
    )
    first_norm = True

    @classmethod
    def parse_name(cls, name: str, image: ImageSize) -> ViTConfig | None:
        """Return None, because `ViTConfig` parses the names of `VIT_VARIANTS`."""
        return None


@dataclass(frozen=True)
class SAMConfig(ViTConfig):
    """A ViT on a grid with decomposed relative positions and windows in most blocks; SAM's also has a convolutional
    neck.

    Windows are padded with zeros, to which tokens attend. Information crosses windows in the `global_blocks`, or in a
    convolutional bottleneck after each of the `conv_blocks` (ViTDet's two propagation strategies, section 3). Positions
    are a table of `position_grid` positions; for ViTDet this is the grid of pre-training. Raises UsageError for prefix
    tokens, for a number of axes other than two, and for invalid block indices.
    """

    family: Literal["sam"] = "sam"
    module: ClassVar[str] = "vitreous.models.vit_variants:SAM"
    preset_names: ClassVar[tuple[str, ...]] = tuple(
        f"{prefix}-{name}" for prefix in ("SAM", "ViTDet") for name in VIT_VARIANTS[prefix]
    )
    # convolutions `after` a block propagate between windows; as in detectron2, they have no layer decay
    layer_groups: ClassVar[LayerGroups] = LayerGroups(r"\bencoder\.blocks\.(\d+)\.(?!after\.)")
    on_grid: ClassVar[bool] = True
    attention: AttentionConfig = AttentionConfig(kind="decomposed")
    neck: int = 0  # channels of the convolutions after the last block; 0: none
    conv_blocks: tuple[int, ...] = ()  # indices of the blocks, from 0
    position_grid: tuple[int, ...] = ()  # rows and columns of the position table; (): those of the native grid

    @classmethod
    def parse_name(cls, name: str, image: ImageSize) -> ViTConfig | None:
        """Return None, because `ViTConfig` parses the names of `VIT_VARIANTS`."""
        return None

    def check_attention(self) -> None:
        """Raise UsageError for any kind of attention except SAM's."""
        if self.attention.kind != "decomposed":
            raise UsageError("neck, conv_blocks and position_grid require attention.kind=decomposed", "leave them out")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.neck < 0:
            raise UsageError(f"neck must be at least 0, got {self.neck}")
        if not set(self.conv_blocks) <= set(range(self.depth)):
            raise UsageError(
                f"conv_blocks={self.conv_blocks} are out of range", f"use blocks from 0 to {self.depth - 1}"
            )
        if self.position_grid and (len(self.position_grid) != 2 or min(self.position_grid) < 1):
            raise UsageError(
                f"position_grid must have two axes of at least 1 position, got {self.position_grid}",
                "set rows and columns, for example 14 14",
            )

    @property
    def table_grid(self) -> tuple[int, ...]:
        """Return the positions along each axis of the position table, which is resized to the input's grid."""
        return self.position_grid or self.grid

    @property
    def sees_whole_image(self) -> bool:
        """Return whether no block attends within windows."""
        return not self.windowed_blocks

    @property
    def width_out(self) -> int:
        """Return the channels of a token after the neck."""
        return self.neck or self.width

    def attention_macs(self, grid: tuple[int, ...], index: int) -> int:
        """Count the multiply-adds of a block's attention and its decomposed positions, over the grid or within
        windows."""
        width = self.width
        if index in self.windowed_blocks:
            size = self.attention.window
            window_tokens, tokens = size**2, math.prod(math.ceil(length / size) * size for length in grid)
            return tokens * (4 * width**2 + 2 * window_tokens * width + 2 * size * width)
        tokens = math.prod(grid)
        return tokens * (4 * width**2 + 2 * tokens * width + sum(grid) * width)

    def extra_macs(self, grid: tuple[int, ...]) -> int:
        """Count the multiply-adds of the neck and of the convolutions after blocks."""
        patches, half = math.prod(grid), self.width // 2
        neck = patches * (self.width * self.neck + 9 * self.neck**2)
        return neck + len(self.conv_blocks) * patches * (2 * self.width * half + 9 * half**2)
