"""vitreous evaluate."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal

from tyro.conf import Positional, arg

from vitreous.cli.answering import Answering

if TYPE_CHECKING:
    from vitreous.cli.console import Console


@dataclass(frozen=True)
class Options(Answering):
    """Judge a trained model on a split of its own data, or of other data with classes of the same names.

    Example: vitreous evaluate runs/pets photos/ --split test
    """

    run: Annotated[Positional[str], arg(metavar="RUN")]
    """A run folder or a bundle."""
    data: Positional[str | None] = None
    """A data set (default: the run's own)."""
    split: Literal["train", "val", "test"] = "test"
    """Which part of it."""
    batch_size: int = 64
    """Images decoded at a time; changes no figure."""
    workers: int | None = None
    """Processes that decode images; changes no figure."""


def run(options: Options, console: Console) -> dict[str, Any]:
    """Judge, and print the figures and the table of classes."""
    from vitreous.cli.train import figures
    from vitreous.reports.evaluate import evaluate

    document = evaluate(
        options.run,
        options.data,
        options.split,
        options.batch_size,
        options.workers,
        options.how(),
        options.bad_images,
        console,
    )
    console.say(figures(options.split, document[options.split]))
    unreadable = document[options.split]["unreadable"]
    if unreadable:
        console.say(f"{unreadable} images cannot be read and count as wrong")
    several = document["confusion"] is None
    rank, name = ("ap", "AP") if several else ("f1", "F1")
    rows = sorted(document["per_class"], key=lambda row: row[rank] if row[rank] is not None else 2.0)
    shown = rows if len(rows) <= 20 else rows[:20]
    console.table(
        ["class", "images", *(["AP"] if several else []), "recall", "precision", "F1", *([] if several else ["mostly taken for"])],
        [cells(row) for row in shown],
    )
    if len(rows) > len(shown):
        console.say(f"… and {len(rows) - len(shown)} classes with a better {name}")
    return document


def cells(row: dict[str, Any]) -> list[str]:
    """A class's row of the table; a class of images with several labels has an average precision."""
    shares = [share(row[name]) for name in ("ap", "recall", "precision", "f1") if name in row]
    return [row["class"], str(row["images"]), *shares, *([row["taken_for"] or "-"] if "taken_for" in row else [])]


def share(value: float | None) -> str:
    """A fraction as a percentage."""
    return "-" if value is None else f"{value:.1%}"
