"""The page of a study, as one HTML file that needs no other, and as Markdown."""

from __future__ import annotations

import os
import shlex
from base64 import b64encode
from pathlib import Path
from typing import Any

from vitreous.apps.studies.drawing import draw_table
from vitreous.apps.studies.statistics import Estimate
from vitreous.apps.studies.study import FIGURES, SCALES, Study
from vitreous.apps.studies.tables import Row
from vitreous.reports.pages.formats import SHARES, format_figure, format_seconds, render
from vitreous.system.disk import write_text
from vitreous.tasks.metrics import label_metric

PAGE, TEXT, FIGURE = "report.html", "report.md", "figure.svg"


def write_pages(home: Path, study: Study, document: dict[str, Any], rows: list[Row]) -> None:
    """Write `report.html`, `report.md` and its `figure.svg` into the folder of a study. Raises OSError."""
    parts = page_parts(home, study, document, rows)
    curves = document["conclusion"]["curves"] if document["conclusion"] else {}
    figure = draw_table(study, rows, document["figure"], parts["figure_name"], curves)
    drawn = [one | {"drawing": picture_markup(home / one["file"], one["title"])} for one in document["pictures"]]
    write_text(home / PAGE, render("study.html", **parts | {"pictures": drawn}, drawing=figure))
    write_text(home / TEXT, markdown(parts | {"figure": FIGURE if figure else None}))
    if figure:
        write_text(home / FIGURE, str(figure).replace('style="', 'style="background: #fff; ', 1))


def picture_markup(path: Path, title: str) -> str:
    """Return a figure of `inspect` as markup: the SVG next to its PNG file, in the page's text colour, or else the
    PNG."""
    from markupsafe import Markup

    if (drawing := path.with_suffix(".svg")).is_file():
        return Markup(drawing.read_text("utf-8"))
    data = b64encode(path.read_bytes()).decode()
    return Markup('<img src="data:image/png;base64,{}" alt="{}">').format(data, title)


def page_parts(home: Path, study: Study, document: dict[str, Any], rows: list[Row]) -> dict[str, Any]:
    """What both pages show, as texts."""
    figure = document["figure"]
    label = FIGURES.get(figure, label_metric(figure))
    table = [
        {
            "place": row.place,
            "cells": cells_of(row, figure),
            "reference": row.reference is None,
            "runs": links(home, row),
        }
        for row in rows
    ]
    return {
        "study": study,
        "figure_name": label,
        "setting": setting_text(document, rows),
        "command": command_of(document["settings"], home),
        "columns": [*study.axes, f"mean {label}", "95 % interval", "difference", "95 % interval"],
        "table": table,
        "notes": notes_of(document, rows),
        "conclusion": document["conclusion"],
        "pictures": document["pictures"],
        "elsewhere": [
            (" · ".join(place), value)
            for place, value in study.published.values.items()
            if place not in {row.place for row in rows}
        ],
    }


def cells_of(row: Row, figure: str) -> list[str]:
    """Mean, its interval, difference, its interval, verdict and published number of a row."""
    mean, pair = row.mean, row.difference
    return [
        "–" if mean is None else format_figure(figure, mean.mean),
        range_text(
            mean, lambda value: format_figure(figure, min(1.0, max(0.0, value)) if figure in SHARES else value, 1)
        ),
        "–" if pair is None else points(figure, pair.mean),
        range_text(pair, lambda value: points(figure, value)),
        row.verdict,
        row.published or "–",
    ]


def range_text(estimate: Estimate | None, form: Any) -> str:
    """The ends of an interval; a dash where there is none."""
    return "–" if estimate is None or estimate.interval is None else " to ".join(map(form, estimate.interval))


def points(figure: str, difference: float) -> str:
    """A difference with its sign, of shares in percentage points."""
    return f"{100 * difference:+.2f}" if figure in SHARES else f"{difference:+.3f}"


def links(home: Path, row: Row) -> list[dict[str, Any]]:
    """The pages of a row's runs, relative to the study's, by seed; of a run without one its summary."""
    files = [Path(folder) / "report.html" for folder in dict.fromkeys(row.runs) if folder]
    files = [file if file.is_file() else file.with_name("summary.json") for file in files]
    return [
        {"seed": number, "href": os.path.relpath(file, home).replace(os.sep, "/")} for number, file in enumerate(files)
    ]


def setting_text(document: dict[str, Any], rows: list[Row]) -> list[str]:
    """How the runs were made, in sentences."""
    settings = document["settings"]
    label = FIGURES.get(document["figure"], label_metric(document["figure"]))
    if not document["steps"]:
        return [f"Models as they are drawn, {settings['seeds']} of each; nothing is trained. The figure is {label}."]
    steps = " to ".join(f"{count:,}" for count in sorted({document["steps"][0], document["steps"][-1]}))
    judged = f" of {document['images']:,} validation images" if document["images"] else ""
    summary = (
        f"{len(document['runs'])} runs on {settings['data']} at the scale {settings['scale']} "
        f"({SCALES[settings['scale']].about}): {settings['seeds']} of each cell, of {steps} optimiser steps, "
        f"{format_seconds(document['seconds'])} of training in all. "
        f"The figure is {label}{judged}."
    )
    lines = [summary]
    if others := list(dict.fromkeys(settings["to"])):
        lines.append(f"Other data sets: {', '.join(others)}.")
    elif document["others"]:
        lines.append(
            "The other data sets are parts of the digits: what is learned first are the digits 0 to 4, and 40 % of the "
            "images of each part are judged."
        )
    if settings["share"] < 1:
        lines.append(
            f"For the budget of {settings['budget']} every run has {settings['share']:.0%} of the scale's steps: what "
            "is learned late is not seen."
        )
    return lines


def notes_of(document: dict[str, Any], rows: list[Row]) -> list[str]:
    """What the reader has to know of the table."""
    reference = sorted({" · ".join(row.reference) for row in rows if row.reference})
    paired = "Intervals are Student's t over seeds, each for itself: of 20 such, one is expected to miss. A difference "
    paired += (
        f"is to the reference ({'; '.join(reference)}) of the same seeds; where its interval holds 0 it cannot be "
    )
    paired += "told which is better."
    notes = [paired, "All seeds are judged on the same images, so that the intervals say nothing of other images."]
    if document["settings"]["seeds"] == 1:
        notes.append("One seed gives no interval: no difference can be told. Use --seeds 3 or more.")
    if failed := sum(row.failed for row in rows):
        notes.append(f"{failed} runs ended in a loss that was not finite; they are in no mean.")
    return notes


def command_of(settings: dict[str, Any], home: Path) -> str:
    """The one command that makes the study again, elsewhere."""
    words = ["vitreous", "study", settings["name"]]
    for name in ("data", "scale", "seeds", "steps", "budget", "device", "precision"):
        if settings[name] is not None:
            words += [f"--{name}", str(settings[name])]
    if settings["to"]:
        words += ["--to", *settings["to"]]
    return shlex.join([*words, "--out", str(home.parent)])


def markdown(parts: dict[str, Any]) -> str:
    """The page as Markdown, with its figure in a file beside it."""
    study: Study = parts["study"]
    head = [*parts["columns"], "verdict", "published", "runs"]
    lines = [f"# {study.title}", "", study.question, f"({study.source})", "", "```", parts["command"], "```", ""]
    lines += [*parts["setting"], "", row_text(head), row_text(["---"] * len(head))]
    for row in parts["table"]:
        runs = " ".join(f"[{run['seed']}]({run['href']})" for run in row["runs"])
        lines.append(row_text([*row["place"], *row["cells"], runs]))
    if parts["figure"]:
        lines += ["", f"![{study.title}]({parts['figure']})"]
    lines += ["", *(f"- {note}" for note in parts["notes"])]
    if conclusion := parts["conclusion"]:
        lines += ["", f"## {conclusion['title']}", "", *(f"- {sentence}" for sentence in conclusion["sentences"])]
        if conclusion["rows"]:
            lines += ["", row_text(conclusion["columns"]), row_text(["---"] * len(conclusion["columns"]))]
            lines += [row_text(row) for row in conclusion["rows"]]
    for one in parts["pictures"]:
        lines += ["", f"![{one['title']}, {' '.join(one['place'])}]({one['file']})"]
    printed = "".join(f" {name} {value};" for name, value in parts["elsewhere"]).rstrip(";")
    lines += ["", f"Published: {study.published.of}.{printed}", "", f"What differs: {study.differs}", ""]
    return "\n".join(lines)


def row_text(cells: list[str]) -> str:
    """A row of a Markdown table."""
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"
