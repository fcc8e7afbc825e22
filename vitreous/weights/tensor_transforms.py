"""The folds that formats need: how a tensor of theirs lies in memory, against how it lies here.

D width, h heads, d = D / h, C channels, p and q a patch's sides in pixels, S slots of positions, N patches.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from vitreous.models.config import ViTConfig
from vitreous.weights.table import TensorTransform


def apart(tensors: list[Tensor], config: Any) -> list[Tensor]:
    """A fused tensor as its thirds along the first axis."""
    return list(tensors[0].chunk(3))


def fused(tensors: list[Tensor], config: Any) -> list[Tensor]:
    """Tensors joined along the first axis."""
    return [torch.cat(tensors)]


def map_each(function: Any) -> Any:
    """A function of one tensor, for all of a list."""
    return lambda tensors, config: [function(tensor) for tensor in tensors]


def cell(config: ViTConfig) -> tuple[int, ...]:
    """What a patch is cut out of the image or of the stem's map."""
    return tuple(p // config.stem.reduction for p in config.patch) if config.stem else config.patch


def kernel(weight: Tensor, config: ViTConfig) -> Tensor:
    """(D, C p q) -> (D, C, p, q)."""
    sides = cell(config)
    return weight.reshape(len(weight), -1, *sides)


#: (D, C, p, q), PyTorch's convolution, and (D, C p q)
CONVOLUTION = TensorTransform(map_each(lambda w: w.flatten(1)), lambda ours, c: [kernel(ours[0], c)])
#: (p, q, C, D), flax's convolution, and (D, C p q)
FLAX_PATCH = TensorTransform(
    map_each(lambda w: w.permute(3, 2, 0, 1).flatten(1)), lambda ours, c: [kernel(ours[0], c).permute(2, 3, 1, 0)]
)
#: (k, k, I, O), flax's and TensorFlow's convolution, and (O, I, k, k)
FLAX_CONVOLUTION = TensorTransform(map_each(lambda w: w.permute(3, 2, 0, 1)), map_each(lambda w: w.permute(2, 3, 1, 0)))
#: (in, out), flax's dense layer, and (out, in)
TRANSPOSED = TensorTransform(map_each(lambda w: w.T), map_each(lambda w: w.T))
#: a 1 x 1 convolution (O, I, 1, 1) and a linear layer (O, I)
POINTWISE = TensorTransform(map_each(lambda w: w.flatten(1)), map_each(lambda w: w[:, :, None, None]))
#: the same in flax's order, (1, 1, I, O)
FLAX_POINTWISE = TensorTransform(map_each(lambda w: w[0, 0].T), map_each(lambda w: w.T[None, None]))
#: (1, 1, 1, C) or (C,), and (C,)
FLAT = TensorTransform(map_each(lambda w: w.flatten()), map_each(lambda w: w))
#: queries, keys and values by themselves, and fused
SEPARATE = TensorTransform(fused, apart)
#: (1, 1, D) and (1, D): a lone token
TOKEN = TensorTransform(map_each(lambda t: t[0]), map_each(lambda t: t[None]))


def _heads_into(theirs: list[Tensor], config: Any) -> list[Tensor]:
    return [torch.cat([w.flatten(1).T for w in theirs])]


def _heads_out(ours: list[Tensor], config: ViTConfig) -> list[Tensor]:
    parts = ours[0].chunk(len(ours[0]) // config.width)
    return [part.T.reshape(config.width, config.heads, -1) for part in parts]


#: (D, h, d) of flax's attention, each of queries, keys and values, and (3 D, D)
FLAX_HEADS = TensorTransform(_heads_into, _heads_out)
#: their biases (h, d), and (3 D,)
FLAX_HEAD_BIASES = TensorTransform(
    lambda theirs, c: [torch.cat([b.flatten() for b in theirs])],
    lambda ours, c: [part.reshape(c.heads, -1) for part in ours[0].chunk(len(ours[0]) // c.width)],
)
#: (h, d, D) of flax's attention output, and (D, D)
FLAX_OUT = TensorTransform(
    lambda theirs, c: [theirs[0].flatten(0, 1).T], lambda ours, c: [ours[0].T.reshape(c.heads, -1, c.width)]
)


def _prefix_out(ours: list[Tensor], config: ViTConfig) -> list[Tensor]:
    singles = config.prefix - config.registers
    return [
        *(token.reshape(1, 1, -1) for token in ours[0][:singles]),
        *([ours[0][singles:][None]] if config.registers else []),
    ]


#: (1, 1, D) of the class and the distillation token and (1, R, D) of the registers, and (P, D)
PREFIX = TensorTransform(lambda theirs, c: [torch.cat([t.reshape(-1, c.width) for t in theirs])], _prefix_out)
#: (D,) of the class token, and (1, D)
BARE_TOKEN = TensorTransform(map_each(lambda t: t[None]), map_each(lambda t: t[0]))


def positions(lead: tuple[int, ...] | None) -> TensorTransform:
    """Their positions of prefix and patches in one, (*lead, S + N, D) or, where `lead` is None, (1, *grid, D): slots
    and table."""

    def into(theirs: list[Tensor], config: ViTConfig) -> list[Tensor]:
        rows, count = theirs[0].reshape(-1, config.width), config.positioned
        grid = rows[count:].reshape(*config.grid, config.width)
        return [rows[:count], grid] if count else [grid]

    def out(ours: list[Tensor], config: ViTConfig) -> list[Tensor]:
        rows = torch.cat([part.reshape(-1, config.width) for part in ours])
        return [rows.reshape(1, *config.grid, config.width) if lead is None else rows.reshape(*lead, -1, config.width)]

    return TensorTransform(into, out)
