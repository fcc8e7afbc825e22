"""Swin Transformers: V1 (arXiv:2103.14030) and V2 (arXiv:2111.09883)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, Literal, get_args

from vitreous.errors import UsageError
from vitreous.models.configs.levels import Level, Leveled
from vitreous.models.configs.vit import Resize

# what becomes of the zeros that fill up a grid that windows do not divide: those of nn.layout.Windows
Pad = Literal["mask", "zeros", "zeros-after-shift"]


@dataclass(frozen=True)
class SwinConfig(Leveled):
    """A Swin Transformer by the blocks of its stages: (2, 2, 6, 2) with a width of 96 is Swin-T.

    Each stage after the first merges 2 x 2 tokens and doubles the width. Any image size works: patches, merged tokens
    and windows that an image does not divide into are filled up after its ends. Raises UsageError where a number cannot
    be meant, or where heads do not divide a stage's width.
    """

    family: Literal["swin"] = "swin"
    # 2: cosine attention, a continuous bias of positions, norms after each part
    version: Literal[1, 2] = 1
    image: tuple[int, int] = (224, 224)
    patch_size: tuple[int, int] = (4, 4)  # pixels that a token of the first stage covers
    channels: int = 3
    classes: int = 1000  # 0: no head, the pooled representation is the output
    width: int = 96  # of the first stage
    blocks: tuple[int, ...] = (2, 2, 6, 2)
    heads: tuple[int, ...] = (3, 6, 12, 24)  # of each stage
    window: int = 7  # tokens along a side of what a block sees; at most the native grid of its stage
    # of version 2: the windows of each stage that positions were learned at, 0 or none: the own
    pretrained_window: tuple[int, ...] = ()
    # zeros: padding is attended to, as in detection's forks, transformers and torchvision; zeros-after-shift: timm's
    pad: Pad = "mask"
    mlp_ratio: float = 4.0  # hidden channels of the MLP, for one of the stage
    dropout: float = 0.0
    drop_path: float = 0.0  # of the last block; it rises from 0 in the first over those of all stages
    qkv_bias: bool = True
    gelu: Literal["none", "tanh", "quick"] = "none"
    eps: float = 1e-5
    resize: Resize = "bicubic"  # how the tables of relative positions are read at another window

    kind: ClassVar[Literal["swin"]] = "swin"
    has_stages: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.family != "swin":
            raise UsageError(f"family={self.family} is no Swin", "use family=swin")
        for name in ("image", "patch_size"):
            if len(getattr(self, name)) != 2:
                raise UsageError(f"{name} of a Swin has two axes", f"use {name}=(height, width)")
        if min(*self.image, *self.patch_size, self.channels, self.width, self.window) < 1 or self.classes < 0:
            raise UsageError("image, patch_size, channels, width and window must be at least 1, classes at least 0")
        if not self.blocks or min(self.blocks) < 1 or len(self.heads) != len(self.blocks) or min(self.heads) < 1:
            raise UsageError(
                f"blocks {self.blocks} and heads {self.heads} are no stages",
                "name a number of blocks and of heads, at least 1, for each stage; Swin-T has (2, 2, 6, 2) and "
                "(3, 6, 12, 24)",
            )
        if self.version not in (1, 2):
            raise UsageError(f"version={self.version} is no Swin", "use version=1 or version=2")
        trained = self.pretrained_window
        if trained and (self.version == 1 or len(trained) != len(self.blocks) or min(trained) < 0):
            raise UsageError(
                f"pretrained_window {trained} is not a window for each of {len(self.blocks)} stages of version 2",
                "use (12, 12, 12, 6) for four stages, or leave it out",
            )
        if self.pad not in get_args(Pad):
            raise UsageError(
                f"pad={self.pad} is no way to fill windows", "use pad=mask, pad=zeros or pad=zeros-after-shift"
            )
        for width, heads in zip(self.widths, self.heads, strict=True):
            if width % heads:
                raise UsageError(f"a stage's width {width} is not a multiple of {heads} heads", "change heads or width")
            if int(width * self.mlp_ratio) < 1:
                raise UsageError(f"mlp_ratio {self.mlp_ratio} leaves no hidden channel", "use mlp_ratio=4")

    @property
    def widths(self) -> tuple[int, ...]:
        """Channels of a token in each stage."""
        return tuple(self.width * 2**stage for stage in range(len(self.blocks)))

    @property
    def levels(self) -> tuple[Level, ...]:
        """The maps that `features_at` gives: the tokens of each stage."""
        rows, columns = self.patch_size
        return tuple(Level((rows * 2**stage, columns * 2**stage), width) for stage, width in enumerate(self.widths))

    @property
    def depth(self) -> int:
        """Blocks of all stages."""
        return sum(self.blocks)

    @property
    def patch(self) -> tuple[int, int]:
        """Pixels to a token of the last stage, per axis: (32, 32) for four stages on patches of 4."""
        scale = 2 ** (len(self.blocks) - 1)
        return self.patch_size[0] * scale, self.patch_size[1] * scale

    @property
    def cell(self) -> tuple[int, int]:
        """Pixels that the first layer reads at once, per axis."""
        return self.patch_size

    @property
    def grid(self) -> tuple[int, int]:
        """The grid of the last stage at the native image size."""
        return self.grids(self.image)[-1]

    def grids(self, image: tuple[int, ...]) -> tuple[tuple[int, int], ...]:
        """Tokens per axis in each stage, for an image of this (height, width) in pixels."""
        rows, columns = (math.ceil(side / p) for side, p in zip(image, self.patch_size, strict=True))
        return tuple((math.ceil(rows / 2**s), math.ceil(columns / 2**s)) for s in range(len(self.blocks)))

    @property
    def windows(self) -> tuple[tuple[int, int], ...]:
        """The (height, width) of a window in each stage: `window`, or the native grid where that is smaller."""
        return tuple((min(self.window, rows), min(self.window, columns)) for rows, columns in self.grids(self.image))

    def patch_at(self, block: int) -> tuple[int, int]:
        """Pixels to a token, per axis, in a block counted over all stages from 0."""
        stage = next(stage for stage in range(len(self.blocks)) if block < sum(self.blocks[: stage + 1]))
        return self.levels[stage].patch[0], self.levels[stage].patch[1]

    def check_image(self, image: tuple[int, ...]) -> None:
        """Raise UsageError for an image of other than two axes; every size of two is right."""
        if len(image) != 2:
            raise UsageError(f"a Swin takes images of two axes, not {len(image)}", "use height and width")

    @property
    def front(self) -> Literal["patches"]:
        """What reads the image: a projection of its patches."""
        return "patches"

    @property
    def position(self) -> Literal["none"]:
        """No position is added to tokens: attention has a bias for how far they are from each other."""
        return "none"

    @property
    def attention(self) -> Literal["windows"]:
        """Within windows, with relative positions."""
        return "windows"

    @property
    def pool(self) -> Literal["mean"]:
        """The mean of the last stage's tokens."""
        return "mean"

    @property
    def has_attention(self) -> bool:
        """Whether blocks attend from token to token."""
        return True

    @property
    def on_grid(self) -> bool:
        """Whether the blocks take tokens as a grid, (B, *grid, D)."""
        return True

    @property
    def drops_patches(self) -> bool:
        """No: windows take whole grids."""
        return False

    merges_tokens = packs_sizes = sees_whole_image = drops_patches

    @property
    def width_out(self) -> int:
        """Channels of a token of the last stage."""
        return self.widths[-1]

    @property
    def features(self) -> int:
        """Channels of what the head reads."""
        return self.width_out

    @property
    def prefix(self) -> int:
        """Tokens in front of the grid: none."""
        return 0
