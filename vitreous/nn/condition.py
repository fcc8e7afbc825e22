"""Adaptive layer norms that condition blocks on a time and a class (adaLN-Zero, arXiv:2212.09748).

Shapes: B batch, N tokens, T time slots of a clip, S tokens of a slot, D width. A condition is (B, D): the embedding of
a sample's diffusion time and class.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitreous.nn.attention import ALL_QUERIES


class AdaLNBlock(nn.Module):
    """Pre-norm block whose norms have no parameters: the condition predicts shift, scale and gate of both branches.

    Section 3.2 of arXiv:2212.09748. The linear layer `modulation` maps the condition to six (B, D) tensors m1 .. m6, in
    the order of the paper's code:

        x = x + m3 * attention(norm(x) * (1 + m2) + m1)
        x = x + m6 * mlp(norm(x) * (1 + m5) + m4)

    `modulation` starts at 0, so a newly initialised block is the identity.
    """

    def __init__(self, width: int, attention: nn.Module, mlp: nn.Module, eps: float = 1e-6) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width, eps=eps, elementwise_affine=False)
        self.attention, self.mlp = attention, mlp
        self.modulation = build_zero_linear(width, 6 * width)

    def forward(self, x: Tensor, condition: Tensor, queries: slice = ALL_QUERIES) -> Tensor:
        """Apply the block with attention over the N tokens: x (B, ..., N, D), condition (B, D) -> (B, ..., N, D).
        `queries` is ignored."""
        modulation = self.modulation(condition).unflatten(0, (-1, *[1] * (x.dim() - 2)))
        shift, scale, gate, *mlp_modulation = modulation.chunk(6, -1)  # (B, ..., 1, D) each
        x = x + gate * self.attention(modulate(self.norm(x), shift, scale))
        shift, scale, gate = mlp_modulation
        return x + gate * self.mlp(modulate(self.norm(x), shift, scale))


class AdaLNTemporalBlock(AdaLNBlock):
    """`AdaLNBlock` with attention over time: each token attends to the tokens of the same spatial position in all
    slots.

    Equivalent loop: for s in range(S): x[:, :, s] = block(x[:, :, s]).
    """

    def forward(self, x: Tensor, condition: Tensor, queries: slice = ALL_QUERIES) -> Tensor:
        """Apply the block with attention over the T times of each position: x (B, T, S, D), condition (B, D) ->
        (B, T, S, D). `queries` is ignored."""
        return super().forward(x.transpose(1, 2), condition).transpose(1, 2)


class AdaLNHead(nn.Module):
    """Output layer of a conditioned model: linear(norm(x) * (1 + scale) + shift), shift and scale predicted from the
    condition.

    The linear layer and the modulation layer start at 0, so a newly initialised model outputs 0.
    """

    def __init__(self, width: int, output_width: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width, eps=eps, elementwise_affine=False)
        self.modulation = build_zero_linear(width, 2 * width)
        self.linear = build_zero_linear(width, output_width)

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        """Compute the outputs of all tokens: x (B, N, D), condition (B, D) -> (B, N, output_width)."""
        shift, scale = self.modulation(condition)[:, None].chunk(2, -1)
        return self.linear(modulate(self.norm(x), shift, scale))


class TimeEmbedding(nn.Module):
    """Embedding of a diffusion time: `timestep_embedding` of `channels` channels, then two linear layers with a SiLU
    between them.

    `shift` is that of `timestep_embedding`.
    """

    def __init__(self, width: int, channels: int = 256, shift: int = 0) -> None:
        super().__init__()
        self.channels, self.shift = channels, shift
        self.fc1, self.fc2 = nn.Linear(channels, width), nn.Linear(width, width)
        for linear in (self.fc1, self.fc2):
            nn.init.normal_(linear.weight, std=0.02)
            nn.init.zeros_(linear.bias)

    def forward(self, time: Tensor) -> Tensor:
        """Embed times: (B,) -> (B, D)."""
        return self.fc2(
            F.silu(self.fc1(timestep_embedding(time.float(), self.channels, self.shift).to(self.fc1.weight.dtype)))
        )


def timestep_embedding(time: Tensor, channels: int, shift: int = 0, period: float = 10000.0) -> Tensor:
    """Compute sinusoidal features of times (GLIDE, DiT): (B,) float -> (B, channels).

    [cos(t w_i) | sin(t w_i)], w_i = period^(-i / (h - shift)), i = 0 .. h - 1, h = channels / 2. `shift` is 0 in GLIDE
    and DiT, 1 in diffusers.
    """
    half = channels // 2
    exponents = -math.log(period) * torch.arange(half, device=time.device, dtype=torch.float32)
    frequencies = torch.exp(exponents / (half - shift))
    angles = time[:, None] * frequencies
    return torch.cat([angles.cos(), angles.sin()], -1)


def modulate(x: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
    """Compute x (1 + scale) + shift: x (B, ..., N, D), shift and scale (B, ..., 1, D) -> (B, ..., N, D)."""
    return torch.addcmul(shift.to(x.dtype), x, 1 + scale)


def build_zero_linear(width: int, output_width: int) -> nn.Linear:
    """Build a linear layer whose weight (output_width, width) and bias are 0."""
    linear = nn.Linear(width, output_width)
    nn.init.zeros_(linear.weight)
    nn.init.zeros_(linear.bias)
    return linear
