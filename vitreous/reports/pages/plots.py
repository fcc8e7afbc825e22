"""Drawings for pages: SVG markup in the page's text colour, for light and dark."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
from PIL import Image

if TYPE_CHECKING:
    from matplotlib.figure import Figure

INK = "#010203"  # stands for the colour of the page's text
# legible on white and on black
COLOURS = ("#3b8ed0", "#d1823b", "#3fa66b", "#c2578f", "#8a78d6", "#a59321", "#2fa3a8", "#b65c4a")

Curve = tuple[str, str, list[dict[str, Any]]]  # name, colour, lines of metrics


@contextmanager
def style() -> Iterator[None]:
    """Apply matplotlib's settings for a drawing of the page, while it is made and saved."""
    from matplotlib import rc_context

    inked = dict.fromkeys(("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color"), INK)
    with rc_context(
        {**inked, "svg.fonttype": "none", "svg.hashsalt": "vitreous", "font.size": 9, "font.family": "sans-serif"}
    ):
        yield


def markup(figure: Figure, label: str) -> Any:
    """Return a figure as SVG markup with a label for screen readers."""
    from markupsafe import Markup, escape

    file = io.StringIO()
    figure.savefig(file, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    text = file.getvalue()
    text = text[text.index("<svg") :].replace(INK, "currentColor")
    return Markup(text.replace("<svg", f'<svg role="img" aria-label="{escape(label)}"', 1))


def raster(figure: Figure, label: str) -> Image.Image:
    """Return a figure as a picture on white."""
    file = io.BytesIO()
    figure.savefig(file, format="png", dpi=120, facecolor="white", metadata={"Title": label})
    return Image.open(file).convert("RGB")


def curves(
    title: str, key: str, series: Sequence[Curve], legend: str | None = None, limits: tuple[float, float] | None = None
) -> Any:
    """Draw a key of the metrics against epochs; `legend` heads the names of curves, `limits` is the range of y."""
    from matplotlib.figure import Figure

    with style():
        figure = Figure(figsize=(4.6, 3.2))
        # finding the room takes as long as drawing
        figure.subplots_adjust(left=0.12, right=0.98, bottom=0.14, top=0.91)
        axes = figure.subplots()
        for name, colour, lines in series:
            points = [(line["epoch"], line[key]) for line in lines if line.get(key) is not None]
            if points:
                marker = "o" if len(points) < 20 else ""
                axes.plot(*zip(*points, strict=True), color=colour, label=name, marker=marker, markersize=3)
        axes.set_title(title, fontsize=10)
        axes.set_xlabel("epochs")
        if limits is not None:
            axes.set_ylim(*limits)
        axes.ticklabel_format(axis="y", style="sci", scilimits=(-3, 5), useMathText=False)
        strip_axes(axes)
        if axes.lines and legend is not None:
            axes.legend(frameon=False, title=legend)
        return markup(figure, title)


def reliability(edges: np.ndarray, accuracy: np.ndarray, confidence: np.ndarray, counts: np.ndarray) -> Any:
    """Draw accuracy of each bin of confidence (nan where empty) against mean confidence, and counts; all (bins,)."""
    from matplotlib.figure import Figure

    with style():
        figure = Figure(figsize=(4.8, 4.4))
        figure.subplots_adjust(left=0.12, right=0.97, bottom=0.11, top=0.97, hspace=0.08)
        upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=(3, 1))
        width, full = edges[1] - edges[0], counts > 0
        upper.plot([0, 1], [0, 1], color=INK, alpha=0.4, linewidth=1, linestyle="--")
        upper.bar(edges[:-1][full] + width / 2, accuracy[full], width * 0.92, color=COLOURS[0], alpha=0.55)
        upper.plot(confidence[full], accuracy[full], "o", color=COLOURS[1], markersize=4)
        upper.set_ylabel("share that is right")
        upper.set_ylim(0, 1)
        upper.set_xlim(0, 1)
        lower.bar(edges[:-1] + width / 2, counts, width * 0.92, color=INK, alpha=0.45)
        lower.set_ylabel("images")
        lower.set_xlabel("probability of the class predicted")
        for axes in (upper, lower):
            strip_axes(axes)
        return markup(figure, "reliability diagram")


def confusion(matrix: np.ndarray, names: Sequence[str], render: Callable[[Figure, str], Any] = markup) -> Any:
    """Draw a (K, K) confusion matrix, rows are labels, as shares of each row; counts are written where they fit."""
    from matplotlib.figure import Figure

    count, side = len(names), min(9.0, max(3.6, 1.6 + 0.3 * len(names)))
    rows = matrix / np.maximum(matrix.sum(1, keepdims=True), 1)
    with style():
        figure = Figure(figsize=(side, side))
        room = 0.078 * min(18, max(len(name) for name in names)) + 0.5  # inches: of names, and of what the axis shows
        figure.subplots_adjust(left=room / side, right=0.99, bottom=room / side, top=0.99)
        axes = figure.subplots()
        axes.set_facecolor("none")
        # squares, not an image: what is not there stays the page's own colour
        for (row, column), value in np.ndenumerate(rows):
            if value:
                across, down = ([place + offset for offset in (-0.5, 0.5)] for place in (column, row))
                look = {"color": COLOURS[row != column], "alpha": 0.12 + 0.78 * float(value)}
                axes.fill([*across, *reversed(across)], np.repeat(down, 2), linewidth=0, **look)
                if count <= 30:
                    size = 8 if count <= 15 else 6
                    axes.text(column, row, str(matrix[row, column]), ha="center", va="center", fontsize=size)
        shorter = [name if len(name) <= 18 else name[:17] + "…" for name in names]
        axes.set_xticks(range(count), shorter, rotation=90)
        axes.set_yticks(range(count), shorter)
        for text in (*axes.get_xticklabels(), *axes.get_yticklabels()):
            text.set_parse_math(False)  # a class may be called $x$
        axes.tick_params(length=0, labelsize=9 if count <= 20 else 7)
        axes.set_xlim(-0.5, count - 0.5)
        axes.set_ylim(count - 0.5, -0.5)
        axes.set_xlabel("predicted")
        axes.set_ylabel("label")
        axes.spines[:].set_visible(False)
        return render(figure, "confusion matrix")


def strip_axes(axes: Any) -> None:
    """Leave axes no more lines than are needed."""
    axes.grid(alpha=0.2, color=INK)
    axes.spines[["top", "right"]].set_visible(False)
