"""The part of a run's page that is about learning without labels: curves with what they mean, and what went wrong."""

from __future__ import annotations

from typing import Any

from vitreous.evaluation.report import leading_of
from vitreous.reports.pages.formats import SHARES, format_figure, format_interval, format_number
from vitreous.reports.pages.plots import COLOURS, Curve, curves
from vitreous.training.folder import Folder, read_lines
from vitreous.training.validation import TRAINING_IMAGES

#: a column of the metrics: its title, and what it means
CURVES = {
    "train/loss": ("training loss", "What is minimised; its parts, where it has any, follow."),
    "train/dino": ("loss of whole images (DINO)", "Cross-entropy of the student's views with the teacher's, in nats."),
    "train/ibot": ("loss of hidden patches (iBOT)", "Cross-entropy with what the teacher says of them, in nats."),
    "train/koleo": ("loss of near features (KoLeo)", "Lower where the features of a batch are farther apart."),
    "val/knn_top1": ("validation k-NN top-1", "Labels are used for this figure alone, never to learn."),
    "val/knn_map": ("validation k-NN mAP", "Labels are used for this figure alone, never to learn."),
    "val/rankme": (
        "validation RankMe",
        "How many directions the features fill: 1 is a collapse, the most is their width or the number of images.",
    ),
    "val/feature_deviation": (
        "deviation of validation features",
        "Of features of length one, over the images: 0 is a collapse, all images have the same.",
    ),
    "train/teacher_entropy": (
        "entropy of the teacher's targets (nats)",
        "Mean over images, 0 to ln K of K prototypes; at ln K the teacher says nothing. It falls as it gets sure.",
    ),
    "train/prototype_entropy": (
        "entropy of the mean target (nats)",
        "Near 0 one prototype has all images, which is a collapse; high where images are spread over the prototypes.",
    ),
    "train/feature_deviation": (
        "deviation of training features",
        "Of features of length one, over the images of a batch: 0 is a collapse.",
    ),
    "lr": ("learning rate", ""),
}
FIGURES = {
    "knn_top1": "k-NN top-1",
    "knn_map": "k-NN mAP",
    "rankme": "RankMe",
    "feature_deviation": "feature deviation",
}


def measured_curves(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Draw every figure that was measured, the parts of the loss too, each with a line on what it means."""
    logged = {name for line in lines for name, value in line.items() if value is not None}
    known = dict(CURVES)
    for name in ("rankme", "feature_deviation"):
        title, text = CURVES[f"val/{name}"]
        known[TRAINING_IMAGES + name] = (title.replace("validation", "training images'"), text)
    unknown = sorted(name for name in logged if name.startswith("train/") and name not in known)
    known |= {name: (name.removeprefix("train/").replace("_", " "), "") for name in unknown}
    panels = []
    for number, (name, (title, text)) in enumerate((name, known[name]) for name in known if name in logged):
        series: list[Curve] = [("", COLOURS[number % len(COLOURS)], lines)]
        panels.append({"drawing": curves(title, name, series), "text": text})
    return panels


def headline(summary: dict[str, Any]) -> dict[str, Any] | None:
    """Return the last figures of the features for the top of the page; None where nothing was measured."""
    val = summary.get("val")
    source = val or summary.get("train") or {}
    figures = [
        (
            FIGURES[name],
            format_figure(name, value) if name in SHARES else format_number(value),
            format_interval(name, (source.get("interval") or {}).get(name)),
        )
        for name in FIGURES
        if (value := source.get(name)) is not None
    ]
    if not figures:
        return None
    knn = val is not None and leading_of(val) != "rankme"
    return {"figures": figures, "images": val["images"] if val else None, "knn": knn}


def alarms(folder: Folder) -> list[dict[str, Any]]:
    """Read what looked wrong as the run went, each once."""
    by_name: dict[str, dict[str, Any]] = {}
    for line in read_lines(folder.warnings):
        by_name.setdefault(line["name"], line)
    return list(by_name.values())
