"""Position embeddings of a grid of tokens, and the token positions that attention modules receive.

Shapes: B batch, P prefix tokens (such as the class token), K patch tokens, D width, C channels of a table.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitreous.nn.attention import ALL_QUERIES
from vitreous.nn.grid import resize_position_table
from vitreous.system.machine import get_device_table
from vitreous.system.torch_types import ModuleList


class TokenPositions(NamedTuple):
    """Positions of the tokens of a batch: `prefix` tokens in front, then the tokens of a grid, in raster order.

    If only some patches are present (masked or dropped tokens), `index` (B, K) int64 contains their indices in the
    grid. `scale` (1,) multiplies the coordinates of rotary positions in training; None: not scaled.
    """

    grid: tuple[int, ...]
    prefix: int = 0
    index: Tensor | None = None  # pyright: ignore[reportIncompatibleMethodOverride]  # replaces tuple.index
    scale: Tensor | None = None

    def select_entries(self, table: Tensor) -> Tensor:
        """Select the table entries of the patch tokens: (*grid, C) -> (B, K, C), or (1, K, C) if all patches are
        present."""
        entries = table.flatten(0, -2)
        return entries[None] if self.index is None else entries[self.index]


def combine_axis_tables(axis_tables: Sequence[Tensor], grid: tuple[int, ...]) -> Tensor:
    """Combine one table (length, C) per axis to a table of the grid: (*grid, axes * C), e(i, j) = [X[j] | Y[i]], the
    last axis first."""
    axes = range(len(grid))
    expanded = [
        table.view(*[-1 if a == axis else 1 for a in axes], table.shape[-1]).expand(*grid, -1)
        for axis, table in enumerate(axis_tables)
    ]
    return torch.cat(expanded[::-1], -1)


def sincos_position_table(grid: tuple[int, ...], width: int, base: float = 10000.0, form: str = "mae") -> Tensor:
    """Compute fixed sine-cosine position embeddings (*grid, width), with an equal share of the channels per axis.

    Along one axis with m = width / axes channels: [sin(w_i x) | cos(w_i x)], i = 0 .. m / 2 - 1. `form` selects the
    frequencies: w_i = base^(-i / (m / 2)) for "mae" (MAE and DiT), w_i = base^(-i / (m / 2 - 1)) for "big-vision"
    (arXiv:2205.01580). In both, the last axis comes first. Remaining channels are zero.
    """
    axes = len(grid)
    half = width // (2 * axes)
    frequencies = base ** (-torch.arange(half) / (half - 1 if form == "big-vision" else half))
    angles = [torch.arange(length)[:, None] * frequencies for length in grid]  # (length, half) each
    return F.pad(
        combine_axis_tables([torch.cat([axis_angles.sin(), axis_angles.cos()], 1) for axis_angles in angles], grid),
        (0, width - 2 * half * axes),
    )


class Position(nn.Module):
    """Base class of position embeddings of a grid, which are added to its tokens."""

    def read(self, grid: tuple[int, ...]) -> Tensor:
        """Return the position embeddings of a grid: (*grid, D)."""
        raise NotImplementedError


class LearnedPosition(Position):
    """Learned 1-D positions (arXiv:2010.11929, Eq. 1): one vector per position of `grid`, drawn from N(0, 0.02^2).

    For another grid the table is resized by `mode`, a key of `RESIZE_MODES` (section 3.2), so images of other sizes and
    aspect ratios need no new model.
    """

    def __init__(self, grid: tuple[int, ...], width: int, mode: str = "bicubic-antialias") -> None:
        super().__init__()
        self.resize_rule = mode
        self.table = nn.Parameter(torch.empty(*grid, width).normal_(std=0.02))

    def read(self, grid: tuple[int, ...]) -> Tensor:
        """Return the table, resized to a grid: (*grid, D)."""
        return resize_position_table(self.table, grid, self.resize_rule)


class LearnedAxesPosition(Position):
    """Learned 2-D positions (arXiv:2010.11929, D.4): a table per axis, each with an equal share of the channels.

    e(i, j) = [X[j] | Y[i]]: the last axis comes first. `mode` is that of `LearnedPosition`. Raises ValueError if the
    width is not divisible by the number of axes.
    """

    def __init__(self, grid: tuple[int, ...], width: int, mode: str = "bicubic-antialias") -> None:
        super().__init__()
        if width % len(grid):
            raise ValueError(f"width {width} is not divisible by the number of axes, {len(grid)}")
        self.resize_rule = mode
        self.tables = nn.ParameterList(torch.empty(length, width // len(grid)).normal_(std=0.02) for length in grid)

    def read(self, grid: tuple[int, ...]) -> Tensor:
        """Return the combined tables, resized to a grid: (*grid, D)."""
        return combine_axis_tables(
            [
                resize_position_table(table, (length,), self.resize_rule)
                for table, length in zip(self.tables, grid, strict=True)
            ],
            grid,
        )


class FactorisedPosition(Position):
    """Learned positions per axis that are added: e(i, j) = Y[i] + X[j] (NaViT, arXiv:2307.06304, section 2.1).

    For another grid each table is resized to the length of its axis, so positions are fractional coordinates. They
    generalise to combinations of height and width that did not occur in training.
    """

    def __init__(self, grid: tuple[int, ...], width: int, resize_rule: str = "bicubic-antialias") -> None:
        super().__init__()
        self.axes = ModuleList(LearnedPosition((length,), width, resize_rule) for length in grid)

    def read(self, grid: tuple[int, ...]) -> Tensor:
        """Return the sum of the axes' tables, resized to a grid: (*grid, D)."""
        table = self.axes[0].read(grid[:1])
        for axis, length in zip(self.axes[1:], grid[1:], strict=True):
            table = table[..., None, :] + axis.read((length,))
        return table


class FixedPosition(Position):
    """Base class of positions without parameters, which remembers the device and the dtype of its model."""

    device, dtype = torch.device("cpu"), torch.float32

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Apply a conversion of the module, such as `to`, and store the device and the dtype that result from it."""
        converted = fn(torch.empty(0, device=self.device, dtype=self.dtype))
        self.device, self.dtype = converted.device, converted.dtype
        return super()._apply(fn, recurse)  # pyright: ignore[reportUnknownMemberType]


class SinCosPosition(FixedPosition):
    """Fixed sine-cosine positions for any grid: `sincos_position_table` with the base 10000."""

    def __init__(self, width: int, form: str = "mae") -> None:
        super().__init__()
        self.width, self.form = width, form

    def read(self, grid: tuple[int, ...]) -> Tensor:
        """Return the sine-cosine table of a grid: (*grid, D)."""
        table = get_device_table(sincos_position_table, self.device, grid, self.width, 10000.0, self.form)
        return table.to(self.dtype)


class SpaceTimePosition(Position):
    """Learned positions of time and of space that are added: e(t, i, j) = T[t] + S[i, j] (ViViT, arXiv:2103.15691; MAE
    as spatiotemporal learners, arXiv:2205.09113).

    `space` is a table as for images. `time` starts at 0, so a newly initialised model treats all time slots equally.
    """

    def __init__(self, grid: tuple[int, ...], width: int, resize_rule: str = "bicubic-antialias") -> None:
        super().__init__()
        self.time, self.space = (
            LearnedPosition(grid[:1], width, resize_rule),
            LearnedPosition(grid[1:], width, resize_rule),
        )
        nn.init.zeros_(self.time.table)

    def read(self, grid: tuple[int, ...]) -> Tensor:
        """Return the sum of both tables, resized to a grid: (T, h, w, D)."""
        return torch.unflatten(self.time.read(grid[:1]), 0, (-1, *[1] * (len(grid) - 1))) + self.space.read(grid[1:])


class SinusoidPosition(FixedPosition):
    """Fixed positions computed from a token's index n in raster order (released code of VideoMAE, arXiv:2203.12602):
    alternating sin(n w_i) and cos(n w_i), w_i = 10000^(-2 i / D).

    The index of a location depends on the grid, so its embedding changes with the grid, as in the released code.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.width = width

    def read(self, grid: tuple[int, ...]) -> Tensor:
        """Return the sinusoid table of a grid: (*grid, D) float32."""
        return get_device_table(sinusoid_position_table, self.device, grid, self.width).to(self.dtype)


def sinusoid_position_table(grid: tuple[int, ...], width: int) -> Tensor:
    """Compute the table of `SinusoidPosition`: (*grid, width) float32."""
    frequencies = 10000.0 ** (-torch.arange(0, width, 2, dtype=torch.float64) / width)
    angles = torch.arange(math.prod(grid), dtype=torch.float64)[:, None] * frequencies
    table = torch.stack([angles.sin(), angles.cos()], -1).flatten(1)[:, :width].float()
    return torch.unflatten(table, 0, grid)


def gather_token_positions(position: Position, slots: Tensor | None, positions: TokenPositions) -> Tensor:
    """Return the position embedding of every token: (1 or B, P + K, D).

    The first prefix tokens have the embeddings `slots` (S, D); further prefix tokens have zeros.
    """
    table = positions.select_entries(position.read(positions.grid))
    front = table.new_zeros(positions.prefix, table.shape[-1])
    if slots is not None:
        front = torch.cat([slots, front[len(slots) :]])
    return torch.cat([front.expand(len(table), -1, -1), table], 1)


class BlockWithPosition(nn.Module):
    """Block that adds separate position embeddings to its input (arXiv:2010.11929, D.4, Table 8).

    `slots` (S, D) are the embeddings of the prefix tokens, or None.
    """

    def __init__(self, block: nn.Module, position: Position, slots: nn.Parameter | None) -> None:
        super().__init__()
        self.block, self.position, self.slots = block, position, slots

    def forward(self, x: Tensor, positions: TokenPositions, queries: slice = ALL_QUERIES) -> Tensor:
        """Apply the block: (B, P + K, D) -> (B, P + K, D), or only the `queries`."""
        return self.block(x + gather_token_positions(self.position, self.slots, positions).to(x), queries=queries)


class BlockWithSharedPosition(nn.Module):
    """Block that adds position embeddings shared by all blocks, computed once per pass (arXiv:2010.11929, Table 8, last
    column)."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, x: Tensor, embedding: Tensor, queries: slice = ALL_QUERIES) -> Tensor:
        """Apply the block: x (B, P + K, D), position embeddings (1 or B, P + K, D) -> (B, P + K, D), or only the
        `queries`."""
        return self.block(x + embedding.to(x), queries=queries)
