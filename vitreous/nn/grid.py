"""Images as grids of tokens, for any number of axes.

B batch, C channels, D width; `image`, `patch` and `grid` are one number per axis: (h, w) for pictures, (t, h, w) for
video. The grid lives in the shape, (B, *grid, D), so nothing here ever takes a square root of a token count.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

#: How a table of positions is read at another grid: the keyword arguments of `F.interpolate` along one axis.
RESIZE = {
    "bicubic": {"mode": "bicubic", "antialias": True, "align_corners": False},  # timm, DINOv2 with registers
    "bilinear": {"mode": "bilinear", "align_corners": True},  # Google's loader: scipy zoom of order 1
}


def grid_of(image: tuple[int, ...], patch: tuple[int, ...]) -> tuple[int, ...]:
    """The grid that `patch` cuts out of `image`; both hold one length per axis, in pixels.

    Raises ValueError where a patch does not divide its axis: a remainder is never dropped in silence.
    """
    if len(image) != len(patch) or any(i <= 0 or i % p for i, p in zip(image, patch, strict=True)):
        raise ValueError(f"image size {by(image)} is not a multiple of patch {by(patch)}")
    return tuple(i // p for i, p in zip(image, patch, strict=True))


def by(sizes: tuple[int, ...]) -> str:
    """`224` for a square, `224x192` otherwise: how sizes are written for people."""
    return str(sizes[0]) if len(set(sizes)) == 1 else "x".join(map(str, sizes))


def patchify(images: Tensor, patch: tuple[int, ...]) -> Tensor:
    """(B, C, *image) -> (B, *grid, C * prod(patch)): each patch flattened channel first, then row by row.

    The loop it replaces, for two axes:
        out[b, i, j] = images[b, :, i * p : (i + 1) * p, j * q : (j + 1) * q].flatten()
    """
    batch, channels, *image = images.shape
    grid, axes = grid_of(tuple(image), patch), len(patch)
    split = [size for pair in zip(grid, patch, strict=True) for size in pair]
    order = [0, *range(2, 2 + 2 * axes, 2), 1, *range(3, 3 + 2 * axes, 2)]  # B, grid axes, C, patch axes
    return images.reshape(batch, channels, *split).permute(order).reshape(batch, *grid, channels * math.prod(patch))


def unpatchify(patches: Tensor, patch: tuple[int, ...]) -> Tensor:
    """(B, *grid, C * prod(patch)) -> (B, C, *image): the inverse of `patchify`."""
    batch, *grid, length = patches.shape
    axes, channels = len(patch), length // math.prod(patch)
    order = [0, 1 + axes, *(axis for i in range(axes) for axis in (1 + i, 2 + axes + i))]
    image = [g * p for g, p in zip(grid, patch, strict=True)]
    return patches.reshape(batch, *grid, channels, *patch).permute(order).reshape(batch, channels, *image)


def take(tokens: Tensor, places: Tensor) -> Tensor:
    """(B, N, D) tokens and (B, K) int64 places -> (B, K, D): those tokens, in that order."""
    return tokens.gather(1, places[..., None].expand(-1, -1, tokens.shape[-1]))


def resize(table: Tensor, grid: tuple[int, ...], how: str = "bicubic") -> Tensor:
    """(*old, D) -> (*grid, D): a table of positions read at another grid, one axis after the other.

    `how` names a row of `RESIZE`. Interpolation is linear in the table, so each axis is one small matrix and the
    result is the separable 2-D (or N-D) interpolation of the source that the row names. An equal grid is returned as
    it is. The matrices are made in float64 and the result has the dtype of the table.
    """
    for axis, (old, new) in enumerate(zip(table.shape[:-1], grid, strict=True)):
        if old != new:
            weights = axis_weights(old, new, how).to(table)  # (new, old)
            table = (weights @ table.movedim(axis, -2)).movedim(-2, axis)
    return table


def axis_weights(old: int, new: int, how: str) -> Tensor:
    """The (new, old) matrix that resizes one axis; every row sums to one."""
    identity = torch.eye(old, dtype=torch.float64)[None, None]  # columns are unit vectors; only rows are resized
    return F.interpolate(identity, size=(new, old), **RESIZE[how])[0, 0]
