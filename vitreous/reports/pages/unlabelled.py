"""The page sections of a self-supervised run: feature metrics, curves with explanations, and warnings."""

from __future__ import annotations

from typing import Any

from vitreous.reports.pages.formats import PERCENT_METRICS, format_interval, format_metric_value, format_number
from vitreous.reports.pages.metric_terms import explain_metric
from vitreous.reports.pages.plots import LINE_COLOURS, Curve, draw_metric_curves
from vitreous.tasks.metrics import get_metric_label
from vitreous.tasks.report import get_primary_key
from vitreous.training.folder import RunFolder, read_json_lines
from vitreous.training.run import Run
from vitreous.training.validation import TRAINING_IMAGES_PREFIX

#: metric key in the log -> title of its chart
CURVE_TITLES = {
    "train/loss": "Training loss",
    **{f"val/{key}": f"Validation {get_metric_label(key)}" for key in ("knn_top1", "knn_map", "rankme")},
    "train/dino": "DINO loss (image views)",
    "train/ibot": "iBOT loss (masked patches)",
    "train/koleo": "KoLeo regulariser",
    "val/feature_std": "Std of validation features",
    "train/teacher_entropy": "Entropy of teacher targets (nats)",
    "train/prototype_entropy": "Entropy of the mean target (nats)",
    "train/feature_std": "Std of training features",
    "lr": "Learning rate",
}
HEADLINE_METRICS = ("knn_top1", "knn_map", "rankme", "feature_std")


def draw_logged_curves(lines: list[dict[str, Any]], run: Run) -> list[dict[str, Any]]:
    """Return a panel with chart and explanation for every logged metric, including the terms of the loss."""
    logged = {name for line in lines for name, value in line.items() if value is not None}
    titles = dict(CURVE_TITLES)
    for name in ("rankme", "feature_std"):
        title = titles[f"val/{name}"].replace("Validation", "Training").replace("validation", "training")
        titles[TRAINING_IMAGES_PREFIX + name] = title
    unknown = sorted(name for name in logged if name.startswith("train/") and name not in titles)
    titles |= {name: name.removeprefix("train/").replace("_", " ").capitalize() for name in unknown}
    panels = []
    for index, name in enumerate(name for name in titles if name in logged):
        series = [Curve("", LINE_COLOURS[index % len(LINE_COLOURS)], lines, name)]
        scale = get_rankme_scale(lines, name, run) if name.endswith("rankme") else {}
        drawing = draw_metric_curves(titles[name], series, **scale)
        panels.append({"title": titles[name], "drawing": drawing, "text": explain_metric(name)})
    return panels


def get_rankme_scale(lines: list[dict[str, Any]], name: str, run: Run) -> dict[str, Any]:
    """Return `limits` and `references` of the chart of RankMe for `draw_metric_curves`.

    The axis ends at the feature width. The references are the feature width and, if it was logged at step 0, the rank
    of the untrained encoder.
    """
    width = run.model.num_features
    untrained = next((line[name] for line in lines if line["step"] == 0 and line.get(name) is not None), None)
    references = {f"feature width, {width}": float(width)}
    if untrained is not None:
        references[f"untrained encoder, {untrained:.1f}"] = untrained
    return {"limits": (0.0, 1.04 * width), "references": references}


def build_headline_metrics(summary: dict[str, Any], run: Run) -> dict[str, Any] | None:
    """Return the last feature metrics of a run's summary for the top of the page; None if there are none."""
    val = summary.get("val")
    source = val or summary.get("train") or {}
    metrics = [
        {
            "title": get_metric_label(name),
            "key": name,
            "value": format_metric_value(name, value) if name in PERCENT_METRICS else format_number(value),
            "range": f"of {run.model.num_features}"
            if name == "rankme"
            else format_interval(name, (source.get("interval") or {}).get(name)),
            "share": value / run.model.num_features if name == "rankme" else None,
        }
        for name in HEADLINE_METRICS
        if (value := source.get(name)) is not None
    ]
    if not metrics:
        return None
    knn = val is not None and get_primary_key(val) != "rankme"
    return {"metrics": metrics, "images": val["images"] if val else None, "knn": knn}


def read_alarms(folder: RunFolder) -> list[dict[str, Any]]:
    """Read the warnings that a run logged; of equal names, the first."""
    by_name: dict[str, dict[str, Any]] = {}
    for line in read_json_lines(folder.warnings):
        by_name.setdefault(line["name"], line)
    return list(by_name.values())
