"""Similarity of a model's positions (arXiv:2010.11929, Figs. 7 and 10).

N places of a grid, D width, h heads, d channels of a head.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from vitreous.errors import UsageError
from vitreous.models.base import VisionModel
from vitreous.nn.relative import GridAttention, RelativeAttention, RotaryAttention
from vitreous.nn.windows import WindowAttention

MAX_TILES_PER_SIDE = 14  # along a side of what is shown of a grid
MIN_COLOUR_RANGE = 1e-3  # the least range of a colour scale: below it, differences are those of rounding


class SimilarityStructure(NamedTuple):
    """Mean similarity of two different places of one row, of one column, and of neither; NaN without such pairs."""

    row: float
    column: float
    other: float

    @property
    def contrast(self) -> float:
        """Mean of row and column, less `other`."""
        return (self.row + self.column) / 2 - self.other


class RelativePositionTable(NamedTuple):
    """Vectors of the offsets from 1 - L to L - 1 that attention adds, `vectors` (heads, 2 L - 1, d).

    `layer` from 0; `axis` is `tokens`, `rows` or `columns`; one head where all share them.
    """

    layer: int
    axis: str
    vectors: Tensor

    @property
    def zero(self) -> int:
        """Index of offset 0, L - 1."""
        return self.vectors.shape[1] // 2


def get_position_embeddings(model: VisionModel[Any], grid: tuple[int, ...] | None = None) -> dict[str, Tensor]:
    """Return the positions added to patch tokens, (*grid, D) float32 by where: `input`, or `block 0`, `block 1`, ...

    Without slots of prefix tokens; another `grid` than the model's own is read as the model would. Empty for a model
    that adds none.
    """
    grid = grid or model.config.grid
    positions: dict[str, Any] = dict(model.position_tables())
    with torch.no_grad():
        return {name: position.read(grid).detach().float().cpu() for name, position in positions.items()}


def compute_position_cosines(table: Tensor, step: int = 1) -> Tensor:
    """(*grid, D) -> (*some, *grid): cosine similarity of every place with all, or of every `step`-th along each axis.

    The loop it replaces: out[i, j, k, l] = cos(table[step i, step j], table[k, l])
    """
    unit = F.normalize(table, dim=-1)
    some = unit[tuple(slice(None, None, step) for _ in table.shape[:-1])]
    return (some.flatten(0, -2) @ unit.flatten(0, -2).T).view(*some.shape[:-1], *table.shape[:-1])


def similarity_range(similar: Tensor) -> tuple[float, float]:
    """(N, N) or (h, w, h, w) similarity -> least and greatest of two different positions, for a colour scale.

    Ends nearer than `MIN_COLOUR_RANGE` are moved apart to it; -1 and 1 where there is one position only.
    """
    count = math.isqrt(similar.numel())
    if count < 2:
        return -1.0, 1.0
    pairs = similar.reshape(count, count)[~torch.eye(count, dtype=torch.bool)]
    low, high = float(pairs.min()), float(pairs.max())
    spare = max(0.0, MIN_COLOUR_RANGE - (high - low)) / 2
    return low - spare, high + spare


def choose_tile_stride(grid: tuple[int, ...], most: int = MAX_TILES_PER_SIDE) -> int:
    """Return the step that leaves at most `most` rows and columns of a grid."""
    return -(-max(grid) // most)


def summarise_similarity(similar: Tensor) -> SimilarityStructure:
    """(h, w, h, w) similarity -> its means within rows, columns and elsewhere."""
    height, width = similar.shape[:2]
    rows, columns = torch.arange(height * width) // width, torch.arange(height * width) % width
    same_row, same_column = rows[:, None] == rows, columns[:, None] == columns
    flat = similar.reshape(height * width, -1)
    kinds = (same_row & ~same_column, same_column & ~same_row, ~same_row & ~same_column)
    return SimilarityStructure(*(float(flat[pairs].mean()) for pairs in kinds))


def get_relative_position_tables(model: VisionModel[Any]) -> list[RelativePositionTable]:
    """Return the tables of relative positions from the first block on: by head, or by axis and shared by the heads."""
    relative: list[RelativePositionTable] = []
    for layer, part in model.attention_modules():
        if isinstance(part, RelativeAttention):
            relative.append(RelativePositionTable(layer, "tokens", part.table.detach().float().cpu().transpose(0, 1)))
        elif isinstance(part, GridAttention):
            relative.append(RelativePositionTable(layer, "rows", part.rows.detach().float().cpu()[None]))
            relative.append(RelativePositionTable(layer, "columns", part.columns.detach().float().cpu()[None]))
    return relative


def get_relative_position_biases(model: VisionModel[Any]) -> dict[int, Tensor]:
    """Return by block, from 0, (h, 2 m - 1, 2 n - 1) float32: what each head adds to a logit, by the offset of the key
    from the query in rows and columns. Empty for models without windows of relative positions."""
    by_layer: dict[int, Tensor] = {}
    for layer, part in model.attention_modules():
        if isinstance(part, WindowAttention):
            by_layer[layer] = part.position.offsets().detach().float().cpu().flip(0, 1).permute(2, 0, 1)
    return by_layer


def compute_rotary_kernel(model: VisionModel[Any], grid: tuple[int, ...] | None = None) -> Tensor | None:
    """Return the (2 h - 1, 2 w - 1) kernel of rotary positions, by offset in rows and columns; None without them.

    The mean over pairs of channels of the cosine of the difference of their angles: the logit of a query and a key that
    would be equal at one place, all pairs of one length, as a share of that at offset 0. The same in every block and
    head.
    """
    turned = next((part for _, part in model.attention_modules() if isinstance(part, RotaryAttention)), None)
    grid = grid or model.config.grid
    if turned is None or grid is None:
        return None
    # of offsets from 0 on; a cosine is even
    ahead = turned.angles(grid, model.config.width // turned.heads).cos().mean(-1)
    return ahead[torch.meshgrid(*(torch.arange(1 - length, length).abs() for length in grid), indexing="ij")].float()


def require_positions(model: VisionModel[Any]) -> None:
    """Raise UsageError for a model that knows nothing of places but what the image's own tokens tell."""
    c = model.config
    if not c.has_attention:
        hint = "filters, features, nearest, similarity and cost work for it"
        raise UsageError(f"{c.name()} has no positions", hint)
    if c.positions.kind == "none" and c.attention.kind == "plain":
        if c.on_grid:
            problem = "the model has no positions but the rows and columns that its blocks look along"
            raise UsageError(problem, "distance works for it")
        hint = "filters, distance, features and the others work for it"
        raise UsageError("the model has no positions: its patches are a set", hint)
