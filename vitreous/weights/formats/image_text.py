"""Rules and inference that the formats of image encoders with text encoders share.

"Our" names and tensors are those of this package's models, "their" names and tensors those of the files.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from operator import attrgetter
from typing import Any

import torch

from vitreous.models.config import ImageTextConfig, ModelConfig, TextConfig, ViTConfig
from vitreous.weights.formats.measure import find_published_heads
from vitreous.weights.formats.transformers import has_square_patches
from vitreous.weights.table import RenameRule, Shapes, TensorTransform, nest_rules, parse_rename_rule, transform_each

#: () <-> (1,), temperature and bias as a vector of one element
SCALAR_VECTOR = TensorTransform(
    transform_each(lambda tensor: tensor.reshape(())), transform_each(lambda tensor: tensor.reshape(1))
)
#: (3 D, ...) of queries, keys and values <-> queries (D, ...), and keys with values (2 D, ...)
QUERY_AND_KEY_VALUE = TensorTransform(
    lambda theirs, c: [theirs[0][: c.width], theirs[0][c.width :]], lambda ours, c: [torch.cat(ours)]
)
#: fields of the text encoder of SigLIP and SigLIP 2
SIGLIP_TEXT_FIELDS: dict[str, Any] = {
    "causal": False,
    "pool": "last",
    "gelu": "tanh",
    "eps": 1e-6,
    "projection_bias": True,
    "end_id": 1,
    "cleaning": "canonicalise",
}
SIGLIP2_VOCABULARY = 256_000
#: fields of the image encoder of SigLIP and SigLIP 2
SIGLIP_FIELDS: dict[str, Any] = {"class_token": False, "pool": "attention", "mlp.gelu": "tanh", "norm.eps": 1e-6}


def nest_image_rules(rules: Iterable[RenameRule], rename: Callable[[str], str]) -> tuple[RenameRule, ...]:
    """Convert the rules of an image encoder to those in a pair, whose files have the names `rename(name)`."""
    return nest_rules(rules, "backbone.", rename, attrgetter("backbone"))


def nest_text_rules(rules: Iterable[RenameRule], prefix: str) -> tuple[RenameRule, ...]:
    """Convert the rules of a text encoder to those in a pair, whose files have this name prefix."""
    return nest_rules(rules, "text.", lambda name: prefix + name, attrgetter("text"))


def build_scale_rules(scale: str, bias: str, transform: TensorTransform) -> tuple[RenameRule, RenameRule]:
    """Build the rules of temperature and bias."""
    return parse_rename_rule("log_scale", scale, transform), parse_rename_rule("logit_bias", bias, transform)


def select_prefix(shapes: Shapes, prefix: str) -> Shapes:
    """Return the shapes of the tensors whose name has this prefix, under their names without it."""
    return {name.removeprefix(prefix): shape for name, shape in shapes.items() if name.startswith(prefix)}


def infer_text_config(
    embedding: tuple[int, ...],
    length: int,
    sizes: tuple[int, int, int],
    fields: dict[str, Any],
    settings: dict[str, Any],
) -> TextConfig:
    """Infer the config of a text encoder from the shape (vocabulary, width) of its token embedding, the number of
    positions, and `sizes`: depth, channels of the MLP, and channels of the embedding.

    `settings` of the user or of a config.json, by paths that start with `text.`, take precedence over `fields`. Raises
    ValueError if they contradict the shapes.
    """
    vocabulary, width = embedding
    depth, hidden, channels = sizes
    heads = find_published_heads(width, depth, hidden) or max(1, width // 64)
    set_fields = {path.removeprefix("text."): value for path, value in settings.items() if path.startswith("text.")}
    shape = {"vocabulary": vocabulary, "length": length, "width": width, "depth": depth, "hidden": hidden}
    for name, value in shape.items():
        if set_fields.get(name, value) != value:
            raise ValueError(f"its settings have text.{name} {set_fields[name]}, and its tensors have {value}")
    defaults = {"embedding": channels, "heads": heads, "end_id": vocabulary - 1}
    values: dict[str, Any] = {**shape, **defaults, **fields, **set_fields}
    return TextConfig(**values)


def get_siglip_text_fields(vocabulary: int) -> dict[str, Any]:
    """Return the fields of the text encoder of SigLIP or, for its larger vocabulary, SigLIP 2."""
    return SIGLIP_TEXT_FIELDS | {"pad_id": 0 if vocabulary >= SIGLIP2_VOCABULARY else 1}


def is_siglip_encoder(config: ModelConfig) -> bool:
    """Return whether the model is an image encoder of SigLIP without a classification head."""
    return (
        isinstance(config, ViTConfig)
        and has_square_patches(config)
        and not config.needs_positions
        and config.positions.kind == "learned"
        and config.stem is None
        and not config.prefix
        and config.pool == "attention"
        and config.norm.final == "tokens"
        and config.norm.layer_scale is None
        and config.mlp.kind == "gelu"
        and config.projection_bias
        and config.attention.qkv_bias
        and not config.first_norm
        and not config.classes
        and not config.head.representation
    )


def is_siglip_pair(config: ModelConfig) -> bool:
    """Return whether the model is a SigLIP or SigLIP 2 with its text encoder."""
    if not isinstance(config, ImageTextConfig) or not is_siglip_encoder(config.backbone):
        return False
    text = config.text
    return config.bias and not text.causal and text.pool == "last" and text.projection and text.projection_bias


def is_clip_text(config: ImageTextConfig) -> bool:
    """Return whether the text encoder and the logits are those of CLIP."""
    text = config.text
    return text.causal and text.pool == "end" and text.projection and not text.projection_bias
