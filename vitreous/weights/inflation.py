"""Convert weights for a model with other inputs: a time axis, clips or volumes (ViViT, arXiv:2103.15691, section 3.4),
another patch size or number of channels; and attention weights between forms with and without a key bias.

D width, C channels, p and q a patch's height and width in pixels, t frames of a patch.
"""

from __future__ import annotations

import math
import re

import torch
from torch import Tensor

from vitreous.models.config import ModelConfig
from vitreous.nn.grid import axis_resize_matrix
from vitreous.nn.position import SinCosPosition
from vitreous.nn.sizes import format_size

#: the first layer: the first of these names that exists
FIRST_LAYER_NAMES = ("stem.root.conv.weight", "stem.stages.0.conv.weight", "body.root.conv.weight", "projection.weight")
QKV_BIAS = re.compile(r"(.*\.qkv)\.(bias|query_bias)")


def inflate_positions(
    state: dict[str, Tensor], model_state: dict[str, Tensor], source_config: ModelConfig, model_config: ModelConfig
) -> None:
    """Add a time axis to image positions (h, w, D) in `state`, in place: (1, h, w, D), the same for every time step. If
    the model has separate temporal positions, which start at 0, the image positions become its spatial ones. Fixed
    positions become a table if the model learns its positions."""
    if len(getattr(source_config, "image", ())) != 2 or len(getattr(model_config, "image", ())) != 3:
        return
    table_names = {"position.table", "position.space.table"} & model_state.keys()
    kind = source_config.positions.kind
    if table_names and kind.startswith("sincos"):
        state["position.table"] = SinCosPosition(source_config.width, kind.removeprefix("sincos-")).read(
            source_config.grid
        )
    if "position.table" in state and "position.space.table" in model_state:
        state["position.space.table"] = state.pop("position.table")
    elif "position.table" in state and table_names:
        state["position.table"] = state["position.table"][None]


def inflate_kernel(weight: Tensor, channels: int, patch: tuple[int, ...], frames: int, rule: str = "central") -> Tensor:
    """Inflate an image patch projection (D, C p q) to patches of `frames` frames, (D, C t p q). The rule `central` uses
    only frame t // 2, so a clip yields the tokens of these frames. The rule `average` weights every frame by 1 / t, so
    a static clip yields the tokens of its image. Raises ValueError for another rule."""
    if rule not in ("central", "average"):
        raise ValueError(f"unknown kernel inflation rule {rule}: use central or average")
    kernel = weight.unflatten(1, (channels, 1, math.prod(patch))).repeat(1, 1, frames, 1)
    frame_weights = torch.full((frames,), 1 / frames) if rule == "average" else torch.eye(frames)[frames // 2]
    return (kernel * frame_weights.to(weight)[:, None]).flatten(1)


def convert_key_bias(state: dict[str, Tensor], model_state: dict[str, Tensor], rotary: bool) -> None:
    """Convert the attention biases in `state`, in place, to the model's form: one tensor (3 D,) for queries, keys and
    values, or one (D,) each for queries and values.

    Softmax cancels the key bias, so outputs are unchanged, except with rotary positions: they rotate the key bias, so a
    tensor is left unchanged if that bias is not zero.
    """
    for match in filter(None, map(QKV_BIAS.fullmatch, list(state))):
        layer, bias_name = match.groups()
        if bias_name == "bias" and f"{layer}.query_bias" in model_state:
            if rotary and state[f"{layer}.bias"].chunk(3)[1].any():
                continue
            state[f"{layer}.query_bias"], _, state[f"{layer}.value_bias"] = state.pop(f"{layer}.bias").chunk(3)
        elif bias_name == "query_bias" and f"{layer}.bias" in model_state:
            query, value = state.pop(f"{layer}.query_bias"), state.pop(f"{layer}.value_bias")
            state[f"{layer}.bias"] = torch.cat([query, torch.zeros_like(query), value])


def adapt_first_layer(
    state: dict[str, Tensor], model_state: dict[str, Tensor], source_config: ModelConfig, model_config: ModelConfig
) -> tuple[str, str]:
    """Adapt the first layer in `state`, (D, C p q) or (O, C, k, k), in place, to the patch size and channels of the
    model. Returns the change of patch size and of channels, such as `16 -> 14`; "" for one that is unchanged."""
    name = next((name for name in FIRST_LAYER_NAMES if name in state and name in model_state), "")
    patches = channels = ""
    if not name:
        return patches, channels
    source_patch, model_patch, extra_axes = (
        source_config.projected_cell,
        model_config.projected_cell,
        len(model_config.image) - len(source_config.image),
    )
    if source_patch and model_patch and source_patch != model_patch and extra_axes in (0, 1):
        patches, spatial_patch = f"{format_size(source_patch)} -> {format_size(model_patch)}", model_patch[extra_axes:]
        if source_patch != spatial_patch:
            state[name] = resample_patch_projection(state[name], source_config.channels, source_patch, spatial_patch)
        if extra_axes:
            inflate = model_config.inflate
            state[name] = inflate_kernel(state[name], source_config.channels, spatial_patch, model_patch[0], inflate)
            patches += f" ({inflate} inflation)"
    if source_config.channels != model_config.channels:
        state[name] = adapt_input_channels(state[name], source_config.channels, model_config.channels)
        channels = f"{source_config.channels} -> {model_config.channels}"
    return patches, channels


def resample_patch_projection(
    weight: Tensor, channels: int, source_patch: tuple[int, ...], target_patch: tuple[int, ...]
) -> Tensor:
    """Resample the patch projection (D, C prod(source_patch)) to another patch size, in pixels.

    A patch that is enlarged bilinearly to the target size yields the same token as the original patch: the new weights
    are the old ones, multiplied by the pseudo-inverse of the resize matrix (FlexiViT, arXiv:2212.08013, section 3.4),
    one axis after the other.
    """
    kernel = weight.double().unflatten(1, (channels, *source_patch))
    for axis, (source_length, target_length) in enumerate(zip(source_patch, target_patch, strict=True), 2):
        inverse = torch.linalg.pinv(axis_resize_matrix(source_length, target_length, "bilinear").T)  # (new, old)
        kernel = (kernel.movedim(axis, -1) @ inverse.T).movedim(-1, axis)
    return kernel.flatten(1).to(weight.dtype)


def adapt_input_channels(weight: Tensor, source_channels: int, target_channels: int) -> Tensor:
    """Adapt the first layer's weights, (D, C p q) or (O, C, k, k), to another number of channels.

    A single target channel gets the sum over the source channels, so a grey image yields the same output as with three
    equal channels. Otherwise target channel c is source channel c mod `source_channels`, times `source_channels` /
    `target_channels`, which preserves the output scale. A ResNet standardises its filters in every forward pass, so
    only their directions are kept, and outputs differ.
    """
    split = weight.unflatten(1, (source_channels, -1)) if weight.ndim == 2 else weight.flatten(2)  # (O, C, rest)
    adapted = (
        split.sum(1, keepdim=True)
        if target_channels == 1
        else split[:, torch.arange(target_channels) % source_channels] * (source_channels / target_channels)
    )
    return adapted.flatten(1) if weight.ndim == 2 else adapted.reshape(len(weight), target_channels, *weight.shape[2:])
