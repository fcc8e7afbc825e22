"""The projection heads of DINO and DINOv2 in original files.

D feature channels, H hidden channels, b bottleneck channels, K prototypes. In these files the MLP counts activations as
layers: `mlp.0`, `mlp.2`, ...; the last layer is weight-normed: a direction (K, b) and a length (K, 1) for each
prototype.
"""

from __future__ import annotations

import re
from typing import Any

import torch

from vitreous.weights.table import Shapes, Tensors

WEIGHT_NORM_DIRECTION, WEIGHT_NORM_LENGTH = "last_layer.weight_v", "last_layer.weight_g"
#: PyTorch's names of a weight norm since version 2
PARAMETRIZATION_NAMES = {
    "last_layer.parametrizations.weight.original1": WEIGHT_NORM_DIRECTION,
    "last_layer.parametrizations.weight.original0": WEIGHT_NORM_LENGTH,
}
MLP_LAYER = re.compile(r"mlp\.(\d+)\.(weight|bias)")


def has_unit_prototypes(tensors: Tensors) -> bool:
    """Return whether all prototypes of a head in the original format have length (K, 1) one (`norm_last_layer`), or
    none."""
    return WEIGHT_NORM_LENGTH not in tensors or bool((tensors[WEIGHT_NORM_LENGTH] == 1).all())


def read_dino_head(tensors: Tensors, has_unit_length: bool) -> Tensors:
    """Convert a head from the original format to ours, in float32. If all prototypes have length one, their lengths (K,
    1) are omitted."""
    state: Tensors = {}
    for name, tensor in tensors.items():
        if name == WEIGHT_NORM_DIRECTION:
            state["prototypes.weight"] = tensor.float()
        elif name != WEIGHT_NORM_LENGTH:
            _, index, suffix = name.split(".")
            state[f"mlp.{int(index) // 2}.{suffix}"] = tensor.float()
    if not has_unit_length:
        state["lengths"] = (
            tensors[WEIGHT_NORM_LENGTH].float()
            if WEIGHT_NORM_LENGTH in tensors
            else torch.ones(len(tensors[WEIGHT_NORM_DIRECTION]), 1)
        )
    return state


def write_dino_head(state: Tensors) -> Tensors:
    """Convert our tensors of a head, of any shape, to the original format."""
    tensors: Tensors = {}
    for name, tensor in state.items():
        if name.startswith("mlp."):
            _, index, suffix = name.split(".")
            tensors[f"mlp.{2 * int(index)}.{suffix}"] = tensor
    directions = state["prototypes.weight"]
    lengths = state.get("lengths", torch.ones(len(directions), 1))
    return tensors | {WEIGHT_NORM_DIRECTION: directions, WEIGHT_NORM_LENGTH: lengths}


def find_head_errors(shapes: Shapes) -> list[str]:
    """List missing and unknown tensors of a head in the original format, one line each."""
    indices = sorted({int(match[1]) for name in shapes if (match := MLP_LAYER.fullmatch(name))})
    indices = list(range(0, max(indices, default=0) + 1, 2))
    expected = {f"mlp.{index}.{suffix}" for index in indices for suffix in ("weight", "bias")} | {WEIGHT_NORM_DIRECTION}
    missing, unknown = expected - set(shapes), set(shapes) - expected - {WEIGHT_NORM_LENGTH}
    return [f"missing {name}" for name in missing] + [f"unknown {name}" for name in unknown]


def infer_head_fields(shapes: Shapes) -> dict[str, Any]:
    """Infer the objective's config fields from the shapes of a head in the original format."""
    prototypes, bottleneck = shapes[WEIGHT_NORM_DIRECTION]
    layers = [name for name in shapes if MLP_LAYER.fullmatch(name) and name.endswith("weight")]
    sizes = {"prototypes": prototypes, "bottleneck": bottleneck, "head_layers": len(layers)}
    return {**sizes, "head_width": shapes["mlp.0.weight"][0]}
