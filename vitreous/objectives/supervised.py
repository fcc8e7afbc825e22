"""Learning from labels: softmax or sigmoid cross-entropy (arXiv:2010.11929, section 4.1 and B.1; arXiv:1912.11370)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitreous.data.augmentation.augment import Augment
from vitreous.data.augmentation.volumes import VolumeViews
from vitreous.errors import UsageError
from vitreous.models.config import ModelConfig
from vitreous.models.initial import init_mimetic
from vitreous.models.zoo import Model
from vitreous.objectives.base import ObjectiveConfig, ObjectiveSetting
from vitreous.objectives.labelled import LabelledObjective
from vitreous.objectives.progressive import ProgressiveOptions
from vitreous.system.torch_types import bias_of
from vitreous.tasks.base import Task
from vitreous.tasks.classification import Classification, ClassificationLoss


@dataclass(frozen=True)
class SupervisedConfig(ProgressiveOptions, ObjectiveConfig):
    """Softmax or sigmoid cross-entropy with labels, and what is left out while it is learned (`ProgressiveOptions`).

    `loss` as `cross_entropy` has it; `smoothing` mixes targets with the uniform distribution; `class_weights` has one
    number a class, 1 on average over the training images, or none. `head_bias`: what the head's biases start at, -10
    for 21,843 classes and the sigmoid loss (big_vision). `mimetic`: attention matrices that start out as trained
    ones look (arXiv:2305.09828). Raises UsageError for numbers that cannot be.
    """

    labelled: ClassVar[bool] = True
    takes_clips: ClassVar[bool] = True
    takes_own_aspect: ClassVar[bool] = True
    takes_volumes: ClassVar[bool] = True

    name: Literal["supervised"] = "supervised"
    loss: ClassificationLoss = "softmax"
    smoothing: float = 0.0
    class_weights: tuple[float, ...] = ()
    head_bias: float = 0.0
    mimetic: bool = False

    def __post_init__(self) -> None:
        if self.loss not in ("softmax", "sigmoid", "binary"):
            raise UsageError(f"there is no loss {self.loss}", "there are softmax, sigmoid and binary")
        if not all(math.isfinite(weight) and weight >= 0 for weight in self.class_weights):
            raise UsageError("class weights must be finite and not below 0")
        if not 0 <= self.patch_dropout < 1:
            raise UsageError(f"patch_dropout must be at least 0 and below 1, not {self.patch_dropout}")

    def check(self, model: ModelConfig, classes: tuple[str, ...], views: Any) -> None:
        """Raise UsageError for another number of classes, several views, and what the model cannot leave out."""
        if not isinstance(views, Augment | VolumeViews):
            raise UsageError("learning from labels takes one view of an image", "leave out multi-crop views")
        if model.classes != len(classes):
            raise UsageError(f"the model has {model.classes} classes, the data {len(classes)}")
        if self.class_weights and len(self.class_weights) != len(classes):
            raise UsageError(
                f"{len(self.class_weights)} class weights for {len(classes)} classes", "give one for each class"
            )
        if (self.patch_dropout or self.mimetic) and not model.drops_patches:
            raise UsageError(
                "patch dropout and mimetic initialisation are for ViTs whose blocks see every patch", "leave them out"
            )
        if not 0 < self.progressive <= 1 or (self.progressive < 1 and len(model.image) != 2):
            raise UsageError(
                f"progressive must be above 0 and at most 1 (1 for other than pictures), not {self.progressive}"
            )

    def initialise(self, model: Model) -> None:
        """Set the head's biases and the attention's first matrices."""
        if self.mimetic:
            init_mimetic(model)
        head = getattr(model, "head", None)
        if self.head_bias and isinstance(head, nn.Linear) and bias_of(head) is not None:
            nn.init.constant_(head.bias, self.head_bias)

    def build(self, model: Model, setting: ObjectiveSetting) -> SupervisedObjective:
        """The objective of a classifier."""
        return SupervisedObjective(model, self, setting)


DEFAULT_CONFIG = SupervisedConfig()


class SupervisedObjective(LabelledObjective):
    """Mean cross-entropy of a classifier, in nats. Labels are (B,) int64 or (B, classes) float. Raises UsageError for
    class weights that do not fit the model."""

    class_weights: Tensor | None

    def __init__(
        self, model: Model, config: SupervisedConfig = DEFAULT_CONFIG, setting: ObjectiveSetting = ObjectiveSetting()
    ) -> None:
        super().__init__(model, config, setting)
        weights = config.class_weights
        if weights and len(weights) != model.config.classes:
            raise UsageError(
                f"{len(weights)} class weights for {model.config.classes} classes", "give one for each class, or none"
            )
        self.register_buffer("class_weights", torch.tensor(weights) if weights else None, persistent=False)

    def loss(self, outputs: Tensor, labels: Tensor) -> Tensor:
        """(B, K) float32 logits and labels -> cross-entropy in nats."""
        config = self.config
        return cross_entropy(outputs, labels, config.loss, config.smoothing, self.class_weights)

    def task(self) -> Task:
        """Classification, of one label or several to an image."""
        return Classification(self.setting.classes, multilabel=self.setting.multilabel, loss=self.config.loss)


def cross_entropy(
    logits: Tensor,
    labels: Tensor,
    loss: ClassificationLoss = "softmax",
    smoothing: float = 0.0,
    weights: Tensor | None = None,
) -> Tensor:
    """(B, K) float32 logits s, (B,) int64 or (B, K) float targets y, (K,) weights w -> a scalar in nats.

    softmax: (1/B) sum_b sum_c -w_c y_c log p_c; targets that do not add up to 1 are taken as they are.
    sigmoid: (1/B) sum_b sum_c -w_c [y_c log sigma(s_c) + (1 - y_c) log sigma(-s_c)], as big_vision, not divided by K.
    binary: the same divided by K, and whatever is in a mixed target counts whole: y > 0 is 1 (DeiT-III,
    arXiv:2204.07118).

    Class numbers stand for their one-hot vectors. Smoothing e makes y (1 - e) + e / K of y, in all three. The sum is
    divided by the number of images whatever the weights, so that parts of a batch add up to the whole.
    """
    classes = logits.shape[1]
    if loss == "softmax":
        if weights is None:
            return F.cross_entropy(logits, labels, label_smoothing=smoothing)
        return F.cross_entropy(logits, labels, weights, reduction="sum", label_smoothing=smoothing) / len(logits)
    targets = (labels if labels.ndim == 2 else F.one_hot(labels, classes)).to(logits.dtype)
    if loss == "binary":
        targets = (targets > 0).to(logits.dtype)
    targets = targets * (1 - smoothing) + smoothing / classes
    total = F.binary_cross_entropy_with_logits(logits, targets, weights, reduction="sum") / len(logits)
    return total / classes if loss == "binary" else total


def balanced_class_weights(labels: np.ndarray, classes: int) -> tuple[float, ...]:
    """(n,) class numbers or (n, K) multi-hot -> K weights, each one over the class's number of labels, 1 on average
    over all labels.

    A class without labels weighs 1.
    """
    counts = labels.sum(0, dtype=np.float64) if labels.ndim == 2 else np.bincount(labels, minlength=classes)
    present = counts > 0
    return tuple(np.where(present, counts.sum() / (present.sum() * np.maximum(counts, 1)), 1.0).tolist())
