"""vitreous study."""

from __future__ import annotations

from typing import Any

from vitreous.apps.studies.options import StudyOptions as Options
from vitreous.cli.console import Console
from vitreous.errors import UsageError

__all__ = ["Options", "run"]


def run(options: Options, console: Console) -> dict[str, Any]:
    """List the studies, plan one, or make it and print its table; returns the document. Raises UsageError for options
    without a study."""
    if not options.name:
        if options != Options():
            raise UsageError("no study is named", "vitreous study NAME; `vitreous study` lists them")
        return list_studies(console)
    from vitreous.apps.studies.registry import find

    study = find(options.name)  # what cannot be is refused before PyTorch is imported
    from vitreous.apps.studies.conduct import conduct

    if options.dry_run:
        return print_plan(conduct(options, console), console)
    document = conduct(options, console)
    from vitreous.apps.studies.page import points
    from vitreous.reports.pages.formats import format_figure

    def text(value: float | None) -> str:
        return "-" if value is None else format_figure(document["figure"], value)

    rows = [
        [
            *row["place"],
            text(row["mean"] and row["mean"]["mean"]),
            "-" if row["difference"] is None else points(document["figure"], row["difference"]["mean"]),
            row["verdict"],
            row["published"] or "-",
        ]
        for row in document["rows"]
    ]
    console.table([*study.axes, document["figure"], "difference", "verdict", "published"], rows)
    for sentence in (document["conclusion"] or {}).get("sentences", ()):
        console.say(sentence)
    console.say(f"next: read {document['page']}")
    return document


def list_studies(console: Console) -> dict[str, Any]:
    """Print every study with what it costs at each scale."""
    from vitreous.apps.studies.planning import cost_text, counted_cost
    from vitreous.apps.studies.registry import STUDIES
    from vitreous.apps.studies.study import SCALES

    listed, rows = [], []
    for study in STUDIES.values():
        scales = [counted_cost(study, scale) for scale in SCALES.values()]
        listed.append({"name": study.name, "question": study.question, "source": study.source, "scales": scales})
        rows.append([study.name, study.source, *map(cost_text, scales)])
    console.table(["name", "source", *(f"{scale.name} ({scale.about})" for scale in SCALES.values())], rows)
    console.say("`vitreous study NAME --dry-run` says the hours that one takes here; EFLOP is 10^18 operations.")
    return {"studies": listed}


def print_plan(document: dict[str, Any], console: Console) -> dict[str, Any]:
    """Print the plan of --dry-run."""
    from vitreous.cli.console import readable_bytes

    shown = {
        name.removesuffix("_bytes"): readable_bytes(value) if name.endswith("_bytes") and value else value
        for name, value in document.items()
        if value is not None
    }
    console.table(["plan", ""], [[name.replace("_", " "), f"{value}"] for name, value in shown.items()])
    return document
