"""timm's Vision Transformers (plain, distilled, hybrid, CLIP, SAM) and its BiT ResNets: names and shapes.

The original files of DeiT, MAE and DINO have the same names, and so do those of DeiT-III except for its scales. A state
dict lacks the number of heads, the form of GELU, and the position resize rule. They are inferred from the shapes or
from other files.

| code | position resize rule (`nn.grid.RESIZE_MODES`) | source |
|---|---|---|
| timm | bicubic-antialias | `resample_abs_pos_embed` of timm/layers/pos_embed.py |
| DeiT, DeiT-III | bicubic | main.py, `--finetune` |
| MAE | bicubic | `interpolate_pos_embed` of util/pos_embed.py |
| DINO | bicubic-offset | `interpolate_pos_encoding` of vision_transformer.py |

"Our" names and tensors are those of this package's models, "their" names and tensors those of the files.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from vitreous.models.config import BiTConfig, ModelConfig, StemConfig, ViTConfig
from vitreous.weights.formats.measure import ViTShape, infer_bit_config, infer_vit_config
from vitreous.weights.formats.variants import require_unpublished_tensors
from vitreous.weights.table import (
    BATCHED_TOKEN,
    CONVOLUTION,
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

TIMM_PREFIXES = make_prefix_names("cls_token", "dist_token", "reg_token")
BLOCK_RULES = (
    *build_block_rules(
        "blocks.{i}",
        ("norm1", "norm2"),
        qkv="attn.qkv",
        out="attn.proj",
        mlp=("mlp.fc1", "mlp.fc2"),
        scales=("ls1.gamma", "ls2.gamma"),
        infix="{part}",
    ),
    *parse_copy_rules(
        "encoder.blocks.{i}.attention.part{part}.rows = blocks.{i}.attn.rel_pos_h",
        "encoder.blocks.{i}.attention.part{part}.columns = blocks.{i}.attn.rel_pos_w",
    ),
)
UNIT_PREFIXES = "stages.{s}.units.{j}.", "stages.{s}.blocks.{j}."


def build_resnet_unit_rules(ours: str, theirs: str, shortcut_norm: bool) -> tuple[RenameRule, ...]:
    """Build the rules of all units of a ResNet; `ours` and `theirs` are the name prefixes of the ResNet."""
    pairs = [(f"{layer}{n}", f"{layer}{n}") for n in (1, 2, 3) for layer in ("conv", "norm")]
    pairs += [("shortcut.conv", "downsample.conv")] + [("shortcut.norm", "downsample.norm")] * shortcut_norm
    return parse_copy_rules(
        *(f"{ours}{UNIT_PREFIXES[0]}{a}.{{x}} = {theirs}{UNIT_PREFIXES[1]}{b}.{{x}}" for a, b in pairs)
    )


def get_stem_prefix(has_stages: bool) -> str:
    """Return timm's name prefix of a hybrid's root convolution, which depends on whether the ResNet stem has stages."""
    return "patch_embed.backbone.stem" if has_stages else "patch_embed.backbone"


TIMM_VIT_RULES = (
    parse_rename_rule("projection.weight", "patch_embed.proj.weight", CONVOLUTION),
    parse_rename_rule("prefix", TIMM_PREFIXES, PREFIX_TOKENS),
    parse_rename_rule("slots position.table", "pos_embed", build_position_transform((1,))),
    parse_rename_rule("pooling.query", "attn_pool.latent", BATCHED_TOKEN),
    *parse_copy_rules(
        "projection.bias = patch_embed.proj.bias",
        "first_norm.{x} = norm_pre.{x}",
        "encoder.norm.{x} = norm.{x}",
        "pooled_norm.{x} = fc_norm.{x}",
        "pooling.q.{x} = attn_pool.q.{x}",
        "pooling.kv.{x} = attn_pool.kv.{x}",
        "pooling.out.{x} = attn_pool.proj.{x}",
        "pooling.norm.{x} = attn_pool.norm.{x}",
        "pooling.mlp.fc1.{x} = attn_pool.mlp.fc1.{x}",
        "pooling.mlp.fc2.{x} = attn_pool.mlp.fc2.{x}",
        "head.{x} = head.{x}",
        "head.label.{x} = head.{x}",
        "head.teacher.{x} = head_dist.{x}",
    ),
    RenameRule(("stem.root.conv.weight",), lambda c: (f"{get_stem_prefix(bool(c.stem.blocks))}.conv.weight",)),
    RenameRule(("stem.root.norm.{x}",), lambda c: (f"{get_stem_prefix(bool(c.stem.blocks))}.norm.{{x}}",)),
    *build_resnet_unit_rules("stem.", "patch_embed.backbone.", True),
    *BLOCK_RULES,
)


def infer_timm_vit_config(shapes: Shapes, settings: dict[str, Any], slots: tuple[int, ...] | None = None) -> ViTConfig:
    """Infer the config of a timm ViT from its shapes. `settings` may contain other fields of `ViTConfig`: image size
    (pixels), heads, GELU. `slots` are candidate numbers of prefix tokens with positions, as in `infer_vit_config`.
    Raises ValueError if settings contradict the shapes, WeightsError if positions fit no grid."""
    width, channels, *cell = shapes["patch_embed.proj.weight"]
    stem = infer_timm_stem(shapes)
    patch = tuple(p * (stem.reduction if stem else 1) for p in cell)
    hidden = shapes["blocks.0.mlp.fc1.weight"][0]
    gated = shapes["blocks.0.mlp.fc2.weight"][1] != hidden
    pool = "distilled" if "dist_token" in shapes else "class"
    if "attn_pool.latent" in shapes:
        pool = "attention"
    elif "fc_norm.weight" in shapes or "cls_token" not in shapes:
        pool = "mean"
    head = shapes.get("head.weight", (0,))[0]
    fields = {
        "channels": shapes[f"{get_stem_prefix(bool(stem.blocks))}.conv.weight"][1] if stem else channels,
        "classes": head,
        "mlp.kind": "swiglu" if gated else "gelu",
        "stem": stem,
        "class_token": "cls_token" in shapes,
        "registers": shapes["reg_token"][1] if "reg_token" in shapes else 0,
        "pool": pool,
        "norm.final": "tokens" if "norm.weight" in shapes else "pooled" if "fc_norm.weight" in shapes else "none",
        "first_norm": "norm_pre.weight" in shapes,
        "norm.layer_scale": 1e-5 if {"blocks.0.ls1.gamma", "blocks.0.gamma_1"} & shapes.keys() else None,
        "attention.qkv_bias": "blocks.0.attn.qkv.bias" in shapes,
        "projection_bias": "patch_embed.proj.bias" in shapes,
        "head.bias": not head or "head.bias" in shapes,
        "norm.eps": 1e-5 if "norm_pre.weight" in shapes else 1e-6,  # 1e-5 for CLIP
    }
    size = ViTShape(
        width,
        count_blocks(shapes, "blocks.{i}.norm1.weight"),
        hidden // 2 if gated else hidden,
        patch,
        shapes["pos_embed"][1],
    )
    completed = require_unpublished_tensors(fields | {"width": width, "depth": size.depth, "patch": patch})
    return infer_vit_config(size, completed, settings, slots)


def bind_resize_rule(rule: str, slots: tuple[int, ...] | None = None) -> Callable[[Shapes, dict[str, Any]], ViTConfig]:
    """Return `infer_timm_vit_config` with another default position resize rule, and with the number of prefix tokens
    that have positions, if known."""
    return lambda shapes, settings: infer_timm_vit_config(shapes, {"positions.resize": rule} | settings, slots)


def infer_timm_stem(shapes: Shapes) -> StemConfig | None:
    """Infer the ResNet stem of a hybrid from the shapes; None if it has none."""
    for has_stages in (True, False):
        if f"{get_stem_prefix(has_stages)}.conv.weight" in shapes:
            blocks = count_timm_units(shapes, "patch_embed.backbone.stages.", ".blocks.")
            return StemConfig(blocks, shapes[f"{get_stem_prefix(has_stages)}.conv.weight"][0], "timm")
    return None


def count_timm_units(shapes: Shapes, prefix: str, separator: str) -> tuple[int, ...]:
    """Count the units of each stage of a ResNet, from names such as `prefix` 0 `separator` 2.conv1.weight (stage 0,
    unit 2)."""
    stages = 0
    while f"{prefix}{stages}{separator}0.conv1.weight" in shapes:
        stages += 1
    return tuple(count_blocks(shapes, f"{prefix}{stage}{separator}{{i}}.conv1.weight") for stage in range(stages))


BIT_RULES = (
    parse_rename_rule("head.weight", "head.fc.weight", POINTWISE),
    *parse_copy_rules(
        "head.bias = head.fc.bias", "body.root.conv.weight = stem.conv.weight", "body.norm.{x} = norm.{x}"
    ),
    *build_resnet_unit_rules("body.", "", False),
)


def infer_timm_bit_config(shapes: Shapes, settings: dict[str, Any]) -> BiTConfig:
    """Infer the config of a BiT from the shapes of timm's files."""
    blocks, classes = count_timm_units(shapes, "stages.", ".blocks."), shapes.get("head.fc.weight", (0,))[0]
    return infer_bit_config(shapes["stem.conv.weight"][:2], blocks, classes, "timm", settings)


def is_timm_vit(config: ModelConfig) -> bool:
    """Return whether timm supports a ViT: learned positions for all prefix tokens or none, no relative positions or
    windows, a head with a bias. Its patch projection has a bias unless a norm follows it."""
    return (
        isinstance(config, ViTConfig)
        and len(config.image) == 2
        and not config.needs_positions
        and config.positions.kind == "learned"
        and config.prefix_position_count in (0, config.prefix)
        and (config.head.bias or not config.classes)
        and config.projection_bias != config.first_norm
        and not config.head.representation
    )


DEIT_III = WeightsFormat(
    "timm",
    "the original DeiT-III",
    ("patch_embed.proj.weight", "blocks.0.attn.qkv.weight", "blocks.0.gamma_1", "pos_embed"),
    (
        *parse_copy_rules(
            "encoder.blocks.{i}.attention.scale = blocks.{i}.gamma_1",
            "encoder.blocks.{i}.mlp.scale = blocks.{i}.gamma_2",
        ),
        *TIMM_VIT_RULES,
    ),
    configure=bind_resize_rule("bicubic", (0,)),
    can_represent=lambda c: False,  # read only; written as `timm`
)
TIMM = WeightsFormat(
    "timm",
    "timm",
    ("patch_embed.proj.weight", "blocks.0.attn.qkv.weight", "pos_embed"),
    TIMM_VIT_RULES,
    configure=infer_timm_vit_config,
    ignored=(r"mask_token", r"decoder_.*", r"head\.(mlp|last_layer)\..*"),  # MAE's decoder, DINO's head
    strip=("backbone.", "model."),
    can_represent=is_timm_vit,
    describe_ambiguity=lambda c: (
        "timm's rule; for the original DeiT and MAE: --resize bicubic, for DINO: --resize bicubic-offset"
    ),
)


def build_original_format(
    title: str, rule: str, extra_signature: tuple[str, ...] = (), sections: tuple[str, ...] = (), ambiguity: str = ""
) -> WeightsFormat:
    """Build a read-only format for original files with timm's names. Files are identified by further tensor names or by
    the key of their state dict (`sections`). `ambiguity` describes the assumed resize rule if this does not determine
    it."""
    return replace(
        TIMM,
        title=title,
        signature=TIMM.signature + extra_signature,
        sections=sections,
        excluded_names=TIMM_ONLY_TENSORS if sections else (),
        configure=bind_resize_rule(rule, None if ambiguity else (1,)),
        can_represent=lambda config: False,
        describe_ambiguity=lambda config: ambiguity,
    )


#: tensors that models of DeiT, MAE and DINO lack
TIMM_ONLY_TENSORS = (
    "reg_token",
    "attn_pool.latent",
    "norm_pre.weight",
    "blocks.0.ls1.gamma",
    f"{get_stem_prefix(True)}.conv.weight",
    f"{get_stem_prefix(False)}.conv.weight",
)
#: formats that are identified more reliably come first
ORIGINAL_FORMATS = [
    build_original_format("the original DINO, with its head", "bicubic-offset", ("head.last_layer.weight_v",)),
    build_original_format("the original MAE, with its decoder", "bicubic", ("decoder_embed.weight",)),
    build_original_format(
        "a checkpoint of DINO's layout",
        "bicubic-offset",
        sections=("teacher", "student"),
        ambiguity="DINO's rule, because the file has a student and a teacher; for timm: --resize bicubic-antialias",
    ),
    build_original_format(
        "a checkpoint of DeiT's and MAE's layout",
        "bicubic",
        sections=("model", "model_ema"),
        ambiguity="DeiT's and MAE's rule, because of the key 'model'; for timm: --resize bicubic-antialias",
    ),
]
TIMM_BIT = WeightsFormat(
    "timm",
    "timm's BiT",
    ("stem.conv.weight", r"stages.0.blocks.0.norm1.weight", "norm.weight"),
    BIT_RULES,
    configure=infer_timm_bit_config,
    can_represent=lambda c: isinstance(c, BiTConfig) and not c.axial,
)
