"""The figures of positions: how alike they are (arXiv:2010.11929, Figs. 7 centre and 10)."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from vitreous.inspection.positions import (
    Structure,
    embeddings,
    has_positions,
    kernel,
    similarity,
    similarity_range,
    stride,
    structure,
    tables,
)
from vitreous.reports.figures.overlay import chosen
from vitreous.reports.figures.style import count_from_one, mosaic, styled, times
from vitreous.reports.scene import FigureResult, Scene

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

ACROSS = 4  # panels in a row
HEAD = ["positions", "grid", "same_row", "same_column", "other", "contrast"]


@styled
def make(scene: Scene) -> list[FigureResult]:
    """A figure of what is added to tokens, one of it at --image-size, and one of what attention itself knows of
    places."""
    model = scene.model
    has_positions(model)
    native = model.config.grid
    grid = tuple(i // p for i, p in zip(scene.preprocess.image, model.config.patch, strict=True))
    own = embeddings(model, native)
    figures = [added(own, native, "positions", "Position embeddings", "")] if own else []
    if own and grid != native:
        learned = model.config.position in ("learned", "axes")  # type: ignore[union-attr]
        note = (
            f", read from those of {times(native)} as the model resizes them"
            if learned
            else ", of the same formula as at any other"
        )
        figures.append(
            added(embeddings(model, grid), grid, "positions-resized", f"Position embeddings at {times(grid)}", note)
        )
    if tables(model):
        figures.append(relative(scene))
    if kernel(model, grid) is not None:
        figures.append(rotary(scene, grid))
    return figures


def added(tables: dict[str, Tensor], grid: tuple[int, ...], name: str, title: str, note: str) -> FigureResult:
    """Tiles of cosine similarity, a panel for each place where positions are added."""
    from matplotlib.figure import Figure

    step = stride(grid)
    across = min(ACROSS, len(tables))
    down = -(-len(tables) // across)
    side = 4.6 if len(tables) == 1 else 8.0 / across
    figure = Figure(
        figsize=(side * across + 0.6, down * (0.88 * side * grid[0] / grid[1] + 0.25) + 0.4), layout="constrained"
    )
    panels = figure.subplots(down, across, squeeze=False)
    numbers, rows, scores = {}, [], []
    similarities = {where: similarity(table) for where, table in tables.items()}
    ends = common_range(similarities.values())
    for axes, (where, similar) in zip(panels.flat, similarities.items(), strict=False):
        score = structure(similar)
        some = similar[::step, ::step].contiguous()
        tiles(axes, some.numpy(), step, ends, labels=len(tables) == 1)
        axes.set_title(count_from_one(where) if len(tables) > 1 else "")
        scores.append(score)
        rows.append([where, times(grid), *format_structure(score)])
        numbers[f"similarity_{where.replace(' ', '_')}"] = some.numpy()
    for axes in list(panels.flat)[len(tables) :]:
        axes.set_axis_off()
    bar(figure, panels, ends, "cosine similarity")
    every = "" if step == 1 else f" Every {ordinal(step)} row and column of positions has a tile."
    words = (
        summed(scores[0])
        if len(tables) == 1
        else f"in the first block, {summed(scores[0])}; in the last, {summed(scores[-1])}"
    )
    caption = (
        f"Cosine similarity of each position of the {times(grid)} grid (its place among the tiles) with all others "
        "(within the tile)"
        f"{note}; prefix tokens left out.{every} Colours span {spanned(ends)}, "
        f"the range of two different positions. Structure: {words}. As in arXiv:2010.11929, Figs. 7 and 10."
    )
    numbers |= {
        "structure": np.array([[*score, score.contrast] for score in scores]),
        "grid": np.array(grid),
        "step": np.array(step),
    }
    return FigureResult(name, title, caption, figure, numbers, (HEAD, rows))


def common_range(similarities: Iterable[Tensor]) -> tuple[float, float]:
    """The ends of one colour scale for several tables of similarity."""
    ranges = [similarity_range(similar) for similar in similarities]
    return min(low for low, _ in ranges), max(high for _, high in ranges)


def spanned(ends: tuple[float, float]) -> str:
    """The ends of a colour scale in words, with the decimals that tell them apart."""
    return " to ".join(f"{end:.{3 if ends[1] - ends[0] < 0.1 else 2}f}" for end in ends)


def bar(figure: Figure, panels: Any, ends: tuple[float, float], label: str) -> None:
    """A colour bar from the one end to the other, both named; its point says that what is equal lies above."""
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import Normalize

    drawn = figure.colorbar(
        ScalarMappable(Normalize(*ends), "viridis"), ax=panels, label=label, shrink=0.8, pad=0.02, extend="max"
    )
    low, high = ends
    between = [tick for tick in drawn.get_ticks() if low + (high - low) / 12 < tick < high - (high - low) / 12]
    decimals = 3 if high - low < 0.1 else 2
    drawn.set_ticks([low, *between, high], labels=[f"{tick:.{decimals}f}" for tick in (low, *between, high)])


def tiles(axes: Axes, similar: np.ndarray, step: int, ends: tuple[float, float], labels: bool) -> None:
    """(rows, columns, h, w) as tiles, named by their row and column from 1; `ends` are those of the colours."""
    rows, columns, height, width = similar.shape
    gap = max(1, round(max(rows * height, columns * width) / 120))
    whole = mosaic(similar, gap)
    sharp = max(whole.shape) <= 300  # larger ones have more numbers than the figure has dots
    axes.imshow(whole, cmap="viridis", vmin=ends[0], vmax=ends[1], interpolation="nearest" if sharp else "auto")
    axes.spines[:].set_visible(False)
    if not labels:
        axes.set_xticks([])
        axes.set_yticks([])
        return
    axes.set_xticks(
        [j * (width + gap) + (width - 1) / 2 for j in range(columns)], [str(j * step + 1) for j in range(columns)]
    )
    axes.set_yticks(
        [i * (height + gap) + (height - 1) / 2 for i in range(rows)], [str(i * step + 1) for i in range(rows)]
    )
    axes.tick_params(length=0)
    axes.set(xlabel="column of the patch", ylabel="row of the patch")


def relative(scene: Scene) -> FigureResult:
    """Similarity of offsets, a panel for each table of the blocks asked for: the mean over heads, or the heads asked
    for."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    layers = scene.layers(scene.model.config.depth)  # type: ignore[union-attr]
    shown: list[tuple[str, Tensor, int]] = []
    for table in tables(scene.model):
        if table.layer not in layers:
            continue
        unit = F.normalize(table.vectors, dim=-1)
        similar = unit @ unit.transpose(1, 2)  # (heads, 2 L - 1, 2 L - 1)
        name = f"block {table.layer}" + ("" if table.axis == "tokens" else f", {table.axis}")
        heads = chosen(scene.options.heads, len(similar)) if scene.options.heads and table.axis == "tokens" else []
        shown += [(f"{name}, head {head}", similar[head], table.zero) for head in heads] or [
            (name, similar.mean(0), table.zero)
        ]
    across = min(ACROSS, len(shown))
    down = -(-len(shown) // across)
    figure = Figure(figsize=(1.9 * across + 0.6, 2.0 * down + 0.3), layout="constrained")
    panels = figure.subplots(down, across, squeeze=False)
    ends = common_range(similar for _, similar, _ in shown)
    for axes, (name, similar, zero) in zip(panels.flat, shown, strict=False):
        extent = (-zero - 0.5, zero + 0.5, zero + 0.5, -zero - 0.5)
        axes.imshow(similar.numpy(), cmap="viridis", vmin=ends[0], vmax=ends[1], extent=extent, interpolation="nearest")
        axes.set_title(count_from_one(name))
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_locator(MaxNLocator(5, integer=True))
    for axes in list(panels.flat)[len(shown) :]:
        axes.set_axis_off()
    figure.supxlabel("offset of the query from the key (patches)", fontsize=9)
    figure.supylabel("offset", fontsize=9)
    bar(figure, panels, ends, "cosine similarity")
    one_d = scene.model.config.attention == "relative"  # type: ignore[union-attr]
    kind = (
        "1-D offsets, of tokens numbered in raster order, prefix tokens first"
        + ("" if scene.options.heads else ", mean over heads")
        if one_d
        else "offsets in rows and in columns, shared by the heads"
    )
    caption = (
        f"Cosine similarity of the vectors that attention has for each {kind}, with each other, at the size the tables "
        "were made for. "
        f"Colours span {spanned(ends)}, the range of two different offsets. "
        "Vectors of length zero, as before training, have 0 with all. arXiv:2010.11929, D.4."
    )
    numbers = {f"similarity_{name.replace(', ', '_').replace(' ', '_')}": similar.numpy() for name, similar, _ in shown}
    return FigureResult("positions-relative", "Relative positions", caption, figure, numbers)


def rotary(scene: Scene, grid: tuple[int, ...]) -> FigureResult:
    """What turning by position leaves of a logit, by offset."""
    from matplotlib.figure import Figure

    similar = kernel(scene.model, grid)
    assert similar is not None
    height, width = grid
    places = torch.cartesian_prod(torch.arange(height), torch.arange(width))
    offsets = places[:, None] - places + torch.tensor([height - 1, width - 1])
    score = structure(similar[offsets[..., 0], offsets[..., 1]].view(*grid, *grid))
    figure = Figure(figsize=(4.4, 3.2 * height / width + 0.5), layout="constrained")
    axes = figure.subplots()
    extent = (0.5 - width, width - 0.5, height - 0.5, 0.5 - height)
    others = similar.flatten()[
        torch.arange(similar.numel()) != similar.numel() // 2
    ]  # without the offset of 0, which has 1
    ends = (float(others.min()), float(others.max())) if len(others) else (-1.0, 1.0)
    axes.imshow(similar.numpy(), cmap="viridis", vmin=ends[0], vmax=ends[1], extent=extent, interpolation="nearest")
    bar(figure, axes, ends, "share of the logit")
    axes.set(xlabel="offset in columns (patches)", ylabel="offset in rows (patches)")
    caption = (
        "Rotary positions: the logit of a query and a key that would be equal at one place, every pair of channels of "
        "one length, by how "
        "far they lie apart, as a share of that at one place; the same in every block and head. Colours span "
        f"{spanned(ends)}. "
        f"Structure on the {times(grid)} grid: {summed(score)}. arXiv:2104.09864."
    )
    numbers = {"kernel": similar.numpy(), "structure": np.array([*score, score.contrast])}
    return FigureResult(
        "positions-rotary",
        "Rotary positions",
        caption,
        figure,
        numbers,
        (HEAD, [["rotary", times(grid), *format_structure(score)]]),
    )


def format_structure(score: Structure) -> list[str]:
    """Numbers of a structure for a table; nothing where there are no such pairs."""
    return ["" if math.isnan(value) else f"{value:.4f}" for value in (*score, score.contrast)]


def summed(score: Structure) -> str:
    """A structure in words."""
    row, column, other, contrast = (
        f"{value:.2f}" if not math.isnan(value) else "none" for value in (*score, score.contrast)
    )
    return f"mean similarity in one row {row}, in one column {column}, elsewhere {other}, contrast {contrast}"


def ordinal(number: int) -> str:
    """2 -> `second`."""
    return {2: "second", 3: "third"}.get(number, f"{number}th")
