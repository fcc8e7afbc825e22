"""big_vision's SigLIP and SigLIP 2 with both encoders, in npz files (models/proj/image_text/two_towers.py).

"Our" names and tensors are those of this package's models, "their" names and tensors those of the files.
"""

from __future__ import annotations

from typing import Any

from vitreous.models.config import ImageTextConfig
from vitreous.weights.formats.google import (
    BIG_VISION,
    LINEN_NAMES,
    PARAMETER_SCOPES,
    build_attention_rules,
    build_dense_rules,
    build_norm_rules,
    infer_google_vit_config,
)
from vitreous.weights.formats.image_text import (
    SCALAR_VECTOR,
    build_scale_rules,
    get_siglip_text_fields,
    infer_text_config,
    is_siglip_pair,
    nest_image_rules,
    nest_text_rules,
    select_prefix,
)
from vitreous.weights.table import (
    BATCHED_TOKEN,
    Shapes,
    WeightsFormat,
    count_blocks,
    parse_copy_rules,
    parse_rename_rule,
)

TEXT_BLOCK = "Encoder_0/encoderblock_{i}"
TEXT_RULES = (
    *parse_copy_rules("embedding.weight = Embed_0/embedding"),
    parse_rename_rule("positions", "pos_embedding", BATCHED_TOKEN),
    *build_norm_rules("encoder.blocks.{i}.attention.norm", f"{TEXT_BLOCK}/LayerNorm_0"),
    *build_attention_rules("encoder.blocks.{i}.attention.part", f"{TEXT_BLOCK}/{LINEN_NAMES[0]}"),
    *build_norm_rules("encoder.blocks.{i}.mlp.norm", f"{TEXT_BLOCK}/{LINEN_NAMES[1]}"),
    *build_dense_rules("encoder.blocks.{i}.mlp.part.fc1", f"{TEXT_BLOCK}/{LINEN_NAMES[2]}/Dense_0"),
    *build_dense_rules("encoder.blocks.{i}.mlp.part.fc2", f"{TEXT_BLOCK}/{LINEN_NAMES[2]}/Dense_1"),
    *build_norm_rules("encoder.norm", "Encoder_0/encoder_norm"),
    *build_dense_rules("projection", "head"),
)


def infer_big_vision_pair_config(shapes: Shapes, settings: dict[str, Any]) -> ImageTextConfig:
    """Infer the config of a SigLIP or SigLIP 2 from the shapes of big_vision's files, which contain the heads."""
    text = select_prefix(shapes, "txt/")
    embedding = text["Embed_0/embedding"]
    sizes = (
        count_blocks(text, f"{TEXT_BLOCK}/LayerNorm_0/scale"),
        text["Encoder_0/encoderblock_0/MlpBlock_0/Dense_0/kernel"][1],
        text["head/kernel"][1],
    )
    fields = get_siglip_text_fields(embedding[0])
    fields["heads"] = text[f"Encoder_0/encoderblock_0/{LINEN_NAMES[0]}/query/kernel"][1]
    return ImageTextConfig(
        backbone=infer_google_vit_config(select_prefix(shapes, "img/"), {"positions.resize": "bilinear"} | settings),
        text=infer_text_config(embedding, text["pos_embedding"][1], sizes, fields=fields, settings=settings),
        bias=True,
    )


PAIR = WeightsFormat(
    "big-vision-npz",
    "big_vision's SigLIP",
    ("img/embedding/kernel", "img/MAPHead_0/probe", "txt/Embed_0/embedding", "txt/head/bias", "t", "b"),
    (
        *nest_image_rules(BIG_VISION.rules, lambda name: f"img/{name}"),
        *nest_text_rules(TEXT_RULES, "txt/"),
        *build_scale_rules("t", "b", SCALAR_VECTOR),
    ),
    configure=infer_big_vision_pair_config,
    scope=PARAMETER_SCOPES,
    can_represent=is_siglip_pair,
    prefix=lambda config: "params/",
    suffix=".npz",
)
