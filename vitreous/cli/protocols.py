"""The protocols of `vitreous evaluate`: transfer by frozen features, and ImageNet's other labels and images."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from vitreous.cli.inference import InferenceArguments
from vitreous.errors import UsageError

if TYPE_CHECKING:
    from vitreous.cli.console import Console
    from vitreous.reports.protocols.task import ProtocolOptions


@dataclass(frozen=True, kw_only=True)
class Protocols(InferenceArguments):
    """How a model is judged: by its head, or by what a simple classifier can do with its features."""

    protocol: Literal["top1", "knn", "linear", "fewshot", "vtab", "real", "objectnet"] = "top1"
    """The head (top1; real and objectnet by --labels), or a classifier on features: knn, linear, fewshot; vtab is
    linear on 19 tasks."""
    k: tuple[int, ...] = ()
    """Neighbours of knn (default: 10 20 100 200, as far as there are so many images)."""
    temperature: float = 0.07
    """Of knn: a neighbour of cosine s counts exp(s / temperature)."""
    shots: tuple[int, ...] = ()
    """Training images a class of fewshot (default: 1 5 10 25, as far as some class has so many)."""
    seeds: int = 3
    """Draws of those images."""
    l2: float | None = None
    """Penalty on the weights of fewshot (default: 1024), or of linear and vtab (default: the best on training images
    held out)."""
    labels: str | None = None
    """File of real (real.json) or of objectnet (JSON or CSV: class, ImageNet's numbers)."""
    cache: bool = True
    """Keep features in XDG_CACHE_HOME/vitreous/features for the next time."""
    seed: int = 0
    """Which training images linear holds out, and the first draw of fewshot."""

    def terms(self) -> ProtocolOptions:
        """What of it the protocols need."""
        from vitreous.reports.protocols.task import ProtocolOptions

        return ProtocolOptions(
            self.protocol, self.k, self.temperature, self.shots, self.seeds, self.l2, self.labels, self.cache, self.seed
        )


def run_protocol(options: Any, console: Console) -> dict[str, Any]:
    """Judge by a protocol other than top1, and print its figures."""
    from vitreous.reports.evaluate import evaluate

    o = options
    if asked := [name for name in OF_THE_HEAD if getattr(o, name, None)]:
        raise UsageError(
            f"--{asked[0]} is about the answers of the head, not about --protocol {o.protocol}", "leave one of them out"
        )
    document = evaluate(
        o.source(o.run), o.data, o.split, o.batch_size, o.workers, o.how(), o.bad_images, console, o.terms()
    )
    console.table(*TABLES[o.protocol](document["figures"]))
    if o.protocol == "vtab":
        console.say(
            "  ".join(f"{part} {share(document[part])}" for part in ("natural", "specialized", "structured", "mean"))
        )
        if document["missing"]:
            console.say(f"not there: {', '.join(document['missing'])}")
        for name, why in document["failed"].items():
            console.say(f"{name} cannot be judged: {why}")
    elif document[document["split"]]["unreadable"]:
        console.say(f"{document[document['split']]['unreadable']} images cannot be read and count as wrong")
    if document["report"]:
        console.say(f"page: {document['report']}")
    return document


# options of `evaluate` that go with top1 alone
OF_THE_HEAD = ("calibrate", "abstain", "outliers", "against", "suspects")
Table = tuple[list[str], list[list[str]]]


def reports(first: str, column: str, rows: list[dict[str, Any]]) -> Table:
    """A row for each setting: what it is, and the accuracies, or mAP where images have several labels."""
    names = ["map", "macro_f1"] if "map" in rows[0] else ["top1", "top5"] if rows[0]["top5"] is not None else ["top1"]
    words = {"map": "mAP", "macro_f1": "macro F1", "top1": "top-1", "top5": "top-5"}
    cells = [
        [
            f"{row[column]:.3g}" if isinstance(row[column], float) else str(row[column]),
            *(within(row, name) for name in names),
        ]
        for row in rows
    ]
    return [first, *(words[name] for name in names)], cells


def draws(rows: list[dict[str, Any]]) -> Table:
    """A row for each number of shots."""
    spread = [[f"{row['std'] * 100:.1f}"] if row["std"] is not None else ["-"] for row in rows]
    seeds = [" ".join(share(one["top1"]) for one in row["per_seed"]) for row in rows]
    cells = [[str(row["shots"]), share(row["top1"]), *spread[n], seeds[n]] for n, row in enumerate(rows)]
    return ["shots", "top-1", "std", "of each draw"], cells


def tasks(rows: list[dict[str, Any]]) -> Table:
    """A row for each task."""
    return ["task", "group", "top-1", "images", "l2"], [
        [row["task"], row["group"], within(row, "top1"), str(row["images"]), f"{row['l2']:.2g}"] for row in rows
    ]


def within(row: dict[str, Any], name: str) -> str:
    """A figure with its interval."""
    ends = row["interval"].get(name)
    return share(row[name]) + (f" ({ends[0]:.1%} to {ends[1]:.1%})" if ends else "")


def share(value: float | None) -> str:
    """A fraction as a percentage."""
    return "-" if value is None else f"{value:.1%}"


TABLES: dict[str, Callable[[list[dict[str, Any]]], Table]] = {
    "knn": partial(reports, "k", "k"),
    "linear": partial(reports, "l2", "l2"),
    "fewshot": draws,
    "vtab": tasks,
    "real": partial(reports, "images", "images"),
    "objectnet": partial(reports, "classes", "among"),
}
