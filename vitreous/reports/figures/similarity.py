"""The figure of layers' similarity, within a model or between two: linear CKA."""

from __future__ import annotations

from dataclasses import replace
from pathlib import PurePath

import numpy as np
import torch
from torch import Tensor

from vitreous.errors import UsageError
from vitreous.inspection.similarity import LEAST, cka, layers
from vitreous.models.names import name_of
from vitreous.reports.figures.style import count_from_one, styled
from vitreous.reports.opening import open_bundle
from vitreous.reports.scene import FigureResult, Picture, Scene, see_picture

TICKS = 12  # layers that are named along an axis


@styled
def make(scene: Scene) -> list[FigureResult]:
    """Linear CKA of all layers with all, of the model or of it and --other, on the same images."""
    from matplotlib.figure import Figure

    pictures = scene.some(scene.options.count)
    if len(pictures) < LEAST:
        raise UsageError(
            f"too few images to compare layers: {len(pictures)}",
            f"name at least {LEAST}, or none for those of the data",
        )
    one = gathered(scene, pictures)
    other, name = one, None
    if scene.options.other is not None:
        bundle = open_bundle(scene.options.other, headless=True)
        second = replace(scene, bundle=bundle, preprocess=bundle.preprocess)
        other = gathered(second, [see_picture(shown.raw, shown.name, bundle.preprocess) for shown in pictures])
        name = scene.options.other
    similarities = cka(list(one.values()), list(other.values())).numpy()
    biased = cka(list(one.values()), list(other.values()), unbiased=False).numpy()
    figure = Figure(figsize=(4.6, 3.9), layout="constrained")
    axes = figure.subplots()
    drawn = axes.imshow(
        similarities,
        cmap="magma",
        vmin=0,
        vmax=1,
        origin="lower",
        interpolation="nearest",
        aspect="auto" if name else "equal",
    )
    figure.colorbar(drawn, ax=axes, label="linear CKA", pad=0.02)
    label(axes.set_xticks, [count_from_one(name) for name in other])
    label(axes.set_yticks, [count_from_one(name) for name in one])
    axes.tick_params(axis="x", rotation=90)
    axes.spines[:].set_visible(False)
    own = name_of(scene.model.config)
    axes.set(
        ylabel=f"layers of {PurePath(scene.run).name if name else own}",
        xlabel=f"layers of {PurePath(name).name if name else own}",
    )
    caption = (
        f"Similarity of the layers of {scene.run}{f' with those of {name}' if name else ''}: linear CKA of the mean of "
        "the patch tokens, "
        f"over {len(pictures)} images at once, with the unbiased estimate of HSIC, so that layers with nothing in "
        "common have 0. Layers "
        "are named by the part before them, its block counted from 1; 1 is the same up to rotation and scale. "
        "arXiv:1905.00414."
    )
    numbers = {
        "cka": similarities,
        "cka_biased": biased,
        "layers": np.array(list(one)),
        "other_layers": np.array(list(other)),
    }
    rows = [[row, *(f"{value:.5f}" for value in line)] for row, line in zip(one, similarities, strict=True)]
    return [FigureResult("similarity", "Similarity of layers", caption, figure, numbers, (["layer", *other], rows))]


def gathered(scene: Scene, pictures: list[Picture]) -> dict[str, Tensor]:
    """(n, D) of each layer of the scene's model."""
    parts = [layers(scene.model, images) for images in scene.batches(pictures, "similarity")]
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}


def label(set_ticks, names: list[str]) -> None:
    """Name some layers along an axis, evenly."""
    step = -(-len(names) // TICKS)
    set_ticks(range(0, len(names), step), names[::step], fontsize=8)
