"""Configs of Swin Transformers: version 1 (arXiv:2103.14030) and version 2 (arXiv:2111.09883)."""

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

#: how attention treats the zeros that pad a grid to whole windows: see `nn.layout.WindowedAttention`
WindowPadding = Literal["mask", "zeros", "zeros-after-shift"]
_SWIN = re.compile(
    r"swin(?P<second>v2)?-(?P<size>[a-z]+|(?P<width>\d+)x(?P<blocks>\d+(?:-\d+)*))/(?P<patch>\d+)"
    r"(?:-window(?:(?P<from>\d+)to)?(?P<window>\d+))?",
    re.IGNORECASE,
)


@dataclass(frozen=True)
class SwinPositionConfig(PositionGroup):
    """Tables of relative positions; `resize` is how they are resized to another window."""

    resize: PositionResize = "bicubic"


@dataclass(frozen=True)
class SwinAttentionConfig(AttentionGroup):
    """Attention within windows, with relative positions.

    - `window`: length of a window along each axis, in tokens; a stage with a smaller native grid uses its grid.
    - `pretrained_window`, for version 2: the window of each stage in pre-training; 0 or () means `window`.
    - `pad`: `mask` hides padding. `zeros` attends to padding, as in forks of Swin for detection, transformers and
      torchvision. `zeros-after-shift` is timm's variant.
    """

    kind: ClassVar[str] = "windows"
    window: int = 7
    pretrained_window: tuple[int, ...] = ()
    pad: WindowPadding = "mask"
    qkv_bias: bool = True


@dataclass(frozen=True)
class SwinMlpConfig(ConfigGroup):
    """The MLP of a block: ratio of its hidden channels to the width of the stage, and the form of GELU, named as in
    PyTorch."""

    ratio: float = 4.0
    gelu: Literal["none", "tanh", "quick"] = "none"


@dataclass(frozen=True)
class SwinNormConfig(ConfigGroup):
    """Options of the LayerNorms."""

    eps: float = 1e-5


@dataclass(frozen=True)
class SwinConfig(ModelConfig):
    """A Swin Transformer, defined by the blocks of its stages: (2, 2, 6, 2) with a width of 96 is Swin-T.

    Each stage after the first merges 2 x 2 tokens and doubles the width. Any image size works: images are padded at
    their ends to whole patches, merged tokens and windows. Raises UsageError for invalid values, or if the width of a
    stage is not divisible by its heads.
    """

    family: Literal["swin"] = "swin"
    # version 2 has cosine attention, a continuous position bias, and norms after each submodule
    version: Literal[1, 2] = 1
    image: tuple[int, int] = (224, 224)
    patch_size: tuple[int, int] = (4, 4)  # pixels per token of the first stage
    channels: int = 3
    classes: int = 1000  # 0: no head; the model outputs pooled features
    width: int = 96  # channels of a token in the first stage
    blocks: tuple[int, ...] = (2, 2, 6, 2)
    heads: tuple[int, ...] = (3, 6, 12, 24)  # attention heads of each stage
    positions: SwinPositionConfig = SwinPositionConfig()
    attention: SwinAttentionConfig = SwinAttentionConfig()
    mlp: SwinMlpConfig = SwinMlpConfig()
    norm: SwinNormConfig = SwinNormConfig()
    regularization: RegularizationConfig = RegularizationConfig()  # `drop_path` rises over the blocks of all stages

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
    foreign_formats: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_groups(self)
        if self.family != "swin":
            raise UsageError(f"family={self.family} is not the family of a SwinConfig", "use family=swin")
        for name in ("image", "patch_size"):
            if len(getattr(self, name)) != 2:
                raise UsageError(f"{name} of a Swin must have two axes", f"use {name}=(height, width)")
        if min(*self.image, *self.patch_size, self.channels, self.width, self.attention.window) < 1 or self.classes < 0:
            raise UsageError(
                "image, patch_size, channels, width and attention.window must be at least 1, classes at least 0"
            )
        if not self.blocks or min(self.blocks) < 1 or len(self.heads) != len(self.blocks) or min(self.heads) < 1:
            raise UsageError(
                f"blocks {self.blocks} and heads {self.heads} do not define stages",
                "set the number of blocks and of heads, at least 1, for each stage; Swin-T has (2, 2, 6, 2) and "
                "(3, 6, 12, 24)",
            )
        if self.version not in (1, 2):
            raise UsageError(f"version={self.version} is not supported", "use version=1 or version=2")
        pretrained_window = self.attention.pretrained_window
        if pretrained_window and (
            self.version == 1 or len(pretrained_window) != len(self.blocks) or min(pretrained_window) < 0
        ):
            raise UsageError(
                f"attention.pretrained_window {pretrained_window} must have one window for each of {len(self.blocks)} "
                "stages, and requires version 2",
                "use (12, 12, 12, 6) for four stages, or leave it out",
            )
        if self.attention.pad not in get_args(WindowPadding):
            raise UsageError(
                f"attention.pad={self.attention.pad} is not supported",
                f"use one of {', '.join(get_args(WindowPadding))}",
            )
        for width, heads in zip(self.widths, self.heads, strict=True):
            if width % heads:
                raise UsageError(f"stage width {width} is not divisible by {heads} heads", "change heads or width")
            if int(width * self.mlp.ratio) < 1:
                problem = f"mlp.ratio {self.mlp.ratio} leaves no hidden channel for width {width}"
                raise UsageError(problem, "use mlp.ratio=4")

    @classmethod
    def parse_name(cls, name: str, image: ImageSize) -> SwinConfig | None:
        """Return the config of a Swin's name; None for names of other families.

        - `Swin-T/4`, `Swin-B/4-window12` for images of 384 pixels.
        - `SwinV2-B/4-window12to16` for windows of 16, pre-trained with windows of 12.
        - `Swin-32x2-2/2` has a width of 32 and two stages of two blocks on patches of 2, with heads of 32 channels.

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
            hint = "use patches of 1 pixel or more and windows of 1 token or more; only SwinV2 has WINDOWtoWINDOW"
            raise UsageError(f"unknown model {name}", hint)
        scale = patch * 2 ** (len(blocks) - 1)
        # in published models, windows divide the grids, and the last grid is one window or half a window
        side = window * scale // (1 + (version == 2 and window > SWIN_WINDOWS[2]))
        image_size: Any = image or (
            (side, side) if match["width"] is None else nearest_divisible_size((224, 224), (scale, scale))
        )
        pretrained_window = ()
        if match["from"]:  # in pre-training the last grid was half a window
            pretrained_window = (*(int(match["from"]),) * (len(blocks) - 1), int(match["from"]) // 2)
        return cls(
            image=image_size,
            patch_size=(patch, patch),
            width=width,
            blocks=blocks,
            heads=heads,
            attention=SwinAttentionConfig(window, pretrained_window),
            version=version,
        )

    def name(self) -> str:
        """Return the model name: `Swin-T/4`, `Swin-B/4-window12`, or `Swin-32x2-2/2` if no published size has these
        values."""
        shape = (self.width, self.blocks, self.heads)
        explicit_size = f"{self.width}x{'-'.join(map(str, self.blocks))}"
        size = next((key for key, size_shape in SWIN_SIZES.items() if size_shape == shape), explicit_size)
        attention = self.attention
        pretrained = f"{attention.pretrained_window[0]}to" if attention.pretrained_window else ""
        window = "" if attention.window == SWIN_WINDOWS[self.version] else f"-window{pretrained}{attention.window}"
        return f"Swin{'V2' * (self.version == 2)}-{size}/{format_size(self.patch_size)}{window}"

    @property
    def widths(self) -> tuple[int, ...]:
        """Return the channels of a token in each stage."""
        return tuple(self.width * 2**stage for stage in range(len(self.blocks)))

    @property
    def levels(self) -> tuple[Level, ...]:
        """Return the maps that `features_at` computes: the tokens of each stage."""
        rows, columns = self.patch_size
        return tuple(Level((rows * 2**stage, columns * 2**stage), width) for stage, width in enumerate(self.widths))

    @property
    def depth(self) -> int:
        """Return the blocks of all stages."""
        return sum(self.blocks)

    @property
    def patch(self) -> tuple[int, int]:
        """Return the pixels per token of the last stage along each axis: (32, 32) for four stages on patches of 4."""
        scale = 2 ** (len(self.blocks) - 1)
        return self.patch_size[0] * scale, self.patch_size[1] * scale

    @property
    def cell(self) -> tuple[int, int]:
        """Return the pixels along each axis of the patches of the first layer."""
        return self.patch_size

    @property
    def grid(self) -> tuple[int, int]:
        """Return the grid of the last stage at the native image size."""
        return self.stage_grids(self.image)[-1]

    def stage_grids(self, image: tuple[int, ...]) -> tuple[tuple[int, int], ...]:
        """Return the token grid (rows, columns) of each stage, for an image of this (height, width) in pixels."""
        rows, columns = (math.ceil(length / p) for length, p in zip(image, self.patch_size, strict=True))
        return tuple((math.ceil(rows / 2**s), math.ceil(columns / 2**s)) for s in range(len(self.blocks)))

    @property
    def windows(self) -> tuple[tuple[int, int], ...]:
        """Return the (height, width) of a window in each stage: the window of `attention`, or the native grid if it is
        smaller."""
        window = self.attention.window
        return tuple((min(window, rows), min(window, columns)) for rows, columns in self.stage_grids(self.image))

    def patch_at(self, block: int) -> tuple[int, int]:
        """Return the pixels per token along each axis in a block, counted over all stages from 0."""
        stage = next(stage for stage in range(len(self.blocks)) if block < sum(self.blocks[: stage + 1]))
        return self.levels[stage].patch[0], self.levels[stage].patch[1]

    def check_image_size(self, image: tuple[int, ...]) -> None:
        """Raise UsageError for an image that does not have two axes; any size is valid."""
        if len(image) != 2:
            raise UsageError(f"a Swin requires images with two axes, got {len(image)}", "use height and width")

    @property
    def has_position_tables(self) -> bool:
        """Return True: the tables of relative positions are resized to other windows."""
        return True

    @property
    def width_out(self) -> int:
        """Return the channels of a token of the last stage."""
        return self.widths[-1]

    @property
    def table_grid(self) -> tuple[int, int]:
        """Return the largest window of all stages, for which there are tables of relative positions."""
        return self.windows[0]

    def block_number(self, *indices: int) -> int:
        """Return the index of a block, from 0, for its stage and its index in the stage.

        Patch merging before a stage belongs to the first block of the stage.
        """
        stage, block = indices
        return sum(self.blocks[:stage]) + block

    def macs(self, image: ImageSize = None) -> int:
        """Count the multiply-adds of one forward pass for one image: every product, including those of padded windows.

        Norms, GELU, softmax and pooling are not counted. FLOPs are twice this number; a training step costs three
        forward passes.
        """
        grids = self.stage_grids(image or self.image)
        embed = math.prod(grids[0]) * self.channels * math.prod(self.patch_size) * self.width
        total = embed + self.width_out * self.classes
        for stage, (grid, width, size) in enumerate(zip(grids, self.widths, self.windows, strict=True)):
            tokens = math.prod(grid)
            padded_tokens = math.prod(math.ceil(length / w) * w for length, w in zip(grid, size, strict=True))
            attention = padded_tokens * (4 * width**2 + 2 * math.prod(size) * width)
            merging = tokens * 2 * width**2 if stage else 0  # from four tokens of half the width
            if self.version == 2:  # the bias network, once for all windows
                attention += (2 * size[0] - 1) * (2 * size[1] - 1) * 512 * (2 + self.heads[stage])
            total += merging + self.blocks[stage] * (attention + tokens * 2 * width * int(width * self.mlp.ratio))
        return total

    def export_rules(self) -> ExportRules:
        """Return the export rules: any image size that is a multiple of the patch.

        Graphs are traced with two windows along each axis, because a single window has another memory layout; the
        operators compute the same results.
        """
        return replace(super().export_rules(), fixed_size="", patch_multiples=True, drops_guards=True)

    def default_preprocess(self) -> PreprocessDefaults:
        """Return ImageNet's preprocessing."""
        return PreprocessDefaults("imagenet")

    def metadata_fields(self) -> dict[str, Any]:
        """Return the fields that tensors do not determine, which other formats store as metadata.

        The heads are not among them, because the tensors of each stage determine them. The windows of Swin V2 are.
        """
        windows = ("attention.window", "attention.pretrained_window") if self.version == 2 else ()
        metadata = super().metadata_fields() | self.values_at(windows)
        return {name: metadata[name] for name in sorted(metadata) if name != "heads"}

    def structure(self) -> dict[str, Any]:
        """Return the values on which the names and shapes of the model's tensors depend."""
        names = ("channels", "classes", "width", "blocks", "heads", "windows", "patch_size", "version")
        pretrained_window = self.attention.pretrained_window if any(self.attention.pretrained_window) else ()
        settings = self.values_at(("mlp.ratio", "attention.qkv_bias")) | {
            "attention.pretrained_window": pretrained_window
        }
        return {name: getattr(self, name) for name in names} | settings
