"""The figure of the first layer's filters (arXiv:2010.11929, Fig. 7 left)."""

from __future__ import annotations

import numpy as np

from vitreous.inspection.filters import filters
from vitreous.reports.figures.style import BLUE, hide_axes, mosaic, styled, times
from vitreous.reports.pages.formats import format_share
from vitreous.reports.scene import FigureResult, Scene

COLUMNS, GAP = 7, 0.85


@styled
def make(scene: Scene) -> list[FigureResult]:
    """The first principal components of the filters, and how much of their variance each explains."""
    from matplotlib.figure import Figure

    result = filters(scene.model)
    components, share = result.components.numpy(), result.share.numpy()
    count = len(components)
    pictures, description = shown(components)
    figure = Figure(figsize=(7.2, 2.5), layout="constrained")
    tiles, axes = figure.subplots(1, 2, width_ratios=(1.8, 1))
    hide_axes(tiles)
    tiles.set_anchor("N")
    tiles.imshow(together_of(pictures), cmap="gray", vmin=0, vmax=1, interpolation="nearest")
    axes.plot(np.arange(1, count + 1), 100 * share.cumsum(), color=BLUE, marker="o", markersize=2.5, linewidth=1)
    axes.set(xlabel="components", ylabel="variance explained, together (%)", ylim=(0, 102), xlim=(0, count + 1))
    axes.grid(alpha=0.25, linewidth=0.5)
    size = times(components.shape[2:])
    together = (
        f"Together they explain {format_share(round(float(share.sum()), 6))} of the filters' variance, the "
        f"first {format_share(share[0])}."
    )
    caption = (
        f"The first {count} principal components of the {result.count} filters of the {result.layer}, {size} pixels, "
        f"{description}; each is "
        f"stretched to its own range, and its sign is arbitrary. {together} As in arXiv:2010.11929, Fig. 7 left."
    )
    table = ["component", "share"], [[number + 1, f"{value:.6f}"] for number, value in enumerate(share)]
    return [FigureResult("filters", "Filters", caption, figure, {"components": components, "share": share}, table)]


def together_of(pictures: np.ndarray) -> np.ndarray:
    """(K, h, w[, 3]) -> one picture, seven in a row, light grey around them: filters have white corners."""
    large = -(-16 // max(pictures.shape[1:3]))
    pictures = pictures.repeat(large, 1).repeat(large, 2)
    columns = min(COLUMNS, len(pictures))
    missing = np.full((-len(pictures) % columns, *pictures.shape[1:]), GAP, dtype=pictures.dtype)
    tiles = np.concatenate([pictures, missing])
    gap = max(1, pictures.shape[1] // 8)
    whole = mosaic(tiles.reshape(-1, columns, *tiles.shape[1:]), gap, GAP)
    return np.pad(whole, [(gap, gap)] * 2 + [(0, 0)] * (whole.ndim - 2), constant_values=GAP)


def shown(components: np.ndarray) -> tuple[np.ndarray, str]:
    """(K, C, h, w) -> (K, h, w) or (K, h, w, 3) in [0, 1], each component stretched to its range, and what the colours
    are."""
    channels = components.shape[1]
    visible = components[:, :3] if channels >= 3 else components[:, :1]
    low, high = (f(visible, axis=(1, 2, 3), keepdims=True) for f in (np.min, np.max))
    even = (visible - low) / np.maximum(high - low, 1e-12)
    if channels >= 3:
        description = "in colour" if channels == 3 else f"the first three of {channels} channels as red, green and blue"
        return even.transpose(0, 2, 3, 1), description
    return even[:, 0], "in grey" if channels == 1 else f"the first of {channels} channels in grey"
