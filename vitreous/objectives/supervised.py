"""Learning from labels: softmax or sigmoid cross-entropy (arXiv:2010.11929, section 4.1 and B.1; arXiv:1912.11370)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitreous.errors import UsageError
from vitreous.models.vit import ViT
from vitreous.models.zoo import Model
from vitreous.nn.grid import take

Loss = Literal["softmax", "sigmoid", "binary"]


class Supervised(nn.Module):
    """Mean cross-entropy of a classifier; `smoothing` mixes the targets with the uniform distribution.

    Takes {"images": (B, C, *image), "labels": (B,) int64 or (B, classes) float}; gives the "loss" in nats, as
    `cross_entropy` says. The logits are brought to float32 before it, whatever the model computes in. Where the batch
    has "keep", (B, K) int64, only those patches are encoded: patch dropout, as MAE and FLIP leave patches out
    (arXiv:2212.00794). `class_weights` has one number for each class, or none. Raises UsageError for a loss that there
    is not, and for weights that do not fit.
    """

    class_weights: Tensor | None

    def __init__(
        self, model: Model, smoothing: float = 0.0, loss: Loss = "softmax", class_weights: Sequence[float] = ()
    ) -> None:
        super().__init__()
        if loss not in ("softmax", "sigmoid", "binary"):
            raise UsageError(f"there is no loss {loss}", "there are softmax, sigmoid and binary")
        if class_weights and len(class_weights) != model.config.classes:
            raise UsageError(
                f"{len(class_weights)} class weights for {model.config.classes} classes",
                "give one for each class, or none",
            )
        if not all(math.isfinite(weight) and weight >= 0 for weight in class_weights):
            raise UsageError("class weights must be finite and not below 0")
        self.model, self.smoothing = model, smoothing
        self.loss: Loss = loss
        self.register_buffer("class_weights", torch.tensor(class_weights) if class_weights else None, persistent=False)

    def forward(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        model = self.model
        if "keep" in batch and isinstance(model, ViT):
            tokens = model.project(batch["images"])
            kept = take(model.place(tokens), batch["keep"])
            logits = model.answer(kept, model.places(tokens, batch["keep"])).float()
        else:
            logits = model(batch["images"]).float()
        return {"loss": cross_entropy(logits, batch["labels"], self.loss, self.smoothing, self.class_weights)}


def cross_entropy(
    logits: Tensor, labels: Tensor, loss: Loss = "softmax", smoothing: float = 0.0, weights: Tensor | None = None
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


def balanced(labels: np.ndarray, classes: int) -> tuple[float, ...]:
    """(n,) class numbers or (n, K) multi-hot -> K weights, each one over the class's number of labels, 1 on average
    over all labels.

    A class without labels weighs 1.
    """
    counts = labels.sum(0, dtype=np.float64) if labels.ndim == 2 else np.bincount(labels, minlength=classes)
    present = counts > 0
    return tuple(np.where(present, counts.sum() / (present.sum() * np.maximum(counts, 1)), 1.0).tolist())
