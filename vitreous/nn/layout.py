"""Wrappers that restrict attention over axis -2 to rows, columns or windows of a grid of tokens.

B batch, D width; tokens are (B, *grid, D).
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn

from vitreous.nn.grid import crop_grid, pad_to_multiple, window_partition, window_reverse
from vitreous.nn.relative import GridAttention

WindowPadding = Literal["mask", "zeros", "zeros-after-shift"]


class AxialBlock(nn.Module):
    """A block along the rows, then one along the columns (Axial-ViT, arXiv:2010.11929, D.6), each with attention and
    MLP.

    Every row, then every column, is a separate sequence, so attention costs N (h + w) instead of N^2. The loops that it
    replaces:

        for i in range(h): x[:, i] = row(x[:, i])
        for j in range(w): x[:, :, j] = column(x[:, :, j])
    """

    def __init__(self, row: nn.Module, column: nn.Module) -> None:
        super().__init__()
        self.row, self.column = row, column

    def forward(self, x: Tensor) -> Tensor:
        """(B, h, w, D) -> (B, h, w, D)."""
        return self.column(self.row(x).transpose(1, 2)).transpose(1, 2)


class WindowedAttention(nn.Module):
    """Attention within windows of the grid (ViTDet, arXiv:2203.16527, section 3; Swin, arXiv:2103.14030).

    `part` is a block or an attention, over sequences or, like `GridAttention`, over grids. `size` is the window's
    length and `shift` its offset along each axis, in tokens. Tokens q and k are in the same window if

        all((i - s) // w == (j - s) // w for i, j, w, s in zip(q, k, size, shift))

    This is implemented as a cyclic shift with a mask (section 3.2 there). An axis that one window covers is not
    shifted. `pad` selects the role of the zeros that pad a grid to whole windows:

    - "mask": no token attends to them.
    - "zeros": they are keys like all others, as the weights of SAM and ViTDet expect.
    - "zeros-after-shift": as "zeros", but the grid is shifted before it is padded, as in timm's Swin. Windows then
      contain other tokens, the mask's seams are `shift` before the end of the padded grid, and axes that one
      window covers are shifted too.

    If windows divide the grid, the three are the same.
    """

    def __init__(
        self,
        attention: nn.Module,
        size: tuple[int, ...],
        shift: tuple[int, ...] | None = None,
        pad: WindowPadding = "mask",
    ) -> None:
        super().__init__()
        shift = shift or (0,) * len(size)
        if len(shift) != len(size) or any(not 0 <= s < w for s, w in zip(shift, size, strict=True)):
            raise ValueError(f"shift {shift} is not smaller than window size {size} on every axis")
        if pad not in ("mask", "zeros", "zeros-after-shift"):
            raise ValueError(f"pad={pad} is not one of mask, zeros and zeros-after-shift")
        self.part, self.size, self.shift = attention, size, shift
        self.pad: WindowPadding = pad
        self.takes_grid = any(isinstance(module, GridAttention) for module in attention.modules())

    def forward(self, x: Tensor) -> Tensor:
        """(B, *grid, D) -> (B, *grid, D)."""
        grid = tuple(x.shape[1:-1])
        y = self.part(*self.split(x))
        if not self.takes_grid:
            y = y.unflatten(-2, self.size)
        return self.unshift_and_crop(window_reverse(y, self.get_padded_grid(grid)), grid)

    def split(self, x: Tensor) -> tuple[Tensor, ...]:
        """(B, *grid, D) -> inputs of the submodule: (B, *count, *size, D), or (B, *count, T, D) if it takes sequences,
        T = prod(size); and the mask (*count, 1, T, T) bool, if some tokens of a window may not attend to others."""
        windows, mask = self.partition_windows(x), self.mask(tuple(x.shape[1:-1]), x.device)
        windows = windows if self.takes_grid else windows.flatten(1 + len(self.size), -2)
        return (windows,) if mask is None else (windows, mask)

    def effective_shift(self, grid: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shift along each axis of a grid: 0 along axes that one window covers."""
        if self.pad == "zeros-after-shift":
            return self.shift
        return tuple(s if g > w else 0 for g, w, s in zip(grid, self.size, self.shift, strict=True))

    def get_padded_grid(self, grid: tuple[int, ...]) -> tuple[int, ...]:
        """Return the size of the grid padded to whole windows."""
        return tuple(-(-g // w) * w for g, w in zip(grid, self.size, strict=True))

    def partition_windows(self, x: Tensor) -> Tensor:
        """(B, *grid, D) -> (B, *count, *size, D): pad with zeros, shift and partition."""
        return window_partition(self.shift_and_pad_grid(x), self.size)

    def shift_and_pad_grid(self, x: Tensor) -> Tensor:
        """(B, *grid, D) -> (B, *padded, D): the grid before it is partitioned into windows."""
        shifts, axes = [-s for s in self.effective_shift(tuple(x.shape[1:-1]))], tuple(range(1, x.dim() - 1))
        if self.pad == "zeros-after-shift":
            return pad_to_multiple(x.roll(shifts, axes) if any(shifts) else x, self.size)
        x = pad_to_multiple(x, self.size)
        return x.roll(shifts, axes) if any(shifts) else x

    def unshift_and_crop(self, y: Tensor, grid: tuple[int, ...]) -> Tensor:
        """(B, *padded, D) -> (B, *grid, D): the inverse of `shift_and_pad_grid`."""
        shift, axes = self.effective_shift(grid), tuple(range(1, y.dim() - 1))
        if self.pad == "zeros-after-shift":
            y = crop_grid(y, grid)
            return y.roll(shift, axes) if any(shift) else y
        return crop_grid(y.roll(shift, axes) if any(shift) else y, grid)

    def mask(self, grid: tuple[int, ...], device: torch.device | None = None) -> Tensor | None:
        """(*count, 1, T, T) bool: whether tokens of a window may attend to each other; None if all may.

        Tokens may if they are on the same side of every seam of the cyclic shift. Padding attends to padding, so no row
        is empty.
        """
        shift = self.effective_shift(grid)
        has_padding = self.pad == "mask" and any(g % w for g, w in zip(grid, self.size, strict=True))
        if not any(shift) and not has_padding:
            return None
        # 1, plus a bit for each seam before the token; 0 is padding, from `window_partition`
        padded_grid = grid if has_padding else self.get_padded_grid(grid)
        region = torch.ones((1, *padded_grid, 1), dtype=torch.long, device=device)
        for axis, (length, s) in enumerate(zip(padded_grid, shift, strict=True)):
            is_wrapped = torch.arange(length, device=device) < s  # the shift moves them to the end
            region = region + is_wrapped.view(*(-1 if a == axis else 1 for a in range(len(padded_grid))), 1) * 2 ** (
                1 + axis
            )
        regions = self.partition_windows(region)[0].flatten(len(grid))  # (*count, T)
        return (regions[..., :, None] == regions[..., None, :])[..., None, :, :]
