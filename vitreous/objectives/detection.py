"""Learning where objects are from boxes, and from masks where there are any (arXiv:1506.01497, arXiv:1703.06870).

B images of C channels; n objects on an image of h x w pixels.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from vitreous.data.augmentation.scenes import Scenes
from vitreous.data.batch import Batch
from vitreous.data.keys import key
from vitreous.data.split import Split
from vitreous.errors import UsageError
from vitreous.evaluation.coco import CocoEvaluator
from vitreous.evaluation.evaluator import Evaluator
from vitreous.models.config import DetectorConfig, ModelConfig
from vitreous.models.configs.adapter import Adapter, adapted
from vitreous.models.configs.detector import DetectionHeads
from vitreous.models.cost import macs
from vitreous.models.detector import Detector
from vitreous.models.zoo import Model
from vitreous.objectives.base import Objective, ObjectiveConfig, Progress, Setting
from vitreous.weights.tasks import Detection, Task

SAMPLING = 0x616E6368  # what tells the choice of anchors and regions from other draws of a sample


@dataclass(frozen=True)
class DetectionConfig(ObjectiveConfig):
    """The losses of Faster R-CNN, and with `masks` of Mask R-CNN, added up.

    `adapter`: a ViT gets convolutions beside it, with group or batch norm, and its pyramid maps of four strides
    (`models.configs.adapter`). The other fields are those of `DetectorConfig`. Raises UsageError for numbers that
    cannot be.
    """

    annotated: ClassVar[Literal["", "classes", "objects"]] = "objects"
    shard_images: ClassVar[int] = 2

    name: Literal["detection"] = "detection"
    masks: bool = False
    adapter: Adapter = "none"
    heads: DetectionHeads = "light"
    width: int = 256
    hidden: int = 1024
    finest: int = 4
    anchor: float = 8.0
    round_anchors: bool = True
    agnostic: bool = False
    proposals: int = 1000
    detections: int = 100
    nms: float = 0.5
    threshold: float = 0.05

    def check(self, model: ModelConfig, classes: tuple[str, ...], views: Any) -> None:
        """Raise UsageError for views without boxes, and a model that no heads fit."""
        if not isinstance(views, Scenes):
            raise UsageError("detection takes views of the kind scenes", "leave --views.name out")
        self.detector(model, max(1, len(classes)))

    def detector(self, backbone: ModelConfig, classes: int) -> DetectorConfig:
        """Return the config of the whole model. Raises UsageError for a backbone that no heads fit."""
        own = {field.name: getattr(self, field.name) for field in fields(DetectorConfig) if hasattr(self, field.name)}
        return DetectorConfig(**own | {"backbone": adapted(backbone, self.adapter), "classes": classes})

    @property
    def splittable(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Whether images of a batch do not see each other: not with batch norm."""
        return self.adapter != "batch"

    def build(self, model: Model, setting: Setting) -> DetectionObjective:
        """The objective of a backbone, which gets a pyramid and heads."""
        return DetectionObjective(model, self, setting)


class DetectionObjective(Objective):
    """The losses of a detector's anchors and regions, each the mean over the images.

    Takes {"images": (B, C, *image)} and lists of B: "boxes" (n, 4) float32, "labels" (n,) int64, "crowd" (n,) bool, and
    for masks "masks" (n, h, w) bool.
    """

    logged = ("objectness", "proposals", "classes", "boxes", "masks")

    def __init__(self, model: Model, config: DetectionConfig, setting: Setting) -> None:
        super().__init__()
        self.config, self.setting = config, setting
        self.model = Detector(config.detector(model.config, len(setting.classes)), model)

    def prepare(self, batch: Batch, progress: Progress) -> Batch:
        """Add "keys" (B,) int64, from which it is drawn what is learned from: a function of seed and position."""
        keys = key(self.setting.seed, SAMPLING, batch["positions"].numpy()).view("int64")
        return batch | {"keys": torch.from_numpy(keys).to(batch["images"].device)}

    def forward(self, batch: Batch) -> dict[str, Tensor]:
        losses = self.model.losses(batch["images"], batch)
        return {"loss": torch.stack([*losses.values()]).sum(), **{name: row.detach() for name, row in losses.items()}}

    def deployed(self) -> Model:
        """The detector."""
        return self.model

    def task(self) -> Task:
        """Detection."""
        return Detection(self.setting.classes, self.config.masks)

    def evaluators(self, train: Split) -> list[Evaluator]:
        """Average precision of boxes and masks."""
        return [CocoEvaluator(self.setting.classes, self.config.masks)]

    def flops(self, progress: Progress) -> float:
        """Three forward passes."""
        return 6 * macs(self.model.config)
