"""Attention with rotary positions: queries and keys are rotated by the coordinates of their tokens (arXiv:2104.09864).

Shapes: B batch, P prefix tokens, N patch tokens, Q queries, D width, h heads, d = D / h channels per head.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.compiler import is_compiling

from vitreous.nn import kernels
from vitreous.nn.attention import (
    ALL_QUERIES,
    Attention,
    Parameters,
    QKNormAttention,
    attention_probabilities,
    dot_product_attention,
    project_attended_tokens,
    project_heads,
    split_parameters,
)
from vitreous.nn.position import TokenPositions
from vitreous.system.machine import get_device_table
from vitreous.system.torch_types import FunctionContext, once_differentiable


class RotaryForm(NamedTuple):
    """How the coordinates of a grid become rotation angles; each axis rotates an equal share of the channel pairs.

    Pair i of an axis with n pairs rotates by `coordinate` / `base`^(i / n). The coordinate of position x on an axis
    with L positions is by `coordinates`:

    - `index`: x + `offset` (Perception Encoder has the offset 1, arXiv:2504.13181)
    - `reference`: x `reference` / L, so that every grid has the extent of one with `reference` positions (EVA-02,
      arXiv:2303.11331)
    - `centred`: 2 pi ((2 x + 1) / L - 1), from -2 pi to 2 pi (DINOv3, arXiv:2508.10104)

    Prefix tokens are not rotated, except with `register_base`: the last of them are then registers on a square grid,
    rotated by their index with this base (ViT-5, arXiv:2602.08071). `rounded` rounds the periods base^(i / n) to
    bfloat16, as in the published files of DINOv3.
    """

    base: float = 10000.0
    coordinates: Literal["index", "reference", "centred"] = "index"
    reference: int = 16
    offset: int = 0
    rounded: bool = False
    register_base: float = 0.0
    registers: int = 0  # prefix tokens that are rotated with `register_base`


class RotaryAttention(Attention):
    """Attention with rotary positions over any number of `axes`.

    Channel i of a head is paired with channel i + d / 2. Logits depend only on the offset between two patches along
    each axis. Pairs that the axes cannot share equally are not rotated. Grids need no resizing. Raises ValueError if a
    head has an odd number of channels, or less than one pair per axis.
    """

    def __init__(
        self, width: int, heads: int, axes: int = 2, bias: bool = True, *, form: RotaryForm | None = None
    ) -> None:
        super().__init__(width, heads, bias)
        check_rotary_width(width // heads, axes)
        self.form = form or RotaryForm()

    def forward_before_output(self, x: Tensor, positions: TokenPositions, queries: slice = ALL_QUERIES) -> Tensor:
        """Compute the concatenated outputs of the heads: (B, P + N, D) -> (B, Q, D)."""
        if queries != ALL_QUERIES and (parameters := self.get_qkv_parameters()) is not None:
            return self.attend_with_few_queries(x, positions, queries, parameters)
        q, k, v = self.project_rotated_qkv(x, positions, queries, rotate_fastest)
        return dot_product_attention(q, k, v).transpose(-3, -2).flatten(-2)

    def attend_with_few_queries(
        self, x: Tensor, positions: TokenPositions, queries: slice, parameters: Parameters
    ) -> Tensor:
        """Compute `forward_before_output` without values: (B, P + N, D) -> (B, Q, D). `parameters` are those of the
        query-key-value layer."""
        # frozen weights may have a lower precision than the norm before them
        x = x.to(min(x.dtype, parameters[0].dtype, key=lambda dtype: dtype.itemsize))
        q_parameters, k_parameters, v_parameters = split_parameters(*parameters, 3, x.dtype)
        q, k = project_heads(x[..., queries, :], q_parameters, self.heads), project_heads(x, k_parameters, self.heads)
        cos, sin = self.select_factors(positions, q)
        q = rotate_fastest(q, cos[..., queries, :], sin[..., queries, :])
        return project_attended_tokens(attention_probabilities(q, rotate_fastest(k, cos, sin)), x, v_parameters)

    def compute_weights(self, x: Tensor, positions: TokenPositions, queries: slice = ALL_QUERIES) -> Tensor:
        """Compute attention probabilities: (B, P + N, D) -> (B, h, Q, P + N), for the `queries` or all tokens. Rows are
        queries and sum to one."""
        q, k, _ = self.project_rotated_qkv(x, positions, queries)
        return attention_probabilities(q, k)

    def project_rotated_qkv(
        self,
        x: Tensor,
        positions: TokenPositions,
        queries: slice = ALL_QUERIES,
        rotate: Callable[[Tensor, Tensor, Tensor], Tensor] | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Project tokens to rotated queries, rotated keys and values: (B, P + N, D) -> (B, h, Q, d), and twice
        (B, h, P + N, d). `rotate` replaces `apply_rotary_embedding`."""
        q, k, v = self.project_qkv(x)
        cos, sin = self.select_factors(positions, q)
        rotate = rotate or apply_rotary_embedding
        return rotate(q[..., queries, :], cos[..., queries, :], sin[..., queries, :]), rotate(k, cos, sin), v

    def select_factors(self, positions: TokenPositions, q: Tensor) -> tuple[Tensor, Tensor]:
        """Return cosines and sines of the tokens' angles: (P + N, d / 2) float32 on the device of q (..., d), or
        (B, 1, P + K, d / 2) if `positions` selects K patches."""
        arguments = positions.grid, positions.prefix, q.shape[-1], self.form
        if positions.scale is None:
            cos, sin = get_device_table(build_rotation_table, q.device, *arguments)
        else:
            angles = get_device_table(build_angle_table, q.device, *arguments) * positions.scale
            cos, sin = angles.cos(), angles.sin()
        if positions.index is None:
            return cos, sin
        front = torch.arange(positions.prefix, device=q.device).expand(len(positions.index), -1)
        rows = torch.cat([front, positions.index + positions.prefix], 1)[:, None]
        return cos[rows], sin[rows]

    def angles(self, grid: tuple[int, ...], channels: int) -> Tensor:
        """Compute the rotation angle, in radians, of each pair of a head's d `channels`: (*grid, d / 2)."""
        return compute_rotary_angles(grid, channels, self.form)


class InnerNormRotaryAttention(RotaryAttention):
    """Attention with rotary positions whose concatenated heads are normalised before the output layer (EVA-02-CLIP,
    arXiv:2303.15389)."""

    def __init__(
        self,
        width: int,
        heads: int,
        axes: int = 2,
        bias: bool = True,
        *,
        form: RotaryForm | None = None,
        eps: float = 1e-6,
    ) -> None:
        super().__init__(width, heads, axes, bias, form=form)
        self.inner_norm = nn.LayerNorm(width, eps=eps)

    def forward_before_output(self, x: Tensor, positions: TokenPositions, queries: slice = ALL_QUERIES) -> Tensor:
        """Compute the normalised outputs of the heads: (B, P + N, D) -> (B, Q, D)."""
        return self.inner_norm(super().forward_before_output(x, positions, queries))


class QKNormRotaryAttention(QKNormAttention, RotaryAttention):
    """Attention that normalises queries and keys over the channels of a head, then rotates them (ViT-5,
    arXiv:2602.08071)."""

    def __init__(
        self, width: int, heads: int, axes: int = 2, bias: bool = True, *, form: RotaryForm | None = None
    ) -> None:
        super().__init__(width, heads, bias)
        self.form = form or RotaryForm()
        check_rotary_width(width // heads, axes)


def check_rotary_width(channels: int, axes: int) -> None:
    """Raise ValueError unless the channels of a head can be rotated over this number of axes."""
    if channels % 2 or channels < 2 * axes:
        raise ValueError(
            f"rotary positions require an even number of channels per head, at least {2 * axes} for {axes} axes, "
            f"got {channels}"
        )


def compute_rotary_angles(grid: tuple[int, ...], channels: int, form: RotaryForm) -> Tensor:
    """Compute the rotation angle, in radians, of each channel pair at each position: (*grid, channels / 2) float32. The
    pairs of the first axis come first; remaining pairs have the angle 0."""
    pairs = channels // 2 // len(grid)
    periods = form.base ** (torch.arange(pairs, dtype=torch.float32) / pairs)
    if form.rounded:
        periods = periods.bfloat16().float()
    axis_angles: list[Tensor] = []
    for axis, length in enumerate(grid):
        index = torch.arange(length, dtype=torch.float32)
        coordinates = {
            "index": index + form.offset,
            "reference": index / length * form.reference,
            "centred": 2 * math.pi * (2 * ((index + 0.5) / length) - 1),
        }[form.coordinates]
        line_angles = coordinates[:, None] / periods
        axis_angles.append(
            line_angles.view(*[-1 if a == axis else 1 for a in range(len(grid))], pairs).expand(*grid, pairs)
        )
    return F.pad(torch.cat(axis_angles, -1), (0, channels // 2 - len(grid) * pairs))


def build_angle_table(grid: tuple[int, ...], prefix: int, channels: int, form: RotaryForm) -> Tensor:
    """Build the table of all tokens' angles, in radians: (P + N, channels / 2) float32."""
    patches = compute_rotary_angles(grid, channels, form).flatten(0, -2)
    front = patches.new_zeros(prefix, channels // 2)
    if form.registers:
        side = math.isqrt(form.registers)
        register_form = RotaryForm(base=form.register_base)
        front[prefix - form.registers :] = compute_rotary_angles((side, side), channels, register_form).flatten(0, 1)
    return torch.cat([front, patches])


def build_rotation_table(grid: tuple[int, ...], prefix: int, channels: int, form: RotaryForm) -> Tensor:
    """Build the table of cosines and sines of all tokens' angles: (2, P + N, channels / 2) float32."""
    angles = build_angle_table(grid, prefix, channels, form)
    return torch.stack([angles.cos(), angles.sin()])


def apply_rotary_embedding(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate each pair (a, b) of channels i and i + d / 2 to (a cos - b sin, b cos + a sin): x (B, h, N, d), and
    (..., N, d / 2) float32 twice -> (B, h, N, d) in the dtype of x."""
    a, b = x.chunk(2, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1).to(x.dtype)


def rotate_fastest(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Compute `apply_rotary_embedding` of x (B, h, N, d) by the fastest implementation, which may overwrite x if it
    requires no gradient."""
    if is_compiling():
        return apply_rotary_embedding(x, cos, sin)
    if torch.is_grad_enabled() and x.requires_grad:
        return PairRotation.apply(x, cos, sin)
    return rotate_pairs_(x, cos, sin)


class PairRotation(torch.autograd.Function):
    """`apply_rotary_embedding` whose backward pass rotates the gradient by the opposite angles; it stores the factors
    only, and takes less time than the operations that autograd records."""

    @staticmethod
    def forward(ctx: FunctionContext, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Rotate the pairs of x (B, h, N, d), and save the factors (..., N, d / 2) for the backward pass."""
        ctx.save_for_backward(cos, sin)
        return rotate_pairs_(x.clone() if x.dtype == torch.float32 else x, cos, sin)

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionContext, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """Rotate the gradient (B, h, N, d) of the outputs back."""
        (grad,), (cos, sin) = gradients, ctx.saved_tensors
        grad = grad.clone() if grad.dtype == torch.float32 else grad
        return rotate_pairs_(grad, cos, sin, is_backward=True), None, None


def rotate_pairs_(x: Tensor, cos: Tensor, sin: Tensor, *, is_backward: bool = False) -> Tensor:
    """Return `apply_rotary_embedding` without gradients, computed in place if x (B, h, N, d) is float32, which avoids
    new tensors. With `is_backward`, rotate by the opposite angles."""
    if kernels.can_rotate(x):
        return kernels.rotate_bf16(x, cos, sin, is_backward=is_backward)
    sin = -sin if is_backward else sin
    values = x.float()
    a, b = values.chunk(2, -1)
    shifted = a * sin
    a.mul_(cos).addcmul_(b, sin, value=-1)
    b.mul_(cos).add_(shifted)
    return values.to(x.dtype)
