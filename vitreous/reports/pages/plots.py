"""Plots of pages as SVG markup. Text and axes have the page's text colour, for light and dark themes."""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from PIL import Image

from vitreous.reports.pages.formats import PERCENT_METRICS
from vitreous.reports.pages.hover import HoverPoint, HoverSeries, HoverValues
from vitreous.tasks.base import ScatterChart

if TYPE_CHECKING:
    from matplotlib.figure import Figure

INK = "#010203"  # placeholder that is replaced by the page's text colour
#: matplotlib settings: text and axes have the colour `INK`, and text is not converted to paths
INK_STYLE: dict[Any, Any] = {
    **dict.fromkeys(("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color"), INK),
    "svg.fonttype": "none",
    "svg.hashsalt": "vitreous",
}
# legible on white and on black
LINE_COLOURS = ("#3b8ed0", "#d1823b", "#3fa66b", "#c2578f", "#8a78d6", "#a59321", "#2fa3a8", "#b65c4a")

# side in inches of a cell of a confusion matrix; the second from FINE_CELL_CLASSES classes on
CELL_INCHES, FINE_CELL_INCHES = 0.36, 0.24
FINE_CELL_CLASSES = 20
DIGIT_WIDTH = 0.65  # width of a digit relative to the font size, in the widest common sans-serif font
CELL_FONTS = (4.5, 8.0)  # smallest and largest font size in points of a count; smaller counts are omitted


class Curve(NamedTuple):
    """A curve of a chart: the metric `key` of log `lines` against epochs. `dashes` is matplotlib's line style."""

    name: str
    colour: str
    lines: list[dict[str, Any]]
    key: str
    dashes: str = "-"

    def points(self) -> list[tuple[float, float]]:
        """Return (epoch, value) of every log line that contains the metric."""
        return [(line["epoch"], line[self.key]) for line in self.lines if line.get(self.key) is not None]


@contextmanager
def use_page_style() -> Iterator[None]:
    """Apply the matplotlib settings of page plots; plots are drawn and saved within this context."""
    from matplotlib import rc_context

    with rc_context({**INK_STYLE, "font.size": 9, "font.family": "sans-serif"}):
        yield


def figure_to_svg_markup(figure: Figure, label: str, hover: HoverValues | None = None, **options: Any) -> Any:
    """Convert a figure to SVG markup. `label` is for screen readers, `hover` has the values that pages show next to
    the cursor, `options` are those of `savefig`.

    The CSS variable `--side` of the markup is the width in pixels.
    """
    from markupsafe import Markup, escape

    file = io.StringIO()
    figure.savefig(file, format="svg", transparent=True, metadata={"Date": None, "Creator": None}, **options)
    text = file.getvalue()
    text = text[text.index("<svg") :].replace(INK, "currentColor")
    width = re.search(r'width="([\d.]+)pt"', text)
    assert width is not None, "matplotlib writes the width in points"
    css_width = float(width[1]) * 96 / 72
    head = f'<svg role="img" aria-label="{escape(label)}" style="--side: {css_width:.0f}px"'
    if hover is not None:
        head += f' data-hover="{escape(hover.to_json(figure))}"'
    return Markup(text.replace("<svg", head, 1))


def figure_to_image(figure: Figure, label: str) -> Image.Image:
    """Convert a figure to an RGB image on white; `label` is the title in its metadata."""
    file = io.BytesIO()
    figure.savefig(file, format="png", dpi=120, facecolor="white", metadata={"Title": label})
    return Image.open(file).convert("RGB")


def draw_metric_curves(
    label: str,
    series: Sequence[Curve],
    legend: str | None = None,
    limits: tuple[float, float] | None = None,
    references: Mapping[str, float] = MappingProxyType({}),
) -> Any:
    """Draw metrics against epochs.

    `label` is for screen readers, `legend` the title of the legend, `limits` the y range, `references` maps names to
    the values of horizontal lines. Metrics that are shares are drawn in per cent.
    """
    from matplotlib.figure import Figure
    from matplotlib.ticker import PercentFormatter

    with use_page_style():
        figure = Figure(figsize=(4.6, 2.9))
        # placing the legend automatically takes as long as drawing
        figure.subplots_adjust(left=0.14, right=0.98, bottom=0.155, top=0.93)
        axes = figure.subplots()
        for curve in series:
            if points := curve.points():
                marker = "o" if len(points) < 20 else ""
                style: dict[str, Any] = {
                    "color": curve.colour,
                    "linestyle": curve.dashes,
                    "marker": marker,
                    "markersize": 3,
                }
                axes.plot(*zip(*points, strict=True), label=curve.name, **style)
        for name, value in references.items():
            axes.axhline(value, color=INK, alpha=0.55, linewidth=1, linestyle="--")
            alignment = {"transform": axes.get_yaxis_transform(), "ha": "right", "va": "top"}
            axes.text(0.99, value - 0.01 * (limits or (0, 0))[1], name, **alignment, fontsize=8)
        axes.set_xlabel("epochs")
        axes.set_xlim(left=0)
        if limits is not None:
            axes.set_ylim(*limits)
        if all(curve.key.rpartition("/")[2] in PERCENT_METRICS for curve in series):
            axes.yaxis.set_major_formatter(PercentFormatter(1.0, symbol=" %"))
        else:
            axes.ticklabel_format(axis="y", style="sci", scilimits=(-3, 5), useMathText=False)
        style_axes(axes)
        names = [text for text in axes.get_legend_handles_labels()[1] if text]
        if names and (legend is not None or len(names) > 1):
            axes.legend(frameon=False, title=legend, fontsize=8)
        return figure_to_svg_markup(figure, label, HoverValues(axes, [describe_curve(curve) for curve in series]))


def describe_curve(curve: Curve) -> HoverSeries:
    """Return the tooltips of a metric curve: epoch and value."""
    metric = curve.key.rpartition("/")[2]
    points = [
        HoverPoint(epoch, value, f"epoch {epoch:.4g}", f"{value:.1%}" if metric in PERCENT_METRICS else f"{value:.4g}")
        for epoch, value in curve.points()
    ]
    return HoverSeries(curve.name, curve.colour.replace(INK, "currentColor"), points)


def draw_scatter(chart: ScatterChart) -> Any:
    """Draw a scatter chart with its reference line, y = x or y = 0. The more points, the more transparent they are."""
    from matplotlib.figure import Figure

    with use_page_style():
        figure = Figure(figsize=(4.6, 3.4))
        figure.subplots_adjust(left=0.17, right=0.97, bottom=0.15, top=0.96)
        axes = figure.subplots()
        low, high = float(min(chart.x.min(), chart.y.min())), float(max(chart.x.max(), chart.y.max()))
        ends = ([low, high], [low, high]) if chart.diagonal else ([float(chart.x.min()), float(chart.x.max())], [0, 0])
        if chart.diagonal or chart.level:
            axes.plot(*ends, color=INK, alpha=0.5, linewidth=1, linestyle="--")
        opacity = float(np.clip(40 / np.sqrt(len(chart.x)) / 4, 0.15, 0.8))
        axes.plot(chart.x, chart.y, "o", color=LINE_COLOURS[0], markersize=3.5, markeredgewidth=0, alpha=opacity)
        axes.set_xlabel(chart.x_label)
        axes.set_ylabel(chart.y_label)
        axes.ticklabel_format(style="sci", scilimits=(-3, 5), useMathText=False)
        style_axes(axes)
        points = [
            HoverPoint(x, y, f"{chart.x_label} {x:.4g}", f"{chart.y_label} {y:.4g}")
            for x, y in zip(chart.x.tolist(), chart.y.tolist(), strict=True)
        ]
        hover = HoverValues(axes, [HoverSeries("", LINE_COLOURS[0], points)], by="point")
        return figure_to_svg_markup(figure, chart.title, hover)


def draw_reliability_plot(edges: np.ndarray, accuracy: np.ndarray, confidence: np.ndarray, counts: np.ndarray) -> Any:
    """Draw accuracy against confidence, and the number of images, per confidence bin.

    `edges` is (bins + 1,), the others are (bins,): accuracy, mean confidence, and number of images of each bin.
    """
    from matplotlib.figure import Figure

    with use_page_style():
        figure = Figure(figsize=(4.8, 4.4))
        figure.subplots_adjust(left=0.12, right=0.97, bottom=0.11, top=0.97, hspace=0.08)
        upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=(3, 1))
        width, is_filled = edges[1] - edges[0], counts > 0
        upper.plot([0, 1], [0, 1], color=INK, alpha=0.4, linewidth=1, linestyle="--")
        upper.bar(
            edges[:-1][is_filled] + width / 2, accuracy[is_filled], width * 0.92, color=LINE_COLOURS[0], alpha=0.55
        )
        upper.plot(confidence[is_filled], accuracy[is_filled], "o", color=LINE_COLOURS[1], markersize=4)
        upper.set_ylabel("accuracy")
        upper.set_ylim(0, 1)
        upper.set_xlim(0, 1)
        lower.bar(edges[:-1] + width / 2, counts, width * 0.92, color=INK, alpha=0.45)
        lower.set_ylabel("images")
        lower.set_xlabel("confidence")
        for axes in (upper, lower):
            style_axes(axes)
        return figure_to_svg_markup(figure, "reliability diagram")


def draw_confusion_plot(
    matrix: np.ndarray, names: Sequence[str], render: Callable[[Figure, str], Any] = figure_to_svg_markup
) -> Any:
    """Draw a confusion matrix of counts (K, K), whose rows are labels; colours show shares of a row.

    Counts are written if they fit into the cells. In SVG markup, each cell has a title with its classes and its count.
    """
    from matplotlib.figure import Figure
    from matplotlib.patches import Rectangle

    count = len(names)
    cell = CELL_INCHES if count < FINE_CELL_CLASSES else FINE_CELL_INCHES
    margin = 0.078 * min(18, max(len(name) for name in names)) + 0.5  # inches for class names and axis labels
    side = margin + max(2.1, cell * count)
    points = 72 * (side - margin) / count  # points per side of a cell
    row_shares = matrix / np.maximum(matrix.sum(1, keepdims=True), 1)
    digits = max(len(format_compact_count(int(value))) for value in matrix.flat)
    size = min(CELL_FONTS[1], 0.9 * points / (DIGIT_WIDTH * digits))
    with use_page_style():
        figure = Figure(figsize=(side, side))
        figure.subplots_adjust(left=margin / side, right=1 - 0.05 / side, bottom=margin / side, top=1 - 0.05 / side)
        axes = figure.subplots()
        axes.set_facecolor("none")
        # squares, not an image: empty cells keep the page's background colour
        for (row, column), value in np.ndenumerate(row_shares):
            if value:
                cell_style = {
                    "facecolor": LINE_COLOURS[row != column],
                    "alpha": 0.12 + 0.78 * float(value),
                    "linewidth": 0,
                }
                axes.add_artist(Rectangle((column - 0.5, row - 0.5), 1, 1, gid=f"cell-{row}-{column}", **cell_style))
                if size >= CELL_FONTS[0]:
                    text_style: dict[str, Any] = {"ha": "center", "va": "center", "gid": f"count-{row}-{column}"}
                    axes.text(column, row, format_compact_count(int(matrix[row, column])), fontsize=size, **text_style)
        shorter = [name if len(name) <= 18 else name[:17] + "…" for name in names]
        axes.set_xticks(range(count), shorter, rotation=90)
        axes.set_yticks(range(count), shorter)
        for text in (*axes.get_xticklabels(), *axes.get_yticklabels()):
            text.set_parse_math(False)  # a class name may contain $x$
        axes.tick_params(length=0, labelsize=9 if count < FINE_CELL_CLASSES else 7)
        axes.set_xlim(-0.5, count - 0.5)
        axes.set_ylim(count - 0.5, -0.5)
        axes.set_xlabel("predicted")
        axes.set_ylabel("label")
        axes.spines[:].set_visible(False)
        rendered = render(figure, "confusion matrix")
    return add_cell_titles(rendered, matrix, names) if render is figure_to_svg_markup else rendered


def format_compact_count(count: int) -> str:
    """Format a count in at most four characters: 9999, `12k`, `340k`, `1.2M`."""
    if count < 10_000:
        return str(count)
    if count < 999_500:
        return f"{count / 1000:.0f}k"
    millions = count / 1e6
    return f"{millions:.1f}M" if millions < 9.95 else f"{millions:.0f}M"


def add_cell_titles(drawing: Any, matrix: np.ndarray, names: Sequence[str]) -> Any:
    """Add a title with classes, count and share to each cell of the markup of a confusion matrix (K, K)."""
    from markupsafe import Markup, escape

    def cell_title(match: re.Match[str]) -> str:
        row, column = int(match[1]), int(match[2])
        total = max(int(matrix[row].sum()), 1)
        share = f"{100 * matrix[row, column] / total:.1f} % of {total:,}"
        text = f"label {names[row]}, predicted {names[column]}: {matrix[row, column]:,} ({share})"
        return f'<g class="cell"><title>{escape(text)}</title>'

    text = re.sub(r'<g id="cell-(\d+)-(\d+)">', cell_title, str(drawing))
    return Markup(re.sub(r'<g id="count-\d+-\d+">', '<g class="count">', text))


def style_axes(axes: Any) -> None:
    """Style axes for pages: remove the top and right spines, and add a faint grid."""
    axes.grid(alpha=0.2, color=INK)
    axes.spines[["top", "right"]].set_visible(False)
