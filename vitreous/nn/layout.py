"""Wrappers that restrict attention to rows, columns or windows of a grid of tokens.

Shapes: B batch, D width; tokens are (B, *grid, D). `count` is the number of windows along each axis, T = prod(size) the
tokens of a window.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn

from vitreous.nn.grid import crop_grid, pad_to_multiple, window_partition, window_reverse
from vitreous.nn.relative import GridAttention

WindowPadding = Literal["mask", "zeros", "zeros-after-shift"]


class AxialBlock(nn.Module):
    """A block along the rows of a grid, then a block along its columns, each with attention and MLP (Axial-ViT,
    arXiv:2010.11929, D.6).

    Every row and every column is a separate sequence, so attention costs N (h + w) instead of N^2. Equivalent loops:

        for i in range(h): x[:, i] = row(x[:, i])
        for j in range(w): x[:, :, j] = column(x[:, :, j])
    """

    def __init__(self, row: nn.Module, column: nn.Module) -> None:
        super().__init__()
        self.row, self.column = row, column

    def forward(self, x: Tensor) -> Tensor:
        """Apply both blocks: (B, h, w, D) -> (B, h, w, D)."""
        return self.column(self.row(x).transpose(1, 2)).transpose(1, 2)


class WindowedAttention(nn.Module):
    """Attention within windows of the grid (ViTDet, arXiv:2203.16527, section 3; Swin, arXiv:2103.14030).

    `attention` is a block or an attention module; its inputs are sequences of tokens, or grids if it contains a
    `GridAttention`. `size` is the length of a window and `shift` its offset along each axis, in tokens. Tokens q and k
    are in the same window if

        all((i - s) // w == (j - s) // w for i, j, w, s in zip(q, k, size, shift))

    Shifted windows are implemented as a cyclic shift with a mask (section 3.2 of the Swin paper). An axis that a single
    window covers is not shifted. A grid that is not divisible by the window size is padded with zeros; `pad` selects
    how attention treats this padding:

    - "mask": no token attends to it.
    - "zeros": its tokens are keys like all others, as the weights of SAM and ViTDet expect.
    - "zeros-after-shift": as "zeros", but the grid is shifted before it is padded, as in timm's Swin. Windows then
      contain other tokens, the mask's seams are `shift` before the end of the padded grid, and axes that a single
      window covers are shifted too.

    Raises ValueError if `shift` is not smaller than `size`, or for an unknown `pad`.
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
            raise ValueError(f"shift {shift} must be smaller than window size {size} along every axis")
        if pad not in ("mask", "zeros", "zeros-after-shift"):
            raise ValueError(f"pad must be mask, zeros or zeros-after-shift, got {pad}")
        self.part, self.size, self.shift = attention, size, shift
        self.pad: WindowPadding = pad
        self.takes_grid = any(isinstance(module, GridAttention) for module in attention.modules())

    def forward(self, x: Tensor) -> Tensor:
        """Attend within the windows of a grid: (B, *grid, D) -> (B, *grid, D)."""
        grid = tuple(x.shape[1:-1])
        y = self.part(*self.split(x))
        if not self.takes_grid:
            y = y.unflatten(-2, self.size)
        return self.unshift_and_crop(window_reverse(y, self.get_padded_grid(grid)), grid)

    def split(self, x: Tensor) -> tuple[Tensor, ...]:
        """Split a grid (B, *grid, D) into the inputs of the attention module.

        These are the windows, (B, *count, *size, D), or (B, *count, T, D) if the module takes sequences. If some tokens
        of a window may not attend to others, the mask (*count, 1, T, T) bool follows.
        """
        windows, mask = self.partition_windows(x), self.mask(tuple(x.shape[1:-1]), x.device)
        windows = windows if self.takes_grid else windows.flatten(1 + len(self.size), -2)
        return (windows,) if mask is None else (windows, mask)

    def effective_shift(self, grid: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shift along each axis of a grid: 0 along axes that a single window covers, except for
        "zeros-after-shift"."""
        if self.pad == "zeros-after-shift":
            return self.shift
        return tuple(s if g > w else 0 for g, w, s in zip(grid, self.size, self.shift, strict=True))

    def get_padded_grid(self, grid: tuple[int, ...]) -> tuple[int, ...]:
        """Return the size of the grid after padding to whole windows."""
        return tuple(-(-g // w) * w for g, w in zip(grid, self.size, strict=True))

    def partition_windows(self, x: Tensor) -> Tensor:
        """Pad and shift a grid and cut it into windows: (B, *grid, D) -> (B, *count, *size, D)."""
        return window_partition(self.shift_and_pad_grid(x), self.size)

    def shift_and_pad_grid(self, x: Tensor) -> Tensor:
        """Shift a grid cyclically and pad it to whole windows: (B, *grid, D) -> (B, *padded, D)."""
        shifts, axes = [-s for s in self.effective_shift(tuple(x.shape[1:-1]))], tuple(range(1, x.dim() - 1))
        if self.pad == "zeros-after-shift":
            return pad_to_multiple(x.roll(shifts, axes) if any(shifts) else x, self.size)
        x = pad_to_multiple(x, self.size)
        return x.roll(shifts, axes) if any(shifts) else x

    def unshift_and_crop(self, y: Tensor, grid: tuple[int, ...]) -> Tensor:
        """Remove shift and padding, the inverse of `shift_and_pad_grid`: (B, *padded, D) -> (B, *grid, D)."""
        shift, axes = self.effective_shift(grid), tuple(range(1, y.dim() - 1))
        if self.pad == "zeros-after-shift":
            y = crop_grid(y, grid)
            return y.roll(shift, axes) if any(shift) else y
        return crop_grid(y.roll(shift, axes) if any(shift) else y, grid)

    def mask(self, grid: tuple[int, ...], device: torch.device | None = None) -> Tensor | None:
        """Compute which tokens of a window may attend to each other: (*count, 1, T, T) bool, or None if all may.

        Tokens may attend to each other if they are on the same side of every seam of the cyclic shift. Padding attends
        to padding, so every row has a true value.
        """
        shift = self.effective_shift(grid)
        has_padding = self.pad == "mask" and any(g % w for g, w in zip(grid, self.size, strict=True))
        if not any(shift) and not has_padding:
            return None
        # region of each token: 1, plus a bit for each seam before it; 0 is padding, added by `window_partition`
        padded_grid = grid if has_padding else self.get_padded_grid(grid)
        region = torch.ones((1, *padded_grid, 1), dtype=torch.long, device=device)
        for axis, (length, s) in enumerate(zip(padded_grid, shift, strict=True)):
            is_wrapped = torch.arange(length, device=device) < s  # the cyclic shift moves these tokens to the end
            region = region + is_wrapped.view(*(-1 if a == axis else 1 for a in range(len(padded_grid))), 1) * 2 ** (
                1 + axis
            )
        regions = self.partition_windows(region)[0].flatten(len(grid))  # (*count, T)
        return (regions[..., :, None] == regions[..., None, :])[..., None, :, :]
