"""The figure of features' spectra by depth (Park and Kim, arXiv:2202.06709, Figs. 2a and 8)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from vitreous.inspection.fourier import Spectra
from vitreous.reports.figures.style import BLUE, ORANGE, styled, times
from vitreous.reports.scene import FigureResult, Scene

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


@styled
def make(scene: Scene) -> list[FigureResult]:
    """Relative log amplitudes against frequency, and the highest of them against depth."""
    from matplotlib.figure import Figure

    spectra = Spectra(scene.model)
    for images in scene.batches(scene.some(scene.options.count), "fourier"):
        spectra.add(images)
    relative, frequency = spectra.relative, spectra.frequency
    figure = Figure(figsize=(7.2, 2.9), layout="constrained")
    left, right = figure.subplots(1, 2, gridspec_kw={"wspace": 0.06})
    by_frequency(figure, left, relative[:-1], frequency)
    by_depth(right, relative[:, -1], [place.after for place in spectra.places], frequency[-1])
    grid = tuple(i // p for i, p in zip(scene.preprocess.image, scene.model.config.patch, strict=True))
    square = (
        ""
        if grid[0] == grid[1]
        else " On this oblong grid, the diagonal of the shorter side, with the nearest frequency of the longer."
    )
    caption = (
        f"Relative log amplitude of the running sum, mean over {spectra.images} image{'s' * (spectra.images != 1)} and "
        "all channels, along "
        f"the diagonal of the spectrum of the {times(grid)} patches, less that of the constant term; natural "
        f"logarithm.{square} Left: all "
        "but the last place, by depth. Right: the highest frequency by depth; grey: across an attention. Where the "
        "line falls, the "
        "part makes features smoother from patch to patch. As in arXiv:2202.06709, Figs. 2a and 8."
    )
    names = [place.after if place.layer < 0 else f"{place.after} {place.layer}" for place in spectra.places]
    head = ["place", *(f"{value:.4f} pi" for value in frequency)]
    rows = [[name, *(f"{value:.5f}" for value in line)] for name, line in zip(names, relative, strict=True)]
    numbers = {
        "relative": relative,
        "log_amplitude": spectra.log_amplitude,
        "frequency": frequency,
        "layer": np.array([place.layer for place in spectra.places]),
        "after": np.array([place.after for place in spectra.places]),
    }
    return [FigureResult("fourier", "Fourier spectra of features", caption, figure, numbers, (head, rows))]


def by_frequency(figure: Figure, axes: Axes, lines: np.ndarray, frequency: np.ndarray) -> None:
    """(places, K): a line to a place, darker the deeper."""
    from matplotlib import colormaps
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import Normalize

    colours = colormaps["viridis_r"]
    depth = np.linspace(0, 1, len(lines) + 1)[:-1]
    for line, at in zip(lines, depth, strict=True):
        axes.plot(frequency, line, color=colours(at), linewidth=1, marker="o", markersize=2)
    axes.set(xlabel="frequency (π per patch)", ylabel="Δ log amplitude")
    axes.grid(alpha=0.25, linewidth=0.5)
    figure.colorbar(ScalarMappable(Normalize(0, 1), colours), ax=axes, label="depth, as a share", pad=0.02)


def by_depth(axes: Axes, highest: np.ndarray, after: list[str], frequency: float) -> None:
    """(places,): the highest frequency, attention shaded."""
    depth = np.linspace(0, 1, len(highest))
    for number in range(1, len(highest)):
        if after[number] == "attention":
            axes.axvspan(depth[number - 1], depth[number], color="0.88", linewidth=0)
    axes.plot(depth, highest, color="0.35", linewidth=0.8)
    for kind, colour, marker in (("embedding", "black", "D"), ("attention", BLUE, "o"), ("mlp", ORANGE, "s")):
        at = [number for number, name in enumerate(after) if name == kind]
        name = f"after {kind}" if kind != "mlp" else "after MLP"
        axes.plot(depth[at], highest[at], marker, color=colour, markersize=3.5, label=name)
    axes.set(xlabel="depth, as a share", ylabel=f"Δ log amplitude at {frequency:.2f} π")
    axes.legend()
