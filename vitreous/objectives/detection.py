"""Objective of object detection with boxes, and optionally masks (arXiv:1506.01497, arXiv:1703.06870).

Shapes: B images of C channels, K classes; n objects on an image of h x w pixels.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from torch import Tensor

from vitreous.data.augmentation.scenes import SceneViews
from vitreous.data.batch import Batch
from vitreous.data.keys import derive_keys, draw_uniform
from vitreous.data.split import Split
from vitreous.errors import UsageError
from vitreous.evaluation.coco import CocoEvaluator
from vitreous.evaluation.evaluator import Evaluator
from vitreous.models.config import DetectorConfig, ModelConfig
from vitreous.models.configs.adapter import AdapterChoice, add_adapter
from vitreous.models.configs.detector import DetectionHeads, ScoreActivation
from vitreous.models.detector import Detector
from vitreous.models.zoo import Model
from vitreous.objectives.base import Objective, ObjectiveConfig, ObjectiveSetting, TrainingProgress
from vitreous.system.machine import copy_to_device
from vitreous.system.torch_types import from_numpy
from vitreous.tasks.base import Task
from vitreous.tasks.detection import Detection

SAMPLING_SALT = 0x616E6368  # makes the random numbers of anchors and regions independent of others of a sample
FEDERATED_SALT = 0x66656465  # makes the random numbers of classes independent of others of a sample


@dataclass(frozen=True)
class DetectionConfig(ObjectiveConfig):
    """The sum of the losses of Faster R-CNN, and with `masks` of Mask R-CNN.

    - `adapter`: adds a ViT-Adapter with group or batch norm to a ViT, so the pyramid's input is maps of four strides
      (`models.configs.adapter`).
    - `federated`: above 0, the region classes have the federated loss (arXiv:2103.07461). For each image, it counts the
      classes on the image, and others up to this number of classes. It requires sigmoid `scores`.
    - `frequencies`: the number of training images of each class, counted in the data, by which the other classes are
      sampled. If it is empty, all classes are equally likely.

    The other fields are those of `DetectorConfig`. Raises UsageError for invalid values.
    """

    annotated: ClassVar[Literal["", "classes", "objects"]] = "objects"
    shard_images: ClassVar[int] = 2

    name: Literal["detection"] = "detection"
    masks: bool = False
    adapter: AdapterChoice = "none"
    heads: DetectionHeads = "light"
    width: int = 256
    hidden: int = 1024
    finest: int = 4
    anchor: float = 8.0
    round_anchors: bool = True
    agnostic: bool = False
    scores: ScoreActivation = "softmax"
    federated: int = 0
    frequencies: tuple[int, ...] = ()
    proposals: int = 1000
    detections: int = 100
    nms: float = 0.5
    threshold: float = 0.05

    def check(self, model: ModelConfig, classes: tuple[str, ...], views: Any) -> None:
        """Raise UsageError for views without boxes, invalid options and an unsupported model."""
        if not isinstance(views, SceneViews):
            raise UsageError(f"detection requires views of type scenes, not {views.name}", "leave out --views.name")
        if self.federated < 0 or (self.federated and self.scores != "sigmoid"):
            problem = f"--objective.federated {self.federated} is not supported with {self.scores} scores"
            raise UsageError(problem, "use --objective.scores sigmoid, and a number of classes above 0")
        if self.frequencies and len(self.frequencies) != len(classes):
            problem = f"--objective.frequencies has {len(self.frequencies)} numbers for {len(classes)} classes"
            raise UsageError(problem, "leave it out: frequencies are counted in the data")
        self.detector(model, max(1, len(classes)))

    def fitted(self, labels: np.ndarray) -> DetectionConfig:
        """Return the config with `frequencies` counted in the labels (n, K), if the loss is federated and they are not
        set."""
        if not self.federated or self.frequencies:
            return self
        return replace(self, frequencies=tuple((labels > 0).sum(0).tolist()))

    def detector(self, backbone: ModelConfig, classes: int) -> DetectorConfig:
        """Return the config of the whole model, the backbone with pyramid and heads. Raises UsageError for an
        unsupported backbone."""
        names = [field.name for field in fields(DetectorConfig) if hasattr(self, field.name)]
        settings: dict[str, Any] = {name: getattr(self, name) for name in names}
        settings.update(backbone=add_adapter(backbone, self.adapter), classes=classes)
        return DetectorConfig(**settings)

    @property
    def can_split_batch(self) -> bool:
        """Return whether the losses of images are independent, which is not the case with batch norm."""
        return self.adapter != "batch"

    def build(self, model: Model, setting: ObjectiveSetting) -> DetectionObjective:
        """Build the objective of a backbone, to which a pyramid and heads are added."""
        return DetectionObjective(model, self, setting)


class DetectionObjective(Objective):
    """The losses of a detector's anchors and regions, each the mean over the images.

    The input is {"images": (B, C, *image)} and lists with one entry per image: "boxes" (n, 4) float32, "labels" (n,)
    int64, "crowd" (n,) bool, and with masks "masks" (n, h, w) bool.
    """

    logged = ("objectness", "proposals", "classes", "boxes", "masks")

    def __init__(self, model: Model, config: DetectionConfig, setting: ObjectiveSetting) -> None:
        super().__init__()
        self.config, self.setting = config, setting
        self.model = Detector(config.detector(model.config, len(setting.classes)), model)

    def prepare(self, batch: Batch, progress: TrainingProgress) -> Batch:
        """Add "keys" (B,) int64, seeds of the sampling of anchors and regions, derived from the run's seed and the
        positions.

        For the federated loss, also add "federated" (B, K) bool, the classes that the loss of each image counts, drawn
        by seed and position too.
        """
        device, positions = batch["images"].device, batch["positions"].numpy()
        keys = derive_keys(self.setting.seed, SAMPLING_SALT, positions).view("int64")
        batch = batch | {"keys": copy_to_device(from_numpy(keys), device)}
        if not self.config.federated:
            return batch
        classes = len(self.setting.classes)
        present = torch.stack(
            [torch.bincount(labels.cpu(), minlength=classes) > 0 for labels in batch["labels"]]
        ).numpy()
        frequencies = np.array(self.config.frequencies or (1,) * classes)
        keys = derive_keys(self.setting.seed, FEDERATED_SALT, positions)
        loss_classes = draw_federated_classes(present, frequencies, self.config.federated, keys)
        return batch | {"federated": copy_to_device(from_numpy(loss_classes), device)}

    def forward(self, batch: Batch) -> dict[str, Tensor]:
        """Compute the detector's losses by name, and their sum as `loss`; all are scalars."""
        losses = self.model.losses(batch["images"], batch)
        return {"loss": torch.stack([*losses.values()]).sum(), **{name: loss.detach() for name, loss in losses.items()}}

    def deployed_model(self) -> Model:
        """Return the detector."""
        return self.model

    def task(self) -> Task:
        """Return the detection task of the deployed model."""
        return Detection(self.setting.classes, self.config.masks)

    def evaluators(self, train: Split) -> list[Evaluator]:
        """Return the evaluator of the average precision of boxes and masks."""
        return [CocoEvaluator(self.setting.classes, self.config.masks)]

    def flops(self, progress: TrainingProgress) -> float:
        """Return the floating-point operations of a sample's training step, which costs three forward passes."""
        return 6 * self.model.config.macs()


def draw_federated_classes(present: np.ndarray, frequencies: np.ndarray, count: int, keys: np.ndarray) -> np.ndarray:
    """Sample the classes that the federated loss counts: `present` (B, K) bool, the classes on each image,
    `frequencies` (K,), the number of images of each class, `keys` (B,) uint64 -> (B, K) bool.

    They are the classes on an image, and others until there are `count`. The others are sampled without replacement
    with probabilities proportional to the square root of their frequency (arXiv:2103.07461); classes of no image are
    excluded.

    detectron2 samples for all images of a GPU together. Here each image is sampled separately, so the result does not
    depend on the number of processes. Sampling without replacement with weights w is equivalent to selecting the
    smallest of exponentially distributed times with rates w:

        for image in range(B):
            times = {k: -log(1 - u[image, k]) / sqrt(n[k]) for k in range(K) if n[k] and not present[image, k]}
            missing = max(0, count - number of classes on the image)
            counted[image] = classes on the image and the `missing` classes with the smallest times
    """
    with np.errstate(divide="ignore"):
        times = -np.log1p(-draw_uniform(keys, len(frequencies))) / np.sqrt(frequencies)[None]
    times = np.where(present, -1.0, np.where(frequencies[None] > 0, times, np.inf))
    rank = times.argsort(1, kind="stable").argsort(1, kind="stable")
    return present | ((rank < count) & np.isfinite(times))
