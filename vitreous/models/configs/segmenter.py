"""Config of a semantic segmentation model: a backbone with a dense head that predicts a class per pixel."""

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
    """A backbone without a classification head, with a dense head that predicts a class per pixel.

    | `head` | method |
    |---|---|
    | `linear` | one layer on the last tokens, logits interpolated bilinearly to the image |
    | `multiscale` | one layer on the concatenated tokens of four depths (both: DINOv2, arXiv:2304.07193, section 7.4) |
    | `unet` | tokens of several depths, enlarged step by step, with image convolutions (UNETR, arXiv:2103.10504) |
    | `upernet` | pyramid pooling and a feature pyramid (arXiv:1807.10221) |

    - `head_width`: channels of `unet` at the image's resolution, which double with every halving of the resolution.
      `upernet` has sixteen times this number at every level (the paper's 512 channels are `head_width` 32).
    - `head_dropout`: probability that a channel is dropped before the last layer of `upernet`.

    If a backbone has stages, the head uses their maps. Raises UsageError for a backbone with classes, for patches that
    `unet` cannot enlarge, and for a `head_dropout` out of range or with another head.
    """

    family: Literal["segmenter"] = "segmenter"
    backbone: ModelConfig = field(default_factory=lambda: ViTConfig(classes=0))
    head: DenseHead = "unet"
    classes: int = 2
    head_width: int = 16
    head_dropout: float = 0.0

    module: ClassVar[str] = "vitreous.models.segmenter:Segmenter"

    def name(self) -> str:
        """Return the model name, such as `ViT-S/16 with a unet head`."""
        return f"{self.backbone.name()} with a {self.head} head"

    def export_rules(self) -> ExportRules:
        """Return the export rules: logits for one fixed image size."""
        hint = "leave it out: images of any size are predicted in tiles"
        return ExportRules(("logits",), fixed_size="a dense head", hint=hint)

    def __post_init__(self) -> None:
        if self.backbone.classes:
            raise UsageError("the backbone of a segmenter must not have a classification head", "set its classes=0")
        if self.classes < 2 or self.head_width < 1:
            raise UsageError(
                f"segmentation requires at least 2 classes and a head_width of at least 1, got {self.classes} and "
                f"{self.head_width}",
                "count the background as a class",
            )
        if not 0 <= self.head_dropout < 1 or (self.head_dropout and self.head != "upernet"):
            problem = f"head_dropout must be from 0 to below 1, and 0 for head={self.head}, got {self.head_dropout}"
            raise UsageError(problem, "use 0, or head=upernet")
        if self.head == "unet" and any(length & (length - 1) for length in self.backbone.patch):
            raise UsageError(
                f"patches of {self.backbone.patch} pixels are not powers of two, as a unet requires",
                "use --objective.head multiscale, or patches of 8 or 16",
            )

    @property
    def width(self) -> int:
        """Return the channels of the backbone's tokens."""
        return self.backbone.width

    @property
    def input_depths(self) -> tuple[int, ...]:
        """Return the depths of a ViT whose tokens are the input of the head, the last depth first."""
        if self.head == "linear":
            return (self.depth,)
        steps = self.steps if self.head == "unet" else 4
        return tuple(math.ceil(self.depth * (steps - step) / steps) for step in range(steps))

    @property
    def steps(self) -> int:
        """Return the number of doublings from the grid to the image, along the longest axis of a patch."""
        return max(1, max(self.patch).bit_length() - 1)
