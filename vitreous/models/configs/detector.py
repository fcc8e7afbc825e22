"""Config of an object detection model: a backbone with the heads of Faster or Mask R-CNN, which outputs boxes, classes
and masks."""

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
    """Number of layers of the heads, and number of training samples per image.

    - `rpn`: 3 x 3 convolutions of the region proposal network.
    - `convolutions`, `layers`: convolutions and linear layers of the box head.
    - `masks`: convolutions of the mask head.
    - `norm`: whether the convolutions of the box and mask heads have a LayerNorm.
    - `anchors`, `regions`: sampled training anchors and regions per image and step.
    - `sampling`: points along a side of a RoIAlign bin; 0 for the number of positions in the bin.
    """

    rpn: int
    convolutions: int
    layers: int
    masks: int
    norm: bool
    anchors: int
    regions: int
    sampling: int


#: sizes by value of `heads`: ViTDet's (arXiv:2203.16527, appendix A.2), and smaller heads at a tenth of their cost
HEAD_SIZES: dict[str, HeadSizes] = {
    "vitdet": HeadSizes(2, 4, layers=1, masks=4, norm=True, anchors=256, regions=512, sampling=0),
    "light": HeadSizes(1, 0, layers=2, masks=2, norm=True, anchors=256, regions=128, sampling=2),
}
PYRAMID_LEVELS = 5  # number of levels of a feature pyramid
DETECTOR_OUTPUTS = ("boxes", "scores", "labels", "masks")  # names of the outputs in exported graphs
#: fields that tensors do not determine, stored as metadata in other formats
DETECTOR_METADATA_FIELDS = ("agnostic", "round_anchors", "proposals", "detections", "nms", "threshold", "scores")


@dataclass(frozen=True)
class DetectorConfig(BackboneWithHeadConfig):
    """A backbone without a head, a feature pyramid, a region proposal network and region heads (arXiv:1506.01497,
    arXiv:1703.06870).

    - `masks`: whether detections have masks.
    - `heads`: a key of `HEAD_SIZES`.
    - `width`: channels of the pyramid and of the heads' convolutions; `hidden`: channels of the heads' linear layers.
    - `finest`: minimum pixels per position of the finest pyramid level.
    - `anchor`: the side of an anchor in positions of its level.
    - `round_anchors`: round the corners of the centred anchor to whole pixels, as torchvision does and detectron2 does
      not.
    - `agnostic`: predict one box correction per region instead of one per class.
    - `scores`: how logits become class scores: `softmax` with a background class, or an independent `sigmoid` per
      class, as for LVIS.
    - `proposals`: regions per image that the heads classify.
    - `detections`: maximum detections per image, with a score above `threshold`.
    - `nms`: IoU above which a detection is suppressed by a detection of its class with a higher score.

    Raises UsageError for a backbone with classes or for volumes, and for invalid values.
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
        """Return the model name, such as `ViT-S/16 with Mask R-CNN`."""
        return f"{self.backbone.name()} with {'Mask' if self.masks else 'Faster'} R-CNN"

    def __post_init__(self) -> None:
        if self.backbone.classes:
            raise UsageError("the backbone of a detector must not have a classification head", "set its classes=0")
        if len(self.backbone.image) != 2:
            raise UsageError("object detection does not support volumes", "use --recipe segment for volumes")
        min_value = min(self.classes, self.width, self.hidden, self.proposals, self.detections, self.finest)
        if min_value < 1 or self.anchor <= 0:
            raise UsageError("classes, width, hidden, finest, anchor, proposals and detections must be above 0")
        if not (0 < self.nms <= 1 and 0 <= self.threshold < 1):
            raise UsageError(f"nms {self.nms} and threshold {self.threshold} must be from 0 to 1")
        if len(self.strides) < 2:
            problem = (
                f"the pyramid requires at least 2 levels, but finest={self.finest} pixels leaves {len(self.strides)}"
            )
            raise UsageError(problem, "use --objective.finest 4")

    @property
    def sizes(self) -> HeadSizes:
        """Return the `HeadSizes` that `heads` selects."""
        return HEAD_SIZES[self.heads]

    @property
    def input_strides(self) -> tuple[int, ...]:
        """Return the strides of the backbone's maps that are the input of the pyramid, the finest first.

        This is the single map of a ViT, or the maps of a backbone with stages from `finest` pixels on.
        """
        backbone_strides = self.backbone.strides
        return (
            backbone_strides
            if len(backbone_strides) == 1
            else tuple(stride for stride in backbone_strides if stride >= self.finest)
        )

    @property
    def strides(self) -> tuple[int, ...]:
        """Return the pixels per position of each level of the pyramid, the finest first."""
        if len(self.backbone.strides) == 1:
            stride = self.backbone.strides[0]
            return tuple(s for s in (stride // 4, stride // 2, stride, stride * 2, stride * 4) if s >= self.finest)
        input_strides = self.input_strides
        return (
            *input_strides,
            *(input_strides[-1] * 2**step for step in range(1, PYRAMID_LEVELS + 1 - len(input_strides))),
        )

    def export_rules(self) -> ExportRules:
        """Return the export rules: one image of one size at a time, because non-maximum suppression is per image."""
        hint = "leave it out: images of any size are resized, or predicted in tiles"
        outputs = DETECTOR_OUTPUTS if self.masks else DETECTOR_OUTPUTS[:3]
        return ExportRules(outputs, fixed_size="objects", hint=hint, fixed_batch=True)

    def default_preprocess(self) -> PreprocessDefaults:
        """Return bilinear resizing, as usual for detectors."""
        return PreprocessDefaults(filter="bilinear")

    def metadata_fields(self) -> dict[str, Any]:
        """Return the fields of backbone and detector that tensors do not determine, which other formats store as
        metadata."""
        return self.backbone.metadata_fields() | {name: getattr(self, name) for name in DETECTOR_METADATA_FIELDS}

    def structure(self) -> dict[str, Any]:
        """Return the values on which the names and shapes of the model's tensors depend."""
        names = ("classes", "masks", "heads", "width", "hidden", "strides", "anchor", "agnostic", "scores")
        return {name: getattr(self, name) for name in names} | {"backbone": self.backbone.structure()}
