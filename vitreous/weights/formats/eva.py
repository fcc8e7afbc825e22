"""ViTs whose rotary positions rotate neighbouring channels: EVA-02 (arXiv:2303.11331), Perception Encoder
(arXiv:2504.13181) and ViT-5 (arXiv:2602.08071), in the files of their authors and of timm.

Our attention rotates channels i and i + d / 2 of a head, theirs 2 i and 2 i + 1, so the rows of queries and keys are
reordered; Perception Encoder also rotates by columns first. Attention does not depend on the order of the channels, so
outputs are equal.

"Our" names and tensors are those of this package's models, "their" names and tensors those of the files.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from vitreous.models.config import ModelConfig, ViTConfig
from vitreous.weights.formats.measure import ViTShape, infer_vit_config
from vitreous.weights.formats.transformers import has_square_patches
from vitreous.weights.table import (
    BARE_TOKEN,
    BATCHED_TOKEN,
    CONVOLUTION,
    FLAX_DENSE,
    PREFIX_TOKENS,
    RenameRule,
    Shapes,
    TensorTransform,
    WeightsFormat,
    build_block_rules,
    build_position_transform,
    count_blocks,
    make_prefix_names,
    parse_copy_rules,
    parse_rename_rule,
)

QKV = "encoder.blocks.{i}.attention.part.qkv"
HALF_HEAD_WIDTH = 32  # half of the channels of a head in all published models but PE-Core-G
PE_POOL_HEADS = 8


def to_half_pairs(tensor: Tensor, config: ViTConfig) -> Tensor:
    """Reorder the channels of heads, (h d, ...), from neighbouring pairs to channels i and i + d / 2."""
    pairs = tensor.unflatten(0, (config.heads, -1, 2)).transpose(1, 2)
    return swap_axis_order(pairs, config).flatten(0, 2)


def to_neighbour_pairs(tensor: Tensor, config: ViTConfig) -> Tensor:
    """Reorder the channels of heads, (h d, ...), from channels i and i + d / 2 to neighbouring pairs."""
    halves = swap_axis_order(tensor.unflatten(0, (config.heads, 2, -1)), config)
    return halves.transpose(1, 2).flatten(0, 2)


def swap_axis_order(pairs: Tensor, config: ViTConfig) -> Tensor:
    """Swap the pairs (h, 2, d / 2, ...) of rows and columns for a Perception Encoder; others are unchanged."""
    return torch.cat(pairs.chunk(2, 2)[::-1], 2) if config.first_norm else pairs


def reorder_fused(reorder: Callable[[Tensor, ViTConfig], Tensor]) -> Callable[[list[Tensor], Any], list[Tensor]]:
    """Return a function that reorders queries and keys in one tensor (3 D, ...) of a list."""

    def convert(tensors: list[Tensor], config: ViTConfig) -> list[Tensor]:
        """Reorder the channels of queries and keys."""
        query, key, value = tensors[0].chunk(3)
        return [torch.cat([reorder(query, config), reorder(key, config), value])]

    return convert


#: (3 D, ...) with neighbouring pairs <-> (3 D, ...) with pairs of halves
FUSED = TensorTransform(reorder_fused(to_half_pairs), reorder_fused(to_neighbour_pairs))
#: (D, D) of queries, keys and values <-> (3 D, D)
SEPARATE = TensorTransform(
    lambda theirs, c: [torch.cat([to_half_pairs(theirs[0], c), to_half_pairs(theirs[1], c), theirs[2]])],
    lambda ours, c: [
        to_neighbour_pairs(ours[0].chunk(3)[0], c),
        to_neighbour_pairs(ours[0].chunk(3)[1], c),
        ours[0].chunk(3)[2],
    ],
)
#: (D,) of queries <-> (D,)
QUERY_BIAS = TensorTransform(
    lambda theirs, c: [to_half_pairs(theirs[0], c)], lambda ours, c: [to_neighbour_pairs(ours[0], c)]
)
#: (d,), the scale of a norm of queries or keys <-> (d,)
HEAD_NORM = TensorTransform(
    lambda theirs, c: [theirs[0].unflatten(0, (-1, 2)).T.flatten()],
    lambda ours, c: [ours[0].unflatten(0, (2, -1)).T.flatten()],
)


def build_common_rules(mlp: tuple[str, str], scales: tuple[str, str] | None = None) -> tuple[RenameRule, ...]:
    """Build the rules of tensors that timm's names and EVA-02's have in common, from their names of the MLP's layers
    and of the LayerScales."""
    return (
        parse_rename_rule("projection.weight", "patch_embed.proj.weight", CONVOLUTION),
        parse_rename_rule("prefix", make_prefix_names("cls_token", "", "reg_token"), PREFIX_TOKENS),
        parse_rename_rule("slots position.table", "pos_embed", build_position_transform((1,))),
        *parse_copy_rules(
            "projection.bias = patch_embed.proj.bias",
            "first_norm.{x} = norm_pre.{x}",
            "encoder.norm.{x} = norm.{x}",
            "pooled_norm.{x} = fc_norm.{x}",
            "head.{x} = head.{x}",
        ),
        *build_block_rules("blocks.{i}", ("norm1", "norm2"), "attn.qkv", "attn.proj", mlp=mlp, scales=scales),
    )


def infer_eva_config(shapes: Shapes, settings: dict[str, Any], slots: int, fields: dict[str, Any]) -> ViTConfig:
    """Infer the config from timm's names and from the fields of the family; `slots` prefix tokens have positions."""
    width, channels, *patch = shapes["patch_embed.proj.weight"]
    output = shapes["blocks.0.mlp.fc2.weight" if "blocks.0.mlp.fc2.weight" in shapes else "blocks.0.mlp.w3.weight"]
    classes = shapes.get("head.weight", (0,))[0]
    inferred = {
        "channels": channels,
        "classes": classes,
        "head.bias": not classes or "head.bias" in shapes,
        "heads": max(1, width // (2 * HALF_HEAD_WIDTH)),
        "attention.kind": "rotary",
        "class_token": "cls_token" in shapes,
        "projection_bias": "patch_embed.proj.bias" in shapes,
        "norm.final": "tokens" if "norm.weight" in shapes else "pooled" if "fc_norm.weight" in shapes else "none",
    }
    depth = count_blocks(shapes, "blocks.{i}.norm1.weight")
    size = ViTShape(width, depth, output[1], tuple(patch), shapes["pos_embed"][1])
    return infer_vit_config(size, inferred | fields, settings, (slots,))


def infer_eva02_config(shapes: Shapes, settings: dict[str, Any]) -> ViTConfig:
    """Infer the config of an EVA-02 from the shapes."""
    fields = {
        "pool": "class" if "norm.weight" in shapes and "fc_norm.weight" not in shapes else "mean",
        "attention.key_bias": False,
        "attention.inner_norm": bool(
            {"blocks.0.attn.norm.weight", "blocks.0.attn.inner_attn_ln.weight"} & shapes.keys()
        ),
        "rotary.coordinates": "reference",
        "mlp.kind": "swiglu",
        "mlp.norm": bool({"blocks.0.mlp.norm.weight", "blocks.0.mlp.ffn_ln.weight"} & shapes.keys()),
    }
    return infer_eva_config(shapes, settings, 1, fields)


def is_eva02(config: ModelConfig) -> bool:
    """Return whether the model is an EVA-02, except for its number of classes."""
    return (
        isinstance(config, ViTConfig)
        and has_square_patches(config)
        and config.attention.kind == "rotary"
        and (config.rotary.coordinates, config.rotary.base, config.rotary.register_base) == ("reference", 10000.0, 0)
        and (config.rotary.reference, config.attention.key_bias, config.attention.qkv_bias) == (16, False, True)
        and (config.positions.kind, config.prefix_position_count, config.prefix) == ("learned", 1, 1)
        and config.mlp.kind == "swiglu"
        and config.norm.layer_scale is None
        and not config.first_norm
    )


TIMM_MLP = ("mlp.fc1_g mlp.fc1_x", "mlp.fc2")
EVA02_SIGNATURE = ("patch_embed.proj.weight", "pos_embed", "cls_token")
EVA02_TIMM = WeightsFormat(
    "timm",
    "timm's EVA-02",
    (*EVA02_SIGNATURE, "blocks.0.attn.q_proj.weight", "blocks.0.attn.q_proj.bias", "blocks.0.mlp.fc1_g.weight"),
    (
        parse_rename_rule(
            f"{QKV}.weight", " ".join(f"blocks.{{i}}.attn.{letter}_proj.weight" for letter in "qkv"), SEPARATE
        ),
        parse_rename_rule(f"{QKV}.query_bias", "blocks.{i}.attn.q_proj.bias", QUERY_BIAS),
        *parse_copy_rules(
            f"{QKV}.value_bias = blocks.{{i}}.attn.v_proj.bias",
            "encoder.blocks.{i}.mlp.part.norm.{x} = blocks.{i}.mlp.norm.{x}",
            "encoder.blocks.{i}.attention.part.inner_norm.{x} = blocks.{i}.attn.norm.{x}",
        ),
        *build_common_rules((f"{TIMM_MLP[0]}|mlp.fc1", "mlp.fc2")),
    ),
    configure=infer_eva02_config,
    can_represent=lambda c: is_eva02(c) and c.mlp.norm,
    get_pixel_scaling=lambda c: "clip",
)
#: EVA-02 Ti and S, which have fused layers and no norm in the MLP
EVA02_TIMM_FUSED = replace(
    EVA02_TIMM,
    signature=(*EVA02_SIGNATURE, "blocks.0.attn.qkv.weight", "blocks.0.attn.q_bias", "blocks.0.mlp.fc1.weight"),
    rules=(
        parse_rename_rule(f"{QKV}.weight", "blocks.{i}.attn.qkv.weight", FUSED),
        parse_rename_rule(f"{QKV}.query_bias", "blocks.{i}.attn.q_bias", QUERY_BIAS),
        *parse_copy_rules(f"{QKV}.value_bias = blocks.{{i}}.attn.v_bias"),
        *build_common_rules(("mlp.fc1", "mlp.fc2")),
    ),
    can_represent=lambda c: is_eva02(c) and not c.mlp.norm and not c.attention.inner_norm,
    excluded_names=("blocks.0.gamma_1", "blocks.0.attn.relative_position_bias_table"),
)
EVA02 = replace(
    EVA02_TIMM,
    name="eva02",
    title="the original EVA-02",
    signature=(*EVA02_SIGNATURE, "blocks.0.attn.q_proj.weight", "blocks.0.attn.q_bias", "blocks.0.mlp.w1.weight"),
    rules=(
        EVA02_TIMM.rules[0],
        parse_rename_rule(f"{QKV}.query_bias", "blocks.{i}.attn.q_bias", QUERY_BIAS),
        *parse_copy_rules(
            f"{QKV}.value_bias = blocks.{{i}}.attn.v_bias",
            "encoder.blocks.{i}.mlp.part.norm.{x} = blocks.{i}.mlp.ffn_ln.{x}",
            "encoder.blocks.{i}.attention.part.inner_norm.{x} = blocks.{i}.attn.inner_attn_ln.{x}",
        ),
        *build_common_rules(("mlp.w1 mlp.w2|mlp.fc1", "mlp.w3|mlp.fc2")),
    ),
    ignored=(r"mask_token", r"lm_head\..*", r"(blocks\.\d+\.attn\.)?rope\.freqs_(cos|sin)"),
)


def infer_pe_config(shapes: Shapes, settings: dict[str, Any]) -> ViTConfig:
    """Infer the config of a Perception Encoder from the shapes, by timm's names."""
    has_pool, has_class_token = "attn_pool.latent" in shapes, "cls_token" in shapes
    width = shapes["patch_embed.proj.weight"][0]
    pool_hidden = shapes.get("attn_pool.mlp.fc1.weight", (0,))[0]
    fields = {
        "first_norm": True,
        "norm.eps": 1e-5,
        "pool": "attention" if has_pool else "mean",
        "head.pool_heads": PE_POOL_HEADS if has_pool else 0,
        "head.pool_hidden": 0 if pool_hidden == shapes["blocks.0.mlp.fc1.weight"][0] else pool_hidden,
        "rotary.offset": int(has_class_token),
        "norm.layer_scale": 0.1 if "blocks.0.gamma_1" in shapes else None,
        **({} if width % (2 * HALF_HEAD_WIDTH) == 0 and width != PE_G_WIDTH else {"heads": 16}),
    }
    return infer_eva_config(shapes, settings, int(has_class_token), fields)


PE_G_WIDTH = 1536  # PE-Core-G has 16 heads of 96 channels


def is_perception_encoder(config: ModelConfig) -> bool:
    """Return whether the model is a Perception Encoder."""
    return (
        isinstance(config, ViTConfig)
        and has_square_patches(config)
        and config.first_norm
        and config.attention.kind == "rotary"
        and (config.rotary.coordinates, config.rotary.base, config.rotary.register_base) == ("index", 10000.0, 0)
        and config.rotary.offset == int(config.class_token)
        and (config.positions.kind, config.prefix_position_count) == ("learned", config.prefix)
        and (config.attention.qkv_bias, config.attention.key_bias, config.mlp.kind) == (True, True, "gelu")
        and not config.projection_bias
        and not config.registers
    )


POOL_RULES = (
    parse_rename_rule("pooling.query", "attn_pool.latent", BATCHED_TOKEN),
    *parse_copy_rules(
        *(f"pooling.{ours}.{{x}} = attn_pool.{theirs}.{{x}}" for ours, theirs in (("q", "q"), ("kv", "kv"))),
        "pooling.out.{x} = attn_pool.proj.{x}",
        "pooling.norm.{x} = attn_pool.norm.{x}",
        "pooling.mlp.fc1.{x} = attn_pool.mlp.fc1.{x}",
        "pooling.mlp.fc2.{x} = attn_pool.mlp.fc2.{x}",
    ),
)
PE_TIMM = WeightsFormat(
    "timm",
    "timm's Perception Encoder",
    ("patch_embed.proj.weight", "pos_embed", "norm_pre.weight", "attn_pool.latent", "blocks.0.attn.qkv.weight"),
    (
        parse_rename_rule(f"{QKV}.weight", "blocks.{i}.attn.qkv.weight", FUSED),
        parse_rename_rule(f"{QKV}.bias", "blocks.{i}.attn.qkv.bias", FUSED),
        *POOL_RULES,
        *build_common_rules(("mlp.fc1", "mlp.fc2"), ("gamma_1", "gamma_2")),
    ),
    configure=infer_pe_config,
    can_represent=lambda c: is_perception_encoder(c) and c.pool == "attention" and (c.head.bias or not c.classes),
    get_pixel_scaling=lambda c: "half",
)
#: Perception Encoders without pooling, which also have no last norm; CLIP's files have one
PE_SPATIAL_TIMM = replace(
    PE_TIMM,
    signature=("patch_embed.proj.weight", "pos_embed", "norm_pre.weight", "blocks.0.attn.qkv.weight"),
    excluded_names=("norm.weight", "fc_norm.weight", "attn_pool.latent", "blocks.0.ls1.gamma"),
    can_represent=lambda c: is_perception_encoder(c) and c.pool == "mean" and c.norm.final == "none",
)
PE_BLOCK = "transformer.resblocks.{i}"
#: the query, and the key and value rows of (3 D, ...) <-> (D, ...) and (2 D, ...)
POOL_INPUT = TensorTransform(
    lambda theirs, c: list(theirs[0].split([c.width, 2 * c.width])), lambda ours, c: [torch.cat(ours)]
)
PE_SIGNATURE = ("conv1.weight", "positional_embedding", "ln_pre.weight", "transformer.resblocks.0.attn.in_proj_weight")
PE = WeightsFormat(
    "perception-encoder",
    "the original Perception Encoder",
    (*PE_SIGNATURE, "attn_pool.probe"),
    (
        parse_rename_rule("projection.weight", "conv1.weight", CONVOLUTION),
        parse_rename_rule("prefix", "class_embedding", BARE_TOKEN),
        parse_rename_rule("slots position.table", "positional_embedding", build_position_transform(())),
        parse_rename_rule(f"{QKV}.weight", f"{PE_BLOCK}.attn.in_proj_weight", FUSED),
        parse_rename_rule(f"{QKV}.bias", f"{PE_BLOCK}.attn.in_proj_bias", FUSED),
        *build_block_rules(
            PE_BLOCK,
            ("ln_1", "ln_2"),
            "attn.in_proj_{x}",
            "attn.out_proj",
            mlp=("mlp.c_fc", "mlp.c_proj"),
            scales=("ls_1.gamma", "ls_2.gamma"),
        ),
        parse_rename_rule("pooling.query", "attn_pool.probe", BATCHED_TOKEN),
        parse_rename_rule("pooling.q.weight pooling.kv.weight", "attn_pool.attn.in_proj_weight", POOL_INPUT),
        parse_rename_rule("pooling.q.bias pooling.kv.bias", "attn_pool.attn.in_proj_bias", POOL_INPUT),
        parse_rename_rule("head.weight", "proj", FLAX_DENSE),
        *parse_copy_rules(
            "first_norm.{x} = ln_pre.{x}",
            "encoder.norm.{x} = ln_post.{x}",
            "pooling.out.{x} = attn_pool.attn.out_proj.{x}",
            "pooling.norm.{x} = attn_pool.layernorm.{x}",
            "pooling.mlp.fc1.{x} = attn_pool.mlp.c_fc.{x}",
            "pooling.mlp.fc2.{x} = attn_pool.mlp.c_proj.{x}",
        ),
    ),
    configure=lambda shapes, settings: infer_original_pe_config(shapes, settings),
    scope=("visual.",),
    prefix=lambda c: "visual.",
    can_represent=lambda c: is_perception_encoder(c) and c.pool == "attention" and not (c.head.bias and c.classes),
    get_pixel_scaling=lambda c: "half",
)
#: the image encoder of CLIP has the same names and a last norm
PE_SPATIAL = replace(
    PE,
    signature=PE_SIGNATURE,
    excluded_names=("ln_post.weight", "attn_pool.probe"),
    can_represent=lambda c: (
        is_perception_encoder(c) and (c.pool, c.norm.final) == ("mean", "none") and not (c.head.bias and c.classes)
    ),
)
ORIGINAL_PE_NAMES = {
    "conv1.weight": "patch_embed.proj.weight",
    "ln_post.weight": "norm.weight",
    "attn_pool.probe": "attn_pool.latent",
    "attn_pool.mlp.c_fc.weight": "attn_pool.mlp.fc1.weight",
    "transformer.resblocks.0.mlp.c_fc.weight": "blocks.0.mlp.fc1.weight",
    "transformer.resblocks.0.mlp.c_proj.weight": "blocks.0.mlp.fc2.weight",
    "transformer.resblocks.0.ls_1.gamma": "blocks.0.gamma_1",
}


def infer_original_pe_config(shapes: Shapes, settings: dict[str, Any]) -> ViTConfig:
    """Infer the config of a Perception Encoder from the shapes of the authors' file."""
    renamed = {ORIGINAL_PE_NAMES.get(name, name): shape for name, shape in shapes.items()}
    depth = count_blocks(shapes, f"{PE_BLOCK}.ln_1.weight")
    renamed |= {f"blocks.{i}.norm1.weight": shapes["ln_pre.weight"] for i in range(depth)}
    renamed |= {"pos_embed": (1, *shapes["positional_embedding"])}
    renamed |= {"cls_token": (1,)} if "class_embedding" in shapes else {}
    renamed |= {"head.weight": shapes["proj"][::-1]} if "proj" in shapes else {}
    return infer_pe_config(renamed, {"positions.resize": "bilinear"} | settings)


def infer_vit5_config(shapes: Shapes, settings: dict[str, Any]) -> ViTConfig:
    """Infer the config of a ViT-5 from the shapes. Its rotary positions refer to the grid of its positions."""
    registers = shapes["reg_token"][1]
    fields = {
        "registers": registers,
        "attention.qkv_bias": False,
        "attention.qk_norm": True,
        "norm.kind": "rms",
        "norm.layer_scale": 1e-4,
        "rotary.coordinates": "reference",
        "rotary.reference": math.isqrt(shapes["pos_embed"][1]),
        "rotary.register_base": 100.0,
    }
    return infer_eva_config(shapes, settings, 0, fields)


def is_vit5(config: ModelConfig) -> bool:
    """Return whether the model is a ViT-5."""
    return (
        isinstance(config, ViTConfig)
        and has_square_patches(config)
        and config.attention.kind == "rotary"
        and (config.rotary.coordinates, config.rotary.base, config.rotary.register_base) == ("reference", 1e4, 100.0)
        and config.rotary.reference == config.grid[0]
        and (config.attention.qkv_bias, config.attention.qk_norm, config.norm.kind) == (False, True, "rms")
        and (config.positions.kind, config.prefix_position_count, config.mlp.kind) == ("learned", 0, "gelu")
        and config.norm.layer_scale is not None
        and config.class_token
        and config.pool == "class"
    )


VIT5 = WeightsFormat(
    "vit5",
    "the original ViT-5",
    ("patch_embed.proj.weight", "pos_embed", "cls_token", "reg_token", "blocks.0.attn.q_norm.weight"),
    (
        parse_rename_rule(f"{QKV}.weight", "blocks.{i}.attn.qkv.weight", FUSED),
        parse_rename_rule(
            "encoder.blocks.{i}.attention.part.query_norm.weight", "blocks.{i}.attn.q_norm.weight", HEAD_NORM
        ),
        parse_rename_rule(
            "encoder.blocks.{i}.attention.part.key_norm.weight", "blocks.{i}.attn.k_norm.weight", HEAD_NORM
        ),
        *build_common_rules(("mlp.fc1", "mlp.fc2"), ("gamma_1", "gamma_2")),
    ),
    configure=infer_vit5_config,
    ignored=(r"blocks\.\d+\.attn\.rope(_reg)?\.freqs",),
    can_represent=is_vit5,
    get_pixel_scaling=lambda c: "imagenet",
)
FORMATS = (EVA02_TIMM, EVA02_TIMM_FUSED, EVA02, PE_TIMM, PE_SPATIAL_TIMM, PE, PE_SPATIAL, VIT5)
