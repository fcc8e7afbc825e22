"""Multi-scale deformable attention (Deformable DETR, arXiv:2010.04159): queries attend to a few points of each level.

Shapes: B images, Q queries, L levels (maps of different resolution), N positions of all levels, h heads, P points per
level, D width, d channels per head of the values. Positions are (x, y) in 0 .. 1 of a level's width and height.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitreous.system.machine import get_device_table


def sample_levels(
    values: Tensor, grids: Sequence[tuple[int, int]], sampling_locations: Tensor, weights: Tensor
) -> Tensor:
    """Compute weighted sums of values that are bilinearly interpolated at sampling locations -> (B, Q, h, d).

    `values` (B, N, h, d) are the levels concatenated in raster order, with (rows, columns) of `grids`.
    `sampling_locations` (B, Q, h, L, P, 2) are (x, y) in 0 .. 1, `weights` are (B, Q, h, L, P). Outside of a grid
    values are 0. Equivalent loop, for one query and head:

        y = 0
        for level, (rows, columns) in enumerate(grids):
            for x, y, weight in points of the level:
                x, y = x * columns - 0.5, y * rows - 0.5
                for row, column in the four positions around (y, x) that are in the grid:
                    y += weight * (1 - abs(y - row)) * (1 - abs(x - column)) * values[level][row, column]
    """
    batch, queries, heads = sampling_locations.shape[:3]
    total = values.new_zeros(batch * heads, values.shape[-1], queries)
    level_values = values.split_with_sizes([rows * columns for rows, columns in grids], 1)
    for level, (value, grid) in enumerate(zip(level_values, grids, strict=True)):
        image = value.permute(0, 2, 3, 1).reshape(batch * heads, -1, *grid)  # (B h, d, rows, columns)
        points = 2 * sampling_locations[:, :, :, level].transpose(1, 2).flatten(0, 1) - 1  # (B h, Q, P, 2)
        sampled = F.grid_sample(image, points, mode="bilinear", padding_mode="zeros", align_corners=False)
        point_weights = weights[:, :, :, level].transpose(1, 2).flatten(0, 1)[:, None]  # (B h, 1, Q, P)
        total = total + (sampled * point_weights).sum(-1)
    return torch.unflatten(total, 0, (batch, heads)).permute(0, 3, 1, 2)


class DeformableAttention(nn.Module):
    """Attention of each query to `points` predicted positions per level and head (arXiv:2010.04159, Eq. 3).

    Linear layers predict, from the query, the offsets of the points from the query's reference point and their weights,
    a softmax over levels and points. `ratio` is the number of value channels divided by the width (arXiv:2205.08534,
    section 3.4). At initialisation, each head samples in a different direction, at distances of 1, 2, … positions, with
    equal weights. The value and output layers are initialised Xavier uniform. Raises ValueError if the heads do not
    divide the channels of the values.
    """

    def __init__(self, width: int, heads: int, levels: int, points: int = 4, *, ratio: float = 1.0) -> None:
        super().__init__()
        inner = int(width * ratio)
        if inner < 1 or inner % heads:
            raise ValueError(f"the {inner} channels of the values are not divisible by {heads} heads")
        self.heads, self.levels, self.points = heads, levels, points
        self.value, self.out = nn.Linear(width, inner), nn.Linear(inner, width)
        self.offsets = nn.Linear(width, heads * levels * points * 2)
        self.weights = nn.Linear(width, heads * levels * points)
        for linear in (self.value, self.out):
            nn.init.xavier_uniform_(linear.weight)
            nn.init.zeros_(linear.bias)
        for linear in (self.offsets, self.weights):
            nn.init.zeros_(linear.weight)
            nn.init.zeros_(linear.bias)
        self.offsets.bias.data.copy_(initial_sampling_offsets(heads, levels, points).flatten())

    def forward(self, queries: Tensor, centres: Tensor, values: Tensor, grids: Sequence[tuple[int, int]]) -> Tensor:
        """Attend from queries (B, Q, D) to values (B, N, D) of all levels, whose (rows, columns) are `grids` ->
        (B, Q, D).

        `centres` are the queries' reference points, (Q, L, 2), or (Q, 1, 2) if they are equal for all levels. Predicted
        offsets are in positions of the level. Sampling is in float32 or float64.
        """
        sampling_dtype = torch.promote_types(queries.dtype, torch.float32)
        shape = (*queries.shape[:2], self.heads, self.levels, self.points)
        level_sizes = get_device_table(grid_sizes_xy, queries.device, tuple(map(tuple, grids)))  # (L, 2)
        offsets = self.offsets(queries).to(sampling_dtype).view(*shape, 2) / level_sizes[:, None]
        locations = centres[None, :, None, :, None] + offsets
        weights = self.weights(queries).to(sampling_dtype).view(*shape[:3], -1).softmax(-1).view(shape)
        projected = self.value(values).to(sampling_dtype).unflatten(-1, (self.heads, -1))
        return self.out(sample_levels(projected, grids, locations, weights).flatten(-2).to(queries.dtype))


def grid_sizes_xy(grids: tuple[tuple[int, int], ...]) -> Tensor:
    """Return columns and rows of each grid (rows, columns) as a tensor (L, 2) int64."""
    return torch.tensor([[columns, rows] for rows, columns in grids])


def initial_sampling_offsets(heads: int, levels: int, points: int) -> Tensor:
    """Compute the initial offsets of the points (h, L, P, 2), in positions of the level.

    The points of head k are in the direction of the angle 2 pi k / h. Point p = 1 .. P is where that ray leaves a
    square of half side p.
    """
    angles = torch.arange(heads) * (2 * math.pi / heads)
    rays = torch.stack([angles.cos(), angles.sin()], -1)
    rays = rays / rays.abs().amax(-1, keepdim=True)
    return rays[:, None, None] * torch.arange(1, points + 1)[:, None].expand(heads, levels, points, 1)


def patch_centres(grid: tuple[int, int], patch: tuple[int, int], device: torch.device | None = None) -> Tensor:
    """Return the centres (x, y), in pixels, of all positions of a grid, in raster order: (rows * columns, 2); each
    position is `patch` pixels in (height, width)."""
    axis_centres = [
        (torch.arange(length, device=device) + 0.5) * patch_length
        for length, patch_length in zip(grid, patch, strict=True)
    ]
    rows, columns = torch.meshgrid(*axis_centres, indexing="ij")
    return torch.stack([columns, rows], -1).flatten(0, 1)
