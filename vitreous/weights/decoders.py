"""MAE's decoder in others' files: the original's `*_full.pth`, and transformers' ViTMAEForPreTraining.

d width of the decoder, p and q a patch's sides in pixels, C channels.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from vitreous.models.config import ViTConfig
from vitreous.nn.position import sincos
from vitreous.weights.table import Row, Shapes, Tensors, TensorTransform, blocks, map_each, row, table

HEAD_WIDTH = 32  # channels of a decoder's head of attention, as published: 512 of 16
#: fields of MAE's config -> those of transformers' config.json
SETTINGS = {"decoder_heads": "decoder_num_attention_heads", "normalise": "norm_pix_loss", "mask": "mask_ratio"}


def channels_first(weight: Tensor, config: ViTConfig) -> Tensor:
    """(p q C, ...) rows with the channels last -> (C p q, ...)."""
    sides = len(config.patch)
    return weight.unflatten(0, (*config.patch, config.channels)).movedim(sides, 0).flatten(0, sides)


def channels_last(weight: Tensor, config: ViTConfig) -> Tensor:
    """(C p q, ...) rows with the channels first -> (p q C, ...)."""
    sides = len(config.patch)
    return weight.unflatten(0, (config.channels, *config.patch)).movedim(0, sides).flatten(0, sides)


#: (1, 1, d) and (d,)
MASK_TOKEN = TensorTransform(map_each(lambda t: t.flatten()), map_each(lambda t: t[None, None]))
#: the layer that gives pixels, and its bias
PIXELS = TensorTransform(lambda theirs, c: [channels_first(theirs[0], c)], lambda ours, c: [channels_last(ours[0], c)])


@dataclass(frozen=True)
class DecoderLayout:
    """The names of a decoder's tensors: `rows` of ours, without "decoder.", and theirs. All of theirs but the mask
    token begin with `prefix`; those of a block begin with `block`."""

    prefix: str
    block: str
    mask: str
    rows: tuple[Row, ...]

    @property
    def sign(self) -> str:
        """A name that no other file has."""
        return f"{self.prefix}decoder_embed.weight"

    @property
    def positions(self) -> str:
        """The fixed positions, which are computed, not read."""
        return f"{self.prefix}decoder_pos_embed"

    def owns(self, name: str) -> bool:
        """Whether a tensor of a file belongs to the decoder."""
        return name == self.mask or name.startswith((f"{self.prefix}decoder_", f"{self.block}."))

    def depth(self, names: set[str]) -> int:
        """The number of blocks."""
        numbers = (re.match(rf"{re.escape(self.block)}\.(\d+)\.", name) for name in names)
        return len({match[1] for match in numbers if match})

    def groups(self, config: ViTConfig, depth: int) -> list[tuple[list[str], list[str], TensorTransform]]:
        """Our names, theirs and the transform of each group of tensors of a decoder with so many blocks."""
        groups = []
        for one in self.rows:
            names = one.theirs(config) if callable(one.theirs) else one.theirs
            for i in range(depth) if "{i}" in names[0] else [0]:
                for x in ("weight", "bias") if "{x}" in names[0] else [""]:
                    holes = {"i": i, "x": x}
                    ours, theirs = ([name.format(**holes) for name in group] for group in (one.ours, names))
                    groups.append((ours, theirs, one.fold))
        return groups

    def configure(self, shapes: Shapes) -> dict[str, Any]:
        """The config of MAE with the decoder of these shapes; heads as published."""
        width = shapes[self.sign][0]
        fields = {"decoder_width": width, "decoder_depth": self.depth(set(shapes))}
        return {"name": "mae", **fields, "decoder_heads": max(1, width // HEAD_WIDTH)}

    def read(self, config: ViTConfig, tensors: Tensors) -> Tensors:
        """Their tensors, without positions, as ours."""
        state: Tensors = {}
        for ours, theirs, fold in self.groups(config, self.depth(set(tensors))):
            parts = fold.into([tensors[name].float() for name in theirs], config)
            state |= {f"decoder.{name}": part.contiguous() for name, part in zip(ours, parts, strict=True)}
        return state

    def write(self, config: ViTConfig, state: Tensors) -> Tensors:
        """Our tensors as theirs, with positions (1, 1 + N, d), zero for the class token."""
        depth = len({name.split(".")[3] for name in state if name.startswith("decoder.encoder.blocks.")})
        tensors: Tensors = {}
        for ours, theirs, fold in self.groups(config, depth):
            parts = fold.out([state[f"decoder.{name}"] for name in ours], config)
            tensors |= zip(theirs, (part.contiguous() for part in parts), strict=True)
        fixed = sincos(config.grid, len(state["decoder.mask_token"])).flatten(0, -2)
        return tensors | {self.positions: torch.cat([torch.zeros_like(fixed[:1]), fixed])[None]}


def layout(prefix: str, block: str, mask: str, layers: tuple[Row, ...]) -> DecoderLayout:
    """The layout of a decoder with these names."""
    rows = (
        row("mask_token", mask, MASK_TOKEN),
        row("head.{x}", f"{prefix}decoder_pred.{{x}}", PIXELS),
        *table(f"embed.{{x}} = {prefix}decoder_embed.{{x}}", f"encoder.norm.{{x}} = {prefix}decoder_norm.{{x}}"),
        *layers,
    )
    return DecoderLayout(prefix, block, mask, rows)


TRANSFORMERS = layout(
    "decoder.",
    "decoder.decoder_layers",
    "decoder.mask_token",
    blocks(
        "decoder.decoder_layers.{i}",
        ("layernorm_before", "layernorm_after"),
        " ".join(f"attention.attention.{name}" for name in ("query", "key", "value")),
        "attention.output.dense",
        ("intermediate.dense", "output.dense"),
    ),
)
ORIGINAL = layout(
    "",
    "decoder_blocks",
    "mask_token",
    blocks("decoder_blocks.{i}", ("norm1", "norm2"), "attn.qkv", "attn.proj", ("mlp.fc1", "mlp.fc2")),
)
LAYOUTS = (TRANSFORMERS, ORIGINAL)


def describe(config: dict[str, Any], encoder: dict[str, Any]) -> dict[str, Any]:
    """The config.json of ViTMAEForPreTraining: `encoder` is that of the encoder, `config` MAE's."""
    width = config["decoder_width"]
    sizes = {"hidden_size": width, "num_hidden_layers": config["decoder_depth"], "intermediate_size": 4 * width}
    return {
        **{name: value for name, value in encoder.items() if name not in ("id2label", "label2id")},
        "architectures": ["ViTMAEForPreTraining"],
        "model_type": "vit_mae",
        **{f"decoder_{name}": value for name, value in sizes.items()},
        **{theirs: config[ours] for ours, theirs in SETTINGS.items() if ours in config},
    }
