"""Learning from labels: softmax cross-entropy (arXiv:2010.11929, section 4.1 and B.1)."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from vitreous.models.vit import ViT
from vitreous.nn.grid import take


class Supervised(nn.Module):
    """Mean cross-entropy of a classifier; `smoothing` mixes the targets with the uniform distribution.

    Takes {"images": (B, C, *image), "labels": (B,) int64 or (B, classes) float}; gives the "loss" in nats. The logits are
    brought to float32 before the softmax, whatever the model computes in. Where the batch has "keep", (B, K) int64, only
    those patches are encoded: patch dropout, as MAE and FLIP leave patches out (arXiv:2212.00794).
    """

    def __init__(self, model: ViT, smoothing: float = 0.0) -> None:
        super().__init__()
        self.model, self.smoothing = model, smoothing

    def forward(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        tokens = self.model.place(self.model.project(batch["images"]))
        if "keep" in batch:
            tokens = take(tokens, batch["keep"])
        logits = self.model.classify(self.model.pool(self.model.encode(tokens))).float()
        return {"loss": F.cross_entropy(logits, batch["labels"], label_smoothing=self.smoothing)}
