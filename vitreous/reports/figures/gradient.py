"""The figure `gradient`: which patches speak for a class."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from vitreous.errors import UsageError, nearest
from vitreous.inspection.gradient import gradient
from vitreous.reports.figures.overlay import asked, depth_of, heat, lit, named, panels, reader, scale, show
from vitreous.reports.scene import FigureResult, Picture, Scene


def make(scene: Scene) -> list[FigureResult]:
    """A row for each picture: gradient-weighted rollout for --of-class, or for what the model says."""
    depth_of(scene)
    known = scene.bundle.classes
    number = None if scene.options.of_class is None else torch.tensor([place_of(scene.options.of_class, known)])
    pictures = asked(scene)
    gradients = [gradient(scene.model, scene.input(one.pixels[None]), number) for one in pictures]
    maps = torch.cat([one.maps for one in gradients]).cpu()
    words = [known[int(one.classes[0])] for one in gradients]
    caption = (
        f"Gradient-weighted rollout (arXiv:2103.15679), seen from {reader(scene)}: attention that raises the logit of "
        + ("the predicted class" if number is None else f"the class {words[0]}")
        + ", through all blocks. Each map is shown relative to its largest value; right: the picture times the map."
    )
    numbers = {
        "maps": maps.numpy(),
        "classes": np.array(words),
        "logits": torch.cat([one.logits for one in gradients]).cpu().numpy(),
        "images": np.array([one.name for one in pictures]),
    }
    return [
        FigureResult("gradient", "Gradient-weighted rollout", caption, drawn(scene, pictures, maps, words), numbers)
    ]


def place_of(name: str, known: tuple[str, ...]) -> int:
    """A class's number. Raises UsageError for one that the model does not know."""
    if name not in known:
        some = ", ".join(known[:20]) + (", …" if len(known) > 20 else "")
        raise UsageError(
            f"the model knows no class {name}", nearest(name, known) or (f"it knows {some}" if known else "")
        )
    return known.index(name)


def drawn(scene: Scene, pictures: list[Picture], maps: Tensor, words: list[str]) -> Any:
    """(n, h, w) maps: a row for each picture, its class under the map."""
    figure, axes = panels(scene, len(pictures), 3, ("input", "relevance", "input × relevance"))
    for row, picture, values, word in zip(axes, pictures, maps, words, strict=True):
        show(row[0], picture)
        named(row[0], picture.name)
        image = heat(row[1], picture, values)
        named(row[1], f"for {word}")
        lit(row[2], picture, values)
    scale(figure, image, axes, "relevance")
    return figure
