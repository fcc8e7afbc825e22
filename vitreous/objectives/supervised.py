"""Objective of image classification: softmax or sigmoid cross-entropy (arXiv:2010.11929, sections 4.1 and B.1;
arXiv:1912.11370).

Shapes: B images, K classes.
"""

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
from vitreous.system.torch_types import get_bias
from vitreous.tasks.base import Task
from vitreous.tasks.classification import Classification, ClassificationLoss


@dataclass(frozen=True)
class SupervisedConfig(ProgressiveOptions, ObjectiveConfig):
    """Options of softmax or sigmoid cross-entropy with labels, with patch dropout and progressive resolution
    (`ProgressiveOptions`).

    - `loss`: a loss of `cross_entropy`; `smoothing` mixes targets with the uniform distribution.
    - `class_weights`: one number per class, 1 on average over the training images; () for no weights.
    - `head_bias`: initial value of the head's biases, -10 for 21,843 classes and the sigmoid loss (big_vision).
    - `mimetic`: mimetic initialisation of attention (arXiv:2305.09828).

    Raises UsageError for invalid values.
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
            raise UsageError(f"unknown loss {self.loss}", "use softmax, sigmoid or binary")
        if not all(math.isfinite(weight) and weight >= 0 for weight in self.class_weights):
            raise UsageError(f"class_weights must be finite and at least 0, got {self.class_weights}")
        if not 0 <= self.patch_dropout < 1:
            raise UsageError(f"patch_dropout must be at least 0 and below 1, got {self.patch_dropout}")

    def check(self, model: ModelConfig, classes: tuple[str, ...], views: Any) -> None:
        """Raise UsageError for another number of classes than the data's, for several views, and for options that the
        model does not support."""
        if not isinstance(views, Augment | VolumeViews):
            problem = f"classification does not support views of type {views.name}"
            raise UsageError(problem, "leave out --views.name")
        if model.classes != len(classes):
            raise UsageError(f"the model has {model.classes} classes, but the data have {len(classes)}")
        if self.class_weights and len(self.class_weights) != len(classes):
            raise UsageError(
                f"--objective.class_weights has {len(self.class_weights)} numbers for {len(classes)} classes",
                "set one weight for each class",
            )
        if (self.patch_dropout or self.mimetic) and not model.drops_patches:
            raise UsageError(
                "patch dropout and mimetic initialisation require a ViT whose blocks attend to all patches",
                "leave them out",
            )
        if not 0 < self.progressive <= 1 or (self.progressive < 1 and len(model.image) != 2):
            raise UsageError(
                f"progressive must be above 0 and at most 1 (1 for clips, volumes and signals), got {self.progressive}"
            )

    def initialise(self, model: Model) -> None:
        """Initialise the head's biases, and with `mimetic` the attention matrices."""
        if self.mimetic:
            init_mimetic(model)
        head = getattr(model, "head", None)
        if self.head_bias and isinstance(head, nn.Linear) and get_bias(head) is not None:
            nn.init.constant_(head.bias, self.head_bias)

    def build(self, model: Model, setting: ObjectiveSetting) -> SupervisedObjective:
        """Build the objective of a classifier."""
        return SupervisedObjective(model, self, setting)


DEFAULT_CONFIG = SupervisedConfig()


class SupervisedObjective(LabelledObjective):
    """Mean cross-entropy of a classifier, in nats.

    Labels are (B,) int64 or (B, K) float. Raises UsageError for a wrong number of class weights.
    """

    class_weights: Tensor | None

    def __init__(
        self, model: Model, config: SupervisedConfig = DEFAULT_CONFIG, setting: ObjectiveSetting = ObjectiveSetting()
    ) -> None:
        super().__init__(model, config, setting)
        weights = config.class_weights
        if weights and len(weights) != model.config.classes:
            raise UsageError(
                f"class_weights has {len(weights)} numbers for {model.config.classes} classes",
                "set one weight for each class, or leave it out",
            )
        self.register_buffer("class_weights", torch.tensor(weights) if weights else None, persistent=False)

    def loss(self, outputs: Tensor, labels: Tensor) -> Tensor:
        """Compute the cross-entropy in nats, a scalar, of float32 logits (B, K) and labels."""
        config = self.config
        return cross_entropy(outputs, labels, config.loss, config.smoothing, self.class_weights)

    def task(self) -> Task:
        """Return the classification task, single-label or multi-label."""
        return Classification(self.setting.classes, multilabel=self.setting.multilabel, loss=self.config.loss)


def cross_entropy(
    logits: Tensor,
    labels: Tensor,
    loss: ClassificationLoss = "softmax",
    smoothing: float = 0.0,
    weights: Tensor | None = None,
) -> Tensor:
    """Compute the classification loss, a scalar in nats: logits s (B, K) float32, targets y (B,) int64 or (B, K) float,
    weights w (K,).

    - softmax: (1/B) sum_b sum_c -w_c y_c log p_c; targets need not sum to 1.
    - sigmoid: (1/B) sum_b sum_c -w_c [y_c log sigma(s_c) + (1 - y_c) log sigma(-s_c)], not divided by K, as in
      big_vision.
    - binary: the sigmoid loss divided by K, with mixed targets binarised: y > 0 becomes 1 (DeiT-III, arXiv:2204.07118).

    Class indices are converted to one-hot vectors. Smoothing e replaces y by y (1 - e) + e / K in all three losses. The
    sum is always divided by the number of images, so micro-batches add up to the batch.
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


def balanced_class_weights(labels: np.ndarray, num_classes: int) -> tuple[float, ...]:
    """Compute class weights, K floats, inverse to the number of labels of a class and 1 on average over all labels:
    labels (n,) class indices or (n, K) multi-hot.

    A class without labels has weight 1.
    """
    counts = labels.sum(0, dtype=np.float64) if labels.ndim == 2 else np.bincount(labels, minlength=num_classes)
    present = counts > 0
    return tuple(np.where(present, counts.sum() / (present.sum() * np.maximum(counts, 1)), 1.0).tolist())
