"""ViTDet's backbone in detectron2's format (arXiv:2203.16527): `backbone.net.*` of a file that may contain a
detector.

"Our" names and tensors are those of this package's models, "their" names and tensors those of the files.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from vitreous.models.config import ModelConfig, ViTConfig
from vitreous.weights.formats.measure import ViTShape, infer_position_grid, infer_vit_config
from vitreous.weights.formats.others import SAM_FIELDS
from vitreous.weights.formats.transformers import has_square_patches
from vitreous.weights.table import (
    CONVOLUTION,
    Shapes,
    TensorTransform,
    WeightsFormat,
    build_block_rules,
    count_blocks,
    parse_copy_rules,
    parse_rename_rule,
)

DEFAULT_IMAGE_SIDE = 1024  # height and width in pixels, if no table of the full grid determines them


def _import_positions(theirs: list[Tensor], config: ViTConfig) -> list[Tensor]:
    """Convert (1, 1 + N, D) positions to (*grid, D), without the unused class token."""
    return [theirs[0][0, 1:].reshape(*config.table_grid, config.width)]


def _export_positions(ours: list[Tensor], config: ViTConfig) -> list[Tensor]:
    """Convert (*grid, D) positions to (1, 1 + N, D), with zeros for the class token."""
    positions = ours[0].reshape(-1, config.width)
    return [torch.cat([positions.new_zeros(1, config.width), positions])[None]]


#: (1, 1 + N, D), whose first row, of the class token, is unused <-> (*grid, D)
WITH_CLASS_ROW = TensorTransform(_import_positions, _export_positions)

BLOCK_NAME = "encoder.blocks.{i}"
VITDET_RULES = (
    parse_rename_rule("projection.weight", "patch_embed.proj.weight", CONVOLUTION),
    parse_rename_rule("position.table", "pos_embed", WITH_CLASS_ROW),
    *build_block_rules(
        "blocks.{i}", ("norm1", "norm2"), "attn.qkv", "attn.proj", ("mlp.fc1", "mlp.fc2"), infix="{part}"
    ),
    *parse_copy_rules(
        "projection.bias = patch_embed.proj.bias",
        f"{BLOCK_NAME}.attention.part{{part}}.rows = blocks.{{i}}.attn.rel_pos_h",
        f"{BLOCK_NAME}.attention.part{{part}}.columns = blocks.{{i}}.attn.rel_pos_w",
        f"{BLOCK_NAME}.after.conv{{j}}.weight = blocks.{{i}}.residual.conv{{j}}.weight",
        f"{BLOCK_NAME}.after.norm{{j}}.norm.{{x}} = blocks.{{i}}.residual.norm{{j}}.{{x}}",
    ),
)


def infer_vitdet_config(shapes: Shapes, settings: dict[str, Any]) -> ViTConfig:
    """Infer the config of a ViTDet backbone from the shapes. Blocks with the longest tables of relative positions
    attend over the full grid, which determines the image size.

    If all tables have the same length, blocks use windows, unless the `image` in the settings has the size of one
    window. Raises ValueError for tables of more than two lengths.
    """
    width, channels, *patch_size = shapes["patch_embed.proj.weight"]
    patch, depth = tuple(patch_size), count_blocks(shapes, "blocks.{i}.attn.qkv.weight")
    table_grid, _ = infer_position_grid(shapes["pos_embed"][1], (1,), None, patch)
    lengths = [(shapes[f"blocks.{i}.attn.rel_pos_h"][0] + 1) // 2 for i in range(depth)]
    window, longest = min(lengths), max(lengths)
    if set(lengths) != {window, longest}:
        raise ValueError(f"its tables of relative positions have {len(set(lengths))} different window sizes")
    full_image = (longest * patch[0], longest * patch[1])
    image = full_image if window < longest else settings.get("image") or (DEFAULT_IMAGE_SIDE, DEFAULT_IMAGE_SIDE)
    windowed = window < longest or image != full_image
    fields = SAM_FIELDS | {
        "channels": channels,
        "neck": 0,
        "heads": width // shapes["blocks.0.attn.rel_pos_h"][1],
        "attention.window": window if windowed else 0,
        "attention.global_blocks": tuple(i for i, length in enumerate(lengths) if length > window),
        "conv_blocks": tuple(i for i in range(depth) if f"blocks.{i}.residual.conv1.weight" in shapes),
        "position_grid": table_grid,
    }
    grid = image[0] // patch[0] * (image[1] // patch[1])
    size = ViTShape(width, depth, shapes["blocks.0.mlp.fc1.weight"][0], patch, grid)
    return infer_vit_config(size, fields, settings | {"image": image}, (0,))


def is_vitdet_backbone(config: ModelConfig) -> bool:
    """Return whether the model is a ViTDet backbone."""
    return (
        isinstance(config, ViTConfig)
        and has_square_patches(config)
        and config.attention.kind == "decomposed"
        and not config.neck
        and not config.classes
    )


VITDET = WeightsFormat(
    "vitdet",
    "detectron2's ViTDet",
    ("patch_embed.proj.weight", "pos_embed", "blocks.0.attn.rel_pos_h", "blocks.0.mlp.fc1.weight"),
    VITDET_RULES,
    configure=infer_vitdet_config,
    scope=("backbone.net.",),
    can_represent=is_vitdet_backbone,
    prefix=lambda c: "backbone.net.",
)
