"""The verb `vitreous study`."""

from __future__ import annotations

from typing import Any

from vitreous.apps.studies.options import StudyOptions as Options
from vitreous.cli.console import Console
from vitreous.errors import UsageError

__all__ = ["Options", "run"]


def run(options: Options, console: Console) -> dict[str, Any]:
    """Run a study and print its table; with --dry-run print its plan, without a name list all studies.

    Returns the document. Raises UsageError for options without a study.
    """
    if not options.name:
        if options != Options():
            raise UsageError("missing study name", "use vitreous study NAME; `vitreous study` lists them")
        return list_studies(console)
    from vitreous.apps.studies.registry import get_study

    study = get_study(options.name)  # rejects unknown names before PyTorch is imported
    from vitreous.apps.studies.conduct import execute_study

    if options.dry_run:
        return print_study_plan(execute_study(options, console), console)
    document = execute_study(options, console)
    from vitreous.apps.studies.page import format_difference
    from vitreous.reports.pages.formats import format_metric_value

    def format_value(value: float | None) -> str:
        return "-" if value is None else format_metric_value(document["metric"], value)

    rows = [
        [
            *result["axis_values"],
            format_value(result["mean"] and result["mean"]["mean"]),
            "-"
            if result["difference"] is None
            else format_difference(document["metric"], result["difference"]["mean"]),
            result["verdict"],
            result["published"] or "-",
        ]
        for result in document["rows"]
    ]
    console.table([*study.axes, document["metric"], "difference", "verdict", "published"], rows)
    for sentence in (document["conclusion"] or {}).get("sentences", ()):
        console.print_line(sentence)
    console.print_line(f"next: read {document['page']}")
    return document


def list_studies(console: Console) -> dict[str, Any]:
    """Print a table of all studies with their cost at each scale."""
    from vitreous.apps.studies.planning import estimate_study_cost, format_study_cost
    from vitreous.apps.studies.registry import STUDIES
    from vitreous.apps.studies.study import SCALES

    studies, rows = [], []
    for study in STUDIES.values():
        scales = [estimate_study_cost(study, scale) for scale in SCALES.values()]
        studies.append({"name": study.name, "question": study.question, "source": study.source, "scales": scales})
        rows.append([study.name, study.source, *map(format_study_cost, scales)])
    console.table(["name", "source", *(f"{scale.name} ({scale.about})" for scale in SCALES.values())], rows)
    console.print_line(
        "`vitreous study NAME --dry-run` estimates the hours on this machine; 1 exaFLOPs is 10^18 operations."
    )
    return {"studies": studies}


def print_study_plan(document: dict[str, Any], console: Console) -> dict[str, Any]:
    """Print the plan that --dry-run returns, one line per entry that is set."""
    from vitreous.cli.console import format_byte_count

    entries = {
        name.removesuffix("_bytes"): format_byte_count(value) if name.endswith("_bytes") and value else value
        for name, value in document.items()
        if value is not None
    }
    console.table(["plan", ""], [[name.replace("_", " "), f"{value}"] for name, value in entries.items()])
    return document
