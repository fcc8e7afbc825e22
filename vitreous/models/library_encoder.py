"""The module of another library behind one interface: its features, the head's input, and its maps.

Shapes: B images, C channels, D channels of a token, P prefix tokens, N positions, F channels of the head's input.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from vitreous.models.configs.foreign import FeatureLayout


class LibraryEncoder(nn.Module):
    """Wrapper of another library's module with methods for its features, the head's input, and its maps.

    `frozen_as_is` makes engines run the module unchanged, in float32. If the weights have another dtype, the module
    computes under autocast from float32 copies of them, as in its library's mixed-precision training: norms and their
    statistics stay float32. Outputs have the dtype of the weights.
    """

    frozen_as_is = True

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: Tensor, verb: str = "forward_raw", *arguments: Any) -> Any:
        """Call the method of this class named `verb` on images (B, C, *image) or tokens (B, P + N, D).

        All methods are called through `forward`, so autocast and hooks apply to them.
        """
        dtype = next((p.dtype for p in self.module.parameters()), torch.float32)
        if dtype == torch.float32:
            return getattr(self, verb)(x.float(), *arguments)
        weights = {name: parameter.float() for name, parameter in self.named_parameters()}
        output: Tensor | list[Tensor]
        with torch.autocast(x.device.type, dtype):
            output = torch.func.functional_call(self, weights, (x, verb, *arguments))
        return [tensor.to(dtype) for tensor in output] if isinstance(output, list) else output.to(dtype)

    def forward_raw(self, images: Tensor) -> Any:
        """Return the library's output after its last block and norm, tokens or a map, for images (B, C, *image)."""
        forward_features = getattr(self.module, "forward_features", None)
        if forward_features is not None:
            return forward_features(images)
        output = self.module(images, **self.position_interpolation_options(images))
        return getattr(output, "last_hidden_state", output)

    def position_interpolation_options(self, images: Tensor) -> dict[str, bool]:
        """Return the arguments with which transformers interpolates positions, if the size of images (B, C, *image)
        differs from the module's; else {}."""
        native_size = getattr(getattr(self.module, "config", None), "image_size", None)
        native_size = (native_size, native_size) if isinstance(native_size, int) else native_size
        if native_size is None or tuple(native_size) == tuple(images.shape[2:]):
            return {}
        argument = "interpolate_pos_encoding"
        return {argument: True} if argument in inspect.signature(self.module.forward).parameters else {}

    def pool(self, tokens: Tensor, layout: FeatureLayout, prefix: int) -> Tensor:
        """Pool tokens to the head's input by the library's pooling, if it is defined: (B, P + N, D) -> (B, F).

        Otherwise return the first token if there are `prefix` tokens, or the mean of all, with the module's `layernorm`
        if the tokens are a map.
        """
        forward_head = getattr(self.module, "forward_head", None)
        if forward_head is not None:
            maps = {"channels-first": tokens.mT.unsqueeze(-1), "channels-last": tokens.unsqueeze(1)}
            return forward_head(maps.get(layout, tokens), pre_logits=True)
        if prefix:
            return tokens[:, 0]
        norm = getattr(self.module, "layernorm", None) if layout != "tokens" else None
        return tokens.mean(1) if norm is None else norm(tokens.mean(1))

    def maps(self, images: Tensor, strides: Sequence[int]) -> list[Tensor]:
        """Compute the last map of each stride, before any norm: (B, C, H, W) -> (B, h, w, D) per stride, in pixels."""
        module: Any = self.module
        stage_infos = getattr(module.feature_info, "info", module.feature_info)
        index_by_stride = {stage["reduction"]: index for index, stage in enumerate(stage_infos)}
        indices = sorted({index_by_stride[stride] for stride in strides})
        maps = module.forward_intermediates(images, indices=indices, output_fmt="NCHW", intermediates_only=True)
        maps_by_index = dict(zip(indices, maps, strict=True))
        return [maps_by_index[index_by_stride[stride]].movedim(1, -1) for stride in strides]

    def features_after(self, images: Tensor, depths: Sequence[int]) -> list[Tensor]:
        """Compute every token after t blocks, before the last norm, for each depth t: (B, C, *image) -> list of
        (B, P + N, D)."""
        module: Any = self.module
        by_depth: dict[int, Tensor]
        if hasattr(module, "forward_intermediates"):
            indices = sorted({depth - 1 for depth in depths})
            pairs = module.forward_intermediates(
                images, indices=indices, return_prefix_tokens=True, output_fmt="NLC", intermediates_only=True
            )
            by_depth = {
                index + 1: tokens for index, tokens in zip(indices, map(join_prefix_tokens, pairs), strict=True)
            }
        else:
            options = self.position_interpolation_options(images)
            states: Sequence[Tensor] = module(images, output_hidden_states=True, **options).hidden_states
            by_depth = dict(enumerate(states))
        return [by_depth[depth] for depth in depths]

    def norm(self, tokens: Tensor) -> Tensor:
        """Apply the norm after the last block to tokens: (..., D) -> (..., D); unchanged if the module has none."""
        norm = getattr(self.module, "norm", None) or getattr(self.module, "layernorm", None)
        return tokens if norm is None else norm(tokens)


def join_prefix_tokens(pair: Tensor | tuple[Tensor, Tensor | None]) -> Tensor:
    """Join patch tokens (B, N, D) and prefix tokens (B, P, D) to (B, P + N, D); return patch tokens without a prefix
    unchanged."""
    if isinstance(pair, Tensor):
        return pair
    patches, prefix = pair
    return patches if prefix is None else torch.cat([prefix, patches], 1)
