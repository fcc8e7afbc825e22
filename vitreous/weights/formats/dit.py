"""Diffusion Transformers in the original format (facebookresearch/DiT) and in diffusers.

"Our" names and tensors are those of this package's models, "their" names and tensors those of the files.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from vitreous.errors import WeightsError
from vitreous.models.configs.dit import DIT_SHAPES, DiTConfig
from vitreous.nn.position import sincos_position_table
from vitreous.weights.formats.measure import infer_position_grid
from vitreous.weights.table import (
    CONVOLUTION,
    QKV_TRANSFORM,
    Shapes,
    TensorTransform,
    WeightsFormat,
    count_blocks,
    parse_copy_rules,
    parse_rename_rule,
)


def _move_channels_first(theirs: list[Tensor], config: DiTConfig) -> list[Tensor]:
    """Reorder the outputs of a patch from channels last to channels first: (p q C', ...) -> (C' p q, ...)."""
    return [theirs[0].unflatten(0, (math.prod(config.patch), -1)).transpose(0, 1).flatten(0, 1)]


def _move_channels_last(ours: list[Tensor], config: DiTConfig) -> list[Tensor]:
    """Reorder the outputs of a patch from channels first to channels last: (C' p q, ...) -> (p q C', ...)."""
    return [ours[0].unflatten(0, (-1, math.prod(config.patch))).transpose(0, 1).flatten(0, 1)]


#: (p q C', ...), channels of a patch last <-> (C' p q, ...)
CHANNELS_LAST = TensorTransform(_move_channels_first, _move_channels_last)


def _import_shared_tensor(theirs: list[Tensor], config: DiTConfig) -> list[Tensor]:
    """Return the one tensor that all blocks store. Raises WeightsError if they differ."""
    if any(not torch.equal(theirs[0], tensor) for tensor in theirs[1:]):
        raise WeightsError(
            "the embeddings of times and classes differ between blocks, but blocks of a DiT share one",
            "use the weights of another DiT",
        )
    return theirs[:1]


#: one tensor per block, all equal <-> a single tensor
SHARED_BY_BLOCKS = TensorTransform(_import_shared_tensor, lambda ours, c: [ours[0].clone() for _ in range(c.depth)])


def build_block_names(name: str) -> Any:
    """Return a function from a config to the names in diffusers' files of a tensor that is stored once per block."""
    return lambda c: tuple(f"transformer_blocks.{i}.norm1.emb.{name}" for i in range(c.depth))


BLOCK_NAME = "encoder.blocks.{i}"
DIT_RULES = (
    parse_rename_rule("projection.weight", "x_embedder.proj.weight", CONVOLUTION),
    parse_rename_rule("last.linear.weight", "final_layer.linear.weight", CHANNELS_LAST),
    parse_rename_rule("last.linear.bias", "final_layer.linear.bias", CHANNELS_LAST),
    *parse_copy_rules(
        "projection.bias = x_embedder.proj.bias",
        "time.fc1.{x} = t_embedder.mlp.0.{x}",
        "time.fc2.{x} = t_embedder.mlp.2.{x}",
        "classes.weight = y_embedder.embedding_table.weight",
        f"{BLOCK_NAME}.attention.qkv.{{x}} = blocks.{{i}}.attn.qkv.{{x}}",
        f"{BLOCK_NAME}.attention.out.{{x}} = blocks.{{i}}.attn.proj.{{x}}",
        f"{BLOCK_NAME}.mlp.fc1.{{x}} = blocks.{{i}}.mlp.fc1.{{x}}",
        f"{BLOCK_NAME}.mlp.fc2.{{x}} = blocks.{{i}}.mlp.fc2.{{x}}",
        f"{BLOCK_NAME}.modulation.{{x}} = blocks.{{i}}.adaLN_modulation.1.{{x}}",
        "last.modulation.{x} = final_layer.adaLN_modulation.1.{x}",
    ),
)
DIFFUSERS_BLOCK_NAME = "transformer_blocks.{i}"
DIFFUSERS_RULES = (
    parse_rename_rule("projection.weight", "pos_embed.proj.weight", CONVOLUTION),
    parse_rename_rule("last.linear.weight", "proj_out_2.weight", CHANNELS_LAST),
    parse_rename_rule("last.linear.bias", "proj_out_2.bias", CHANNELS_LAST),
    parse_rename_rule("time.fc1.{x}", build_block_names("timestep_embedder.linear_1.{x}"), SHARED_BY_BLOCKS),
    parse_rename_rule("time.fc2.{x}", build_block_names("timestep_embedder.linear_2.{x}"), SHARED_BY_BLOCKS),
    parse_rename_rule("classes.weight", build_block_names("class_embedder.embedding_table.weight"), SHARED_BY_BLOCKS),
    parse_rename_rule(
        f"{BLOCK_NAME}.attention.qkv.{{x}}",
        " ".join(f"{DIFFUSERS_BLOCK_NAME}.attn1.to_{part}.{{x}}" for part in "qkv"),
        QKV_TRANSFORM,
    ),
    *parse_copy_rules(
        "projection.bias = pos_embed.proj.bias",
        f"{BLOCK_NAME}.attention.out.{{x}} = {DIFFUSERS_BLOCK_NAME}.attn1.to_out.0.{{x}}",
        f"{BLOCK_NAME}.mlp.fc1.{{x}} = {DIFFUSERS_BLOCK_NAME}.ff.net.0.proj.{{x}}",
        f"{BLOCK_NAME}.mlp.fc2.{{x}} = {DIFFUSERS_BLOCK_NAME}.ff.net.2.{{x}}",
        f"{BLOCK_NAME}.modulation.{{x}} = {DIFFUSERS_BLOCK_NAME}.norm1.linear.{{x}}",
        "last.modulation.{x} = proj_out_1.{x}",
    ),
)


def infer_dit_config(
    shapes: Shapes, settings: dict[str, Any], projection_name: str, block_template: str, names: dict[str, str]
) -> DiTConfig:
    """Infer the config of a DiT from the shapes.

    `projection_name` and `block_template` are tensor names of the patch projection and of a layer in each block,
    `names` those of the MLP's first layer, the class table, and the last layer. Unless set, heads are those of the
    published model of that size, else one per 64 channels. Raises ValueError for an unsupported number of output
    channels.
    """
    width, channels, *patch = shapes[projection_name]
    depth = count_blocks(shapes, block_template)
    published = next(
        (
            heads
            for published_width, published_depth, heads in DIT_SHAPES.values()
            if (published_width, published_depth) == (width, depth)
        ),
        0,
    )
    heads = int(settings.get("heads") or published or max(1, width // 64))
    out_channels = shapes[names["last"]][0] // math.prod(patch)
    if out_channels not in (channels, 2 * channels):
        raise ValueError(f"it has {out_channels} output channels for images of {channels}")
    table_rows = shapes.get(names["classes"], (0,))[0]
    return DiTConfig(
        image=tuple(settings.get("image") or (32 // patch[0] * patch[0],) * len(patch)),
        patch=tuple(patch),
        channels=channels,
        classes=max(0, table_rows - 1),
        width=width,
        depth=depth,
        heads=heads,
        hidden=shapes[names["mlp"]][0],
        learned_variance=out_channels == 2 * channels,
        eps=float(settings.get("eps") or 1e-6),
    )


def infer_official_dit_config(shapes: Shapes, settings: dict[str, Any]) -> DiTConfig:
    """Infer the config of a DiT in the original format; the position table determines the image size."""
    names = {
        "mlp": "blocks.0.mlp.fc1.weight",
        "classes": "y_embedder.embedding_table.weight",
        "last": "final_layer.linear.weight",
    }
    if "pos_embed" in shapes and not settings.get("image"):
        patch = tuple(shapes["x_embedder.proj.weight"][2:])
        grid, _ = infer_position_grid(shapes["pos_embed"][1], (0,), None, patch)
        settings = settings | {"image": tuple(length * p for length, p in zip(grid, patch, strict=True))}
    return infer_dit_config(shapes, settings, "x_embedder.proj.weight", "blocks.{i}.attn.qkv.weight", names)


def infer_diffusers_dit_config(shapes: Shapes, settings: dict[str, Any]) -> DiTConfig:
    """Infer the config of a DiT in diffusers' format, whose time embedding has other frequencies (`time_shift` 1)."""
    embedding_name = "transformer_blocks.0.norm1.emb.class_embedder.embedding_table.weight"
    names = {"mlp": "transformer_blocks.0.ff.net.0.proj.weight", "classes": embedding_name, "last": "proj_out_2.weight"}
    config = infer_dit_config(
        shapes, settings, "pos_embed.proj.weight", "transformer_blocks.{i}.attn1.to_q.weight", names
    )
    return replace(config, time_shift=1)


def to_diffusers_dit_json(config: DiTConfig) -> dict[str, Any]:
    """Build diffusers' config.json of a DiT."""
    return {
        "_class_name": "DiTTransformer2DModel",
        "activation_fn": "gelu-approximate",
        "attention_bias": True,
        "attention_head_dim": config.width // config.heads,
        "dropout": 0.0,
        "in_channels": config.channels,
        "norm_elementwise_affine": False,
        "norm_eps": config.eps,
        "norm_num_groups": 32,
        "norm_type": "ada_norm_zero",
        "num_attention_heads": config.heads,
        "num_embeds_ada_norm": config.classes,
        "num_layers": config.depth,
        "out_channels": config.out_channels,
        "patch_size": config.patch[0],
        "sample_size": config.image[0],
        "upcast_attention": False,
    }


def is_official_dit(config: Any) -> bool:
    """Return whether the original code supports a DiT: square images, with classes, MLP of four times the width."""
    return (
        isinstance(config, DiTConfig)
        and len(config.image) == 2
        and len(set(config.image)) == len(set(config.patch)) == 1
        and config.hidden == 4 * config.width
        and config.classes > 0
        and not config.qk_norm
    )


DIT = WeightsFormat(
    "dit",
    "facebookresearch/DiT's DiT",
    ("x_embedder.proj.weight", "t_embedder.mlp.0.weight", "blocks.0.adaLN_modulation.1.weight"),
    DIT_RULES,
    configure=infer_official_dit_config,
    can_represent=lambda c: is_official_dit(c) and not c.time_shift,
    buffers=lambda c: {"pos_embed": sincos_position_table(c.grid, c.width).flatten(0, -2)[None]},
    ignored=("pos_embed",),
)
DIFFUSERS = WeightsFormat(
    "diffusers",
    "diffusers' DiTTransformer2DModel",
    ("pos_embed.proj.weight", "proj_out_1.weight", "transformer_blocks.0.norm1.linear.weight"),
    DIFFUSERS_RULES,
    configure=infer_diffusers_dit_config,
    can_represent=lambda c: is_official_dit(c) and c.time_shift == 1,
    describe=to_diffusers_dit_json,
    file_in_folder="diffusion_pytorch_model.safetensors",
)
FORMATS = (DIT, DIFFUSERS)
