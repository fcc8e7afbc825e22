"""A backbone with a head that gives a class to every pixel."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import ClassVar, Literal

from vitreous.errors import UsageError
from vitreous.models.configs.base import ExportRules, ModelConfig
from vitreous.models.configs.vit import ViTConfig
from vitreous.models.configs.wrapped import BackboneWithHeadConfig

DenseHead = Literal["linear", "multiscale", "unet", "upernet"]


@dataclass(frozen=True)
class SegmenterConfig(BackboneWithHeadConfig):
    """A backbone without a head of its own, and a dense head.

    `head`: `linear`, one layer on the last tokens, and `multiscale`, on those of four depths side by side, both read
    bilinearly at the size of the image (DINOv2's protocols, arXiv:2304.07193, section 7.4); `unet`, tokens of several
    depths that are enlarged step by step beside convolutions of the image (UNETR, arXiv:2103.10504); `upernet`, a
    pyramid of means and a feature pyramid (arXiv:1807.10221). `head_width`: the channels of `unet` at the image's own
    resolution, which double with every step down; `upernet` has sixteen times as many at every level (the paper's 512
    are 32). `head_dropout`: dropout of the channels before the last layer of `upernet`. Of a backbone with stages of
    their own grids heads read those. Raises UsageError for a backbone with classes, for patches that `unet` cannot
    enlarge, and for a `head_dropout` out of range or with another head.
    """

    family: Literal["segmenter"] = "segmenter"
    backbone: ModelConfig = field(default_factory=lambda: ViTConfig(classes=0))
    head: DenseHead = "unet"
    classes: int = 2
    head_width: int = 16
    head_dropout: float = 0.0

    module: ClassVar[str] = "vitreous.models.segmenter:Segmenter"

    def name(self) -> str:
        """`ViT-S/16 with a unet head`."""
        return f"{self.backbone.name()} with a {self.head} head"

    def export_rules(self) -> ExportRules:
        """Logits of images of one size."""
        hint = "leave it out: images of any size are answered by tiles of one size"
        return ExportRules(("logits",), fixed_size="a dense head", hint=hint)

    def __post_init__(self) -> None:
        if self.backbone.classes:
            raise UsageError("a backbone has no classes of its own", "use classes=0")
        if self.classes < 2 or self.head_width < 1:
            raise UsageError(f"{self.classes} classes cannot be told apart", "name at least two, background included")
        if not 0 <= self.head_dropout < 1 or (self.head_dropout and self.head != "upernet"):
            raise UsageError(f"head_dropout {self.head_dropout} with head={self.head}", "use 0, or head=upernet")
        if self.head == "unet" and any(side & (side - 1) for side in self.backbone.patch):
            raise UsageError(
                f"patches of {self.backbone.patch} pixels are no powers of two, by which a unet enlarges",
                "use --objective.head multiscale, or patches of 8 or 16",
            )

    @property
    def width(self) -> int:
        """Channels of the backbone's tokens."""
        return self.backbone.width

    @property
    def taps(self) -> tuple[int, ...]:
        """The depths of a ViT whose tokens the head reads, the last one first."""
        if self.head == "linear":
            return (self.depth,)
        steps = self.steps if self.head == "unet" else 4
        return tuple(math.ceil(self.depth * (steps - step) / steps) for step in range(steps))

    @property
    def steps(self) -> int:
        """Doublings from the grid to the image, along its longest patch."""
        return max(1, max(self.patch).bit_length() - 1)
