"""Base class of objectives with image-level labels: it mixes and resizes batches, drops patches, and compares the
head's outputs with the labels.

Shapes: B images, K outputs, k patches that patch dropout keeps.
"""

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
    """Base class for the mean loss of a model's outputs per image; subclasses define the loss.

    The input is {"images": (B, C, *image), "labels": (B, ...)}. Outputs are cast to float32 before the loss.

    - With patch dropout, "keep" (B, k) int64 contains the indices of the patches to encode, as in MAE and FLIP
      (arXiv:2212.00794).
    - At native aspect ratio, "images" is a list of B images (C, height, width), and "keep" a list of (k_i,). The images
      are packed into sequences without attention between images, and each has the same weight in the loss
      (NaViT, arXiv:2307.06304).
    """

    capturable: ClassVar[bool] = True

    def __init__(self, model: Model, config: Any, setting: ObjectiveSetting) -> None:
        super().__init__()
        self.model: Model = model
        self.config, self.setting = config, setting

    @abstractmethod
    def loss(self, outputs: Tensor, labels: Tensor) -> Tensor:
        """Compute the loss, a scalar, of float32 outputs (B, K) and the labels of the batch."""

    def prepare(self, batch: Batch, progress: TrainingProgress) -> Batch:
        """Mix and resize the images, and draw the patches to encode."""
        setting, config, position = self.setting, self.config, int(batch["positions"][0])
        classes = self.model.config.classes
        drops_patches = config.patch_dropout and progress.samples < config.patch_dropout_until * progress.total
        images: Tensor | list[Tensor] = batch["images"]
        if isinstance(images, list):
            if drops_patches:
                batch = {**batch, "keep": self.draw_patches_per_image(images, position)}
            return batch
        labels = batch["labels"]
        if isinstance(setting.views, Augment):
            images, labels = setting.views.mix_batch(
                images, labels, classes=classes, seed=setting.seed, batch=position, offset=setting.repeats
            )
        images = resize_images(images, image_size_at(config, self.model.config, progress.samples, progress.total))
        batch = {**batch, "images": images, "labels": labels}
        if drops_patches:
            patch = self.model.config.patch
            batch["keep"] = draw_patches(images, patch, config.patch_dropout, setting.seed, position)
        return batch

    def draw_patches_per_image(self, images: list[Tensor], position: int) -> list[Tensor]:
        """Draw the patches to keep of each image (C, height, width): a list of (k_i,); the first image is at `position`
        of the run's stream."""
        patch, dropout, seed = self.model.config.patch, self.config.patch_dropout, self.setting.seed
        return [
            draw_patches(image[None], patch, dropout, seed, position + index)[0] for index, image in enumerate(images)
        ]

    def forward(self, batch: Batch) -> dict[str, Tensor]:
        """Compute the loss, a scalar, of the model's outputs for the batch: packed, with dropped patches, or of whole
        images."""
        model = self.model
        if isinstance(batch["images"], list):
            packed_model = PackedViT(model)  # raises UsageError for a model that does not support packing
            outputs = packed_model(batch["images"], batch.get("keep")).float()
        elif "keep" in batch:
            outputs = model.forward_patches(batch["images"], batch["keep"]).float()
        else:
            outputs = model(batch["images"]).float()
        return {"loss": self.loss(outputs, batch["labels"])}

    def deployed_model(self) -> Model:
        """Return the model with its head."""
        return self.model

    def evaluators(self, train: Split) -> list[Evaluator]:
        """Return the evaluator of the task's metrics."""
        return [TaskEvaluator(self.task())]

    def flops(self, progress: TrainingProgress) -> float:
        """Return the floating-point operations of a sample's training step, which costs three forward passes, without
        dropped patches and pixels."""
        config, tokens = self.model.config, self.setting.tokens
        if tokens:  # the cost depends on the number of patches: use an image of one column of patches
            config = config.with_options(image=(tokens * config.patch[0], config.patch[1]))
        return 6 * progressive_macs(self.config, config, progress.samples, progress.total)
