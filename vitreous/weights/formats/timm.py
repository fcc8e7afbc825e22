"""timm's Vision Transformers, plain, distilled, hybrid, CLIP's and SAM's, and its BiT ResNets: their names and shapes.

The original files of DeiT, MAE and DINO have the same names, those of DeiT-III but for its scales. Not in a state dict,
so taken from the shape or from what is said beside it: the number of heads, the form of GELU, how positions were
resized.

| whose code resizes positions | how (`nn.grid.RESIZE`) | where |
|---|---|---|
| timm | bicubic-antialias | `resample_abs_pos_embed` of timm/layers/pos_embed.py |
| DeiT, DeiT-III | bicubic | main.py, `--finetune` |
| MAE | bicubic | `interpolate_pos_embed` of util/pos_embed.py |
| DINO | bicubic-offset | `interpolate_pos_encoding` of vision_transformer.py |
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from vitreous.models.config import BiTConfig, ModelConfig, StemConfig, ViTConfig
from vitreous.weights.formats.measure import Size, bit_config, vit_config
from vitreous.weights.formats.variants import only_published
from vitreous.weights.table import (
    CONVOLUTION,
    POINTWISE,
    PREFIX,
    TOKEN,
    Format,
    Row,
    Shapes,
    blocks,
    count,
    positions,
    prefixes,
    row,
    table,
)

PREFIXES = prefixes("cls_token", "dist_token", "reg_token")
BLOCKS = (
    *blocks(
        "blocks.{i}",
        ("norm1", "norm2"),
        qkv="attn.qkv",
        out="attn.proj",
        mlp=("mlp.fc1", "mlp.fc2"),
        scales=("ls1.gamma", "ls2.gamma"),
        part="{part}",
    ),
    *table(
        "encoder.blocks.{i}.attention.part{part}.rows = blocks.{i}.attn.rel_pos_h",
        "encoder.blocks.{i}.attention.part{part}.columns = blocks.{i}.attn.rel_pos_w",
    ),
)
UNITS = "stages.{s}.units.{j}.", "stages.{s}.blocks.{j}."


def units(ours: str, theirs: str, shortcut_norm: bool) -> tuple[Row, ...]:
    """Rows of a ResNet's stages, their names after `ours` and `theirs`."""
    pairs = [(f"{part}{n}", f"{part}{n}") for n in (1, 2, 3) for part in ("conv", "norm")]
    pairs += [("shortcut.conv", "downsample.conv")] + [("shortcut.norm", "downsample.norm")] * shortcut_norm
    return table(*(f"{ours}{UNITS[0]}{a}.{{x}} = {theirs}{UNITS[1]}{b}.{{x}}" for a, b in pairs))


def root(staged: bool) -> str:
    """What the root of a hybrid's ResNet is called, where stages follow it and where it is alone."""
    return "patch_embed.backbone.stem" if staged else "patch_embed.backbone"


VIT = (
    row("projection.weight", "patch_embed.proj.weight", CONVOLUTION),
    row("prefix", PREFIXES, PREFIX),
    row("slots position.table", "pos_embed", positions((1,))),
    row("pooling.query", "attn_pool.latent", TOKEN),
    *table(
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
    Row(("stem.root.conv.weight",), lambda c: (f"{root(bool(c.stem.blocks))}.conv.weight",)),
    Row(("stem.root.norm.{x}",), lambda c: (f"{root(bool(c.stem.blocks))}.norm.{{x}}",)),
    *units("stem.", "patch_embed.backbone.", True),
    *BLOCKS,
)


def configure(shapes: Shapes, settings: dict[str, Any], slots: tuple[int, ...] | None = None) -> ViTConfig:
    """The config that the shapes fit; `settings` may hold fields of `ViTConfig` that they do not tell: image (pixels),
    heads, gelu.

    `slots` is that of `vit_config`. Raises ValueError and WeightsError as it does.
    """
    width, channels, *cell = shapes["patch_embed.proj.weight"]
    stem = stem_of(shapes)
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
        "channels": shapes[f"{root(bool(stem.blocks))}.conv.weight"][1] if stem else channels,
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
        "norm.eps": 1e-5 if "norm_pre.weight" in shapes else 1e-6,  # CLIP's
    }
    size = Size(
        width, count(shapes, "blocks.{i}.norm1.weight"), hidden // 2 if gated else hidden, patch, shapes["pos_embed"][1]
    )
    whole = only_published(fields | {"width": width, "depth": size.depth, "patch": patch})
    return vit_config(size, whole, settings, slots)


def resized_by(rule: str, slots: tuple[int, ...] | None = None) -> Callable[[Shapes, dict[str, Any]], ViTConfig]:
    """`configure` for files whose positions are resized by another rule than timm's, with so many of prefix tokens, if
    that is known."""
    return lambda shapes, settings: configure(shapes, {"positions.resize": rule} | settings, slots)


def stem_of(shapes: Shapes) -> StemConfig | None:
    """The ResNet in front of a hybrid, if there is one."""
    for staged in (True, False):
        if f"{root(staged)}.conv.weight" in shapes:
            blocks = resnet_blocks(shapes, "patch_embed.backbone.stages.", ".blocks.")
            return StemConfig(blocks, shapes[f"{root(staged)}.conv.weight"][0], "timm")
    return None


def resnet_blocks(shapes: Shapes, before: str, between: str) -> tuple[int, ...]:
    """Units of each stage, from names like `before`0`between`2.conv1.weight."""
    stages = 0
    while f"{before}{stages}{between}0.conv1.weight" in shapes:
        stages += 1
    return tuple(count(shapes, f"{before}{stage}{between}{{i}}.conv1.weight") for stage in range(stages))


BIT = (
    row("head.weight", "head.fc.weight", POINTWISE),
    *table("head.bias = head.fc.bias", "body.root.conv.weight = stem.conv.weight", "body.norm.{x} = norm.{x}"),
    *units("body.", "", False),
)


def configure_bit(shapes: Shapes, settings: dict[str, Any]) -> BiTConfig:
    """The config of a BiT."""
    blocks, classes = resnet_blocks(shapes, "stages.", ".blocks."), shapes.get("head.fc.weight", (0,))[0]
    return bit_config(shapes["stem.conv.weight"][:2], blocks, classes, "timm", settings)


def plain(config: ModelConfig) -> bool:
    """Whether timm has such a ViT: no options of Table 8, no windows, positions for all prefix tokens or none, a head
    with a bias.

    Its patch projection has a bias where no norm follows it.
    """
    return (
        isinstance(config, ViTConfig)
        and len(config.image) == 2
        and not config.needs_positions
        and config.positions.kind == "learned"
        and config.positioned in (0, config.prefix)
        and (config.head.bias or not config.classes)
        and config.projection_bias != config.first_norm
        and not config.head.representation
    )


DEIT_III = Format(
    "timm",
    "the original DeiT-III",
    ("patch_embed.proj.weight", "blocks.0.attn.qkv.weight", "blocks.0.gamma_1", "pos_embed"),
    (
        *table(
            "encoder.blocks.{i}.attention.scale = blocks.{i}.gamma_1",
            "encoder.blocks.{i}.mlp.scale = blocks.{i}.gamma_2",
        ),
        *VIT,
    ),
    configure=resized_by("bicubic", (0,)),
    holds=lambda c: False,  # read only: `timm` is what is written
)
TIMM = Format(
    "timm",
    "timm",
    ("patch_embed.proj.weight", "blocks.0.attn.qkv.weight", "pos_embed"),
    VIT,
    configure=configure,
    ignored=(r"mask_token", r"decoder_.*", r"head\.(mlp|last_layer)\..*"),  # MAE's decoder, DINO's head
    strip=("backbone.", "model."),
    holds=plain,
    doubt=lambda c: "timm's; for the original DeiT and MAE: --resize bicubic, for DINO: --resize bicubic-offset",
)


def original(
    title: str, rule: str, sign: tuple[str, ...] = (), sections: tuple[str, ...] = (), doubt: str = ""
) -> Format:
    """Files of others that have timm's names, told by further names or by the key that their state dict lies under;
    read only."""
    return replace(
        TIMM,
        title=title,
        sign=TIMM.sign + sign,
        sections=sections,
        without=TIMM_ONLY if sections else (),
        configure=resized_by(rule, None if doubt else (1,)),
        holds=lambda config: False,
        doubt=lambda config: doubt,
    )


#: tensors that the models of DeiT, MAE and DINO do not have
TIMM_ONLY = (
    "reg_token",
    "attn_pool.latent",
    "norm_pre.weight",
    "blocks.0.ls1.gamma",
    f"{root(True)}.conv.weight",
    f"{root(False)}.conv.weight",
)
#: the more certain first
ORIGINALS = [
    original("the original DINO, with its head", "bicubic-offset", ("head.last_layer.weight_v",)),
    original("the original MAE, with its decoder", "bicubic", ("decoder_embed.weight",)),
    original(
        "a checkpoint of DINO's layout",
        "bicubic-offset",
        sections=("teacher", "student"),
        doubt="DINO's, as the file keeps a student and a teacher; timm's: --resize bicubic-antialias",
    ),
    original(
        "a checkpoint of DeiT's and MAE's layout",
        "bicubic",
        sections=("model", "model_ema"),
        doubt="that of DeiT and MAE, as the weights lie under 'model'; timm's: --resize bicubic-antialias",
    ),
]
TIMM_BIT = Format(
    "timm",
    "timm's BiT",
    ("stem.conv.weight", r"stages.0.blocks.0.norm1.weight", "norm.weight"),
    BIT,
    configure=configure_bit,
    holds=lambda c: isinstance(c, BiTConfig) and not c.axial,
)
