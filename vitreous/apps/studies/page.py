"""The page of a study, as a self-contained HTML file and as Markdown."""

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


def write_study_pages(home: Path, study: Study, document: dict[str, Any], rows: list[TableRow]) -> None:
    """Write `report.html`, `report.md` and its `figure.svg` into the folder of a study. Raises OSError."""
    parts = build_page_context(home, study, document, rows)
    curves = document["conclusion"]["curves"] if document["conclusion"] else {}
    figure = draw_study_figure(study, rows, document["figure"], parts["figure_name"], curves)
    drawn = [one | {"drawing": embed_figure(home / one["file"], one["title"])} for one in document["pictures"]]
    write_text_atomic(home / PAGE_FILE, render_template("study.html", **parts | {"pictures": drawn}, drawing=figure))
    write_text_atomic(home / MARKDOWN_FILE, render_study_markdown(parts | {"figure": FIGURE_FILE if figure else None}))
    if figure:
        write_text_atomic(home / FIGURE_FILE, str(figure).replace('style="', 'style="background: #fff; ', 1))


def embed_figure(path: Path, title: str) -> str:
    """Return a figure of `inspect` as markup: the SVG next to its PNG file, in the page's text colour, or else the
    PNG."""
    from markupsafe import Markup

    if (drawing := path.with_suffix(".svg")).is_file():
        return Markup(drawing.read_text("utf-8"))
    data = b64encode(path.read_bytes()).decode()
    return Markup('<img src="data:image/png;base64,{}" alt="{}">').format(data, title)


def build_page_context(home: Path, study: Study, document: dict[str, Any], rows: list[TableRow]) -> dict[str, Any]:
    """Build the content of both pages as texts."""
    figure = document["figure"]
    label = STUDY_METRIC_LABELS.get(figure, get_metric_label(figure))
    table = [
        {
            "place": row.place,
            "cells": format_row_cells(row, figure),
            "reference": row.reference is None,
            "runs": list_run_links(home, row),
        }
        for row in rows
    ]
    return {
        "study": study,
        "figure_name": label,
        "setting": describe_study_setting(document, rows),
        "command": format_study_command(document["settings"], home),
        "columns": [*study.axes, f"mean {label}", "95 % interval", "difference", "95 % interval"],
        "table": table,
        "notes": list_table_notes(document, rows),
        "conclusion": document["conclusion"],
        "pictures": document["pictures"],
        "elsewhere": [
            (" · ".join(place), value)
            for place, value in study.published.values.items()
            if place not in {row.place for row in rows}
        ],
    }


def format_row_cells(row: TableRow, figure: str) -> list[str]:
    """Format mean, interval, difference, its interval, verdict and published value of a row."""
    mean, pair = row.mean, row.difference
    return [
        "–" if mean is None else format_metric_value(figure, mean.mean),
        format_interval_ends(
            mean,
            lambda value: format_metric_value(
                figure, min(1.0, max(0.0, value)) if figure in PERCENT_METRICS else value, 1
            ),
        ),
        "–" if pair is None else format_difference(figure, pair.mean),
        format_interval_ends(pair, lambda value: format_difference(figure, value)),
        row.verdict,
        row.published or "–",
    ]


def format_interval_ends(estimate: Estimate | None, form: Any) -> str:
    """Format the ends of an interval; a dash for None."""
    return "–" if estimate is None or estimate.interval is None else " to ".join(map(form, estimate.interval))


def format_difference(figure: str, difference: float) -> str:
    """Format a difference with its sign; shares in percentage points."""
    return f"{100 * difference:+.2f}" if figure in PERCENT_METRICS else f"{difference:+.3f}"


def list_run_links(home: Path, row: TableRow) -> list[dict[str, Any]]:
    """List the pages of a row's runs by seed, relative to the study; the summary for a run without a page."""
    files = [Path(folder) / "report.html" for folder in dict.fromkeys(row.runs) if folder]
    files = [file if file.is_file() else file.with_name("summary.json") for file in files]
    return [
        {"seed": number, "href": os.path.relpath(file, home).replace(os.sep, "/")} for number, file in enumerate(files)
    ]


def describe_study_setting(document: dict[str, Any], rows: list[TableRow]) -> list[str]:
    """Describe the settings of the runs in sentences."""
    settings = document["settings"]
    label = STUDY_METRIC_LABELS.get(document["figure"], get_metric_label(document["figure"]))
    if not document["steps"]:
        return [f"Randomly initialised models, {settings['seeds']} per cell; no training. Metric: {label}."]
    steps = " to ".join(f"{count:,}" for count in sorted({document["steps"][0], document["steps"][-1]}))
    judged = f" on {document['images']:,} validation images" if document["images"] else ""
    summary = (
        f"{len(document['runs'])} runs on {settings['data']} at scale {settings['scale']} "
        f"({SCALES[settings['scale']].about}): {settings['seeds']} per cell, {steps} optimiser steps each, "
        f"{format_seconds(document['seconds'])} of training in total. "
        f"Metric: {label}{judged}."
    )
    lines = [summary]
    if others := list(dict.fromkeys(settings["to"])):
        lines.append(f"Other datasets: {', '.join(others)}.")
    elif document["others"]:
        lines.append(
            "All datasets are subsets of the digits: pre-training uses the digits 0 to 4, and 40 % of each subset are "
            "validation images."
        )
    if settings["share"] < 1:
        lines.append(
            f"To fit the budget of {settings['budget']}, every run has {settings['share']:.0%} of the scale's steps, "
            "so late training is not covered."
        )
    return lines


def list_table_notes(document: dict[str, Any], rows: list[TableRow]) -> list[str]:
    """List the notes on the table."""
    reference = sorted({" · ".join(row.reference) for row in rows if row.reference})
    paired = (
        "Intervals are Student's t over seeds, without a correction for multiple comparisons: 1 in 20 is expected to "
        f"miss. Differences are to the reference ({'; '.join(reference)}) and paired by seed; a difference whose "
        "interval contains 0 is inconclusive."
    )
    notes = [paired, "All seeds are evaluated on the same images, so the intervals do not cover other images."]
    if document["settings"]["seeds"] == 1:
        notes.append("One seed gives no interval, so differences are inconclusive. Use --seeds 3 or more.")
    if failed := sum(row.failed for row in rows):
        notes.append(f"{failed} runs ended with a non-finite loss and are excluded from the means.")
    return notes


def format_study_command(settings: dict[str, Any], home: Path) -> str:
    """Format the command that reproduces the study."""
    words = ["vitreous", "study", settings["name"]]
    for name in ("data", "scale", "seeds", "steps", "budget", "device", "precision"):
        if settings[name] is not None:
            words += [f"--{name}", str(settings[name])]
    if settings["to"]:
        words += ["--to", *settings["to"]]
    return shlex.join([*words, "--out", str(home.parent)])


def render_study_markdown(parts: dict[str, Any]) -> str:
    """Render the page as Markdown; its figure is a separate file."""
    study: Study = parts["study"]
    head = [*parts["columns"], "verdict", "published", "runs"]
    lines = [f"# {study.title}", "", study.question, f"({study.source})", "", "```", parts["command"], "```", ""]
    lines += [*parts["setting"], "", format_markdown_row(head), format_markdown_row(["---"] * len(head))]
    for row in parts["table"]:
        runs = " ".join(f"[{run['seed']}]({run['href']})" for run in row["runs"])
        lines.append(format_markdown_row([*row["place"], *row["cells"], runs]))
    if parts["figure"]:
        lines += ["", f"![{study.title}]({parts['figure']})"]
    lines += ["", *(f"- {note}" for note in parts["notes"])]
    if conclusion := parts["conclusion"]:
        lines += ["", f"## {conclusion['title']}", "", *(f"- {sentence}" for sentence in conclusion["sentences"])]
        if conclusion["rows"]:
            lines += [
                "",
                format_markdown_row(conclusion["columns"]),
                format_markdown_row(["---"] * len(conclusion["columns"])),
            ]
            lines += [format_markdown_row(row) for row in conclusion["rows"]]
    for one in parts["pictures"]:
        lines += ["", f"![{one['title']}, {' '.join(one['place'])}]({one['file']})"]
    printed = "".join(f" {name} {value};" for name, value in parts["elsewhere"]).rstrip(";")
    lines += [
        "",
        f"Published: {study.published.of}.{printed}",
        "",
        f"Differences from the publication: {study.differs}",
        "",
    ]
    return "\n".join(lines)


def format_markdown_row(cells: list[str]) -> str:
    """Format a row of a Markdown table."""
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"
