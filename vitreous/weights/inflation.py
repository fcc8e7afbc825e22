"""Weights of pictures in a model with a time axis, clips or volumes (ViViT, arXiv:2103.15691, section 3.4), and weights
of attention with and without a bias of its keys.

D width, C channels, p and q a patch's sides in pixels, t frames of a patch, T time slots.
"""

from __future__ import annotations

import math
import re

import torch
from torch import Tensor

from vitreous.models.config import ModelConfig
from vitreous.nn.position import SinCosPosition

QKV_BIAS = re.compile(r"(.*\.qkv)\.(bias|query_bias)")


def inflate_positions(
    state: dict[str, Tensor], own: dict[str, Tensor], before: ModelConfig, after: ModelConfig
) -> None:
    """Give positions of pictures (h, w, D) in `state` a time axis, in place: (1, h, w, D), which is the same at all
    times where it is read at T slots; or the positions of space, where those of time are apart and start at 0.

    Fixed positions become a table where the model learns its own.
    """
    if len(getattr(before, "image", ())) != 2 or len(getattr(after, "image", ())) != 3:
        return
    learns = {"position.table", "position.space.table"} & own.keys()
    rule = before.positions.kind
    if learns and rule.startswith("sincos"):
        state["position.table"] = SinCosPosition(before.width, rule.removeprefix("sincos-")).read(before.grid)
    if "position.table" in state and "position.space.table" in own:
        state["position.space.table"] = state.pop("position.table")
    elif "position.table" in state and learns:
        state["position.table"] = state["position.table"][None]


def inflate_kernel(weight: Tensor, channels: int, patch: tuple[int, ...], frames: int, rule: str = "central") -> Tensor:
    """(D, C p q) -> (D, C t p q): the projection of a picture's patches for patches of `frames` frames.

    By the rule `central` it reads the frame number t // 2 alone, so any clip gives the tokens of these frames; by
    `average` 1 / t of each frame, so a clip that stands still gives those of its picture. Raises ValueError for another
    rule.
    """
    if rule not in ("central", "average"):
        raise ValueError(f"no rule {rule} to inflate a kernel: central or average")
    kernel = weight.unflatten(1, (channels, 1, math.prod(patch))).repeat(1, 1, frames, 1)
    share = torch.full((frames,), 1 / frames) if rule == "average" else torch.eye(frames)[frames // 2]
    return (kernel * share.to(weight)[:, None]).flatten(1)


def convert_key_bias(state: dict[str, Tensor], own: dict[str, Tensor]) -> None:
    """Bring the biases of queries, keys and values in `state`, in place, to the form that the model has: one of (3 D,),
    or those of queries and values, (D,) each. Softmax drops the bias of keys, so answers stay."""
    for match in filter(None, map(QKV_BIAS.fullmatch, list(state))):
        layer, kind = match.groups()
        if kind == "bias" and f"{layer}.query_bias" in own:
            state[f"{layer}.query_bias"], _, state[f"{layer}.value_bias"] = state.pop(f"{layer}.bias").chunk(3)
        elif kind == "query_bias" and f"{layer}.bias" in own:
            query, value = state.pop(f"{layer}.query_bias"), state.pop(f"{layer}.value_bias")
            state[f"{layer}.bias"] = torch.cat([query, torch.zeros_like(query), value])
