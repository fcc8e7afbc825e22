"""Configs of hybrids: a ViT on the map of a ResNet (arXiv:2010.11929, section 3.1) or of a convolutional stem
(arXiv:2106.14881)."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from vitreous.errors import UsageError
from vitreous.models.configs.base import ImageSize, Level
from vitreous.models.configs.bit import NumericsName
from vitreous.models.configs.vit import ViTConfig, change_config, parse_plain_vit
from vitreous.models.cost import convolution_macs, resnet_macs
from vitreous.models.presets import CONV_HYBRID_NAMES, HYBRID_PRESETS, RESNET_BLOCKS
from vitreous.nn.sizes import format_size, patch_grid

_HYBRID = re.compile(r"r(?P<depth>\d+)(?:x(?P<factor>\d+))?\+(?:vit-)?(?P<rest>\w+/(?P<patch>16|32))", re.IGNORECASE)
_CONV = re.compile(r"conv(?P<stages>\d+(?:x\d+)?(?:-\d+(?:x\d+)?)+)?\+(?:vit-)?(?P<rest>\w+/\d+)", re.IGNORECASE)


@dataclass(frozen=True)
class StemConfig:
    """The ResNet stem of a hybrid (arXiv:2010.11929, section 3.1): `blocks` are the units of each stage, () for only
    the root; `width` is the number of channels of the root."""

    blocks: tuple[int, ...] = (3, 4, 9)
    width: int = 64
    numerics: NumericsName = "google"
    family: Literal["resnet"] = "resnet"

    @property
    def width_out(self) -> int:
        """Return the channels of the last map."""
        return self.levels[-1].width

    def macs(self, image: tuple[int, int], channels: int) -> int:
        """Count the multiply-adds for one image of this (height, width) and number of channels."""
        return resnet_macs(self.blocks, self.width, channels, image)

    @property
    def reduction(self) -> int:
        """Return the stride of the last map in pixels."""
        return 4 * 2 ** max(0, len(self.blocks) - 1)

    @property
    def levels(self) -> tuple[Level, ...]:
        """Return the map after each stage, or after the root if there are no stages, the finest first."""
        stages = tuple(Level((4 * 2**stage,) * 2, 4 * self.width * 2**stage) for stage in range(len(self.blocks)))
        return stages or (Level((4, 4), self.width),)


@dataclass(frozen=True)
class ConvStemConfig:
    """A stem of a few 3x3 convolutions (arXiv:2106.14881): `widths` are the channels of each stage, `blocks` its number
    of residual units.

    Each stage but the last halves the map. Raises UsageError for invalid stages.
    """

    family: Literal["conv"] = "conv"
    widths: tuple[int, ...] = (32, 64, 128, 128)
    blocks: tuple[int, ...] = (0, 0, 0, 1)

    def __post_init__(self) -> None:
        if not self.widths or len(self.widths) != len(self.blocks) or min(self.widths) < 1 or min(self.blocks) < 0:
            raise UsageError(
                f"widths {self.widths} and blocks {self.blocks} do not define convolutional stages",
                "set a width of at least 1 and a number of units for each stage",
            )

    @property
    def width_out(self) -> int:
        """Return the channels of the last map."""
        return self.widths[-1]

    def macs(self, image: tuple[int, int], channels: int) -> int:
        """Count the multiply-adds for one image of this (height, width) and number of channels."""
        return convolution_macs(self.widths, self.blocks, image, channels)

    @property
    def reduction(self) -> int:
        """Return the stride of the last map in pixels."""
        return 2 ** (len(self.widths) - 1)

    @property
    def levels(self) -> tuple[Level, ...]:
        """Return the map after each stage, the finest first; the last two have the same stride."""
        strides = [min(2 ** (stage + 1), self.reduction) for stage in range(len(self.widths))]
        return tuple(Level((stride, stride), width) for stride, width in zip(strides, self.widths, strict=True))


@dataclass(frozen=True)
class HybridConfig(ViTConfig):
    """A ViT whose tokens are cut from the map of a stem instead of the image; `patch` is in pixels of the image.

    Raises UsageError if the patch is not divisible by the stem's stride.
    """

    family: Literal["hybrid"] = "hybrid"
    module: ClassVar[str] = "vitreous.models.vit_variants:Hybrid"
    preset_names: ClassVar[tuple[str, ...]] = (*HYBRID_PRESETS, *CONV_HYBRID_NAMES)
    stem: StemConfig | ConvStemConfig = StemConfig()

    @classmethod
    def parse_name(cls, name: str, image: ImageSize) -> ViTConfig | None:
        """Return the config of a hybrid's name, such as `R50+ViT-B/16`, `R26x2+ViT-S/32` or `Conv+ViT-S/16`; None for
        names of other families.

        `Conv16-32-64+ViT-S/16` sets the channels of each stage, `Conv16-32x1-64x2+ViT-S/16` also its residual units. By
        default only the last stage has a unit.
        """
        conv, resnet = _CONV.fullmatch(name), _HYBRID.fullmatch(name)
        if conv:
            return change_config(parse_plain_vit(conv["rest"]), {"stem": parse_conv_stem(conv["stages"])}, image)
        options = {"positions.resize": "zoom", "mlp.gelu": "tanh"}
        if name in HYBRID_PRESETS:
            blocks, pixels = HYBRID_PRESETS[name]
            return change_config(
                parse_plain_vit(name.partition("+")[2], pixels), {"stem": StemConfig(blocks), **options}, image
            )
        if resnet is None or resnet["depth"] not in RESNET_BLOCKS:
            return None
        stem = StemConfig(hybrid_stage_units(resnet["depth"], int(resnet["patch"])), 64 * int(resnet["factor"] or 1))
        return change_config(parse_plain_vit(resnet["rest"]), {"stem": stem, **options}, image)

    def name(self) -> str:
        """Return the model name, such as `R50+ViT-B/16`, `Conv+ViT-S/16` or `Conv16-32x1-64x2+ViT-S/16`."""
        stem, name = self.stem, self.size_name()
        if isinstance(stem, ConvStemConfig):
            return f"Conv{format_conv_stem(stem)}+ViT-{name}"
        size = name.partition("/")[0]
        for hybrid, (blocks, _) in HYBRID_PRESETS.items():
            if (blocks, 64) == (stem.blocks, stem.width) and f"+ViT-{size}/" in hybrid:
                return hybrid
        depth = next(
            (depth for depth in RESNET_BLOCKS if hybrid_stage_units(depth, self.patch[0]) == stem.blocks), None
        )
        return f"R{depth or '-'.join(map(str, stem.blocks))}x{stem.width / 64:g}+ViT-{name}"

    def __post_init__(self) -> None:
        super().__post_init__()
        if any(p % self.stem.reduction for p in self.patch):
            raise UsageError(
                f"patch size {format_size(self.patch)} is not divisible by the stem's stride {self.stem.reduction}",
                f"use a multiple of {self.stem.reduction} pixels",
            )

    @property
    def front(self) -> Literal["conv", "resnet"]:
        """Return the type of the first layers, `conv` or `resnet`."""
        return self.stem.family

    @property
    def levels(self) -> tuple[Level, ...]:
        """Return the maps that `features_at` computes: the last map of each stem stride that is finer than the tokens,
        and the tokens after the last block."""
        finer = {level.stride: level for level in self.stem.levels if level.stride < self.patch[0]}
        return (*finer.values(), Level(self.patch, self.width))

    @property
    def cell(self) -> tuple[int, ...]:
        """Return the positions of the stem's map per token, along each axis."""
        return tuple(p // self.stem.reduction for p in self.patch)

    @property
    def stem_depth(self) -> int:
        """Return the residual units of the stem."""
        return sum(self.stem.blocks)

    @property
    def foreign_formats(self) -> bool:
        """Return whether other libraries' files may contain the model; they have no models with convolutional stems."""
        return self.front == "resnet"

    def embedding_macs(self, image: tuple[int, ...]) -> int:
        """Count the multiply-adds of the stem and of the projection of its map."""
        patches = math.prod(patch_grid(image, self.patch))
        projection = patches * math.prod(self.cell) * self.stem.width_out * self.width
        return self.stem.macs((image[0], image[1]), self.channels) + projection

    def numerical_choices(self) -> dict[str, Any]:
        """Return the fields of a ViT that change outputs slightly, and the numerics of the ResNet stem."""
        numerics = {"stem": self.stem.numerics} if isinstance(self.stem, StemConfig) else {}
        return super().numerical_choices() | numerics

    def structure(self) -> dict[str, Any]:
        """Return the values on which the names and shapes of the model's tensors depend."""
        stem = (self.stem.blocks, self.stem.width) if isinstance(self.stem, StemConfig) else self.stem
        return super().structure() | {"stem": stem}


def parse_conv_stem(stages: str | None) -> ConvStemConfig:
    """Return the stem config of a text such as `16-32x1-64x2`, or the default stem for None."""
    if stages is None:
        return ConvStemConfig()
    stages = stages.lower()
    sizes = [stage.partition("x") for stage in stages.split("-")]
    counts = [int(units or 0) for *_, units in sizes] if "x" in stages else [0] * (len(sizes) - 1) + [1]
    return ConvStemConfig(widths=tuple(int(width) for width, *_ in sizes), blocks=tuple(counts))


def format_conv_stem(stem: ConvStemConfig) -> str:
    """Return the shortest text that `parse_conv_stem` parses as this stem, such as `16-32x1-64x2`; "" for the
    default."""
    if stem == ConvStemConfig():
        return ""
    if stem.blocks == (*(0,) * (len(stem.blocks) - 1), 1):
        return "-".join(map(str, stem.widths))
    text = "-".join(f"{w}x{n}" if n else f"{w}" for w, n in zip(stem.widths, stem.blocks, strict=True))
    return text if any(stem.blocks) else f"{text}x0"


def hybrid_stage_units(depth: str, patch: int) -> tuple[int, ...]:
    """Return the units of each stage of a hybrid's ResNet; for tokens of 16 pixels, the units of stage 4 are part of
    stage 3 (section 4.1)."""
    first, second, third, fourth = RESNET_BLOCKS[depth]
    return (first, second, third + fourth) if patch == 16 else (first, second, third, fourth)
