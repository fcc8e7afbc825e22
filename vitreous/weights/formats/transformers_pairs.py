"""transformers' CLIP, SigLIP and SigLIP 2 with both encoders, and SigLIP's image encoder alone.

The image encoder of SigLIP 2 for variable resolution (NaFlex) differs from the others in two ways. Its patch projection
is a linear layer over (row, column, channel) instead of a convolution, and its positions are resized bilinearly with
antialiasing. "Our" names and tensors are those of this package's models, "their" names and tensors those of the files.
"""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor

from vitreous.models.config import ImageTextConfig, ModelConfig, TextConfig, ViTConfig
from vitreous.weights.formats.image_text import (
    QUERY_AND_KEY_VALUE,
    SCALAR_VECTOR,
    SIGLIP_FIELDS,
    build_scale_rules,
    get_siglip_text_fields,
    infer_text_config,
    is_clip_text,
    is_siglip_encoder,
    is_siglip_pair,
    nest_image_rules,
    nest_text_rules,
    select_prefix,
)
from vitreous.weights.formats.measure import ViTShape, infer_vit_config
from vitreous.weights.formats.transformers import (
    CLIP,
    CLIP_LAYER,
    HF_ACTIVATIONS,
    get_pixel_statistics,
    infer_hf_clip_config,
    is_clip_encoder,
    to_hf_common_json,
)
from vitreous.weights.sidecar import MODEL_TYPE_TITLES
from vitreous.weights.table import (
    BATCHED_TOKEN,
    COPY_TRANSFORM,
    Shapes,
    TensorTransform,
    WeightsFormat,
    build_block_rules,
    build_position_transform,
    count_blocks,
    parse_copy_rules,
    parse_rename_rule,
    unflatten_patch_projection,
)

NAFLEX_RESIZE = "bilinear-antialias"
ENCODER_RULES = build_block_rules(
    CLIP_LAYER,
    ("layer_norm1", "layer_norm2"),
    " ".join(f"self_attn.{letter}_proj" for letter in "qkv"),
    "self_attn.out_proj",
    ("mlp.fc1", "mlp.fc2"),
)
TEXT_RULES = (
    *parse_copy_rules(
        "embedding.weight = embeddings.token_embedding.weight",
        "positions = embeddings.position_embedding.weight",
        "encoder.norm.{x} = final_layer_norm.{x}",
        "projection.{x} = head.{x}",
    ),
    *ENCODER_RULES,
)
TEXT_SIGNATURE = "text_model.embeddings.token_embedding.weight"


def flatten_patches(theirs: list[Tensor], config: ViTConfig) -> list[Tensor]:
    """Convert a convolution (D, C, p, q), or NaFlex's linear layer (D, p q C), to our projection (D, C p q)."""
    weight = theirs[0]
    if weight.ndim == 2:
        weight = weight.unflatten(1, (*config.patch, config.channels)).permute(0, 3, 1, 2)
    return [weight.flatten(1)]


def unflatten_patches(ours: list[Tensor], config: ViTConfig) -> list[Tensor]:
    """Convert our projection (D, C p q) to a convolution (D, C, p, q), or to NaFlex's linear layer (D, p q C)."""
    weight = unflatten_patch_projection(ours[0], config)
    return [weight.permute(0, 2, 3, 1).flatten(1) if config.positions.resize == NAFLEX_RESIZE else weight]


SIGLIP_IMAGE_RULES = (
    parse_rename_rule(
        "projection.weight", "embeddings.patch_embedding.weight", TensorTransform(flatten_patches, unflatten_patches)
    ),
    parse_rename_rule("projection.bias", "embeddings.patch_embedding.bias", COPY_TRANSFORM),
    parse_rename_rule("position.table", "embeddings.position_embedding.weight", build_position_transform(())),
    *ENCODER_RULES,
    parse_rename_rule("pooling.query", "head.probe", BATCHED_TOKEN),
    parse_rename_rule("pooling.q.{x} pooling.kv.{x}", "head.attention.in_proj_{x}", QUERY_AND_KEY_VALUE),
    *parse_copy_rules(
        "encoder.norm.{x} = post_layernorm.{x}",
        "pooling.out.{x} = head.attention.out_proj.{x}",
        "pooling.norm.{x} = head.layernorm.{x}",
        "pooling.mlp.fc1.{x} = head.mlp.fc1.{x}",
        "pooling.mlp.fc2.{x} = head.mlp.fc2.{x}",
    ),
)


def infer_siglip_image_config(shapes: Shapes, settings: dict[str, Any]) -> ViTConfig:
    """Infer the config of SigLIP's image encoder from the shapes. Raises ValueError for a NaFlex encoder of another
    position resize rule, or whose patches are not square."""
    width, *inputs = shapes["embeddings.patch_embedding.weight"]
    fields = SIGLIP_FIELDS | {"classes": 0, "channels": settings.get("channels", 3), "positions.resize": "bicubic"}
    if len(inputs) == 3:
        fields["channels"], *patch = inputs
    else:
        side = math.isqrt(inputs[0] // fields["channels"])
        patch = list(settings.get("patch", (side, side)))
        if math.prod(patch) * fields["channels"] != inputs[0]:
            raise ValueError(f"its patches of {inputs[0]} values are not square; set patch_size in config.json")
        fields["positions.resize"] = NAFLEX_RESIZE
        if settings.get("positions.resize", NAFLEX_RESIZE) != NAFLEX_RESIZE:
            raise ValueError(f"its positions can only be resized by {NAFLEX_RESIZE}")
    size = ViTShape(
        width,
        count_blocks(shapes, f"{CLIP_LAYER}.layer_norm1.weight"),
        shapes["encoder.layers.0.mlp.fc1.weight"][0],
        tuple(patch),
        shapes["embeddings.position_embedding.weight"][0],
    )
    return infer_vit_config(size, fields, settings, (0,))


def infer_hf_text_config(
    shapes: Shapes, projection: str, fields: dict[str, Any], settings: dict[str, Any]
) -> TextConfig:
    """Infer the config of a text encoder from the shapes; `projection` is the name of the weight of its projection."""
    text = select_prefix(shapes, "text_model.")
    sizes = (
        count_blocks(text, f"{CLIP_LAYER}.layer_norm1.weight"),
        text["encoder.layers.0.mlp.fc1.weight"][0],
        shapes[projection][0],
    )
    embedding, length = text["embeddings.token_embedding.weight"], text["embeddings.position_embedding.weight"][0]
    return infer_text_config(embedding, length, sizes, fields, settings)


def infer_siglip_pair_config(shapes: Shapes, settings: dict[str, Any]) -> ImageTextConfig:
    """Infer the config of a SigLIP or SigLIP 2 from the shapes."""
    fields = get_siglip_text_fields(shapes[TEXT_SIGNATURE][0])
    return ImageTextConfig(
        backbone=infer_siglip_image_config(select_prefix(shapes, "vision_model."), settings),
        text=infer_hf_text_config(shapes, "text_model.head.weight", fields, settings),
        bias=True,
    )


def rename_clip_tensor(name: str) -> str:
    """Return the name of a tensor of CLIP's image encoder in a file with both encoders."""
    return name if name.startswith("visual_projection") else f"vision_model.{name}"


def infer_clip_pair_config(shapes: Shapes, settings: dict[str, Any]) -> ImageTextConfig:
    """Infer the config of a CLIP with both encoders from the shapes. Raises ValueError for texts that end with a token
    other than the last of the vocabulary."""
    last = shapes[TEXT_SIGNATURE][0] - 1
    end = settings.get("text.end_id", last)
    if end < last and end != 2:  # files of 2021 and 2022 have 2, which transformers ignores
        raise ValueError(f"its texts end with token {end}, not with the last of the vocabulary, {last}")
    projection = {"visual_projection.weight": shapes["visual_projection.weight"]}
    return ImageTextConfig(
        backbone=infer_hf_clip_config(select_prefix(shapes, "vision_model.") | projection, settings),
        text=infer_hf_text_config(shapes, "text_projection.weight", {}, settings | {"text.end_id": last}),
    )


def to_hf_text_json(config: TextConfig, model_type: str) -> dict[str, Any]:
    """Build the `text_config` of a config.json."""
    return {
        "model_type": model_type,
        "vocab_size": config.vocabulary,
        "max_position_embeddings": config.length,
        "hidden_size": config.width,
        "num_hidden_layers": config.depth,
        "num_attention_heads": config.heads,
        "intermediate_size": config.hidden,
        "hidden_act": HF_ACTIVATIONS[config.gelu],
        "layer_norm_eps": config.eps,
        "pad_token_id": config.pad_id,
        "eos_token_id": config.end_id,
    }


def to_siglip_image_json(config: ViTConfig) -> dict[str, Any]:
    """Build the config.json of SigLIP's image encoder; that of NaFlex has a number of patches, not an image size."""
    description = {"model_type": "siglip_vision_model", **to_hf_common_json(config)}
    if config.positions.resize == NAFLEX_RESIZE:
        del description["image_size"]
        description |= {"model_type": "siglip2_vision_model", "num_patches": math.prod(config.table_grid)}
    return description


def to_siglip_json(config: ImageTextConfig) -> dict[str, Any]:
    """Build the config.json of a SigLIP or SigLIP 2 with both encoders."""
    image_config: Any = config.backbone
    image = to_siglip_image_json(image_config)
    name = "siglip2" if image["model_type"].startswith("siglip2") else "siglip"
    text = to_hf_text_json(config.text, f"{name}_text_model") | {"projection_size": config.text.embedding}
    return {
        "architectures": [f"{name.capitalize()}Model"],
        "model_type": name,
        "vision_config": image,
        "text_config": text,
    }


def to_clip_json(config: ImageTextConfig) -> dict[str, Any]:
    """Build the config.json of a CLIP with both encoders."""
    channels = {"projection_dim": config.text.embedding}
    image: Any = config.backbone
    return {
        "architectures": ["CLIPModel"],
        "model_type": "clip",
        **channels,
        "vision_config": {"model_type": "clip_vision_model", **to_hf_common_json(image), **channels},
        "text_config": to_hf_text_json(config.text, "clip_text_model") | channels,
    }


def is_clip_pair(config: ModelConfig) -> bool:
    """Return whether the model is a CLIP as in transformers, with both encoders and no bias of the logits."""
    return (
        isinstance(config, ImageTextConfig)
        and is_clip_encoder(config.backbone)
        and config.backbone.classes > 0
        and is_clip_text(config)
        and not config.bias
    )


SIGLIP = WeightsFormat(
    "huggingface",
    MODEL_TYPE_TITLES["siglip_vision_model"],
    ("embeddings.patch_embedding.weight", "post_layernorm.weight", "head.probe"),
    SIGLIP_IMAGE_RULES,
    get_pixel_scaling=lambda c: "half",
    configure=infer_siglip_image_config,
    ignored=(r"text_model\..*", r"logit_(scale|bias)", r".*position_ids", r"classifier\..*"),
    strip=("vision_model.",),
    can_represent=is_siglip_encoder,
    prefix=lambda c: "vision_model.",
    describe=lambda c: {
        **to_siglip_image_json(c),
        "architectures": ["Siglip2VisionModel" if c.positions.resize == NAFLEX_RESIZE else "SiglipVisionModel"],
    },
)
SIGLIP_PAIR = WeightsFormat(
    "huggingface",
    MODEL_TYPE_TITLES["siglip"],
    ("vision_model.head.probe", TEXT_SIGNATURE, "logit_scale", "logit_bias"),
    (
        *nest_image_rules(SIGLIP_IMAGE_RULES, lambda name: f"vision_model.{name}"),
        *nest_text_rules(TEXT_RULES, "text_model."),
        *build_scale_rules("logit_scale", "logit_bias", SCALAR_VECTOR),
    ),
    configure=infer_siglip_pair_config,
    ignored=(r".*position_ids",),
    can_represent=is_siglip_pair,
    describe=to_siglip_json,
)
CLIP_PAIR = WeightsFormat(
    "huggingface",
    MODEL_TYPE_TITLES["clip"],
    ("vision_model.embeddings.class_embedding", TEXT_SIGNATURE, "text_projection.weight", "logit_scale"),
    (
        *nest_image_rules(CLIP.rules, rename_clip_tensor),
        *parse_copy_rules("text.projection.weight = text_projection.weight"),
        *nest_text_rules(TEXT_RULES, "text_model."),
        *build_scale_rules("logit_scale", "logit_bias", COPY_TRANSFORM),
    ),
    get_pixel_scaling=lambda c: get_pixel_statistics(c.backbone),
    configure=infer_clip_pair_config,
    ignored=(r".*position_ids",),
    can_represent=is_clip_pair,
    describe=to_clip_json,
)
FORMATS = [CLIP_PAIR, SIGLIP_PAIR, SIGLIP]
