"""The groups of a `ViTConfig`'s fields: frozen dataclasses, one for each component of the model. Does not import
PyTorch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from vitreous.errors import UsageError

#: how positions are resized to another grid: the keys of nn.grid.RESIZE
PositionResize = Literal[
    "bicubic-antialias", "bicubic", "bicubic-offset", "bicubic-aligned", "bilinear", "zoom", "zoom-scipy"
]
#: position embeddings added to tokens; space-time and sinusoid are for video models
PositionKind = Literal["learned", "axes", "factorised", "sincos", "sincos-big-vision", "none", "space-time", "sinusoid"]
#: position information inside attention; decomposed is SAM's
AttentionKind = Literal["plain", "relative", "rotary", "decomposed"]


class ConfigGroup:
    """Base class of dataclasses that group fields of a config; options refer to them as `attention.window`."""


class PositionGroup(ConfigGroup):
    """Fields of every family's `positions`. This class is not a dataclass, so these are not dataclass fields."""

    kind = "none"
    resize = "bilinear"


class AttentionGroup(ConfigGroup):
    """Fields of every family's `attention`. This class is not a dataclass, so these are not dataclass fields."""

    kind = "none"
    global_blocks = tuple[int, ...]()


def check_groups(config: object) -> None:
    """Raise UsageError for a dict in place of a group, which constructors do not accept."""
    for name, value in vars(config).items():
        if isinstance(value, dict):
            hint = f"use {name}=…Config(…) of vitreous.models.config, or with_options({name}={{…}})"
            raise UsageError(f"{name} is a dict, but a constructor expects a group", hint)


@dataclass(frozen=True)
class PositionConfig(PositionGroup):
    """Position embeddings that are added to tokens.

    `kind`: `axes` is learned 2-D, with the channels divided among rows and columns; `factorised` is a sum of row and
    column embeddings (NaViT, arXiv:2307.06304). For video models, `space-time` has one table for space and one for
    time, and `sinusoid` is VideoMAE's fixed embedding of a token's index. `at`: added once, or before each block,
    separate or shared (arXiv:2010.11929, Table 8). `slots`: learned positions for the first prefix tokens; slot 0 of
    E_pos in Eq. 1 is the class token's. `resize`: how a table is resized to another grid.
    """

    kind: PositionKind = "learned"
    at: Literal["input", "each", "shared"] = "input"
    slots: int = 1
    resize: PositionResize = "bicubic-antialias"


@dataclass(frozen=True)
class AttentionConfig(AttentionGroup):
    """Which tokens attend to which, and how.

    `window`: tokens along a side of the window that patches attend to (ViTDet), in addition to prefix tokens; 0: global
    attention. `global_blocks`: indices from 0 of blocks with global attention despite `window`.
    """

    kind: AttentionKind = "plain"
    window: int = 0
    global_blocks: tuple[int, ...] = ()
    qkv_bias: bool = True


@dataclass(frozen=True)
class MlpConfig(ConfigGroup):
    """The MLP of a block: `hidden` channels; `gelu` in torch's names, in which none is the exact form (erf)."""

    hidden: int = 3072
    kind: Literal["gelu", "swiglu"] = "gelu"
    gelu: Literal["none", "tanh", "quick"] = "none"


@dataclass(frozen=True)
class NormConfig(ConfigGroup):
    """Norms and layer scale.

    `final`: apply the last LayerNorm to every token, or once, after pooling. `layer_scale`: initial value of the scales
    of the residual branches; None for none.
    """

    final: Literal["tokens", "pooled", "none"] = "tokens"
    eps: float = 1e-6
    layer_scale: float | None = None


@dataclass(frozen=True)
class HeadConfig(ConfigGroup):
    """The head. `representation`: width of the tanh layer before it, for pre-training; None for none."""

    representation: int | None = None
    bias: bool = True


@dataclass(frozen=True)
class RegularizationConfig(ConfigGroup):
    """Dropout and stochastic depth in training.

    `drop_path_rises`: from 0 in the first block to `drop_path` in the last; otherwise it is the same in each
    (DeiT-III).
    """

    dropout: float = 0.0
    drop_path: float = 0.0
    drop_path_rises: bool = True
