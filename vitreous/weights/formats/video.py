"""VideoMAE (arXiv:2203.12602) in the formats of its authors and of transformers.

Both encoders have no prefix token, fixed positions that are not stored, and attention without a key bias.
`decoders` reads and writes the decoder of pre-training.

| file | norm | read as |
|---|---|---|
| fine-tuned | `fc_norm`, after pooling | a classifier of the mean of the tokens |
| pre-trained | `encoder.norm`, or `layernorm` | an encoder, each token normed |
| transformers' VideoMAEModel of a fine-tuned one | none | an encoder |

transformers' `fc_norm` always has an epsilon of 1e-5, regardless of config.json.

"Our" names and tensors are those of this package's models, "their" names and tensors those of the files.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from vitreous.models.config import VideoConfig, ViTConfig
from vitreous.weights.formats.measure import ViTShape, infer_clip_size, infer_vit_config
from vitreous.weights.formats.transformers import ATTENTION_OUTPUT, HF_QKV_NAMES, to_hf_common_json
from vitreous.weights.table import (
    CONVOLUTION,
    Shapes,
    WeightsFormat,
    build_block_rules,
    count_blocks,
    parse_copy_rules,
    parse_rename_rule,
)

HF_VIDEOMAE_TITLE = "transformers' VideoMAE"
DEFAULT_FRAMES = 16  # default frames of a clip
QKV_NAME = "encoder.blocks.{i}.attention.part.qkv"  # our name
LAYER = "encoder.layer.{i}"
VIDEOMAE_RULES = (
    parse_rename_rule("projection.weight", "patch_embed.proj.weight", CONVOLUTION),
    *build_block_rules("blocks.{i}", ("norm1", "norm2"), "attn.qkv", "attn.proj", ("mlp.fc1", "mlp.fc2")),
    *parse_copy_rules(
        "projection.bias = patch_embed.proj.bias",
        f"{QKV_NAME}.query_bias = blocks.{{i}}.attn.q_bias",
        f"{QKV_NAME}.value_bias = blocks.{{i}}.attn.v_bias",
        "encoder.norm.{x} = norm.{x}",
        "pooled_norm.{x} = fc_norm.{x}",
        "head.{x} = head.{x}",
    ),
)
HF_VIDEOMAE_RULES = (
    parse_rename_rule("projection.weight", "embeddings.patch_embeddings.projection.weight", CONVOLUTION),
    *build_block_rules(
        LAYER,
        ("layernorm_before", "layernorm_after"),
        HF_QKV_NAMES,
        ATTENTION_OUTPUT,
        ("intermediate.dense", "output.dense"),
    ),
    *parse_copy_rules(
        "projection.bias = embeddings.patch_embeddings.projection.bias",
        f"{QKV_NAME}.query_bias = {LAYER}.attention.attention.q_bias",
        f"{QKV_NAME}.value_bias = {LAYER}.attention.attention.v_bias",
        "encoder.norm.{x} = layernorm.{x}",
        "pooled_norm.{x} = fc_norm.{x}",
        "head.{x} = classifier.{x}",
    ),
)


def infer_videomae_config(
    shapes: Shapes, settings: dict[str, Any], names: dict[str, str], fields: dict[str, Any]
) -> ViTConfig:
    """Infer the config of a VideoMAE; `names` are the tensor names that differ between formats. Raises ValueError for a
    head combined with a norm of each token, because such a head uses the first patch."""
    width, channels, *patch = shapes[names["projection"]]
    image = infer_clip_size(settings, DEFAULT_FRAMES)
    pooled, normed = "fc_norm.weight" in shapes, names["norm"] in shapes
    classes = shapes.get(names["head"], (0,))[0]
    if classes and not pooled:
        raise ValueError("its head uses the first patch, not the mean of all")
    fields = {
        "arrangement": "joint",
        "channels": channels,
        "classes": classes,
        "class_token": False,
        "pool": "mean",
        "norm.final": "pooled" if pooled else "tokens" if normed else "none",
        "positions.kind": "sinusoid",
        "attention.key_bias": False,
        **fields,
    }
    tokens = math.prod(length // p for length, p in zip(image, patch, strict=True))
    size = ViTShape(width, count_blocks(shapes, names["depth"]), shapes[names["hidden"]][0], tuple(patch), tokens)
    return infer_vit_config(size, fields, settings | {"image": image}, (0,))


def infer_official_videomae_config(shapes: Shapes, settings: dict[str, Any]) -> ViTConfig:
    """Infer the config of a VideoMAE in its authors' format."""
    names = {"projection": "patch_embed.proj.weight", "hidden": "blocks.0.mlp.fc1.weight", "norm": "norm.weight"}
    return infer_videomae_config(
        shapes, settings, names | {"head": "head.weight", "depth": "blocks.{i}.norm1.weight"}, {}
    )


def infer_hf_videomae_config(shapes: Shapes, settings: dict[str, Any]) -> ViTConfig:
    """Infer the config of a VideoMAE in transformers' format."""
    names = {
        "projection": "embeddings.patch_embeddings.projection.weight",
        "hidden": "encoder.layer.0.intermediate.dense.weight",
        "norm": "layernorm.weight",
        "head": "classifier.weight",
        "depth": f"{LAYER}.layernorm_before.weight",
    }
    return infer_videomae_config(shapes, settings, names, {"norm.eps": 1e-12, "pooled_eps": 1e-5})


def to_hf_videomae_json(config: ViTConfig) -> dict[str, Any]:
    """Build the config.json of transformers' VideoMAE."""
    return {
        "architectures": ["VideoMAEForVideoClassification" if config.classes else "VideoMAEModel"],
        "model_type": "videomae",
        **to_hf_common_json(config),
        "num_frames": config.image[0],
        "tubelet_size": config.patch[0],
        "use_mean_pooling": config.norm.final != "tokens",
        "qv_bias": True,
        "id2label": {str(i): str(i) for i in range(config.classes)},
        "label2id": {str(i): i for i in range(config.classes)},
    }


def is_videomae_encoder(config: Any) -> bool:
    """Return whether the model is VideoMAE's encoder, with a head on the normed mean of the tokens or without a
    head."""
    return (
        isinstance(config, VideoConfig)
        and config.arrangement == "joint"
        and not config.attention.key_bias
        and config.positions.kind == "sinusoid"
        and not config.needs_positions
        and not config.prefix
        and config.pool == "mean"
        and config.mlp.kind == "gelu"
        and config.norm.layer_scale is None
        and not config.head.representation
        and config.projection_bias
        and (config.norm.final == "pooled" if config.classes else True)
        and (config.head.bias or not config.classes)
    )


VIDEOMAE = WeightsFormat(
    "videomae",
    "the original VideoMAE",
    ("patch_embed.proj.weight", "blocks.0.attn.q_bias", "blocks.0.attn.qkv.weight"),
    VIDEOMAE_RULES,
    configure=infer_official_videomae_config,
    scope=("encoder.",),
    strip=("backbone.",),
    excluded_names=("cls_token", "pos_embed"),  # tensors of a BEiT
    can_represent=lambda c: is_videomae_encoder(c) and c.norm.final != "none",
    prefix=lambda c: "encoder." if c.norm.final == "tokens" else "",
)
HF_VIDEOMAE = replace(
    VIDEOMAE,
    name="huggingface",
    get_pixel_scaling=lambda config: "imagenet",
    title=HF_VIDEOMAE_TITLE,
    signature=("embeddings.patch_embeddings.projection.weight", "encoder.layer.0.attention.attention.q_bias"),
    rules=HF_VIDEOMAE_RULES,
    configure=infer_hf_videomae_config,
    ignored=(r"decoder\..*", r"encoder_to_decoder\.weight", r"mask_token"),
    scope=(),
    strip=("videomae.",),
    excluded_names=(),
    can_represent=lambda c: is_videomae_encoder(c) and (bool(c.classes) or c.norm.final != "pooled"),
    prefix=lambda c: "videomae." if c.classes else "",
    unprefixed_names=("fc_norm", "classifier"),
    describe=to_hf_videomae_json,
)
FORMATS = (VIDEOMAE, HF_VIDEOMAE)
