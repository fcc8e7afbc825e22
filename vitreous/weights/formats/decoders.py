"""The decoder of MAE and of VideoMAE in original files and in transformers' ViTMAEForPreTraining and
VideoMAEForPreTraining.

d width of the decoder, p and q a patch's height and width in pixels, C channels.

"Our" names and tensors are those of this package's models, "their" names and tensors those of the files.
"""

from __future__ import annotations

import re
from dataclasses import KW_ONLY, dataclass
from typing import Any

import torch
from torch import Tensor

from vitreous.models.config import ViTConfig
from vitreous.nn.position import sincos_position_table
from vitreous.weights.formats.transformers import ATTENTION_OUTPUT, HF_QKV_NAMES
from vitreous.weights.formats.video import QKV_NAME
from vitreous.weights.table import (
    RenameRule,
    Shapes,
    Tensors,
    TensorTransform,
    build_block_rules,
    parse_copy_rules,
    parse_rename_rule,
    transform_each,
)

DECODER_HEAD_WIDTH = 32  # channels per attention head of MAE's published decoders: width 512 with 16 heads
#: fields of the MAE objective's config for VideoMAE
VIDEOMAE_FIELDS: dict[str, Any] = {"mask": 0.9, "tubes": True, "normalise": True, "normalise_channels": True}
HF_MLP_NAMES = "intermediate.dense", "output.dense"  # layers of a block's MLP in transformers' files
#: field of MAE's config -> field of transformers' config.json
HF_DECODER_FIELDS = {"decoder_heads": "decoder_num_attention_heads", "normalise": "norm_pix_loss", "mask": "mask_ratio"}


def to_patch_channels_first(weight: Tensor, config: ViTConfig) -> Tensor:
    """Move the channels of a patch first: (p q C, ...) rows -> (C p q, ...)."""
    num_axes = len(config.patch)
    return weight.unflatten(0, (*config.patch, config.channels)).movedim(num_axes, 0).flatten(0, num_axes)


def to_patch_channels_last(weight: Tensor, config: ViTConfig) -> Tensor:
    """Reorder the first axis of a weight, the pixel values of a patch, channels last: (C p q, ...) -> (p q C, ...)."""
    num_axes = len(config.patch)
    return weight.unflatten(0, (config.channels, *config.patch)).movedim(0, num_axes).flatten(0, num_axes)


#: (1, 1, d) in files <-> (d,) in ours
MASK_TOKEN = TensorTransform(transform_each(lambda t: t.flatten()), transform_each(lambda t: t[None, None]))
#: channels of the pixel prediction layer and its bias: last in files, first in ours
PIXEL_HEAD_TRANSFORM = TensorTransform(
    lambda theirs, c: [to_patch_channels_first(theirs[0], c)], lambda ours, c: [to_patch_channels_last(ours[0], c)]
)


@dataclass(frozen=True)
class DecoderLayout:
    """Tensor names of a decoder in a format, and the rules to convert them.

    `rules`: our names, without "decoder.", and theirs. Their names start with one of `name_prefixes`, except the `mask`
    token; names of a block start with `block`. `signature`: a name that identifies the file. `positions`: the fixed
    positions, which are computed, not read; "" if files have none. `video`: VideoMAE's decoder, whose keys have no
    bias, and whose heads are as wide as the encoder's.
    """

    signature: str
    name_prefixes: tuple[str, ...]
    block: str
    mask: str
    _: KW_ONLY
    rules: tuple[RenameRule, ...]
    positions: str = ""
    video: bool = False

    def is_decoder_tensor(self, name: str) -> bool:
        """Return whether the tensor of this name in a file belongs to the decoder."""
        return name == self.mask or name.startswith(self.name_prefixes)

    def count_blocks(self, names: set[str]) -> int:
        """Count the decoder's blocks from its tensor names in a file."""
        matches = (re.match(rf"{re.escape(self.block)}\.(\d+)\.", name) for name in names)
        return len({match[1] for match in matches if match})

    def group_tensors(self, config: ViTConfig, depth: int) -> list[tuple[list[str], list[str], TensorTransform]]:
        """Return our names, their names and the transform of each group of tensors, for a decoder of this depth."""
        groups = []
        for rule in self.rules:
            names = rule.theirs(config) if callable(rule.theirs) else rule.theirs
            for i in range(depth) if "{i}" in names[0] else [0]:
                for x in ("weight", "bias") if "{x}" in names[0] else [""]:
                    placeholders = {"i": i, "x": x}
                    ours, theirs = ([name.format(**placeholders) for name in group] for group in (rule.ours, names))
                    if not (self.video and ours[0].endswith("qkv.bias")):
                        groups.append((ours, theirs, rule.transform))
        return groups

    def configure(self, shapes: Shapes, config: ViTConfig) -> dict[str, Any]:
        """Infer the config of the MAE objective from the decoder's shapes and the encoder's config. Heads are as wide
        as in published decoders."""
        width = shapes[self.mask][-1]
        heads = max(1, width // (config.width // config.heads if self.video else DECODER_HEAD_WIDTH))
        sizes = {"decoder_width": width, "decoder_depth": self.count_blocks(set(shapes)), "decoder_heads": heads}
        return {"name": "mae", **sizes, **(VIDEOMAE_FIELDS if self.video else {})}

    def read(self, config: ViTConfig, tensors: Tensors) -> Tensors:
        """Convert a decoder's tensors in a file, of any shape and without positions, to ours."""
        state: Tensors = {}
        for ours, theirs, fold in self.group_tensors(config, self.count_blocks(set(tensors))):
            converted = fold.to_native([tensors[name].float() for name in theirs], config)
            state |= {f"decoder.{name}": tensor.contiguous() for name, tensor in zip(ours, converted, strict=True)}
        return state

    def write(self, config: ViTConfig, state: Tensors) -> Tensors:
        """Convert our tensors of a decoder to those of a file. If files have positions (1, 1 + N, d), they are
        computed, with zeros for the class token."""
        depth = len({name.split(".")[3] for name in state if name.startswith("decoder.encoder.blocks.")})
        tensors: Tensors = {}
        for ours, theirs, fold in self.group_tensors(config, depth):
            converted = fold.to_foreign([state[f"decoder.{name}"] for name in ours], config)
            tensors |= zip(theirs, (tensor.contiguous() for tensor in converted), strict=True)
        if not self.positions:
            return tensors
        position_table = sincos_position_table(config.grid, len(state["decoder.mask_token"])).flatten(0, -2)
        return tensors | {self.positions: torch.cat([torch.zeros_like(position_table[:1]), position_table])[None]}


def build_mae_layout(prefix: str, block: str, mask: str, layers: tuple[RenameRule, ...]) -> DecoderLayout:
    """Build the layout of MAE's decoder from the name prefix of its tensors, and the names of its blocks and mask
    token."""
    rules = (
        parse_rename_rule("mask_token", mask, MASK_TOKEN),
        parse_rename_rule("head.{x}", f"{prefix}decoder_pred.{{x}}", PIXEL_HEAD_TRANSFORM),
        *parse_copy_rules(
            f"embed.{{x}} = {prefix}decoder_embed.{{x}}", f"encoder.norm.{{x}} = {prefix}decoder_norm.{{x}}"
        ),
        *layers,
    )
    signature, positions = f"{prefix}decoder_embed.weight", f"{prefix}decoder_pos_embed"
    return DecoderLayout(signature, (f"{prefix}decoder_",), block=block, mask=mask, rules=rules, positions=positions)


def build_videomae_layout(block: str, query: str, value: str, layers: tuple[RenameRule, ...]) -> DecoderLayout:
    """Build the layout of VideoMAE's decoder from the names of its blocks and of the biases of queries and values."""
    rules = (
        parse_rename_rule("mask_token", "mask_token", MASK_TOKEN),
        parse_rename_rule("head.{x}", "decoder.head.{x}", PIXEL_HEAD_TRANSFORM),
        *parse_copy_rules(
            "embed.weight = encoder_to_decoder.weight",
            "encoder.norm.{x} = decoder.norm.{x}",
            f"{QKV_NAME}.query_bias = {block}.{{i}}.{query}",
            f"{QKV_NAME}.value_bias = {block}.{{i}}.{value}",
        ),
        *layers,
    )
    prefixes = ("decoder.", "encoder_to_decoder.")
    return DecoderLayout(f"{block}.0.{query}", prefixes, block, "mask_token", rules=rules, video=True)


HF_MAE_LAYOUT = build_mae_layout(
    "decoder.",
    "decoder.decoder_layers",
    "decoder.mask_token",
    build_block_rules(
        "decoder.decoder_layers.{i}",
        ("layernorm_before", "layernorm_after"),
        HF_QKV_NAMES,
        ATTENTION_OUTPUT,
        HF_MLP_NAMES,
    ),
)
MAE_LAYOUT = build_mae_layout(
    "",
    "decoder_blocks",
    "mask_token",
    build_block_rules("decoder_blocks.{i}", ("norm1", "norm2"), "attn.qkv", "attn.proj", ("mlp.fc1", "mlp.fc2")),
)
HF_VIDEOMAE_LAYOUT = build_videomae_layout(
    "decoder.decoder_layers",
    "attention.attention.q_bias",
    "attention.attention.v_bias",
    build_block_rules(
        "decoder.decoder_layers.{i}",
        ("layernorm_before", "layernorm_after"),
        HF_QKV_NAMES,
        ATTENTION_OUTPUT,
        HF_MLP_NAMES,
    ),
)
VIDEOMAE_LAYOUT = build_videomae_layout(
    "decoder.blocks",
    "attn.q_bias",
    "attn.v_bias",
    build_block_rules("decoder.blocks.{i}", ("norm1", "norm2"), "attn.qkv", "attn.proj", ("mlp.fc1", "mlp.fc2")),
)
DECODER_LAYOUTS = (HF_MAE_LAYOUT, MAE_LAYOUT, HF_VIDEOMAE_LAYOUT, VIDEOMAE_LAYOUT)


def to_hf_decoder_json(config: dict[str, Any], encoder: dict[str, Any]) -> dict[str, Any]:
    """Build the config.json of ViTMAEForPreTraining or VideoMAEForPreTraining; `encoder` is the encoder's config.json,
    `config` the config of the MAE objective."""
    model_fields = {"architectures": ["ViTMAEForPreTraining"], "model_type": "vit_mae"}
    if encoder["model_type"] == "videomae":
        model_fields = {"architectures": ["VideoMAEForPreTraining"], "model_type": "videomae"}
    width = config["decoder_width"]
    sizes = {"hidden_size": width, "num_hidden_layers": config["decoder_depth"], "intermediate_size": 4 * width}
    return {
        **{name: value for name, value in encoder.items() if name not in ("id2label", "label2id")},
        **model_fields,
        **{f"decoder_{name}": value for name, value in sizes.items()},
        **{theirs: config[ours] for ours, theirs in HF_DECODER_FIELDS.items() if ours in config},
    }
