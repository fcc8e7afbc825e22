"""Figures of an evaluation as lines for people."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from vitreous.tasks.metrics import METRICS, Metric


def figures(name: str, summary: Mapping[str, Any] | None) -> str:
    """One line with the figures of a split, from a `Report.summary`: the evaluator's leading one first."""
    from vitreous.tasks.report import leading_of

    if summary is None:
        return f"{name}: not evaluated"
    leading = leading_of(summary)
    texts = [figure(summary, leading, "95 % interval ")]
    secondary = METRICS[leading].secondary if leading in METRICS else None
    texts += [figure(summary, key) for key in secondary or () if summary.get(key) is not None]
    return f"{name}: {', '.join(texts)}, {summary['images']} images"


def figure(summary: Mapping[str, Any], key: str, prefix: str = "") -> str:
    """A figure's name and value, with its interval where there is one; `prefix` stands before the interval."""
    metric = METRICS.get(key) or Metric(key, key, ".4g")
    value, ends = summary.get(key), summary["interval"].get(key)
    text = "not measured" if value is None else format(value, metric.form)
    return f"{metric.label} {text}" + interval(ends, metric.short_form, prefix)


def interval(ends: Sequence[float] | None, form: str = ".1%", prefix: str = "") -> str:
    """An interval in parentheses behind its figure, or nothing where there is none."""
    return f" ({prefix}{ends[0]:{form}} to {ends[1]:{form}})" if ends else ""


def percent(value: float | None, digits: int = 1) -> str:
    """A fraction as a percentage, `-` for None."""
    return "-" if value is None else f"{value:.{digits}%}"
