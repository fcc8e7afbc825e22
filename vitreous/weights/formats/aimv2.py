"""AIMv2's image encoders (arXiv:2411.14402) in the files of their authors, of timm and of transformers.

Their blocks have RMSNorm, gated MLPs and no biases; another RMSNorm follows the patch projection.

"Our" names and tensors are those of this package's models, "their" names and tensors those of the files.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from vitreous.models.config import ModelConfig, ViTConfig
from vitreous.weights.formats.measure import ViTShape, infer_vit_config
from vitreous.weights.formats.transformers import has_square_patches, to_hf_common_json
from vitreous.weights.sidecar import MODEL_TYPE_TITLES
from vitreous.weights.table import (
    CONVOLUTION,
    Shapes,
    WeightsFormat,
    build_block_rules,
    build_position_transform,
    count_blocks,
    parse_copy_rules,
    parse_rename_rule,
)

HEAD_WIDTH = 128  # channels of a head in all published models


def infer_aimv2_config(shapes: Shapes, settings: dict[str, Any], names: dict[str, str]) -> ViTConfig:
    """Infer the config of an AIMv2 from the shapes; `names` are the tensor names that differ between formats. A file
    without positions has fixed ones (the models for images of native size)."""
    width, channels, *patch = shapes[names["projection"]]
    classes = shapes.get("head.weight", (0,))[0]
    fields = {
        "channels": channels,
        "classes": classes,
        "heads": max(1, width // HEAD_WIDTH),
        "class_token": False,
        "pool": "mean",
        "attention.qkv_bias": False,
        "attention.out_bias": False,
        "mlp.kind": "swiglu",
        "mlp.bias": False,
        "norm.kind": "rms",
        "norm.eps": 1e-5,
        "norm.patches": True,
        "positions.kind": "learned" if names["positions"] in shapes else "sincos",
    }
    image = settings.get("image") or (224, 224)
    fixed = (image[0] // patch[0]) * (image[1] // patch[1])
    tokens = shapes[names["positions"]][-2] if names["positions"] in shapes else fixed
    size = ViTShape(width, count_blocks(shapes, names["depth"]), shapes[names["output"]][1], tuple(patch), tokens)
    return infer_vit_config(size, fields, settings, (0,))


def infer_timm_aimv2_config(shapes: Shapes, settings: dict[str, Any]) -> ViTConfig:
    """Infer the config from timm's file."""
    return infer_aimv2_config(
        shapes,
        settings,
        {
            **{"projection": "patch_embed.proj.weight", "positions": "pos_embed", "depth": "blocks.{i}.norm1.weight"},
            "output": "blocks.0.mlp.fc2.weight",
        },
    )


def infer_original_aimv2_config(shapes: Shapes, settings: dict[str, Any]) -> ViTConfig:
    """Infer the config from the authors' file."""
    return infer_aimv2_config(
        shapes,
        settings,
        {
            **{"projection": "preprocessor.patchifier.proj.weight", "positions": "preprocessor.pos_embed"},
            **{"depth": "trunk.blocks.{i}.norm_1.weight", "output": "trunk.blocks.0.mlp.fc2.weight"},
        },
    )


def infer_hf_aimv2_config(shapes: Shapes, settings: dict[str, Any]) -> ViTConfig:
    """Infer the config from transformers' file."""
    return infer_aimv2_config(
        shapes,
        settings,
        {
            **{"projection": "embeddings.patch_embed.weight", "positions": "embeddings.position_embedding.weight"},
            **{"depth": "encoder.layers.{i}.rms_norm1.weight", "output": "encoder.layers.0.ffn.down_proj.weight"},
        },
    )


def is_aimv2(config: ModelConfig) -> bool:
    """Return whether the model is an AIMv2 with learned positions."""
    return (
        isinstance(config, ViTConfig)
        and has_square_patches(config)
        and not config.needs_positions
        and (config.positions.kind, config.prefix, config.pool) == ("learned", 0, "mean")
        and (config.norm.kind, config.norm.patches, config.norm.final) == ("rms", True, "tokens")
        and (config.mlp.kind, config.mlp.bias, config.mlp.norm) == ("swiglu", False, False)
        and not (config.attention.qkv_bias or config.attention.out_bias or config.attention.qk_norm)
        and config.norm.layer_scale is None
        and config.projection_bias
    )


def to_hf_aimv2_json(config: ViTConfig) -> dict[str, Any]:
    """Build transformers' config.json of an AIMv2."""
    description = to_hf_common_json(config)
    del description["layer_norm_eps"]
    return {
        "architectures": ["Aimv2VisionModel"],
        "model_type": "aimv2_vision_model",
        **description,
        "hidden_act": "silu",
        "rms_norm_eps": config.norm.eps,
        "qkv_bias": False,
        "mlp_bias": False,
        "use_head": False,
        "is_native": False,
    }


TIMM = WeightsFormat(
    "timm",
    "timm's AIMv2",
    ("patch_embed.proj.weight", "patch_embed.norm.weight", "blocks.0.attn.qkv.weight", "blocks.0.mlp.fc1_g.weight"),
    (
        parse_rename_rule("projection.weight", "patch_embed.proj.weight", CONVOLUTION),
        parse_rename_rule("position.table", "pos_embed", build_position_transform((1,))),
        *parse_copy_rules(
            "projection.bias = patch_embed.proj.bias",
            "patch_norm.weight = patch_embed.norm.weight",
            "encoder.norm.weight = norm.weight",
            "head.{x} = head.{x}",
        ),
        *build_block_rules(
            "blocks.{i}", ("norm1", "norm2"), "attn.qkv", "attn.proj", ("mlp.fc1_g mlp.fc1_x|mlp.fc1", "mlp.fc2")
        ),
    ),
    configure=infer_timm_aimv2_config,
    can_represent=lambda c: is_aimv2(c) and (c.head.bias or not c.classes),
    get_pixel_scaling=lambda c: "clip",
)
ORIGINAL = replace(
    TIMM,
    name="aimv2",
    title="the original AIMv2",
    signature=("preprocessor.patchifier.proj.weight", "trunk.blocks.0.attn.qkv.weight"),
    rules=(
        parse_rename_rule("projection.weight", "preprocessor.patchifier.proj.weight", CONVOLUTION),
        parse_rename_rule("position.table", "preprocessor.pos_embed", build_position_transform((1,))),
        *parse_copy_rules(
            "projection.bias = preprocessor.patchifier.proj.bias",
            "patch_norm.weight = preprocessor.patchifier.norm.weight",
            "encoder.norm.weight = trunk.post_trunk_norm.weight",
        ),
        *build_block_rules(
            "trunk.blocks.{i}", ("norm_1", "norm_2"), "attn.qkv", "attn.proj", ("mlp.fc1 mlp.fc3|mlp.fc1", "mlp.fc2")
        ),
    ),
    configure=infer_original_aimv2_config,
    can_represent=lambda c: is_aimv2(c) and not c.classes,
)
TRANSFORMERS = WeightsFormat(
    "huggingface",
    MODEL_TYPE_TITLES["aimv2_vision_model"],
    ("embeddings.patch_embed.weight", "embeddings.rms_norm.weight", "encoder.layers.0.ffn.gate_proj.weight"),
    (
        parse_rename_rule("projection.weight", "embeddings.patch_embed.weight", CONVOLUTION),
        parse_rename_rule("position.table", "embeddings.position_embedding.weight", build_position_transform(())),
        *parse_copy_rules(
            "projection.bias = embeddings.patch_embed.bias",
            "patch_norm.weight = embeddings.rms_norm.weight",
            "encoder.norm.weight = rms_norm.weight",
        ),
        *build_block_rules(
            "encoder.layers.{i}",
            ("rms_norm1", "rms_norm2"),
            " ".join(f"attention.{letter}_proj" for letter in "qkv"),
            "attention.out_proj",
            ("ffn.gate_proj ffn.up_proj|ffn.gate_proj", "ffn.down_proj"),
        ),
    ),
    configure=infer_hf_aimv2_config,
    strip=("vision_model.",),
    can_represent=lambda c: is_aimv2(c) and not c.classes,
    get_pixel_scaling=lambda c: "clip",
    describe=to_hf_aimv2_json,
)
FORMATS = (TIMM, ORIGINAL, TRANSFORMERS)
