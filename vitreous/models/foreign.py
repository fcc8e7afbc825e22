"""Encoders of other libraries behind the verbs of a ViT: timm's, transformers', or any module that gives tokens.

Neither library is imported: what is there is asked for by the names that they give it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from vitreous.errors import UsageError
from vitreous.models.configs.foreign import ForeignConfig
from vitreous.nn.sizes import format_size

WAY = "wrap_backbone(module, image_size=224, patch_size=16), of a module (B, C, H, W) -> (B, N, D)"


class ForeignTokens(nn.Module):
    """(B, C, *image) -> (B, P + N, D): the tokens of another library's encoder, after its last norm.

    `frozen_as_is`: engines compute it as it is, in float32.
    """

    frozen_as_is = True

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, images: Tensor) -> Tensor:
        """(B, C, *image) -> (B, P + N, D)."""
        forward_features = getattr(self.module, "forward_features", self.module)
        output: Any = forward_features(images.float())
        return getattr(output, "last_hidden_state", output)

    def pool(self, tokens: Tensor, prefix: int) -> Tensor:
        """(B, P + N, D) -> (B, D): as the library does before its head, where it says so; else the first token if there
        are `prefix` tokens, or the mean of all."""
        forward_head = getattr(self.module, "forward_head", None)
        if forward_head is not None:
            return forward_head(tokens, pre_logits=True)
        return tokens[:, 0] if prefix else tokens.mean(1)


class ForeignModel(nn.Module):
    """An encoder of another library, and a linear head of ours; weights and gradients are the encoder's own.

    It has the verbs `features`, `pool` and `classify`, and `config`, that objectives, heads and engines ask for. A run
    cannot be made of it, nor a bundle: nothing in this package can build it again. Raises UsageError without an
    `encoder`.
    """

    def __init__(self, config: ForeignConfig, encoder: nn.Module | None = None) -> None:
        super().__init__()
        if encoder is None:
            raise UsageError(
                f"{config.name} is a model of another library", "build it there, and give wrap_backbone() the module"
            )
        self.config = config
        self.encoder = ForeignTokens(encoder)
        self.head = nn.Linear(config.width, config.classes) if config.classes else nn.Identity()
        for parameter in self.head.parameters():
            nn.init.zeros_(parameter)

    def forward(self, images: Tensor) -> Tensor:
        """(B, C, *image) -> (B, classes): logits; (B, D) without a head."""
        return self.classify(self.pool(self.features(images)))

    def features(self, images: Tensor) -> Tensor:
        """(B, C, *image) -> (B, P + N, D): every token after the last norm. Raises ValueError for other channels."""
        if images.shape[1] != self.config.channels:
            raise ValueError(f"the model takes {self.config.channels} channels, the images have {images.shape[1]}")
        return self.encoder(images)

    def pool(self, tokens: Tensor) -> Tensor:
        """(B, P + N, D) -> (B, D): what the head reads."""
        return self.encoder.pool(tokens, self.config.prefix)

    def classify(self, pooled: Tensor) -> Tensor:
        """(B, D) -> (B, classes)."""
        return self.head(pooled)


def wrap_backbone(
    module: nn.Module,
    num_classes: int = 0,
    image_size: int | Sequence[int] | None = None,
    patch_size: int | Sequence[int] | None = None,
    channels: int | None = None,
) -> ForeignModel:
    """A Vision Transformer of timm or transformers, or any module (B, C, H, W) -> (B, N, D), for objectives, heads and
    engines of this package.

    The weights are shared: training it trains `module`. A head of its own is taken off a timm model and left out of a
    transformers model; `num_classes` makes a new one, whose weights are 0. Sizes that the module does not tell are to
    be said. Raises UsageError where they are not, and for a module that does not give tokens.
    """
    base = getattr(module, getattr(module, "base_model_prefix", "") or "", module)
    if hasattr(base, "forward_features") and hasattr(base, "reset_classifier"):
        base.reset_classifier(0)  # type: ignore[operator]
    own = sizes_of(base)
    image, patch = pair(image_size or own.get("image")), pair(patch_size or own.get("patch"))
    if image is None or patch is None:
        raise UsageError(f"{type(module).__name__} does not tell its {'patch' if image else 'image'} size", WAY)
    count = channels or own.get("channels") or 3
    tokens = probe(base, count, image)
    prefix = tokens.shape[1] - math.prod(side // p for side, p in zip(image, patch, strict=True))
    if prefix < 0 or any(side % p for side, p in zip(image, patch, strict=True)):
        problem = f"{tokens.shape[1]} tokens of {format_size(image)} pixels are not patches of {format_size(patch)}"
        raise UsageError(problem, WAY)
    config = ForeignConfig(
        own.get("name") or type(base).__name__, image, patch, tokens.shape[2], prefix, count, num_classes
    )
    return ForeignModel(config, base)


def sizes_of(module: nn.Module) -> dict[str, Any]:
    """What a module tells of itself: name, image, patch and channels; timm's and transformers' names for them."""
    embed, config = getattr(module, "patch_embed", None), getattr(module, "config", None)
    if embed is not None:
        known = getattr(module, "pretrained_cfg", None) or {}
        first = getattr(embed, "proj", None)
        facts = {"name": known.get("architecture"), "image": getattr(embed, "img_size", None)}
        return facts | {"patch": getattr(embed, "patch_size", None), "channels": getattr(first, "in_channels", None)}
    names = {"name": "model_type", "image": "image_size", "patch": "patch_size", "channels": "num_channels"}
    return {ours: getattr(config, theirs, None) for ours, theirs in names.items()}


def pair(size: int | Sequence[int] | None) -> tuple[int, ...] | None:
    """One number as two, (height, width)."""
    return size if size is None else (size, size) if isinstance(size, int) else tuple(size)


@torch.no_grad()
def probe(module: nn.Module, channels: int, image: tuple[int, ...]) -> Tensor:
    """The tokens (1, N, D) of a black image. Raises UsageError for what gives none."""
    training = module.training
    first = next(module.parameters(), torch.empty(0))
    try:
        tokens = ForeignTokens(module.eval())(torch.zeros(1, channels, *image, device=first.device))
    except (RuntimeError, ValueError, TypeError, AssertionError) as error:
        reason = str(error).partition("\n")[0]
        raise UsageError(f"{type(module).__name__} does not take {format_size(image)} pixels ({reason})", WAY) from None
    finally:
        module.train(training)
    if not isinstance(tokens, Tensor) or tokens.ndim != 3:
        form = " x ".join(map(str, tokens.shape)) if isinstance(tokens, Tensor) else type(tokens).__name__
        problem = f"{type(module).__name__} gives {form}, not tokens (B, N, D)"
        raise UsageError(problem, "models that make maps, as ResNets and Swins, are read as weights: create(weights=…)")
    return tokens
