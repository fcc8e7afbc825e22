"""Tensors that some published models lack: a file may lack them if it matches such a model; otherwise it is
rejected."""

from __future__ import annotations

from collections.abc import Callable, Container
from operator import attrgetter
from typing import Any, NamedTuple

from vitreous.models.config import TRANSFORMER_FIELDS, ModelConfig, ViTConfig
from vitreous.models.configs.vit import parse_variant
from vitreous.weights.formats.measure import find_published_heads

#: dotted path of a `ViTConfig` field -> its value without the field's tensors, and with them
OPTIONAL_TENSOR_FIELDS = {
    "norm.final": ("none", "tokens"),
    "attention.qkv_bias": (False, True),
    "projection_bias": (False, True),
    "head.bias": (False, True),
}
OPTIONAL_TENSOR_FIELDS["positions.kind"] = ("sincos-big-vision", "learned")


class PublishedVariant(NamedTuple):
    """A config field whose tensors some published models lack, a predicate that selects these models by their config
    fields, and a note for users."""

    field: str
    applies_to: Callable[[dict[str, Any]], bool]
    note: str = ""


def is_miil(fields: dict[str, Any]) -> bool:
    """Return whether the fields match timm's vit_base_patch16_224_miil, the only ViT with a class token and no bias on
    queries, keys and values."""
    has_plain_fields = (
        fields["class_token"]
        and fields["norm.layer_scale"] is None
        and not fields["registers"]
        and not fields["first_norm"]
    )
    return has_plain_fields and (fields["width"], fields["depth"], fields["patch"]) == (768, 12, (16, 16))


#: timm 1.0.31, vision_transformer.py: the published models without some tensors
TIMM_VARIANTS = (
    PublishedVariant(
        "attention.qkv_bias",
        lambda f: not f["class_token"] and f["norm.layer_scale"] is not None,
        "no bias on queries, keys and values is in the file; read as one of timm's vit_*_gap_* models, which have none",
    ),
    PublishedVariant(
        "attention.qkv_bias",
        is_miil,
        "no bias on queries, keys and values is in the file; read as timm's vit_base_patch16_224_miil, which has none",
    ),
    PublishedVariant(
        "norm.final",
        lambda f: f["norm.layer_scale"] is not None and not f["registers"] and f["class_token"] and not f["classes"],
        "no last norm is in the file; read as timm's vit_intern300m_patch14_448, which has none",
    ),
    PublishedVariant(
        "norm.final",
        lambda f: f["registers"] > 0 and f["class_token"] and not f["classes"],
        "no last norm is in the file; read as one of timm's vit_*_radio_* models, which have none",
    ),
    PublishedVariant("projection_bias", lambda f: f["first_norm"]),  # CLIP
)


BIG_VISION_VARIANTS = (
    PublishedVariant(
        "positions.kind",
        lambda f: True,
        "the file has no positions; assumed big_vision's fixed ones (sincos2d), for images of 224 pixels "
        "(--source-size changes this)",
    ),
)
#: name of a format -> its variants
VARIANTS_BY_FORMAT = {"timm": TIMM_VARIANTS, "big-vision-npz": BIG_VISION_VARIANTS}


def require_unpublished_tensors(
    fields: dict[str, Any], variants: tuple[PublishedVariant, ...] = TIMM_VARIANTS
) -> dict[str, Any]:
    """Return the fields with `OPTIONAL_TENSOR_FIELDS` set to "with tensors", except where a published model lacks them.
    Files without these tensors are then rejected, and the tensors are listed as missing."""
    completed = dict(fields)
    for name, (missing, present) in OPTIONAL_TENSOR_FIELDS.items():
        if (
            name in completed
            and completed[name] == missing
            and not any(variant.field == name and variant.applies_to(fields) for variant in variants)
        ):
            completed[name] = present
    return completed


def describe_inferred_fields(
    config: ModelConfig, known_fields: Container[str], variants: tuple[PublishedVariant, ...] = ()
) -> list[str]:
    """Describe settings that were inferred from missing tensors, and an assumed number of heads. `known_fields`: config
    fields that are set elsewhere, so that nothing was inferred."""
    if not isinstance(config, ViTConfig):
        return []
    notes: dict[str, str] = {}
    options = {path: attrgetter(path)(config) for path in TRANSFORMER_FIELDS}
    for variant in variants:
        if (
            variant.field not in known_fields
            and attrgetter(variant.field)(config) == OPTIONAL_TENSOR_FIELDS[variant.field][0]
            and variant.applies_to(options)
        ):
            notes.setdefault(variant.field, variant.note)
    is_published = find_published_heads(config.width, config.depth, config.mlp.hidden) or parse_variant(
        config.name(), None
    )
    if "heads" not in known_fields and not is_published:
        notes["heads"] = (
            f"the number of heads is not in the file, and no published model has width {config.width}, depth "
            f"{config.depth} and MLP"
            f" {config.mlp.hidden}: assumed {config.heads} heads of {config.width // config.heads} channels; `vitreous "
            "convert --heads N` sets it"
        )
    return [note for note in notes.values() if note]


def describe_heads_mismatch(config: ModelConfig) -> list[str]:
    """Describe a number of heads in config.json that differs from published models of this width; [] if it does not."""
    if not isinstance(config, ViTConfig):
        return []
    published_heads = find_published_heads(config.width, config.depth, config.mlp.hidden) or config.width // 64
    variant = parse_variant(config.name(), None)
    if config.heads == published_heads or not published_heads or (variant and variant.heads == config.heads):
        return []
    configured = f"config.json has {config.heads} heads for a width of {config.width}"
    return [f"{configured}, but published models have {published_heads}; using {config.heads}"]
