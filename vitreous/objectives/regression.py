"""Objective of regression: squared, absolute or Huber loss of standardised targets, of which some may be missing for an
image.

Shapes: B images, n training images, T regression targets.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, Self, get_args

import numpy as np
import torch
from torch import Tensor

from vitreous.data.augmentation.augment import Augment
from vitreous.data.augmentation.volumes import VolumeViews
from vitreous.data.batch import Batch
from vitreous.errors import UsageError
from vitreous.models.config import ModelConfig
from vitreous.models.initial import init_truncated_normal
from vitreous.models.zoo import Model
from vitreous.objectives.base import ObjectiveConfig, ObjectiveSetting, TrainingProgress
from vitreous.objectives.labelled import LabelledObjective
from vitreous.objectives.progressive import ProgressiveOptions
from vitreous.system.machine import get_device_table
from vitreous.tasks.base import Task
from vitreous.tasks.regression import Regression as RegressionTask

ValueLoss = Literal["mse", "l1", "huber"]


@dataclass(frozen=True)
class RegressionConfig(ProgressiveOptions, ObjectiveConfig):
    """Options of the regression loss, with patch dropout and progressive resolution (`ProgressiveOptions`).

    - `loss`: `mse`, `l1`, or `huber` with `delta`, in standard deviations of a target.
    - `mean`, `std`, `present`: one number per target, computed from the training images: mean and standard deviation of
      its values, and the share of images that have a value.
    - `initial_std`: standard deviation of the initial weights of linear layers, a truncated normal distribution; None
      keeps the initialisation of the model. 0.02, as in timm and DeiT, was better on small datasets
      (docs/guides/regression.md).

    Raises UsageError for invalid values.
    """

    labelled: ClassVar[bool] = True
    of_values: ClassVar[bool] = True
    takes_clips: ClassVar[bool] = True
    takes_own_aspect: ClassVar[bool] = True
    takes_volumes: ClassVar[bool] = True

    name: Literal["regression"] = "regression"
    loss: ValueLoss = "mse"
    delta: float = 1.0
    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()
    present: tuple[float, ...] = ()
    initial_std: float | None = None

    def __post_init__(self) -> None:
        if self.loss not in get_args(ValueLoss):
            raise UsageError(f"unknown regression loss {self.loss}", "use mse, l1 or huber")
        if not 0 < self.delta < math.inf:
            raise UsageError(f"delta must be above 0 and finite, got {self.delta}")
        if not len(self.mean) == len(self.std) == len(self.present):
            raise UsageError(
                "mean, std and present must have one number per target",
                "leave them out: they are computed from the training images",
            )
        if not all(value > 0 for value in (*self.std, *self.present)):
            raise UsageError(
                "std and present must be above 0 for every target",
                "leave them out: they are computed from the training images",
            )
        if self.initial_std is not None and not 0 < self.initial_std < math.inf:
            raise UsageError(f"initial_std must be above 0 and finite, got {self.initial_std}")
        if not 0 <= self.patch_dropout < 1:
            raise UsageError(f"patch_dropout must be at least 0 and below 1, got {self.patch_dropout}")

    def check(self, model: ModelConfig, classes: tuple[str, ...], views: Any) -> None:
        """Raise UsageError for another number of targets than the data's, for views that mix images, and for options
        that the model does not support."""
        if not isinstance(views, Augment | VolumeViews):
            raise UsageError(f"regression does not support views of type {views.name}", "leave out --views.name")
        if isinstance(views, VolumeViews) and len(model.image) == 2:
            raise UsageError("volume views require volumes or signals", "leave out --views.name")
        if isinstance(views, Augment) and (views.mixup or views.cutmix):
            raise UsageError(
                "MixUp and CutMix mix classes, so regression does not support them", "use --mixup 0 --cutmix 0"
            )
        if model.classes != len(classes):
            raise UsageError(f"the model has {model.classes} outputs, but the data have {len(classes)} targets")
        if self.patch_dropout and not model.drops_patches:
            problem = "patch dropout requires a ViT whose blocks attend to all patches"
            raise UsageError(problem, "set --objective.patch-dropout 0")
        if not 0 < self.progressive <= 1 or (self.progressive < 1 and len(model.image) != 2):
            problem = f"--objective.progressive must be above 0 and at most 1, or 1 for volumes; got {self.progressive}"
            raise UsageError(problem, "set --objective.progressive 1")

    def fitted(self, labels: np.ndarray) -> Self:
        """Return the config with mean, standard deviation and share of the values of training images, labels (n, T)
        with NaN for missing values."""
        if self.mean:
            return self
        is_present = ~np.isnan(labels)
        return replace(
            self,
            mean=tuple(np.nanmean(labels, 0).tolist()),
            std=tuple(np.nanstd(labels, 0).tolist()),
            present=tuple(is_present.mean(0).tolist()),
        )

    def initialise(self, model: Model) -> None:
        """Draw the weights of the linear layers from a truncated normal distribution with standard deviation
        `initial_std`, in place; no effect if it is None."""
        if self.initial_std is not None:
            init_truncated_normal(model, self.initial_std)

    def build(self, model: Model, setting: ObjectiveSetting) -> RegressionObjective:
        """Build the objective of a regression model."""
        return RegressionObjective(model, self, setting)


class RegressionObjective(LabelledObjective):
    """Mean loss of predicted values, in standard deviations of their target.

    Labels are (B, T) float64 in the targets' units, NaN if missing; `prepare` standardises them.
    """

    weights: Tensor

    def __init__(self, model: Model, config: RegressionConfig, setting: ObjectiveSetting = ObjectiveSetting()) -> None:
        super().__init__(model, config, setting)
        self.register_buffer("weights", 1 / torch.tensor(config.present), persistent=False)

    def prepare(self, batch: Batch, progress: TrainingProgress) -> Batch:
        """Standardise the labels in their dtype, then resize the images and draw the patches to encode."""
        labels = batch["labels"]
        mean, std = (
            get_device_table(build_statistics_tensor, labels.device, labels.dtype, values)
            for values in (self.config.mean, self.config.std)
        )
        return super().prepare({**batch, "labels": ((labels - mean) / std).float()}, progress)

    def loss(self, outputs: Tensor, labels: Tensor) -> Tensor:
        """Compute `value_loss` of float32 outputs (B, T) and standardised labels (B, T), a scalar."""
        return value_loss(outputs, labels, self.config.loss, delta=self.config.delta, weights=self.weights)

    def task(self) -> Task:
        """Return the regression task, with the statistics that standardise outputs."""
        return RegressionTask(self.setting.targets, self.config.mean, self.config.std)


def build_statistics_tensor(dtype: torch.dtype, values: tuple[float, ...]) -> Tensor:
    """Build the (T,) tensor of a statistic, with one value per regression target."""
    return torch.tensor(values, dtype=dtype)


def value_loss(
    outputs: Tensor, labels: Tensor, loss: ValueLoss, *, delta: float = 1.0, weights: Tensor | None = None
) -> Tensor:
    """Compute the regression loss, a scalar: (1/BT) sum_b sum_t w_t l(p_bt - y_bt) over the labels that are present,
    for outputs p (B, T), labels y (B, T), NaN if missing, and weights w (T,).

    - mse: l(e) = e^2.
    - l1: l(e) = |e|.
    - huber: l(e) = e^2 / 2 up to |e| = delta, then delta (|e| - delta / 2).

    With w_t one over the share of training images that have target t, all targets have the same weight. The sum is
    always divided by B T, so the losses of micro-batches add up to the loss of the batch.
    """
    errors = torch.where(labels.isnan(), 0.0, outputs - labels.nan_to_num())
    distances = errors.abs()
    if loss == "mse":
        losses = errors.square()
    elif loss == "l1":
        losses = distances
    else:
        losses = torch.where(distances <= delta, errors.square() / 2, delta * (distances - delta / 2))
    return (losses if weights is None else losses * weights).mean()
