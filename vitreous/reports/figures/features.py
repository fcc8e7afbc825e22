"""The figure of patch tokens as colours (DINOv2, arXiv:2304.07193, Fig. 1)."""

from __future__ import annotations

import torch

from vitreous.inspection.features import colours, patches
from vitreous.reports.figures.style import hide_axes, styled
from vitreous.reports.pages.formats import format_share
from vitreous.reports.scene import SEEN, FigureResult, Scene


@styled
def make(scene: Scene) -> list[FigureResult]:
    """Pictures, their patch tokens' first three principal components as colours, and those of the foreground alone."""
    from matplotlib.figure import Figure

    pictures = scene.some(4)[:SEEN]
    maps = torch.cat([patches(scene.model, images).cpu() for images in scene.batches(pictures, "features")])
    coloured = colours(maps)
    height, width = scene.preprocess.image
    tile = 7.0 / max(4, len(pictures))
    figure = Figure(figsize=(tile * len(pictures) + 0.3, 3 * tile * height / width + 0.2), layout="constrained")
    grid = figure.subplots(3, len(pictures), squeeze=False)
    rows = [None, coloured.all.numpy(), coloured.inside.numpy()]
    for row, name, values in zip(grid, ("image", "all patches", "foreground"), rows, strict=True):
        for number, axes in enumerate(row):
            hide_axes(axes)
            axes.imshow(pictures[number].shown if values is None else values[number], interpolation="nearest")
        row[0].set_ylabel(name)
    many = f"{len(pictures)} pictures together" if len(pictures) > 1 else "the picture"
    share = ", ".join(format_share(value) for value in coloured.share.tolist())
    caption = (
        f"The first three principal components of the {maps.shape[-1]} channels of the last layer's patch tokens as "
        "red, green and blue, "
        f"of {many}, each stretched from its 1st to its 99th percentile. They explain {share} of the variance. Last "
        "row: patches on "
        "one side of the first component's mean, the side with less of the pictures' borders, and components found "
        "anew within "
        "them; the rest is black. Signs, and so colours, are arbitrary. As in arXiv:2304.07193, Fig. 1."
    )
    numbers = {
        "all": coloured.all.numpy(),
        "foreground": coloured.foreground.numpy(),
        "inside": coloured.inside.numpy(),
        "share": coloured.share.numpy(),
    }
    return [FigureResult("features", "Features as colours", caption, figure, numbers)]
