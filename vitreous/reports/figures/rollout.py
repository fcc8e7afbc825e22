"""The figures `rollout`: which patches the answer is made of (arXiv:2010.11929, Figs. 6 and 14), and how that grows
with depth."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from vitreous.inspection.rollout import Mixing, rollout
from vitreous.reports.figures.overlay import HEAT, SIZE, asked, depth_of, heat, lit, named, panels, reader, scale, show
from vitreous.reports.scene import FigureResult, Picture, Scene

COLUMNS = 12  # blocks shown side by side


def make(scene: Scene) -> list[FigureResult]:
    """One figure with a row for each picture, and one of the first picture with a column for each block."""
    options, pictures = scene.options, asked(scene)
    layers = scene.layers(depth_of(scene))
    mixing = Mixing(options.residual, options.fusion, options.discard)
    # one by one: a picture can be large
    rollouts = [rollout(scene.model, scene.input(one.pixels[None]), mixing) for one in pictures]
    maps = torch.cat([one.maps for one in rollouts]).cpu()
    alone = torch.cat([one.single_maps for one in rollouts]).cpu()
    mixing_text = f"{mixing.fusion} over heads, residual {mixing.residual:g}" + (
        f", {mixing.discard:.0%} discarded" if mixing.discard else ""
    )
    numbers: dict[str, np.ndarray] = {
        "maps": maps.numpy(),
        "single": alone.numpy(),
        "prefix": torch.cat([one.joint[..., : one.prefix] for one in rollouts]).cpu().numpy(),
        "images": np.array([one.name for one in pictures]),
    }
    caption = (
        f"Attention rollout through all {maps.shape[1]} blocks, seen from {reader(scene)} ({mixing_text}; "
        "arXiv:2005.00928, arXiv:2010.11929 Fig. 6): the share of each patch in the answer as far as attention "
        "mixes tokens. Prefix tokens are left out; each map is shown relative to its largest value. "
        "Right: the picture times the map, as in the paper."
    )
    below = (
        f"The same for {pictures[0].name}, block by block. Upper row: through all blocks up to this one; lower row: "
        "this block "
        "alone. Each map is shown relative to its largest value."
    )
    few = (
        layers
        if len(layers) <= COLUMNS
        else [layers[round(i * (len(layers) - 1) / (COLUMNS - 1))] for i in range(COLUMNS)]
    )
    return [
        FigureResult("rollout", "Attention rollout", caption, drawn(scene, pictures, maps[:, -1]), numbers),
        FigureResult(
            "rollout-blocks",
            "Attention rollout by depth",
            below,
            by_block(scene, pictures[0], maps[0], alone[0], few),
            {"maps": numbers["maps"][:1, few], "single": numbers["single"][:1, few], "layers": np.array(few)},
        ),
    ]


def drawn(scene: Scene, pictures: list[Picture], maps: Tensor) -> Any:
    """(n, h, w) maps: a row for each picture, with what the model sees, the map over it, and the picture in the map's
    light."""
    figure, axes = panels(scene, len(pictures), 3, ("input", "rollout", "input × rollout"))
    for row, picture, values in zip(axes, pictures, maps, strict=True):
        show(row[0], picture)
        named(row[0], picture.name)
        image = heat(row[1], picture, values)
        lit(row[2], picture, values)
    scale(figure, image, axes, "share of the answer")
    return figure


def by_block(scene: Scene, picture: Picture, maps: Tensor, alone: Tensor, layers: list[int]) -> Any:
    """(L, h, w) maps: two rows with a column for each of `layers`."""
    figure, axes = panels(scene, 2, len(layers), [f"block {layer + 1}" for layer in layers], side=0.95)
    for column, layer in enumerate(layers):
        for place, values in zip(axes[:, column], (maps[layer], alone[layer]), strict=True):
            place.imshow(values.numpy(), cmap=HEAT, vmin=0)
    for place, word in zip(axes[:, 0], ("up to here", "alone"), strict=True):
        place.text(-0.06, 0.5, word, transform=place.transAxes, rotation=90, ha="right", va="center", fontsize=SIZE)
    return figure
