"""The figure `attention`: what each head of a block looks at."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from vitreous.inspection.attention import attention
from vitreous.reports.figures.overlay import asked, block_of, chosen, heat, last, named, panels, reader, scale, show
from vitreous.reports.scene import FigureResult, Picture, Scene


def make(scene: Scene) -> list[FigureResult]:
    """A figure for each block of --layers (default: the last): a row for each picture, a column for each head, and
    their mean."""
    layers, pictures = last(scene), asked(scene)
    prefix = scene.model.config.prefix
    results = [attention(scene.model, scene.input(one.pixels[None]), layers) for one in pictures]
    grid = tuple(i // p for i, p in zip(scene.preprocess.image, scene.model.config.patch, strict=True))
    figures = []
    for layer in layers:
        rows = torch.cat([one[layer] for one in results]).cpu()  # (n, h, T)
        heads = chosen(scene.options.heads, rows.shape[1])
        maps = rows[..., prefix:].unflatten(-1, grid)
        caption = (
            f"Attention of {block_of(layer, scene)} from {reader(scene)} to the patches, head by head, and the mean "
            "over all "
            f"{rows.shape[1]} heads. Prefix tokens are left out; each map is shown relative to its largest value."
        )
        numbers = {
            "maps": maps[:, heads].numpy(),
            "mean": maps.mean(1).numpy(),
            "heads": np.array(heads),
            "prefix": rows[..., :prefix].numpy(),
            "images": np.array([one.name for one in pictures]),
        }
        name = "attention" if len(layers) == 1 else f"attention-{layer}"
        figures.append(
            FigureResult(name, f"Attention of block {layer + 1}", caption, drawn(scene, pictures, maps, heads), numbers)
        )
    return figures


def drawn(scene: Scene, pictures: list[Picture], maps: Tensor, heads: list[int]) -> Any:
    """(n, h, *grid) maps: a row for each picture; many heads make the panels smaller."""
    words = ["input", *(f"head {head + 1}" for head in heads), "mean"]
    figure, axes = panels(scene, len(pictures), len(words), words, side=1.4 if len(words) <= 6 else 1.0)
    for row, picture, head_maps in zip(axes, pictures, maps, strict=True):
        show(row[0], picture)
        named(row[0], picture.name)
        for place, values in zip(row[1:], [*head_maps[heads], head_maps.mean(0)], strict=True):
            image = heat(place, picture, values)
    scale(figure, image, axes, "attention")
    return figure
