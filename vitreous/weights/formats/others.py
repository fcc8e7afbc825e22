"""Original formats of torchvision's ViT, DINOv2, CLIP's image encoder, and SAM's image encoder.

"Our" names and tensors are those of this package's models, "their" names and tensors those of the files.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from vitreous.models.config import ModelConfig, ViTConfig
from vitreous.weights.formats.measure import ViTShape, infer_vit_config
from vitreous.weights.formats.transformers import CLIP_FIELDS, has_square_patches, is_class_token_vit, is_clip_encoder
from vitreous.weights.table import (
    BARE_TOKEN,
    CONVOLUTION,
    FLAX_DENSE,
    POINTWISE,
    PREFIX_TOKENS,
    RenameRule,
    Shapes,
    WeightsFormat,
    build_block_rules,
    build_position_transform,
    count_blocks,
    make_prefix_names,
    parse_copy_rules,
    parse_rename_rule,
)

TORCHVISION_LAYER = "encoder.layers.encoder_layer_{i}"
TORCHVISION = WeightsFormat(
    "torchvision",
    "torchvision's ViT",
    ("conv_proj.weight", "encoder.layers.encoder_layer_0.self_attention.in_proj_weight"),
    (
        parse_rename_rule("projection.weight", "conv_proj.weight", CONVOLUTION),
        parse_rename_rule("prefix", "class_token", PREFIX_TOKENS),
        parse_rename_rule("slots position.table", "encoder.pos_embedding", build_position_transform((1,))),
        *build_block_rules(
            TORCHVISION_LAYER,
            ("ln_1", "ln_2"),
            "self_attention.in_proj_{x}",
            "self_attention.out_proj",
            ("mlp.0", "mlp.3"),
        ),
        *parse_copy_rules(
            "projection.bias = conv_proj.bias",
            "encoder.norm.{x} = encoder.ln.{x}",
            "representation.{x} = heads.pre_logits.{x}",
            "head.{x} = heads.head.{x}",
        ),
    ),
    configure=lambda shapes, settings: infer_torchvision_vit_config(shapes, settings),
    can_represent=lambda c: (
        is_class_token_vit(c)
        and has_square_patches(c)
        and not c.registers
        and c.norm.layer_scale is None
        and c.mlp.kind == "gelu"
        and bool(c.classes)
        and c.attention.qkv_bias
    ),
)


def infer_torchvision_vit_config(shapes: Shapes, settings: dict[str, Any]) -> ViTConfig:
    """Infer the config of torchvision's ViT from the shapes."""
    width, channels, *patch = shapes["conv_proj.weight"]
    fields = {
        "channels": channels,
        "classes": shapes["heads.head.weight"][0],
        "head.representation": shapes["heads.pre_logits.weight"][0] if "heads.pre_logits.weight" in shapes else None,
        "positions.resize": "bicubic-aligned",
    }
    depth, hidden = (
        count_blocks(shapes, f"{TORCHVISION_LAYER}.ln_1.weight"),
        shapes["encoder.layers.encoder_layer_0.mlp.0.weight"][0],
    )
    return infer_vit_config(
        ViTShape(width, depth, hidden, tuple(patch), shapes["encoder.pos_embedding"][1]), fields, settings, (1,)
    )


DINOV2_PREFIXES = make_prefix_names("cls_token", "", "register_tokens")


DINOV2 = WeightsFormat(
    "dinov2",
    "the original DINOv2",
    ("patch_embed.proj.weight", "mask_token", "blocks.0.ls1.gamma", "cls_token"),
    (
        parse_rename_rule("projection.weight", "patch_embed.proj.weight", CONVOLUTION),
        parse_rename_rule("prefix", DINOV2_PREFIXES, PREFIX_TOKENS),
        parse_rename_rule("slots position.table", "pos_embed", build_position_transform((1,))),
        *build_block_rules(
            "blocks.{i}",
            ("norm1", "norm2"),
            qkv="attn.qkv",
            out="attn.proj",
            mlp=("mlp.w12|mlp.fc1", "mlp.w3|mlp.fc2"),
            scales=("ls1.gamma", "ls2.gamma"),
        ),
        *parse_copy_rules("projection.bias = patch_embed.proj.bias", "encoder.norm.{x} = norm.{x}"),
    ),
    configure=lambda shapes, settings: infer_dinov2_config(shapes, settings),
    ignored=(r"mask_token", r"(dino_head|ibot_head)\..*"),
    strip=("backbone.",),
    adds=lambda c: {"mask_token": (1, c.width)},
    can_represent=lambda c: (
        is_class_token_vit(c)
        and has_square_patches(c)
        and c.pool == "class"
        and c.norm.layer_scale is not None
        and not c.classes
        and c.attention.qkv_bias
    ),
    describe_ambiguity=lambda c: (
        "the rule of the released models with registers; for the constructor's defaults: --resize bicubic-offset"
        * (c.registers > 0)
    ),
)


def infer_dinov2_config(shapes: Shapes, settings: dict[str, Any]) -> ViTConfig:
    """Infer the config of DINOv2 from the shapes. Models with and without registers resize positions by different
    rules.

    The released models without registers have `interpolate_offset=0.1`; those with registers have 0.0 and
    `interpolate_antialias=True` (dinov2/hub/backbones.py). The constructor's defaults are 0.1 and False, also with
    registers; a file does not contain these settings.
    """
    width, channels, *patch = shapes["patch_embed.proj.weight"]
    swiglu = "blocks.0.mlp.w12.weight" in shapes
    registers = shapes["register_tokens"][1] if "register_tokens" in shapes else 0
    fields = {
        "channels": channels,
        "classes": 0,
        "registers": registers,
        "norm.layer_scale": 1e-5,
        "mlp.kind": "swiglu" if swiglu else "gelu",
        "positions.resize": "bicubic-antialias" if registers else "bicubic-offset",
    }
    hidden = shapes["blocks.0.mlp.w3.weight"][1] if swiglu else shapes["blocks.0.mlp.fc1.weight"][0]
    size = ViTShape(
        width, count_blocks(shapes, "blocks.{i}.norm1.weight"), hidden, tuple(patch), shapes["pos_embed"][1]
    )
    return infer_vit_config(size, fields, settings, (1,))


#: transformers' TIPSv2 (arXiv:2604.12012), a DINOv2 with other names of the MLP; the second prefix token is a register
TIPSV2 = replace(
    DINOV2,
    name="huggingface",
    title="transformers' TIPSv2",
    signature=(*DINOV2.signature, "register_tokens"),
    excluded_names=("blocks.0.mlp.fc1.weight", "blocks.0.mlp.w12.weight"),
    rules=(
        *parse_copy_rules(
            "encoder.blocks.{i}.mlp.part.fc1.{x} = blocks.{i}.mlp.c_fc.{x}",
            "encoder.blocks.{i}.mlp.part.fc2.{x} = blocks.{i}.mlp.c_proj.{x}",
        ),
        *DINOV2.rules,
    ),
    configure=lambda shapes, settings: infer_tipsv2_config(shapes, settings),
    strip=("vision_model.",),
    get_pixel_scaling=lambda c: "unit",
    can_represent=lambda c: False,  # read only: the published models are pairs with a text encoder
)


def infer_tipsv2_config(shapes: Shapes, settings: dict[str, Any]) -> ViTConfig:
    """Infer the config of TIPSv2's image encoder from the shapes of transformers' files."""
    names = {"mlp.c_fc": "mlp.fc1", "mlp.c_proj": "mlp.fc2"}
    renamed = {name.replace(theirs, ours): shape for name, shape in shapes.items() for theirs, ours in names.items()}
    return infer_dinov2_config(shapes | renamed, settings | {"norm.layer_scale": 1.0})


CLIP_BLOCK = "transformer.resblocks.{i}"
CLIP = WeightsFormat(
    "clip",
    "the original CLIP's image encoder",
    ("conv1.weight", "class_embedding", "transformer.resblocks.0.attn.in_proj_weight"),
    (
        parse_rename_rule("projection.weight", "conv1.weight", CONVOLUTION),
        parse_rename_rule("prefix", "class_embedding", BARE_TOKEN),
        parse_rename_rule("slots position.table", "positional_embedding", build_position_transform(())),
        parse_rename_rule("head.weight", "proj", FLAX_DENSE),
        *build_block_rules(
            CLIP_BLOCK, ("ln_1", "ln_2"), "attn.in_proj_{x}", "attn.out_proj", ("mlp.c_fc", "mlp.c_proj")
        ),
        *parse_copy_rules("first_norm.{x} = ln_pre.{x}", "pooled_norm.{x} = ln_post.{x}"),
    ),
    configure=lambda shapes, settings: infer_openai_clip_config(shapes, settings),
    scope=("visual.",),
    can_represent=is_clip_encoder,
    prefix=lambda c: "visual.",
    describe_ambiguity=lambda c: (
        "transformers' rule, because OpenAI's code has one size; for open_clip: --resize bicubic-antialias"
    ),
)


def infer_openai_clip_config(shapes: Shapes, settings: dict[str, Any]) -> ViTConfig:
    """Infer the config of CLIP's image encoder from the shapes of OpenAI's files."""
    width, channels, *patch = shapes["conv1.weight"]
    fields = CLIP_FIELDS | {"channels": channels, "classes": shapes["proj"][1] if "proj" in shapes else 0}
    hidden = shapes["transformer.resblocks.0.mlp.c_fc.weight"][0]
    size = ViTShape(
        width,
        count_blocks(shapes, f"{CLIP_BLOCK}.ln_1.weight"),
        hidden,
        tuple(patch),
        shapes["positional_embedding"][0],
    )
    return infer_vit_config(size, fields, settings, (1,))


def build_sam_rules(
    patches: str, layer: str, mlp: tuple[str, str], neck: tuple[str, str, str, str]
) -> tuple[RenameRule, ...]:
    """Build the rules of SAM's image encoder from the names that differ between files: the patch projection, a block,
    the layers of its MLP, and the four modules of the neck."""
    attention = "encoder.blocks.{i}.attention.part{part}"
    norms = ("layer_norm1", "layer_norm2") if layer.startswith("layers") else ("norm1", "norm2")
    return (
        parse_rename_rule("projection.weight", f"{patches}.weight", CONVOLUTION),
        parse_rename_rule("position.table", "pos_embed", build_position_transform(None)),
        parse_rename_rule("neck.reduce.weight", f"{neck[0]}.weight", POINTWISE),
        *build_block_rules(layer, norms, "attn.qkv", "attn.proj", (f"mlp.{mlp[0]}", f"mlp.{mlp[1]}"), infix="{part}"),
        *parse_copy_rules(
            f"projection.bias = {patches}.bias",
            f"{attention}.rows = {layer}.attn.rel_pos_h",
            f"{attention}.columns = {layer}.attn.rel_pos_w",
            f"neck.norm1.{{x}} = {neck[1]}.{{x}}",
            f"neck.mix.weight = {neck[2]}.weight",
            f"neck.norm2.{{x}} = {neck[3]}.{{x}}",
        ),
    )


def infer_sam_config(shapes: Shapes, settings: dict[str, Any]) -> ViTConfig:
    """Infer the config of SAM's image encoder from the shapes. A block uses windows if its tables of relative positions
    are shorter than those of the full grid."""
    projection = next(name for name in shapes if name.startswith("patch_embed.proj") and name.endswith("weight"))
    width, channels, *patch = shapes[projection]
    layer = "layers" if "layers.0.attn.qkv.weight" in shapes else "blocks"
    grid = shapes["pos_embed"][1:3]
    depth = count_blocks(shapes, layer + ".{i}.attn.qkv.weight")
    lengths = [(shapes[f"{layer}.{i}.attn.rel_pos_h"][0] + 1) // 2 for i in range(depth)]
    window = min(lengths)
    fields = SAM_FIELDS | {
        "channels": channels,
        "attention.window": window if window < grid[0] else 0,
        "attention.global_blocks": tuple(i for i, length in enumerate(lengths) if length == grid[0])
        if window < grid[0]
        else (),
        "neck": next(shape[0] for name, shape in shapes.items() if name in ("neck.0.weight", "neck.conv1.weight")),
    }
    hidden = next(
        shape[0] for name, shape in shapes.items() if name.startswith(f"{layer}.0.mlp.") and name.endswith("1.weight")
    )
    if settings.get("norm.eps", 1e-6) != 1e-6:
        raise ValueError("the neck has a separate epsilon, which is not supported")
    settings = settings | {"image": tuple(g * p for g, p in zip(grid, patch, strict=True))}
    return infer_vit_config(ViTShape(width, depth, hidden, tuple(patch), grid[0] * grid[1]), fields, settings, (0,))


SAM_FIELDS = {
    "class_token": False,
    "pool": "mean",
    "positions.kind": "learned",
    "attention.kind": "decomposed",
    "norm.final": "none",
    "classes": 0,
    "norm.eps": 1e-6,
    "positions.resize": "bicubic",
}


def is_sam_encoder(config: ModelConfig) -> bool:
    """Return whether the model is SAM's image encoder."""
    return (
        isinstance(config, ViTConfig)
        and has_square_patches(config)
        and config.attention.kind == "decomposed"
        and config.neck > 0
        and not config.classes
    )


SAM = WeightsFormat(
    "sam",
    "the original SAM's image encoder",
    ("patch_embed.proj.weight", "blocks.0.attn.rel_pos_h", "neck.0.weight", "blocks.0.mlp.lin1.weight"),
    build_sam_rules("patch_embed.proj", "blocks.{i}", ("lin1", "lin2"), ("neck.0", "neck.1", "neck.2", "neck.3")),
    configure=infer_sam_config,
    ignored=(r"(prompt_encoder|mask_decoder)\..*",),
    scope=("image_encoder.",),
    can_represent=is_sam_encoder,
    prefix=lambda c: "image_encoder.",
)
SAM_TIMM = WeightsFormat(
    "timm",
    "timm's SAM image encoder",
    ("patch_embed.proj.weight", "blocks.0.attn.rel_pos_h", "neck.0.weight", "blocks.0.mlp.fc1.weight"),
    build_sam_rules("patch_embed.proj", "blocks.{i}", ("fc1", "fc2"), ("neck.0", "neck.1", "neck.2", "neck.3")),
    configure=lambda shapes, settings: infer_sam_config(shapes, {"positions.resize": "bicubic-antialias"} | settings),
    can_represent=is_sam_encoder,
)
SAM_TRANSFORMERS = WeightsFormat(
    "huggingface",
    "transformers' SAM image encoder",
    ("patch_embed.projection.weight", "layers.0.attn.rel_pos_h", "neck.conv1.weight"),
    build_sam_rules(
        "patch_embed.projection",
        "layers.{i}",
        ("lin1", "lin2"),
        ("neck.conv1", "neck.layer_norm1", "neck.conv2", "neck.layer_norm2"),
    ),
    configure=infer_sam_config,
    ignored=(r"(prompt_encoder|mask_decoder|shared_image_embedding)\..*",),
    scope=("vision_encoder.",),
    can_represent=is_sam_encoder,
    prefix=lambda c: "vision_encoder.",
    describe=lambda c: {
        "architectures": ["SamVisionModel"],
        "model_type": "sam_vision_model",
        "hidden_size": c.width,
        "num_hidden_layers": c.depth,
        "num_attention_heads": c.heads,
        "mlp_dim": c.mlp.hidden,
        "image_size": c.image[0],
        "patch_size": c.patch[0],
        "num_channels": c.channels,
        "output_channels": c.neck,
        "window_size": c.attention.window,
        "global_attn_indexes": list(c.attention.global_blocks),
        "layer_norm_eps": c.norm.eps,
        "hidden_act": "gelu",
        "num_pos_feats": c.neck // 2,
    },
)
