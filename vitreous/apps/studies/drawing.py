"""The figure of a study: means with intervals as dots, or as curves against an axis of the table or a measured
quantity."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from types import MappingProxyType
from typing import Any

from vitreous.apps.studies.statistics import Estimate
from vitreous.apps.studies.study import Study
from vitreous.apps.studies.tables import TableRow
from vitreous.reports.pages.formats import PERCENT_METRICS
from vitreous.reports.pages.hover import HoverPoint, HoverSeries, HoverValues
from vitreous.reports.pages.plots import INK, LINE_COLOURS, figure_to_svg_markup, style_axes, use_page_style

#: labels of measured quantities on the x axis
AXIS_LABELS = {
    "exaflops": "training compute, exaFLOPs",
    "parameters": "parameters",
    "images_per_second": "images/s",
    "samples": "training images seen",
    "gflops": "GFLOPs per forward pass",
}


def draw_study_figure(
    study: Study,
    rows: list[TableRow],
    metric: str,
    label: str,
    curves: Mapping[str, Sequence[Sequence[float]]] = MappingProxyType({}),
) -> Any:
    """Draw the figure of a study's rows as SVG markup; None if no row has a mean. Named `curves` of points (x, value)
    are drawn on top."""
    plotted_rows = [row for row in rows if row.mean is not None]
    if not plotted_rows:
        return None
    factor, unit = (100.0, f"{label}, %") if metric in PERCENT_METRICS else (1.0, label)
    if study.chart.x:
        return draw_study_curves(study, plotted_rows, factor, unit, curves)
    return draw_dots(study, plotted_rows, factor, unit)


def draw_dots(study: Study, rows: list[TableRow], factor: float, unit: str) -> Any:
    """Draw a figure with one line per row: the mean, its interval and each seed. Values are multiplied by `factor`;
    `unit` labels the axis."""
    from matplotlib.figure import Figure

    names = [" · ".join(row.axis_values) for row in rows]
    height = 0.9 + 0.3 * len(rows)
    label_width = min(0.45, 0.065 * max(map(len, names)) / 6.4 + 0.04)
    with use_page_style():
        figure = Figure(figsize=(6.4, height))
        figure.subplots_adjust(left=label_width, right=0.98, bottom=0.5 / height, top=1 - 0.15 / height)
        axes = figure.subplots()
        for position, row in enumerate(rows):
            assert row.mean is not None
            colour = LINE_COLOURS[1] if row.reference is None else LINE_COLOURS[0]
            if row.mean.interval:
                axes.plot(scale_interval(row.mean.interval, factor), [position] * 2, color=colour, linewidth=1.5)
            seeds = [factor * value for value in row.values.values()]
            axes.plot(seeds, [position] * len(seeds), "|", color=INK, alpha=0.5, markersize=8)
            axes.plot([factor * row.mean.mean], [position], "o", color=colour, markersize=5)
        axes.set_yticks(range(len(rows)), names)
        axes.set_ylim(len(rows) - 0.5, -0.5)
        axes.set_xlabel(unit)
        style_axes(axes)
        points = [
            HoverPoint(factor * mean.mean, position, names[position], format_mean(mean, factor))
            for position, mean in enumerate(row.mean for row in rows)
            if mean
        ]
        hover = HoverValues(axes, [HoverSeries("", LINE_COLOURS[0], points)], by="point")
        return figure_to_svg_markup(figure, f"{study.title}: {unit}", hover)


def draw_study_curves(
    study: Study, rows: list[TableRow], factor: float, unit: str, curves: Mapping[str, Sequence[Sequence[float]]]
) -> Any:
    """Draw means with intervals against the chart's `x`, with one curve per value of its axes `series`. `curves` are
    dashed lines."""
    from matplotlib.figure import Figure

    series: dict[str, list[tuple[float, TableRow]]] = {}
    for row in rows:
        name = " · ".join(row.axis_values[study.axes.index(axis)] for axis in study.series)
        if (x := get_x_value(study, row)) is not None:
            series.setdefault(name, []).append((x, row))
    with use_page_style():
        figure = Figure(figsize=(6.4, 4.0))
        figure.subplots_adjust(left=0.11, right=0.98, bottom=0.13, top=0.97)
        axes = figure.subplots()
        tooltips = []
        for index, (name, points) in enumerate(series.items()):
            points.sort(key=lambda point: point[0])
            x_values, means = [x for x, _ in points], [row.mean for _, row in points]
            colour = LINE_COLOURS[index % len(LINE_COLOURS)]
            axes.plot(
                x_values,
                [factor * mean.mean for mean in means if mean],
                color=colour,
                label=name,
                marker="o",
                markersize=4,
            )
            tooltips.append(describe_study_curve(colour, points, factor))
            for x, mean in zip(x_values, means, strict=True):
                if mean and mean.interval:
                    axes.plot([x, x], scale_interval(mean.interval, factor), color=colour, linewidth=1, alpha=0.6)
        for name, points in curves.items():
            colour = LINE_COLOURS[list(series).index(name) % len(LINE_COLOURS)] if name in series else INK
            x_values, values = zip(*points, strict=True)
            axes.plot(
                x_values, [factor * value for value in values], color=colour, linestyle="--", linewidth=1, alpha=0.8
            )
        if study.chart.logarithmic:
            axes.set_xscale("log")
        if study.chart.logarithmic_y:
            axes.set_yscale("log")
            for formatter in (axes.yaxis.set_major_formatter, axes.yaxis.set_minor_formatter):
                formatter("{x:.3g}")
        axes.set_xlabel(AXIS_LABELS.get(study.chart.x, study.chart.x))
        axes.set_ylabel(unit)
        style_axes(axes)
        if study.chart.series:
            axes.legend(frameon=False, title=" · ".join(study.series))
        label = f"{study.title}: {unit} against {study.chart.x}"
        return figure_to_svg_markup(figure, label, HoverValues(axes, tooltips, by="point"))


def describe_study_curve(colour: str, points: Sequence[tuple[float, TableRow]], factor: float) -> HoverSeries:
    """Return the tooltips of a curve: the axis values of each row, and its mean with the interval."""
    tooltips = [
        HoverPoint(x, factor * row.mean.mean, " · ".join(row.axis_values), format_mean(row.mean, factor))
        for x, row in points
        if row.mean
    ]
    return HoverSeries("", colour, tooltips)


def format_mean(mean: Estimate, factor: float) -> str:
    """Format a mean with its 95 % interval, if it has one. Values are multiplied by `factor`."""
    percent = " %" if factor > 1 else ""
    text = f"{factor * mean.mean:.4g}{percent}"
    if not mean.interval:
        return text
    low, high = scale_interval(mean.interval, factor)
    return f"{text} ({low:.4g} to {high:.4g}{percent})"


def scale_interval(interval: tuple[float, float], factor: float) -> list[float]:
    """Multiply the ends of an interval by `factor`, and clip percentages to 0-100 %."""
    return [min(100.0, max(0.0, factor * end)) if factor > 1 else end for end in interval]


def get_x_value(study: Study, row: TableRow) -> float | None:
    """Return the x value of a row: the number in the axis value of the chart's `x`, or a measured quantity; None if
    there is none."""
    if study.chart.x not in study.axes:
        return row.measurements.get(study.chart.x)
    with suppress(ValueError):
        return float(row.axis_values[study.axes.index(study.chart.x)].split()[0].rstrip("%"))
    return None
