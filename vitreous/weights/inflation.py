"""Convert image weights for a model with a time axis, clips or volumes (ViViT, arXiv:2103.15691, section 3.4), and
attention weights between forms with and without a key bias.

D width, C channels, p and q a patch's height and width in pixels, t frames of a patch.
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
    state: dict[str, Tensor], model_state: dict[str, Tensor], source_config: ModelConfig, model_config: ModelConfig
) -> None:
    """Add a time axis to image positions (h, w, D) in `state`, in place: (1, h, w, D), the same for every time step. If
    the model has separate temporal positions, which start at 0, the image positions become its spatial ones. Fixed
    positions become a table if the model learns its positions."""
    if len(getattr(source_config, "image", ())) != 2 or len(getattr(model_config, "image", ())) != 3:
        return
    table_names = {"position.table", "position.space.table"} & model_state.keys()
    kind = source_config.positions.kind
    if table_names and kind.startswith("sincos"):
        state["position.table"] = SinCosPosition(source_config.width, kind.removeprefix("sincos-")).read(
            source_config.grid
        )
    if "position.table" in state and "position.space.table" in model_state:
        state["position.space.table"] = state.pop("position.table")
    elif "position.table" in state and table_names:
        state["position.table"] = state["position.table"][None]


def inflate_kernel(weight: Tensor, channels: int, patch: tuple[int, ...], frames: int, rule: str = "central") -> Tensor:
    """Inflate an image patch projection (D, C p q) to patches of `frames` frames, (D, C t p q). The rule `central` uses
    only frame t // 2, so a clip yields the tokens of these frames. The rule `average` weights every frame by 1 / t, so
    a static clip yields the tokens of its image. Raises ValueError for another rule."""
    if rule not in ("central", "average"):
        raise ValueError(f"unknown kernel inflation rule {rule}: use central or average")
    kernel = weight.unflatten(1, (channels, 1, math.prod(patch))).repeat(1, 1, frames, 1)
    frame_weights = torch.full((frames,), 1 / frames) if rule == "average" else torch.eye(frames)[frames // 2]
    return (kernel * frame_weights.to(weight)[:, None]).flatten(1)


def convert_key_bias(state: dict[str, Tensor], model_state: dict[str, Tensor], rotary: bool) -> None:
    """Convert the attention biases in `state`, in place, to the model's form: one tensor (3 D,) for queries, keys and
    values, or one (D,) each for queries and values.

    Softmax cancels the key bias, so outputs are unchanged, except with rotary positions: they rotate the key bias, so a
    tensor is left unchanged if that bias is not zero.
    """
    for match in filter(None, map(QKV_BIAS.fullmatch, list(state))):
        layer, bias_name = match.groups()
        if bias_name == "bias" and f"{layer}.query_bias" in model_state:
            if rotary and state[f"{layer}.bias"].chunk(3)[1].any():
                continue
            state[f"{layer}.query_bias"], _, state[f"{layer}.value_bias"] = state.pop(f"{layer}.bias").chunk(3)
        elif bias_name == "query_bias" and f"{layer}.bias" in model_state:
            query, value = state.pop(f"{layer}.query_bias"), state.pop(f"{layer}.value_bias")
            state[f"{layer}.bias"] = torch.cat([query, torch.zeros_like(query), value])
