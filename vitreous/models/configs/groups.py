"""Groups of related fields of a `ViTConfig`, such as `attention`: frozen dataclasses, one per component of the model.
Does not import PyTorch."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

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
    `qkv_bias`: queries, keys and values have a bias; without `key_bias`, only queries and values (BEiT,
    arXiv:2106.08254). `out_bias`: the output layer has a bias. `qk_norm`: RMSNorm of each head's queries and keys.
    `inner_norm`: LayerNorm of the concatenated heads before the output layer (EVA-02-CLIP, arXiv:2303.15389). Raises
    UsageError for `inner_norm` without rotary attention or with `qk_norm`.
    """

    kind: AttentionKind = "plain"
    window: int = 0
    global_blocks: tuple[int, ...] = ()
    qkv_bias: bool = True
    key_bias: bool = True
    out_bias: bool = True
    qk_norm: bool = False
    inner_norm: bool = False

    def __post_init__(self) -> None:
        if self.inner_norm and (self.kind != "rotary" or self.qk_norm):
            raise UsageError(
                "attention.inner_norm is only for rotary attention without norms of queries and keys",
                "set attention.kind=rotary, or attention.inner_norm=False",
            )


@dataclass(frozen=True)
class RotaryConfig(ConfigGroup):
    """Rotary positions of `attention.kind=rotary`. The first five fields are those of `nn.rotary.RotaryForm`.

    `register_base`: base of the rotation of registers, which must then form a square grid (ViT-5); 0 does not rotate
    them. `rescale`: in training, coordinates are multiplied by a factor between 1 / `rescale` and `rescale`, drawn
    log-uniformly once per forward pass (DINOv3, arXiv:2508.10104); 1 does not change them.
    """

    base: float = 10000.0
    coordinates: Literal["index", "reference", "centred"] = "index"
    reference: int = 16
    offset: int = 0
    rounded: bool = False
    register_base: float = 0.0
    rescale: float = 1.0


@dataclass(frozen=True)
class MlpConfig(ConfigGroup):
    """The MLP of a block: `hidden` channels; `gelu` is the form of GELU, named as in PyTorch: none is exact (erf).

    `bias`: its layers have biases. `norm`: the gated hidden layer of `kind=swiglu` is normalised before the output
    layer (EVA-02, arXiv:2303.11331).
    """

    hidden: int = 3072
    kind: Literal["gelu", "swiglu"] = "gelu"
    gelu: Literal["none", "tanh", "quick"] = "none"
    bias: bool = True
    norm: bool = False


@dataclass(frozen=True)
class NormConfig(ConfigGroup):
    """Norms and LayerScale.

    `kind`: LayerNorm, or RMSNorm (arXiv:1910.07467). `final`: apply the last norm to every token, or only once after
    pooling. `layer_scale`: initial value of LayerScale in the residual branches; None disables it. `patches`: normalise
    the projected patches before positions are added (AIMv2, arXiv:2411.14402).
    """

    final: Literal["tokens", "pooled", "none"] = "tokens"
    eps: float = 1e-6
    layer_scale: float | None = None
    kind: Literal["layer", "rms"] = "layer"
    patches: bool = False


@dataclass(frozen=True)
class HeadConfig(ConfigGroup):
    """The classification head. `kind`: `linear`; or `cosine`, a linear head on features of length one. The weights of a
    zero-shot classifier are embeddings of its class names times exp(t) (arXiv:2109.01903, section 3).

    `representation`: width of the layer before the head; None for no layer. It has a tanh, for pre-training; before a
    cosine head it has none, so it is the projection to embeddings. `pool_heads`, `pool_hidden`: attention heads and
    hidden channels of `pool=attention`; 0 for those of the blocks.
    """

    kind: Literal["linear", "cosine"] = "linear"
    representation: int | None = None
    bias: bool = True
    pool_heads: int = 0
    pool_hidden: int = 0


@dataclass(frozen=True)
class RegularizationConfig(ConfigGroup):
    """Dropout and stochastic depth (`drop_path`) in training.

    `drop_path_rises`: the stochastic depth rate rises from 0 in the first block to `drop_path` in the last; otherwise
    it is equal in all blocks (DeiT-III).
    """

    dropout: float = 0.0
    drop_path: float = 0.0
    drop_path_rises: bool = True


def check_window_options(config: Any) -> None:
    """Raise UsageError for invalid windows of a ViT's config, or windows that another option excludes."""
    window, blocks = config.attention.window, config.attention.global_blocks
    if window < 0 or not set(blocks) <= set(range(config.depth)):
        raise UsageError(
            f"attention.window={window} with attention.global_blocks={blocks} is invalid",
            f"use a window of at least 1 token, or 0 for no windows, and blocks from 0 to {config.depth - 1}",
        )
    if window and (config.attention.kind not in ("plain", "decomposed") or config.axial):
        hint = "use attention.window=0, or attention.kind=plain and axial=False"
        raise UsageError("windows require attention.kind=plain", hint)


def check_rotary_options(config: Any) -> None:
    """Raise UsageError for invalid rotary positions of a ViT's config, and for biases and norms that its kind of
    attention or MLP does not have."""
    attention, rotary, mlp = config.attention, config.rotary, config.mlp
    if rotary != RotaryConfig() and attention.kind != "rotary":
        raise UsageError("options of rotary require attention.kind=rotary", "set it, or leave rotary out")
    if rotary.base <= 1 or rotary.rescale < 1 or rotary.reference < 1 or rotary.register_base < 0:
        raise UsageError(
            "rotary.base must be above 1, rotary.rescale and rotary.reference at least 1, and rotary.register_base "
            "at least 0"
        )
    if rotary.register_base and math.isqrt(config.registers) ** 2 != config.registers:
        raise UsageError(
            f"rotary.register_base requires a square number of registers, got {config.registers}", "use 4 registers"
        )
    if attention.qk_norm and (attention.kind not in ("plain", "rotary") or attention.window):
        raise UsageError(
            "attention.qk_norm requires attention.kind=plain or rotary, without windows", "use qk_norm=False"
        )
    if not attention.key_bias and (not attention.qkv_bias or attention.kind == "decomposed"):
        raise UsageError(
            "attention.key_bias=False requires attention.qkv_bias=True, and no decomposed positions",
            "leave key_bias out",
        )
    if mlp.norm and mlp.kind != "swiglu":
        raise UsageError("mlp.norm requires mlp.kind=swiglu", "use mlp.norm=False")
