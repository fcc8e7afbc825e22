"""Objective of contrastive learning on image-text pairs: CLIP (arXiv:2103.00020), SigLIP (arXiv:2303.15343) and LiT
(arXiv:2111.07991).

Shapes: B pairs, C channels, N tokens of a text, E channels of an embedding.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from vitreous.data.augmentation.augment import Augment
from vitreous.data.batch import Batch
from vitreous.data.split import Split
from vitreous.errors import UsageError
from vitreous.evaluation.evaluator import Evaluator
from vitreous.evaluation.retrieval import RetrievalEvaluator
from vitreous.models.config import ModelConfig
from vitreous.models.zoo import Model
from vitreous.objectives.base import Objective, ObjectiveConfig, ObjectiveSetting, TrainingProgress
from vitreous.objectives.contrastive_loss import ContrastiveLoss, compute_contrastive_loss
from vitreous.tasks.base import Task
from vitreous.tasks.features import FeatureExtraction

MAX_SCALE = 100.0  # largest factor of the logits with the softmax loss, as in CLIP


@dataclass(frozen=True)
class ContrastiveConfig(ObjectiveConfig):
    """Options of contrastive learning.

    - `loss`: `softmax` compares each image with all texts of the batch, and each text with all images (CLIP);
      `sigmoid` classifies each pair of an image and a text (SigLIP).
    - `scale`, `bias`: initial values of the factor exp(t) and of the bias b of the logits; initial weights with a text
      encoder replace them. `softmax` has no bias.
    - `freeze_image`: whether the image encoder is frozen, as in LiT.

    Raises UsageError for invalid values.
    """

    paired: ClassVar[bool] = True
    least_batch: ClassVar[int] = 2

    name: Literal["contrastive"] = "contrastive"
    loss: ContrastiveLoss = "softmax"
    scale: float = 1 / 0.07
    bias: float = -10.0
    freeze_image: bool = False

    def __post_init__(self) -> None:
        if self.loss not in ("softmax", "sigmoid"):
            raise UsageError(f"unknown contrastive loss {self.loss}", "use softmax or sigmoid")
        if not 0 < self.scale < math.inf or not math.isfinite(self.bias):
            values = f"{self.scale:g} and {self.bias:g}"
            raise UsageError(f"objective.scale must be above 0 and objective.bias finite, got {values}")

    @property
    def can_split_batch(self) -> bool:
        """Return False, because the loss compares the pairs of a batch."""
        return False

    @property
    def ships_features(self) -> bool:
        """Return False: retrieval is evaluated, not the rank of features."""
        return False

    def check(self, model: ModelConfig, classes: tuple[str, ...], views: Any) -> None:
        """Raise UsageError for a model without a text encoder, or without a bias for the sigmoid loss, and for views
        that mix images."""
        if not model.has_text:
            raise UsageError(
                f"contrastive learning needs a model with a text encoder, not {model.name()}",
                "use --recipe siglip, clip or lit",
            )
        if self.loss == "sigmoid" and not getattr(model, "bias", False):
            raise UsageError("the sigmoid loss needs a model with a bias", "use --model.bias True")
        if not isinstance(views, Augment) or views.mixup or views.cutmix:
            problem = "contrastive learning needs one view of each image, without MixUp and CutMix"
            raise UsageError(problem, "use --mixup 0 --cutmix 0, and leave --views.name out")

    def initialise(self, model: Model) -> None:
        """Set the initial factor and bias of the logits, in place."""
        with torch.no_grad():
            model.log_scale.fill_(math.log(self.scale))
            if model.logit_bias is not None:
                model.logit_bias.fill_(self.bias)

    def build(self, model: Model, setting: ObjectiveSetting) -> ContrastiveObjective:
        """Build the objective of an image encoder with a text encoder, and freeze the image encoder if configured."""
        if self.freeze_image:
            model.backbone.requires_grad_(False)
        return ContrastiveObjective(model, self, setting)


class ContrastiveObjective(Objective):
    """Contrastive loss of images and their texts, in nats, over the batches of all processes.

    The input is {"images": (B, C, *image), "tokens": (B, N) int64}. Logs "scale", the factor of the logits, and "bias",
    which is 0 with the softmax loss.
    """

    logged: ClassVar[tuple[str, ...]] = ("scale", "bias")

    def __init__(
        self,
        model: Model,
        config: ContrastiveConfig = ContrastiveConfig(),
        setting: ObjectiveSetting = ObjectiveSetting(),
    ) -> None:
        super().__init__()
        self.model: Any = model
        self.config, self.setting = config, setting

    def train(self, mode: bool = True) -> ContrastiveObjective:
        """Set training mode; a frozen image encoder stays in evaluation mode, without dropout and stochastic depth."""
        super().train(mode)
        if self.config.freeze_image:
            self.model.backbone.eval()
        return self

    def forward(self, batch: Batch) -> dict[str, Tensor]:
        """Compute the loss and the logged scalars. Every process has to call this, because texts are exchanged."""
        model, config = self.model, self.config
        count = 0 if self.is_idle else len(batch["tokens"])
        images, texts = model.embed_images(batch["images"])[:count], model.embed_texts(batch["tokens"])[:count]
        bias = torch.zeros_like(model.log_scale) if model.logit_bias is None else model.logit_bias
        limit = math.log(MAX_SCALE) if config.loss == "softmax" else math.inf
        loss = compute_contrastive_loss(
            images, texts, model.log_scale, bias, loss=config.loss, max_log_scale=limit, ring=self.ring
        )
        scale, bias = model.log_scale.detach().float().clamp(max=limit).exp(), bias.detach().float()
        return {"loss": loss.float(), "scale": scale, "bias": bias}

    def deployed_model(self) -> Model:
        """Return the image encoder with its text encoder."""
        return self.model

    def task(self) -> Task:
        """Return the feature extraction task."""
        return FeatureExtraction()

    def evaluators(self, train: Split) -> list[Evaluator]:
        """Return the evaluator of retrieval."""
        return [RetrievalEvaluator()]

    def flops(self, progress: TrainingProgress) -> float:
        """Return the floating-point operations of a forward and a backward pass of both encoders; only forward for a
        frozen image encoder."""
        config = self.model.config
        image_passes = 1 if self.config.freeze_image else 3
        return 2 * (image_passes * config.backbone.computed_macs() + 3 * config.text.count_macs())
