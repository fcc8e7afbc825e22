"""Hybrids: a ViT on the map of a ResNet (arXiv:2010.11929, 3.1) or of a few convolutions (arXiv:2106.14881)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from vitreous.errors import UsageError
from vitreous.models.configs.bit import Numerics
from vitreous.models.configs.levels import Level
from vitreous.models.configs.vit import ViTConfig
from vitreous.nn.sizes import format_size


@dataclass(frozen=True)
class StemConfig:
    """The ResNet in front of a hybrid: units of each stage (none: the root alone), width of the root (arXiv:2010.11929,
    3.1)."""

    blocks: tuple[int, ...] = (3, 4, 9)
    width: int = 64
    numerics: Numerics = "google"
    family: Literal["resnet"] = "resnet"

    @property
    def reduction(self) -> int:
        """Pixels along a side that one place of the last map stands for."""
        return 4 * 2 ** max(0, len(self.blocks) - 1)

    @property
    def levels(self) -> tuple[Level, ...]:
        """The map after each stage, or after the root where there is none, the finest first."""
        stages = tuple(Level((4 * 2**stage,) * 2, 4 * self.width * 2**stage) for stage in range(len(self.blocks)))
        return stages or (Level((4, 4), self.width),)


@dataclass(frozen=True)
class ConvStemConfig:
    """A few 3x3 convolutions in front of a hybrid (arXiv:2106.14881): channels of each stage, and the residual units in
    it.

    Each stage but the last halves the map. Raises UsageError for stages that cannot be meant.
    """

    family: Literal["conv"] = "conv"
    widths: tuple[int, ...] = (32, 64, 128, 128)
    blocks: tuple[int, ...] = (0, 0, 0, 1)

    def __post_init__(self) -> None:
        if not self.widths or len(self.widths) != len(self.blocks) or min(self.widths) < 1 or min(self.blocks) < 0:
            raise UsageError(
                f"widths {self.widths} and blocks {self.blocks} are no stages of convolutions",
                "name a width of at least 1 and a number of units for each stage",
            )

    @property
    def reduction(self) -> int:
        """Pixels along a side that one place of the last map stands for."""
        return 2 ** (len(self.widths) - 1)

    @property
    def levels(self) -> tuple[Level, ...]:
        """The map after each stage, the finest first; the last two are of one stride."""
        sides = [min(2 ** (stage + 1), self.reduction) for stage in range(len(self.widths))]
        return tuple(Level((side, side), width) for side, width in zip(sides, self.widths, strict=True))


@dataclass(frozen=True)
class HybridConfig(ViTConfig):
    """A ViT whose tokens are cut from the map of a stem of convolutions; `patch` is in pixels of the image.

    Raises UsageError where the stem's reduction does not divide the patch.
    """

    family: Literal["hybrid"] = "hybrid"  # pyright: ignore[reportIncompatibleVariableOverride]
    stem: StemConfig | ConvStemConfig = StemConfig()  # pyright: ignore[reportIncompatibleVariableOverride]

    def __post_init__(self) -> None:
        super().__post_init__()
        if any(p % self.stem.reduction for p in self.patch):
            raise UsageError(
                f"patch {format_size(self.patch)} is not a multiple of {self.stem.reduction}, by which the stem "
                "shrinks the "
                "image"
            )

    @property
    def front(self) -> Literal["conv", "resnet"]:
        """What reads the image."""
        return self.stem.family

    @property
    def levels(self) -> tuple[Level, ...]:
        """The maps that `features_at` gives: the last of each stride of the stem that is finer than the tokens, and the
        tokens after the last block."""
        finer = {level.stride: level for level in self.stem.levels if level.stride < self.patch[0]}
        return (*finer.values(), Level(self.patch, self.width))

    @property
    def cell(self) -> tuple[int, ...]:
        """Places of the stem's map that a token is cut from, along each axis."""
        return tuple(p // self.stem.reduction for p in self.patch)
