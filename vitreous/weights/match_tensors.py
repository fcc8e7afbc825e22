"""Match stored tensors to a model with other position tables, prefix tokens, attention windows, patches or channels."""

from __future__ import annotations

import re

import torch
from torch import Tensor

from vitreous.models.config import ModelConfig
from vitreous.nn.grid import axis_resize_matrix, resize_position_table
from vitreous.nn.position import SinCosPosition
from vitreous.nn.sizes import format_size
from vitreous.weights.inflation import inflate_kernel

#: names of tensors whose shape depends on the patch grid
POSITION_TABLE_NAMES = re.compile(r"(^|\.)(table|tables\.\d+|rows|columns|relative)$")
#: the first layer: the first of these names that exists
FIRST_LAYER_NAMES = ("stem.root.conv.weight", "stem.stages.0.conv.weight", "body.root.conv.weight", "projection.weight")


def resize_position_tables(state: dict[str, Tensor], model_state: dict[str, Tensor], config: ModelConfig) -> bool:
    """Resize the position tables in `state`, in place, to the model's shapes; return whether any changed."""
    resized = False
    for name, tensor in model_state.items():
        if not POSITION_TABLE_NAMES.search(name) or name not in state or state[name].shape == tensor.shape:
            continue
        table, is_absolute = state[name], "position" in name
        if table.ndim == tensor.ndim and table.shape[-1] == tensor.shape[-1]:
            axes = len(tensor.shape) - 1 if is_absolute else 1
            flat = table.flatten(axes) if not is_absolute else table
            state[name] = resize_position_table(
                flat, tuple(tensor.shape[:axes]), config.positions.resize if is_absolute else "bilinear"
            ).reshape(tensor.shape)
            resized = True
    return resized


def fold_prefix_positions(state: dict[str, Tensor], model_state: dict[str, Tensor]) -> None:
    """Match the positions of prefix tokens in `state`, the tensor `slots` (S, D), to the model, in place. If the model
    has no such positions, they are added to the prefix tokens. If only the model has them, they are zeros."""
    if "slots" in state and ("slots" not in model_state or model_state["slots"].shape != state["slots"].shape):
        slots = state.pop("slots")
        state["prefix"] = torch.cat([state["prefix"][: len(slots)] + slots, state["prefix"][len(slots) :]])
    if "slots" in model_state and "slots" not in state:
        state["slots"] = torch.zeros_like(model_state["slots"])


def rename_attention_tensors(state: dict[str, Tensor], model_state: dict[str, Tensor]) -> None:
    """Rename attention tensors of any shape in `state`, in place, if a block uses windows in either the model or the
    weights, but not in both."""
    model_names = {name.replace(".part.part.", ".part."): name for name in model_state}
    for name in list(state):
        target = model_names.get(name.replace(".part.part.", ".part."), name)
        if target != name and target not in state:
            state[target] = state.pop(name)


def drop_prefix_and_neck(
    state: dict[str, Tensor], model_state: dict[str, Tensor], source_config: ModelConfig, model_config: ModelConfig
) -> list[str]:
    """Remove prefix tokens (P, D) and SAM's neck from `state`, in place, for a model with decomposed relative positions
    that lacks them (ViTDet initialised from MAE, arXiv:2203.16527). Returns the removed names. If the source has fixed
    positions and the model learns them, they are added as a table."""
    if model_config.attention.kind != "decomposed":
        return []
    needs_table = source_config.positions.kind.startswith("sincos") and "position.table" in model_state
    if needs_table and "position.table" not in state:
        sincos_kind = source_config.positions.kind.removeprefix("sincos-")
        state["position.table"] = SinCosPosition(source_config.width, sincos_kind).read(source_config.grid)
    names = [name for name in state if name not in model_state and (name == "prefix" or name.startswith("neck."))]
    for name in names:
        del state[name]
    return names


def adapt_first_layer(
    state: dict[str, Tensor], model_state: dict[str, Tensor], source_config: ModelConfig, model_config: ModelConfig
) -> tuple[str, str]:
    """Adapt the first layer in `state`, (D, C p q) or (O, C, k, k), in place, to the patch size and channels of the
    model. Returns the change of patch size and of channels, such as `16 -> 14`; "" for one that is unchanged."""
    name = next((name for name in FIRST_LAYER_NAMES if name in state and name in model_state), "")
    if source_config.library:
        name = find_first_convolution(state, model_state, source_config.channels, model_config.channels)
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


def find_first_convolution(
    state: dict[str, Tensor], model_state: dict[str, Tensor], source_channels: int, model_channels: int
) -> str:
    """Return the name of the convolution (O, C, k, k) in `state` whose shape differs from the model's only in the
    number of image channels; "" if there is none."""
    if source_channels == model_channels:
        return ""
    for name, weight in state.items():
        is_convolution = weight.ndim == 4 and weight.shape[1] == source_channels and name in model_state
        if is_convolution and model_state[name].shape == (len(weight), model_channels, *weight.shape[2:]):
            return name
    return ""


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
