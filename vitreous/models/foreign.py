"""Encoders of other libraries with the interface of a ViT: models of timm and transformers by name, or any module that
returns tokens.

Shapes: B images of C channels, P prefix tokens, N positions, D channels of a token, F channels of the head's input, K
classes.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn

from vitreous.errors import UsageError
from vitreous.models.base import VisionModel, linear_head
from vitreous.models.configs.foreign import BLOCK_PATTERN, ForeignConfig
from vitreous.models.libraries import build_encoder, build_meta_encoder, flatten_features, identify_library_module
from vitreous.models.library_encoder import LibraryEncoder
from vitreous.nn.adapter import allow_single_value_batch_norm
from vitreous.nn.sizes import format_size
from vitreous.system.torch_types import fork_rng, named_modules

WRAP_HINT = "call wrap_backbone(module, image_size=224, patch_size=16) with a module (B, C, H, W) -> (B, N, D)"


class ForeignModel(VisionModel[ForeignConfig]):
    """An encoder of another library, with a linear head of this package whose weights start at 0.

    It has `features`, `pool` and `classify`, the maps for dense heads, and the `config` that objectives, heads and
    engines require. The encoder is built from `config.library`, newly initialised, or passed as a module. Raises
    UsageError if neither is available, and the errors of `libraries.build_encoder`.
    """

    def __init__(self, config: ForeignConfig, encoder: nn.Module | None = None) -> None:
        super().__init__()
        if encoder is None and not config.library:
            raise UsageError(
                f"{config.full_name} is a model of another library, which cannot be built from its config",
                "build it with that library, and pass the module to wrap_backbone()",
            )
        self.config = config
        self.any_size = True  # the library checks sizes
        if encoder is None:
            with torch.device(
                "cpu"
            ):  # constructors compute buffers, which need values even if weights are loaded later
                encoder = build_encoder(config)
        allow_single_value_batch_norm(encoder)
        self.encoder = LibraryEncoder(encoder)
        self.head = self.build_head()

    @classmethod
    def count_macs(cls, config: ForeignConfig, image: tuple[int, ...]) -> int:
        """Count the multiply-adds of one forward pass for one image of this size, in pixels; 0 for a module without a
        library config."""
        return foreign_macs(config, image)

    def build_head(self) -> nn.Module:
        """Build a linear head (B, F) -> (B, K) whose weights are 0."""
        return linear_head(self.config.num_features, self.config.classes)

    def train(self, mode: bool = True) -> ForeignModel:
        """Set training mode, except for submodules whose parameters are all frozen, so the statistics of their batch
        norms do not change."""
        super().train(mode)
        for module in self.encoder.modules() if mode else ():
            weights = list(module.parameters())
            if weights and not any(weight.requires_grad for weight in weights):
                module.eval()
        return self

    def features(self, images: Tensor) -> Tensor:
        """Compute every token after the last norm, or every position of the last map in raster order: (B, C, *image) ->
        (B, P + N, D).

        Raises ValueError for a wrong number of channels.
        """
        return flatten_features(self.encoder(self.prepare_images(images)), self.config.layout)

    def prepare_images(self, images: Tensor) -> Tensor:
        """Check images (B, C, *image) and return them unchanged. Raises the errors of `check_images`."""
        self.check_images(images)
        return images

    def pool(self, tokens: Tensor) -> Tensor:
        """Pool tokens to the head's input: (B, P + N, D) -> (B, F)."""
        return self.encoder(tokens, "pool", self.config.layout, self.config.prefix)

    def features_at(self, images: Tensor, strides: Sequence[int]) -> list[Tensor]:
        """Compute the feature maps with these strides, in pixels: (B, C, H, W) -> (B, h, w, D) per stride.

        `config.levels` lists the strides. Raises ValueError if no map has a stride.
        """
        self.config.check_strides(strides)
        if self.config.stages:
            return self.encoder(self.prepare_images(images), "maps", tuple(strides))
        grid = tuple(length // patch for length, patch in zip(images.shape[2:], self.config.patch, strict=True))
        tokens = self.features_after(images, [self.config.depth])[0][:, self.config.prefix :]
        return [tokens.unflatten(1, grid) for _ in strides]  # a ViT has only one stride, so all strides are equal

    def features_after(self, images: Tensor, depths: Sequence[int]) -> list[Tensor]:
        """Compute every token after t blocks, before the last norm, for each depth t: (B, C, *image) -> list of
        (B, P + N, D)."""
        return self.encoder(self.prepare_images(images), "features_after", tuple(depths))

    def last_norm(self, x: Tensor) -> Tensor:
        """Apply the norm after the last block: (..., D) -> (..., D); maps of stages are returned unchanged."""
        return x if self.config.stages else self.encoder(x, "norm")

    def blocks(self) -> list[nn.Module]:
        """Return the blocks, or the stages, in order."""
        matches = ((re.match(BLOCK_PATTERN, name), module) for name, module in named_modules(self))
        return [module for match, module in matches if match and match.end() == len(match.string)]

    def to_storable(self) -> ForeignModel:
        """Return the model, or for a wrapped module a copy that its library builds from a config, so a bundle can
        rebuild it. Raises UsageError if the copy would differ from the module."""
        if self.config.library:
            return self
        module, library_config = self.encoder.module, identify_library_module(self.encoder.module, self.config.image)
        if library_config is None:
            raise UsageError(
                f"{type(module).__name__} is not a model of timm or transformers, so a bundle cannot rebuild it",
                "save its state dict with torch.save",
            )
        config = replace(library_config, channels=self.config.channels, classes=self.config.classes)
        with fork_rng([]):
            copy = ForeignModel(config)
            if not copy_library_module(module, copy.encoder.module, torch.rand(1, config.channels, *config.image)):
                raise UsageError(
                    f"{config.full_name} was built with options that it does not record, so a bundle cannot rebuild it",
                    'use create("timm:NAME,OPTION=VALUE", weights=FILE), where FILE is the state dict of the module',
                )
        copy.head.load_state_dict(self.head.state_dict())
        return copy.train(self.training)

    def first_layer(self) -> nn.Module:
        """Return the first convolution or linear layer, whose input is the image."""
        return next(module for module in self.encoder.modules() if isinstance(module, nn.Conv2d | nn.Linear))


@lru_cache(256)
def foreign_macs(config: ForeignConfig, image: tuple[int, ...]) -> int:
    """Count the multiply-adds of a wrapped model's forward pass, head included, for one image of this size, in pixels.

    Products and convolutions are counted by PyTorch's FlopCounterMode on the meta device. Returns 0 for a module
    without a library config, which cannot be rebuilt there.
    """
    if not config.library:
        return 0
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.utils.flop_counter import FlopCounterMode

    module = LibraryEncoder(build_meta_encoder(config))
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH), torch.no_grad():
        tokens = flatten_features(module(torch.empty(1, config.channels, *image, device="meta")), config.layout)
        module(tokens, "pool", config.layout, config.prefix)
    return counter.get_total_flops() // 2 + config.num_features * config.classes


def wrap_backbone(
    module: nn.Module,
    num_classes: int = 0,
    image_size: int | Sequence[int] | None = None,
    patch_size: int | Sequence[int] | None = None,
    channels: int | None = None,
) -> ForeignModel:
    """Wrap a Vision Transformer of timm or transformers, or any module (B, C, H, W) -> (B, N, D), for this package's
    objectives, heads and engines.

    The weights are shared, so training changes `module`. The head of a timm model is removed, and the head of a
    transformers model is not used; `num_classes` adds a new head whose weights are 0. `image_size`, `patch_size` and
    `channels` must be passed if the module has no attributes for them. Raises UsageError if they are missing, or if the
    module does not return tokens.
    """
    base = getattr(module, getattr(module, "base_model_prefix", "") or "", module)
    if not hasattr(base, "embeddings") and hasattr(module, "embeddings"):  # only its blocks have the prefix's name
        base = module
    reset_classifier = getattr(base, "reset_classifier", None)
    if hasattr(base, "forward_features") and reset_classifier is not None:
        reset_classifier(0)
    module_sizes = read_module_sizes(base)
    image, patch = (
        to_size_pair(image_size or module_sizes.get("image")),
        to_size_pair(patch_size or module_sizes.get("patch")),
    )
    if image is None or patch is None:
        raise UsageError(f"the {'patch' if image else 'image'} size of {type(module).__name__} is unknown", WRAP_HINT)
    num_channels = channels or module_sizes.get("channels") or 3
    tokens = probe_tokens(base, num_channels, image)
    prefix = tokens.shape[1] - math.prod(length // p for length, p in zip(image, patch, strict=True))
    if prefix < 0 or any(length % p for length, p in zip(image, patch, strict=True)):
        problem = (
            f"{type(module).__name__} returns {tokens.shape[1]} tokens for images of {format_size(image)} pixels, "
            f"which do not match patches of {format_size(patch)} pixels"
        )
        raise UsageError(problem, WRAP_HINT)
    config = ForeignConfig(
        module_sizes.get("name") or type(base).__name__,
        image,
        patch,
        width=tokens.shape[2],
        prefix=prefix,
        channels=num_channels,
        classes=num_classes,
    )
    return ForeignModel(config, base)


def copy_library_module(module: nn.Module, copy: nn.Module, images: Tensor) -> bool:
    """Copy the weights of a library's module, and return whether the copy is equal: in its layers with their settings,
    and in its features of images (B, C, H, W). The pooling layer of a transformers module is left out."""
    state = {name: tensor for name, tensor in module.state_dict().items() if not name.startswith("pooler.")}
    shapes = {name: tensor.shape for name, tensor in copy.state_dict().items()}
    layers, copied_layers = (
        [
            repr(layer)
            for name, layer in named_modules(item)
            if not any(layer.children()) and not name.startswith("pooler")
        ]
        for item in (module, copy)
    )
    if shapes != {name: tensor.shape for name, tensor in state.items()} or layers != copied_layers:
        return False
    copy.load_state_dict(state)
    training, device = module.training, next(module.parameters()).device
    with torch.no_grad():
        outputs: list[Tensor] = [LibraryEncoder(item.eval())(images.to(device)) for item in (module, copy.to(device))]
    module.train(training)
    return torch.equal(*outputs)


def read_module_sizes(module: nn.Module) -> dict[str, Any]:
    """Read name, image size, patch size and channels from a module, by the attribute names of timm and transformers."""
    embed, config = getattr(module, "patch_embed", None), getattr(module, "config", None)
    if embed is not None:
        pretrained_cfg: dict[str, Any] = getattr(module, "pretrained_cfg", None) or {}
        projection = getattr(embed, "proj", None)
        sizes = {"name": pretrained_cfg.get("architecture"), "image": getattr(embed, "img_size", None)}
        return sizes | {
            "patch": getattr(embed, "patch_size", None),
            "channels": getattr(projection, "in_channels", None),
        }
    names = {"name": "model_type", "image": "image_size", "patch": "patch_size", "channels": "num_channels"}
    return {name: getattr(config, attribute, None) for name, attribute in names.items()}


def to_size_pair(size: int | Sequence[int] | None) -> tuple[int, ...] | None:
    """Convert a single size to (height, width); None and sequences are preserved."""
    return size if size is None else (size, size) if isinstance(size, int) else tuple(size)


@torch.no_grad()
def probe_tokens(module: nn.Module, channels: int, image: tuple[int, ...]) -> Tensor:
    """Compute the tokens (1, N, D) of a black image. Raises UsageError if the module rejects the image or returns no
    tokens."""
    training = module.training
    parameter = next(module.parameters(), torch.empty(0))
    try:
        tokens = LibraryEncoder(module.eval())(torch.zeros(1, channels, *image, device=parameter.device))
    except (RuntimeError, ValueError, TypeError, AssertionError) as error:
        reason = str(error).partition("\n")[0]
        raise UsageError(
            f"{type(module).__name__} does not accept images of {format_size(image)} pixels ({reason})", WRAP_HINT
        ) from None
    finally:
        module.train(training)
    if not isinstance(tokens, Tensor) or tokens.ndim != 3:
        output_form = " x ".join(map(str, tokens.shape)) if isinstance(tokens, Tensor) else type(tokens).__name__
        problem = f"{type(module).__name__} must return tokens (B, N, D), but returns {output_form}"
        raise UsageError(problem, "load models that return maps, such as ResNets and Swins, with create(weights=…)")
    return tokens
