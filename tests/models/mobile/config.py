"""The config of a toy model like MobileViT (arXiv:2110.02178): two convolutions, then Transformer blocks. No PyTorch
import."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import ClassVar, Literal

from vitreous.errors import UsageError
from vitreous.models.configs.base import ImageSize, LayerGroups, ModelConfig
from vitreous.models.configs.groups import AttentionConfig


@dataclass(frozen=True)
class MobileConfig(ModelConfig):
    """Two convolutions of stride 2, `depth` Transformer blocks, and mean pooling. Raises UsageError for a width that is
    not a multiple of the heads."""

    family: Literal["mobile"] = "mobile"
    image: tuple[int, int] = (32, 32)
    channels: int = 3
    classes: int = 10  # 0: no head
    width: int = 32
    depth: int = 2
    heads: int = 2

    module: ClassVar[str] = "tests.models.mobile.module:Mobile"
    layer_groups: ClassVar[LayerGroups] = LayerGroups(entry=("stem",))
    patch: ClassVar[tuple[int, int]] = (4, 4)
    attention: ClassVar[AttentionConfig] = AttentionConfig()
    has_attention: ClassVar[bool] = True
    sees_whole_image: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.width % self.heads:
            raise UsageError(f"width {self.width} is not a multiple of {self.heads} heads", "change heads or width")

    @classmethod
    def parse_name(cls, name: str, image: ImageSize) -> MobileConfig | None:
        """`Mobile-32x2`: a width of 32 and two blocks."""
        match = re.fullmatch(r"mobile-(\d+)x(\d+)", name, re.IGNORECASE)
        if match is None:
            return None
        height, width = image or (32, 32)
        return cls(image=(height, width), width=int(match[1]), depth=int(match[2]))

    def name(self) -> str:
        """`Mobile-32x2`."""
        return f"Mobile-{self.width}x{self.depth}"
