"""timm's Vision Transformers: their state dicts as this project's config and weights.

Read: plain ViTs with class token, mean or attention pooling, registers, LayerScale, positions with or without slots for
prefix tokens, any patch, channels and source resolution. Not in a state dict, so taken from `heads` and `gelu`: the
number of heads (one per 64 channels, timm's rule for most, else given) and the form of GELU.
"""

from __future__ import annotations

import math
import re

import torch
from torch import Tensor

from vitreous.errors import WeightsError
from vitreous.models.config import ViTConfig
from vitreous.models.zoo import SIZES

#: timm's name -> ours, as patterns; what is not here is handled by `read`.
NAMES = [
    (r"patch_embed\.proj\.(.+)", r"projection.\1"),
    (r"blocks\.(\d+)\.norm1\.(.+)", r"encoder.blocks.\1.attention.norm.\2"),
    (r"blocks\.(\d+)\.attn\.qkv\.(.+)", r"encoder.blocks.\1.attention.part.qkv.\2"),
    (r"blocks\.(\d+)\.attn\.proj\.(.+)", r"encoder.blocks.\1.attention.part.out.\2"),
    (r"blocks\.(\d+)\.ls1\.gamma", r"encoder.blocks.\1.attention.scale"),
    (r"blocks\.(\d+)\.norm2\.(.+)", r"encoder.blocks.\1.mlp.norm.\2"),
    (r"blocks\.(\d+)\.mlp\.(fc[12])\.(.+)", r"encoder.blocks.\1.mlp.part.\2.\3"),
    (r"blocks\.(\d+)\.ls2\.gamma", r"encoder.blocks.\1.mlp.scale"),
    (r"norm\.(.+)", r"encoder.norm.\1"),
    (r"fc_norm\.(.+)", r"pooled_norm.\1"),
    (r"attn_pool\.latent", r"pooling.query"),
    (r"attn_pool\.(q|kv)\.(.+)", r"pooling.\1.\2"),
    (r"attn_pool\.proj\.(.+)", r"pooling.out.\1"),
    (r"attn_pool\.(norm\..+|mlp\..+)", r"pooling.\1"),
    (r"head\.(.+)", r"head.\1"),
]
SEPARATE = {"cls_token", "reg_token", "pos_embed"}


def is_timm(state: dict[str, Tensor]) -> bool:
    """Whether a state dict has the keys of timm's ViTs."""
    return "patch_embed.proj.weight" in state and "blocks.0.attn.qkv.weight" in state


def read(
    state: dict[str, Tensor], image: tuple[int, int] | None = None, heads: int | None = None, gelu: str = "none"
) -> tuple[ViTConfig, dict[str, Tensor]]:
    """A timm state dict -> the config it fits and our state dict, float32.

    `image` (pixels) is the size that the positions are for; without it their grid is taken to be square. A class token's
    position is folded into the token, since only their sum matters. Raises WeightsError naming tensors that have no place.
    """
    unknown = [name for name in state if name not in SEPARATE and rename(name) is None]
    if unknown:
        raise WeightsError(f"not a plain ViT: no place for {', '.join(sorted(unknown)[:8])}", "other families of timm are not read yet")
    config = configuration(state, image, heads, gelu)
    ours = {str(rename(name)): tensor.float() for name, tensor in state.items() if name not in SEPARATE}
    ours["projection.weight"] = ours["projection.weight"].flatten(1)
    if "pooling.query" in ours:
        ours["pooling.query"] = ours["pooling.query"][0]
    prefix = torch.cat([state[name][0].float() for name in ("cls_token", "reg_token") if name in state] or [torch.empty(0, config.width)])
    positions = state["pos_embed"][0].float()
    slots = len(positions) - math.prod(config.grid)
    if slots:
        prefix = prefix + torch.cat([positions[:slots], torch.zeros(len(prefix) - slots, config.width)])
    if len(prefix):
        ours["prefix"] = prefix
    ours["position.table"] = positions[slots:].reshape(*config.grid, config.width)
    return config, ours


def rename(name: str) -> str | None:
    """timm's name of a tensor -> ours, or None."""
    for pattern, ours in NAMES:
        match = re.fullmatch(pattern, name)
        if match:
            return match.expand(ours)
    return None


def configuration(state: dict[str, Tensor], image: tuple[int, int] | None, heads: int | None, gelu: str) -> ViTConfig:
    """The config that a timm state dict fits, read off its shapes."""
    width, channels, *patch = state["patch_embed.proj.weight"].shape
    prefix = sum(state[name].shape[1] for name in ("cls_token", "reg_token") if name in state)
    tokens = state["pos_embed"].shape[1]
    grid = tuple(i // p for i, p in zip(image, patch, strict=True)) if image else square(tokens, prefix)
    if tokens - math.prod(grid) not in range(prefix + 1):
        raise WeightsError(f"{tokens} positions fit no grid of {grid} with {prefix} prefix tokens", "name the image size they are for")
    depth = 1 + max(int(name.split(".")[1]) for name in state if name.startswith("blocks."))
    hidden = len(state["blocks.0.mlp.fc1.weight"])
    known = {(row[0], row[1], row[3]): row[2] for row in SIZES.values()}
    pooled = "fc_norm.weight" in state
    pool = "attention" if "attn_pool.latent" in state else "mean" if pooled or "cls_token" not in state else "class"
    scale = state.get("blocks.0.ls1.gamma")
    return ViTConfig(
        image=tuple(g * p for g, p in zip(grid, patch, strict=True)),
        patch=tuple(patch),
        channels=channels,
        classes=len(state["head.weight"]) if "head.weight" in state else 0,
        width=width,
        depth=depth,
        heads=heads or known.get((width, depth, hidden)) or max(1, width // 64),
        hidden=hidden,
        class_token="cls_token" in state,
        class_position=False,
        registers=state["reg_token"].shape[1] if "reg_token" in state else 0,
        pool=pool,
        norm="tokens" if "norm.weight" in state else "pooled",
        layer_scale=None if scale is None else float(scale.flatten()[0]),
        qkv_bias="blocks.0.attn.qkv.bias" in state,
        gelu="tanh" if gelu == "tanh" else "none",
    )


def square(tokens: int, prefix: int) -> tuple[int, int]:
    """The square grid that is left when up to `prefix` of the positions belong to prefix tokens."""
    for slots in range(prefix, -1, -1):
        side = math.isqrt(tokens - slots)
        if side * side == tokens - slots:
            return side, side
    raise WeightsError(f"{tokens} positions form no square grid", "name the image size they are for")
