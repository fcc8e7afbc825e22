"""Attention with relative positions: logits depend on the offset between tokens.

Shapes: B batch, P prefix tokens, N all tokens, Q queries, D width, h heads, d = D / h.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from vitreous.nn.attention import (
    ALL_QUERIES,
    Attention,
    attend_unscaled,
    attention_probabilities,
    dot_product_attention,
    mask_logits,
)
from vitreous.nn.grid import resize_position_table
from vitreous.nn.position import TokenPositions


class RelativeAttention(Attention):
    """Attention with relative 1-D positions (arXiv:2010.11929, D.4, Table 8): logits (q . k + q . R[p_q - p_k]) /
    sqrt(d).

    p is a token's number in raster order, prefix tokens first. `tokens` is the number of tokens N at the native image
    size. Each head has a table R of 2 N - 1 vectors, drawn from N(0, 0.02^2), which is resized for another number of
    tokens. With T tokens:

        bias[h, q, k] = q[h, q] @ R[h, number[q] - number[k] + T - 1] / sqrt(d)
    """

    def __init__(self, width: int, heads: int, tokens: int, bias: bool = True) -> None:
        super().__init__(width, heads, bias)
        self.table = nn.Parameter(torch.empty(2 * tokens - 1, heads, width // heads).normal_(std=0.02))

    def forward_before_output(self, x: Tensor, positions: TokenPositions, queries: slice = ALL_QUERIES) -> Tensor:
        """Compute the concatenated outputs of the heads: (B, N, D) -> (B, Q, D)."""
        q, k, v = self.project_qkv(x)
        q = q[..., queries, :]
        return dot_product_attention(q, k, v, self.bias(q, positions, queries)).transpose(-3, -2).flatten(-2)

    def compute_weights(self, x: Tensor, positions: TokenPositions, queries: slice = ALL_QUERIES) -> Tensor:
        """Compute attention probabilities: (B, N, D) -> (B, h, Q, N), for the `queries` or all N tokens. Rows are
        queries and sum to one."""
        q, k, _ = self.project_qkv(x)
        return attention_probabilities(q[..., queries, :], k, self.bias(q[..., queries, :], positions, queries))

    def bias(self, q: Tensor, positions: TokenPositions, queries: slice = ALL_QUERIES) -> Tensor:
        """Compute the bias that is added to the logits: q (B, h, Q, d) of the `queries` -> (B, h, Q, N)."""
        num_tokens = positions.prefix + math.prod(positions.grid)
        # (2 T - 1, h, d)
        flat_table = resize_position_table(self.table.flatten(1), (2 * num_tokens - 1,), "bilinear")
        table = torch.unflatten(flat_table, 1, self.table.shape[1:])
        token_indices = torch.arange(num_tokens, device=q.device)[None]
        if positions.index is not None:
            front = token_indices[:, : positions.prefix].expand(len(positions.index), -1)
            token_indices = torch.cat([front, positions.index + positions.prefix], 1)
        # (1 or B, 1, Q, N)
        offsets = token_indices[:, None, queries, None] - token_indices[:, None, None, :] + num_tokens - 1
        products = q @ table.permute(1, 2, 0).to(q) * q.shape[-1] ** -0.5  # (B, h, Q, 2 T - 1)
        return products.gather(-1, offsets.expand(*q.shape[:2], -1, -1))


class GridAttention(Attention):
    """Attention over all positions of a grid (axes -3 and -2) with decomposed relative positions (MViTv2,
    arXiv:2112.01526; ViTDet).

    `size` is the native grid (h, w). The tables R_h (2 h - 1, d) and R_w (2 w - 1, d) are resized for other grids:

        logit[q, k] = q . k / sqrt(d) + q . R_h[row_q - row_k + h - 1] + q . R_w[column_q - column_k + w - 1]

    The (h w, h w) matrix of the last two terms is not materialised: they are h + w additional channels of queries and
    keys.
    """

    def __init__(self, width: int, heads: int, size: tuple[int, int], bias: bool = True) -> None:
        super().__init__(width, heads, bias)
        self.rows, self.columns = (nn.Parameter(torch.zeros(2 * length - 1, width // heads)) for length in size)

    def forward_before_output(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """Compute the concatenated outputs of the heads: (..., h, w, D) -> (..., h, w, D). `mask` (..., 1, h w, h w)
        bool is true where a query may attend to a key."""
        y = attend_unscaled(*self.build_joint_qkv(x), mask)
        return torch.unflatten(y.transpose(-3, -2).flatten(-2), -2, x.shape[-3:-1])

    def compute_weights(self, x: Tensor, mask: Tensor | None = None, queries: slice = ALL_QUERIES) -> Tensor:
        """Compute attention probabilities: (..., h, w, D) -> (..., heads, Q, h w), for the `queries` or all h w
        positions. Rows are queries and sum to one."""
        q, k, _ = self.build_joint_qkv(x)
        logits = q[..., queries, :] @ k.mT
        return mask_logits(logits, None if mask is None else mask[..., queries, :]).softmax(-1)

    def build_joint_qkv(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Compute queries and keys whose products include the position terms: (..., h, w, D) -> queries and keys
        (..., heads, h w, d + h + w), and values (..., heads, h w, d).

        The additional channels of a query are its products with the vectors of all rows and all columns. Those of a key
        are one-hot vectors of its row and its column.
        """
        height, width = x.shape[-3:-1]
        q, k, v = self.project_qkv(x.flatten(-3, -2))
        grid = torch.unflatten(q, -2, (height, width))  # (..., heads, h, w, d)
        row_logits = torch.einsum("...ijc,ikc->...ijk", grid, gather_relative_positions(self.rows, height).to(q))
        column_logits = torch.einsum("...ijc,jkc->...ijk", grid, gather_relative_positions(self.columns, width).to(q))
        indices = torch.arange(height * width, device=x.device)[:, None]
        is_row = indices // width == torch.arange(height, device=x.device)
        is_column = indices % width == torch.arange(width, device=x.device)
        one_hot = torch.cat([is_row, is_column], -1).to(k.dtype).expand(*k.shape[:-1], -1)
        position_logits = torch.cat([row_logits, column_logits], -1).flatten(-3, -2)
        return torch.cat([q * q.shape[-1] ** -0.5, position_logits], -1), torch.cat([k, one_hot], -1), v


def gather_relative_positions(table: Tensor, length: int) -> Tensor:
    """Gather the vector of each offset q - k of an axis: table (2 L - 1, d), resized to 2 `length` - 1 entries ->
    (length, length, d)."""
    table = resize_position_table(table, (2 * length - 1,), "bilinear")
    positions = torch.arange(length, device=table.device)
    return table[positions[:, None] - positions + length - 1]
