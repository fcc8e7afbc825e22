"""Objective of semantic segmentation with class maps.

Shapes: B images of C channels, K classes. Pixels of class `IGNORE_INDEX` are excluded from the loss.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from vitreous.data.annotations.target import IGNORE_INDEX
from vitreous.data.augmentation.scenes import SceneViews
from vitreous.data.augmentation.volumes import VolumeViews
from vitreous.data.batch import Batch
from vitreous.data.split import Split
from vitreous.errors import UsageError
from vitreous.evaluation.evaluator import Evaluator
from vitreous.evaluation.pixels import SegmentationEvaluator
from vitreous.models.config import ModelConfig, SegmenterConfig
from vitreous.models.configs.adapter import AdapterChoice, TokenSource, add_adapter
from vitreous.models.configs.segmenter import DenseHead
from vitreous.models.segmenter import Segmenter
from vitreous.models.zoo import Model
from vitreous.objectives.base import Objective, ObjectiveConfig, ObjectiveSetting, TrainingProgress
from vitreous.tasks.base import Task
from vitreous.tasks.segmentation import Segmentation


@dataclass(frozen=True)
class SegmentationConfig(ObjectiveConfig):
    """Cross-entropy of pixels, plus `dice` times the Dice loss of classes (arXiv:1606.04797).

    - `class_weights`: the weight of each class in the cross-entropy; if it is empty, all classes have the same weight.
    - `head`, `head_width`, `head_dropout`: those of `SegmenterConfig`.
    - `adapter`: adds a ViT-Adapter with group or batch norm to a ViT, so the head's input is maps of four strides
      (`models.configs.adapter`); `adapter_tokens` is `token_source` of `AdapterConfig`.

    Raises UsageError for values out of range.
    """

    annotated: ClassVar[Literal["", "classes", "objects"]] = "classes"

    name: Literal["segmentation"] = "segmentation"
    head: DenseHead = "unet"
    head_width: int = 16
    head_dropout: float = 0.0
    adapter: AdapterChoice = "none"
    adapter_tokens: TokenSource = "interaction"
    dice: float = 1.0
    class_weights: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if self.dice < 0:
            raise UsageError(f"dice must be at least 0, got {self.dice}")
        if not all(math.isfinite(weight) and weight > 0 for weight in self.class_weights):
            raise UsageError(f"objective.class_weights must be finite and above 0, got {self.class_weights}")

    def check(self, model: ModelConfig, classes: tuple[str, ...], views: Any) -> None:
        """Raise UsageError for views without class maps, a wrong number of class weights, and an unsupported model."""
        views_class = SceneViews if len(model.image) == 2 else VolumeViews
        if not isinstance(views, views_class):
            raise UsageError(
                f"segmentation of these data requires views of type {views_class.name}, not {views.name}",
                "leave out --views.name",
            )
        if self.class_weights and len(self.class_weights) != len(classes):
            problem = f"--objective.class_weights has {len(self.class_weights)} numbers for {len(classes)} classes"
            raise UsageError(problem, "set one weight for each class")
        self.segmenter(model, max(2, len(classes)))

    def segmenter(self, backbone: ModelConfig, classes: int) -> SegmenterConfig:
        """Return the config of the whole model, the backbone with its head. Raises UsageError for an unsupported
        backbone."""
        return SegmenterConfig(
            backbone=add_adapter(backbone, self.adapter, self.adapter_tokens),
            head=self.head,
            classes=classes,
            head_width=self.head_width,
            head_dropout=self.head_dropout,
        )

    @property
    def draws_in_forward(self) -> bool:
        """Return whether the head has dropout."""
        return self.head_dropout > 0

    @property
    def can_split_batch(self) -> bool:
        """Return whether the losses of images are independent, which is not the case with batch norm."""
        return self.adapter != "batch"

    def build(self, model: Model, setting: ObjectiveSetting) -> SegmentationObjective:
        """Build the objective of a backbone, to which a head is added."""
        return SegmentationObjective(model, self, setting)


class SegmentationObjective(Objective):
    """Cross-entropy and Dice loss of a backbone with a dense head.

    The input is {"images": (B, C, *image), "classes": (B, *image) int32}. Logits are cast to float32 before the loss.
    """

    capturable: ClassVar[bool] = True

    logged = ("cross_entropy", "dice")
    class_weights: Tensor | None

    def __init__(self, model: Model, config: SegmentationConfig, setting: ObjectiveSetting) -> None:
        super().__init__()
        self.config, self.setting = config, setting
        self.model = Segmenter(config.segmenter(model.config, len(setting.classes)), model)
        weights = torch.tensor(config.class_weights) if config.class_weights else None
        self.register_buffer("class_weights", weights, persistent=False)

    def forward(self, batch: Batch) -> dict[str, Tensor]:
        """Compute the loss and its terms, cross-entropy and Dice loss, as scalars."""
        logits, classes = self.model(batch["images"]).float(), batch["classes"].long()
        config = self.config
        entropy = pixel_cross_entropy(logits, classes, self.class_weights)
        dice = dice_loss(logits, classes) if config.dice else entropy.new_zeros(())
        return {"loss": entropy + config.dice * dice, "cross_entropy": entropy.detach(), "dice": dice.detach()}

    def deployed_model(self) -> Model:
        """Return the backbone with its head."""
        return self.model

    def task(self) -> Task:
        """Return the segmentation task of the deployed model."""
        return Segmentation(self.setting.classes)

    def evaluators(self, train: Split) -> list[Evaluator]:
        """Return the evaluator of mean IoU, Dice and pixel accuracy."""
        return [SegmentationEvaluator(self.setting.classes)]

    def flops(self, progress: TrainingProgress) -> float:
        """Return the floating-point operations of a sample's training step, which costs three forward passes."""
        return 6 * self.model.config.macs()


def pixel_cross_entropy(logits: Tensor, classes: Tensor, weights: Tensor | None = None) -> Tensor:
    """Compute the cross-entropy of pixels, a scalar in nats: logits (B, K, *image) float32, classes (B, *image) int64,
    weights of classes (K,) float32.

    It is the mean over the labelled pixels of each image, weighted by their class, then the mean over the images; 0 for
    an image without labelled pixels.

        for each image: sum(-w[class of i] log p[class of i] for pixels i with a class) / sum(w[class of i])
    """
    labelled = classes != IGNORE_INDEX
    targets = classes.where(labelled, 0)
    pixel_weights = labelled if weights is None else labelled * weights[targets]
    losses = F.cross_entropy(logits, targets, reduction="none") * pixel_weights
    total = pixel_weights.flatten(1).sum(1)
    return (losses.flatten(1).sum(1) / (total.clamp(min=1) if weights is None else total.clamp(min=1e-6))).mean()


def dice_loss(logits: Tensor, classes: Tensor, smooth: float = 1.0) -> Tensor:
    """Compute 1 - Dice, a scalar that is the mean over images and classes: logits (B, K, *image) float32, classes
    (B, *image) int64.

    For probabilities p and one-hot classes y, over the pixels that have a class (arXiv:1606.04797, with plain sums in
    the denominator):

        1 - (2 sum(p y) + smooth) / (sum(p) + sum(y) + smooth)
    """
    labelled = (classes != IGNORE_INDEX)[:, None]
    probabilities = logits.softmax(1) * labelled
    one_hot = torch.zeros_like(probabilities).scatter_(1, classes[:, None].clamp(min=0), 1.0) * labelled
    axes = tuple(range(2, logits.ndim))
    overlap, total = (probabilities * one_hot).sum(axes), probabilities.sum(axes) + one_hot.sum(axes)
    return (1 - (2 * overlap + smooth) / (total + smooth)).mean()
