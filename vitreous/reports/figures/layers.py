"""Figures by depth and by input size: spectra of features, similarity of layers, and inference cost."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import PurePath
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from vitreous.errors import UsageError
from vitreous.inference.open_model import open_bundle
from vitreous.inspection.cost import (
    CPU_MEMORY_SHARE,
    DEFAULT_IMAGE_SIZES,
    MAX_TRIED_BATCH_SIZE,
    InferenceCost,
    measure_inference_costs,
    round_image_sizes,
)
from vitreous.inspection.fourier import FourierSpectra
from vitreous.inspection.similarity import MIN_CKA_IMAGES, compute_linear_cka, extract_layer_features
from vitreous.reports.figures.drawing import BLUE, ORANGE, count_from_one, format_dimensions, new_figure
from vitreous.reports.figures.subject import FigureContext, FigureResult, InputImage, load_input_image
from vitreous.reports.pages.formats import format_count
from vitreous.reports.pages.plots import INK
from vitreous.system.machine import DTYPES, get_processor_name

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MAX_TICKS = 12  # layer names along an axis
COST_SECONDS = 45.0  # time limit for measuring costs


def make_fourier(scene: FigureContext) -> list[FigureResult]:
    """Draw relative log amplitudes of features against frequency, and the highest frequency against depth
    (arXiv:2202.06709, Figs. 2a and 8)."""
    spectra = FourierSpectra(scene.model)
    for images in scene.batches(scene.take_images(scene.options.count), "fourier"):
        spectra.add(images)
    relative, frequency = spectra.relative, spectra.frequency
    figure, ((left, right),) = new_figure(7.2, 2.9, 1, 2, gridspec_kw={"wspace": 0.06})
    draw_spectra(figure, left, relative[:-1], frequency)
    draw_highest_frequency(right, relative[:, -1], [place.after for place in spectra.places], frequency[-1])
    oblong = " On this oblong grid, the diagonal uses the shorter side and the nearest frequency of the longer side."
    caption = (
        f"Relative log amplitude of the running sum, mean over {format_count(spectra.images, 'image')} and all "
        f"channels, along the diagonal of the spectrum of the {format_dimensions(scene.grid)} patches, minus that "
        f"of the constant "
        f"term; natural logarithm.{oblong * (scene.grid[0] != scene.grid[1])} Left: without the last position. "
        "Right: the highest frequency by depth; grey: across an attention. A falling line means that the layer "
        "acts as a low-pass filter. As in arXiv:2202.06709, Figs. 2a and 8."
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
    return [
        FigureResult(
            "fourier",
            "Fourier spectra of features",
            caption=caption,
            figure=figure,
            numbers=numbers,
            table=(head, rows),
        )
    ]


def draw_spectra(figure: Figure, axes: Axes, lines: np.ndarray, frequency: np.ndarray) -> None:
    """Draw a line for each position in depth of (places, K), darker if deeper, against frequency (K,)."""
    from matplotlib import colormaps
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import Normalize

    colours = colormaps["viridis_r"]
    for line, depth in zip(lines, np.linspace(0, 1, len(lines) + 1)[:-1], strict=True):
        axes.plot(frequency, line, color=colours(depth), linewidth=1, marker="o", markersize=2)
    axes.set(xlabel="frequency (π per patch)", ylabel="Δ log amplitude")
    axes.grid(alpha=0.25, linewidth=0.5)
    figure.colorbar(ScalarMappable(Normalize(0, 1), colours), ax=axes, label="depth, as a share", pad=0.02)


def draw_highest_frequency(axes: Axes, highest: np.ndarray, after: list[str], frequency: float) -> None:
    """Draw the highest frequency (places,) against depth, with attention shaded."""
    depth = np.linspace(0, 1, len(highest))
    for number in range(1, len(highest)):
        if after[number] == "attention":
            axes.axvspan(depth[number - 1], depth[number], color=INK, alpha=0.12, linewidth=0)
    axes.plot(depth, highest, color=INK, alpha=0.65, linewidth=0.8)
    for kind, colour, marker in (("embedding", INK, "D"), ("attention", BLUE, "o"), ("mlp", ORANGE, "s")):
        at = [number for number, name in enumerate(after) if name == kind]
        name = f"after {kind}" if kind != "mlp" else "after MLP"
        axes.plot(depth[at], highest[at], marker, color=colour, markersize=3.5, label=name)
    axes.set(xlabel="depth, as a share", ylabel=f"Δ log amplitude at {frequency:.2f} π")
    axes.legend()


def make_similarity(scene: FigureContext) -> list[FigureResult]:
    """Draw linear CKA between all layers of the model, or between its layers and those of --other, on the same images.

    Raises UsageError for too few images.
    """
    pictures = scene.take_images(scene.options.count)
    if len(pictures) < MIN_CKA_IMAGES:
        raise UsageError(
            f"too few images to compare layers: {len(pictures)}",
            f"use at least {MIN_CKA_IMAGES} images, or none to use those of the dataset",
        )
    one, name = compute_layer_means(scene, pictures), scene.options.other
    other = one
    if name is not None:
        bundle = open_bundle(name, headless=True)
        second = replace(scene, bundle=bundle, preprocess=bundle.preprocess)
        other = compute_layer_means(
            second, [load_input_image(shown.raw, shown.name, bundle.preprocess) for shown in pictures]
        )
    similarities, biased = (
        compute_linear_cka(list(one.values()), list(other.values()), kind).numpy() for kind in (True, False)
    )
    figure, ((axes,),) = new_figure(4.6, 3.9)
    look: dict[str, Any] = {"cmap": "magma", "origin": "lower", "interpolation": "nearest"}
    image = axes.imshow(similarities, vmin=0, vmax=1, aspect="auto" if name else "equal", **look)
    figure.colorbar(image, ax=axes, label="linear CKA", pad=0.02)
    label_ticks(axes.set_xticks, list(other))
    label_ticks(axes.set_yticks, list(one))
    axes.tick_params(axis="x", rotation=90)
    axes.spines[:].set_visible(False)
    own = scene.model.config.name()
    axes.set(
        ylabel=f"layers of {PurePath(scene.run).name if name else own}",
        xlabel=f"layers of {PurePath(name).name if name else own}",
    )
    caption = (
        f"Similarity of the layers of {scene.run}{f' with those of {name}' if name else ''}: linear CKA of the mean of "
        f"the patch tokens, over {len(pictures)} images, with the unbiased estimate of HSIC: 0 for unrelated layers, "
        "1 for layers that are equal up to rotation and scale. A layer is named after the preceding module; blocks "
        "count from 1. arXiv:1905.00414."
    )
    numbers = {"cka": similarities, "cka_biased": biased}
    numbers |= {"layers": np.array(list(one)), "other_layers": np.array(list(other))}
    rows = [[row, *(f"{value:.5f}" for value in line)] for row, line in zip(one, similarities, strict=True)]
    return [
        FigureResult(
            "similarity",
            "Layer similarity (linear CKA)",
            caption=caption,
            figure=figure,
            numbers=numbers,
            table=(["layer", *other], rows),
        )
    ]


def compute_layer_means(scene: FigureContext, pictures: list[InputImage]) -> dict[str, Tensor]:
    """Return the (n, D) features of each layer of the model, averaged over patch tokens."""
    parts = [extract_layer_features(scene.model, images) for images in scene.batches(pictures, "similarity")]
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}


def label_ticks(set_ticks: Callable[..., Any], names: list[str]) -> None:
    """Label some layers along an axis, evenly spaced."""
    step = -(-len(names) // MAX_TICKS)
    set_ticks(range(0, len(names), step), [count_from_one(name) for name in names[::step]], fontsize=8)


def make_cost(scene: FigureContext) -> list[FigureResult]:
    """Draw throughput, largest batch, memory and operations against the input size (arXiv:2010.11929, Fig. 12)."""
    wanted, measured = round_image_sizes(scene.model, (*DEFAULT_IMAGE_SIZES, max(scene.preprocess.image))), []
    for cost in measure_inference_costs(scene.model, wanted, scene.options.batch_sizes, COST_SECONDS):
        measured.append(cost)
        scene.listener.progress("cost", len(measured), len(wanted))
    columns: dict[str, list[Any]] = {
        "image": [cost.image for cost in measured],
        "tokens": [cost.tokens for cost in measured],
        "macs": [cost.macs for cost in measured],
        "memory_bytes": [cost.memory for cost in measured],
        "images_per_second": [cost.best[1] for cost in measured],
        "batch": [cost.best[0] for cost in measured],
        "largest_batch": [cost.largest for cost in measured],
    }
    rows = [
        [format_dimensions(cost.image), cost.tokens, 2 * cost.macs, cost.memory, size, f"{rate:.2f}", cost.largest]
        for cost in measured
        for size, rate in cost.rate.items()
    ]
    head = ["image", "tokens", "flops", "memory_bytes", "batch", "images_per_second", "largest_batch"]
    caption, numbers = (
        format_cost_caption(scene, measured, wanted),
        {key: np.array(value) for key, value in columns.items()},
    )
    return [
        FigureResult(
            "cost",
            "Inference cost by input size",
            caption=caption,
            figure=draw_costs(columns),
            numbers=numbers,
            table=(head, rows),
        )
    ]


def draw_costs(columns: dict[str, list[Any]]) -> Figure:
    """Draw four log-log panels; dashed lines are proportional to the number of tokens."""
    figure, ((speed, batch), (memory, operations)) = new_figure(7.2, 5.2, 2, 2)
    side, tokens, pixels = [image[0] for image in columns["image"]], columns["tokens"], "image size (pixels)"
    draw_log_curve(speed, side, y=columns["images_per_second"], across=pixels, up="images/s", colour=BLUE)
    draw_log_curve(batch, side, y=columns["largest_batch"], across=pixels, up="largest batch (images)", colour=BLUE)
    mebibytes = [size / 2**20 for size in columns["memory_bytes"]]
    draw_log_curve(memory, tokens, y=mebibytes, across="tokens", up="memory per image (MiB)", colour=ORANGE)
    flops = [2 * macs / 1e9 for macs in columns["macs"]]
    draw_log_curve(operations, tokens, y=flops, across="tokens", up="operations per image (GFLOP)", colour=ORANGE)
    for axes, values in ((memory, mebibytes), (operations, flops)):
        high, line = axes.get_ylim()[1], [values[0] * count / tokens[0] for count in tokens]
        axes.plot(tokens, line, "--", color=INK, alpha=0.55, linewidth=0.8, label="proportional to tokens")
        axes.set_ylim(top=high)
        axes.legend(loc="upper left")
    return figure


def draw_log_curve(axes: Axes, x: list[int], y: list[float], across: str, up: str, colour: str) -> None:
    """Draw one quantity against another on logarithmic axes."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    axes.plot(x, y, "o-", color=colour, linewidth=1, markersize=3.5)
    axes.set(xlabel=across, ylabel=up, xscale="log")
    if min(y, default=0) > 0:
        axes.set_yscale("log")
        axes.set_ylim(min(y) / 1.3, max(y) * 1.3)
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if max(y) > 10 * min(y) else (1, 1.5, 2, 3, 5, 7)))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.10g}"))
        axes.yaxis.set_minor_locator(NullLocator())
    axes.set_xticks(x, [str(value) for value in x])
    axes.set_xticks([], minor=True)
    axes.grid(alpha=0.25, linewidth=0.5)


def format_cost_caption(scene: FigureContext, measured: list[InferenceCost], wanted: list[tuple[int, ...]]) -> str:
    """Build the caption of the cost figure, and state which values are estimates."""
    own = next(scene.model.parameters()).dtype
    precision = next(name for name, dtype in DTYPES.items() if dtype == own)
    where = f"{get_processor_name()}, {format_count(torch.get_num_threads(), 'thread')}"
    if scene.device.startswith("cuda"):
        where = torch.cuda.get_device_name(scene.device)
    if measured[0].tried:
        batches = (
            f"The largest batch is the largest that ran, of the given sizes or of the "
            f"powers of two up to {MAX_TRIED_BATCH_SIZE}"
        )
    else:
        batches = (
            f"The largest batch is an estimate, {100 * CPU_MEMORY_SHARE:.0f} % of the free memory over that of an "
            f"image, at most {MAX_TRIED_BATCH_SIZE}"
        )
    left = [format_dimensions(image) for image in wanted[len(measured) :]]
    out = f" Skipped because of the time limit: {', '.join(left)}." if left else ""
    return (
        f"Forward passes of {scene.model.config.name()} in {precision} on {where}: images/s at the fastest "
        f"batch size of {', '.join(map(str, sorted({size for cost in measured for size in cost.rate})))}. {batches}. "
        "Memory is the peak size of all tensors of one image, without the model; a multiply-add "
        f"counts as two operations.{out} As in arXiv:2010.11929, Fig. 12."
    )
