"""Where a block looks: wrappers around parts that attend over axis -2, for tokens that lie in a grid.

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
    """A block along the rows, then one along the columns (Axial-ViT, arXiv:2010.11929, D.6): each with attention and
    MLP.

    Every row, then every column, is a sequence of its own, so attention costs N (h + w) instead of N^2. The loops it
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
    """A part that attends within windows of the grid (ViTDet, arXiv:2203.16527, section 3; Swin, arXiv:2103.14030).

    `part` is a block or an attention, over sequences or, as `GridAttention` is, over grids. `size` is the window's
    length and `shift` its offset along each axis, in tokens: the windows that q and k lie in are those of

        all((i - s) // w == (j - s) // w for i, j, w, s in zip(q, k, size, shift))

    which is carried out as a cyclic shift with a mask (section 3.2 there). An axis that one window covers is not
    shifted. `pad` says what becomes of the zeros that fill up a grid that the windows do not divide: with "mask" no
    token attends to them, with "zeros" they are keys like all others, as SAM's and ViTDet's weights expect.

    With "zeros-after-shift" they are so too, and the grid is shifted before it is filled up, as timm's Swin does it:
    windows then hold other tokens, the mask's seams lie `shift` before the end of the whole grid, and every axis is
    shifted, whatever its length. Where windows divide the grid the three are the same.
    """

    def __init__(
        self, part: nn.Module, size: tuple[int, ...], shift: tuple[int, ...] | None = None, pad: WindowPadding = "mask"
    ) -> None:
        super().__init__()
        shift = shift or (0,) * len(size)
        if len(shift) != len(size) or any(not 0 <= s < w for s, w in zip(shift, size, strict=True)):
            raise ValueError(f"a shift of {shift} is not below windows of {size}, axis by axis")
        if pad not in ("mask", "zeros", "zeros-after-shift"):
            raise ValueError(f"pad={pad} is neither mask, zeros nor zeros-after-shift")
        self.part, self.size, self.shift = part, size, shift
        self.pad: WindowPadding = pad
        self.takes_grid = any(isinstance(module, GridAttention) for module in part.modules())

    def forward(self, x: Tensor) -> Tensor:
        """(B, *grid, D) -> (B, *grid, D)."""
        grid = tuple(x.shape[1:-1])
        y = self.part(*self.split(x))
        if not self.takes_grid:
            y = y.unflatten(-2, self.size)
        return self.unshift_and_crop(window_reverse(y, self.whole(grid)), grid)

    def split(self, x: Tensor) -> tuple[Tensor, ...]:
        """(B, *grid, D) -> what the part is given: (B, *count, *size, D), or (B, *count, T, D) if it takes sequences,
        T = prod(size); and the mask (*count, 1, T, T) bool where some tokens of a window may not attend to others."""
        windows, mask = self.cut(x), self.mask(tuple(x.shape[1:-1]), x.device)
        windows = windows if self.takes_grid else windows.flatten(1 + len(self.size), -2)
        return (windows,) if mask is None else (windows, mask)

    def effective_shift(self, grid: tuple[int, ...]) -> tuple[int, ...]:
        """The shift along each axis of a grid: 0 along those that one window covers."""
        if self.pad == "zeros-after-shift":
            return self.shift
        return tuple(s if g > w else 0 for g, w, s in zip(grid, self.size, self.shift, strict=True))

    def whole(self, grid: tuple[int, ...]) -> tuple[int, ...]:
        """The grid filled up to whole windows."""
        return tuple(-(-g // w) * w for g, w in zip(grid, self.size, strict=True))

    def cut(self, x: Tensor) -> Tensor:
        """(B, *grid, D) -> (B, *count, *size, D): filled up with zeros, shifted, cut."""
        return window_partition(self.shift_and_pad_grid(x), self.size)

    def shift_and_pad_grid(self, x: Tensor) -> Tensor:
        """(B, *grid, D) -> (B, *whole, D): what is cut into windows."""
        back, axes = [-s for s in self.effective_shift(tuple(x.shape[1:-1]))], tuple(range(1, x.dim() - 1))
        if self.pad == "zeros-after-shift":
            return pad_to_multiple(x.roll(back, axes) if any(back) else x, self.size)
        x = pad_to_multiple(x, self.size)
        return x.roll(back, axes) if any(back) else x

    def unshift_and_crop(self, y: Tensor, grid: tuple[int, ...]) -> Tensor:
        """(B, *whole, D) -> (B, *grid, D): the inverse of `shift_and_pad_grid`."""
        shift, axes = self.effective_shift(grid), tuple(range(1, y.dim() - 1))
        if self.pad == "zeros-after-shift":
            y = crop_grid(y, grid)
            return y.roll(shift, axes) if any(shift) else y
        return crop_grid(y.roll(shift, axes) if any(shift) else y, grid)

    def mask(self, grid: tuple[int, ...], device: torch.device | None = None) -> Tensor | None:
        """(*count, 1, T, T) bool: which tokens of a window may attend to which; None if all may.

        Those may that are on one side of every seam of the cyclic shift. Padding attends to padding: no row is empty.
        """
        shift = self.effective_shift(grid)
        filled = self.pad == "mask" and any(g % w for g, w in zip(grid, self.size, strict=True))
        if not any(shift) and not filled:
            return None
        # 1 and a bit for each seam that a token lies behind; 0, which `window_partition` fills in, is padding
        whole = grid if filled else self.whole(grid)
        region = torch.ones((1, *whole, 1), dtype=torch.long, device=device)
        for axis, (length, s) in enumerate(zip(whole, shift, strict=True)):
            behind = torch.arange(length, device=device) < s  # the shift takes them to the end
            region = region + behind.view(*(-1 if a == axis else 1 for a in range(len(whole))), 1) * 2 ** (1 + axis)
        regions = self.cut(region)[0].flatten(len(grid))  # (*count, T)
        return (regions[..., :, None] == regions[..., None, :])[..., None, :, :]
