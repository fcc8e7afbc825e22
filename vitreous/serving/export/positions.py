"""Positions at a grid that is known only when the graph runs: the matrices of `nn.grid.axis_weights` as arithmetic.

F.interpolate wants its sizes while a graph is made; sums and products do not. Everything is float64, as there.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from vitreous.nn.position import crossed

#: the A of each bicubic kernel (Keys, 1981); the other rules are bilinear
CUBIC = {"bicubic-antialias": -0.5, "bicubic": -0.75, "bicubic-offset": -0.75, "bicubic-aligned": -0.75}
ALIGNED = ("bicubic-aligned", "zoom", "zoom-scipy")  # the first and the last place stay where they are


def length(size: int) -> Tensor:
    """A size, which may be a symbol, as a float64 scalar that depends on it."""
    return torch.ones(size, dtype=torch.float64).sum()


def axis_weights(old: int, new: int, how: str, native: Tensor) -> Tensor:
    """`nn.grid.axis_weights`, (new, old), for a `new` that may be a symbol; the identity matrix where `native`, a bool
    scalar, is true."""
    line = torch.arange(new, dtype=torch.float64)
    count = length(new)
    if how in ALIGNED:
        step = (old - 1) / (count - 1).clamp(min=1)
        at = line * step
    else:
        step = old / (count + 0.1 if how == "bicubic-offset" else count)
        at = (line + 0.5) * step - 0.5
    if how == "bicubic-antialias":
        weights = kernel((torch.arange(old) - at[:, None]) / step.clamp(min=1), CUBIC[how])
        weights = weights / weights.sum(1, keepdim=True)
    else:
        taps = torch.arange(-2, old + 2)  # what lies beyond the ends is the place at the end
        weights = kernel(taps - at[:, None], CUBIC.get(how))
        weights = weights @ (taps.clamp(0, old - 1)[:, None] == torch.arange(old)).to(weights.dtype)
    if how == "zoom-scipy":  # the last coordinate may be rounded to beyond the table, where scipy reads zero
        lost = (line == count - 1) & (step * (count - 1) > old - 1)
        weights = torch.where(lost[:, None], 0.0, weights)
    return torch.where(native, (torch.arange(old) == line[:, None]).to(weights.dtype), weights)


def kernel(x: Tensor, a: float | None) -> Tensor:
    """(n, old) weights of places at (n, old) distances: cubic convolution with that A, or, without one, a triangle."""
    x = x.abs()
    if a is None:
        return (1 - x).clamp(min=0)
    near = ((a + 2) * x - (a + 3)) * x * x + 1
    outer = ((a * x - 5 * a) * x + 8 * a) * x - 4 * a
    return torch.where(x <= 1, near, torch.where(x < 2, outer, torch.zeros_like(x)))


def resize(table: Tensor, grid: tuple[int, ...], how: str) -> Tensor:
    """(*old, D) -> (*grid, D): `nn.grid.resize` for a grid of symbols."""
    unchanged = [length(new) == old for old, new in zip(table.shape[:-1], grid, strict=True)]
    everywhere = torch.stack(unchanged).all()
    for axis, new in enumerate(grid):
        native = everywhere if how == "bicubic-offset" else unchanged[axis]
        weights = axis_weights(table.shape[axis], new, how, native).to(table)
        table = (weights @ table.movedim(axis, -2)).movedim(-2, axis)
    return table


class AnyGrid(nn.Module):
    """Learned positions, read at whatever grid arrives."""

    def __init__(self, table: Tensor, how: str) -> None:
        """`table` (*old, D); `how` is a rule of `nn.grid.RESIZE`."""
        super().__init__()
        self.table, self.how = nn.Parameter(table.detach(), requires_grad=False), how

    def read(self, grid: tuple[int, ...]) -> Tensor:
        """(*grid, D)."""
        return resize(self.table, grid, self.how)


class AnyAxes(nn.Module):
    """Learned positions of each axis, read at whatever grid arrives; the last axis comes first, as in `LearnedAxes`."""

    def __init__(self, tables: list[Tensor], how: str) -> None:
        """`tables` (old, D), one for each axis."""
        super().__init__()
        self.tables, self.how = nn.ParameterList(nn.Parameter(t.detach(), requires_grad=False) for t in tables), how

    def read(self, grid: tuple[int, ...]) -> Tensor:
        """(*grid, D)."""
        return crossed(
            [resize(table, (length,), self.how) for table, length in zip(self.tables, grid, strict=True)], grid
        )
