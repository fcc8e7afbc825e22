"""Record an evaluation: build its JSON document, add it to the run's `evaluations.jsonl`, and write its page."""

from __future__ import annotations

import os
import re
import time
from pathlib import Path
from typing import Any

from vitreous.errors import VitreousError
from vitreous.progress import ProgressListener
from vitreous.reports.answers import SplitPredictions
from vitreous.reports.pages import report as pages
from vitreous.tasks.report import Report, get_primary_key
from vitreous.tasks.table import TASKS
from vitreous.training.folder import RunFolder, append_line
from vitreous.weights.bundle import Bundle

EVALUATIONS_FILE = "evaluations.jsonl"
#: primary metric -> evaluation protocol, for tasks whose protocol is not top1
PROTOCOLS_BY_METRIC = {str(task.primary): task.protocol for task in TASKS.values() if task.protocol != "top1"}


def slugify_name(text: str, dots: bool = False) -> str:
    """Convert a text to a part of a file name: all but letters, digits and, if `dots`, dots become dashes."""
    return re.sub(r"[^A-Za-z0-9.]+" if dots else r"[^A-Za-z0-9]+", "-", text).strip("-.")


def record_evaluation(run: str | os.PathLike[str], source: str, split: str, metrics: dict[str, Any]) -> None:
    """Add a line to a run's `evaluations.jsonl`; nothing is written if `run` is not a run folder."""
    folder = RunFolder(Path(run))
    if folder.config.is_file():
        line = {"time": time.strftime("%Y-%m-%dT%H:%M:%S%z"), "data": source, "split": split}
        if protocol := PROTOCOLS_BY_METRIC.get(get_primary_key(metrics)):
            line["protocol"] = protocol
        append_line(folder.path / EVALUATIONS_FILE, line | metrics)


def build_evaluation_document(
    bundle: Bundle, report: Report, split: str, source: str, run: str, seconds: float, protocol: str | None = None
) -> dict[str, Any]:
    """Build the JSON document of an evaluation, with the keys of a run's `summary.json`.

    `source` is the dataset, `seconds` the duration, `protocol` the evaluation protocol, by default that of the model's
    task.
    """
    protocol = protocol or PROTOCOLS_BY_METRIC.get(report.primary, "top1")
    keys = ["steps", "epochs", "seed", "exaflops", "flops_utilisation", "peak_memory_bytes", "train", "val", "test"]
    return {
        "model": bundle.model.config.name(),
        "parameters": sum(p.numel() for p in bundle.model.parameters()),
        "data": source,
        **dict.fromkeys(keys),
        "wall_seconds": seconds,
        "images_per_second": report.images / seconds,
        split: report.summary(),
        "run": run,
        "bundle": run,
        "split": split,
        "evaluations": [
            {"split": split, "protocol": protocol, "metrics": report.metrics, "interval": report.interval_lists}
        ],
        "classes": list(bundle.task.classes),
        "targets": [],
        "per_class": report.per_class,
        "confusion": None if report.confusion is None else report.confusion.tolist(),
        **report.details,
    }


def get_page_path(run: Path, data: str | os.PathLike[str] | None, split: str) -> Path:
    """Return the default path of an evaluation page: in the run's folder, or for other weights in the current
    folder."""
    names = ([] if run.is_dir() else [run.name]) + ([] if data is None else [Path(data).name])
    name_components = [
        "report",
        *(slugify_name(name, dots=True) or "data" for name in names),
        *([] if split == "test" else [split]),
    ]
    return (run if (run / "config.yaml").is_file() else Path()) / f"{'-'.join(name_components)}.html"


def write_evaluation_page(
    path: Path,
    folder: RunFolder,
    predictions: SplitPredictions | None,
    report: Report | None,
    listener: ProgressListener,
    command: str = "",
) -> dict[str, Any] | None:
    """Write the page of an evaluation; without predictions, the page of the run alone. A failure is logged, not raised.

    `command` is the command line that repeats the evaluation. Returns the content of the page by section, or None if
    it was not written.
    """
    try:
        return pages.write_report(path, folder, predictions, report, command)
    except (OSError, VitreousError) as error:
        listener.note(f"no page at {path}: {error}")
        return None
