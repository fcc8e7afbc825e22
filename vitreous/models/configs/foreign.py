"""An encoder of another library, described in the words of a ViT."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from vitreous.nn.sizes import grid_of


@dataclass(frozen=True)
class ForeignConfig:
    """What objectives, heads and engines ask of a model, of one that another library computes.

    `image` and `patch` in pixels per axis, `width` of a token, `prefix` tokens before those of the patches. It says of
    everything that needs the blocks of a ViT that it cannot be done.
    """

    has_attention: ClassVar[bool] = False
    drops_patches: ClassVar[bool] = False
    merges_tokens: ClassVar[bool] = False
    packs_sizes: ClassVar[bool] = False
    sees_whole_image: ClassVar[bool] = False
    needs_positions: ClassVar[bool] = False
    kind: ClassVar[str] = "foreign"
    front: ClassVar[str] = "conv"  # images stay float32

    name: str
    image: tuple[int, ...]
    patch: tuple[int, ...]
    width: int
    prefix: int = 0
    channels: int = 3
    classes: int = 0
    family: Literal["foreign"] = "foreign"

    @property
    def grid(self) -> tuple[int, ...]:
        """Patches per axis."""
        return grid_of(self.image, self.patch)
