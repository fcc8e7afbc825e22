"""vitreous soup."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal

from tyro.conf import Positional, arg

from vitreous.cli.console import Console
from vitreous.cli.inference import InferenceArguments


@dataclass(frozen=True, kw_only=True)
class Options(InferenceArguments):
    """Average the weights of several runs of one model into one bundle (model soup).

    Example: vitreous soup runs/pets-1 runs/pets-2 runs/pets-3 --greedy --out runs/pets-soup
    """

    runs: Annotated[Positional[tuple[str, ...]], arg(metavar="RUN...")]
    """Run folders or bundles; their order means nothing."""
    out: Annotated[str, arg(metavar="BUNDLE")]
    """The folder to make."""
    greedy: bool = False
    """From the best run on, keep those with which the soup is not worse on the validation images (default: keep
    all)."""
    data: str | None = None
    """A data set to judge them on (default: the runs' own)."""
    split: Literal["val", "train"] = "val"
    """Which part of it; the test split is never read."""
    workers: int | None = None
    """Processes that decode images; changes no figure."""


def run(options: Options, console: Console) -> dict[str, Any]:
    """Average, and print a table of the ingredients."""
    from vitreous.cli.console import figures, percent
    from vitreous.jobs.soup import soup
    from vitreous.tasks.metrics import label_metric
    from vitreous.tasks.report import leading_of

    o = options
    averaged = soup(
        o.runs,
        o.out,
        greedy=o.greedy,
        data=o.data,
        split=o.split,
        workers=o.workers,
        how=o.how(),
        bad_images=o.bad_images,
        listener=console,
    )
    document: dict[str, Any] = {**averaged}
    judged = document.get(options.split)
    name = label_metric(leading_of(judged) if judged else "top1")
    rows = [
        [row["run"], percent(row["score"], 2), percent(row["score_with"], 2), "yes" if row["kept"] else "no"]
        for row in document["ingredients"]
    ]
    console.table(["ingredient", f"{options.split} {name}", "soup with it", "kept"], rows)
    if judged:
        console.say(figures(options.split, judged))
    console.say(f"next: vitreous predict {document['bundle']} IMAGE ...")
    return document
