"""The page of a study: a self-contained HTML file, and the same content as Markdown."""

from __future__ import annotations

import os
import shlex
from base64 import b64encode
from pathlib import Path
from typing import Any

from vitreous.apps.studies.drawing import draw_study_figure
from vitreous.apps.studies.statistics import Estimate
from vitreous.apps.studies.study import SCALES, STUDY_METRIC_LABELS, Study
from vitreous.apps.studies.tables import TableRow
from vitreous.reports.pages.formats import PERCENT_METRICS, format_metric_value, format_seconds, render_template
from vitreous.system.disk import write_text_atomic
from vitreous.tasks.metrics import get_metric_label

PAGE_FILE, MARKDOWN_FILE, FIGURE_FILE = "report.html", "report.md", "figure.svg"


def write_study_pages(study_folder: Path, study: Study, document: dict[str, Any], rows: list[TableRow]) -> None:
    """Write `report.html`, `report.md` and `figure.svg` into the folder of a study. Raises OSError."""
    context = build_page_context(study_folder, study, document, rows)
    curves = document["conclusion"]["curves"] if document["conclusion"] else {}
    figure = draw_study_figure(study, rows, document["metric"], context["figure_name"], curves)
    run_figures = [
        run_figure | {"drawing": embed_figure(study_folder / run_figure["file"], run_figure["title"])}
        for run_figure in document["figures"]
    ]
    write_text_atomic(
        study_folder / PAGE_FILE, render_template("study.html", **context | {"figures": run_figures}, drawing=figure)
    )
    write_text_atomic(
        study_folder / MARKDOWN_FILE, render_study_markdown(context | {"figure": FIGURE_FILE if figure else None})
    )
    if figure:
        write_text_atomic(study_folder / FIGURE_FILE, str(figure).replace('style="', 'style="background: #fff; ', 1))


def embed_figure(path: Path, title: str) -> str:
    """Return a figure of `vitreous inspect` as markup: the SVG next to its PNG file, or else the PNG."""
    from markupsafe import Markup

    if (drawing := path.with_suffix(".svg")).is_file():
        return Markup(drawing.read_text("utf-8"))
    data = b64encode(path.read_bytes()).decode()
    return Markup('<img src="data:image/png;base64,{}" alt="{}">').format(data, title)


def build_page_context(
    study_folder: Path, study: Study, document: dict[str, Any], rows: list[TableRow]
) -> dict[str, Any]:
    """Build the texts and tables that both pages contain."""
    metric_name = document["metric"]
    label = STUDY_METRIC_LABELS.get(metric_name, get_metric_label(metric_name))
    table = [
        {
            "axis_values": row.axis_values,
            "cells": format_row_cells(row, metric_name),
            "reference": row.reference is None,
            "runs": list_run_links(study_folder, row),
        }
        for row in rows
    ]
    return {
        "study": study,
        "figure_name": label,
        "setting": describe_study_setting(document, rows),
        "command": format_study_command(document["settings"], study_folder),
        "columns": [*study.axes, f"mean {label}", "95 % interval", "difference", "95 % interval"],
        "table": table,
        "notes": list_table_notes(document, rows),
        "conclusion": document["conclusion"],
        "figures": document["figures"],
        "elsewhere": [
            (" · ".join(axis_values), value)
            for axis_values, value in study.published.values.items()
            if axis_values not in {row.axis_values for row in rows}
        ],
    }


def format_row_cells(row: TableRow, metric_name: str) -> list[str]:
    """Format a row's mean, its interval, the difference to the reference, its interval, the verdict, and the published
    value."""
    mean, pair = row.mean, row.difference
    return [
        "–" if mean is None else format_metric_value(metric_name, mean.mean),
        format_interval_ends(
            mean,
            lambda value: format_metric_value(
                metric_name, min(1.0, max(0.0, value)) if metric_name in PERCENT_METRICS else value, 1
            ),
        ),
        "–" if pair is None else format_difference(metric_name, pair.mean),
        format_interval_ends(pair, lambda value: format_difference(metric_name, value)),
        row.verdict,
        row.published or "–",
    ]


def format_interval_ends(estimate: Estimate | None, format_value: Any) -> str:
    """Format the ends of an estimate's interval with `format_value`; a dash if there is no interval."""
    return "–" if estimate is None or estimate.interval is None else " to ".join(map(format_value, estimate.interval))


def format_difference(metric_name: str, difference: float) -> str:
    """Format a difference with its sign; percentages in percentage points."""
    return f"{100 * difference:+.2f}" if metric_name in PERCENT_METRICS else f"{difference:+.3f}"


def list_run_links(study_folder: Path, row: TableRow) -> list[dict[str, Any]]:
    """List the pages of a row's runs by seed, relative to the study's folder. A run without a page is linked to its
    summary."""
    files = [Path(folder) / "report.html" for folder in dict.fromkeys(row.runs) if folder]
    files = [file if file.is_file() else file.with_name("summary.json") for file in files]
    return [
        {"seed": seed, "href": os.path.relpath(file, study_folder).replace(os.sep, "/")}
        for seed, file in enumerate(files)
    ]


def describe_study_setting(document: dict[str, Any], rows: list[TableRow]) -> list[str]:
    """Describe the settings of the runs in sentences."""
    settings = document["settings"]
    label = STUDY_METRIC_LABELS.get(document["metric"], get_metric_label(document["metric"]))
    if not document["steps"]:
        return [f"Randomly initialised models, {settings['seeds']} per cell; no training. Metric: {label}."]
    steps = " to ".join(f"{count:,}" for count in sorted({document["steps"][0], document["steps"][-1]}))
    image_count_text = f" on {document['images']:,} validation images" if document["images"] else ""
    summary = (
        f"{len(document['runs'])} runs on {settings['data']} at scale {settings['scale']} "
        f"({SCALES[settings['scale']].about}): {settings['seeds']} per cell, {steps} optimiser steps each, "
        f"{format_seconds(document['wall_seconds'])} of training in total. "
        f"Metric: {label}{image_count_text}."
    )
    lines = [summary]
    if other_datasets := list(dict.fromkeys(settings["to"])):
        lines.append(f"Target datasets: {', '.join(other_datasets)}.")
    elif document["uses_other_datasets"]:
        lines.append(
            "All datasets are subsets of the digits: pre-training uses the digits 0 to 4, and 40 % of each subset are "
            "validation images."
        )
    if settings["step_fraction"] < 1:
        lines.append(
            f"To fit the budget of {settings['budget']}, every run has {settings['step_fraction']:.0%} of the scale's "
            "steps, so late training is not covered."
        )
    return lines


def list_table_notes(document: dict[str, Any], rows: list[TableRow]) -> list[str]:
    """List notes that explain the table."""
    reference = sorted({" · ".join(row.reference) for row in rows if row.reference})
    interval_note = (
        "Intervals are Student's t over seeds, without a correction for multiple comparisons: 1 in 20 is expected to "
        f"miss. Differences are to the reference ({'; '.join(reference)}) and paired by seed; a difference whose "
        "interval contains 0 is inconclusive."
    )
    notes = [interval_note, "All seeds are evaluated on the same images, so the intervals do not cover other images."]
    if document["settings"]["seeds"] == 1:
        notes.append("One seed gives no interval, so differences are inconclusive. Use --seeds 3 or more.")
    if failed := sum(row.failed for row in rows):
        notes.append(f"{failed} runs ended with a non-finite loss and are excluded from the means.")
    return notes


def format_study_command(settings: dict[str, Any], study_folder: Path) -> str:
    """Format the command that reproduces the study."""
    arguments = ["vitreous", "study", settings["name"]]
    for name in ("data", "scale", "seeds", "steps", "budget", "device", "precision"):
        if settings[name] is not None:
            arguments += [f"--{name}", str(settings[name])]
    if settings["to"]:
        arguments += ["--to", *settings["to"]]
    return shlex.join([*arguments, "--out", str(study_folder.parent)])


def render_study_markdown(context: dict[str, Any]) -> str:
    """Render the page as Markdown. Its figure is a separate file."""
    study: Study = context["study"]
    head = [*context["columns"], "verdict", "published", "runs"]
    lines = [f"# {study.title}", "", study.question, f"({study.source})", "", "```", context["command"], "```", ""]
    lines += [*context["setting"], "", format_markdown_row(head), format_markdown_row(["---"] * len(head))]
    for row in context["table"]:
        runs = " ".join(f"[{run['seed']}]({run['href']})" for run in row["runs"])
        lines.append(format_markdown_row([*row["axis_values"], *row["cells"], runs]))
    if context["figure"]:
        lines += ["", f"![{study.title}]({context['figure']})"]
    lines += ["", *(f"- {note}" for note in context["notes"])]
    if conclusion := context["conclusion"]:
        lines += ["", f"## {conclusion['title']}", "", *(f"- {sentence}" for sentence in conclusion["sentences"])]
        if conclusion["rows"]:
            lines += [
                "",
                format_markdown_row(conclusion["columns"]),
                format_markdown_row(["---"] * len(conclusion["columns"])),
            ]
            lines += [format_markdown_row(row) for row in conclusion["rows"]]
    for figure in context["figures"]:
        lines += ["", f"![{figure['title']}, {' '.join(figure['axis_values'])}]({figure['file']})"]
    printed = "".join(f" {name} {value};" for name, value in context["elsewhere"]).rstrip(";")
    lines += [
        "",
        f"Published: {study.published.description}.{printed}",
        "",
        f"Differences from the publication: {study.differs}",
        "",
    ]
    return "\n".join(lines)


def format_markdown_row(cells: list[str]) -> str:
    """Format a row of a Markdown table."""
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"
