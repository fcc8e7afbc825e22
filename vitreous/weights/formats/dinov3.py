"""DINOv3's Vision Transformers (arXiv:2508.10104) in the files of their authors, of timm and of transformers.

The files differ in three points:

| file | bias of the keys | periods of the rotary positions | number of heads |
|---|---|---|---|
| authors | in `qkv.bias`, multiplied by zero (`bias_mask`) | stored, rounded to bfloat16 | from the periods |
| timm | none; models whose names lack `_qkvb` have no bias | computed, not rounded | not in the file |
| transformers | none | computed, not rounded | in config.json |

"Our" names and tensors are those of this package's models, "their" names and tensors those of the files.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from vitreous.models.config import ModelConfig, ViTConfig
from vitreous.weights.formats.measure import ViTShape, infer_vit_config
from vitreous.weights.formats.transformers import has_square_patches, to_hf_common_json
from vitreous.weights.sidecar import MODEL_TYPE_TITLES
from vitreous.weights.table import (
    CONVOLUTION,
    PREFIX_TOKENS,
    RenameRule,
    Shapes,
    Tensors,
    TensorTransform,
    WeightsFormat,
    build_block_rules,
    count_blocks,
    make_prefix_names,
    parse_copy_rules,
    parse_rename_rule,
)

PERIODS = "rope_embed.periods"
ROTARY_BASE = 100.0
HEAD_WIDTHS = {4096: 128}  # width of a model -> channels of its heads; 64 in all other models
QKV = "encoder.blocks.{i}.attention.part.qkv"

#: (3 D,), whose middle third is multiplied by zero <-> (D,) of queries and (D,) of values
MASKED_KEY_BIAS = TensorTransform(
    lambda theirs, c: [theirs[0].chunk(3)[0], theirs[0].chunk(3)[2]],
    lambda ours, c: [torch.cat([ours[0], torch.zeros_like(ours[0]), ours[1]])],
)


def build_dinov3_rules(registers: str, scales: tuple[str, str], mlp: tuple[str, str]) -> tuple[RenameRule, ...]:
    """Build the rules that the authors' files and timm's have in common, from their names of registers, LayerScales and
    the layers of the MLP."""
    return (
        parse_rename_rule("projection.weight", "patch_embed.proj.weight", CONVOLUTION),
        parse_rename_rule("prefix", make_prefix_names("cls_token", "", registers), PREFIX_TOKENS),
        *parse_copy_rules("projection.bias = patch_embed.proj.bias", "encoder.norm.{x} = norm.{x}"),
        *build_block_rules("blocks.{i}", ("norm1", "norm2"), "attn.qkv", "attn.proj", mlp=mlp, scales=scales),
    )


def infer_dinov3_config(
    shapes: Shapes, settings: dict[str, Any], names: dict[str, str], fields: dict[str, Any] | None = None
) -> ViTConfig:
    """Infer the config of a DINOv3 from the shapes; `names` are the tensor names that differ between formats, `fields`
    further fields of the config. Raises ValueError if settings contradict the shapes."""
    width, channels, *patch = shapes[names["projection"]]
    image = settings.get("image") or (224, 224)
    gated = names["gate"] in shapes
    tokens = math.prod(length // p for length, p in zip(image, patch, strict=True))
    hidden = shapes[names["gate"] if gated else names["hidden"]][0]
    depth = count_blocks(shapes, names["depth"])
    has_bias = names["bias"] in shapes
    inferred = {
        "channels": channels,
        "classes": 0,
        "heads": max(1, width // HEAD_WIDTHS.get(width, 64)),
        "registers": shapes[names["registers"]][1] if names["registers"] in shapes else 0,
        "positions.kind": "none",
        "attention.kind": "rotary",
        "attention.qkv_bias": has_bias,
        "attention.key_bias": not has_bias,
        "rotary.base": ROTARY_BASE,
        "rotary.coordinates": "centred",
        "mlp.kind": "swiglu" if gated else "gelu",
        "norm.eps": 1e-5,
        "norm.layer_scale": 1e-5,
    }
    size = ViTShape(width, depth, hidden, tuple(patch), tokens)
    return infer_vit_config(size, inferred | (fields or {}), settings | {"image": image}, (0,))


def infer_original_dinov3_config(shapes: Shapes, settings: dict[str, Any]) -> ViTConfig:
    """Infer the config from the authors' file. Raises ValueError for periods of other rotary positions."""
    names = {
        **{"projection": "patch_embed.proj.weight", "registers": "storage_tokens", "depth": "blocks.{i}.norm1.weight"},
        **{"gate": "blocks.0.mlp.w1.weight", "hidden": "blocks.0.mlp.fc1.weight", "bias": "blocks.0.attn.qkv.bias"},
    }
    fields: dict[str, Any] = {"rotary.rounded": True}
    periods: Tensor | None = settings.get("facts", {}).get(PERIODS)
    if periods is not None:
        head_width = 4 * len(periods)
        fields["heads"] = shapes["cls_token"][-1] // head_width
        exact = compute_periods(head_width, rounded=False)
        fields["rotary.rounded"] = not torch.allclose(periods, exact, rtol=1e-5)
        if not torch.allclose(periods, exact, rtol=2**-8):
            raise ValueError(f"its rotary positions have another base than {ROTARY_BASE:g}")
    return infer_dinov3_config(shapes, settings, names, fields)


def infer_timm_dinov3_config(shapes: Shapes, settings: dict[str, Any]) -> ViTConfig:
    """Infer the config from timm's file."""
    return infer_dinov3_config(
        shapes,
        settings,
        {
            **{"projection": "patch_embed.proj.weight", "registers": "reg_token", "depth": "blocks.{i}.norm1.weight"},
            **{"gate": "blocks.0.mlp.fc1_g.weight", "hidden": "blocks.0.mlp.fc1.weight"},
            "bias": "blocks.0.attn.q_bias",
        },
    )


def infer_hf_dinov3_config(shapes: Shapes, settings: dict[str, Any]) -> ViTConfig:
    """Infer the config from transformers' file."""
    return infer_dinov3_config(
        shapes,
        settings,
        {
            **{"projection": "embeddings.patch_embeddings.weight", "registers": "embeddings.register_tokens"},
            **{"gate": "layer.0.mlp.gate_proj.weight", "hidden": "layer.0.mlp.up_proj.weight"},
            **{"depth": "layer.{i}.norm1.weight", "bias": "layer.0.attention.q_proj.bias"},
        },
    )


def compute_periods(head_width: int, rounded: bool = True) -> Tensor:
    """Compute the periods of the rotary positions: (head_width / 4,), rounded to bfloat16 as in the authors' files."""
    periods = ROTARY_BASE ** (torch.arange(head_width // 4) / (head_width // 4))
    return periods.bfloat16().float() if rounded else periods


def build_dinov3_buffers(config: ViTConfig) -> Tensors:
    """Build the tensors of the authors' file that follow from the config: periods, and the masks of the key biases."""
    third = torch.ones(config.width)
    mask = torch.cat([third, torch.zeros_like(third), third])
    blocks = range(config.depth if config.attention.qkv_bias else 0)
    masks = {f"blocks.{i}.attn.qkv.bias_mask": mask.clone() for i in blocks}  # safetensors refuses shared memory
    return masks | {PERIODS: compute_periods(config.width // config.heads, config.rotary.rounded)}


def is_dinov3(config: ModelConfig) -> bool:
    """Return whether the model is a DINOv3 without a head."""
    return (
        isinstance(config, ViTConfig)
        and has_square_patches(config)
        and config.attention.kind == "rotary"
        and (config.rotary.coordinates, config.rotary.base, config.rotary.register_base) == ("centred", ROTARY_BASE, 0)
        and config.positions.kind == "none"
        and config.attention.qkv_bias != config.attention.key_bias
        and config.norm.layer_scale is not None
        and (config.pool, config.norm.kind, config.norm.final) == ("class", "layer", "tokens")
        and not config.classes
    )


def to_hf_dinov3_json(config: ViTConfig) -> dict[str, Any]:
    """Build transformers' config.json of a DINOv3."""
    return {
        "architectures": ["DINOv3ViTModel"],
        "model_type": "dinov3_vit",
        **to_hf_common_json(config),
        "num_register_tokens": config.registers,
        "query_bias": config.attention.qkv_bias,
        "key_bias": False,
        "value_bias": config.attention.qkv_bias,
        "use_gated_mlp": config.mlp.kind == "swiglu",
        "hidden_act": "silu" if config.mlp.kind == "swiglu" else "gelu",
        "rope_theta": config.rotary.base,
        "pos_embed_rescale": None if config.rotary.rescale == 1 else config.rotary.rescale,
    }


SIGNATURE = ("patch_embed.proj.weight", "cls_token", "blocks.0.attn.qkv.weight")
ORIGINAL = WeightsFormat(
    "dinov3",
    "the original DINOv3",
    (*SIGNATURE, PERIODS, "blocks.0.ls1.gamma"),
    (
        parse_rename_rule(f"{QKV}.query_bias {QKV}.value_bias", "blocks.{i}.attn.qkv.bias", MASKED_KEY_BIAS),
        *build_dinov3_rules("storage_tokens", ("ls1.gamma", "ls2.gamma"), ("mlp.w1 mlp.w2|mlp.fc1", "mlp.w3|mlp.fc2")),
    ),
    configure=infer_original_dinov3_config,
    ignored=(r"mask_token", r"local_cls_norm\..*", r"rope_embed\.periods", r"blocks\.\d+\.attn\.qkv\.bias_mask"),
    strip=("backbone.", "teacher.backbone."),
    adds=lambda c: {"mask_token": (1, c.width)},
    buffers=build_dinov3_buffers,
    facts=(PERIODS,),
    determines=("heads",),
    can_represent=is_dinov3,
)
TIMM = WeightsFormat(
    "timm",
    "timm's DINOv3",
    (*SIGNATURE, "blocks.0.gamma_1", "reg_token"),
    (
        *parse_copy_rules(
            f"{QKV}.query_bias = blocks.{{i}}.attn.q_bias", f"{QKV}.value_bias = blocks.{{i}}.attn.v_bias"
        ),
        *build_dinov3_rules("reg_token", ("gamma_1", "gamma_2"), ("mlp.fc1_g mlp.fc1_x|mlp.fc1", "mlp.fc2")),
    ),
    configure=infer_timm_dinov3_config,
    strip=("backbone.", "model."),
    excluded_names=("pos_embed",),
    can_represent=lambda c: is_dinov3(c) and bool(c.registers),
)
HF_LAYER = "layer.{i}"
TRANSFORMERS = WeightsFormat(
    "huggingface",
    MODEL_TYPE_TITLES["dinov3_vit"],
    ("embeddings.patch_embeddings.weight", "layer.0.layer_scale1.lambda1", "layer.0.attention.q_proj.weight"),
    (
        *parse_copy_rules(
            "projection.bias = embeddings.patch_embeddings.bias",
            "encoder.norm.{x} = norm.{x}",
            f"{QKV}.query_bias = {HF_LAYER}.attention.q_proj.bias",
            f"{QKV}.value_bias = {HF_LAYER}.attention.v_proj.bias",
        ),
        parse_rename_rule("projection.weight", "embeddings.patch_embeddings.weight", CONVOLUTION),
        parse_rename_rule(
            "prefix", make_prefix_names("embeddings.cls_token", "", "embeddings.register_tokens"), PREFIX_TOKENS
        ),
        *build_block_rules(
            HF_LAYER,
            ("norm1", "norm2"),
            " ".join(f"attention.{letter}_proj" for letter in "qkv"),
            "attention.o_proj",
            mlp=("mlp.gate_proj mlp.up_proj|mlp.up_proj", "mlp.down_proj"),
            scales=("layer_scale1.lambda1", "layer_scale2.lambda1"),
        ),
    ),
    configure=infer_hf_dinov3_config,
    ignored=(r"embeddings\.mask_token",),
    strip=("model.",),
    adds=lambda c: {"embeddings.mask_token": (1, 1, c.width)},
    get_pixel_scaling=lambda c: "imagenet",
    describe=to_hf_dinov3_json,
    can_represent=is_dinov3,
)
FORMATS = (ORIGINAL, TIMM, TRANSFORMERS)
