"""The figure `distance`: how far each head of each block looks (arXiv:2010.11929, Fig. 7, right)."""

from __future__ import annotations

from typing import Any

import numpy as np

from vitreous.inspection.distance import Distances, distances
from vitreous.reports.figures.overlay import SIZE, depth_of
from vitreous.reports.pages.formats import format_count
from vitreous.reports.scene import FigureResult, Scene

#: what a query sees -> how it is called, the colour and the shape of its dots: told apart without colours too
KINDS = {
    "all": ("heads", "#1f5a96", "o"),
    "row": ("heads along rows", "#1f5a96", "o"),
    "column": ("heads along columns", "#c2571a", "s"),
    "window": ("heads within windows", "#c2571a", "s"),
}


def make(scene: Scene) -> list[FigureResult]:
    """Dots by head against depth, over --count images of the data, or those named."""
    layers = scene.layers(depth_of(scene))
    pictures = scene.some(scene.options.count)
    measured = distances(scene.model, scene.batches(pictures, "attention distance"))
    shown = [row for row, layer in enumerate(measured.layers) if layer in layers]
    mean, std = measured.mean.numpy()[shown], measured.std.numpy()[shown]
    blocks, spans = np.array(measured.layers)[shown], [measured.spans[row] for row in shown]
    uniform = np.array(measured.uniform)[shown]
    caption = (
        f"Mean attention distance of each head over {format_count(len(pictures), 'image')}, in pixels of an image of "
        f"{' × '.join(map(str, scene.preprocess.image))} (arXiv:2010.11929, Fig. 7 right): from the query's patch to "
        "all others, weighted "
        "by attention. Prefix tokens are left out and the rest is not renormalised. The dashed line is a head that "
        "looks "
        "everywhere alike."
    )
    rows = [
        [int(block), span, head, f"{mean[i, head]:.4f}", f"{std[i, head]:.4f}", f"{uniform[i]:.4f}"]
        for i, (block, span) in enumerate(zip(blocks, spans, strict=True))
        for head in range(mean.shape[1])
    ]
    head = ["block", "span", "head", "distance_px", "std_over_images_px", "uniform_px"]
    numbers = {
        "layers": blocks,
        "spans": np.array(spans),
        "heads": np.arange(mean.shape[1]),
        "distance": mean,
        "std": std,
    }
    numbers |= {"uniform": uniform, "images": np.array([one.name for one in pictures])}
    return [FigureResult("distance", "Mean attention distance", caption, drawn(measured, shown), numbers, (head, rows))]


def drawn(measured: Distances, shown: list[int]) -> Any:
    """The figure: a dot for each head, a line through their mean, and what uniform attention would have."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(5.2, 3.4), layout="constrained")
    axes = figure.subplots()
    mean = measured.mean.numpy()
    lines: dict[float, str] = {}
    for span in dict.fromkeys(measured.spans[row] for row in shown):
        word, colour, marker = KINDS[span]
        rows = [row for row in shown if measured.spans[row] == span]
        depth = [measured.layers[row] + 1 for row in rows]
        pixels = measured.uniform[rows[0]]
        lines[pixels] = "#555555" if pixels in lines else colour
        axes.plot(depth, mean[rows].mean(1), color=colour, linewidth=1, alpha=0.5)
        places = np.repeat(depth, mean.shape[1])
        axes.scatter(places, mean[rows].ravel(), s=16, color=colour, marker=marker, alpha=0.8, linewidths=0, label=word)
    for pixels, colour in lines.items():
        axes.axhline(pixels, color=colour, linewidth=1, linestyle="--", label=f"uniform attention, {pixels:.1f} px")
    axes.set_xlabel("block", fontsize=SIZE)
    axes.set_ylabel("mean attention distance (pixels)", fontsize=SIZE)
    axes.set_ylim(0, 1.12 * max(mean[shown].max(), *lines))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.tick_params(labelsize=SIZE)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(fontsize=SIZE - 1, frameon=False, loc="lower right")
    return figure
