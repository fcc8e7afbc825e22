"""The verb `vitreous soup`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

from tyro.conf import Positional, arg

from vitreous.cli.console import Console
from vitreous.cli.inference import InferenceArguments


@dataclass(frozen=True, kw_only=True)
class Options(InferenceArguments):
    """Average the weights of several runs of one model into one bundle (model soup).

    Example: vitreous soup runs/pets-1 runs/pets-2 runs/pets-3 --greedy --out runs/pets-soup
    Example: vitreous soup zero-shot fine-tuned --alpha 0.5 --out wise-ft
    """

    SECTIONS: ClassVar[dict[str, str]] = {"out": "Soup"}

    runs: Annotated[Positional[tuple[str, ...]], arg(metavar="RUN...")]
    """Run folders or bundles, in any order."""
    out: Annotated[str, arg(metavar="BUNDLE")]
    """Folder of the new bundle."""
    greedy: bool = False
    """Greedy soup: start with the best run and add runs that do not lower the validation metric (default: average
    all)."""
    alpha: Annotated[tuple[float, ...], arg(metavar="ALPHA...")] = ()
    """Interpolate between two models: (1 - ALPHA) of the first plus ALPHA of the second, such as a zero-shot classifier
    and its fine-tuned version (WiSE-FT). Of several values, the best on the validation images is kept."""
    data: str | None = None
    """Dataset for the evaluation (default: the runs' dataset)."""
    split: Literal["val", "train"] = "val"
    """Split for the evaluation; the test split is never used."""
    workers: int | None = None
    """Processes that decode images; does not change the results."""


def run(options: Options, console: Console) -> dict[str, Any]:
    """Average the weights of runs, and print a table of the ingredients and the metrics of the soup."""
    from vitreous.cli.console import format_split_metrics
    from vitreous.jobs.soup import soup
    from vitreous.tasks.metrics import METRICS
    from vitreous.tasks.report import get_primary_key

    o = options
    averaged = soup(
        o.runs,
        o.out,
        greedy=o.greedy,
        data=o.data,
        split=o.split,
        workers=o.workers,
        how=o.get_inference_options(),
        bad_images=o.bad_images,
        listener=console,
        alpha=o.alpha,
    )
    document: dict[str, Any] = {**averaged}
    metrics = document.get(options.split)
    primary = get_primary_key(metrics) if metrics else "top1"
    number_format = METRICS[primary].format_spec
    rows = []
    for ingredient in document["ingredients"]:
        texts = (
            "-" if ingredient[key] is None else format(ingredient[key], number_format)
            for key in ("score", "score_with")
        )
        rows.append([ingredient["run"], *texts, "yes" if ingredient["selected"] else "no"])
    console.table(["ingredient", f"{options.split} {METRICS[primary].label}", "soup with it", "selected"], rows)
    if document["alphas"]:
        trials = [
            [f"{trial['alpha']:g}", "-" if trial["score"] is None else format(trial["score"], number_format)]
            for trial in document["alphas"]
        ]
        console.table(["alpha", f"{options.split} {METRICS[primary].label}"], trials)
    if metrics:
        console.print_line(format_split_metrics(options.split, metrics))
    console.print_line(f"next: vitreous predict {document['bundle']} IMAGE …")
    return document
