"""Figures of an evaluation as lines for people."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from vitreous.tasks.metric_names import MAPS, OBJECTS

#: a figure's name for people and the format of its value; others are plain numbers
FORMATS = {
    "top1": ("top-1", ".2%"),
    "map": ("mAP", ".2%"),
    "knn_top1": ("k-NN top-1", ".2%"),
    "knn_map": ("k-NN mAP", ".2%"),
    "rankme": ("RankMe", ".1f"),
    "top5": ("top-5", ".2%"),
    "macro_f1": ("macro F1", ".2%"),
    "micro_f1": ("micro F1", ".2%"),
    "miou": ("mIoU", ".2%"),
    "dice": ("Dice", ".2%"),
    "pixel_accuracy": ("pixel accuracy", ".2%"),
    "nll": ("NLL", ".3f"),
    "ece": ("ECE", ".3f"),
    "denoising_error": ("denoising error", ".4f"),
    **{key: (name, ".2%") for key, name in (OBJECTS | MAPS).items()},
}
FURTHER = {
    "top1": ("top5", "nll", "ece"),
    "map": ("macro_f1", "micro_f1", "nll"),
    "miou": ("dice", "pixel_accuracy", "boundary_f", "pq"),
    "ap": ("ap50", "ap75", "ar100", "box_ap", "box_ap50"),
    "knn_top1": ("rankme",),
    "knn_map": ("rankme",),
}  # figures printed after a leading one


def figures(name: str, summary: Mapping[str, Any] | None) -> str:
    """One line with the figures of a split, from a `Report.summary`: the evaluator's leading one first."""
    from vitreous.tasks.report import leading_of

    if summary is None:
        return f"{name}: not evaluated"
    leading = leading_of(summary)
    texts = [figure(summary, leading, "95 % interval ")]
    texts += [figure(summary, key) for key in FURTHER.get(leading, ()) if summary.get(key) is not None]
    return f"{name}: {', '.join(texts)}, {summary['images']} images"


def figure(summary: Mapping[str, Any], key: str, prefix: str = "") -> str:
    """A figure's name and value, with its interval where there is one; `prefix` stands before the interval."""
    label, form = FORMATS.get(key, (key, ".4g"))
    value, ends = summary.get(key), summary["interval"].get(key)
    return f"{label} {'not measured' if value is None else format(value, form)}" + interval(
        ends, form.replace(".2", ".1"), prefix
    )


def interval(ends: Sequence[float] | None, form: str = ".1%", prefix: str = "") -> str:
    """An interval in parentheses behind its figure, or nothing where there is none."""
    return f" ({prefix}{ends[0]:{form}} to {ends[1]:{form}})" if ends else ""


def percent(value: float | None, digits: int = 1) -> str:
    """A fraction as a percentage, `-` for None."""
    return "-" if value is None else f"{value:.{digits}%}"
