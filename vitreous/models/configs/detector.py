"""A backbone with the heads of Faster or Mask R-CNN, which answers with objects: boxes, classes, masks."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, NamedTuple

from vitreous.errors import UsageError
from vitreous.models.configs.base import ExportRules, ModelConfig, PreprocessDefaults
from vitreous.models.configs.vit import ViTConfig
from vitreous.models.configs.wrapped import BackboneWithHeadConfig

DetectionHeads = Literal["vitdet", "light"]
ScoreActivation = Literal["softmax", "sigmoid"]


class HeadSizes(NamedTuple):
    """Layers of the heads, and how much of an image they are given.

    `rpn`: 3 x 3 convolutions of the region proposal network; `convolutions` and `layers`: of the box head, the latter
    linear; `masks`: convolutions of the mask head. `norm`: whether convolutions of the two have a LayerNorm.
    `anchors` and `regions`: those of an image that are learned from in a step. `sampling`: points along a side of a bin
    of RoIAlign, 0 for as many as there are places in it.
    """

    rpn: int
    convolutions: int
    layers: int
    masks: int
    norm: bool
    anchors: int
    regions: int
    sampling: int


#: ViTDet's heads (arXiv:2203.16527, appendix A.2), and some of a tenth of their cost
HEAD_SIZES: dict[str, HeadSizes] = {
    "vitdet": HeadSizes(2, 4, layers=1, masks=4, norm=True, anchors=256, regions=512, sampling=0),
    "light": HeadSizes(1, 0, layers=2, masks=2, norm=True, anchors=256, regions=128, sampling=2),
}
PYRAMID_LEVELS = 5  # of a feature pyramid
DETECTOR_OUTPUTS = ("boxes", "scores", "labels", "masks")
#: fields that no tensor tells
DETECTOR_METADATA_FIELDS = ("agnostic", "round_anchors", "proposals", "detections", "nms", "threshold", "scores")


@dataclass(frozen=True)
class DetectorConfig(BackboneWithHeadConfig):
    """A backbone without a head of its own, a feature pyramid, a region proposal network and heads for regions
    (arXiv:1506.01497, arXiv:1703.06870).

    `masks`: objects get masks. `heads` is a row of HEADS, `width` the channels of the pyramid and of the convolutions
    in the heads, `hidden` of the linear layers. `finest`: pixels to a place of the finest level of the pyramid at
    least. `anchor`: the side of an anchor in places of its level; `round_anchors`: its corners, around its centre, are
    whole pixels, as torchvision has them and detectron2 does not. `agnostic`: one correction of a region for all
    classes, not one for each. `scores`: how logits of a region become the scores of its classes: `softmax` beside the
    background, or `sigmoid`, each class a question of its own, as LVIS is learned. `proposals`: regions of an image
    that are looked at; `detections`: objects of an answer, those with a score above `threshold`, of which none overlaps
    a better one of its class by more than `nms` (IoU). Raises UsageError for a backbone with classes or of volumes, and
    for numbers that cannot be.
    """

    family: Literal["detector"] = "detector"
    backbone: ModelConfig = field(default_factory=lambda: ViTConfig(classes=0))
    classes: int = 1
    masks: bool = False
    heads: DetectionHeads = "vitdet"
    width: int = 256
    hidden: int = 1024
    finest: int = 4
    anchor: float = 8.0
    round_anchors: bool = True
    agnostic: bool = False
    scores: ScoreActivation = "softmax"
    proposals: int = 1000
    detections: int = 100
    nms: float = 0.5
    threshold: float = 0.05

    module: ClassVar[str] = "vitreous.models.detector:Detector"
    finds_objects: ClassVar[bool] = True
    foreign_formats: ClassVar[bool] = True

    def name(self) -> str:
        """`ViT-S/16 with Mask R-CNN`."""
        return f"{self.backbone.name()} with {'Mask' if self.masks else 'Faster'} R-CNN"

    def __post_init__(self) -> None:
        if self.backbone.classes:
            raise UsageError("a backbone has no classes of its own", "use classes=0")
        if len(self.backbone.image) != 2:
            raise UsageError("boxes are of images, not of volumes", "use --recipe segment for volumes")
        least = min(self.classes, self.width, self.hidden, self.proposals, self.detections, self.finest)
        if least < 1 or self.anchor <= 0:
            raise UsageError("classes, width, hidden, finest, anchor, proposals and detections are above 0")
        if not (0 < self.nms <= 1 and 0 <= self.threshold < 1):
            raise UsageError(f"nms {self.nms} and threshold {self.threshold} are shares from 0 to 1")
        if len(self.strides) < 2:
            problem = f"a finest level of {self.finest} pixels leaves a pyramid of {len(self.strides)} levels"
            raise UsageError(problem, "use --objective.finest 4")

    @property
    def sizes(self) -> HeadSizes:
        """The row of `heads`."""
        return HEAD_SIZES[self.heads]

    @property
    def taps(self) -> tuple[int, ...]:
        """Strides of the backbone's maps that the pyramid is made of, the finest first: the only one, or those from
        `finest` pixels on."""
        own = self.backbone.strides
        return own if len(own) == 1 else tuple(stride for stride in own if stride >= self.finest)

    @property
    def strides(self) -> tuple[int, ...]:
        """Pixels to a place of each level of the pyramid, the finest first."""
        if len(self.backbone.strides) == 1:
            stride = self.backbone.strides[0]
            return tuple(s for s in (stride // 4, stride // 2, stride, stride * 2, stride * 4) if s >= self.finest)
        own = self.taps
        return (*own, *(own[-1] * 2**step for step in range(1, PYRAMID_LEVELS + 1 - len(own))))

    def export_rules(self) -> ExportRules:
        """One image at a time: which of its objects are one is asked image by image."""
        hint = "leave it out: images of any size are scaled to one, or answered by tiles of it"
        outputs = DETECTOR_OUTPUTS if self.masks else DETECTOR_OUTPUTS[:3]
        return ExportRules(outputs, fixed_size="objects", hint=hint, fixed_batch=True)

    def default_preprocess(self) -> PreprocessDefaults:
        """Scaled bilinearly, as detectors are."""
        return PreprocessDefaults(filter="bilinear")

    def metadata_fields(self) -> dict[str, Any]:
        """Those of the backbone, and the detector's own."""
        return self.backbone.metadata_fields() | {name: getattr(self, name) for name in DETECTOR_METADATA_FIELDS}

    def structure(self) -> dict[str, Any]:
        """What the model's tensors depend on."""
        names = ("classes", "masks", "heads", "width", "hidden", "strides", "anchor", "agnostic", "scores")
        return {name: getattr(self, name) for name in names} | {"backbone": self.backbone.structure()}
