"""BiT ResNets (arXiv:1912.11370) and AxialResNet (arXiv:2010.11929, D.6)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, Literal, get_args

from vitreous.errors import UsageError, nearest
from vitreous.models.configs.levels import Level, Leveled

# whose ResNet: the rows of nn.resnet.NUMERICS
Numerics = Literal["google", "bit", "big-vision", "timm", "transformers"]


@dataclass(frozen=True)
class BiTConfig(Leveled):
    """A BiT ResNet-v2 by the units of its stages, (3, 4, 6, 3) for R50, and the `factor` of its name: R50x3 has 3.

    (3, 4, 23, 3) is R101, (3, 8, 36, 3) R152, (3, 24, 36, 3) R200. Any image size works: each stride rounds up. Raises
    UsageError where a number cannot be meant, or where the heads of axial attention do not divide the width.
    """

    family: Literal["bit"] = "bit"
    image: tuple[int, int] = (224, 224)
    channels: int = 3
    classes: int = 1000  # 0: no head, the pooled representation is the output
    blocks: tuple[int, ...] = (3, 4, 6, 3)
    factor: int = 1
    width: int = 64  # of the root, before `factor`
    numerics: Numerics = "bit"
    axial: bool = False  # attention in rows and columns for every 3x3 of the units; `image` sizes its positions

    def __post_init__(self) -> None:
        if self.family != "bit":
            raise UsageError(f"family={self.family} is no BiT", "use family=bit")
        if min(*self.image, self.channels, self.width, self.factor) < 1 or self.classes < 0:
            raise UsageError("image, channels, width and factor must be at least 1, classes at least 0")
        if len(self.image) != 2:
            raise UsageError(f"a BiT takes images of two axes, not {len(self.image)}", "use image=(height, width)")
        if not self.blocks or min(self.blocks) < 1:
            raise UsageError(
                "blocks must name at least one stage, each of at least 1 unit", "R50 is blocks=(3, 4, 6, 3)"
            )
        known = get_args(Numerics)
        if self.numerics not in known:
            raise UsageError(
                f"unknown numerics {self.numerics}", nearest(self.numerics, known) or f"use one of {', '.join(known)}"
            )
        if self.axial and self.width * self.factor % 16:
            raise UsageError(
                f"width {self.width * self.factor} is not a multiple of 16, twice the 8 heads", "change width or axial"
            )

    kind: ClassVar[Literal["bit"]] = "bit"
    has_stages: ClassVar[bool] = True

    @property
    def levels(self) -> tuple[Level, ...]:
        """The maps that `features_at` gives: the last of each stage."""
        width = 4 * self.width * self.factor
        return tuple(Level((4 * 2**stage,) * 2, width * 2**stage) for stage in range(len(self.blocks)))

    @property
    def depth(self) -> int:
        """Residual units of all stages."""
        return sum(self.blocks)

    def check_image(self, image: tuple[int, ...]) -> None:
        """Every image size is right: each stride rounds up."""

    @property
    def front(self) -> Literal["resnet"]:
        """What reads the image."""
        return "resnet"

    @property
    def position(self) -> Literal["none"]:
        """No position is added to anything."""
        return "none"

    @property
    def attention(self) -> Literal["none"]:
        """No attention over tokens."""
        return "none"

    @property
    def pool(self) -> Literal["mean"]:
        """The mean of the last map."""
        return "mean"

    @property
    def has_attention(self) -> bool:
        """No attention over tokens."""
        return False

    drops_patches = merges_tokens = packs_sizes = sees_whole_image = has_attention

    @property
    def patch(self) -> tuple[int, int]:
        """Pixels to a place of the last map, per axis: (32, 32) for four stages."""
        return (4 * 2 ** (len(self.blocks) - 1),) * 2

    @property
    def grid(self) -> tuple[int, int]:
        """The last map at the native image size."""
        height, width = self.image
        return math.ceil(height / self.patch[0]), math.ceil(width / self.patch[1])

    @property
    def width_out(self) -> int:
        """Channels of the last map."""
        return 4 * self.width * self.factor * 2 ** (len(self.blocks) - 1)

    @property
    def features(self) -> int:
        """Channels of what the head reads."""
        return self.width_out

    @property
    def prefix(self) -> int:
        """Tokens in front of the map: none."""
        return 0

    @property
    def dropout(self) -> float:
        """None, as in the paper."""
        return 0.0

    @property
    def drop_path(self) -> float:
        """None, as in the paper."""
        return 0.0
