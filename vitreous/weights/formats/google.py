"""Google's `.npz`: ViT, hybrids and AugReg as published, the later names of flax and big_vision, and BiT
(arXiv:1912.11370).

Modules are numbered by type in two ways: over all types in the published files (LayerNorm_0, then
MultiHeadDotProductAttention_1, LayerNorm_2, MlpBlock_3), separately for each type since flax's linen. big_vision adds
positions before it prepends the class token, so the position is part of its class token.

All of Google's code resizes positions with `scipy.ndimage.zoom` of order 1 (`interpolate_posembed` of
vit_jax/checkpoint.py, `resample_posemb` of big_vision/models/vit.py), whose rounding leaves zeros in the last row and
column of some grids (28 to 48).

"Our" names and tensors are those of this package's models, "their" names and tensors those of the files.
"""

from __future__ import annotations

import math
import re
from dataclasses import replace
from typing import Any

from vitreous.models.config import BiTConfig, StemConfig, ViTConfig
from vitreous.nn.sizes import nearest_divisible_size
from vitreous.weights.formats.measure import ViTShape, count_resnet_units, infer_bit_config, infer_vit_config
from vitreous.weights.table import (
    BATCHED_TOKEN,
    COPY_TRANSFORM,
    FLATTENED_VECTOR,
    FLAX_CONVOLUTION,
    FLAX_DENSE,
    FLAX_HEAD_BIASES,
    FLAX_HEADS,
    FLAX_OUT,
    FLAX_PATCH,
    FLAX_POINTWISE,
    PREFIX_TOKENS,
    RenameRule,
    Shapes,
    WeightsFormat,
    build_position_transform,
    count_blocks,
    parse_copy_rules,
    parse_rename_rule,
)

QKV_NAMES = ("query", "key", "value")  # flax's layer names
MAX_BLOCKS = 1_000  # limit on the number of blocks


def build_dense_rules(ours: str, theirs: str) -> tuple[RenameRule, ...]:
    """Build the rules of a flax dense layer: weight and bias, by our and their name of the layer."""
    return parse_rename_rule(f"{ours}.weight", f"{theirs}/kernel", FLAX_DENSE), parse_rename_rule(
        f"{ours}.bias", f"{theirs}/bias", COPY_TRANSFORM
    )


def build_norm_rules(ours: str, theirs: str, names: tuple[str, str] = ("scale", "bias")) -> tuple[RenameRule, ...]:
    """Build the rules of a norm's weight and bias; `names` are their names of the two tensors."""
    return parse_copy_rules(f"{ours}.weight = {theirs}/{names[0]}", f"{ours}.bias = {theirs}/{names[1]}")


def build_group_norm_rules(ours: str, theirs: str) -> tuple[RenameRule, ...]:
    """Build the rules of a group norm, whose tensors have shape (C,) in some files and (1, 1, 1, C) in others."""
    return parse_rename_rule(f"{ours}.weight", f"{theirs}/scale", FLATTENED_VECTOR), parse_rename_rule(
        f"{ours}.bias", f"{theirs}/bias", FLATTENED_VECTOR
    )


def build_attention_rules(ours: str, theirs: str) -> tuple[RenameRule, ...]:
    """Build the rules of a flax attention layer: queries, keys and values per head, and the output."""
    return (
        parse_rename_rule(f"{ours}.qkv.weight", " ".join(f"{theirs}/{name}/kernel" for name in QKV_NAMES), FLAX_HEADS),
        parse_rename_rule(
            f"{ours}.qkv.bias", " ".join(f"{theirs}/{name}/bias" for name in QKV_NAMES), FLAX_HEAD_BIASES
        ),
        parse_rename_rule(f"{ours}.out.weight", f"{theirs}/out/kernel", FLAX_OUT),
        parse_rename_rule(f"{ours}.out.bias", f"{theirs}/out/bias", COPY_TRANSFORM),
    )


def build_hybrid_stem_rules() -> tuple[RenameRule, ...]:
    """Build the rules of a hybrid's ResNet stem. Google's names count blocks (S) and units (J) from 1."""
    ours, theirs = "stem.stages.{s}.units.{j}.", "block{S}/unit{J}/"
    pairs = [(str(n), str(n)) for n in (1, 2, 3)]
    unit_rules = [
        parse_rename_rule(f"{ours}conv{a}.weight", f"{theirs}conv{b}/kernel", FLAX_CONVOLUTION) for a, b in pairs
    ]
    unit_rules += [rule for a, b in pairs for rule in build_group_norm_rules(f"{ours}norm{a}", f"{theirs}gn{b}")]
    unit_rules += [parse_rename_rule(f"{ours}shortcut.conv.weight", f"{theirs}conv_proj/kernel", FLAX_CONVOLUTION)]
    root_rule = parse_rename_rule("stem.root.conv.weight", "conv_root/kernel", FLAX_CONVOLUTION)
    return (
        *unit_rules,
        *build_group_norm_rules(f"{ours}shortcut.norm", f"{theirs}gn_proj"),
        root_rule,
        *build_group_norm_rules("stem.root.norm", "gn_root"),
    )


def build_google_vit_rules(attention: str, second_norm: str, mlp: str, position_name: str) -> tuple[RenameRule, ...]:
    """Build the rules of a ViT from the names that differ between files: a block's attention, second norm and MLP, and
    the positions."""
    block = "Transformer/encoderblock_{i}"
    ours = "encoder.blocks.{i}"
    pool = "MAPHead_0/MultiHeadDotProductAttention_0"
    return (
        parse_rename_rule("projection.weight", "embedding/kernel", FLAX_PATCH),
        parse_rename_rule("projection.bias", "embedding/bias", COPY_TRANSFORM),
        parse_rename_rule("prefix", "cls", PREFIX_TOKENS),
        parse_rename_rule("slots position.table", position_name, build_position_transform((1,))),
        *build_norm_rules(f"{ours}.attention.norm", f"{block}/LayerNorm_0"),
        *build_attention_rules(f"{ours}.attention.part", f"{block}/{attention}"),
        *build_norm_rules(f"{ours}.mlp.norm", f"{block}/{second_norm}"),
        *build_dense_rules(f"{ours}.mlp.part.fc1", f"{block}/{mlp}/Dense_0"),
        *build_dense_rules(f"{ours}.mlp.part.fc2", f"{block}/{mlp}/Dense_1"),
        *build_norm_rules("encoder.norm", "Transformer/encoder_norm"),
        *build_dense_rules("representation", "pre_logits"),
        *build_dense_rules("head", "head"),
        parse_rename_rule("pooling.query", "MAPHead_0/probe", BATCHED_TOKEN),
        parse_rename_rule("pooling.q.weight", f"{pool}/query/kernel", FLAX_HEADS),
        parse_rename_rule("pooling.q.bias", f"{pool}/query/bias", FLAX_HEAD_BIASES),
        parse_rename_rule("pooling.kv.weight", f"{pool}/key/kernel {pool}/value/kernel", FLAX_HEADS),
        parse_rename_rule("pooling.kv.bias", f"{pool}/key/bias {pool}/value/bias", FLAX_HEAD_BIASES),
        parse_rename_rule("pooling.out.weight", f"{pool}/out/kernel", FLAX_OUT),
        parse_rename_rule("pooling.out.bias", f"{pool}/out/bias", COPY_TRANSFORM),
        *build_norm_rules("pooling.norm", "MAPHead_0/LayerNorm_0"),
        *build_dense_rules("pooling.mlp.fc1", "MAPHead_0/MlpBlock_0/Dense_0"),
        *build_dense_rules("pooling.mlp.fc2", "MAPHead_0/MlpBlock_0/Dense_1"),
        *build_hybrid_stem_rules(),
    )


def infer_google_vit_config(shapes: Shapes, settings: dict[str, Any]) -> ViTConfig:
    """Infer the config of a ViT from the shapes, for any of Google's naming schemes. All of Google's code uses tanh
    GELU."""
    block = "Transformer/encoderblock_0/"
    *cell, channels, width = shapes["embedding/kernel"]
    heads = next(
        shape[1] for name, shape in shapes.items() if name.startswith(block) and name.endswith("/query/kernel")
    )
    hidden = next(
        shape[1] for name, shape in shapes.items() if name.startswith(block) and name.endswith("/Dense_0/kernel")
    )
    position_name, tokens = next(
        (name, shape[1]) for name, shape in shapes.items() if name.rpartition("/")[2] == "pos_embedding"
    )
    stem = infer_google_stem(shapes)
    fields = {
        "heads": heads,
        "channels": shapes["conv_root/kernel"][2] if stem else channels,
        "classes": shapes["head/kernel"][1] if "head/kernel" in shapes else 0,
        "stem": stem,
        "class_token": "cls" in shapes,
        "pool": "class" if "cls" in shapes else "attention" if "MAPHead_0/probe" in shapes else "mean",
        "head.representation": shapes["pre_logits/kernel"][1] if "pre_logits/kernel" in shapes else None,
        "mlp.gelu": "tanh",
        "positions.resize": "zoom-scipy",
    }
    patch = tuple(p * (stem.reduction if stem else 1) for p in cell)
    depth = count_blocks(shapes, "Transformer/encoderblock_{i}/LayerNorm_0/scale")
    # in Google's files, the name of the position tensor determines whether the class token has a position
    slots = 1 if "cls" in shapes and position_name == POSITION_NAME else 0
    return infer_vit_config(ViTShape(width, depth, hidden, patch, tokens), fields, settings, (slots,))


def infer_google_stem(shapes: Shapes) -> StemConfig | None:
    """Infer the ResNet stem of a hybrid from the shapes; None for a plain ViT."""
    if "conv_root/kernel" not in shapes:
        return None
    return StemConfig(
        count_resnet_units(shapes, "block{}/unit{}/conv1/kernel"), shapes["conv_root/kernel"][3], "google"
    )


def is_google_vit(config: Any) -> bool:
    """Return whether Google's code supports a ViT: a class token, mean or attention pooling, no registers, and no
    options of later models."""
    return (
        isinstance(config, ViTConfig)
        and len(config.image) == 2
        and not config.needs_positions
        and config.positions.kind == "learned"
        and len(set(config.grid)) == 1  # Google's loader takes the square root of the number of positions
        and (config.prefix, config.registers) in ((0, 0), (1, 0))
        and config.norm.layer_scale is None
        and config.norm.final == "tokens"
        and config.mlp.kind == "gelu"
        and not config.first_norm
        and config.attention.qkv_bias
        and config.projection_bias
        and config.head.bias
    )


#: prefixes of the parameters, as opposed to the optimiser's state (opt/...), by age of big_vision's and flax's files
PARAMETER_SCOPES = ("params/", "opt/target/", "target/")
PUBLISHED_NAMES = "MultiHeadDotProductAttention_1", "LayerNorm_2", "MlpBlock_3"
LINEN_NAMES = "MultiHeadDotProductAttention_0", "LayerNorm_1", "MlpBlock_0"
POSITION_NAME = "Transformer/posembed_input/pos_embedding"


def build_google_format(
    name: str, title: str, layer_names: tuple[str, str, str], position_name: str, ignored: tuple[str, ...] = ()
) -> WeightsFormat:
    """Build the format of one naming scheme: `layer_names` are those of a block's attention, second norm and MLP;
    `position_name` also determines whether the class token has a position."""
    return WeightsFormat(
        name,
        title,
        ("embedding/kernel", f"Transformer/encoderblock_0/{layer_names[2]}/Dense_0/kernel", position_name),
        build_google_vit_rules(*layer_names, position_name),
        configure=infer_google_vit_config,
        ignored=ignored,
        scope=PARAMETER_SCOPES,
        strip=("params/img/", "params/", "img/"),
        can_represent=lambda config: (
            is_google_vit(config)
            and config.prefix_position_count == (config.prefix if position_name == POSITION_NAME else 0)
        ),
        suffix=".npz",
    )


GOOGLE = build_google_format("google-npz", "Google's ViT", PUBLISHED_NAMES, POSITION_NAME)
LINEN = build_google_format("linen-npz", "Google's ViT, linen's names", LINEN_NAMES, POSITION_NAME)
#: further tensors of image-text models: the text tower, temperature and bias
BIG_VISION = build_google_format(
    "big-vision-npz", "big_vision's ViT", LINEN_NAMES, "pos_embedding", (r"txt/.*", r"t", r"b")
)


def infer_fixed_position_vit_config(shapes: Shapes, settings: dict[str, Any]) -> ViTConfig:
    """Infer the config of a big_vision ViT whose positions are fixed and not in the file: `posemb_sincos_2d` of
    big_vision/models/vit.py. Its image size is 224 pixels, or the nearest multiple of the patch size, unless set.
    Raises ValueError for a width that such positions do not support."""
    *kernel_size, _, width = shapes["embedding/kernel"]
    if width % 4 or width < 8:
        raise ValueError(
            f"it has no position embeddings; fixed ones need a width of at least 8 that is divisible by 4, not {width}"
        )
    patch = tuple(length * (stem.reduction if (stem := infer_google_stem(shapes)) else 1) for length in kernel_size)
    image = settings.get("image") or nearest_divisible_size((224,) * len(patch), patch)
    tokens = math.prod(i // p for i, p in zip(image, patch, strict=True))
    config = infer_google_vit_config(shapes | {"pos_embedding": (1, tokens, width)}, settings | {"image": image})
    return config.with_options(positions={"kind": "sincos-big-vision", "slots": 0})


BIG_VISION_FIXED = replace(
    BIG_VISION,
    title="big_vision's ViT with fixed positions",
    signature=BIG_VISION.signature[:2],
    configure=infer_fixed_position_vit_config,
    can_represent=lambda config: (
        config.positions.kind == "sincos-big-vision"
        and is_google_vit(config.with_options(positions={"kind": "learned", "slots": 0}))
    ),
)

BIT_UNIT = "resnet/block{S}/unit{JJ}/"
#: our and their name of a unit's standardized convolution and of the norm before it
UNIT_CONVOLUTIONS = (("1", "a"), ("2", "b"), ("3", "c"))
OUR_UNIT = "body.stages.{s}.units.{j}."
BIT = WeightsFormat(
    "bit-npz",
    "Google's BiT",
    ("resnet/root_block/standardized_conv2d/kernel", "resnet/group_norm/gamma"),
    (
        parse_rename_rule("body.root.conv.weight", "resnet/root_block/standardized_conv2d/kernel", FLAX_CONVOLUTION),
        *(
            parse_rename_rule(
                f"{OUR_UNIT}conv{n}.weight", f"{BIT_UNIT}{letter}/standardized_conv2d/kernel", FLAX_CONVOLUTION
            )
            for n, letter in UNIT_CONVOLUTIONS
        ),
        *(
            rule
            for n, letter in UNIT_CONVOLUTIONS
            for rule in build_norm_rules(f"{OUR_UNIT}norm{n}", f"{BIT_UNIT}{letter}/group_norm", ("gamma", "beta"))
        ),
        parse_rename_rule(
            f"{OUR_UNIT}shortcut.conv.weight", f"{BIT_UNIT}a/proj/standardized_conv2d/kernel", FLAX_CONVOLUTION
        ),
        *build_norm_rules("body.norm", "resnet/group_norm", ("gamma", "beta")),
        parse_rename_rule("head.weight", "resnet/head/conv2d/kernel", FLAX_POINTWISE),
        parse_rename_rule("head.bias", "resnet/head/conv2d/bias", COPY_TRANSFORM),
    ),
    configure=lambda shapes, settings: infer_google_bit_config(shapes, settings),
    can_represent=lambda config: isinstance(config, BiTConfig) and not config.axial,
    suffix=".npz",
)


def infer_google_bit_config(shapes: Shapes, settings: dict[str, Any]) -> BiTConfig:
    """Infer the config of a BiT from the shapes of Google's published files."""
    channels, width = shapes["resnet/root_block/standardized_conv2d/kernel"][2:]
    blocks = count_resnet_units(shapes, "resnet/block{}/unit{:02d}/a/standardized_conv2d/kernel")
    classes = shapes["resnet/head/conv2d/kernel"][3] if "resnet/head/conv2d/kernel" in shapes else 0
    return infer_bit_config((width, channels), blocks, classes, "bit", settings)


PAPER_UNIT = "block{S}/unit{JJ}/"
#: names of big_vision/models/bit_paper.py, whose norms are (1, 1, 1, C)
BIT_BIG_VISION = WeightsFormat(
    "big-vision-npz",
    "big_vision's BiT",
    ("root_block/conv_root/kernel", "norm-pre-head/scale"),
    (
        parse_rename_rule("body.root.conv.weight", "root_block/conv_root/kernel", FLAX_CONVOLUTION),
        *(
            parse_rename_rule(f"{OUR_UNIT}conv{n}.weight", f"{PAPER_UNIT}conv{n}/kernel", FLAX_CONVOLUTION)
            for n in (1, 2, 3)
        ),
        *(rule for n in (1, 2, 3) for rule in build_group_norm_rules(f"{OUR_UNIT}norm{n}", f"{PAPER_UNIT}gn{n}")),
        parse_rename_rule(f"{OUR_UNIT}shortcut.conv.weight", f"{PAPER_UNIT}conv_proj/kernel", FLAX_CONVOLUTION),
        *build_group_norm_rules("body.norm", "norm-pre-head"),
        *build_dense_rules("head", "head"),
    ),
    configure=lambda shapes, settings: infer_big_vision_bit_config(shapes, settings),
    scope=PARAMETER_SCOPES,
    can_represent=lambda config: isinstance(config, BiTConfig) and not config.axial,
    suffix=".npz",
    shaped=lambda name, tensor: tensor[None, None, None] if GROUP_NORM.fullmatch(name) else tensor,
)


def infer_big_vision_bit_config(shapes: Shapes, settings: dict[str, Any]) -> BiTConfig:
    """Infer the config of a BiT from the shapes of big_vision's files."""
    channels, width = shapes["root_block/conv_root/kernel"][2:]
    classes = shapes["head/kernel"][1] if "head/kernel" in shapes else 0
    return infer_bit_config(
        (width, channels),
        count_resnet_units(shapes, "block{}/unit{:02d}/conv1/kernel"),
        classes,
        "big-vision",
        settings,
    )


GROUP_NORM = re.compile(r"(.*/)?(gn(\d|_root|_proj)|norm-pre-head)/(scale|bias)")


def unstack_scanned_blocks(name: str, shape: tuple[int, ...]) -> list[tuple[str, tuple[int, ...]]]:
    """Return names and shapes of the blocks in a tensor of big_vision's scanned layers, (L, ...) under `encoderblock`;
    other tensors are returned unchanged. Group norms lose their singleton axes."""
    prefix, scanned, suffix = name.partition("/encoderblock/")
    if scanned and shape and shape[0] <= MAX_BLOCKS:
        return [(f"{prefix}/encoderblock_{i}/{suffix}", shape[1:]) for i in range(shape[0])]
    return [(name, shape[3:] if shape[:3] == (1, 1, 1) and GROUP_NORM.fullmatch(name) else shape)]


FORMATS = [GOOGLE, LINEN, BIG_VISION, BIG_VISION_FIXED, BIT, BIT_BIG_VISION]
