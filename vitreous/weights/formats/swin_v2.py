"""Swin V2 (arXiv:2111.09883) in the formats of Microsoft, timm, transformers and torchvision: names and shapes.

A small network computes positions for windows of any size, so tensors do not determine the window, except for the
buffers in files of Microsoft and torchvision. It is read from config.json, or from published file names
(`..._window12to24_...`), or is 8. The window of pre-training is not stored either.

Keys have no bias. torchvision has one but sets it to zero in every forward pass, and it is written as zeros.

"Our" names and tensors are those of this package's models, "their" names and tensors those of the files.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from vitreous.config import nest_paths
from vitreous.models.config import ModelConfig, SwinConfig
from vitreous.nn.windows import log_spaced_offsets
from vitreous.weights.formats import swin
from vitreous.weights.formats.own import STATE_DICT_FORMAT, NativeFormat
from vitreous.weights.formats.swin import (
    BRANCH_NORMS,
    COMPUTED_BUFFERS,
    MLP_NAMES,
    SwinLayout,
    build_windowed_config,
    describe_swin_assumptions,
)
from vitreous.weights.table import (
    COPY_TRANSFORM,
    QKV_TRANSFORM,
    RenameRule,
    Shapes,
    Tensors,
    TensorTransform,
    WeightsFormat,
    parse_copy_rules,
    parse_rename_rule,
)

ATTENTION_PREFIX = "attention.part.part"
DEFAULT_WINDOW = 8  # window size of published models whose names have none


@dataclass(frozen=True)
class SwinV2Layout(SwinLayout):
    """Tensor names of a Swin V2 in a format: those of `SwinLayout`, where `bias` is the network that computes position
    biases. `scale`: the factor of cosine attention. `qkv`: one layer of queries, keys and values, or three. `biases`:
    of queries and values, or of all three in one tensor. `coordinates`: the buffer of relative coordinates."""

    scale: str = "attn.logit_scale"
    qkv: str = "attn.qkv"
    biases: str = "attn.q_bias attn.v_bias"
    coordinates: str = "attn.relative_coords_table"

    def build_position_rules(self, stage: int, ours: str, theirs: str) -> list[RenameRule]:
        """Build the rules of the attention in a block, except its output layer."""
        ours = f"{ours}.{ATTENTION_PREFIX}"
        qkv = " ".join(f"{theirs}.{name}.weight" for name in self.qkv.split())
        biases = " ".join(f"{theirs}.{name}" for name in self.biases.split())
        return [
            parse_rename_rule(f"{ours}.qkv.weight", qkv, QKV_TRANSFORM if " " in qkv else COPY_TRANSFORM),
            parse_rename_rule(
                f"{ours}.q_bias {ours}.v_bias", biases, COPY_TRANSFORM if " " in biases else QUERY_VALUE_BIAS
            ),
            *parse_copy_rules(
                f"{ours}.logit_scale = {theirs}.{self.scale}",
                f"{ours}.position.fc1.{{x}} = {theirs}.{self.bias}.0.{{x}}",
                f"{ours}.position.fc2.weight = {theirs}.{self.bias}.2.weight",
            ),
        ]

    def infer_config(self, shapes: Shapes, settings: dict[str, Any], pad: str = "zeros") -> SwinConfig:
        """Infer the config from the shapes; `settings` may also contain window and pretrained_window. Raises ValueError
        if the shapes are not those of a Swin."""
        blocks = self.count_stage_blocks(shapes)
        first_blocks = [f"{self.stage(stage)}.0" for stage in range(len(blocks))]
        fields = self.infer_fields(shapes) | {
            "version": 2,
            "attention.qkv_bias": f"{first_blocks[0]}.{self.biases.split()[0]}" in shapes,
            "heads": tuple(shapes[f"{block}.{self.scale}"][0] for block in first_blocks),
            "attention.pretrained_window": get_pretrained_windows(settings),
            "attention.pad": pad,
        }
        tables = [shapes[name] for block in first_blocks if (name := f"{block}.{self.coordinates}") in shapes]
        if len(tables) == len(blocks):
            return build_windowed_config(
                fields, [((table[1] + 1) // 2, (table[2] + 1) // 2) for table in tables], settings
            )
        overrides = {
            name: settings[name]
            for name in ("mlp.gelu", "norm.eps", "positions.resize", "attention.pad", "image")
            if name in settings
        }
        window = settings.get("attention.window", DEFAULT_WINDOW)
        scale = 2 ** (len(blocks) - 1)
        # windows larger than 8 are halved in the last stage of published models
        image = tuple(
            max(1, window // (1 + (window > DEFAULT_WINDOW))) * scale * patch_length
            for patch_length in fields["patch_size"]
        )
        options: dict[str, Any] = {"image": image} | fields | overrides | {"attention.window": window}
        return SwinConfig().with_options(**nest_paths(options))

    @property
    def block_tensor(self) -> str:
        """Return the name of the cosine factor, a tensor that each block has exactly once."""
        return self.scale


def get_pretrained_windows(settings: dict[str, Any]) -> tuple[int, ...]:
    """Return the window sizes of pre-training in the settings, one per stage; () if they equal the model's windows."""
    sizes = tuple(settings.get("attention.pretrained_window", ()))
    return sizes if any(sizes) else ()


def split_query_value_bias(theirs: list[Tensor], config: SwinConfig) -> list[Tensor]:
    """Split the bias of queries, keys and values (3 D,) into those of queries and values, (D,) each; that of keys is
    dropped."""
    q, _, v = theirs[0].chunk(3)
    return [q, v]


def join_query_value_bias(ours: list[Tensor], config: SwinConfig) -> list[Tensor]:
    """Join the biases of queries and values, (D,) each, to (3 D,), with zeros for keys."""
    return [torch.cat([ours[0], torch.zeros_like(ours[0]), ours[1]])]


QUERY_VALUE_BIAS = TensorTransform(split_query_value_bias, join_query_value_bias)


def is_square_swin_v2(config: ModelConfig) -> bool:
    """Return whether the model is a Swin V2 with square windows."""
    return (
        isinstance(config, SwinConfig)
        and config.version == 2
        and all(rows == columns for rows, columns in config.windows)
    )


BLOCK_NAMES = BRANCH_NORMS | {"attention.part.part.out": "attn.proj"} | MLP_NAMES
IGNORED_TENSORS = (*COMPUTED_BUFFERS, r".*\.relative_coords_table")
POSITION_MLP = "attn.cpb_mlp"

MICROSOFT_LAYOUT = SwinV2Layout(
    "patch_embed.proj",
    "patch_embed.norm",
    stage=swin.MICROSOFT_LAYOUT.stage,
    format_merge_prefix=swin.MICROSOFT_LAYOUT.format_merge_prefix,
    module_names=BLOCK_NAMES,
    bias=POSITION_MLP,
    norm="norm",
    head="head",
)
MICROSOFT = WeightsFormat(
    "swin",
    "Microsoft's Swin V2",
    ("patch_embed.proj.weight", "layers.0.blocks.0.attn.logit_scale", "layers.0.downsample.reduction.weight"),
    MICROSOFT_LAYOUT.build_rules(),
    assumes=describe_swin_assumptions,
    configure=lambda shapes, settings: MICROSOFT_LAYOUT.infer_config(shapes, settings, "mask"),
    ignored=IGNORED_TENSORS,
    can_represent=lambda c: is_square_swin_v2(c) and len(c.blocks) > 1,
)
TIMM_LAYOUT = SwinV2Layout(
    "patch_embed.proj",
    "patch_embed.norm",
    stage=swin.TIMM_LAYOUT.stage,
    format_merge_prefix=swin.TIMM_LAYOUT.format_merge_prefix,
    module_names=BLOCK_NAMES,
    bias=POSITION_MLP,
    norm="norm",
    head="head.fc",
)
TIMM = WeightsFormat(
    "timm",
    "timm's Swin V2",
    ("patch_embed.proj.weight", "layers.0.blocks.0.attn.logit_scale"),
    TIMM_LAYOUT.build_rules(),
    assumes=describe_swin_assumptions,
    configure=lambda shapes, settings: TIMM_LAYOUT.infer_config(shapes, settings, "zeros-after-shift"),
    ignored=IGNORED_TENSORS,
    can_represent=is_square_swin_v2,
)
TRANSFORMERS_LAYOUT = SwinV2Layout(
    "embeddings.patch_embeddings.projection",
    "embeddings.norm",
    stage=swin.TRANSFORMERS_LAYOUT.stage,
    format_merge_prefix=swin.TRANSFORMERS_LAYOUT.format_merge_prefix,
    module_names={
        "attention.norm": "layernorm_before",
        "mlp.norm": "layernorm_after",
        "attention.part.part.out": "attention.output.dense",
        "mlp.part.fc1": "intermediate.dense",
        "mlp.part.fc2": "output.dense",
    },
    bias="attention.self.continuous_position_bias_mlp",
    norm="layernorm",
    head="classifier",
    scale="attention.self.logit_scale",
    qkv="attention.self.query attention.self.key attention.self.value",
    biases="attention.self.query.bias attention.self.value.bias",
    coordinates="attention.self.relative_coords_table",
)
TRANSFORMERS = WeightsFormat(
    "huggingface",
    "transformers' Swin V2",
    ("embeddings.patch_embeddings.projection.weight", "encoder.layers.0.blocks.0.attention.self.logit_scale"),
    TRANSFORMERS_LAYOUT.build_rules(),
    assumes=describe_swin_assumptions,
    configure=TRANSFORMERS_LAYOUT.infer_config,
    ignored=IGNORED_TENSORS,
    strip=("swinv2.",),
    can_represent=lambda c: is_square_swin_v2(c) and len(set(c.image)) == len(set(c.patch_size)) == 1,
    prefix=lambda c: "swinv2." if c.classes else "",
    unprefixed_names=("classifier",),
    describe=lambda c: (
        swin.to_hf_swin_json(c)
        | {
            "architectures": ["Swinv2ForImageClassification" if c.classes else "Swinv2Model"],
            "model_type": "swinv2",
            "pretrained_window_sizes": list(c.attention.pretrained_window or (0,) * len(c.blocks)),
        }
    ),
)
TORCHVISION_LAYOUT = SwinV2Layout(
    "features.0.0",
    "features.0.2",
    stage=swin.TORCHVISION_LAYOUT.stage,
    format_merge_prefix=swin.TORCHVISION_LAYOUT.format_merge_prefix,
    module_names=BLOCK_NAMES | {"mlp.part.fc1": "mlp.0", "mlp.part.fc2": "mlp.3"},
    bias=POSITION_MLP,
    norm="norm",
    head="head",
    biases="attn.qkv.bias",
)


def build_position_buffers(config: SwinConfig) -> Tensors:
    """Build the buffers that torchvision's loader requires: the position indices, and the log-spaced relative
    offsets."""
    offsets = log_spaced_offsets((config.attention.window, config.attention.window))[None]
    indices = swin.build_position_index_buffers(config)
    return indices | {name.replace("position_index", "coords_table"): offsets.clone() for name in indices}


TORCHVISION = WeightsFormat(
    "torchvision",
    "torchvision's Swin V2",
    ("features.0.0.weight", "features.1.0.attn.logit_scale"),
    TORCHVISION_LAYOUT.build_rules(),
    assumes=describe_swin_assumptions,
    configure=TORCHVISION_LAYOUT.infer_config,
    ignored=IGNORED_TENSORS,
    can_represent=lambda c: (
        is_square_swin_v2(c)
        and bool(c.classes)
        and not c.attention.pretrained_window
        and set(c.windows) == {(c.attention.window, c.attention.window)}
        and c.attention.window > 1  # torchvision's code divides by the window minus one
        and c.attention.qkv_bias
    ),
    buffers=build_position_buffers,
)
NATIVE_LAYOUT = SwinV2Layout(
    "projection",
    "first_norm",
    stage=swin.NATIVE_LAYOUT.stage,
    format_merge_prefix=swin.NATIVE_LAYOUT.format_merge_prefix,
    module_names={"mlp.part.fc1": "mlp.part.fc1"},
    bias=f"{ATTENTION_PREFIX}.position",
    norm="norm",
    head="head",
    scale=f"{ATTENTION_PREFIX}.logit_scale",
    qkv=f"{ATTENTION_PREFIX}.qkv",
    biases=f"{ATTENTION_PREFIX}.q_bias {ATTENTION_PREFIX}.v_bias",
)
NATIVE = NativeFormat(
    STATE_DICT_FORMAT,
    "a state dict of vitreous' Swin V2",
    ("projection.weight", f"stages.0.blocks.0.{ATTENTION_PREFIX}.logit_scale"),
    (),
    configure=lambda shapes, settings: swin.infer_native_swin_config(shapes, settings, NATIVE_LAYOUT),
    strip=("model.",),
    can_represent=lambda config: False,
)
FORMATS = [MICROSOFT, TIMM, TRANSFORMERS, TORCHVISION, NATIVE]
