"""Conditioning of blocks on a time and a class by adaptive layer norms (adaLN-Zero, arXiv:2212.09748).

B batch, N tokens, T time slots, S tokens of a slot, D width. A condition is (B, D).
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitreous.nn.attention import ALL_QUERIES


class AdaLNBlock(nn.Module):
    """A pre-norm block whose norms have no parameters: the condition predicts shift, scale and gate of both branches.

    Section 3.2 of arXiv:2212.09748, with m1 .. m6 = `modulation`(condition), one (B, D) each, in the order of its code:

        x = x + m3 * attention(norm(x) * (1 + m2) + m1)
        x = x + m6 * mlp(norm(x) * (1 + m5) + m4)

    `modulation` starts at 0, so that a fresh block is the identity.
    """

    def __init__(self, width: int, attention: nn.Module, mlp: nn.Module, eps: float = 1e-6) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width, eps=eps, elementwise_affine=False)
        self.attention, self.mlp = attention, mlp
        self.modulation = build_zero_linear(width, 6 * width)

    def forward(self, x: Tensor, condition: Tensor, queries: slice = ALL_QUERIES) -> Tensor:
        """(B, ..., N, D), (B, D) -> (B, ..., N, D): attention is over the N tokens. `queries` is ignored."""
        modulation = self.modulation(condition).unflatten(0, (-1, *[1] * (x.dim() - 2)))
        shift, scale, gate, *of_mlp = modulation.chunk(6, -1)  # (B, ..., 1, D) each
        x = x + gate * self.attention(modulate(self.norm(x), shift, scale))
        shift, scale, gate = of_mlp
        return x + gate * self.mlp(modulate(self.norm(x), shift, scale))


class AdaLNTemporalBlock(AdaLNBlock):
    """An `AdaLNBlock` whose attention is over the tokens of one position at all times.

    The loop that it replaces: for s in range(S): x[:, :, s] = block(x[:, :, s]).
    """

    def forward(self, x: Tensor, condition: Tensor, queries: slice = ALL_QUERIES) -> Tensor:
        """(B, T, S, D), (B, D) -> (B, T, S, D): attention is over the T times of each position. `queries` is
        ignored."""
        return super().forward(x.transpose(1, 2), condition).transpose(1, 2)


class AdaLNHead(nn.Module):
    """norm(x) * (1 + scale) + shift, then a linear layer to `out` channels.

    The linear layer and the modulation layer start at 0, so that a fresh model outputs 0.
    """

    def __init__(self, width: int, output_width: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width, eps=eps, elementwise_affine=False)
        self.modulation = build_zero_linear(width, 2 * width)
        self.linear = build_zero_linear(width, output_width)

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        """(B, N, D), (B, D) -> (B, N, out)."""
        shift, scale = self.modulation(condition)[:, None].chunk(2, -1)
        return self.linear(modulate(self.norm(x), shift, scale))


class TimeEmbedding(nn.Module):
    """Time embedding: `timestep_embedding` of `channels` channels and two layers with a SiLU between them."""

    def __init__(self, width: int, channels: int = 256, shift: int = 0) -> None:
        super().__init__()
        self.channels, self.shift = channels, shift
        self.fc1, self.fc2 = nn.Linear(channels, width), nn.Linear(width, width)
        for linear in (self.fc1, self.fc2):
            nn.init.normal_(linear.weight, std=0.02)
            nn.init.zeros_(linear.bias)

    def forward(self, time: Tensor) -> Tensor:
        """(B,) -> (B, D)."""
        return self.fc2(
            F.silu(self.fc1(timestep_embedding(time.float(), self.channels, self.shift).to(self.fc1.weight.dtype)))
        )


def timestep_embedding(time: Tensor, channels: int, shift: int = 0, period: float = 10000.0) -> Tensor:
    """(B,) float -> (B, channels): [cos(t w_i) | sin(t w_i)], w_i = period^(-i / (h - shift)), i = 0 .. h - 1, h =
    channels / 2 (the form of GLIDE and DiT; diffusers' shift is 1)."""
    half = channels // 2
    exponents = -math.log(period) * torch.arange(half, device=time.device, dtype=torch.float32)
    frequencies = torch.exp(exponents / (half - shift))
    angles = time[:, None] * frequencies
    return torch.cat([angles.cos(), angles.sin()], -1)


def modulate(x: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
    """(B, ..., N, D), (B, ..., 1, D) twice -> (B, ..., N, D): x (1 + scale) + shift."""
    return torch.addcmul(shift.to(x.dtype), x, 1 + scale)


def build_zero_linear(width: int, output_width: int) -> nn.Linear:
    """Build a linear layer whose weight (out, width) and bias are 0."""
    linear = nn.Linear(width, output_width)
    nn.init.zeros_(linear.weight)
    nn.init.zeros_(linear.bias)
    return linear
