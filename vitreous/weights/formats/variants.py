"""What a file may lack: only what some published family does not have either. Anything else that is missing is
refused."""

from __future__ import annotations

from collections.abc import Callable, Container
from operator import attrgetter
from typing import Any, NamedTuple

from vitreous.models.config import TRANSFORMER_FIELDS, ModelConfig, ViTConfig
from vitreous.weights.formats.measure import find_published_heads

#: path of a field of `ViTConfig` -> its value where the tensors are missing, its value where they are present
OPTIONAL_TENSOR_FIELDS = {
    "norm.final": ("none", "tokens"),
    "attention.qkv_bias": (False, True),
    "projection_bias": (False, True),
    "head.bias": (False, True),
}
OPTIONAL_TENSOR_FIELDS["positions.kind"] = ("sincos-big-vision", "learned")


class PublishedVariant(NamedTuple):
    """Tensors that a published family does not have: the field that says so, which models it is, and the note for
    people."""

    field: str
    matches: Callable[[dict[str, Any]], bool]
    note: str = ""


def is_miil(fields: dict[str, Any]) -> bool:
    """Whether it has the shape of timm's vit_base_patch16_224_miil, the one ViT with a class token and no such bias."""
    plain = (
        fields["class_token"]
        and fields["norm.layer_scale"] is None
        and not fields["registers"]
        and not fields["first_norm"]
    )
    return plain and (fields["width"], fields["depth"], fields["patch"]) == (768, 12, (16, 16))


#: timm 1.0.31, vision_transformer.py: the published models that lack something
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
        "no positions are in the file; read as big_vision's fixed ones (sincos2d), for images of 224 pixels "
        "(--source-size sets another)",
    ),
)
#: name of a format -> its variants
VARIANTS_BY_FORMAT = {"timm": TIMM_VARIANTS, "big-vision-npz": BIG_VISION_VARIANTS}


def require_unpublished_tensors(
    fields: dict[str, Any], variants: tuple[PublishedVariant, ...] = TIMM_VARIANTS
) -> dict[str, Any]:
    """The same fields, those of `OPTIONAL_TENSOR_FIELDS` set back to "present" where no published family lacks the
    tensors.

    The tensors are then expected, and listed as missing.
    """
    completed = dict(fields)
    for name, (missing, present) in OPTIONAL_TENSOR_FIELDS.items():
        if (
            name in completed
            and completed[name] == missing
            and not any(one.field == name and one.matches(fields) for one in variants)
        ):
            completed[name] = present
    return completed


def describe_inferred_fields(
    config: ModelConfig, known: Container[str], variants: tuple[PublishedVariant, ...] = ()
) -> list[str]:
    """Notes on what was concluded: tensors that a published family lacks too, a number of heads that is a guess.

    `known`: the fields of the config that are said somewhere, so that nothing had to be concluded.
    """
    if not isinstance(config, ViTConfig):
        return []
    notes: dict[str, str] = {}
    options = {path: attrgetter(path)(config) for path in TRANSFORMER_FIELDS}
    for one in variants:
        if (
            one.field not in known
            and attrgetter(one.field)(config) == OPTIONAL_TENSOR_FIELDS[one.field][0]
            and one.matches(options)
        ):
            notes.setdefault(one.field, one.note)
    if "heads" not in known and find_published_heads(config.width, config.depth, config.mlp.hidden) is None:
        notes["heads"] = (
            f"the number of heads is not in the file, and no published model has width {config.width}, depth "
            f"{config.depth} and MLP"
            f" {config.mlp.hidden}: {config.heads} taken, of {config.width // config.heads} channels each; `vitreous "
            "convert --heads N` sets it"
        )
    return [note for note in notes.values() if note]


def describe_heads_mismatch(config: ModelConfig) -> list[str]:
    """A note where the number of heads that was said is not that of published models of this width."""
    if not isinstance(config, ViTConfig):
        return []
    usual = find_published_heads(config.width, config.depth, config.mlp.hidden) or config.width // 64
    if config.heads == usual or not usual:
        return []
    own = f"config.json says {config.heads} heads for a width of {config.width}"
    return [f"{own}, where published models have {usual}; read with {config.heads}"]
