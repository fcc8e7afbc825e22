"""Attention in windows of a grid whose size is only known when a graph runs: `--dynamic-size` for Swin and for ViTs
with local attention.

Shapes: B batch, D width, h heads, T tokens per window. A grid has (rows, columns), which may be symbolic.
"""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitreous.nn.attention import ALL_QUERIES, Attention, dot_product_attention, split_heads
from vitreous.nn.layout import WindowedAttention
from vitreous.nn.local import LocalAttention
from vitreous.nn.position import TokenPositions


def size_to_tensor(size: int) -> Tensor:
    """Convert a size, which may be symbolic, to a scalar float64 tensor ()."""
    return torch.ones(size, dtype=torch.float64).sum()


@dataclass
class WindowAxis:
    """An axis of a grid of `length` positions, shifted and padded to `padded_length` for windows.

    `source_indices` (padded_length,) int64: the index on the axis that each position is taken from, beyond `length` for
    padding. `is_token` (padded_length,) bool: false for padding. `behind` (padded_length,) bool: tokens that the cyclic
    shift moved to the end. `restore_indices` (length,) int64: the position of each index of the axis, to undo shift and
    padding.
    """

    padded_length: int
    source_indices: Tensor
    is_token: Tensor
    behind: Tensor
    _: KW_ONLY
    restore_indices: Tensor


def lay_out_axis(length: int, window: int, shift: int, pad: str) -> WindowAxis:
    """Shift and pad an axis as `nn.layout.WindowedAttention` does, for a length that may be symbolic."""
    padded_length = (length + window - 1) // window * window
    positions, indices = torch.arange(padded_length), torch.arange(length)
    end, padded_end = size_to_int_tensor(length), size_to_int_tensor(padded_length)
    if pad == "zeros-after-shift":  # the grid is shifted before the padding, the mask's seams after it
        source = torch.where(positions < end, wrap_indices(positions + shift, end), positions)
        behind = wrap_indices(positions + shift, padded_end) < shift
        return WindowAxis(
            padded_length, source, positions < end, behind, restore_indices=wrap_indices(indices + end - shift, end)
        )
    axis_shift = (end > window) * shift  # an axis of one window is not shifted
    source = wrap_indices(positions + axis_shift, padded_end)
    return WindowAxis(
        padded_length,
        source,
        source < end,
        source < axis_shift,
        restore_indices=wrap_indices(indices + padded_end - axis_shift, padded_end),
    )


def size_to_int_tensor(size: int) -> Tensor:
    """Convert a size, which may be symbolic, to a scalar int64 tensor ()."""
    return torch.ones(size, dtype=torch.int64).sum()


def wrap_indices(indices: Tensor, end: Tensor) -> Tensor:
    """Wrap (n,) int64 indices below 2 * `end`, a scalar int64 (), into 0 to `end`. Exporters do not support a symbolic
    remainder."""
    return torch.where(indices < end, indices, indices - end)


class DynamicWindows(nn.Module):
    """`nn.layout.WindowedAttention` for grids of any size."""

    def __init__(self, windows: WindowedAttention) -> None:
        super().__init__()
        self.part, self.size, self.shift, self.pad = windows.part, windows.size, windows.shift, windows.pad

    def forward(self, x: Tensor) -> Tensor:
        """Attend within windows: (B, rows, columns, D) -> (B, rows, columns, D)."""
        row_axis, column_axis = (
            lay_out_axis(x.shape[1 + axis], self.size[axis], self.shift[axis], self.pad) for axis in (0, 1)
        )
        context = (
            () if not any(self.shift) and self.pad != "mask" else (self.make_attention_mask(row_axis, column_axis),)
        )
        y: Any = self.part(partition_windows(x, row_axis, column_axis, self.size), *context)  # (B, count, count, T, D)
        return reverse_windows(y, row_axis, column_axis, self.size)

    def make_attention_mask(self, row_axis: WindowAxis, column_axis: WindowAxis) -> Tensor:
        """Return which tokens of a window may attend to each other: (count, count, 1, T, T) bool."""
        m, n = self.size
        region = 1 + 2 * row_axis.behind.long()[:, None] + 4 * column_axis.behind.long()
        if self.pad == "mask":  # padding attends only to padding
            region = region * (row_axis.is_token[:, None] & column_axis.is_token)
        region = (
            region.reshape(row_axis.padded_length // m, m, column_axis.padded_length // n, n).transpose(1, 2).flatten(2)
        )
        return (region[..., :, None] == region[..., None, :])[:, :, None]


class DynamicLocalAttention(nn.Module):
    """`nn.local.LocalAttention` for grids of any size. Windows that the grid does not fill are padded with zero keys,
    which are masked."""

    def __init__(self, attention: LocalAttention) -> None:
        super().__init__()
        self.attention = attention

    def forward(self, x: Tensor, positions: TokenPositions, queries: slice = ALL_QUERIES) -> Tensor:
        """Attend within windows and to the P prefix tokens: (B, P + N, D) -> (B, Q, D). `queries` selects some of the
        prefix tokens, or all tokens."""
        if queries != ALL_QUERIES or not self.attention.window:
            return self.attention.out(Attention.forward_before_output(self.attention, x, None, queries))
        qkv, prefix, h = self.attention.qkv(x), positions.prefix, self.attention.heads
        q, k, v = split_heads(qkv[..., :prefix, :], h)
        size = (self.attention.window,) * 2
        row_axis, column_axis = (lay_out_axis(length, self.attention.window, 0, "mask") for length in positions.grid)
        grid = qkv[..., prefix:, :].unflatten(-2, positions.grid)
        window_qkv = [
            tensor.flatten(1, 2) for tensor in split_heads(partition_windows(grid, row_axis, column_axis, size), h)
        ]  # 3 x (B, n, h, T, d)
        is_token = (row_axis.is_token[:, None] & column_axis.is_token).reshape(
            -1, size[0], column_axis.padded_length // size[1], size[1]
        )
        is_visible = F.pad(is_token.transpose(1, 2).flatten(2).flatten(0, 1), (prefix, 0), value=True)  # (n, P + T)
        keys, values = (
            torch.cat([prefix_tensor[:, None].expand(-1, window_tensor.shape[1], -1, -1, -1), window_tensor], -2)
            for prefix_tensor, window_tensor in ((k, window_qkv[1]), (v, window_qkv[2]))
        )
        # windows of an image are heads, so that all images share the mask
        mask = is_visible[:, None, None].expand(-1, h, -1, -1).flatten(0, 1)[None]
        y = dot_product_attention(
            window_qkv[0].flatten(1, 2), keys.flatten(1, 2), values.flatten(1, 2), mask
        ).unflatten(1, (-1, h))
        y = (
            y.transpose(-3, -2)
            .flatten(-2)
            .unflatten(1, (row_axis.padded_length // size[0], column_axis.padded_length // size[1]))
        )
        patches = reverse_windows(y, row_axis, column_axis, size).flatten(1, 2)
        if not prefix:
            return self.attention.out(patches)
        _, k, v = split_heads(qkv, h)
        return self.attention.out(
            torch.cat([dot_product_attention(q, k, v).transpose(-3, -2).flatten(-2), patches], -2)
        )


def partition_windows(x: Tensor, row_axis: WindowAxis, column_axis: WindowAxis, window_size: tuple[int, ...]) -> Tensor:
    """Shift, pad and partition a grid into windows: (B, rows, columns, D) -> (B, count, count, T, D)."""
    x = shift_and_pad(shift_and_pad(x, row_axis, 1), column_axis, 2)
    m, n = window_size
    return (
        x.reshape(x.shape[0], row_axis.padded_length // m, m, column_axis.padded_length // n, n, x.shape[-1])
        .transpose(2, 3)
        .flatten(3, 4)
    )


def reverse_windows(y: Tensor, row_axis: WindowAxis, column_axis: WindowAxis, window_size: tuple[int, ...]) -> Tensor:
    """Undo `partition_windows`: (B, count, count, T, D) -> (B, rows, columns, D)."""
    y = (
        y.unflatten(3, window_size)
        .transpose(2, 3)
        .reshape(y.shape[0], row_axis.padded_length, column_axis.padded_length, y.shape[-1])
    )
    return y.index_select(1, row_axis.restore_indices).index_select(2, column_axis.restore_indices)


def shift_and_pad(x: Tensor, window_axis: WindowAxis, axis: int) -> Tensor:
    """Shift and pad the axis `axis` of (B, ..., D) to `window_axis.padded_length` positions; padding is zero."""
    padded = F.pad(x, [0, 0] * (x.dim() - 1 - axis) + [0, window_axis.padded_length - x.shape[axis]])
    return padded.index_select(axis, window_axis.source_indices)
