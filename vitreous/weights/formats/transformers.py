"""Hugging Face transformers' models in a folder: ViT and related models, ViViT, DINOv2, CLIP's image encoder, BiT.

The names are those in files, which `from_pretrained` reads and `save_pretrained` writes; names in memory may differ.
The config.json contains settings that shapes do not determine: heads, GELU, epsilon.

"Our" names and tensors are those of this package's models, "their" names and tensors those of the files.
"""

from __future__ import annotations

from typing import Any

from vitreous.models.config import BiTConfig, ModelConfig, VideoConfig, ViTConfig
from vitreous.models.configs.base import PixelScaling
from vitreous.weights.formats.measure import ViTShape, infer_bit_config, infer_clip_size, infer_vit_config
from vitreous.weights.formats.timm import count_timm_units
from vitreous.weights.sidecar import MODEL_TYPE_TITLES
from vitreous.weights.table import (
    BARE_TOKEN,
    CONVOLUTION,
    COPY_TRANSFORM,
    PREFIX_TOKENS,
    Shapes,
    WeightsFormat,
    build_block_rules,
    build_position_transform,
    count_blocks,
    make_prefix_names,
    parse_copy_rules,
    parse_rename_rule,
)

HF_ACTIVATIONS = {"none": "gelu", "tanh": "gelu_pytorch_tanh", "quick": "quick_gelu"}
HF_QKV_NAMES = "attention.attention.query attention.attention.key attention.attention.value"
ATTENTION_OUTPUT = "attention.output.dense"
LAYER_SCALE_NAMES = "layer_scale1.lambda1", "layer_scale2.lambda1"

HF_PREFIXES = make_prefix_names("embeddings.cls_token", "embeddings.distillation_token", "embeddings.register_tokens")
COMMON_RULES = (
    parse_rename_rule("projection.weight", "embeddings.patch_embeddings.projection.weight", CONVOLUTION),
    parse_rename_rule("projection.bias", "embeddings.patch_embeddings.projection.bias", COPY_TRANSFORM),
    parse_rename_rule("prefix", HF_PREFIXES, PREFIX_TOKENS),
    parse_rename_rule("slots position.table", "embeddings.position_embeddings", build_position_transform((1,))),
    *parse_copy_rules("encoder.norm.{x} = layernorm.{x}"),
)
LAYER = "encoder.layer.{i}"
HF_VIT_RULES = (
    *COMMON_RULES,
    *build_block_rules(
        LAYER,
        ("layernorm_before", "layernorm_after"),
        qkv=HF_QKV_NAMES,
        out=ATTENTION_OUTPUT,
        mlp=("intermediate.dense", "output.dense"),
        scales=LAYER_SCALE_NAMES,
    ),
    *parse_copy_rules(
        "head.{x} = classifier.{x}",
        "head.label.{x} = cls_classifier.{x}",
        "head.teacher.{x} = distillation_classifier.{x}",
    ),
    *parse_copy_rules("representation.{x} = pooler.dense.{x}"),
)


def infer_hf_vit_config(shapes: Shapes, settings: dict[str, Any]) -> ViTConfig:
    """Infer the config of a ViT, DeiT, MAE encoder, I-JEPA (no class token), ViViT (three axes) or DINOv2 from the
    shapes."""
    width, channels, *patch = shapes["embeddings.patch_embeddings.projection.weight"]
    is_video = len(patch) == 3
    settings = settings | {"image": infer_clip_size(settings, 32)} if is_video else settings
    dino = "encoder.layer.0.layer_scale1.lambda1" in shapes
    gated = "encoder.layer.0.mlp.weights_in.weight" in shapes
    fc1_name = "encoder.layer.0.mlp.fc1.weight" if dino else "encoder.layer.0.intermediate.dense.weight"
    hidden = shapes["encoder.layer.0.mlp.weights_out.weight"][1] if gated else shapes[fc1_name][0]
    distilled = "embeddings.distillation_token" in shapes and "distillation_classifier.weight" in shapes
    registers = shapes["embeddings.register_tokens"][1] if "embeddings.register_tokens" in shapes else 0
    if "embeddings.distillation_token" in shapes and not distilled:
        settings = settings | {"pool": "distilled", "classes": 0}
    head = "cls_classifier.weight" if distilled else "classifier.weight"
    has_head = head in shapes and not dino  # DINOv2's classifier concatenates class token and mean
    class_token = "embeddings.cls_token" in shapes
    fields = {
        "channels": channels,
        "classes": shapes[head][0] if has_head else 0,
        "class_token": class_token,
        "pool": "distilled" if distilled else "class" if class_token else "mean",
        "registers": registers,
        "norm.layer_scale": 1.0 if dino else None,
        "mlp.kind": "swiglu" if gated else "gelu",
        "norm.eps": 1e-6 if dino or is_video else 1e-12,
        **({"arrangement": "joint", "mlp.gelu": "tanh"} if is_video else {}),
        "positions.resize": "bicubic-antialias" if registers else "bicubic",
        "head.representation": shapes["pooler.dense.weight"][0]
        if "pooler.dense.weight" in shapes and has_head and not distilled
        else None,
    }
    depth = count_blocks(shapes, f"{LAYER}.attention.output.dense.weight")
    size = ViTShape(width, depth, hidden, tuple(patch), shapes["embeddings.position_embeddings"][1])
    return infer_vit_config(size, fields, settings, (class_token + ("embeddings.distillation_token" in shapes),))


def to_hf_vit_json(config: ViTConfig) -> dict[str, Any]:
    """Build the config.json of a ViT, DeiT, ViViT, DINOv2 or I-JEPA. An I-JEPA is transformers' ViT whose head uses the
    mean of the patches."""
    is_video = len(config.image) == 3
    model_type = {"distilled": "deit", "mean": "ijepa"}.get(config.pool, "vit")
    if config.norm.layer_scale is not None:
        model_type = "dinov2_with_registers" if config.registers else "dinov2"
    model_type = "vivit" if is_video else model_type
    names = {
        "vit": "ViT",
        "vivit": "Vivit",
        "deit": "DeiT",
        "ijepa": "IJepa",
        "dinov2": "Dinov2",
        "dinov2_with_registers": "Dinov2WithRegisters",
    }
    task = "ForImageClassificationWithTeacher" if model_type == "deit" else "ForImageClassification"
    task = "ForVideoClassification" if is_video else task
    task = task if config.classes else "Model"
    description = {
        "architectures": [names[model_type] + task],
        "model_type": model_type,
        **to_hf_common_json(config),
        "qkv_bias": config.attention.qkv_bias,
        "id2label": {str(i): str(i) for i in range(config.classes)},
        "label2id": {str(i): i for i in range(config.classes)},
    }
    if is_video:
        del description["patch_size"]
        description |= {"num_frames": config.image[0], "tubelet_size": list(config.patch)}
    if model_type.startswith("dinov2"):
        description |= {
            "mlp_ratio": get_dinov2_mlp_ratio(config),
            "use_swiglu_ffn": config.mlp.kind == "swiglu",
            "num_register_tokens": config.registers,
        }
    return description


def get_dinov2_mlp_ratio(config: ViTConfig) -> int:
    """Return the integer `mlp_ratio` of DINOv2's config.json; 0 if no integer gives the MLP width of the model. The
    gated MLP has two thirds of that width, rounded up to a multiple of 8."""
    for ratio in range(1, 17):
        hidden = config.width * ratio
        if config.mlp.hidden == ((int(hidden * 2 / 3) + 7) // 8 * 8 if config.mlp.kind == "swiglu" else hidden):
            return ratio
    return 0


def to_hf_common_json(config: ViTConfig) -> dict[str, Any]:
    """Build the fields that the config.json of every ViT in transformers has."""
    image, patch = config.image[-2:], config.patch[-2:]
    return {
        "hidden_size": config.width,
        "num_hidden_layers": config.depth,
        "num_attention_heads": config.heads,
        "intermediate_size": config.mlp.hidden,
        "hidden_act": HF_ACTIVATIONS[config.mlp.gelu],
        "layer_norm_eps": config.norm.eps,
        "image_size": image[0] if len(set(image)) == 1 else list(image),
        "patch_size": patch[0] if len(set(patch)) == 1 else list(patch),
        "num_channels": config.channels,
    }


def has_vit_tensor_names(config: Any) -> bool:
    """Return whether a model has only tensors that transformers' ViT or ViViT names. It is a ViT, or a ViViT with joint
    attention, with learned positions, any pooling, and no other option that changes the names."""
    return (
        isinstance(config, ViTConfig)
        and (len(config.image) == 2 or (isinstance(config, VideoConfig) and config.arrangement == "joint"))
        and not config.needs_positions
        and config.attention.key_bias
        and config.positions.kind == "learned"
        and config.stem is None
        and config.projection_bias
        and (config.head.bias or not config.classes)
        and config.norm.final == "tokens"
        and not config.first_norm
    )


def is_class_token_vit(config: Any) -> bool:
    """Return whether a model with transformers' tensor names pools a class token that has a learned position."""
    return (
        has_vit_tensor_names(config)
        and config.class_token
        and config.prefix_position_count == config.prefix - config.registers
        and config.pool in ("class", "distilled")
    )


def is_ijepa(config: Any) -> bool:
    """Return whether the model is an I-JEPA as in transformers (arXiv:2301.08243): it pools the mean of its patches,
    has no prefix token, and uses square images and patches."""
    return has_vit_tensor_names(config) and has_square_patches(config) and not config.prefix and config.pool == "mean"


def has_square_patches(config: Any) -> bool:
    """Return whether images and patches are square; configs of other projects store only one length."""
    return len(config.image) == 2 and len(set(config.image)) == len(set(config.patch)) == 1


def get_pixel_statistics(config: ViTConfig) -> PixelScaling:
    """Return the default pixel statistics of a transformers model: CLIP's, or ImageNet's for DINOv2 and VideoMAE."""
    if config.first_norm:
        return "clip"
    return "imagenet" if config.norm.layer_scale is not None or config.positions.kind == "sinusoid" else "half"


VIT = WeightsFormat(
    "huggingface",
    MODEL_TYPE_TITLES["vit"],
    ("embeddings.patch_embeddings.projection.weight", "encoder.layer.0.intermediate.dense.weight"),
    HF_VIT_RULES,
    get_pixel_scaling=get_pixel_statistics,
    configure=infer_hf_vit_config,
    ignored=(r"decoder\..*", r"pooler\..*", r"embeddings\.mask_token"),
    strip=("vit.", "deit.", "ijepa.", "vivit."),
    can_represent=lambda c: (
        (is_class_token_vit(c) or is_ijepa(c))
        and (len(c.image) == 2 or c.pool == "class")
        and c.norm.layer_scale is None
        and c.mlp.kind == "gelu"
        and not c.registers
        and not c.head.representation
    ),
    prefix=lambda c: to_hf_vit_json(c)["model_type"] + "." if c.classes else "",
    unprefixed_names=("classifier", "cls_classifier", "distillation_classifier"),
    describe=to_hf_vit_json,
)
DINOV2 = WeightsFormat(
    "huggingface",
    "transformers' DINOv2",
    ("embeddings.patch_embeddings.projection.weight", "encoder.layer.0.layer_scale1.lambda1"),
    (
        *COMMON_RULES,
        *build_block_rules(
            LAYER,
            ("norm1", "norm2"),
            qkv=HF_QKV_NAMES,
            out=ATTENTION_OUTPUT,
            mlp=("mlp.weights_in|mlp.fc1", "mlp.weights_out|mlp.fc2"),
            scales=LAYER_SCALE_NAMES,
        ),
    ),
    get_pixel_scaling=get_pixel_statistics,
    configure=infer_hf_vit_config,
    ignored=(r"classifier\..*", r"embeddings\.mask_token"),
    strip=("dinov2.", "dinov2_with_registers."),
    can_represent=lambda c: (
        is_class_token_vit(c)
        and has_square_patches(c)
        and c.norm.layer_scale is not None
        and c.pool == "class"
        and not c.classes
        and get_dinov2_mlp_ratio(c) > 0
    ),
    adds=lambda c: {"embeddings.mask_token": (1, c.width)},
    describe=to_hf_vit_json,
)

CLIP_LAYER = "encoder.layers.{i}"
CLIP = WeightsFormat(
    "huggingface",
    "transformers' CLIP image encoder",
    ("embeddings.class_embedding", "embeddings.patch_embedding.weight", "encoder.layers.0.self_attn.q_proj.weight"),
    (
        parse_rename_rule("projection.weight", "embeddings.patch_embedding.weight", CONVOLUTION),
        parse_rename_rule("prefix", "embeddings.class_embedding", BARE_TOKEN),
        parse_rename_rule("slots position.table", "embeddings.position_embedding.weight", build_position_transform(())),
        *build_block_rules(
            CLIP_LAYER,
            ("layer_norm1", "layer_norm2"),
            " ".join(f"self_attn.{letter}_proj" for letter in "qkv"),
            "self_attn.out_proj",
            ("mlp.fc1", "mlp.fc2"),
        ),
        *parse_copy_rules(
            "first_norm.{x} = pre_layrnorm.{x}",
            "pooled_norm.{x} = post_layernorm.{x}",
            "head.weight = visual_projection.weight",
        ),
    ),
    get_pixel_scaling=get_pixel_statistics,
    configure=lambda shapes, settings: infer_hf_clip_config(shapes, settings),
    ignored=(r"text_model\..*", r"text_projection\..*", r"logit_scale", r".*position_ids"),
    strip=("vision_model.",),
    can_represent=lambda c: is_clip_encoder(c),
    prefix=lambda c: "vision_model.",
    unprefixed_names=("visual_projection",),
    describe=lambda c: {
        "architectures": ["CLIPVisionModelWithProjection" if c.classes else "CLIPVisionModel"],
        "model_type": "clip_vision_model",
        "projection_dim": c.classes or 512,
        **to_hf_common_json(c),
    },
)


def is_clip_encoder(config: ModelConfig) -> bool:
    """Return whether the model is CLIP's image encoder."""
    return (
        isinstance(config, ViTConfig)
        and has_square_patches(config)
        and config.first_norm
        and config.attention.qkv_bias
        and config.norm.final == "pooled"
        and not config.projection_bias
        and not config.registers
    )


def infer_hf_clip_config(shapes: Shapes, settings: dict[str, Any]) -> ViTConfig:
    """Infer the config of CLIP's image encoder from the shapes of transformers' files."""
    width, channels, *patch = shapes["embeddings.patch_embedding.weight"]
    fields = {
        "channels": channels,
        "classes": shapes["visual_projection.weight"][0] if "visual_projection.weight" in shapes else 0,
        **CLIP_FIELDS,
    }
    depth = count_blocks(shapes, f"{CLIP_LAYER}.layer_norm1.weight")
    size = ViTShape(
        width,
        depth,
        shapes["encoder.layers.0.mlp.fc1.weight"][0],
        tuple(patch),
        shapes["embeddings.position_embedding.weight"][0],
    )
    return infer_vit_config(size, fields, settings, (1,))


CLIP_FIELDS = {
    "first_norm": True,
    "norm.final": "pooled",
    "mlp.gelu": "quick",
    "norm.eps": 1e-5,
    "projection_bias": False,
    "head.bias": False,
    "positions.resize": "bicubic",
}

BIT = WeightsFormat(
    "huggingface",
    "transformers' BiT",
    ("embedder.convolution.weight", r"encoder.stages.0.layers.0.norm1.weight"),
    (
        *parse_copy_rules(
            "head.{x} = classifier.1.{x}",
            "body.root.conv.weight = embedder.convolution.weight",
            "body.norm.{x} = norm.{x}",
            "body.stages.{s}.units.{j}.shortcut.conv.weight = encoder.stages.{s}.layers.{j}.downsample.conv.weight",
            *(
                f"body.stages.{{s}}.units.{{j}}.conv{n}.weight = encoder.stages.{{s}}.layers.{{j}}.conv{n}.weight"
                for n in (1, 2, 3)
            ),
            *(
                f"body.stages.{{s}}.units.{{j}}.norm{n}.{{x}} = encoder.stages.{{s}}.layers.{{j}}.norm{n}.{{x}}"
                for n in (1, 2, 3)
            ),
        ),
    ),
    configure=lambda shapes, settings: infer_hf_bit_config(shapes, settings),
    strip=("bit.",),
    can_represent=lambda c: isinstance(c, BiTConfig) and not c.axial,
    prefix=lambda c: "bit." if c.classes else "",
    unprefixed_names=("classifier",),
    describe=lambda c: {
        "architectures": ["BitForImageClassification" if c.classes else "BitModel"],
        "model_type": "bit",
        "depths": list(c.blocks),
        "embedding_size": c.width * c.factor,
        "hidden_sizes": [4 * c.width * c.factor * 2**i for i in range(len(c.blocks))],
        "num_channels": c.channels,
        "layer_type": "preactivation",
        "id2label": {str(i): str(i) for i in range(c.classes)},
        "label2id": {str(i): i for i in range(c.classes)},
    },
)


def infer_hf_bit_config(shapes: Shapes, settings: dict[str, Any]) -> BiTConfig:
    """Infer the config of a BiT from the shapes of transformers' files."""
    blocks, classes = (
        count_timm_units(shapes, "encoder.stages.", ".layers."),
        shapes.get("classifier.1.weight", (0,))[0],
    )
    return infer_bit_config(shapes["embedder.convolution.weight"][:2], blocks, classes, "transformers", settings)
