"""Groups of related fields of a `ViTConfig`, such as `attention`: frozen dataclasses, one per component of the model.
Does not import PyTorch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from vitreous.errors import UsageError

#: how positions are resized to another grid: the keys of `nn.grid.RESIZE_MODES`
PositionResize = Literal[
    "bicubic-antialias",
    "bicubic",
    "bicubic-offset",
    "bicubic-aligned",
    "bilinear",
    "bilinear-antialias",
    "zoom",
    "zoom-scipy",
]
#: kinds of position embeddings added to tokens; space-time and sinusoid are for video models
PositionKind = Literal["learned", "axes", "factorised", "sincos", "sincos-big-vision", "none", "space-time", "sinusoid"]
#: kinds of attention by its position information; decomposed is SAM's
AttentionKind = Literal["plain", "relative", "rotary", "decomposed"]


class ConfigGroup:
    """Base class of dataclasses that group fields of a config; options refer to them by dotted paths, such as
    `attention.window`."""


class PositionGroup(ConfigGroup):
    """Fields that `positions` has in every family. This class is not a dataclass, so these are not dataclass fields."""

    kind = "none"
    resize = "bilinear"


class AttentionGroup(ConfigGroup):
    """Fields that `attention` has in every family. This class is not a dataclass, so these are not dataclass fields."""

    kind = "none"
    global_blocks = tuple[int, ...]()


def check_groups(config: object) -> None:
    """Raise UsageError for a group that is a dict, which constructors of configs do not accept."""
    for name, value in vars(config).items():
        if isinstance(value, dict):
            hint = f"use {name}=…Config(…) of vitreous.models.config, or with_options({name}={{…}})"
            raise UsageError(f"{name} is a dict, but the constructor of a config requires a config object", hint)


@dataclass(frozen=True)
class PositionConfig(PositionGroup):
    """Position embeddings that are added to tokens.

    - `kind`: `learned` is one vector per position. `axes` is learned 2-D, with the channels divided among rows and
      columns. `factorised` is a sum of row and column embeddings (NaViT, arXiv:2307.06304). `sincos` are fixed. For
      video models, `space-time` has one table for space and one for time, and `sinusoid` is VideoMAE's fixed embedding
      of a token's index.
    - `at`: where they are added: once at the `input`, or before each block, as separate (`each`) or `shared` embeddings
      (arXiv:2010.11929, Table 8).
    - `slots`: number of first prefix tokens with a learned position; the first is the class token's, entry 0 of E_pos
      in Eq. 1.
    - `resize`: how a table is resized to another grid.
    """

    kind: PositionKind = "learned"
    at: Literal["input", "each", "shared"] = "input"
    slots: int = 1
    resize: PositionResize = "bicubic-antialias"


@dataclass(frozen=True)
class AttentionConfig(AttentionGroup):
    """Kind of attention, and the tokens to which a token attends.

    `window`: length along each axis, in tokens, of the window to which patches attend (ViTDet), in addition to prefix
    tokens; 0 for global attention. `global_blocks`: indices from 0 of blocks with global attention despite `window`.
    """

    kind: AttentionKind = "plain"
    window: int = 0
    global_blocks: tuple[int, ...] = ()
    qkv_bias: bool = True


@dataclass(frozen=True)
class MlpConfig(ConfigGroup):
    """The MLP of a block: `hidden` channels; `gelu` is the form of GELU, named as in PyTorch: none is exact (erf)."""

    hidden: int = 3072
    kind: Literal["gelu", "swiglu"] = "gelu"
    gelu: Literal["none", "tanh", "quick"] = "none"


@dataclass(frozen=True)
class NormConfig(ConfigGroup):
    """Norms and LayerScale.

    `final`: apply the last LayerNorm to every token, or only once after pooling. `layer_scale`: initial value of
    LayerScale in the residual branches; None disables it.
    """

    final: Literal["tokens", "pooled", "none"] = "tokens"
    eps: float = 1e-6
    layer_scale: float | None = None


@dataclass(frozen=True)
class HeadConfig(ConfigGroup):
    """The classification head. `representation`: width of the tanh layer before it, for pre-training; None for no
    layer."""

    representation: int | None = None
    bias: bool = True


@dataclass(frozen=True)
class RegularizationConfig(ConfigGroup):
    """Dropout and stochastic depth (`drop_path`) in training.

    `drop_path_rises`: the stochastic depth rate rises from 0 in the first block to `drop_path` in the last; otherwise
    it is equal in all blocks (DeiT-III).
    """

    dropout: float = 0.0
    drop_path: float = 0.0
    drop_path_rises: bool = True
