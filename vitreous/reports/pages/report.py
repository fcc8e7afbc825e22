"""Write `report.html`: training and evaluation of a run on one self-contained page.

The size of the page is limited: it has at most `MAX_CLASS_ROWS` classes in full, `MAX_CLASS_MATRIX_SIZE` in its
confusion matrix and `cards.MAX_CARD_IMAGES` images per list.
"""

from __future__ import annotations

import base64
import json
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from vitreous.data.clip_views import SINGLE_VIEW
from vitreous.inference.image_grid import SAMPLES_FILE, choose_shown_classes
from vitreous.reports.answers import SplitPredictions
from vitreous.reports.learned import read_learned_images
from vitreous.reports.pages.cards import build_image_cards
from vitreous.reports.pages.dense import build_object_section, find_worst_map_images
from vitreous.reports.pages.formats import (
    format_interval,
    format_metric_value,
    format_percent,
    format_task_title,
    render_template,
)
from vitreous.reports.pages.loss_curves import build_loss_panel
from vitreous.reports.pages.plots import (
    INK,
    LINE_COLOURS,
    Curve,
    draw_confusion_plot,
    draw_metric_curves,
    draw_reliability_plot,
    draw_scatter,
)
from vitreous.reports.pages.unlabelled import build_headline_metrics, draw_logged_curves, read_alarms
from vitreous.system.disk import write_text_atomic
from vitreous.tasks.calibration import CALIBRATION_BINS, confidence_bins
from vitreous.tasks.detection import Detection
from vitreous.tasks.metrics import METRICS, get_metric_label
from vitreous.tasks.report import Report, get_primary_key
from vitreous.tasks.segmentation import Segmentation
from vitreous.training.folder import RunFolder, read_json_lines
from vitreous.training.run import Run

MAX_CLASS_ROWS = 60  # rows of the table of classes; if there are more, the worst and the best classes
MAX_CLASS_MATRIX_SIZE = 40  # classes in the confusion matrix; if there are more, those with the most errors
MAX_LISTED_EVALUATIONS = 50  # the latest evaluations are listed


def write_report(
    path: Path,
    folder: RunFolder | None,
    predictions: SplitPredictions | None = None,
    report: Report | None = None,
    command: str = "",
) -> dict[str, Any]:
    """Write the page of a run (`folder`), of an evaluation (`predictions` and their `report`), or of both.

    `command` is the command line that repeats the evaluation. Returns the content of the page by section.
    """
    sections: dict[str, Any] = {"trained": None, "grid": None, "evaluation": None, "unlabelled": None, "learned": {}}
    sections |= {"samples": None, "task": ""}
    if folder is not None and folder.config.is_file():
        sections |= build_training_section(folder)
    if predictions is not None and report is not None:
        bundle = predictions.bundle
        sections |= {"evaluation": build_evaluation_section(predictions, report), "model": bundle.model.config.name()}
        sections["task"] = format_task_title(bundle.task, bundle.preprocess.noun)
        sections.setdefault("data", Path(predictions.source).name or predictions.source)
    sections["commands"] = list(dict.fromkeys([*sections.get("commands", []), *([command] if command else [])]))
    write_text_atomic(path, render_template("report.html", **sections))
    return sections


def build_training_section(folder: RunFolder) -> dict[str, Any]:
    """Return the page sections on training, read from the files of a run's folder."""
    run, summary = folder.run(), read_json_or_empty(folder.summary)
    table, lines = read_json_or_empty(folder.path / "trials.json"), read_json_lines(folder.metrics)
    panels, unlabelled = [], None
    if run.objective.ships_features:
        unlabelled = {"curves": draw_logged_curves(lines, run), "headline": build_headline_metrics(summary, run)}
    else:
        panels = draw_training_panels(lines)
    return {
        "model": run.model.name(),
        "data": Path(run.data.source).name or run.data.source,
        "trained": {"run": run, "summary": summary, "curves": panels},
        "unlabelled": unlabelled,
        "learned": read_learned_images(folder.path) if unlabelled else {},
        "samples": build_samples_section(folder, run) if run.objective.generates else None,
        "alarms": read_alarms(folder),
        "dataset_properties": list_dataset_properties(folder, run),
        "evaluations": [
            format_evaluation_line(line)
            for line in read_json_lines(folder.path / "evaluations.jsonl")[-MAX_LISTED_EVALUATIONS:]
        ],
        "grid": build_lr_grid_section(folder, run, table, summary) if table else None,
        "environment": {
            name: value for name, value in read_json_or_empty(folder.path / "environment.json").items() if value
        },
        "commands": list_run_commands(folder, run, table),
    }


def build_samples_section(folder: RunFolder, run: Run) -> dict[str, Any]:
    """Return the page section of a generative model: the grid of samples as base64, and the last denoising error.

    `classes` is the number of classes, `shown_classes` the names of those in the grid, `frames` the frames per clip, 0
    for images.
    """
    path, classes = folder.path / SAMPLES_FILE, read_json_or_empty(folder.path / "data.json").get("classes", [])
    encoded_image = base64.b64encode(path.read_bytes()).decode() if path.is_file() else None
    val = read_json_or_empty(folder.summary).get("val") or {}
    return {
        "sample_grid": encoded_image,
        "classes": len(classes),
        "shown_classes": [classes[index] for index in choose_shown_classes(len(classes))] if classes else [],
        "frames": run.preprocess.frames if run.preprocess.is_animated else 0,
        "error": val.get("denoising_error"),
        "images": val.get("images"),
    }


def find_primary_metric(lines: list[dict[str, Any]]) -> str:
    """Return the primary metric of the evaluations in log lines; `top1` if there is none."""
    return next(
        (name for name, metric in METRICS.items() if metric.is_primary and has_metric(lines, f"val/{name}")), "top1"
    )


def has_metric(lines: list[dict[str, Any]], key: str) -> bool:
    """Return whether any log line has the metric."""
    return any(line.get(key) is not None for line in lines)


def draw_training_panels(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the panels of a run's curves: losses, primary metric of its evaluations, and learning rate."""
    metric_name = find_primary_metric(lines)
    panels = [panel] if (panel := build_loss_panel(lines)) else []
    for title, key, colour in (
        (f"Validation {get_metric_label(metric_name)}", f"val/{metric_name}", 2),
        ("Learning rate", "lr", 3),
    ):
        if has_metric(lines, key):
            drawing = draw_metric_curves(title, [Curve("", LINE_COLOURS[colour], lines, key)])
            panels.append({"title": title, "key": key, "drawing": drawing, "text": ""})
    return panels


def build_lr_grid_section(
    folder: RunFolder, run: Run, table: dict[str, Any], summary: dict[str, Any]
) -> dict[str, Any]:
    """Return the page section of a learning-rate search: its trials `table`, and their curves."""
    trials = [
        (
            f"{trial['lr']:g}",
            LINE_COLOURS[index % len(LINE_COLOURS)],
            read_json_lines(folder.path / trial["folder"] / "metrics.jsonl"),
        )
        for index, trial in enumerate(table["trials"])
    ]
    final_curve = [(f"{run.optimizer.lr:g}, all images", INK, read_json_lines(folder.metrics))] if summary else []
    metric_name = find_primary_metric([line for _, _, lines in [*trials, *final_curve] for line in lines])
    panels = [
        ("Training loss", "train/loss", [*trials, *final_curve]),
        ("Held-out loss (NLL)", "val/nll", trials),
        (f"Held-out {get_metric_label(metric_name)}", f"val/{metric_name}", trials),
    ]
    curves = [
        {
            "title": title,
            "key": key,
            "drawing": draw_metric_curves(
                title, [Curve(*curve_data, key) for curve_data in trial_rows], "learning rate"
            ),
        }
        for title, key, trial_rows in panels
        if trials
    ]
    trial_rows = [
        {**trial, "score_text": "–" if trial.get("score") is None else format_metric_value(metric_name, trial["score"])}
        for trial in table["trials"]
    ]
    return {
        **table,
        "trials": trial_rows,
        "measure": get_metric_label(metric_name),
        "measure_key": metric_name,
        "curves": curves,
    }


def build_evaluation_section(predictions: SplitPredictions, report: Report) -> dict[str, Any]:
    """Return the page section of an evaluation: metrics, table of classes, confusion matrix, and images."""
    task, (rank_key, rank_title) = predictions.bundle.task, METRICS[report.primary].ranking_metric
    class_rows = sorted(report.per_class, key=lambda row: row[rank_key] if row[rank_key] is not None else 2.0)
    worst, best = class_rows, []
    if len(class_rows) > MAX_CLASS_ROWS:
        worst, best = (
            class_rows[: MAX_CLASS_ROWS * 2 // 3],
            [row for row in class_rows if row["images"]][-MAX_CLASS_ROWS // 3 :],
        )
    headline_metrics = [
        {
            "title": get_metric_label(name),
            "key": name,
            "value": format_metric_value(name, value),
            "range": format_interval(name, report.interval_lists.get(name)),
        }
        for name, value in task.select_headline_metrics(report.metrics).items()
        if name in METRICS and value is not None
    ]
    return {
        "source": predictions.source,
        "name": predictions.name,
        "images": report.images,
        "views": predictions.clip_views if predictions.clip_views != SINGLE_VIEW else None,
        "unreadable": report.unreadable,
        "headline": headline_metrics,
        "verdict": next((metric for metric in headline_metrics if metric["key"] == report.primary), None),
        "weakest": find_weakest_class(class_rows, rank_key, rank_title),
        "worst": worst,
        "best": best,
        "hidden_classes": len(class_rows) - len(worst) - len(best),
        "columns": METRICS[report.primary].class_columns(class_rows),
        "has_confusions": any("confused_with" in row for row in class_rows),
        **draw_confusion_section(report, tuple(row["class"] for row in report.per_class)),
        "targets": format_target_rows(report),
        "target_columns": [METRICS[key] for row in report.details.get("targets", [])[:1] for key in row["interval"]],
        **{"scenes": None, "objects": None, "reliability": None, "cards": {}, "charts": []},
        **TASK_SECTIONS.get(task.name, build_image_section)(predictions, report),
    }


def find_weakest_class(class_rows: list[dict[str, Any]], key: str, title: str) -> dict[str, str] | None:
    """Return name and metric of the first of the sorted classes; None if fewer than two classes have the metric.

    `key` and `title` are those of the metric by which the rows are sorted.
    """
    rows = [row for row in class_rows if row[key] is not None]
    return (
        {"name": rows[0]["class"], "metric": title, "value": format_percent(rows[0][key], 1)} if len(rows) > 1 else None
    )


def build_image_section(predictions: SplitPredictions, report: Report) -> dict[str, Any]:
    """Return the page section of a task with image-level outputs: reliability diagram, image cards, and charts."""
    return {
        "reliability": None if report.confusion_cells is None else draw_reliability_diagram(predictions),
        "cards": build_image_cards(
            predictions.bundle, predictions.split, predictions.raw_logits, predictions.unreadable
        ),
        "charts": draw_task_charts(predictions),
    }


#: task name -> function that returns its page section; other tasks have `build_image_section`
TASK_SECTIONS: dict[str, Callable[[SplitPredictions, Report], dict[str, Any]]] = {
    Segmentation.name: lambda predictions, report: {"scenes": find_worst_map_images(predictions)},
    Detection.name: lambda predictions, report: {"objects": build_object_section(predictions, report)},
}


def format_target_rows(report: Report) -> list[dict[str, Any]]:
    """Format the metrics of each regression target with their confidence intervals; an empty list for other tasks."""
    rows = []
    for row in report.details.get("targets", []):
        texts = {}
        for name, interval in row["interval"].items():
            value = "–" if row[name] is None else format_metric_value(name, row[name])
            texts[name] = f"{value} ({format_interval(name, interval)})" if interval else value
        rows.append({"target": row["target"], "images": row["images"], **texts})
    return rows


def draw_task_charts(predictions: SplitPredictions) -> list[dict[str, Any]]:
    """Draw the charts of the task, such as predicted against true values."""
    charts = predictions.bundle.task.draw_charts(predictions.raw_logits, predictions.split.labels, predictions.readable)
    return [{"title": chart.title, "drawing": draw_scatter(chart)} for chart in charts]


def draw_confusion_section(report: Report, classes: tuple[str, ...]) -> dict[str, Any]:
    """Draw the confusion matrix, and return it with the number of shown classes, 0 if all classes are shown."""
    cells = select_confusion_matrix(report, classes)
    if cells is None:
        return {"confusion": None, "shown_classes": 0}
    return {
        "confusion": draw_confusion_plot(*cells),
        "shown_classes": len(cells[1]) if len(cells[1]) < len(classes) else 0,
    }


def select_confusion_matrix(report: Report, classes: tuple[str, ...]) -> tuple[np.ndarray, list[str]] | None:
    """Return the confusion matrix (K, K) int64, whose rows are labels, and its K class names.

    If there are more than `MAX_CLASS_MATRIX_SIZE` classes, those with the most errors are returned. Returns None if the
    report has no confusion matrix.
    """
    if report.confusion_cells is None or len(classes) < 2:
        return None
    label, predicted, count = report.confusion_cells.T
    class_indices = np.arange(len(classes))
    if len(class_indices) > MAX_CLASS_MATRIX_SIZE:
        mistakes = count * (label != predicted)
        num_errors = sum(
            np.bincount(indices, weights=mistakes, minlength=len(classes)) for indices in (label, predicted)
        )
        class_indices = np.sort(np.argsort(-num_errors, kind="stable")[:MAX_CLASS_MATRIX_SIZE])
    positions = [
        np.searchsorted(class_indices, indices).clip(max=len(class_indices) - 1) for indices in (label, predicted)
    ]
    is_shown = (class_indices[positions[0]] == label) & (class_indices[positions[1]] == predicted)
    counts = np.zeros((len(class_indices), len(class_indices)), np.int64)
    counts[positions[0][is_shown], positions[1][is_shown]] = count[is_shown]
    return counts, [classes[index] for index in class_indices]


def draw_reliability_diagram(predictions: SplitPredictions) -> Any:
    """Draw the reliability diagram of the readable images; None if there are none."""
    confidence, is_correct = predictions.confidence[predictions.readable], predictions.is_correct[predictions.readable]
    if not len(confidence):
        return None
    bins = confidence_bins(confidence)
    counts = np.bincount(bins, minlength=CALIBRATION_BINS)
    sums = (np.bincount(bins, weights=values, minlength=CALIBRATION_BINS) for values in (is_correct, confidence))
    accuracy, mean = (values / np.maximum(counts, 1) for values in sums)
    return draw_reliability_plot(np.linspace(0, 1, CALIBRATION_BINS + 1), accuracy, mean, counts)


def format_evaluation_line(line: dict[str, Any]) -> dict[str, str]:
    """Format a line of `evaluations.jsonl` for the table of evaluations: time, data, protocol, and primary metric."""
    name = get_primary_key(line)
    value, protocol = line.get(name), line.get("protocol", "head")
    settings = [f"{key} {line[key]}" for key in ("k", "shots", "l2", "probe", "steps") if line.get(key) is not None]
    settings += [f"{views} views"] if (views := line.get("clip_views", SINGLE_VIEW)) != SINGLE_VIEW else []
    settings += ["without crops"] if line.get("augmented") is False else []
    return {
        "time": line["time"][:16].replace("T", " "),
        "data": f"{line['data']}, {line['split']}",
        "protocol": ", ".join([protocol, *settings]),
        "images": f"{line['images']:,}",
        "metric": "–" if value is None else f"{get_metric_label(name)} {format_metric_value(name, value)}",
        "range": format_interval(name, (line.get("interval") or {}).get(name)),
    }


def list_dataset_properties(folder: RunFolder, run: Run) -> list[tuple[str, Any]]:
    """Return (name, value) of the properties of a run's dataset; an empty list if they were not stored."""
    document = read_json_or_empty(folder.path / "data.json")
    if not document:
        return []
    splits = ", ".join(f"{name} {count:,}" for name, count in document.get("splits", {}).items())
    properties = [("source", document["source"]), ("images", splits), ("trained on", f"{run.data.images:,}")]
    properties += [("classes", f"{len(document['classes']):,}")] if document["classes"] else []
    properties += [("targets", ", ".join(document["targets"]))] if document.get("targets") else []
    properties += [("excluded by", document["excluded_by"])] if document.get("excluded_by") else []
    properties += [("note", note) for note in document.get("notes", [])]
    return [*properties, ("fingerprint", document["fingerprint"])]


def list_run_commands(folder: RunFolder, run: Run, table: dict[str, Any]) -> list[str]:
    """Return the command lines that repeat the run and each trial of its grid, and that use the model."""
    run_path, data = str(folder.path), shlex.quote(run.data.source)
    command_file = folder.path / "command.txt"
    lines = command_file.read_text("utf-8").splitlines() if command_file.is_file() else []
    folder_paths = [*(f"{run_path}/{trial['folder']}" for trial in table.get("trials", [])), run_path]
    lines += [
        f"vitreous train {data} --config {shlex.quote(folder_path + '/config.yaml')} --out AGAIN"
        for folder_path in folder_paths
    ]
    if run.objective.generates:
        return [
            *lines,
            f"vitreous sample {shlex.quote(run_path)} --out samples.{'gif' if run.preprocess.is_animated else 'png'}",
            f"vitreous evaluate {shlex.quote(run_path)}",
        ]
    if run.objective.labelled or run.objective.annotated:
        return [*lines, f"vitreous evaluate {shlex.quote(run_path)}"]
    if run.data.classes:
        return [*lines, f"vitreous evaluate {shlex.quote(run_path)} --protocol knn"]
    return [*lines, f"vitreous embed {shlex.quote(run_path)} {data} --out vectors.npz"]


def read_json_or_empty(path: Path) -> dict[str, Any]:
    """Read a JSON document; an empty dict if there is no file."""
    return json.loads(path.read_text("utf-8")) if path.is_file() else {}
