"""Figures of positions: similarity of position embeddings (arXiv:2010.11929, Figs. 7 centre and 10)."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from vitreous.inspection import positions as position_analysis
from vitreous.inspection.positions import MIN_COLOUR_RANGE, SimilarityStructure
from vitreous.reports.figures.drawing import choose_heads, count_from_one, format_dimensions, new_figure, tile_images
from vitreous.reports.figures.subject import FigureContext, FigureResult

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MAX_PANEL_COLUMNS = 4  # most panels per row
STRUCTURE_COLUMNS = ["positions", "grid", "same_row", "same_column", "other", "contrast"]


def make_positions(context: FigureContext) -> list[FigureResult]:
    """Draw all positions of a model: embeddings added to tokens, also resized to --image-size; relative vectors and
    biases of attention; rotary positions."""
    model, grid = context.model, context.grid
    position_analysis.require_positions(model)
    native = model.config.grid
    embeddings = position_analysis.get_position_embeddings(model, native)
    figures = [draw_embeddings(embeddings, native, "positions", "Position embeddings", "")] if embeddings else []
    if embeddings and grid != native:
        note = ", computed by the formula for this size"
        if model.config.positions.kind in ("learned", "axes", "factorised"):
            note = f", resized by the model from {format_dimensions(native)}"
        title = f"Position embeddings at {format_dimensions(grid)}"
        figures.append(
            draw_embeddings(
                position_analysis.get_position_embeddings(model, grid), grid, "positions-resized", title, note
            )
        )
    if position_analysis.get_relative_position_tables(model):
        figures.append(draw_relative(context))
    if position_analysis.get_relative_position_biases(model):
        figures.append(draw_biases(context))
    if position_analysis.compute_rotary_kernel(model, grid) is not None:
        figures.append(draw_rotary(context))
    return figures


def draw_embeddings(tables: dict[str, Tensor], grid: tuple[int, ...], name: str, title: str, note: str) -> FigureResult:
    """Draw the cosine similarity of position embeddings as tiles, with a panel for each layer that adds positions.

    `tables` maps the name of the layer to its embeddings (*grid, D); `note` is added to the caption.
    """
    stride, is_single = position_analysis.choose_tile_stride(grid), len(tables) == 1
    num_columns = min(MAX_PANEL_COLUMNS, len(tables))
    num_rows = -(-len(tables) // num_columns)
    panel_width = 4.6 if is_single else 8.0 / num_columns
    height = num_rows * (0.88 * panel_width * grid[0] / grid[1] + 0.25) + 0.4
    figure, panels = new_figure(panel_width * num_columns + 0.6, height, num_rows, num_columns)
    similarities = {location: position_analysis.compute_position_cosines(table) for location, table in tables.items()}
    scores = {
        location: position_analysis.summarise_similarity(similarity) for location, similarity in similarities.items()
    }
    colour_range = compute_common_range(similarities.values())
    arrays: dict[str, np.ndarray] = {}
    for axes, (location, similarity) in zip(panels.flat, similarities.items(), strict=False):
        shown = similarity[::stride, ::stride].contiguous().numpy()
        draw_similarity_tiles(axes, shown, stride, colour_range, show_labels=is_single)
        axes.set_title("" if is_single else count_from_one(location))
        arrays[f"similarity_{location.replace(' ', '_')}"] = shown
    for axes in panels.flat[len(tables) :]:
        axes.set_axis_off()
    add_similarity_bar(figure, panels, colour_range, "cosine similarity")
    stride_note = "" if stride == 1 else f" Every {format_ordinal(stride)} row and column of positions is shown."
    first_structure, last_structure = (describe_structure(list(scores.values())[index]) for index in (0, -1))
    caption = (
        f"Cosine similarity of each position of the {format_dimensions(grid)} grid (location of the tile) "
        f"to all others "
        f"(within the tile){note}; prefix tokens are excluded.{stride_note} Colours span "
        f"{format_colour_range(colour_range)}, the "
        f"range over pairs of "
        "different positions. Structure: "
        f"{first_structure if is_single else f'in the first block, {first_structure}; in the last, {last_structure}'}. "
        "As in arXiv:2010.11929, Figs. 7 and 10."
    )
    arrays |= {
        "structure": np.array([[*score, score.contrast] for score in scores.values()]),
        "grid": np.array(grid),
        "step": np.array(stride),
    }
    rows = [[location, format_dimensions(grid), *format_structure(score)] for location, score in scores.items()]
    return FigureResult(name, title, caption=caption, figure=figure, arrays=arrays, table=(STRUCTURE_COLUMNS, rows))


def compute_common_range(similarities: Iterable[Tensor]) -> tuple[float, float]:
    """Return the lowest and the highest value of a colour scale shared by several tables of similarities, (N, N) or
    (h, w, h, w)."""
    ranges = [position_analysis.similarity_range(similarity) for similarity in similarities]
    return min(low for low, _ in ranges), max(high for _, high in ranges)


def format_colour_range(colour_range: tuple[float, float]) -> str:
    """Format the ends of a colour scale with enough decimals to distinguish them."""
    return " to ".join(f"{bound:.{3 if colour_range[1] - colour_range[0] < 0.1 else 2}f}" for bound in colour_range)


def add_similarity_bar(figure: Figure, panels: Any, colour_range: tuple[float, float], label: str) -> None:
    """Add a colour bar with both ends labelled. It has a pointed upper end, because the similarity of a position to
    itself, 1, is above the range."""
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import Normalize

    colours = ScalarMappable(Normalize(*colour_range), "viridis")
    colour_bar = figure.colorbar(colours, ax=panels, label=label, shrink=0.8, pad=0.02, extend="max")
    low, high = colour_range
    inner_ticks = [tick for tick in colour_bar.get_ticks() if low + (high - low) / 12 < tick < high - (high - low) / 12]
    decimals = 3 if high - low < 0.1 else 2
    colour_bar.set_ticks(
        [low, *inner_ticks, high], labels=[f"{tick:.{decimals}f}" for tick in (low, *inner_ticks, high)]
    )


def draw_similarity_tiles(
    axes: Axes, similarity: np.ndarray, step: int, colour_range: tuple[float, float], show_labels: bool
) -> None:
    """Draw similarities (rows, columns, h, w) as tiles. `step` is the stride of the shown rows and columns; with
    `show_labels`, they are numbered."""
    rows, columns, height, width = similarity.shape
    gap = max(1, round(max(rows * height, columns * width) / 120))
    tiled = tile_images(similarity, gap)
    sharp = max(tiled.shape) <= 300  # larger tables have more values than the figure has pixels
    axes.imshow(
        tiled, cmap="viridis", vmin=colour_range[0], vmax=colour_range[1], interpolation="nearest" if sharp else "auto"
    )
    axes.spines[:].set_visible(False)
    if not show_labels:
        axes.set_xticks([])
        axes.set_yticks([])
        return
    for set_ticks, count, length in ((axes.set_xticks, columns, width), (axes.set_yticks, rows, height)):
        tick_positions = [index * (length + gap) + (length - 1) / 2 for index in range(count)]
        set_ticks(tick_positions, [str(index * step + 1) for index in range(count)])
    axes.tick_params(length=0)
    axes.set(xlabel="column of the patch", ylabel="row of the patch")


def draw_relative(context: FigureContext) -> FigureResult:
    """Draw the cosine similarity between the attention vectors of relative offsets.

    There is a panel for each table of the selected blocks: the mean over heads, or each head of --heads.
    """
    from matplotlib.ticker import MaxNLocator

    layers = context.resolve_layers(context.model.config.depth)
    panel_data: list[tuple[str, Tensor, int]] = []
    for table in position_analysis.get_relative_position_tables(context.model):
        if table.layer not in layers:
            continue
        unit = F.normalize(table.vectors, dim=-1)
        similarity = unit @ unit.transpose(1, 2)  # (heads, 2 L - 1, 2 L - 1)
        name = f"block {table.layer}" + ("" if table.axis == "tokens" else f", {table.axis}")
        if context.options.heads and table.axis == "tokens":
            heads = choose_heads(context.options.heads, len(similarity))
            panel_data += [(f"{name}, head {head}", similarity[head], table.zero_index) for head in heads]
        else:
            panel_data.append((name, similarity.mean(0), table.zero_index))
    num_columns = min(MAX_PANEL_COLUMNS, len(panel_data))
    num_rows = -(-len(panel_data) // num_columns)
    figure, panels = new_figure(1.9 * num_columns + 0.6, 2.0 * num_rows + 0.3, num_rows, num_columns)
    colour_range = compute_common_range(similarity for _, similarity, _ in panel_data)
    for axes, (name, similarity, zero) in zip(panels.flat, panel_data, strict=False):
        draw_offsets(axes, similarity, zero + 0.5, zero + 0.5, colour_range)
        axes.set_title(count_from_one(name))
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_locator(MaxNLocator(5, integer=True))
    for axes in panels.flat[len(panel_data) :]:
        axes.set_axis_off()
    figure.supxlabel("offset of the query from the key (patches)", fontsize=9)
    figure.supylabel("offset", fontsize=9)
    add_similarity_bar(figure, panels, colour_range, "cosine similarity")
    offsets_text = "offsets in rows and in columns, shared by the heads"
    if context.model.config.attention.kind == "relative":
        mean = "" if context.options.heads else ", mean over heads"
        offsets_text = f"1-D offsets, of tokens numbered in raster order, prefix tokens first{mean}"
    caption = (
        f"Cosine similarity between the attention vectors of all {offsets_text}, at the size of the trained "
        f"tables. Colours span {format_colour_range(colour_range)}, the range over pairs of different offsets. "
        "Zero vectors, as before training, have similarity 0. arXiv:2010.11929, D.4."
    )
    arrays = {
        f"similarity_{name.replace(', ', '_').replace(' ', '_')}": similarity.numpy()
        for name, similarity, _ in panel_data
    }
    return FigureResult("positions-relative", "Relative positions", caption, figure, arrays=arrays)


def draw_biases(context: FigureContext) -> FigureResult:
    """Draw the position bias of window attention by offset.

    There is a panel for each selected block: the mean over heads, or each head of --heads.
    """
    from matplotlib.ticker import MaxNLocator

    layers = context.resolve_layers(context.model.config.depth)
    panel_data: list[tuple[str, Tensor]] = []
    for layer, bias in position_analysis.get_relative_position_biases(context.model).items():
        if layer in layers and context.options.heads:
            heads = choose_heads(context.options.heads, len(bias))
            panel_data += [(f"block {layer}, head {head}", bias[head]) for head in heads]
        elif layer in layers:
            panel_data.append((f"block {layer}", bias.mean(0)))
    num_columns = min(MAX_PANEL_COLUMNS, len(panel_data))
    num_rows = -(-len(panel_data) // num_columns)
    figure, panels = new_figure(1.9 * num_columns + 0.6, 1.9 * num_rows + 0.4, num_rows, num_columns)
    max_bias = max(MIN_COLOUR_RANGE, *(float(bias.abs().max()) for _, bias in panel_data))
    for axes, (name, bias) in zip(panels.flat, panel_data, strict=False):
        rows, columns = (length / 2 for length in bias.shape)
        extent = (-columns, columns, rows, -rows)
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_locator(MaxNLocator(5, integer=True))
        image = axes.imshow(
            bias.numpy(), cmap="RdBu_r", vmin=-max_bias, vmax=max_bias, extent=extent, interpolation="nearest"
        )
        axes.set_title(count_from_one(name))
    for axes in panels.flat[len(panel_data) :]:
        axes.set_axis_off()
    figure.supxlabel("columns from query to key", fontsize=9)
    figure.supylabel("rows from query to key", fontsize=9)
    figure.colorbar(image, ax=panels, label="bias of the logit", shrink=0.8, pad=0.02)
    mean = "" if context.options.heads else ", mean over heads"
    caption = (
        f"Bias that window attention adds to the logit of a query and a key, by their offset"
        f"{mean}: red attracts, blue repels. Colours span {-max_bias:.2f} to {max_bias:.2f} in all panels. "
        "arXiv:2103.14030, "
        "Eq. 4."
    )
    arrays = {f"bias_{name.replace(', ', '_').replace(' ', '_')}": bias.numpy() for name, bias in panel_data}
    return FigureResult("positions-bias", "Relative position bias", caption, figure, arrays=arrays)


def draw_offsets(axes: Axes, similarity: Tensor, down: float, across: float, colour_range: tuple[float, float]) -> None:
    """Draw similarities by offset, (2 h - 1, 2 w - 1): rows from -`down` to `down`, columns from -`across` to
    `across`."""
    (low, high), extent = colour_range, (-across, across, down, -down)
    axes.imshow(similarity.numpy(), cmap="viridis", vmin=low, vmax=high, extent=extent, interpolation="nearest")


def draw_rotary(context: FigureContext) -> FigureResult:
    """Draw, for each offset of query and key, the share of the logit that remains after rotary position encoding."""
    grid = height, width = context.grid
    kernel = position_analysis.compute_rotary_kernel(context.model, grid)
    assert kernel is not None
    positions = torch.cartesian_prod(torch.arange(height), torch.arange(width))
    offsets = positions[:, None] - positions + torch.tensor([height - 1, width - 1])
    score = position_analysis.summarise_similarity(kernel[offsets[..., 0], offsets[..., 1]].view(*grid, *grid))
    figure, ((axes,),) = new_figure(4.4, 3.2 * height / width + 0.5)
    nonzero_offsets = kernel.flatten()[torch.arange(kernel.numel()) != kernel.numel() // 2]  # offset 0 has similarity 1
    colour_range = (float(nonzero_offsets.min()), float(nonzero_offsets.max())) if len(nonzero_offsets) else (-1.0, 1.0)
    draw_offsets(axes, kernel, height - 0.5, width - 0.5, colour_range)
    add_similarity_bar(figure, axes, colour_range, "share of the logit")
    axes.set(xlabel="offset in columns (patches)", ylabel="offset in rows (patches)")
    caption = (
        "Rotary positions: logit of an equal query and key, with all channel pairs of "
        "equal length, by offset, as a share of the logit at offset 0; the same in every block and head. "
        f"Colours span {format_colour_range(colour_range)}. Structure on the {format_dimensions(grid)} grid: "
        f"{describe_structure(score)}. arXiv:2104.09864."
    )
    arrays = {"kernel": kernel.numpy(), "structure": np.array([*score, score.contrast])}
    table = STRUCTURE_COLUMNS, [["rotary", format_dimensions(grid), *format_structure(score)]]
    return FigureResult(
        "positions-rotary", "Rotary positions", caption=caption, figure=figure, arrays=arrays, table=table
    )


def format_structure(score: SimilarityStructure) -> list[str]:
    """Format mean similarities in a row, in a column and elsewhere, and their contrast, as table cells.

    A cell is empty if there are no such pairs of positions.
    """
    return ["" if math.isnan(value) else f"{value:.4f}" for value in (*score, score.contrast)]


def describe_structure(score: SimilarityStructure) -> str:
    """Describe mean similarities in a row, in a column and elsewhere, and their contrast, for a caption."""
    row, column, elsewhere, contrast = (
        f"{value:.2f}" if not math.isnan(value) else "none" for value in (*score, score.contrast)
    )
    return f"mean similarity in one row {row}, in one column {column}, elsewhere {elsewhere}, contrast {contrast}"


def format_ordinal(number: int) -> str:
    """Format an ordinal number: 2 -> `second`, 4 -> `4th`."""
    return {2: "second", 3: "third"}.get(number, f"{number}th")
