"""Linear heads of the published protocols, trained together on the features of one frozen model.

Shapes: B images per batch, N features per image for all heads, d input features of one head, K classes.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.sgd import sgd

from vitreous.evaluation.linear import compute_loss_and_gradient
from vitreous.inference.engine import remove_head
from vitreous.models.zoo import Model
from vitreous.training.update_rules import lars_trust_ratios

SGD_MOMENTUM = 0.9
INIT_STD = 0.01  # standard deviation of a head's initial weights
MAE_BATCH_NORM_EPS, MAE_BATCH_NORM_MOMENTUM = (1e-6, 0.1)
BASE_BATCH_SIZE = 256  # batch size of the base learning rate
LOGITS_CHUNK = 4_096  # images per forward pass of a head


@dataclass(frozen=True)
class HeadConfig:
    """Training settings of one linear head.

    `lr` is the learning rate for a batch of 256 images, `reading` the input features. If `normed`, the inputs go
    through a batch norm without affine weights.
    """

    lr: float
    reading: HeadInput
    optimizer: Literal["sgd", "lars"] = "sgd"
    normed: bool = False

    def scale_lr(self, batch: int) -> float:
        """Return the learning rate for a batch size, by linear scaling."""
        return self.lr * batch / BASE_BATCH_SIZE


class LinearHead:
    """A linear classifier with weights (K, d) and its optimizer state; its inputs are `columns` (d,) of N features.

    The initial weights depend only on the configuration and `seed`, not on other heads.
    """

    def __init__(self, config: HeadConfig, columns: list[int], classes: int, seed: int, *, device: str = "cpu") -> None:
        self.config = config
        # contiguous columns become a slice, which selects a view instead of a copy
        is_contiguous = columns == list(range(columns[0], columns[-1] + 1))
        self.columns = slice(columns[0], columns[-1] + 1) if is_contiguous else torch.tensor(columns, device=device)
        weight = torch.empty(classes, len(columns))
        generator = torch.Generator().manual_seed(seed)
        if config.optimizer == "lars":
            torch.nn.init.trunc_normal_(weight, std=INIT_STD, generator=generator)
        else:
            weight.normal_(std=INIT_STD, generator=generator)
        self.weight, self.bias = weight.to(device), torch.zeros(classes, device=device)
        self.momenta: list[Tensor | None] = [torch.zeros_like(self.weight), torch.zeros_like(self.bias)]
        self.mean, self.variance = torch.zeros(len(columns), device=device), torch.ones(len(columns), device=device)

    def select_inputs(self, features: Tensor, training: bool = False) -> Tensor:
        """Select the head's inputs from all features, (B, N) -> (B, d), and apply its batch norm if it has one.

        With `training`, the norm uses the moments of the batch; otherwise the running averages.
        """
        x = features[:, self.columns]
        if not self.config.normed:
            return x
        return F.batch_norm(
            x, self.mean, self.variance, training=training, momentum=MAE_BATCH_NORM_MOMENTUM, eps=MAE_BATCH_NORM_EPS
        )

    def step(self, features: Tensor, labels: Tensor, factor: float) -> None:
        """Take an SGD or LARS step on features (B, N) and labels (B,) int64.

        `factor` multiplies the learning rate, which is scaled to the batch size.
        """
        x = self.select_inputs(features, training=True)
        _, logit_gradients = compute_loss_and_gradient(x @ self.weight.T + self.bias, labels)
        gradients = [logit_gradients.T @ x / len(x), logit_gradients.sum(0) / len(x)]
        if self.config.optimizer == "lars":  # LARS does not adapt one-dimensional parameters, such as biases
            gradients[0] *= lars_trust_ratios(self.weight.norm(), gradients[0].norm())
        sgd(
            [self.weight, self.bias], gradients, self.momenta, fused=False, foreach=False, maximize=False,
            nesterov=False, dampening=0.0, weight_decay=0.0, momentum=SGD_MOMENTUM,
            lr=factor * self.config.scale_lr(len(x)),
        )  # fmt: skip

    def logits(self, features: np.ndarray) -> np.ndarray:
        """Compute logits from all features, (m, N) -> (m, K) float32."""
        chunks = (torch.from_numpy(features[low : low + LOGITS_CHUNK]) for low in range(0, len(features), LOGITS_CHUNK))
        logits = [self.select_inputs(chunk.to(self.weight.device)) @ self.weight.T + self.bias for chunk in chunks]
        return torch.cat(logits).cpu().numpy()

    @property
    def is_finite(self) -> bool:
        """Return whether the weights are finite; too high a learning rate makes them diverge."""
        return bool(self.weight.isfinite().all() and self.bias.isfinite().all())


@torch.no_grad()
def train_heads(heads: list[LinearHead], batches: Iterable[tuple[Tensor, Tensor, float]]) -> None:
    """Train heads on a sequence of batches: features (B, N), labels (B,) int64, and the learning rate factor.

    Heads are independent: the weights are bit-identical to those of a head that is trained alone.
    """
    for features, labels, factor in batches:
        for head in heads:
            head.step(features, labels, factor)


def get_best_index(scores: list[float | None]) -> int:
    """Return the index of the highest score, the first of ties. None is lower than any score."""
    return max(range(len(scores)), key=lambda index: -1.0 if (score := scores[index]) is None else score)


class HeadInput(NamedTuple):
    """The input features of a linear head: the class tokens of the last `blocks` blocks, concatenated.

    With `mean`, the mean of the last block's patch tokens is appended. If `blocks` is 0, the input is that of the
    model's head.
    """

    blocks: int
    mean: bool = False


class TokenReader(nn.Module):
    """A module that computes the features that any of several heads needs: (B, C, *image) -> (B, N).

    Class tokens come first, from the last block backwards, then the mean of the patch tokens. Tokens of every block go
    through the final norm, as in DINO's and DINOv2's `get_intermediate_layers`.
    """

    def __init__(self, model: Model, head_inputs: tuple[HeadInput, ...]) -> None:
        super().__init__()
        self.num_blocks = max(head_input.blocks for head_input in head_inputs)
        self.model, self.config = model if self.num_blocks else remove_head(model), model.config
        self.mean = any(head_input.mean for head_input in head_inputs)

    def get_columns(self, head_input: HeadInput) -> list[int]:
        """Return the indices (d,) of a head's inputs among the N features."""
        if not self.num_blocks:
            return list(range(self.config.num_features))
        width = self.config.width
        token_indices = range(head_input.blocks * width)
        return (
            [*token_indices, *range(self.num_blocks * width, (self.num_blocks + 1) * width)]
            if head_input.mean
            else list(token_indices)
        )

    def forward(self, images: Tensor) -> Tensor:
        """Compute the features of images, (B, C, *image) -> (B, N)."""
        if not self.num_blocks:
            return self.model(images)
        model: Any = self.model
        layer_indices = [self.config.depth - block for block in range(self.num_blocks)]
        tokens = [model.pooled_norm(model.encoder.norm(x)) for x in model.features_after(images, layer_indices)]
        features = [x[:, 0] for x in tokens]
        return torch.cat([*features, tokens[0][:, self.config.prefix :].mean(1)] if self.mean else features, 1)
