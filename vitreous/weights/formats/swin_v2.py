"""Swin V2 (arXiv:2111.09883) as Microsoft's files, timm, transformers and torchvision have it: names and shapes.

Positions are drawn by a small network for windows of any size, so tensors do not tell the window, but for the buffers
that Microsoft's files and torchvision's have: it is taken from config.json, from the names that such files are
published under (`..._window12to24_...`), or is 8. Nor do they tell at which window the network was trained before.

Keys have no bias. torchvision has one all the same, sets it to zero on every pass, and it is written as zeros.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from vitreous.config import nest_paths
from vitreous.models.config import ModelConfig, SwinConfig
from vitreous.nn.windows import log_spaced
from vitreous.weights.formats import swin
from vitreous.weights.formats.own import NAME, OwnNames
from vitreous.weights.formats.swin import BRANCHES, BUFFERS, MLP, Layout, assumptions, with_windows
from vitreous.weights.table import COPY, SEPARATE, Format, Row, Shapes, Tensors, TensorTransform, row, table

ATTENTION = "attention.part.part"
WINDOW = 8  # of the published models that say no other


@dataclass(frozen=True)
class LayoutV2(Layout):
    """The same with `bias` the network of positions, `scale` the factor of the cosine, `qkv` the layer of queries, keys
    and values or three of them, and `biases` those of queries and values, or of all three in one."""

    scale: str = "attn.logit_scale"
    qkv: str = "attn.qkv"
    biases: str = "attn.q_bias attn.v_bias"
    coordinates: str = "attn.relative_coords_table"

    def positions(self, stage: int, ours: str, theirs: str) -> list[Row]:
        """The rows of attention but for its output."""
        ours = f"{ours}.{ATTENTION}"
        qkv = " ".join(f"{theirs}.{name}.weight" for name in self.qkv.split())
        biases = " ".join(f"{theirs}.{name}" for name in self.biases.split())
        return [
            row(f"{ours}.qkv.weight", qkv, SEPARATE if " " in qkv else COPY),
            row(f"{ours}.q_bias {ours}.v_bias", biases, COPY if " " in biases else WITH_KEYS),
            *table(
                f"{ours}.logit_scale = {theirs}.{self.scale}",
                f"{ours}.position.fc1.{{x}} = {theirs}.{self.bias}.0.{{x}}",
                f"{ours}.position.fc2.weight = {theirs}.{self.bias}.2.weight",
            ),
        ]

    def configure(self, shapes: Shapes, settings: dict[str, Any], pad: str = "zeros") -> SwinConfig:
        """The config of these shapes; `settings` may have window and pretrained_window besides. Raises ValueError where
        the shapes are of no Swin."""
        blocks = self.blocks_in(shapes)
        firsts = [f"{self.stage(stage)}.0" for stage in range(len(blocks))]
        fields = self.fields(shapes) | {
            "version": 2,
            "attention.qkv_bias": f"{firsts[0]}.{self.biases.split()[0]}" in shapes,
            "heads": tuple(shapes[f"{first}.{self.scale}"][0] for first in firsts),
            "attention.pretrained_window": trained(settings),
            "attention.pad": pad,
        }
        tables = [shapes[name] for first in firsts if (name := f"{first}.{self.coordinates}") in shapes]
        if len(tables) == len(blocks):
            return with_windows(fields, [((table[1] + 1) // 2, (table[2] + 1) // 2) for table in tables], settings)
        known = {
            name: settings[name]
            for name in ("mlp.gelu", "norm.eps", "positions.resize", "attention.pad", "image")
            if name in settings
        }
        window = settings.get("attention.window", WINDOW)
        scale = 2 ** (len(blocks) - 1)
        # windows of more than 8 are half of that in the last stage of published models
        image = tuple(max(1, window // (1 + (window > WINDOW))) * scale * side for side in fields["patch_size"])
        settled: dict[str, Any] = {"image": image} | fields | known | {"attention.window": window}
        return SwinConfig().with_options(**nest_paths(settled))

    @property
    def counted(self) -> str:
        """The factor of the cosine."""
        return self.scale


def trained(settings: dict[str, Any]) -> tuple[int, ...]:
    """The windows of pre-training in settings, none where all are the own."""
    sizes = tuple(settings.get("attention.pretrained_window", ()))
    return sizes if any(sizes) else ()


def without_keys(theirs: list[Tensor], config: SwinConfig) -> list[Tensor]:
    """The biases of queries, keys and values (3 D,) -> those of queries and values, each (D,)."""
    q, _, v = theirs[0].chunk(3)
    return [q, v]


def with_keys(ours: list[Tensor], config: SwinConfig) -> list[Tensor]:
    """The biases of queries and values, each (D,) -> (3 D,), zeros for keys between them."""
    return [torch.cat([ours[0], torch.zeros_like(ours[0]), ours[1]])]


WITH_KEYS = TensorTransform(without_keys, with_keys)


def square(config: ModelConfig) -> bool:
    """Whether it is a Swin V2 of square windows."""
    return (
        isinstance(config, SwinConfig)
        and config.version == 2
        and all(rows == columns for rows, columns in config.windows)
    )


PARTS = BRANCHES | {"attention.part.part.out": "attn.proj"} | MLP
LEFT = (*BUFFERS, r".*\.relative_coords_table")
NETWORK = "attn.cpb_mlp"

MICROSOFT_LAYOUT = LayoutV2(
    "patch_embed.proj",
    "patch_embed.norm",
    stage=swin.MICROSOFT_LAYOUT.stage,
    merge=swin.MICROSOFT_LAYOUT.merge,
    parts=PARTS,
    bias=NETWORK,
    norm="norm",
    head="head",
)
MICROSOFT = Format(
    "swin",
    "Microsoft's Swin V2",
    ("patch_embed.proj.weight", "layers.0.blocks.0.attn.logit_scale", "layers.0.downsample.reduction.weight"),
    MICROSOFT_LAYOUT.rows(),
    assumes=assumptions,
    configure=lambda shapes, settings: MICROSOFT_LAYOUT.configure(shapes, settings, "mask"),
    ignored=LEFT,
    holds=lambda c: square(c) and len(c.blocks) > 1,
)
TIMM_LAYOUT = LayoutV2(
    "patch_embed.proj",
    "patch_embed.norm",
    stage=swin.TIMM_LAYOUT.stage,
    merge=swin.TIMM_LAYOUT.merge,
    parts=PARTS,
    bias=NETWORK,
    norm="norm",
    head="head.fc",
)
TIMM = Format(
    "timm",
    "timm's Swin V2",
    ("patch_embed.proj.weight", "layers.0.blocks.0.attn.logit_scale"),
    TIMM_LAYOUT.rows(),
    assumes=assumptions,
    configure=lambda shapes, settings: TIMM_LAYOUT.configure(shapes, settings, "zeros-after-shift"),
    ignored=LEFT,
    holds=square,
)
TRANSFORMERS_LAYOUT = LayoutV2(
    "embeddings.patch_embeddings.projection",
    "embeddings.norm",
    stage=swin.TRANSFORMERS_LAYOUT.stage,
    merge=swin.TRANSFORMERS_LAYOUT.merge,
    parts={
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
TRANSFORMERS = Format(
    "huggingface",
    "transformers' Swin V2",
    ("embeddings.patch_embeddings.projection.weight", "encoder.layers.0.blocks.0.attention.self.logit_scale"),
    TRANSFORMERS_LAYOUT.rows(),
    assumes=assumptions,
    configure=TRANSFORMERS_LAYOUT.configure,
    ignored=LEFT,
    strip=("swinv2.",),
    holds=lambda c: square(c) and len(set(c.image)) == len(set(c.patch_size)) == 1,
    prefix=lambda c: "swinv2." if c.classes else "",
    beside=("classifier",),
    describe=lambda c: (
        swin.describe(c)
        | {
            "architectures": ["Swinv2ForImageClassification" if c.classes else "Swinv2Model"],
            "model_type": "swinv2",
            "pretrained_window_sizes": list(c.attention.pretrained_window or (0,) * len(c.blocks)),
        }
    ),
)
TORCHVISION_LAYOUT = LayoutV2(
    "features.0.0",
    "features.0.2",
    stage=swin.TORCHVISION_LAYOUT.stage,
    merge=swin.TORCHVISION_LAYOUT.merge,
    parts=PARTS | {"mlp.part.fc1": "mlp.0", "mlp.part.fc2": "mlp.3"},
    bias=NETWORK,
    norm="norm",
    head="head",
    biases="attn.qkv.bias",
)


def buffers(config: SwinConfig) -> Tensors:
    """What torchvision's loader asks for: the indices of version 1, and the log-spaced offsets."""
    places = log_spaced((config.attention.window, config.attention.window))[None]
    indices = swin.indices(config)
    return indices | {name.replace("position_index", "coords_table"): places.clone() for name in indices}


TORCHVISION = Format(
    "torchvision",
    "torchvision's Swin V2",
    ("features.0.0.weight", "features.1.0.attn.logit_scale"),
    TORCHVISION_LAYOUT.rows(),
    assumes=assumptions,
    configure=TORCHVISION_LAYOUT.configure,
    ignored=LEFT,
    holds=lambda c: (
        square(c)
        and bool(c.classes)
        and not c.attention.pretrained_window
        and set(c.windows) == {(c.attention.window, c.attention.window)}
        and c.attention.window > 1  # its code divides by one less
        and c.attention.qkv_bias
    ),
    buffers=buffers,
)
OWN_LAYOUT = LayoutV2(
    "projection",
    "first_norm",
    stage=swin.OWN_LAYOUT.stage,
    merge=swin.OWN_LAYOUT.merge,
    parts={"mlp.part.fc1": "mlp.part.fc1"},
    bias=f"{ATTENTION}.position",
    norm="norm",
    head="head",
    scale=f"{ATTENTION}.logit_scale",
    qkv=f"{ATTENTION}.qkv",
    biases=f"{ATTENTION}.q_bias {ATTENTION}.v_bias",
)
OWN = OwnNames(
    NAME,
    "a state dict of vitreous' Swin V2",
    ("projection.weight", f"stages.0.blocks.0.{ATTENTION}.logit_scale"),
    (),
    configure=lambda shapes, settings: swin.configure_own(shapes, settings, OWN_LAYOUT),
    strip=("model.",),
    holds=lambda config: False,
)
FORMATS = [MICROSOFT, TIMM, TRANSFORMERS, TORCHVISION, OWN]
