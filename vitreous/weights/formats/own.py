"""The native format: a bare `state_dict()` of this package's models, `vitreous.create(...)`, in a safetensors or a
PyTorch file.

It contains only tensors. Settings that the shapes do not determine default to those of `create`, with a note. If there
is no default, the file is rejected with a hint to use `vitreous.save`, which keeps all settings.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Any

from vitreous.config import nest_paths
from vitreous.models.config import (
    TRANSFORMER_FIELDS,
    BiTConfig,
    ConvStemConfig,
    ModelConfig,
    StemConfig,
    SwinConfig,
    ViTConfig,
    transformer_config,
)
from vitreous.models.names import NO_TOKENS
from vitreous.weights.formats.measure import find_published_heads, infer_bit_config
from vitreous.weights.table import Shapes, Tensors, WeightsFormat, count_blocks

SAVE_BUNDLE_HINT = "save the model with vitreous.save(model, FOLDER), which keeps all settings"
#: pattern of tensor names -> model option that has several variants, which names and shapes do not distinguish
AMBIGUOUS_TENSORS = {
    r"encoder\.blocks\.0\.(row|column)\.": "axial blocks",
    r"encoder\.blocks\.0\.(block|position)\.": "positions before each block",
    r"encoder\.blocks\.0\.attention\.part\.(table|rows|part\.rows)$": "relative positions",
    r"encoder\.blocks\.0\.time\.": "attention over time",
    r"encoder\.blocks\.0\.attention\.part\.qkv\.query_bias$": "no key bias",
    r"encoder\.blocks\.0\.attention\.part\.query_norm\.": "norms of queries and keys",
    r"encoder\.blocks\.0\.mlp\.part\.norm\.": "a norm in the MLP",
    r"patch_norm\.": "a norm of patches",
    r"position\.(tables|axes)\.": "positions by axis",
    r"position\.space\.": "spatial and temporal positions",
    r"temporal\.": "temporal blocks",
    r"neck\.": "a neck",
    r"body\..*\.relative$": "axial attention",
}


@dataclass(frozen=True)
class NativeFormat(WeightsFormat):
    """The format of a state dict, with the names and shapes of the model's tensors."""

    def to_foreign_tensors(self, config: ModelConfig, state: Tensors) -> Tensors:
        """Return the same tensors, of any shape."""
        return dict(state)

    def to_native_tensors(self, config: ModelConfig, names: Iterable[str], tensors: Tensors) -> Tensors:
        """Return the same tensors, of any shape, in float32."""
        return {name: tensors[name].float() for name in names}


def check_state_dict_options(shapes: Shapes) -> None:
    """Raise ValueError for a model whose tensor names and shapes do not determine its computation."""
    for pattern, option in AMBIGUOUS_TENSORS.items():
        if any(re.match(pattern, name) for name in shapes):
            raise ValueError(f"it has {option}, which a state dict does not specify; {SAVE_BUNDLE_HINT}")
    # a Perception Encoder: CLIP's encoder has no attention pooling, and a last norm
    last_norms = {"encoder.norm.weight", "pooled_norm.weight"} & shapes.keys()
    if "first_norm.weight" in shapes and ("pooling.query" in shapes or not last_norms):
        raise ValueError(f"it may have rotary positions, which a state dict does not specify; {SAVE_BUNDLE_HINT}")


def infer_native_vit_config(shapes: Shapes, settings: dict[str, Any]) -> ViTConfig:
    """Infer the config of a ViT from the shapes of its state dict. `settings` may contain other fields: image size
    (pixels), heads, GELU, positions. Raises ValueError if the patch size or the type of positions is undetermined."""
    check_state_dict_options(shapes)
    width, inputs = shapes["projection.weight"]
    stem = infer_native_stem(shapes)
    grid = shapes["position.table"][:-1] if "position.table" in shapes else None
    if grid is None and not {"positions.kind", "image"} <= settings.keys():
        raise ValueError(
            f"it has no learned positions, and a state dict specifies neither the type of "
            f"positions nor the image size; {SAVE_BUNDLE_HINT}"
        )
    channels, cell = infer_channels_and_cell(inputs, stem, shapes, grid, settings)
    patch = tuple(length * (stem.reduction if stem else 1) for length in cell)
    tokens = shapes["prefix"][0] if "prefix" in shapes else 0
    distilled = "head.label.weight" in shapes
    hidden = shapes["encoder.blocks.0.mlp.part.fc1.weight"][0]
    gated = shapes["encoder.blocks.0.mlp.part.fc2.weight"][1] != hidden
    depth, hidden = count_blocks(shapes, "encoder.blocks.{i}.mlp.norm.weight"), hidden // 2 if gated else hidden
    pooled, head = "pooled_norm.weight" in shapes, "head.label.weight" if distilled else "head.weight"
    fields: dict[str, Any] = {
        **infer_optional_fields(shapes),
        "image": tuple(g * p for g, p in zip(grid, patch, strict=True)) if grid else settings["image"],
        "patch": patch,
        "channels": channels,
        "classes": shapes[head][0] if head in shapes else 0,
        "width": width,
        "depth": depth,
        "mlp.hidden": hidden,
        "heads": find_published_heads(width, depth, hidden) or max(1, width // 32),
        "stem": stem,
        "registers": max(0, tokens - 1 - distilled),
        "positions.slots": shapes["slots"][0] if "slots" in shapes else 0,
        "pool": "distilled" if distilled else "class",
        "norm.final": "tokens" if "encoder.norm.weight" in shapes else "pooled" if pooled else "none",
        "head.bias": head not in shapes or head.replace("weight", "bias") in shapes,
        "mlp.kind": "swiglu" if gated else "gelu",
    }
    if not tokens:
        fields |= NO_TOKENS | ({"pool": "attention"} if "pooling.query" in shapes else {})
    elif "pooling.query" in shapes:
        fields["pool"] = "attention"
    elif pooled and not fields["first_norm"]:
        fields["pool"] = "mean"
    if isinstance(stem, StemConfig):
        fields |= {"mlp.gelu": "tanh", "positions.resize": "zoom"}
    if fields["first_norm"] and pooled:  # CLIP
        fields |= {"mlp.gelu": "quick", "norm.eps": 1e-5}
    known_fields = {*TRANSFORMER_FIELDS} - {"image"}
    return transformer_config(
        **nest_paths(fields | {name: settings[name] for name in settings if name in known_fields})
    )


def infer_optional_fields(shapes: Shapes) -> dict[str, Any]:
    """Infer the config fields that follow from the presence of a tensor."""
    return {
        "first_norm": "first_norm.weight" in shapes,
        "head.representation": shapes["representation.weight"][0] if "representation.weight" in shapes else None,
        "norm.layer_scale": 1e-5 if "encoder.blocks.0.attention.scale" in shapes else None,
        "attention.qkv_bias": "encoder.blocks.0.attention.part.qkv.bias" in shapes,
        "projection_bias": "projection.bias" in shapes,
    }


def infer_channels_and_cell(
    inputs: int,
    stem: StemConfig | ConvStemConfig | None,
    shapes: Shapes,
    grid: tuple[int, ...] | None,
    settings: dict[str, Any],
) -> tuple[int, tuple[int, ...]]:
    """Infer the image channels, and the size of a token's input, in pixels or in positions of the stem's output.
    `inputs`: input features of the patch projection, channels times positions. Raises ValueError if they do not
    determine both."""
    axes = len(grid) if grid else 2
    if stem:
        first_conv = "stem.root.conv.weight" if isinstance(stem, StemConfig) else "stem.stages.0.conv.weight"
        stem_channels = infer_stem_channels(shapes, stem)
        side = math.isqrt(inputs // stem_channels)
        if axes == 2 and side * side * stem_channels == inputs:
            return shapes[first_conv][1], (side, side)
    elif grid and "image" in settings and all(i % g == 0 for i, g in zip(settings["image"], grid, strict=True)):
        cell = tuple(i // g for i, g in zip(settings["image"], grid, strict=True))
        if inputs % math.prod(cell) == 0:
            return inputs // math.prod(cell), cell
    elif axes == 2:
        for channels in (3, 1, 4):
            side = math.isqrt(inputs // channels)
            if side * side * channels == inputs:
                return channels, (side, side)
    raise ValueError(
        f"its patch projection has {inputs} inputs, which are not a square patch of 3, 1 or 4 channels; set the "
        f"image size: --source-size; or {SAVE_BUNDLE_HINT}"
    )


def infer_stem_channels(shapes: Shapes, stem: StemConfig | ConvStemConfig) -> int:
    """Return the number of output channels of a stem."""
    if isinstance(stem, ConvStemConfig):
        return stem.widths[-1]
    return stem.width * 4 * 2 ** (len(stem.blocks) - 1) if stem.blocks else stem.width


def infer_native_stem(shapes: Shapes) -> StemConfig | ConvStemConfig | None:
    """Infer the ResNet or convolutional stem of a ViT from the shapes; None if it has none."""
    if "stem.root.conv.weight" in shapes:
        return StemConfig(count_native_units(shapes, "stem"), shapes["stem.root.conv.weight"][0])
    if "stem.stages.0.conv.weight" not in shapes:
        return None
    widths: list[int] = []
    while f"stem.stages.{len(widths)}.conv.weight" in shapes:
        widths.append(shapes[f"stem.stages.{len(widths)}.conv.weight"][0])
    units = [
        {name.split(".")[4] for name in shapes if name.startswith(f"stem.stages.{stage}.units.")}
        for stage in range(len(widths))
    ]
    return ConvStemConfig(widths=tuple(widths), blocks=tuple(map(len, units)))


def count_native_units(shapes: Shapes, prefix: str) -> tuple[int, ...]:
    """Count the units of each stage of a ResNet whose tensor names start with `prefix`."""
    blocks: list[int] = []
    while f"{prefix}.stages.{len(blocks)}.units.0.conv1.weight" in shapes:
        blocks.append(count_blocks(shapes, f"{prefix}.stages.{len(blocks)}.units.{{i}}.conv1.weight"))
    return tuple(blocks)


def infer_native_bit_config(shapes: Shapes, settings: dict[str, Any]) -> BiTConfig:
    """Infer the config of a BiT from the shapes of its state dict."""
    check_state_dict_options(shapes)
    classes = shapes["head.weight"][0] if "head.weight" in shapes else 0
    return infer_bit_config(
        shapes["body.root.conv.weight"][:2], count_native_units(shapes, "body"), classes, "bit", settings
    )


def describe_assumed_fields(config: ModelConfig, known_fields: Iterable[str]) -> str:
    """Describe the settings that were assumed because a state dict does not contain them. `known_fields`: set
    fields."""
    if isinstance(config, SwinConfig):
        return f"a state dict lacks some settings: assumed image size {config.image[0]}; vitreous.save keeps it"
    if isinstance(config, BiTConfig):
        return (
            f"a state dict lacks some settings: assumed image size {config.image[0]}, numerics {config.numerics} "
            "(vitreous.save keeps them)"
        )
    names = [name for name in ("heads", "mlp.gelu", "norm.eps", "pool", "positions.resize") if name not in known_fields]
    names += ["arrangement"] * (len(config.image) == 3 and "arrangement" not in known_fields)
    assumed = ", ".join(f"{name} {attrgetter(name)(config) or 'joint'}" for name in names)
    return f"a state dict lacks some settings: assumed {assumed}, channels {config.channels}; vitreous.save keeps them"


STATE_DICT_FORMAT = "state-dict"
VIT = NativeFormat(
    STATE_DICT_FORMAT,
    "a state dict of vitreous",
    ("projection.weight", "encoder.blocks.0.mlp.norm.weight"),
    (),
    configure=infer_native_vit_config,
    strip=("model.",),
    can_represent=lambda config: False,  # bundles are written instead
)
BIT = NativeFormat(
    STATE_DICT_FORMAT,
    "a state dict of vitreous' BiT",
    ("body.root.conv.weight", "body.norm.weight"),
    (),
    configure=infer_native_bit_config,
    strip=("model.",),
    can_represent=lambda config: False,
)
# matches ViTs whose blocks have other names; `check_state_dict_options` rejects them with the reason
UNSUPPORTED_VIT = replace(VIT, signature=("projection.weight", "encoder.norm.weight"))
FORMATS = [VIT, BIT, UNSUPPORTED_VIT]
