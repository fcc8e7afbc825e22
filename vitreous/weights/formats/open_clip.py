"""OpenAI's CLIP, PE-Core (arXiv:2504.13181), EVA-02-CLIP (arXiv:2303.15389) and the models of open_clip, with both
encoders.

| image encoder | text encoder | models |
|---|---|---|
| `visual.*`, OpenAI's names | `transformer.*`, `token_embedding`, … | OpenAI's CLIP, open_clip's `CLIP` |
| `visual.*`, OpenAI's names | `text.*` | open_clip's `CustomTextCLIP` |
| `visual.*` with `visual.attn_pool.*` | `transformer.*`, `token_embedding`, … | the authors' PE-Core |
| `visual.*` with EVA-02's names | `text.*` | the authors' EVA-02-CLIP |
| `visual.trunk.*`, timm's names | `text.*` | SigLIP, SigLIP 2, PE-Core and EVA-02-CLIP in open_clip |

A state dict lacks the heads, the form of GELU and the attention mask of the text encoder; an open_clip_config.json next
to it contains them. "Our" names and tensors are those of this package's models, "their" names and tensors those of the
files.
"""

from __future__ import annotations

import re
from collections.abc import Container, Iterator
from dataclasses import replace
from typing import Any

from torch import Tensor

from vitreous.models.config import ImageTextConfig, ModelConfig, TextConfig
from vitreous.weights.formats.eva import EVA02, EVA02_TIMM, PE, PE_TIMM
from vitreous.weights.formats.image_text import (
    SIGLIP2_VOCABULARY,
    build_scale_rules,
    get_siglip_text_fields,
    infer_text_config,
    is_clip_text,
    is_siglip_pair,
    nest_image_rules,
    nest_text_rules,
    select_prefix,
)
from vitreous.weights.formats.others import CLIP, CLIP_BLOCK, infer_openai_clip_config
from vitreous.weights.formats.timm import TIMM_VIT_RULES, infer_timm_vit_config
from vitreous.weights.formats.transformers import is_clip_encoder
from vitreous.weights.table import (
    COPY_TRANSFORM,
    RenameRule,
    Shapes,
    TensorTransform,
    WeightsFormat,
    build_block_rules,
    count_blocks,
    parse_copy_rules,
)


def transpose_plain_projection(tensors: list[Tensor], config: TextConfig) -> list[Tensor]:
    """Transpose the projection (D, E), which is a matrix without a layer; a layer (E, D) has a bias and is copied."""
    return tensors if config.projection_bias else [tensors[0].T]


TEXT_RULES = (
    RenameRule(
        ("projection.weight",),
        lambda c: ("text_projection.weight" if c.projection_bias else "text_projection",),
        TensorTransform(transpose_plain_projection, transpose_plain_projection),
    ),
    *parse_copy_rules(
        "projection.bias = text_projection.bias",
        "embedding.weight = token_embedding.weight",
        "positions = positional_embedding",
        "encoder.norm.{x} = ln_final.{x}",
    ),
    *build_block_rules(CLIP_BLOCK, ("ln_1", "ln_2"), "attn.in_proj_{x}", "attn.out_proj", ("mlp.c_fc", "mlp.c_proj")),
)
SCALE_RULES = build_scale_rules("logit_scale", "logit_bias", COPY_TRANSFORM)
#: buffers of OpenAI's archives, and of early versions of open_clip
IGNORED_NAMES = (r"input_resolution", r"context_length", r"vocab_size", r"(text\.)?attn_mask")


def infer_open_clip_text_config(
    shapes: Shapes, prefix: str, fields: dict[str, Any], settings: dict[str, Any]
) -> TextConfig:
    """Infer the config of a text encoder from the shapes; `prefix` is that of its names."""
    text = select_prefix(shapes, prefix)
    has_bias = "text_projection.bias" in text
    channels = text["text_projection.weight"][0] if has_bias else text["text_projection"][1]
    sizes = (
        count_blocks(text, f"{CLIP_BLOCK}.ln_1.weight"),
        text["transformer.resblocks.0.mlp.c_fc.weight"][0],
        channels,
    )
    fields = fields | {"projection_bias": has_bias}
    return infer_text_config(
        text["token_embedding.weight"], text["positional_embedding"][0], sizes, fields=fields, settings=settings
    )


def infer_open_clip_config(shapes: Shapes, settings: dict[str, Any], prefix: str) -> ImageTextConfig:
    """Infer the config of OpenAI's CLIP or open_clip's models of its architecture from the shapes."""
    return ImageTextConfig(
        backbone=infer_openai_clip_config(select_prefix(shapes, "visual."), settings),
        text=infer_open_clip_text_config(shapes, prefix, {"gelu": settings.get("mlp.gelu", "quick")}, settings),
        bias="logit_bias" in shapes,
    )


def infer_timm_trunk_config(shapes: Shapes, settings: dict[str, Any]) -> ImageTextConfig:
    """Infer the config of a SigLIP or SigLIP 2 of open_clip, whose image encoder is timm's, from the shapes. open_clip
    uses the exact GELU in the text encoder of SigLIP, and the tanh approximation in that of SigLIP 2."""
    vocabulary = shapes["text.token_embedding.weight"][0]
    gelu = "tanh" if vocabulary >= SIGLIP2_VOCABULARY else "none"
    fields = get_siglip_text_fields(vocabulary) | {"gelu": gelu}
    return ImageTextConfig(
        backbone=infer_timm_vit_config(select_prefix(shapes, "visual.trunk."), settings, (0,)),
        text=infer_open_clip_text_config(shapes, "text.", fields, settings),
        bias="logit_bias" in shapes,
    )


def describe_gelu_assumption(config: Any, known: Container[str]) -> Iterator[str]:
    """Describe the assumed form of GELU, if no config contains it."""
    if "mlp.gelu" not in known:
        names = {"none": "the exact function", "tanh": "the tanh approximation", "quick": "that of OpenAI's CLIP"}
        yield f"its form of GELU: assumed {names[config.mlp.gelu]}"


def is_open_clip_pair(config: ModelConfig) -> bool:
    """Return whether the model has the architecture of OpenAI's CLIP, with both encoders."""
    return (
        isinstance(config, ImageTextConfig)
        and is_clip_encoder(config.backbone)
        and config.backbone.classes > 0
        and is_clip_text(config)
    )


def build_pair_format(
    name: str, title: str, signature: tuple[str, ...], *, image: WeightsFormat, prefixes: tuple[str, str]
) -> WeightsFormat:
    """Build the format of an image encoder whose own format is `image`, with CLIP's text encoder and the exact GELU.
    `prefixes` are those of the names of the image and of the text encoder."""
    image_prefix, text_prefix = prefixes

    def can_represent(config: ModelConfig) -> bool:
        """Return whether the model has an image encoder of the format `image`, and CLIP's text encoder."""
        if not isinstance(config, ImageTextConfig) or not image.can_represent(config.backbone):
            return False
        return config.backbone.classes > 0 and not config.bias and is_clip_text(config)

    def infer_config(shapes: Shapes, settings: dict[str, Any]) -> ImageTextConfig:
        """Infer the config of the pair from the shapes."""
        return ImageTextConfig(
            backbone=image.configure(select_prefix(shapes, image_prefix), settings),
            text=infer_open_clip_text_config(shapes, text_prefix, {"gelu": "none"}, settings),
        )

    return WeightsFormat(
        name,
        title,
        signature,
        (
            *nest_image_rules(image.rules, lambda name: image_prefix + name),
            *nest_text_rules(TEXT_RULES, text_prefix),
            *SCALE_RULES,
        ),
        configure=infer_config,
        ignored=(*IGNORED_NAMES, *(re.escape(image_prefix) + pattern for pattern in image.ignored)),
        can_represent=can_represent,
    )


PE_PAIR = build_pair_format(
    "perception-encoder",
    "the original Perception Encoder with its text encoder",
    ("visual.conv1.weight", "visual.attn_pool.probe", "token_embedding.weight", "text_projection", "logit_scale"),
    image=PE,
    prefixes=("visual.", ""),
)
PE_TRUNK = build_pair_format(
    "open-clip",
    "open_clip's Perception Encoder",
    ("visual.trunk.norm_pre.weight", "visual.trunk.attn_pool.latent", "text.token_embedding.weight"),
    image=PE_TIMM,
    prefixes=("visual.trunk.", "text."),
)
EVA02_PAIR = build_pair_format(
    "eva02",
    "the original EVA-02-CLIP",
    ("visual.blocks.0.attn.q_bias", "visual.blocks.0.mlp.w1.weight", "text.token_embedding.weight"),
    image=EVA02,
    prefixes=("visual.", "text."),
)
EVA02_TRUNK = build_pair_format(
    "open-clip",
    "open_clip's EVA-02-CLIP",
    ("visual.trunk.blocks.0.attn.q_proj.bias", "visual.trunk.blocks.0.mlp.fc1_g.weight", "text.token_embedding.weight"),
    image=EVA02_TIMM,
    prefixes=("visual.trunk.", "text."),
)
OPENAI = WeightsFormat(
    "open-clip",
    "a CLIP of OpenAI or open_clip",
    ("visual.conv1.weight", "visual.proj", "token_embedding.weight", "text_projection", "logit_scale"),
    (*nest_image_rules(CLIP.rules, lambda name: f"visual.{name}"), *nest_text_rules(TEXT_RULES, ""), *SCALE_RULES),
    configure=lambda shapes, settings: infer_open_clip_config(shapes, settings, ""),
    ignored=IGNORED_NAMES,
    can_represent=is_open_clip_pair,
    assumes=describe_gelu_assumption,
    describe_ambiguity=CLIP.describe_ambiguity,
)
CUSTOM_TEXT = replace(
    OPENAI,
    title="open_clip's CLIP with a custom text encoder",
    signature=("visual.conv1.weight", "visual.proj", "text.token_embedding.weight", "text.text_projection"),
    rules=(
        *nest_image_rules(CLIP.rules, lambda name: f"visual.{name}"),
        *nest_text_rules(TEXT_RULES, "text."),
        *SCALE_RULES,
    ),
    configure=lambda shapes, settings: infer_open_clip_config(shapes, settings, "text."),
    can_represent=lambda config: False,
)
TIMM_TRUNK = WeightsFormat(
    "open-clip",
    "open_clip's SigLIP",
    ("visual.trunk.patch_embed.proj.weight", "visual.trunk.attn_pool.latent", "text.token_embedding.weight"),
    (
        *nest_image_rules(TIMM_VIT_RULES, lambda name: f"visual.trunk.{name}"),
        *nest_text_rules(TEXT_RULES, "text."),
        *SCALE_RULES,
    ),
    configure=infer_timm_trunk_config,
    ignored=IGNORED_NAMES,
    can_represent=is_siglip_pair,
    assumes=describe_gelu_assumption,
)
FORMATS = [PE_PAIR, PE_TRUNK, EVA02_PAIR, EVA02_TRUNK, OPENAI, CUSTOM_TEXT, TIMM_TRUNK]
