"""Match stored tensors to a model whose position tables, prefix tokens or attention windows differ."""

from __future__ import annotations

import re

import torch
from torch import Tensor

from vitreous.models.config import ModelConfig
from vitreous.nn.grid import resize_position_table
from vitreous.nn.position import SinCosPosition

#: names of tensors whose shape depends on the patch grid
POSITION_TABLE_NAMES = re.compile(r"(^|\.)(table|tables\.\d+|rows|columns|relative)$")


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
