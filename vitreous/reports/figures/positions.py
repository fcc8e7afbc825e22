"""Figures of positions: similarity of position embeddings (arXiv:2010.11929, Figs. 7 centre and 10)."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from vitreous.inspection import positions as room
from vitreous.inspection.positions import MIN_COLOUR_RANGE, SimilarityStructure
from vitreous.reports.figures.drawing import choose_heads, count_from_one, format_dimensions, new_figure, tile_images
from vitreous.reports.figures.subject import FigureContext, FigureResult

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MAX_PANEL_COLUMNS = 4  # panels per row
STRUCTURE_COLUMNS = ["positions", "grid", "same_row", "same_column", "other", "contrast"]


def make_positions(scene: FigureContext) -> list[FigureResult]:
    """Draw the position embeddings added to tokens, also at --image-size, and the positions within attention."""
    model, grid = scene.model, scene.grid
    room.require_positions(model)
    native = model.config.grid
    own = room.get_position_embeddings(model, native)
    figures = [draw_embeddings(own, native, "positions", "Position embeddings", "")] if own else []
    if own and grid != native:
        note = ", computed by the formula for this size"
        if model.config.positions.kind in ("learned", "axes", "factorised"):
            note = f", resized by the model from {format_dimensions(native)}"
        title = f"Position embeddings at {format_dimensions(grid)}"
        figures.append(
            draw_embeddings(room.get_position_embeddings(model, grid), grid, "positions-resized", title, note)
        )
    if room.get_relative_position_tables(model):
        figures.append(draw_relative(scene))
    if room.get_relative_position_biases(model):
        figures.append(draw_biases(scene))
    if room.compute_rotary_kernel(model, grid) is not None:
        figures.append(draw_rotary(scene))
    return figures


def draw_embeddings(tables: dict[str, Tensor], grid: tuple[int, ...], name: str, title: str, note: str) -> FigureResult:
    """Draw tiles of cosine similarity of (*grid, D) tables, a panel for each layer that adds positions."""
    step, alone = room.choose_tile_stride(grid), len(tables) == 1
    across = min(MAX_PANEL_COLUMNS, len(tables))
    down = -(-len(tables) // across)
    side = 4.6 if alone else 8.0 / across
    height = down * (0.88 * side * grid[0] / grid[1] + 0.25) + 0.4
    figure, panels = new_figure(side * across + 0.6, height, down, across)
    similarities = {where: room.compute_position_cosines(table) for where, table in tables.items()}
    scores = {where: room.summarise_similarity(similar) for where, similar in similarities.items()}
    ends = compute_common_range(similarities.values())
    numbers: dict[str, np.ndarray] = {}
    for axes, (where, similar) in zip(panels.flat, similarities.items(), strict=False):
        some = similar[::step, ::step].contiguous().numpy()
        draw_similarity_tiles(axes, some, step, ends, labels=alone)
        axes.set_title("" if alone else count_from_one(where))
        numbers[f"similarity_{where.replace(' ', '_')}"] = some
    for axes in panels.flat[len(tables) :]:
        axes.set_axis_off()
    add_similarity_bar(figure, panels, ends, "cosine similarity")
    every = "" if step == 1 else f" Every {format_ordinal(step)} row and column of positions is shown."
    first, last = (describe_structure(list(scores.values())[place]) for place in (0, -1))
    caption = (
        f"Cosine similarity of each position of the {format_dimensions(grid)} grid (location of the tile) "
        f"to all others "
        f"(within the tile){note}; prefix tokens are excluded.{every} Colours span {format_colour_range(ends)}, the "
        f"range over pairs of "
        f"different positions. Structure: {first if alone else f'in the first block, {first}; in the last, {last}'}. "
        "As in arXiv:2010.11929, Figs. 7 and 10."
    )
    numbers |= {
        "structure": np.array([[*score, score.contrast] for score in scores.values()]),
        "grid": np.array(grid),
        "step": np.array(step),
    }
    rows = [[where, format_dimensions(grid), *format_structure(score)] for where, score in scores.items()]
    return FigureResult(name, title, caption=caption, figure=figure, numbers=numbers, table=(STRUCTURE_COLUMNS, rows))


def compute_common_range(similarities: Iterable[Tensor]) -> tuple[float, float]:
    """Return the ends of a common colour scale for several (N, N) or (h, w, h, w) similarity tables."""
    ranges = [room.similarity_range(similar) for similar in similarities]
    return min(low for low, _ in ranges), max(high for _, high in ranges)


def format_colour_range(ends: tuple[float, float]) -> str:
    """Format the ends of a colour scale with enough decimals to distinguish them."""
    return " to ".join(f"{end:.{3 if ends[1] - ends[0] < 0.1 else 2}f}" for end in ends)


def add_similarity_bar(figure: Figure, panels: Any, ends: tuple[float, float], label: str) -> None:
    """Add a colour bar with both ends labelled; its pointed end marks equal positions, which exceed the range."""
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import Normalize

    colours = ScalarMappable(Normalize(*ends), "viridis")
    drawn = figure.colorbar(colours, ax=panels, label=label, shrink=0.8, pad=0.02, extend="max")
    low, high = ends
    between = [tick for tick in drawn.get_ticks() if low + (high - low) / 12 < tick < high - (high - low) / 12]
    decimals = 3 if high - low < 0.1 else 2
    drawn.set_ticks([low, *between, high], labels=[f"{tick:.{decimals}f}" for tick in (low, *between, high)])


def draw_similarity_tiles(axes: Axes, similar: np.ndarray, step: int, ends: tuple[float, float], labels: bool) -> None:
    """Draw (rows, columns, h, w) similarities as tiles, with row and column labels; `ends` of the colour scale."""
    rows, columns, height, width = similar.shape
    gap = max(1, round(max(rows * height, columns * width) / 120))
    whole = tile_images(similar, gap)
    sharp = max(whole.shape) <= 300  # larger tables have more values than the figure has pixels
    axes.imshow(whole, cmap="viridis", vmin=ends[0], vmax=ends[1], interpolation="nearest" if sharp else "auto")
    axes.spines[:].set_visible(False)
    if not labels:
        axes.set_xticks([])
        axes.set_yticks([])
        return
    for set_ticks, count, length in ((axes.set_xticks, columns, width), (axes.set_yticks, rows, height)):
        places = [number * (length + gap) + (length - 1) / 2 for number in range(count)]
        set_ticks(places, [str(number * step + 1) for number in range(count)])
    axes.tick_params(length=0)
    axes.set(xlabel="column of the patch", ylabel="row of the patch")


def draw_relative(scene: FigureContext) -> FigureResult:
    """Draw the similarity of relative offsets, a panel for each table of the selected blocks: mean over heads, or each
    head of --heads."""
    from matplotlib.ticker import MaxNLocator

    layers = scene.layers(scene.model.config.depth)
    shown: list[tuple[str, Tensor, int]] = []
    for table in room.get_relative_position_tables(scene.model):
        if table.layer not in layers:
            continue
        unit = F.normalize(table.vectors, dim=-1)
        similar = unit @ unit.transpose(1, 2)  # (heads, 2 L - 1, 2 L - 1)
        name = f"block {table.layer}" + ("" if table.axis == "tokens" else f", {table.axis}")
        if scene.options.heads and table.axis == "tokens":
            heads = choose_heads(scene.options.heads, len(similar))
            shown += [(f"{name}, head {head}", similar[head], table.zero) for head in heads]
        else:
            shown.append((name, similar.mean(0), table.zero))
    across = min(MAX_PANEL_COLUMNS, len(shown))
    down = -(-len(shown) // across)
    figure, panels = new_figure(1.9 * across + 0.6, 2.0 * down + 0.3, down, across)
    ends = compute_common_range(similar for _, similar, _ in shown)
    for axes, (name, similar, zero) in zip(panels.flat, shown, strict=False):
        draw_offsets(axes, similar, zero + 0.5, zero + 0.5, ends)
        axes.set_title(count_from_one(name))
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_locator(MaxNLocator(5, integer=True))
    for axes in panels.flat[len(shown) :]:
        axes.set_axis_off()
    figure.supxlabel("offset of the query from the key (patches)", fontsize=9)
    figure.supylabel("offset", fontsize=9)
    add_similarity_bar(figure, panels, ends, "cosine similarity")
    kind = "offsets in rows and in columns, shared by the heads"
    if scene.model.config.attention.kind == "relative":
        mean = "" if scene.options.heads else ", mean over heads"
        kind = f"1-D offsets, of tokens numbered in raster order, prefix tokens first{mean}"
    caption = (
        f"Cosine similarity between the attention vectors of all {kind}, at the size of the trained "
        f"tables. Colours span {format_colour_range(ends)}, the range over pairs of different offsets. "
        "Zero vectors, as before training, have similarity 0. arXiv:2010.11929, D.4."
    )
    numbers = {f"similarity_{name.replace(', ', '_').replace(' ', '_')}": similar.numpy() for name, similar, _ in shown}
    return FigureResult("positions-relative", "Relative positions", caption, figure, numbers=numbers)


def draw_biases(scene: FigureContext) -> FigureResult:
    """Draw the position bias of windows by offset, a panel for each selected block: mean over heads, or each head of
    --heads."""
    from matplotlib.ticker import MaxNLocator

    layers = scene.layers(scene.model.config.depth)
    shown: list[tuple[str, Tensor]] = []
    for layer, bias in room.get_relative_position_biases(scene.model).items():
        if layer in layers and scene.options.heads:
            heads = choose_heads(scene.options.heads, len(bias))
            shown += [(f"block {layer}, head {head}", bias[head]) for head in heads]
        elif layer in layers:
            shown.append((f"block {layer}", bias.mean(0)))
    across = min(MAX_PANEL_COLUMNS, len(shown))
    down = -(-len(shown) // across)
    figure, panels = new_figure(1.9 * across + 0.6, 1.9 * down + 0.4, down, across)
    most = max(MIN_COLOUR_RANGE, *(float(bias.abs().max()) for _, bias in shown))
    for axes, (name, bias) in zip(panels.flat, shown, strict=False):
        rows, columns = (length / 2 for length in bias.shape)
        extent = (-columns, columns, rows, -rows)
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_locator(MaxNLocator(5, integer=True))
        image = axes.imshow(bias.numpy(), cmap="RdBu_r", vmin=-most, vmax=most, extent=extent, interpolation="nearest")
        axes.set_title(count_from_one(name))
    for axes in panels.flat[len(shown) :]:
        axes.set_axis_off()
    figure.supxlabel("columns from query to key", fontsize=9)
    figure.supylabel("rows from query to key", fontsize=9)
    figure.colorbar(image, ax=panels, label="bias of the logit", shrink=0.8, pad=0.02)
    mean = "" if scene.options.heads else ", mean over heads"
    caption = (
        f"Bias that window attention adds to the logit of a query and a key, by their offset"
        f"{mean}: red attracts, blue repels. Colours span {-most:.2f} to {most:.2f} in all panels. arXiv:2103.14030, "
        "Eq. 4."
    )
    numbers = {f"bias_{name.replace(', ', '_').replace(' ', '_')}": bias.numpy() for name, bias in shown}
    return FigureResult("positions-bias", "Relative position bias", caption, figure, numbers=numbers)


def draw_offsets(axes: Axes, similar: Tensor, down: float, across: float, ends: tuple[float, float]) -> None:
    """Draw (2 h - 1, 2 w - 1) similarities by offset, from -across to across and from -down to down."""
    (low, high), extent = ends, (-across, across, down, -down)
    axes.imshow(similar.numpy(), cmap="viridis", vmin=low, vmax=high, extent=extent, interpolation="nearest")


def draw_rotary(scene: FigureContext) -> FigureResult:
    """Draw the share of a logit that remains after rotation by relative position, by offset."""
    grid = height, width = scene.grid
    similar = room.compute_rotary_kernel(scene.model, grid)
    assert similar is not None
    places = torch.cartesian_prod(torch.arange(height), torch.arange(width))
    offsets = places[:, None] - places + torch.tensor([height - 1, width - 1])
    score = room.summarise_similarity(similar[offsets[..., 0], offsets[..., 1]].view(*grid, *grid))
    figure, ((axes,),) = new_figure(4.4, 3.2 * height / width + 0.5)
    others = similar.flatten()[torch.arange(similar.numel()) != similar.numel() // 2]  # offset 0 has similarity 1
    ends = (float(others.min()), float(others.max())) if len(others) else (-1.0, 1.0)
    draw_offsets(axes, similar, height - 0.5, width - 0.5, ends)
    add_similarity_bar(figure, axes, ends, "share of the logit")
    axes.set(xlabel="offset in columns (patches)", ylabel="offset in rows (patches)")
    caption = (
        "Rotary positions: logit of an equal query and key, with all channel pairs of "
        "equal length, by offset, as a share of the logit at offset 0; the same in every block and head. "
        f"Colours span {format_colour_range(ends)}. Structure on the {format_dimensions(grid)} grid: "
        f"{describe_structure(score)}. arXiv:2104.09864."
    )
    numbers = {"kernel": similar.numpy(), "structure": np.array([*score, score.contrast])}
    table = STRUCTURE_COLUMNS, [["rotary", format_dimensions(grid), *format_structure(score)]]
    return FigureResult(
        "positions-rotary", "Rotary positions", caption=caption, figure=figure, numbers=numbers, table=table
    )


def format_structure(score: SimilarityStructure) -> list[str]:
    """Format a structure for a table; empty if there are no such pairs."""
    return ["" if math.isnan(value) else f"{value:.4f}" for value in (*score, score.contrast)]


def describe_structure(score: SimilarityStructure) -> str:
    """Describe a structure in words."""
    row, column, other, contrast = (
        f"{value:.2f}" if not math.isnan(value) else "none" for value in (*score, score.contrast)
    )
    return f"mean similarity in one row {row}, in one column {column}, elsewhere {other}, contrast {contrast}"


def format_ordinal(number: int) -> str:
    """Format an ordinal: 2 -> `second`."""
    return {2: "second", 3: "third"}.get(number, f"{number}th")
