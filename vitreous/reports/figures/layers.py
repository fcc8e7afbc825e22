"""Figures by depth: spectra of features and similarity of layers. Figure by input size: inference cost."""

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

MAX_TICKS = 12  # most layer names along an axis
COST_SECONDS = 45.0  # time limit in seconds for measuring the cost


def make_fourier(context: FigureContext) -> list[FigureResult]:
    """Draw relative log amplitudes of features against frequency, and the highest frequency against depth
    (arXiv:2202.06709, Figs. 2a and 8)."""
    spectra = FourierSpectra(context.model)
    for images in context.iterate_batches(context.take_images(context.options.count), "fourier"):
        spectra.add(images)
    relative, frequency = spectra.relative, spectra.frequency
    figure, ((left, right),) = new_figure(7.2, 2.9, 1, 2, gridspec_kw={"wspace": 0.06})
    draw_spectra(figure, left, relative[:-1], frequency)
    draw_highest_frequency(right, relative[:, -1], [location.sublayer for location in spectra.locations], frequency[-1])
    oblong = " The grid is not square: the diagonal uses the shorter side and the nearest frequency of the longer side."
    caption = (
        f"Log amplitude of the residual stream minus that of the constant term (natural logarithm), along the "
        f"diagonal of the spectrum of the {format_dimensions(context.grid)} patches. Mean over "
        f"{format_count(spectra.images, 'image')} and all channels.{oblong * (context.grid[0] != context.grid[1])} "
        "Left: all layers but the last. Right: the highest frequency by depth; attention layers are grey. A falling "
        "line means that the layer acts as a low-pass filter. As in arXiv:2202.06709, Figs. 2a and 8."
    )
    names = [
        location.sublayer if location.layer < 0 else f"{location.sublayer} {location.layer}"
        for location in spectra.locations
    ]
    header = ["place", *(f"{value:.4f} pi" for value in frequency)]
    rows = [[name, *(f"{value:.5f}" for value in line)] for name, line in zip(names, relative, strict=True)]
    arrays = {
        "relative": relative,
        "log_amplitude": spectra.log_amplitude,
        "frequency": frequency,
        "layer": np.array([location.layer for location in spectra.locations]),
        "after": np.array([location.sublayer for location in spectra.locations]),
    }
    return [
        FigureResult(
            "fourier",
            "Fourier spectra of features",
            caption=caption,
            figure=figure,
            arrays=arrays,
            table=(header, rows),
        )
    ]


def draw_spectra(figure: Figure, axes: Axes, lines: np.ndarray, frequency: np.ndarray) -> None:
    """Draw the spectra of n layers, `lines` (n, K), against frequency (K,) in units of pi; deeper layers are darker."""
    from matplotlib import colormaps
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import Normalize

    colours = colormaps["viridis_r"]
    for line, depth in zip(lines, np.linspace(0, 1, len(lines) + 1)[:-1], strict=True):
        axes.plot(frequency, line, color=colours(depth), linewidth=1, marker="o", markersize=2)
    axes.set(xlabel="frequency (π per patch)", ylabel="Δ log amplitude")
    axes.grid(alpha=0.25, linewidth=0.5)
    figure.colorbar(ScalarMappable(Normalize(0, 1), colours), ax=axes, label="relative depth", pad=0.02)


def draw_highest_frequency(axes: Axes, highest: np.ndarray, layer_kinds: list[str], frequency: float) -> None:
    """Draw the amplitude at the highest frequency, `highest` (n,), against depth; attention layers are shaded.

    `layer_kinds` has `embedding`, `attention` or `mlp` for each of the n layers; `frequency` is in units of pi.
    """
    depth = np.linspace(0, 1, len(highest))
    for index in range(1, len(highest)):
        if layer_kinds[index] == "attention":
            axes.axvspan(depth[index - 1], depth[index], color=INK, alpha=0.12, linewidth=0)
    axes.plot(depth, highest, color=INK, alpha=0.65, linewidth=0.8)
    for layer_kind, colour, marker in (("embedding", INK, "D"), ("attention", BLUE, "o"), ("mlp", ORANGE, "s")):
        indices = [index for index, name in enumerate(layer_kinds) if name == layer_kind]
        name = f"after {layer_kind}" if layer_kind != "mlp" else "after MLP"
        axes.plot(depth[indices], highest[indices], marker, color=colour, markersize=3.5, label=name)
    axes.set(xlabel="relative depth", ylabel=f"Δ log amplitude at {frequency:.2f} π")
    axes.legend()


def make_similarity(context: FigureContext) -> list[FigureResult]:
    """Draw linear CKA between all layers of the model; with --other, between its layers and those of another model.

    Raises UsageError for too few images.
    """
    input_images = context.take_images(context.options.count)
    if len(input_images) < MIN_CKA_IMAGES:
        raise UsageError(
            f"too few images to compare layers: {len(input_images)}",
            f"use at least {MIN_CKA_IMAGES} images, or none to use those of the dataset",
        )
    layer_features, other_run = compute_layer_means(context, input_images), context.options.other
    other_features = layer_features
    if other_run is not None:
        bundle = open_bundle(other_run, headless=True)
        other_context = replace(context, bundle=bundle, preprocess=bundle.preprocess)
        other_features = compute_layer_means(
            other_context,
            [load_input_image(input_image.raw, input_image.name, bundle.preprocess) for input_image in input_images],
        )
    similarities, biased = (
        compute_linear_cka(list(layer_features.values()), list(other_features.values()), is_unbiased).numpy()
        for is_unbiased in (True, False)
    )
    figure, ((axes,),) = new_figure(4.6, 3.9)
    style: dict[str, Any] = {"cmap": "magma", "origin": "lower", "interpolation": "nearest"}
    image = axes.imshow(similarities, vmin=0, vmax=1, aspect="auto" if other_run else "equal", **style)
    figure.colorbar(image, ax=axes, label="linear CKA", pad=0.02)
    label_ticks(axes.set_xticks, list(other_features))
    label_ticks(axes.set_yticks, list(layer_features))
    axes.tick_params(axis="x", rotation=90)
    axes.spines[:].set_visible(False)
    model_name = context.model.config.name()
    axes.set(
        ylabel=f"layers of {PurePath(context.run).name if other_run else model_name}",
        xlabel=f"layers of {PurePath(other_run).name if other_run else model_name}",
    )
    caption = (
        f"Similarity of the layers of {context.run}{f' with those of {other_run}' if other_run else ''}: linear "
        "CKA of the mean of "
        f"the patch tokens, over {len(input_images)} images, with the unbiased estimate of HSIC: 0 for unrelated "
        "layers, "
        "1 for layers that are equal up to rotation and scale. A layer is named after the preceding module; blocks "
        "count from 1. arXiv:1905.00414."
    )
    arrays = {"cka": similarities, "cka_biased": biased}
    arrays |= {"layers": np.array(list(layer_features)), "other_layers": np.array(list(other_features))}
    rows = [
        [layer_name, *(f"{value:.5f}" for value in line)]
        for layer_name, line in zip(layer_features, similarities, strict=True)
    ]
    return [
        FigureResult(
            "similarity",
            "Layer similarity (linear CKA)",
            caption=caption,
            figure=figure,
            arrays=arrays,
            table=(["layer", *other_features], rows),
        )
    ]


def compute_layer_means(context: FigureContext, input_images: list[InputImage]) -> dict[str, Tensor]:
    """Return the (n, D) features of each layer of the model, averaged over patch tokens."""
    batches = [
        extract_layer_features(context.model, images) for images in context.iterate_batches(input_images, "similarity")
    ]
    return {name: torch.cat([batch[name] for batch in batches]) for name in batches[0]}


def label_ticks(set_ticks: Callable[..., Any], names: list[str]) -> None:
    """Label an axis with evenly spaced layer names, at most `MAX_TICKS`. `set_ticks` is `set_xticks` or
    `set_yticks`."""
    step = -(-len(names) // MAX_TICKS)
    set_ticks(range(0, len(names), step), [count_from_one(name) for name in names[::step]], fontsize=8)


def make_cost(context: FigureContext) -> list[FigureResult]:
    """Draw throughput and largest batch size against image size, and memory and operations against the number of tokens
    (arXiv:2010.11929, Fig. 12)."""
    image_sizes, costs = round_image_sizes(context.model, (*DEFAULT_IMAGE_SIZES, max(context.preprocess.image))), []
    for cost in measure_inference_costs(context.model, image_sizes, context.options.batch_sizes, COST_SECONDS):
        costs.append(cost)
        context.listener.progress("cost", len(costs), len(image_sizes))
    columns: dict[str, list[Any]] = {
        "image": [cost.image for cost in costs],
        "tokens": [cost.tokens for cost in costs],
        "macs": [cost.macs for cost in costs],
        "memory_bytes": [cost.memory for cost in costs],
        "images_per_second": [cost.find_fastest[1] for cost in costs],
        "batch": [cost.find_fastest[0] for cost in costs],
        "largest_batch": [cost.largest_batch_size for cost in costs],
    }
    rows = [
        [
            format_dimensions(cost.image),
            cost.tokens,
            2 * cost.macs,
            cost.memory,
            batch_size,
            f"{throughput:.2f}",
            cost.largest_batch_size,
        ]
        for cost in costs
        for batch_size, throughput in cost.throughputs.items()
    ]
    header = ["image", "tokens", "flops", "memory_bytes", "batch", "images_per_second", "largest_batch"]
    caption, arrays = (
        format_cost_caption(context, costs, image_sizes),
        {key: np.array(value) for key, value in columns.items()},
    )
    return [
        FigureResult(
            "cost",
            "Inference cost by input size",
            caption=caption,
            figure=draw_costs(columns),
            arrays=arrays,
            table=(header, rows),
        )
    ]


def draw_costs(columns: dict[str, list[Any]]) -> Figure:
    """Draw the four panels of the cost figure; dashed lines are proportional to the number of tokens.

    `columns` has a list with an entry per image size for each quantity.
    """
    figure, ((speed, batch), (memory, operations)) = new_figure(7.2, 5.2, 2, 2)
    image_sizes, tokens, pixels = [image[0] for image in columns["image"]], columns["tokens"], "image size (pixels)"
    draw_log_curve(speed, image_sizes, y=columns["images_per_second"], x_label=pixels, y_label="images/s", colour=BLUE)
    draw_log_curve(
        batch, image_sizes, y=columns["largest_batch"], x_label=pixels, y_label="largest batch (images)", colour=BLUE
    )
    mebibytes = [size / 2**20 for size in columns["memory_bytes"]]
    draw_log_curve(memory, tokens, y=mebibytes, x_label="tokens", y_label="memory per image (MiB)", colour=ORANGE)
    flops = [2 * macs / 1e9 for macs in columns["macs"]]
    draw_log_curve(operations, tokens, y=flops, x_label="tokens", y_label="operations per image (GFLOP)", colour=ORANGE)
    for axes, values in ((memory, mebibytes), (operations, flops)):
        high, line = axes.get_ylim()[1], [values[0] * count / tokens[0] for count in tokens]
        axes.plot(tokens, line, "--", color=INK, alpha=0.55, linewidth=0.8, label="proportional to tokens")
        axes.set_ylim(top=high)
        axes.legend(loc="upper left")
    return figure


def draw_log_curve(axes: Axes, x: list[int], y: list[float], x_label: str, y_label: str, colour: str) -> None:
    """Draw a curve on logarithmic axes; the y axis is linear if a value is 0."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    axes.plot(x, y, "o-", color=colour, linewidth=1, markersize=3.5)
    axes.set(xlabel=x_label, ylabel=y_label, xscale="log")
    if min(y, default=0) > 0:
        axes.set_yscale("log")
        axes.set_ylim(min(y) / 1.3, max(y) * 1.3)
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if max(y) > 10 * min(y) else (1, 1.5, 2, 3, 5, 7)))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.10g}"))
        axes.yaxis.set_minor_locator(NullLocator())
    axes.set_xticks(x, [str(value) for value in x])
    axes.set_xticks([], minor=True)
    axes.grid(alpha=0.25, linewidth=0.5)


def format_cost_caption(context: FigureContext, costs: list[InferenceCost], image_sizes: list[tuple[int, ...]]) -> str:
    """Build the caption of the cost figure: model, precision, hardware, and which values are measured or estimated."""
    model_dtype = next(context.model.parameters()).dtype
    precision = next(name for name, dtype in DTYPES.items() if dtype == model_dtype)
    hardware = f"{get_processor_name()}, {format_count(torch.get_num_threads(), 'thread')}"
    if context.device.startswith("cuda"):
        hardware = torch.cuda.get_device_name(context.device)
    if costs[0].is_measured:
        batches = (
            f"The largest batch is the largest that ran, among --batch-sizes or the "
            f"powers of two up to {MAX_TRIED_BATCH_SIZE}"
        )
    else:
        batches = (
            f"The largest batch is an estimate: {100 * CPU_MEMORY_SHARE:.0f} % of the free memory divided by the "
            f"memory of an image, at most {MAX_TRIED_BATCH_SIZE}"
        )
    skipped_sizes = [format_dimensions(image) for image in image_sizes[len(costs) :]]
    skipped_note = f" Skipped because of the time limit: {', '.join(skipped_sizes)}." if skipped_sizes else ""
    return (
        f"Forward passes of {context.model.config.name()} in {precision} on {hardware}: images/s at the fastest "
        f"batch size of {', '.join(map(str, sorted({size for cost in costs for size in cost.throughputs})))}. "
        f"{batches}. "
        "Memory is the peak size of all tensors of one image, without the model; a multiply-add "
        f"counts as two operations.{skipped_note} As in arXiv:2010.11929, Fig. 12."
    )
