"""Windowed attention for models with prefix tokens (such as a class token), compatible with the weights of a ViT
trained without windows (ViTDet, arXiv:2203.16527, section 3; global tokens as in Longformer, arXiv:2004.05150).

Shapes: B batch, D width, h heads, d = D / h, P prefix tokens, N patch tokens, Q queries, T tokens of a window.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from vitreous.nn.attention import ALL_QUERIES, Attention, attention_probabilities, dot_product_attention, split_heads
from vitreous.nn.grid import window_partition, window_reverse
from vitreous.nn.position import TokenPositions


class LocalAttention(Attention):
    """Attention in which patches attend to their window and to the prefix tokens, and prefix tokens attend to all
    tokens.

    `window` is the length of a window along each axis of the grid, in tokens; 0 disables windows. Windows begin at the
    first row and column. If they do not divide the grid, the windows at its ends are smaller, so nothing is padded or
    masked. Patch tokens i and j attend to each other if all(i // window == j // window), axis by axis.
    """

    def __init__(self, width: int, heads: int, window: int, bias: bool = True) -> None:
        super().__init__(width, heads, bias)
        self.window = window

    def forward_before_output(self, x: Tensor, positions: TokenPositions, queries: slice = ALL_QUERIES) -> Tensor:
        """Compute the concatenated outputs of the heads: (B, P + N, D) -> (B, Q, D).

        Raises ValueError if patches were dropped, or if `queries` are neither prefix tokens nor all tokens.
        """
        if self.sees_whole_grid(positions) or (queries.stop is not None and queries.stop <= positions.prefix):
            return super().forward_before_output(x, None, queries)
        if queries != ALL_QUERIES or positions.index is not None:
            raise ValueError("windowed attention requires all patches of the grid")
        qkv, prefix = self.qkv(x), positions.prefix
        q, k, v = split_heads(qkv, self.heads)
        prefix_kv = k[..., :prefix, :], v[..., :prefix, :]
        patches = self.attend_within_windows(qkv[..., prefix:, :].unflatten(-2, positions.grid), *prefix_kv).flatten(
            1, -2
        )
        if not prefix:
            return patches
        return torch.cat([dot_product_attention(q[..., :prefix, :], k, v).transpose(-3, -2).flatten(-2), patches], -2)

    def attend_within_windows(self, qkv_grid: Tensor, prefix_keys: Tensor, prefix_values: Tensor) -> Tensor:
        """Attend from patches to their window and the prefix tokens: `qkv_grid` (B, *grid, 3 D), the queries, keys and
        values of patches, `prefix_keys` and `prefix_values` (B, h, P, d) of the prefix tokens -> (B, *grid, D)."""
        grid_size = tuple(qkv_grid.shape[1:-1])
        for axis, length in enumerate(grid_size, 1):
            remainder = length % self.window
            if remainder and length > self.window:
                subgrids = qkv_grid.split_with_sizes([length - remainder, remainder], axis)
                return torch.cat(
                    [self.attend_within_windows(subgrid, prefix_keys, prefix_values) for subgrid in subgrids], axis
                )
        size = tuple(min(length, self.window) for length in grid_size)
        windows = window_partition(qkv_grid, size)  # (B, *count, *size, 3 D)
        count = tuple(windows.shape[1 : 1 + len(size)])
        q, k, v = split_heads(windows.flatten(-1 - len(size), -2).flatten(1, len(size)), self.heads)  # (B, n, h, T, d)
        if prefix_keys.shape[-2]:
            k, v = (
                torch.cat([prefix_tensor[:, None].expand(-1, math.prod(count), -1, -1, -1), window_tensor], -2)
                for prefix_tensor, window_tensor in ((prefix_keys, k), (prefix_values, v))
            )
        outputs = dot_product_attention(q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1)).transpose(-3, -2).flatten(-2)
        return window_reverse(outputs.view(len(qkv_grid), *count, *size, -1), grid_size)

    def compute_weights(self, x: Tensor, positions: TokenPositions, queries: slice = ALL_QUERIES) -> Tensor:
        """Compute attention probabilities: (B, P + N, D) -> (B, h, Q, P + N), for the `queries` or all tokens. Rows are
        queries and sum to one; outside a patch's window they are 0."""
        q, k, _ = self.project_qkv(x)
        mask = None if self.sees_whole_grid(positions) else self.make_attention_mask(positions).to(x.device)[queries]
        return attention_probabilities(q[..., queries, :], k, mask)

    def sees_whole_grid(self, positions: TokenPositions) -> bool:
        """Return whether a single window covers the grid, so that every token attends to all tokens."""
        return not self.window or max(positions.grid) <= self.window

    def make_attention_mask(self, positions: TokenPositions) -> Tensor:
        """Compute the mask of the windows: (P + N, P + N) bool, true where a query (row) attends to a key (column)."""
        axis_windows = [torch.arange(length) // self.window for length in positions.grid]
        windows = torch.stack([x.flatten() for x in torch.meshgrid(*axis_windows, indexing="ij")])  # (axes, N)
        is_same_window = (windows[:, :, None] == windows[:, None, :]).all(0)
        return F.pad(is_same_window, (positions.prefix, 0, positions.prefix, 0), value=True)
