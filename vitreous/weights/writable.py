"""Find the foreign formats that can represent a model, and the model options that prevent the others."""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter
from typing import Any, cast

from vitreous.config import nest_paths
from vitreous.errors import UsageError
from vitreous.models.config import (
    TRANSFORMER_FIELDS,
    ConvStemConfig,
    ModelConfig,
    StemConfig,
    ViTConfig,
    replace_known_fields,
)
from vitreous.weights.foreign import FOREIGN_FORMATS, find_writable_formats
from vitreous.weights.table import WeightsFormat

PLAIN_VIT_FIELDS = {path: attrgetter(path)(ViTConfig) for path in TRANSFORMER_FIELDS}
#: options that belong together -> the paths of the fields of `ViTConfig` that are reset together
OPTION_FIELDS: dict[str, tuple[str, ...]] = {
    "stem": ("stem",),
    "pooling": ("pool", "class_token", "positions.slots", "norm.final"),
    "registers": ("registers", "positions.slots"),
    "positions": ("positions.kind", "positions.slots"),
    "positions before each block": ("positions.at",),
    "attention": ("attention.kind", "attention.window", "attention.global_blocks", "neck", "norm.final"),
    "axial": ("axial", "pool", "class_token", "positions.slots"),
    "first norm": ("first_norm", "norm.final", "projection_bias"),
    "last norm": ("norm.final",),
    "representation": ("head.representation",),
    "cosine head": ("head.kind", "head.representation"),
    "layer scale": ("norm.layer_scale",),
    "MLP": ("mlp.kind",),
    "biases": ("attention.qkv_bias", "projection_bias", "head.bias"),
}


def with_learned_positions(config: ModelConfig) -> ModelConfig:
    """Return the config with learned positions if it has MAE's fixed ones. Foreign files store them as a table, in
    which the class token has a row of zeros."""
    return config.with_position_table()


def list_writable_formats(config: ModelConfig) -> list[str]:
    """List the names of foreign formats that `convert --to` accepts for this model. The bundle supports every model,
    and is not listed."""
    return sorted(find_writable_formats(with_learned_positions(config)))


def get_writable_format(name: str, config: ModelConfig) -> WeightsFormat:
    """Return the format with a name if it can represent the model. Raises UsageError otherwise, with the options that
    prevent it, or with the option that omits the head."""
    formats = find_writable_formats(config)
    if name in formats:
        return formats[name]
    hint = f"use one of {', '.join([*sorted(formats), 'bundle'])}"
    if name not in {weights_format.name for weights_format in FOREIGN_FORMATS}:
        raise UsageError(f"{name} is not a weights format", hint)
    if is_head_unsupported(name, config):
        problem = f"{name} cannot represent {config.name()}: it has no head for this model, only its encoder"
        raise UsageError(problem, f"add --num-classes 0; or {hint}")
    raise UsageError(
        f"{name} cannot represent {config.name()}: {explain_unwritable(name, config)}",
        f"{hint}; or `vitreous export --to onnx`",
    )


def is_head_unsupported(name: str, config: ModelConfig) -> bool:
    """Return whether a format can represent a model's encoder, and no change of options makes it represent the head."""
    without_head = replace_known_fields(config, {"classes": 0})
    return (
        bool(config.classes) and name in find_writable_formats(without_head) and not find_blocking_options(name, config)
    )


def explain_unwritable(name: str, config: ModelConfig) -> str:
    """Explain in a phrase why a format cannot represent a model: the options that it lacks, or the models that it
    supports."""
    blocking_options = find_blocking_options(name, config)
    if blocking_options:
        return f"it has no {', no '.join(blocking_options)}"
    titles = dict.fromkeys(weights_format.title for weights_format in FOREIGN_FORMATS if weights_format.name == name)
    return f"it is for {', '.join(titles)}"


def find_blocking_options(name: str, config: ModelConfig) -> list[str]:
    """Find the fewest model options that prevent a format, as spelled for `train`; empty if no change of options helps.
    Options are reset to those of a plain ViT one by one, and those that the format supports are restored."""
    if not set(PLAIN_VIT_FIELDS) <= set(config.option_paths()):
        return []
    config = cast(ViTConfig, config)
    changes: dict[str, Callable[[ViTConfig], dict[str, Any]]] = {
        group: lambda c, fields=fields: {field: PLAIN_VIT_FIELDS[field] for field in fields}
        for group, fields in OPTION_FIELDS.items()
    }
    changes["image"] = lambda c: {"image": (c.patch[0] * c.grid[0],) * 2, "patch": (c.patch[0],) * 2}
    changes["classes"] = lambda c: {"classes": c.classes or PLAIN_VIT_FIELDS["classes"]}
    differing = [
        group
        for group, change in changes.items()
        if any(attrgetter(key)(config) != value for key, value in change(config).items())
    ]

    def can_write(groups: list[str]) -> bool:
        """Return whether the format supports the model if these groups of options are reset to those of a plain ViT."""
        changed = config
        try:
            options = {key: value for group in groups for key, value in changes[group](config).items()}
            changed = config.with_options(**nest_paths(options))
        except (UsageError, ValueError):
            return False
        return name in find_writable_formats(changed)

    blocking = next((differing[: end + 1] for end in range(len(differing)) if can_write(differing[: end + 1])), [])
    for group in list(blocking):
        fewer = [remaining for remaining in blocking if remaining != group]
        blocking = fewer if can_write(fewer) else blocking
    return [format_option(group, config, changes[group](config)) for group in blocking]


def format_option(group: str, config: ViTConfig, default_fields: dict[str, Any]) -> str:
    """Format an option of the model as on the command line of `train`."""
    if group == "stem":
        stem_name = {ConvStemConfig: "of convolutions (Conv+…)", StemConfig: "of a ResNet (R50+…)"}[type(config.stem)]
        return f"stem {stem_name}"
    if group == "image":
        return "image or patch that is not a square"
    if group == "classes":
        return "model without a head (classes 0)"
    differing = {
        path: value for path, value in config.values_at(default_fields).items() if value != default_fields[path]
    }
    values = {path: value for path, value in differing.items() if path != "positions.slots"} or differing
    return " ".join(f"--model.{field.replace('_', '-')} {str(value).lower()}" for field, value in values.items())
