"""Learning from labels: softmax cross-entropy (arXiv:2010.11929, section 4.1 and B.1)."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from vitreous.models.vit import ViT
from vitreous.models.zoo import Model
from vitreous.nn.grid import take


class Supervised(nn.Module):
    """Mean cross-entropy of a classifier; `smoothing` mixes the targets with the uniform distribution.

    Takes {"images": (B, C, *image), "labels": (B,) int64 or (B, classes) float}; gives the "loss" in nats. The logits are
    brought to float32 before the softmax, whatever the model computes in. Where the batch has "keep", (B, K) int64, only
    those patches are encoded: patch dropout, as MAE and FLIP leave patches out (arXiv:2212.00794).
    """

    def __init__(self, model: Model, smoothing: float = 0.0) -> None:
        super().__init__()
        self.model, self.smoothing = model, smoothing

    def forward(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        model = self.model
        if "keep" in batch and isinstance(model, ViT):
            tokens = model.project(batch["images"])
            kept = take(model.place(tokens), batch["keep"])
            logits = model.classify(model.pool(model.encode(kept, model.places(tokens, batch["keep"])))).float()
        else:
            logits = model(batch["images"]).float()
        return {"loss": F.cross_entropy(logits, batch["labels"], label_smoothing=self.smoothing)}
