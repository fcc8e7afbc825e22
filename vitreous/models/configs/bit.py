"""Config of BiT ResNets (arXiv:1912.11370) and of AxialResNet (arXiv:2010.11929, D.6)."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, get_args

from vitreous.errors import UsageError, suggest_nearest
from vitreous.models.configs.base import ExportRules, ImageSize, LayerGroups, Level, ModelConfig
from vitreous.models.cost import resnet_macs
from vitreous.models.presets import BIT_NAMES, RESNET_BLOCKS

#: source of the numerical details: keys of `nn.resnet.NUMERICS`
NumericsName = Literal["google", "bit", "big-vision", "timm", "transformers"]
_RESNET = re.compile(r"(?:bit-)?r(?P<depth>\d+)x(?P<factor>\d+)", re.IGNORECASE)


@dataclass(frozen=True)
class BiTConfig(ModelConfig):
    """A BiT ResNet-v2, defined by the residual units of its stages (`blocks`) and the `factor` of its width.

    `blocks` are (3, 4, 6, 3) for R50, (3, 4, 23, 3) for R101, (3, 8, 36, 3) for R152 and (3, 24, 36, 3) for R200;
    `factor` is 3 for R50x3. Any image size works: each stride rounds up. Raises UsageError for invalid values, or if
    the width is not divisible by twice the heads of axial attention.
    """

    family: Literal["bit"] = "bit"
    image: tuple[int, int] = (224, 224)
    channels: int = 3
    classes: int = 1000  # 0: no head; the model outputs pooled features
    blocks: tuple[int, ...] = (3, 4, 6, 3)
    factor: int = 1
    width: int = 64  # channels of the root before multiplication by `factor`
    numerics: NumericsName = "bit"
    axial: bool = False  # axial attention replaces every 3x3 of the units; its position tables are for `image`

    def __post_init__(self) -> None:
        if self.family != "bit":
            raise UsageError(f"family={self.family} is not the family of a BiTConfig", "use family=bit")
        if min(*self.image, self.channels, self.width, self.factor) < 1 or self.classes < 0:
            raise UsageError("image, channels, width and factor must be at least 1, classes at least 0")
        if len(self.image) != 2:
            raise UsageError(f"a BiT requires images with two axes, got {len(self.image)}", "use image=(height, width)")
        if not self.blocks or min(self.blocks) < 1:
            raise UsageError(
                f"blocks must contain at least one stage, each with at least 1 unit, got {self.blocks}",
                "use blocks=(3, 4, 6, 3) for R50",
            )
        numerics_names = get_args(NumericsName)
        if self.numerics not in numerics_names:
            raise UsageError(
                f"unknown numerics {self.numerics}",
                suggest_nearest(self.numerics, numerics_names) or f"use one of {', '.join(numerics_names)}",
            )
        if self.axial and self.width * self.factor % 16:
            raise UsageError(
                f"width {self.width * self.factor} is not divisible by 16, twice the 8 heads", "change width or axial"
            )

    module: ClassVar[str] = "vitreous.models.bit:BiT"
    preset_names: ClassVar[tuple[str, ...]] = (*(f"BiT-R{name}" for name in BIT_NAMES), "AxialResNet-50")
    recipe_family: ClassVar[str] = "bit"
    layer_groups: ClassVar[LayerGroups] = LayerGroups(r"\bbody\.stages\.(\d+)\.units\.(\d+)\.", ("body.root",))
    has_stages: ClassVar[bool] = True
    front: ClassVar[str] = "resnet"
    foreign_formats: ClassVar[bool] = True

    @classmethod
    def parse_name(cls, name: str, image: ImageSize) -> BiTConfig | None:
        """Return the config of `BiT-R50x1`, `R50x1` or `AxialResNet-50`; None for names of other families."""
        size: Any = image or (224, 224)
        if name == "AxialResNet-50":
            return cls(image=size, axial=True)
        resnet = _RESNET.fullmatch(name)
        if resnet is None or resnet["depth"] not in RESNET_BLOCKS:
            return None
        return cls(image=size, blocks=RESNET_BLOCKS[resnet["depth"]], factor=int(resnet["factor"]))

    def name(self) -> str:
        """Return the model name, such as `BiT-R50x1`."""
        depth = next(
            (key for key, blocks in RESNET_BLOCKS.items() if blocks == self.blocks), "-".join(map(str, self.blocks))
        )
        return f"AxialResNet-{depth}" if self.axial else f"BiT-R{depth}x{self.factor}"

    @property
    def levels(self) -> tuple[Level, ...]:
        """Return the maps that `features_at` computes, those after each stage."""
        width = 4 * self.width * self.factor
        return tuple(Level((4 * 2**stage,) * 2, width * 2**stage) for stage in range(len(self.blocks)))

    @property
    def depth(self) -> int:
        """Return the number of residual units in all stages."""
        return sum(self.blocks)

    @property
    def patch(self) -> tuple[int, int]:
        """Return the pixels per position of the last map along each axis: (32, 32) for four stages."""
        return (4 * 2 ** (len(self.blocks) - 1),) * 2

    @property
    def width_out(self) -> int:
        """Return the channels of the last map."""
        return 4 * self.width * self.factor * 2 ** (len(self.blocks) - 1)

    def block_number(self, *indices: int) -> int:
        """Return the index of a unit, from 0, for its stage and its index in the stage."""
        stage, unit = indices
        return sum(self.blocks[:stage]) + unit

    def macs(self, image: ImageSize = None) -> int:
        """Count the multiply-adds of one forward pass for one image: convolutions, axial attention and head.

        Norms, ReLU, softmax and pooling are not counted. FLOPs are twice this number; a training step costs three
        forward passes.
        """
        height, width = image or self.image
        inner = self.width * self.factor
        body = resnet_macs(self.blocks, inner, self.channels, image=(height, width), axial=self.axial)
        return body + self.width_out * self.classes

    def export_rules(self) -> ExportRules:
        """Return the export rules: any image size, except with axial attention."""
        rules = super().export_rules()
        return replace(rules, fixed_size="axial attention" if self.axial else "")

    def structure(self) -> dict[str, Any]:
        """Return the values on which the names and shapes of the model's tensors depend."""
        names = ("channels", "classes", "blocks", "axial")
        return {"root": self.width * self.factor} | {name: getattr(self, name) for name in names}
