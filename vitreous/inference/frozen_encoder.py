"""All features of an image that heads on a frozen encoder use, computed in one pass.

Shapes: B batch, N patch tokens, D width, P prefix tokens, L last blocks.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from vitreous.inference.engine import remove_head
from vitreous.inference.features import POOLED, FeatureArray
from vitreous.models.zoo import Model

LAYERS, TOKENS = "layers", "tokens"  # names of arrays, in addition to `POOLED`
LAST_BLOCKS = 4  # blocks whose tokens are summarised, as in DINO and DINOv2


def has_block_tokens(model: Model) -> bool:
    """Return whether the tokens after each block have the same width and the same patches: not for models with stages
    or a neck."""
    return hasattr(model, "features_after") and not model.config.has_stages and getattr(model, "neck", None) is None


class FrozenEncoder(nn.Module):
    """Encoder that computes several arrays of features in one pass, (B, C, *image) -> (B, values).

    | array | shape per image | content |
    |---|---|---|
    | `POOLED` | (F,) float32 | the input of the model's head |
    | `LAYERS` | (L, S, D) float32 | of each of the last blocks, last one first: class token, mean of patch tokens |
    | `TOKENS` | (N, D) float16 | the patch tokens after the last norm |

    S is 1 for a model without a class token. `names` selects the arrays, whose values are concatenated. Raises
    ValueError for `LAYERS` if `has_block_tokens` is false.
    """

    def __init__(self, model: Model, names: tuple[str, ...]) -> None:
        super().__init__()
        if LAYERS in names and not has_block_tokens(model):
            raise ValueError(f"{model.config.name()} has no tokens of the same form after each block")
        self.model: Any = remove_head(model)
        self.config, self.names = model.config, names
        self.blocks = min(LAST_BLOCKS, model.config.depth) if LAYERS in names else 1

    def describe_arrays(self, image: tuple[int, ...]) -> tuple[FeatureArray, ...]:
        """Return the arrays, for images of a size in pixels. The model runs once, on a black image."""
        config = self.config
        parameter = self.model.first_parameter()
        black = torch.zeros(1, config.channels, *image, dtype=parameter.dtype, device=parameter.device)
        with torch.inference_mode():
            tensors = self.compute_tensors(black)
        dtypes = {TOKENS: "<f2"}
        return tuple(
            FeatureArray(name, tuple(tensor.shape[1:]), dtypes.get(name, "<f4"))
            for name, tensor in zip(self.names, tensors, strict=True)
        )

    def compute_tensors(self, images: Tensor) -> list[Tensor]:
        """Compute the selected arrays of images, (B, C, *image) -> tensors (B, *shape)."""
        model, prefix = self.model, self.config.prefix
        if LAYERS in self.names:
            depths = [self.config.depth - block for block in range(self.blocks)]
            outputs = [model.last_norm(x) for x in model.features_after(images, depths)]
        else:
            outputs = [model.features(images)]
        tensors: list[Tensor] = []
        for name in self.names:
            if name == POOLED:
                tensors.append(model.classify(model.pool(outputs[0])))
            elif name == TOKENS:
                tensors.append(outputs[0][:, prefix:])
            else:
                tensors.append(torch.stack([self.summarise_block(x) for x in outputs], 1))
        return tensors

    def summarise_block(self, tokens: Tensor) -> Tensor:
        """Return class token, if there is one, and mean of the patch tokens: (B, P + N, D) -> (B, S, D)."""
        summaries = [tokens[:, self.config.prefix :].mean(1)]
        if self.config.class_token:
            summaries.insert(0, tokens[:, 0])
        pooled_norm = getattr(self.model, "pooled_norm", None)
        stacked = torch.stack(summaries, 1)
        return stacked if pooled_norm is None else pooled_norm(stacked)

    def forward(self, images: Tensor) -> Tensor:
        """Compute the values of all selected arrays, (B, C, *image) -> (B, values)."""
        return torch.cat([tensor.flatten(1).float() for tensor in self.compute_tensors(images)], 1)
