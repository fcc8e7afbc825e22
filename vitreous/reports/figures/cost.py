"""The figure of what a model costs by input size (arXiv:2010.11929, Fig. 12)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from vitreous.inspection.cost import MOST, SIZES, SPARE, Cost, costs, sizes
from vitreous.machine import DTYPES, processor
from vitreous.models.names import name_of
from vitreous.reports.figures.style import BLUE, ORANGE, styled, times
from vitreous.reports.scene import FigureResult, Scene

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SECONDS = 45.0


@styled
def make(scene: Scene) -> list[FigureResult]:
    """Images a second, the largest batch, memory and operations against the size of the input."""
    from matplotlib.figure import Figure

    model, device = scene.model, scene.device
    wanted, measured = sizes(model, (*SIZES, max(scene.preprocess.image))), []
    for cost in costs(model, wanted, scene.options.batch_sizes, SECONDS):
        measured.append(cost)
        scene.listener.progress("cost", len(measured), len(wanted))
    side, tokens = [cost.image[0] for cost in measured], [cost.tokens for cost in measured]
    figure = Figure(figsize=(7.2, 5.2), layout="constrained")
    (speed, batch), (memory, operations) = figure.subplots(2, 2)
    curve(speed, side, [cost.best[1] for cost in measured], "input size (pixels a side)", "images per second", BLUE)
    curve(
        batch, side, [cost.largest for cost in measured], "input size (pixels a side)", "largest batch (images)", BLUE
    )
    curve(memory, tokens, [cost.memory / 2**20 for cost in measured], "tokens", "memory of an image (MiB)", ORANGE)
    curve(
        operations,
        tokens,
        [2 * cost.macs / 1e9 for cost in measured],
        "tokens",
        "operations of an image (GFLOP)",
        ORANGE,
    )
    for axes in (memory, operations):
        low, high = axes.get_lines()[0].get_ydata()[0], axes.get_ylim()[1]  # type: ignore[index]
        axes.plot(
            tokens,
            [low * count / tokens[0] for count in tokens],
            "--",
            color="0.5",
            linewidth=0.8,
            label="in proportion to tokens",
        )
        axes.set_ylim(top=high)
        axes.legend(loc="upper left")
    numbers = {
        "image": np.array([cost.image for cost in measured]),
        "tokens": np.array(tokens),
        "macs": np.array([cost.macs for cost in measured]),
        "memory_bytes": np.array([cost.memory for cost in measured]),
        "images_per_second": np.array([cost.best[1] for cost in measured]),
        "batch": np.array([cost.best[0] for cost in measured]),
        "largest_batch": np.array([cost.largest for cost in measured]),
    }
    rows = [
        [times(cost.image), cost.tokens, 2 * cost.macs, cost.memory, size, f"{rate:.2f}", cost.largest]
        for cost in measured
        for size, rate in cost.rate.items()
    ]
    head = ["image", "tokens", "flops", "memory_bytes", "batch", "images_per_second", "largest_batch"]
    return [
        FigureResult(
            "cost", "Cost by input size", caption(scene, measured, wanted, device), figure, numbers, (head, rows)
        )
    ]


def curve(axes: Axes, x: list[int], y: list[float], across: str, up: str, colour: str) -> None:
    """One quantity against another, both on logarithmic axes."""
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


def caption(scene: Scene, measured: list[Cost], wanted: list[tuple[int, int]], device: str) -> str:
    """What is seen, and what of it is an estimate."""
    import torch

    threads = torch.get_num_threads()
    own = next(scene.model.parameters()).dtype
    precision = next(name for name, dtype in DTYPES.items() if dtype == own)
    where = (
        torch.cuda.get_device_name(device)
        if device.startswith("cuda")
        else f"{processor()}, {threads} thread{'s' * (threads > 1)}"
    )
    if measured[0].tried:
        batches = f"The largest batch is the largest that ran, of those named or of the powers of two up to {MOST}"
    else:
        batches = (
            f"The largest batch is an estimate, {100 * SPARE:.0f} % of the memory now free over that of an "
            f"image, at most {MOST}"
        )
    left = [times(image) for image in wanted[len(measured) :]]
    out = f" Left out, for the time they would take: {', '.join(left)}." if left else ""
    return (
        f"Forward passes of {name_of(scene.model.config)} in {precision} on {where}: images per second of the fastest "
        f"batch of {', '.join(map(str, sorted({size for cost in measured for size in cost.rate})))}. {batches}. "
        "Memory is what the tensors of one "
        f"image hold at the same time, beyond the model; operations count a multiply-add as two.{out} As in "
        "arXiv:2010.11929, Fig. 12."
    )
