"""The groups of a `ViTConfig`'s fields: frozen dataclasses, one for each part of the model. Needs no PyTorch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from vitreous.errors import UsageError

#: how positions are resized to another grid: the rows of nn.grid.RESIZE
PositionResize = Literal[
    "bicubic-antialias", "bicubic", "bicubic-offset", "bicubic-aligned", "bilinear", "zoom", "zoom-scipy"
]
#: what is added to tokens; space-time and sinusoid are those of a video model
PositionKind = Literal["learned", "axes", "factorised", "sincos", "sincos-big-vision", "none", "space-time", "sinusoid"]
#: what attention itself knows of places; decomposed is SAM's
AttentionKind = Literal["plain", "relative", "rotary", "decomposed"]


class ConfigGroup:
    """Base class of dataclasses that are groups of a config's fields: options name them `attention.window`."""


class PositionGroup(ConfigGroup):
    """What every family's `positions` has. These are no fields of this class, which is no dataclass."""

    kind: str = "none"
    resize: str = "bilinear"


class AttentionGroup(ConfigGroup):
    """What every family's `attention` has. These are no fields of this class, which is no dataclass."""

    kind: str = "none"
    global_blocks: tuple[int, ...] = ()


def check_groups(config: object) -> None:
    """Raise UsageError for a dict in place of a group, which constructors do not take."""
    for name, value in vars(config).items():
        if isinstance(value, dict):
            hint = f"use {name}=…Config(…) of vitreous.models.config, or with_options({name}={{…}})"
            raise UsageError(f"{name} is a dict, and a constructor takes a group", hint)


@dataclass(frozen=True)
class PositionConfig(PositionGroup):
    """What is added to tokens to say where they are.

    `kind`: `axes` is learned 2-D, the channels shared out among rows and columns; `factorised` is added up (NaViT,
    arXiv:2307.06304); of a video model, `space-time` is a table of places and one of slots, `sinusoid` VideoMAE's fixed
    ones, of a token's number. `at`: added once, or before each block, its own or shared (arXiv:2010.11929, Table 8).
    `slots`: learned positions for the first prefix tokens; slot 0 of E_pos in Eq. 1 is the class token's. `resize`: how
    a table is read at another grid.
    """

    kind: PositionKind = "learned"
    at: Literal["input", "each", "shared"] = "input"
    slots: int = 1
    resize: PositionResize = "bicubic-antialias"


@dataclass(frozen=True)
class AttentionConfig(AttentionGroup):
    """Which tokens attend to which, and how.

    `window`: tokens along a side of what patches attend to (ViTDet), prefix tokens besides; 0: everything.
    `global_blocks`: those that attend to everything all the same, counted from 0.
    """

    kind: AttentionKind = "plain"
    window: int = 0
    global_blocks: tuple[int, ...] = ()
    qkv_bias: bool = True


@dataclass(frozen=True)
class MlpConfig(ConfigGroup):
    """The MLP of a block: `hidden` channels; `gelu` in torch's names, where none is the exact form (erf)."""

    hidden: int = 3072
    kind: Literal["gelu", "swiglu"] = "gelu"
    gelu: Literal["none", "tanh", "quick"] = "none"


@dataclass(frozen=True)
class NormConfig(ConfigGroup):
    """Norms and layer scale.

    `final`: the last LayerNorm is on every token, or once, after pooling. `layer_scale`: the value that the scales of
    the residual branches start from; None for none.
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

    `drop_path_rises`: from 0 in the first block to `drop_path` in the last; else it is the same in each (DeiT-III).
    """

    dropout: float = 0.0
    drop_path: float = 0.0
    drop_path_rises: bool = True
