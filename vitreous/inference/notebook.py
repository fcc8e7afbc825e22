"""Text and HTML views of a model in notebooks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from vitreous.config import Json
from vitreous.inference.card import Card
from vitreous.nn.sizes import format_size
from vitreous.system.notebook import format_html_table

MAX_NAMED_CLASSES = 12  # classes listed by name


def format_card_text(card: Card, origin: str, precision: str) -> str:
    """Format the card of a model as text: name, origin, task, classes, input and preprocessing."""
    preprocess, names = card.preprocess, card.task.classes
    more_text = f" and {len(names) - MAX_NAMED_CLASSES:,} more" if len(names) > MAX_NAMED_CLASSES else ""
    lines = [
        f"Predictor({card.name}" + (f" of {origin})" if origin else ")"),
        f"task: {card.task.name}, in {precision}",
        f"classes: {len(names):,} ({', '.join(names[:MAX_NAMED_CLASSES])}{more_text})" if names else "classes: none",
        f"input: {format_size(preprocess.image)} pixels, {preprocess.channels} channels",
        f"preprocessing: {preprocess.summary}, mean {preprocess.mean}, std {preprocess.std}",
    ]
    return "\n  ".join(lines)


def format_card_html(card: Card, origin: str, parameters: int | None, precision: str) -> str:
    """Format the card of a model as an HTML table: task, input, classes, precision, parameters, origin, and the metrics
    of its run."""
    preprocess, names = card.preprocess, card.task.classes
    more_text = f" and {len(names) - MAX_NAMED_CLASSES} more" if len(names) > MAX_NAMED_CLASSES else ""
    fields: list[tuple[str, Any]] = [
        ("task", card.task.name),
        (
            "input",
            (
                f"{format_size(preprocess.image)} pixels, {preprocess.channels} channels, "
                f"{preprocess.summary}, {preprocess.noun}"
            ),
        ),
        ("classes", f"{len(names)}: {', '.join(names[:MAX_NAMED_CLASSES])}{more_text}" if names else "none"),
        ("computed in", precision),
    ]
    fields += [("parameters", f"{parameters:,}")] if parameters is not None else []
    fields += [(name, value) for name, value in card.provenance.items() if isinstance(value, str | int | float)]
    fields += [(f"{split} {name}", f"{value:.4g}") for split, name, value in read_summary_metrics(origin)]
    return format_html_table(fields, title=f"{card.name} ({card.version})")


def read_summary_metrics(origin: str) -> list[tuple[str, str, float]]:
    """Read the validation and test metrics in the summary.json of a run folder: (split, name, value); [] for other
    paths."""
    try:
        summary: dict[str, Json] = json.loads((Path(origin) / "summary.json").read_text("utf-8"))
    except (OSError, ValueError):
        return []
    split_metrics = ((split, summary.get(split)) for split in ("val", "test"))
    return [
        (split, name, float(value))
        for split, metrics in split_metrics
        if isinstance(metrics, dict)
        for name, value in metrics.items()
        if isinstance(value, int | float)
    ]
