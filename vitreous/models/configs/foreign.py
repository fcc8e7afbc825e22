"""An encoder of another library, described in the words of a ViT."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, Literal

from vitreous.errors import UsageError
from vitreous.models.configs.levels import Level, Leveled
from vitreous.nn.sizes import format_size, nearby

#: how an encoder gives its features: tokens (B, N, D), or maps (B, D, H, W) or (B, H, W, D)
Layout = Literal["tokens", "channels-first", "channels-last"]
#: where a block's number is in the name of its parameter, in timm and transformers: the first that matches
BLOCK = r"^encoder\.module\.(?:\w+\.)*?(?:blocks|layers?|stages)[._]?(\d+)(?:\.|$)"
#: what stands before the blocks, by its name there
ENTRY = tuple(
    f"encoder.module.{name}"
    for name in ("patch_embed", "cls_token", "pos_embed", "reg_token", "norm_pre", "embeddings", "embedder", "stem")
    + ("conv1", "bn1", "conv_stem")
)


@dataclass(frozen=True)
class ForeignConfig(Leveled):
    """What objectives, heads and engines ask of a model, of one that another library computes.

    `image` and `patch` in pixels per axis, `width` of a token, `prefix` tokens before those of the patches. It says of
    everything that needs the blocks of a ViT that it cannot be done. `library` builds the model again, by its name
    there (`timm:NAME`) and `arguments`, in JSON: those of `timm.create_model`, or the whole config of transformers. A
    module of `wrap_backbone` has no library. The other fields are facts of the module: they are read off it, not set.
    Raises UsageError for an image that the patch does not divide, where the module is made for one size.
    """

    has_attention: ClassVar[bool] = False
    drops_patches: ClassVar[bool] = False
    merges_tokens: ClassVar[bool] = False
    packs_sizes: ClassVar[bool] = False
    sees_whole_image: ClassVar[bool] = False
    needs_positions: ClassVar[bool] = False
    on_grid: ClassVar[bool] = False
    kind: ClassVar[Literal["foreign"]] = "foreign"
    front: ClassVar[Literal["conv"]] = "conv"  # images stay float32
    position: ClassVar[Literal["none"]] = "none"  # none that can be looked at
    attention: ClassVar[Literal["none"]] = "none"
    pool: ClassVar[Literal["library"]] = "library"

    name: str
    image: tuple[int, ...]
    patch: tuple[int, ...]
    width: int
    prefix: int = 0
    channels: int = 3
    classes: int = 0
    family: Literal["foreign"] = "foreign"
    library: Literal["", "timm", "transformers"] = ""
    arguments: str = "{}"
    sized_by: str = ""  # the argument that takes the image size; "": images of any size
    layout: Layout = "tokens"
    pooled: int = 0  # channels of what the head reads; 0: `width`
    depth: int = 0  # blocks, or stages
    first_block: int = 0  # the number of the first of them in the names of parameters
    stages: tuple[tuple[int, int], ...] = ()  # pixels to a place, and channels, of each map that dense heads read
    batch_norm: bool = False  # images of a batch see each other in training
    draws: bool = False  # dropout or stochastic depth

    def __post_init__(self) -> None:
        if self.library:
            self.check_image(self.image)

    def check_image(self, image: tuple[int, ...]) -> None:
        """Raise UsageError for an image of other than two axes, and where the patch has to divide it and does not."""
        if len(image) != 2:
            raise UsageError(
                f"{self.name} is for pictures, not for images of {len(image)} axes", "use --model ViT-S/16"
            )
        if self.sized_by and any(side % patch for side, patch in zip(image, self.patch, strict=True)):
            problem = f"image size {format_size(image)} is not divisible by patch size {format_size(self.patch)}"
            problem += f" ({self.name})"
            raise UsageError(problem, f"use --image-size {format_size(nearby(image, self.patch))}")

    @property
    def grid(self) -> tuple[int, ...]:
        """Places per axis of the last map, or patches: a remainder is a place too."""
        return tuple(math.ceil(side / patch) for side, patch in zip(self.image, self.patch, strict=True))

    @property
    def features(self) -> int:
        """Channels of what the head reads."""
        return self.pooled or self.width

    @property
    def width_out(self) -> int:
        """Channels of a token."""
        return self.width

    @property
    def has_stages(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Whether there are maps of several strides, which dense heads then read."""
        return bool(self.stages)

    @property
    def levels(self) -> tuple[Level, ...]:
        """The maps that `features_at` gives: the last of each stage, or the tokens after the last block."""
        return tuple(Level((stride, stride), width) for stride, width in self.stages) or (
            Level(self.patch, self.width),
        )

    @property
    def dropout(self) -> float:
        """Above 0 where the module draws at random in training; `arguments` set how much."""
        return float(self.draws)

    @property
    def drop_path(self) -> float:
        """0: it is counted under `dropout`."""
        return 0.0
