"""Swin Transformers: V1 (arXiv:2103.14030) and V2 (arXiv:2111.09883)."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, get_args

from vitreous.errors import UsageError
from vitreous.models.configs.base import ExportRules, ImageSize, LayerGroups, Level, ModelConfig, PreprocessDefaults
from vitreous.models.configs.groups import (
    AttentionGroup,
    ConfigGroup,
    PositionGroup,
    PositionResize,
    RegularizationConfig,
    check_groups,
)
from vitreous.models.presets import SIZE_WORDS, SWIN_NAMES, SWIN_SIZES, SWIN_WINDOWS
from vitreous.nn.sizes import format_size, nearest_divisible_size

# what becomes of the zeros that fill up a grid that windows do not divide: those of nn.layout.Windows
WindowPadding = Literal["mask", "zeros", "zeros-after-shift"]
_SWIN = re.compile(
    r"swin(?P<second>v2)?-(?P<size>[a-z]+|(?P<width>\d+)x(?P<blocks>\d+(?:-\d+)*))/(?P<patch>\d+)"
    r"(?:-window(?:(?P<from>\d+)to)?(?P<window>\d+))?",
    re.IGNORECASE,
)


@dataclass(frozen=True)
class SwinPositionConfig(PositionGroup):
    """The tables of relative positions: how they are read at another window."""

    resize: PositionResize = "bicubic"


@dataclass(frozen=True)
class SwinAttentionConfig(AttentionGroup):
    """Attention within windows, with relative positions.

    `window`: tokens along a side of what a block sees; at most the native grid of its stage. `pretrained_window`, of
    version 2: the windows of each stage that positions were learned at, 0 or none: the own. `pad`: `mask` hides
    padding; `zeros` attends to it, as in detection's forks, transformers and torchvision; `zeros-after-shift` is that
    of timm.
    """

    kind: ClassVar[str] = "windows"
    window: int = 7
    pretrained_window: tuple[int, ...] = ()
    pad: WindowPadding = "mask"
    qkv_bias: bool = True


@dataclass(frozen=True)
class SwinMlpConfig(ConfigGroup):
    """The MLP of a block: hidden channels for one of the stage, and the form of GELU in torch's names."""

    ratio: float = 4.0
    gelu: Literal["none", "tanh", "quick"] = "none"


@dataclass(frozen=True)
class SwinNormConfig(ConfigGroup):
    """The norms."""

    eps: float = 1e-5


@dataclass(frozen=True)
class SwinConfig(ModelConfig):
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
    positions: SwinPositionConfig = SwinPositionConfig()
    attention: SwinAttentionConfig = SwinAttentionConfig()
    mlp: SwinMlpConfig = SwinMlpConfig()
    norm: SwinNormConfig = SwinNormConfig()
    regularization: RegularizationConfig = RegularizationConfig()  # over the blocks of all stages

    module: ClassVar[str] = "vitreous.models.swin:Swin"
    preset_names: ClassVar[tuple[str, ...]] = SWIN_NAMES
    recipe_family: ClassVar[str] = "swin"
    layer_groups: ClassVar[LayerGroups] = LayerGroups(
        r"\bstages\.(\d+)\.(?:blocks\.(\d+)\.|merge\.)", ("projection", "first_norm")
    )
    has_stages: ClassVar[bool] = True
    front: ClassVar[str] = "patches"
    has_attention: ClassVar[bool] = True
    on_grid: ClassVar[bool] = True
    has_position_tables: ClassVar[bool] = True  # relative positions
    foreign_formats: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_groups(self)
        if self.family != "swin":
            raise UsageError(f"family={self.family} is no Swin", "use family=swin")
        for name in ("image", "patch_size"):
            if len(getattr(self, name)) != 2:
                raise UsageError(f"{name} of a Swin has two axes", f"use {name}=(height, width)")
        if min(*self.image, *self.patch_size, self.channels, self.width, self.attention.window) < 1 or self.classes < 0:
            raise UsageError(
                "image, patch_size, channels, width and attention.window must be at least 1, classes at least 0"
            )
        if not self.blocks or min(self.blocks) < 1 or len(self.heads) != len(self.blocks) or min(self.heads) < 1:
            raise UsageError(
                f"blocks {self.blocks} and heads {self.heads} are no stages",
                "name a number of blocks and of heads, at least 1, for each stage; Swin-T has (2, 2, 6, 2) and "
                "(3, 6, 12, 24)",
            )
        if self.version not in (1, 2):
            raise UsageError(f"version={self.version} is no Swin", "use version=1 or version=2")
        trained = self.attention.pretrained_window
        if trained and (self.version == 1 or len(trained) != len(self.blocks) or min(trained) < 0):
            raise UsageError(
                f"attention.pretrained_window {trained} is not a window for each of {len(self.blocks)} stages of "
                "version 2",
                "use (12, 12, 12, 6) for four stages, or leave it out",
            )
        if self.attention.pad not in get_args(WindowPadding):
            raise UsageError(
                f"attention.pad={self.attention.pad} is no way to fill windows",
                f"use one of {', '.join(get_args(WindowPadding))}",
            )
        for width, heads in zip(self.widths, self.heads, strict=True):
            if width % heads:
                raise UsageError(f"a stage's width {width} is not a multiple of {heads} heads", "change heads or width")
            if int(width * self.mlp.ratio) < 1:
                raise UsageError(f"mlp.ratio {self.mlp.ratio} leaves no hidden channel", "use mlp.ratio=4")

    @classmethod
    def parse_name(cls, name: str, image: ImageSize) -> SwinConfig | None:
        """`Swin-T/4`, `Swin-B/4-window12` for images of 384 pixels, `SwinV2-B/4-window12to16` with positions from
        windows of 12, or `Swin-32x2-2/2`: a width of 32 and two stages of two blocks on patches of 2, with heads of 32
        channels.

        Raises UsageError for a patch or a window of 0.
        """
        match = _SWIN.fullmatch(name)
        if match is None:
            return None
        size = SIZE_WORDS.get(match["size"].lower(), match["size"]).upper().replace("TI", "T")
        if match["width"]:
            width, blocks = int(match["width"]), tuple(map(int, match["blocks"].split("-")))
            heads = tuple(max(1, width // 32) * 2**stage for stage in range(len(blocks)))
        elif size in SWIN_SIZES:
            width, blocks, heads = SWIN_SIZES[size]
        else:
            return None
        version = 2 if match["second"] else 1
        patch, window = int(match["patch"]), int(match["window"] or SWIN_WINDOWS[version])
        if min(patch, window, int(match["from"] or 1)) < 1 or (match["from"] and version == 1):
            raise UsageError(f"unknown model {name}", "a patch is at least one pixel, a window at least one token")
        scale = patch * 2 ** (len(blocks) - 1)
        # windows divide the grids of the published models, the last of which is one window, or half of one
        side = window * scale // (1 + (version == 2 and window > SWIN_WINDOWS[2]))
        pixels: Any = image or (
            (side, side) if match["width"] is None else nearest_divisible_size((224, 224), (scale, scale))
        )
        trained = ()
        if match["from"]:  # at images of which the last grid was half a window
            trained = (*(int(match["from"]),) * (len(blocks) - 1), int(match["from"]) // 2)
        return cls(
            image=pixels,
            patch_size=(patch, patch),
            width=width,
            blocks=blocks,
            heads=heads,
            attention=SwinAttentionConfig(window, trained),
            version=version,
        )

    def name(self) -> str:
        """`Swin-T/4`, `Swin-B/4-window12`, or `Swin-32x2-2/2` where no size fits."""
        own = (self.width, self.blocks, self.heads)
        free = f"{self.width}x{'-'.join(map(str, self.blocks))}"
        size = next((key for key, row in SWIN_SIZES.items() if row == own), free)
        attention = self.attention
        trained = f"{attention.pretrained_window[0]}to" if attention.pretrained_window else ""
        window = "" if attention.window == SWIN_WINDOWS[self.version] else f"-window{trained}{attention.window}"
        return f"Swin{'V2' * (self.version == 2)}-{size}/{format_size(self.patch_size)}{window}"

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
        """The (height, width) of a window in each stage: that of `attention`, or the native grid if that is smaller."""
        window = self.attention.window
        return tuple((min(window, rows), min(window, columns)) for rows, columns in self.grids(self.image))

    def patch_at(self, block: int) -> tuple[int, int]:
        """Pixels to a token, per axis, in a block counted over all stages from 0."""
        stage = next(stage for stage in range(len(self.blocks)) if block < sum(self.blocks[: stage + 1]))
        return self.levels[stage].patch[0], self.levels[stage].patch[1]

    def check_image(self, image: tuple[int, ...]) -> None:
        """Raise UsageError for an image of other than two axes; every size of two is right."""
        if len(image) != 2:
            raise UsageError(f"a Swin takes images of two axes, not {len(image)}", "use height and width")

    @property
    def width_out(self) -> int:
        """Channels of a token of the last stage."""
        return self.widths[-1]

    @property
    def table_grid(self) -> tuple[int, int]:
        """The largest window, whose relative positions are tables."""
        return self.windows[0]

    def block_number(self, *numbers: int) -> int:
        """The number of a block, from 0, by its stage and its number there. What merges tokens before a stage goes with
        the first block of the stage."""
        stage, block = numbers
        return sum(self.blocks[:stage]) + block

    def macs(self, image: ImageSize = None) -> int:
        """Multiply-adds of one forward pass for one image: every product, those of padded windows included.

        Norms, GELU, softmax and pooling are left out. FLOPs are twice this; a training step costs three forward passes.
        """
        grids = self.grids(image or self.image)
        embed = math.prod(grids[0]) * self.channels * math.prod(self.patch_size) * self.width
        total = embed + self.width_out * self.classes
        for stage, (grid, width, size) in enumerate(zip(grids, self.widths, self.windows, strict=True)):
            tokens = math.prod(grid)
            seen = math.prod(math.ceil(length / w) * w for length, w in zip(grid, size, strict=True))
            attention = seen * (4 * width**2 + 2 * math.prod(size) * width)
            merging = tokens * 2 * width**2 if stage else 0  # from four of half the width
            if self.version == 2:  # the network of the bias, once for all windows
                attention += (2 * size[0] - 1) * (2 * size[1] - 1) * 512 * (2 + self.heads[stage])
            total += merging + self.blocks[stage] * (attention + tokens * 2 * width * int(width * self.mlp.ratio))
        return total

    def export_rules(self) -> ExportRules:
        """Images of any size. Graphs ask for two windows along each axis, since one is laid out otherwise in memory;
        the operators do not care."""
        return replace(super().export_rules(), fixed_size="", patch_multiples=True, drops_guards=True)

    def default_preprocess(self) -> PreprocessDefaults:
        """As ImageNet's images."""
        return PreprocessDefaults("imagenet")

    def metadata_fields(self) -> dict[str, Any]:
        """Without heads, which the tensors of each stage tell; with windows, which no tensor of a Swin V2 tells."""
        windows = ("attention.window", "attention.pretrained_window") if self.version == 2 else ()
        noted = super().metadata_fields() | self.values_at(windows)
        return {name: noted[name] for name in sorted(noted) if name != "heads"}

    def structure(self) -> dict[str, Any]:
        """What the model's tensors depend on."""
        names = ("channels", "classes", "width", "blocks", "heads", "windows", "patch_size", "version")
        trained = self.attention.pretrained_window if any(self.attention.pretrained_window) else ()
        settings = self.values_at(("mlp.ratio", "attention.qkv_bias")) | {"attention.pretrained_window": trained}
        return {name: getattr(self, name) for name in names} | settings
