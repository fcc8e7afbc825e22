"""Images as grids of tokens, for any number of axes.

Shapes: B batch, C channels, D width; `image`, `patch` and `grid` are one length per axis: (h, w) for images, (t, h, w)
for video. The grid is part of a tensor's shape, (B, *grid, D), so no code takes the square root of a token count.
"""

from __future__ import annotations

import math
from typing import NotRequired, TypedDict

import torch
import torch.nn.functional as F
from torch import Tensor

from vitreous.nn.sizes import patch_grid
from vitreous.system.machine import get_device_table


class Interpolation(TypedDict):
    """Arguments of `F.interpolate` that do not depend on sizes."""

    mode: str
    align_corners: bool
    antialias: NotRequired[bool]


#: How libraries resize position tables to another grid: arguments of `F.interpolate` by name of the resize mode.
RESIZE_MODES: dict[str, Interpolation] = {
    "bicubic-antialias": {"mode": "bicubic", "antialias": True, "align_corners": False},  # timm, DINOv2 with registers
    "bicubic": {"mode": "bicubic", "align_corners": False},  # DeiT, MAE, transformers
    "bicubic-offset": {"mode": "bicubic", "align_corners": False},  # DINO, DINOv2: the scale is (new + 0.1) / old
    "bilinear": {"mode": "bilinear", "align_corners": False},  # timm, for Google's files
    "bilinear-antialias": {"mode": "bilinear", "antialias": True, "align_corners": False},  # SigLIP 2 NaFlex
    "bicubic-aligned": {"mode": "bicubic", "align_corners": True},  # torchvision
    "zoom": {"mode": "bilinear", "align_corners": True},  # Google's code: scipy.ndimage.zoom of order 1
    "zoom-scipy": {"mode": "bilinear", "align_corners": True},  # `zoom` with scipy's rounding: the last row may be 0
}


def patchify(images: Tensor, patch: tuple[int, ...]) -> Tensor:
    """Cut images into patches: (B, C, *image) -> (B, *grid, C * prod(patch)), each patch flattened in the order
    channel, row, column.

    Equivalent loop, for two axes and patches of p x q pixels:

        out[b, i, j] = images[b, :, i * p : (i + 1) * p, j * q : (j + 1) * q].flatten()
    """
    batch, channels, *image = images.shape
    grid, axes = patch_grid(tuple(image), patch), len(patch)
    split = [size for pair in zip(grid, patch, strict=True) for size in pair]
    order = [0, *range(2, 2 + 2 * axes, 2), 1, *range(3, 3 + 2 * axes, 2)]  # B, grid axes, C, patch axes
    return images.reshape(batch, channels, *split).permute(order).reshape(batch, *grid, channels * math.prod(patch))


def unpatchify(patches: Tensor, patch: tuple[int, ...]) -> Tensor:
    """Assemble images from patches, the inverse of `patchify`: (B, *grid, C * prod(patch)) -> (B, C, *image)."""
    batch, *grid, length = patches.shape
    axes, channels = len(patch), length // math.prod(patch)
    order = [0, 1 + axes, *(axis for i in range(axes) for axis in (1 + i, 2 + axes + i))]
    image = [g * p for g, p in zip(grid, patch, strict=True)]
    return patches.reshape(batch, *grid, channels, *patch).permute(order).reshape(batch, channels, *image)


def gather_tokens(tokens: Tensor, indices: Tensor) -> Tensor:
    """Select tokens: (B, N, D) tokens, (B, K) int64 indices -> (B, K, D), in the order of the indices."""
    return tokens.gather(1, indices[..., None].expand(-1, -1, tokens.shape[-1]))


def pad_to_multiple(tokens: Tensor, size: tuple[int, ...]) -> Tensor:
    """Pad the end of each axis of a grid with zeros to a multiple of `size`: (B, *grid, D) -> (B, *padded, D)."""
    missing = [-g % s for g, s in zip(tokens.shape[1:-1], size, strict=True)]
    return F.pad(tokens, [0, 0, *(n for m in reversed(missing) for n in (0, m))]) if any(missing) else tokens


def crop_grid(tokens: Tensor, grid: tuple[int, ...]) -> Tensor:
    """Return the first `grid` positions along each axis: (B, *padded, D) -> (B, *grid, D)."""
    for axis, length in enumerate(grid, 1):
        tokens = tokens.narrow(axis, 0, length)
    return tokens


def window_partition(tokens: Tensor, size: tuple[int, ...]) -> Tensor:
    """Cut a grid into windows of `size`: (B, *grid, D) -> (B, *count, *size, D).

    The end of each axis is padded with zeros to a multiple of `size`.
    """
    batch, *grid, width = tokens.shape
    tokens = pad_to_multiple(tokens, size)
    count, axes = [-(-g // s) for g, s in zip(grid, size, strict=True)], len(size)
    split = [length for pair in zip(count, size, strict=True) for length in pair]
    order = [0, *range(1, 1 + 2 * axes, 2), *range(2, 2 + 2 * axes, 2), 1 + 2 * axes]
    return tokens.reshape(batch, *split, width).permute(order)


def window_reverse(windows: Tensor, grid: tuple[int, ...]) -> Tensor:
    """Assemble a grid from its windows and remove the padding, the inverse of `window_partition`: (B, *count, *size, D)
    -> (B, *grid, D)."""
    axes = len(grid)
    batch, *sizes, width = windows.shape
    order = [0, *(axis for i in range(axes) for axis in (1 + i, 1 + axes + i)), 1 + 2 * axes]
    padded_grid = [count * size for count, size in zip(sizes[:axes], sizes[axes:], strict=True)]
    return crop_grid(windows.permute(order).reshape(batch, *padded_grid, width), grid)


def resize_position_table(table: Tensor, grid: tuple[int, ...], mode: str = "bicubic-antialias") -> Tensor:
    """Resize a table of position embeddings to another grid, one axis after the other: (*old, D) -> (*grid, D).

    `mode` is a key of `RESIZE_MODES`. Interpolation is linear in the table, so each axis is multiplied by one small
    matrix, and the result is the separable interpolation of the library that the mode reproduces. A table that already
    has the grid is returned unchanged.

    If the grid differs along one axis only, `bicubic-offset` also rescales the other axes, by (n + 0.1) / n, as
    `interpolate_pos_encoding` of DINO and DINOv2 does; all other modes leave them unchanged. The matrices are computed
    in float64 and the result has the dtype of the table.
    """
    if tuple(table.shape[:-1]) == tuple(grid):
        return table
    for axis, (old_length, new_length) in enumerate(zip(table.shape[:-1], grid, strict=True)):
        if old_length != new_length or mode == "bicubic-offset":
            # (new, old)
            weights = get_device_table(cast_axis_resize_matrix, table.device, old_length, new_length, mode, table.dtype)
            table = (weights @ table.movedim(axis, -2)).movedim(-2, axis)
    return table


def cast_axis_resize_matrix(old_length: int, new_length: int, mode: str, dtype: torch.dtype) -> Tensor:
    """Compute the (new, old) matrix of `axis_resize_matrix` in `dtype`."""
    return axis_resize_matrix(old_length, new_length, mode).to(dtype)


def axis_resize_matrix(old_length: int, new_length: int, mode: str) -> Tensor:
    """Compute the (new, old) float64 matrix that resizes one axis by `mode`.

    Rows sum to one, except the last row of `zoom-scipy`, which may be 0.
    """
    identity = torch.eye(old_length, dtype=torch.float64)[
        None, None
    ]  # an image of unit vectors of which only the rows are resized
    if mode == "bicubic-offset":
        return F.interpolate(identity, scale_factor=((new_length + 0.1) / old_length, 1.0), **RESIZE_MODES[mode])[0, 0]
    weights = F.interpolate(identity, size=(new_length, old_length), **RESIZE_MODES[mode])[0, 0]
    if (
        mode == "zoom-scipy"
        and new_length > 1
        and (old_length - 1) / (new_length - 1) * (new_length - 1) > old_length - 1
    ):
        weights[-1] = 0.0  # rounding puts the last coordinate outside the table, where scipy returns 0
    return weights
