"""Image encoder with a text encoder in one embedding space: CLIP (arXiv:2103.00020), SigLIP (arXiv:2303.15343).

    images (B, C, *image) -> embed_images (B, E)  \\
                                                   compute_logits (B, T)
    tokens (T, N)         -> embed_texts  (T, E)  /

Shapes: B images, T texts, N tokens of a text, P prefix and N patch tokens of an image, D width of the image encoder, E
channels of an embedding.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitreous.models.base import VisionModel
from vitreous.models.configs.image_text import ImageTextConfig
from vitreous.models.packed import PackedViT
from vitreous.models.text import TextEncoder
from vitreous.nn.position import Position

#: initial temperature of the softmax loss, 1 / 0.07 (CLIP), and temperature and bias of the sigmoid loss (SigLIP)
SOFTMAX_LOG_SCALE, SIGMOID_LOG_SCALE, SIGMOID_BIAS = math.log(1 / 0.07), math.log(10), -10.0


class ImageTextModel(VisionModel[ImageTextConfig]):
    """Image encoder (`image`) and text encoder (`text`), with a learned log temperature and optionally a bias.

    As a model of images it outputs image embeddings that are not normalised, so it extracts features of the embedding
    space. `log_scale` () is the logarithm t of the factor of the logits, `logit_bias` () their bias b, or None.
    """

    def __init__(self, config: ImageTextConfig) -> None:
        super().__init__()
        self.config = config
        self.backbone: Any = config.backbone.model_class()(config.backbone)
        self.text = TextEncoder(config.text)
        self.log_scale = nn.Parameter(torch.tensor(SIGMOID_LOG_SCALE if config.bias else SOFTMAX_LOG_SCALE))
        self.logit_bias = nn.Parameter(torch.tensor(SIGMOID_BIAS)) if config.bias else None
        self.head = nn.Identity()

    @classmethod
    def count_macs(cls, config: ImageTextConfig, image: tuple[int, ...]) -> int:
        """Count the multiply-adds of one image of this size, in pixels, without texts."""
        return config.backbone.macs(image)

    @property
    def image(self) -> VisionModel[Any]:
        """Return the image encoder."""
        return self.backbone

    @property
    def any_size(self) -> bool:
        """Return whether images of other sizes than the native one cause no warning."""
        return self.backbone.any_size

    @any_size.setter
    def any_size(self, value: bool) -> None:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Set whether images of other sizes than the native one cause no warning."""
        self.backbone.any_size = value

    def embed_images(self, images: Tensor | Sequence[Tensor]) -> Tensor:
        """Compute normalised image embeddings: (B, C, *image), or B images (C, *size) of any sizes that the patch
        divides -> (B, E) float32.

        Images of different sizes are packed into sequences (`models.packed`), so embeddings do not depend on padding.
        """
        embeddings = self(images) if isinstance(images, Tensor) else PackedViT(self.backbone)(images)
        return F.normalize(embeddings.float(), dim=-1)

    def embed_texts(self, tokens: Tensor) -> Tensor:
        """Compute normalised text embeddings: (T, N) int64 -> (T, E) float32. Raises ValueError for too many tokens."""
        return F.normalize(self.text(tokens).float(), dim=-1)

    def compute_logits(self, image_embeddings: Tensor, text_embeddings: Tensor) -> Tensor:
        """Compute exp(t) x y^T + b of normalised embeddings, the logit of each image and text: (B, E), (T, E) ->
        (B, T)."""
        logits = self.log_scale.exp() * image_embeddings @ text_embeddings.T
        return logits if self.logit_bias is None else logits + self.logit_bias

    def forward(self, images: Tensor) -> Tensor:
        """Compute image embeddings, which are not normalised: (B, C, *image) -> (B, E)."""
        return self.backbone(images)

    def features(self, images: Tensor) -> Tensor:
        """Compute every token of the image encoder after the last norm: (B, C, *image) -> (B, P + N, D)."""
        return self.backbone.features(images)

    def features_after(self, images: Tensor, depths: Sequence[int]) -> list[Tensor]:
        """Compute every token of the image encoder after t blocks, for each depth t: (B, C, *image) -> list of
        (B, P + N, D)."""
        return self.backbone.features_after(images, depths)

    def features_at(self, images: Tensor, strides: Sequence[int]) -> list[Tensor]:
        """Compute the maps of these strides, in pixels: (B, C, *image) -> (B, *grid, D) per stride."""
        return self.backbone.features_at(images, strides)

    def pool(self, tokens: Tensor) -> Tensor:
        """Pool the image encoder's tokens and project them to embeddings: (B, P + N, D) -> (B, E)."""
        return self.backbone.classify(self.backbone.pool(tokens))

    def blocks(self) -> list[nn.Module]:
        """Return the residual blocks of the image encoder, in order."""
        return self.backbone.blocks()

    def first_layer(self) -> nn.Module:
        """Return the image encoder's first layer, whose input is the image."""
        return self.backbone.first_layer()

    def last_norm(self, x: Tensor) -> Tensor:
        """Apply the image encoder's norm after the last block: (..., D) -> (..., D)."""
        return self.backbone.last_norm(x)

    def inspected_backbone(self) -> VisionModel[Any]:
        """Return the image encoder, whose attention and features are inspected."""
        return self.backbone

    def position_tables(self) -> dict[str, Position]:
        """Return the positions of the image encoder, by location."""
        return self.backbone.position_tables()
