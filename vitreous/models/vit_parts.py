"""Parts of a Vision Transformer that follow from its config: position embeddings, MLP and head.

Shapes: B batch, D width, S prefix tokens with positions, F features of the head's input, K classes.
"""

from __future__ import annotations

import torch
from torch import nn

from vitreous.models.configs.vit import ViTConfig
from vitreous.nn.block import Mlp, SwiGLU, drop_bias
from vitreous.nn.pool import DistilledHeads
from vitreous.nn.position import (
    FactorisedPosition,
    LearnedAxesPosition,
    LearnedPosition,
    Position,
    SinCosPosition,
    SinusoidPosition,
    SpaceTimePosition,
)
from vitreous.nn.rotary import RotaryForm

#: `positions.kind` -> class of its learned position tables
TABLES = {
    "learned": LearnedPosition,
    "axes": LearnedAxesPosition,
    "factorised": FactorisedPosition,
    "space-time": SpaceTimePosition,
}


def build_mlp(config: ViTConfig) -> Mlp | SwiGLU:
    """Build the MLP of a block, (B, ..., D) -> (B, ..., D)."""
    options, dropout = config.mlp, config.regularization.dropout
    if options.kind == "swiglu":
        mlp = SwiGLU(config.width, options.hidden, dropout, norm_eps=config.norm.eps if options.norm else None)
    else:
        mlp = Mlp(config.width, options.hidden, dropout, options.gelu)
    if not options.bias:
        drop_bias(mlp.fc1)
        drop_bias(mlp.fc2)
    return mlp


def build_rotary_form(config: ViTConfig) -> RotaryForm:
    """Build the form of a model's rotary positions."""
    rotary = config.rotary
    return RotaryForm(
        base=rotary.base,
        coordinates=rotary.coordinates,
        reference=rotary.reference,
        offset=rotary.offset,
        rounded=rotary.rounded,
        register_base=rotary.register_base,
        registers=config.registers if rotary.register_base else 0,
    )


def build_position(config: ViTConfig) -> Position | None:
    """Build the position embeddings that are added to patch tokens; None if there are none."""
    kind, resize = config.positions.kind, config.positions.resize
    if kind in TABLES:
        return TABLES[kind](config.table_grid, config.width, resize)
    if kind == "sinusoid":
        return SinusoidPosition(config.width)
    return None if kind == "none" else SinCosPosition(config.width, kind.removeprefix("sincos-"))


def build_classifier_head(config: ViTConfig) -> nn.Module:
    """Build the head, (B, F) -> (B, K); the identity without classes."""
    if not config.classes:
        return nn.Identity()
    if config.pool == "distilled":
        return DistilledHeads(config.width, config.classes, config.head.bias)
    return nn.Linear(config.num_features, config.classes, config.head.bias)


def build_prefix_positions(config: ViTConfig) -> nn.Parameter | None:
    """Build the position embeddings (S, D) of the first prefix tokens, drawn from N(0, 0.02^2); None if there are
    none."""
    return (
        nn.Parameter(torch.empty(config.prefix_position_count, config.width).normal_(std=0.02))
        if config.prefix_position_count
        else None
    )
