"""Similarity of a model's position embeddings (arXiv:2010.11929, Figs. 7 and 10).

Shapes: N positions of a grid (h, w), D width, d channels of a head; L positions along an axis, (m, n) a window.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from vitreous.errors import UsageError
from vitreous.models.base import VisionModel
from vitreous.nn.relative import GridAttention, RelativeAttention
from vitreous.nn.rotary import RotaryAttention
from vitreous.nn.windows import WindowAttention

MAX_TILES_PER_SIDE = 14  # maximum positions shown along a side of a grid
MIN_COLOUR_RANGE = 1e-3  # minimum range of a colour scale: smaller differences are rounding errors


class SimilarityStructure(NamedTuple):
    """Mean similarity of two different positions in the same row, in the same column, and in neither; NaN if there are
    no such pairs."""

    row: float
    column: float
    neither: float

    @property
    def contrast(self) -> float:
        """Return the mean of `row` and `column`, minus `neither`."""
        return (self.row + self.column) / 2 - self.neither


class RelativePositionTable(NamedTuple):
    """Relative position vectors (heads, 2 L - 1, d) for offsets from 1 - L to L - 1; one head if all heads share them.

    `layer` is the block, from 0; `axis` is `tokens`, `rows` or `columns`.
    """

    layer: int
    axis: str
    vectors: Tensor

    @property
    def zero_index(self) -> int:
        """Return L - 1, the index of offset 0."""
        return self.vectors.shape[1] // 2


def get_position_embeddings(model: VisionModel[Any], grid: tuple[int, ...] | None = None) -> dict[str, Tensor]:
    """Return the position embeddings of patch tokens (*grid, D) float32, by location: `input`, `block 0`, `block 1`,
    ...

    If `grid` is not the model's, they are resized as the model does. The result is empty for a model without position
    embeddings.
    """
    grid = grid or model.config.grid
    positions: dict[str, Any] = dict(model.position_tables())
    with torch.no_grad():
        return {name: position.read(grid).detach().float().cpu() for name, position in positions.items()}


def compute_position_cosines(table: Tensor, step: int = 1) -> Tensor:
    """Compute the cosine similarity of every position, or every `step`-th, with all positions: (*grid, D) ->
    (*selected, *grid).

    Equivalent loop: out[i, j, k, l] = cos(table[step i, step j], table[k, l])
    """
    unit_vectors = F.normalize(table, dim=-1)
    selected = unit_vectors[tuple(slice(None, None, step) for _ in table.shape[:-1])]
    return (selected.flatten(0, -2) @ unit_vectors.flatten(0, -2).T).view(*selected.shape[:-1], *table.shape[:-1])


def similarity_range(similarity: Tensor) -> tuple[float, float]:
    """Return minimum and maximum over pairs of different positions, for a colour scale, from a similarity (N, N) or
    (h, w, h, w).

    A range below `MIN_COLOUR_RANGE` is widened to it; it is -1 to 1 for a single position.
    """
    count = math.isqrt(similarity.numel())
    if count < 2:
        return -1.0, 1.0
    pairs = similarity.reshape(count, count)[~torch.eye(count, dtype=torch.bool)]
    low, high = float(pairs.min()), float(pairs.max())
    padding = max(0.0, MIN_COLOUR_RANGE - (high - low)) / 2
    return low - padding, high + padding


def choose_tile_stride(grid: tuple[int, ...], max_tiles: int = MAX_TILES_PER_SIDE) -> int:
    """Return the stride at which at most `max_tiles` rows and columns of a grid are shown."""
    return -(-max(grid) // max_tiles)


def summarise_similarity(similarity: Tensor) -> SimilarityStructure:
    """Average a similarity (h, w, h, w) over pairs of positions in the same row, in the same column, and in neither."""
    height, width = similarity.shape[:2]
    rows, columns = torch.arange(height * width) // width, torch.arange(height * width) % width
    same_row, same_column = rows[:, None] == rows, columns[:, None] == columns
    flat = similarity.reshape(height * width, -1)
    pair_masks = (same_row & ~same_column, same_column & ~same_row, ~same_row & ~same_column)
    return SimilarityStructure(*(float(flat[pairs].mean()) for pairs in pair_masks))


def get_relative_position_tables(model: VisionModel[Any]) -> list[RelativePositionTable]:
    """Return the tables of relative positions, from the first block on: one per block for all axes, or one per axis and
    shared by the heads."""
    tables: list[RelativePositionTable] = []
    for layer, attention in model.attention_modules():
        if isinstance(attention, RelativeAttention):
            tables.append(
                RelativePositionTable(layer, "tokens", attention.table.detach().float().cpu().transpose(0, 1))
            )
        elif isinstance(attention, GridAttention):
            tables.append(RelativePositionTable(layer, "rows", attention.rows.detach().float().cpu()[None]))
            tables.append(RelativePositionTable(layer, "columns", attention.columns.detach().float().cpu()[None]))
    return tables


def get_relative_position_biases(model: VisionModel[Any]) -> dict[int, Tensor]:
    """Return the relative position biases of each block, by index from 0: (h, 2 m - 1, 2 n - 1) float32, h heads.

    Offsets are key minus query, in rows and columns; modules store query minus key. The result is empty for
    models without biases.
    """
    by_layer: dict[int, Tensor] = {}
    for layer, attention in model.attention_modules():
        if isinstance(attention, WindowAttention):
            by_layer[layer] = (
                attention.position.compute_offset_biases().detach().float().cpu().flip(0, 1).permute(2, 0, 1)
            )
    return by_layer


def compute_rotary_kernel(model: VisionModel[Any], grid: tuple[int, ...] | None = None) -> Tensor | None:
    """Compute the kernel of rotary positions (2 h - 1, 2 w - 1), by offset in rows and columns; None for models without
    them.

    It is the mean over channel pairs of the cosine of their angle difference: the logit of a query and a key that are
    equal at the same position, with channel pairs of equal length, relative to offset 0. It is equal in all blocks and
    heads.
    """
    rotary = next(
        (attention for _, attention in model.attention_modules() if isinstance(attention, RotaryAttention)), None
    )
    grid = grid or model.config.grid
    if rotary is None or grid is None:
        return None
    # only for offsets from 0 on, because a cosine is even
    cosines = rotary.angles(grid, model.config.width // rotary.heads).cos().mean(-1)
    return cosines[torch.meshgrid(*(torch.arange(1 - length, length).abs() for length in grid), indexing="ij")].float()


def require_positions(model: VisionModel[Any]) -> None:
    """Raise UsageError for a model without position embeddings, biases or rotary positions."""
    config = model.config
    if not config.has_attention:
        hint = "use filters, features, nearest, similarity or cost"
        raise UsageError(f"{config.name()} has no position embeddings", hint)
    if config.positions.kind == "none" and config.attention.kind == "plain":
        if config.on_grid:
            problem = "the model has no position embeddings: only its axial attention distinguishes rows and columns"
            raise UsageError(problem, "use distance")
        hint = "use filters, distance, features or another figure"
        raise UsageError("the model has no position embeddings: its patches are a set without order", hint)
