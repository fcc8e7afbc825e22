"""Swin Transformers in the formats of Microsoft, timm, transformers and torchvision: names and shapes.

In this package a stage merges tokens before its blocks. Microsoft's code and transformers merge at the end of a stage,
and in torchvision merging is a separate stage. timm's files from before 2023 are Microsoft's.

Files do not specify the image size if windows divide every grid. It is assumed so that the last grid is one window: 7 x
7 of 224 pixels, 12 x 12 of 384.

| code | grids that are not divisible by the window | read with `pad` |
|---|---|---|
| Microsoft | rejected; its forks for detection behave like torchvision | mask |
| torchvision, transformers | padded with zeros, which are attended to, then shifted | zeros |
| timm | shifted, then padded; axes that one window covers are never shifted | zeros-after-shift |

After a grid of one window, transformers' code no longer shifts larger grids of that stage; ours does.

"Our" names and tensors are those of this package's models, "their" names and tensors those of the files.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Iterator
from dataclasses import KW_ONLY, dataclass
from typing import Any

import torch

from vitreous.config import nest_paths
from vitreous.models.config import ModelConfig, SwinConfig
from vitreous.nn.windows import gather_offset_table
from vitreous.weights.formats.own import STATE_DICT_FORMAT, NativeFormat
from vitreous.weights.table import (
    CONVOLUTION,
    COPY_TRANSFORM,
    QKV_TRANSFORM,
    RenameRule,
    Shapes,
    Tensors,
    TensorTransform,
    WeightsFormat,
    count_blocks,
    parse_copy_rules,
    parse_rename_rule,
)

MAX_STAGES = 8  # stages for which there are rules; published models have four
HF_ACTIVATIONS = {"none": "gelu", "tanh": "gelu_pytorch_tanh", "quick": "quick_gelu"}


@dataclass(frozen=True)
class SwinLayout:
    """Tensor names of a Swin in a format.

    `projection`, `first_norm`, `norm` and `head`: names of modules. `stage` and `format_merge_prefix`: functions from
    the number of a stage, from 0, to the name prefix of its blocks and of the merging before it. `module_names`: our
    names in a block -> theirs. `bias`: the table of relative positions in a block.
    """

    projection: str
    first_norm: str
    stage: Callable[[int], str]
    format_merge_prefix: Callable[[int], str]
    _: KW_ONLY
    module_names: dict[str, str]
    bias: str
    norm: str
    head: str

    def build_rules(self) -> tuple[RenameRule, ...]:
        """Build the rules of the format."""
        lines = [
            f"projection.bias = {self.projection}.bias",
            f"first_norm.{{x}} = {self.first_norm}.{{x}}",
            f"norm.{{x}} = {self.norm}.{{x}}",
            f"head.{{x}} = {self.head}.{{x}}",
        ]
        stage_rules = []
        for stage in range(MAX_STAGES):
            if stage:
                lines += [
                    f"stages.{stage}.merge.{layer} = {self.format_merge_prefix(stage)}.{layer}"
                    for layer in ("norm.{x}", "reduction.weight")
                ]
            ours, theirs = f"stages.{stage}.blocks.{{j}}", f"{self.stage(stage)}.{{j}}"
            for layer, names in self.module_names.items():
                their_names = " ".join(f"{theirs}.{name}.{{x}}" for name in names.split())
                stage_rules.append(
                    parse_rename_rule(
                        f"{ours}.{layer}.{{x}}", their_names, QKV_TRANSFORM if " " in names else COPY_TRANSFORM
                    )
                )
            stage_rules += self.build_position_rules(stage, ours, theirs)
        return (
            parse_rename_rule("projection.weight", f"{self.projection}.weight", CONVOLUTION),
            *parse_copy_rules(*lines),
            *stage_rules,
        )

    def build_position_rules(self, stage: int, ours: str, theirs: str) -> list[RenameRule]:
        """Build the rules of the relative positions in a block; `ours` and `theirs` are name prefixes of the block."""
        return [parse_rename_rule(f"{ours}.{POSITION_TABLE}", f"{theirs}.{self.bias}", build_offset_transform(stage))]

    def infer_config(self, shapes: Shapes, settings: dict[str, Any], pad: str = "zeros") -> SwinConfig:
        """Infer the config from the shapes; `settings` may contain other fields: image (pixels), gelu, eps, resize,
        pad. `pad`: how the format's code pads grids, see the table above. Raises ValueError if the shapes are not those
        of a Swin."""
        tables = [shapes[f"{self.stage(stage)}.0.{self.bias}"] for stage in range(len(self.count_stage_blocks(shapes)))]
        window_sizes = [tuple((length + 1) // 2 for length in infer_offset_counts(shape)) for shape in tables]
        qkv_name = f"{self.stage(0)}.0.{self.module_names['attention.part.part.qkv'].split()[0]}"
        fields = {
            "attention.qkv_bias": f"{qkv_name}.bias" in shapes,
            "heads": tuple(shape[-1] for shape in tables),
            "attention.pad": pad,
        }
        return build_windowed_config(self.infer_fields(shapes) | fields, window_sizes, settings)

    def infer_fields(self, shapes: Shapes) -> dict[str, Any]:
        """Infer the config fields that both versions of Swin have from the shapes."""
        width, channels, *patch = shapes[f"{self.projection}.weight"]
        fc1 = f"{self.stage(0)}.0.{self.module_names['mlp.part.fc1']}.weight"
        return {
            "patch_size": tuple(patch),
            "channels": channels,
            "classes": shapes.get(f"{self.head}.weight", (0,))[0],
            "width": width,
            "blocks": self.count_stage_blocks(shapes),
            "mlp.ratio": shapes[fc1][0] / width,
        }

    @property
    def block_tensor(self) -> str:
        """Return the name of a tensor that each block has exactly once."""
        return self.bias

    def count_stage_blocks(self, shapes: Shapes) -> tuple[int, ...]:
        """Count the blocks of each stage. Raises ValueError if their numbers have a gap, or if there are too many
        stages."""
        blocks: list[int] = []
        while f"{self.stage(len(blocks))}.0.{self.block_tensor}" in shapes:
            blocks.append(count_blocks(shapes, f"{self.stage(len(blocks))}.{{i}}.{self.block_tensor}"))
        if len(blocks) > MAX_STAGES:
            raise ValueError(f"it has {len(blocks)} stages, but at most {MAX_STAGES} are supported")
        return tuple(blocks)


POSITION_TABLE = "attention.part.part.position.table"


def build_windowed_config(
    fields: dict[str, Any], window_sizes: list[tuple[int, ...]], settings: dict[str, Any]
) -> SwinConfig:
    """Build the config from these fields and the window size of each stage; `settings` as for
    `WeightsFormat.configure`. The largest window is that of the model; a smaller one is limited by the grid of its
    stage. Raises ValueError if the windows do not match the image size."""
    overrides = {
        name: settings[name]
        for name in ("mlp.gelu", "norm.eps", "positions.resize", "attention.pad")
        if name in settings
    }
    scale = 2 ** (len(window_sizes) - 1)
    image = settings.get("image") or tuple(
        length * patch * scale for length, patch in zip(window_sizes[-1], fields["patch_size"], strict=True)
    )
    sizes = {"image": image, "attention.window": max(map(max, window_sizes))}
    config = SwinConfig().with_options(**nest_paths(fields | overrides | sizes))
    if config.windows != tuple(window_sizes):
        raise ValueError(
            f"its windows are {', '.join(f'{m} x {n}' for m, n in window_sizes)}, and an image of "
            f"{' x '.join(map(str, image))} pixels needs {', '.join(f'{m} x {n}' for m, n in config.windows)}; set the "
            "image size of the weights: --source-size HEIGHT WIDTH"
        )
    return config


def infer_offset_counts(shape: tuple[int, ...]) -> tuple[int, int]:
    """Return the number of relative offsets along each axis of a table, (offsets, h) of a square window or (2 m - 1, 2
    n - 1, h). Raises ValueError if the offsets of a square window are not the square of an odd number."""
    if len(shape) == 3:
        return shape[0], shape[1]
    side = math.isqrt(shape[0])
    if side * side != shape[0] or side % 2 == 0:
        raise ValueError(f"{shape[0]} relative positions do not match a square window")
    return side, side


def build_offset_transform(stage: int) -> TensorTransform:
    """Build the transform between tables (offsets, h) and (2 m - 1, 2 n - 1, h) for the windows of a stage."""

    def to_native(theirs: list[torch.Tensor], config: SwinConfig) -> list[torch.Tensor]:
        """Reshape a table (offsets, h) to (2 m - 1, 2 n - 1, h)."""
        rows, columns = config.windows[stage]
        return [theirs[0].unflatten(0, (2 * rows - 1, 2 * columns - 1))]

    return TensorTransform(to_native, lambda ours, config: [ours[0].flatten(0, 1)])


def has_single_window(config: ModelConfig) -> bool:
    """Return whether the model is a Swin whose stages all have the same square window, as in code without a fixed image
    size."""
    return (
        isinstance(config, SwinConfig)
        and config.version == 1
        and set(config.windows) == {(config.attention.window, config.attention.window)}
    )


def is_square_swin(config: ModelConfig) -> bool:
    """Return whether the model is a Swin with square windows."""
    return (
        isinstance(config, SwinConfig)
        and config.version == 1
        and all(rows == columns for rows, columns in config.windows)
    )


BRANCH_NORMS = {"attention.norm": "norm1", "mlp.norm": "norm2"}
ATTENTION_NAMES = {"attention.part.part.qkv": "attn.qkv", "attention.part.part.out": "attn.proj"}
MLP_NAMES = {"mlp.part.fc1": "mlp.fc1", "mlp.part.fc2": "mlp.fc2"}
COMPUTED_BUFFERS = (r".*\.relative_position_index", r".*\.attn_mask")  # recomputed from the config
BIAS_TABLE = "attn.relative_position_bias_table"

MICROSOFT_LAYOUT = SwinLayout(
    "patch_embed.proj",
    "patch_embed.norm",
    stage=lambda stage: f"layers.{stage}.blocks",
    format_merge_prefix=lambda stage: f"layers.{stage - 1}.downsample",
    module_names=BRANCH_NORMS | ATTENTION_NAMES | MLP_NAMES,
    bias=BIAS_TABLE,
    norm="norm",
    head="head",
)


def describe_swin_assumptions(config: SwinConfig, known_fields: Container[str]) -> Iterator[str]:
    """Describe assumed settings that Swin files lack: the image size, and for version 2 the window size."""
    if "image" not in known_fields:
        size = f"{config.image[0]} x {config.image[1]}"
        yield f"the image size: assumed {size} pixels (--source-size HEIGHT WIDTH)"
    if (
        config.version == 2
        and "attention.window" not in known_fields
        and "attention.pretrained_window" not in known_fields
    ):
        assumed = f"windows of {config.attention.window}" + ", for which its positions were trained" * (
            config.attention.window > 8
        )
        yield f"its full windows: assumed {assumed} (`vitreous convert --window N`)"


MICROSOFT = WeightsFormat(
    "swin",
    "Microsoft's Swin",
    ("patch_embed.proj.weight", f"layers.0.blocks.0.{BIAS_TABLE}", "layers.0.downsample.reduction.weight"),
    MICROSOFT_LAYOUT.build_rules(),
    assumes=describe_swin_assumptions,
    configure=lambda shapes, settings: MICROSOFT_LAYOUT.infer_config(shapes, settings, "mask"),
    ignored=COMPUTED_BUFFERS,
    can_represent=lambda c: is_square_swin(c) and len(c.blocks) > 1,
)
TIMM_LAYOUT = SwinLayout(
    "patch_embed.proj",
    "patch_embed.norm",
    stage=lambda stage: f"layers.{stage}.blocks",
    format_merge_prefix=lambda stage: f"layers.{stage}.downsample",
    module_names=BRANCH_NORMS | ATTENTION_NAMES | MLP_NAMES,
    bias=BIAS_TABLE,
    norm="norm",
    head="head.fc",
)
TIMM = WeightsFormat(
    "timm",
    "timm's Swin",
    ("patch_embed.proj.weight", f"layers.0.blocks.0.{BIAS_TABLE}"),
    TIMM_LAYOUT.build_rules(),
    assumes=describe_swin_assumptions,
    configure=lambda shapes, settings: TIMM_LAYOUT.infer_config(shapes, settings, "zeros-after-shift"),
    ignored=COMPUTED_BUFFERS,
    can_represent=is_square_swin,
)
TRANSFORMERS_LAYOUT = SwinLayout(
    "embeddings.patch_embeddings.projection",
    "embeddings.norm",
    stage=lambda stage: f"encoder.layers.{stage}.blocks",
    format_merge_prefix=lambda stage: f"encoder.layers.{stage - 1}.downsample",
    module_names={
        "attention.norm": "layernorm_before",
        "mlp.norm": "layernorm_after",
        "attention.part.part.qkv": "attention.self.query attention.self.key attention.self.value",
        "attention.part.part.out": "attention.output.dense",
        "mlp.part.fc1": "intermediate.dense",
        "mlp.part.fc2": "output.dense",
    },
    bias="attention.self.relative_position_bias_table",
    norm="layernorm",
    head="classifier",
)
TRANSFORMERS = WeightsFormat(
    "huggingface",
    "transformers' Swin",
    (
        "embeddings.patch_embeddings.projection.weight",
        "encoder.layers.0.blocks.0.attention.self.relative_position_bias_table",
    ),
    TRANSFORMERS_LAYOUT.build_rules(),
    assumes=describe_swin_assumptions,
    configure=TRANSFORMERS_LAYOUT.infer_config,
    ignored=COMPUTED_BUFFERS,
    strip=("swin.",),
    can_represent=lambda c: has_single_window(c) and len(set(c.image)) == len(set(c.patch_size)) == 1,
    prefix=lambda c: "swin." if c.classes else "",
    unprefixed_names=("classifier",),
    describe=lambda c: to_hf_swin_json(c),
)


def to_hf_swin_json(config: SwinConfig) -> dict[str, Any]:
    """Build the config.json of transformers' Swin."""
    return {
        "architectures": ["SwinForImageClassification" if config.classes else "SwinModel"],
        "model_type": "swin",
        "image_size": config.image[0],
        "patch_size": config.patch_size[0],
        "num_channels": config.channels,
        "embed_dim": config.width,
        "depths": list(config.blocks),
        "num_heads": list(config.heads),
        "window_size": config.attention.window,
        "mlp_ratio": config.mlp.ratio,
        "qkv_bias": config.attention.qkv_bias,
        "hidden_act": HF_ACTIVATIONS[config.mlp.gelu],
        "layer_norm_eps": config.norm.eps,
        "use_absolute_embeddings": False,
        "hidden_size": config.width_out,
        "id2label": {str(i): str(i) for i in range(config.classes)},
        "label2id": {str(i): i for i in range(config.classes)},
    }


TORCHVISION_LAYOUT = SwinLayout(
    "features.0.0",
    "features.0.2",
    stage=lambda stage: f"features.{2 * stage + 1}",
    format_merge_prefix=lambda stage: f"features.{2 * stage}",
    module_names=BRANCH_NORMS | ATTENTION_NAMES | {"mlp.part.fc1": "mlp.0", "mlp.part.fc2": "mlp.3"},
    bias=BIAS_TABLE,
    norm="norm",
    head="head",
)


def build_position_index_buffers(config: SwinConfig) -> Tensors:
    """Build the buffers that torchvision's loader requires: the table row for each pair of tokens in a window."""
    size = (config.attention.window, config.attention.window)
    indices = torch.arange((2 * size[0] - 1) * (2 * size[1] - 1)).view(2 * size[0] - 1, 2 * size[1] - 1, 1)
    return {
        f"{TORCHVISION_LAYOUT.stage(stage)}.{block}.attn.relative_position_index": gather_offset_table(
            indices, size
        ).flatten()
        for stage, blocks in enumerate(config.blocks)
        for block in range(blocks)
    }


TORCHVISION = WeightsFormat(
    "torchvision",
    "torchvision's Swin",
    ("features.0.0.weight", f"features.1.0.{BIAS_TABLE}"),
    TORCHVISION_LAYOUT.build_rules(),
    assumes=describe_swin_assumptions,
    configure=TORCHVISION_LAYOUT.infer_config,
    ignored=COMPUTED_BUFFERS,
    can_represent=lambda c: has_single_window(c) and bool(c.classes),
    buffers=lambda c: build_position_index_buffers(c),
)
NATIVE_LAYOUT = SwinLayout(
    "projection",
    "first_norm",
    stage=lambda stage: f"stages.{stage}.blocks",
    format_merge_prefix=lambda stage: f"stages.{stage}.merge",
    module_names={"attention.part.part.qkv": "attention.part.part.qkv", "mlp.part.fc1": "mlp.part.fc1"},
    bias=POSITION_TABLE,
    norm="norm",
    head="head",
)


def infer_native_swin_config(
    shapes: Shapes, settings: dict[str, Any], layout: SwinLayout = NATIVE_LAYOUT
) -> SwinConfig:
    """Infer the config of a Swin from the shapes of its state dict, with projection (D, C p q). Patches are square with
    3, 1 or 4 channels unless the image size determines otherwise. Raises ValueError if no such patch fits."""
    width, inputs = shapes["projection.weight"]
    for channels in (3, 1, 4):
        side = math.isqrt(inputs // channels)
        if side * side * channels == inputs:
            reshaped = {"projection.weight": (width, channels, side, side)}
            return layout.infer_config(shapes | reshaped, settings, "mask")
    raise ValueError(
        f"its patch projection has {inputs} inputs, which are not a square patch of 3, 1 or 4 channels; "
        "save the model with vitreous.save"
    )


NATIVE = NativeFormat(
    STATE_DICT_FORMAT,
    "a state dict of vitreous' Swin",
    ("projection.weight", f"stages.0.blocks.0.{POSITION_TABLE}"),
    (),
    configure=infer_native_swin_config,
    strip=("model.",),
    can_represent=lambda config: False,
)
FORMATS = [MICROSOFT, TIMM, TRANSFORMERS, TORCHVISION, NATIVE]
