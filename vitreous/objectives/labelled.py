"""Base class of objectives with labels for whole images: batches are mixed, resized and reduced by patch dropout, and
the head's outputs are compared with the labels."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, ClassVar

from torch import Tensor

from vitreous.data.augmentation.augment import Augment
from vitreous.data.batch import Batch
from vitreous.data.split import Split
from vitreous.evaluation.evaluator import Evaluator, TaskEvaluator
from vitreous.models.packed import PackedViT
from vitreous.models.zoo import Model
from vitreous.objectives.base import Objective, ObjectiveSetting, TrainingProgress
from vitreous.objectives.progressive import draw_patches, image_size_at, progressive_macs, resize_images


class LabelledObjective(Objective):
    """Mean loss of a model's outputs for images, which subclasses compute.

    Takes {"images": (B, C, *image), "labels": (B, ...)}. The outputs are cast to float32 before the loss. If the batch
    has "keep", (B, K) int64, only those patches are encoded: patch dropout, as in MAE and FLIP (arXiv:2212.00794).
    "images" may be a list of B images (C, height, width), and "keep" then a list of (K_i,). They are packed into
    sequences without attention between images, and each has the same weight in the loss (NaViT, arXiv:2307.06304).
    """

    capturable: ClassVar[bool] = True

    def __init__(self, model: Model, config: Any, setting: ObjectiveSetting) -> None:
        super().__init__()
        self.model: Model = model
        self.config, self.setting = config, setting

    @abstractmethod
    def loss(self, outputs: Tensor, labels: Tensor) -> Tensor:
        """(B, K) float32 outputs and the labels of the batch -> a scalar."""

    def prepare(self, batch: Batch, progress: TrainingProgress) -> Batch:
        """Mix, resize, and draw the patches to encode."""
        setting, config, position = self.setting, self.config, int(batch["positions"][0])
        classes = self.model.config.classes
        drops = config.patch_dropout and progress.samples < config.patch_dropout_until * progress.total
        images: Tensor | list[Tensor] = batch["images"]
        if isinstance(images, list):
            if drops:
                batch = {**batch, "keep": self.draw_patches_per_image(images, position)}
            return batch
        labels = batch["labels"]
        if isinstance(setting.views, Augment):
            images, labels = setting.views.mix_batch(
                images, labels, classes=classes, seed=setting.seed, batch=position, offset=setting.repeats
            )
        images = resize_images(images, image_size_at(config, self.model.config, progress.samples, progress.total))
        batch = {**batch, "images": images, "labels": labels}
        if drops:
            patch = self.model.config.patch
            batch["keep"] = draw_patches(images, patch, config.patch_dropout, setting.seed, position)
        return batch

    def draw_patches_per_image(self, images: list[Tensor], position: int) -> list[Tensor]:
        """B images (C, height, width), the first at `position` of the stream -> the patches (K_i,) to keep."""
        patch, dropout, seed = self.model.config.patch, self.config.patch_dropout, self.setting.seed
        return [
            draw_patches(image[None], patch, dropout, seed, position + index)[0] for index, image in enumerate(images)
        ]

    def forward(self, batch: Batch) -> dict[str, Tensor]:
        model = self.model
        if isinstance(batch["images"], list):
            packed = PackedViT(model)  # checks the config
            outputs = packed(batch["images"], batch.get("keep")).float()
        elif "keep" in batch:
            outputs = model.forward_patches(batch["images"], batch["keep"]).float()
        else:
            outputs = model(batch["images"]).float()
        return {"loss": self.loss(outputs, batch["labels"])}

    def deployed_model(self) -> Model:
        """Return the model with its head."""
        return self.model

    def evaluators(self, train: Split) -> list[Evaluator]:
        """Return the metrics of the task."""
        return [TaskEvaluator(self.task())]

    def flops(self, progress: TrainingProgress) -> float:
        """Three forward passes, without dropped patches and pixels."""
        config, tokens = self.model.config, self.setting.tokens
        if tokens:  # a strip with the same number of patches
            config = config.with_options(image=(tokens * config.patch[0], config.patch[1]))
        return 6 * progressive_macs(self.config, config, progress.samples, progress.total)
