"""vitreous evaluate."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal

from tyro.conf import Positional, arg

from vitreous.cli.protocols import Protocols, run_protocol, share

if TYPE_CHECKING:
    from vitreous.cli.console import Console


@dataclass(frozen=True)
class Options(Protocols):
    """Judge a trained model on a split of its own data, or of other data with classes of the same names; or two on the
    same images.

    Example: vitreous evaluate runs/pets photos/ --split test
    """

    run: Annotated[Positional[str], arg(metavar="RUN")]
    """A run folder or a bundle."""
    data: Annotated[Positional[str | None], arg(metavar="[RUN|DATA]")] = None
    """A second run or bundle to compare with the first, or a data set (default: the run's own)."""
    more: Annotated[Positional[str | None], arg(metavar="[DATA]")] = None
    """A data set, after two runs."""
    split: Literal["train", "val", "test"] | None = None
    """Which part of it (default: test, or val where there is no test split)."""
    calibrate: bool = False
    """Fit a temperature to the validation images, and store it in the bundle: later answers are divided by it."""
    abstain: float | None = None
    """Tell what is gained by not answering where the highest probability is below this, above 0 to 1."""
    outliers: str | None = None
    """Write a table to this file: path and score of each image, from the one least like the training images on."""
    against: str | None = None
    """Other data, with or without labels: tell how well they are known from the judged images by that score."""
    suspects: str | None = None
    """Write a table to this file: images whose label is probably wrong, the surest first."""
    report: str | None = None
    """Where the page with all of it goes (default: report.html in the run's folder)."""
    batch_size: int = 64
    """Images decoded at a time; changes no figure."""
    workers: int | None = None
    """Processes that decode images; changes no figure."""


def run(options: Options, console: Console) -> dict[str, Any]:
    """Judge, and print the figures and the table of classes."""
    if (second := other_run(options)) is not None:
        return against_another(options, second, console)
    if options.protocol != "top1":
        return run_protocol(options, console)
    from vitreous.cli.train import figures
    from vitreous.reports.evaluate import EvaluateOptions, evaluate

    document = evaluate(
        options.source(options.run),
        options.data,
        options.split,
        options.batch_size,
        options.workers,
        options.how(),
        options.bad_images,
        console,
        settings=EvaluateOptions(
            options.calibrate,
            options.abstain,
            options.outliers,
            options.against,
            options.suspects,
            options.cache,
            options.report,
        ),
    )
    judged = document[document["split"]]
    console.say(figures(document["split"], judged))
    unreadable = judged["unreadable"]
    if unreadable:
        console.say(f"{unreadable} images cannot be read and count as wrong")
    multilabel = document["confused"] is None
    rank, name = ("ap", "AP") if multilabel else ("f1", "F1")
    rows = sorted(document["per_class"], key=lambda row: row[rank] if row[rank] is not None else 2.0)
    shown = rows if len(rows) <= 20 else rows[:20]
    console.table(
        [
            "class",
            "images",
            *(["AP"] if multilabel else []),
            "recall",
            "precision",
            "F1",
            *([] if multilabel else ["mostly taken for"]),
        ],
        [cells(row) for row in shown],
    )
    if len(rows) > len(shown):
        console.say(f"… and {len(rows) - len(shown)} classes with a better {name}")
    for line in judgements(document):
        console.say(line)
    if document["report"]:
        console.say(f"page: {document['report']}")
    return document


def other_run(options: Options) -> str | None:
    """The second run, where there are two. Raises UsageError for what two runs cannot be asked."""
    if options.data is None:
        return None
    from vitreous.errors import UsageError
    from vitreous.reports.compare import is_run

    if options.more is None and not is_run(options.data):
        return None
    if options.more is not None and not is_run(options.data) and ":" not in options.data:
        raise UsageError(f"{options.data} is no run to compare {options.run} with", "vitreous evaluate RUN RUN DATA")
    own = [name for name in ("calibrate", "abstain", "outliers", "against", "suspects") if getattr(options, name)]
    own += ["protocol"] * (options.protocol != "top1")
    if own:
        raise UsageError(f"--{own[0]} is for one run", "leave it out, or name one run")
    return options.data


def against_another(options: Options, second: str, console: Console) -> dict[str, Any]:
    """Compare two runs, and print how they differ."""
    from vitreous.cli.train import figures
    from vitreous.reports.answers import Computing
    from vitreous.reports.compare import compare, is_run

    computing = Computing(options.batch_size, options.workers, options.how(), options.bad_images, console)
    runs = (options.run, second)  # what is said of weights is meant for those that are foreign, if only one is
    first, other = (path if is_run(path) and not all(map(is_run, runs)) else options.source(path) for path in runs)
    document = compare(first, other, options.more, options.split, computing)
    for side in (document["a"], document["b"]):
        console.say(figures(side["run"], side))
    if counts := document["counts"]:
        right = (
            f"{counts['both']} right by both, {counts['only_a']} by the first alone, {counts['only_b']} by the "
            "second alone"
        )
        console.say(f"of {document['images']} images {right}, {counts['neither']} by neither")
    ends = document["interval"]
    others = [name for name in ("nll", "ece") if document["difference"].get(name) is not None]
    signs = [
        f"{name.upper()} {document['difference'][name]:+.3f}"
        + (f" ({ends[name][0]:+.3f} to {ends[name][1]:+.3f})" if ends[name] else "")
        for name in others
    ]
    if signs:
        console.say(f"second less first: {', '.join(signs)}")
    console.say(document["verdict"])
    return document


def judgements(document: dict[str, Any]) -> Iterator[str]:
    """What people are told below the table of classes: a line each."""
    if document["confused"] and (pairs := document["confused"]["unordered"]):
        named = (
            f"{' and '.join(pair['classes'])} {pair['count']} ({pair['share']:.1%} of their images)"
            for pair in pairs[:5]
        )
        yield f"most often confused: {', '.join(named)}"
    if calibration := document["calibration"]:
        fitted_on = calibration["fitted_on"]
        on = (
            f", fitted on {fitted_on['images']} {fitted_on['split']} images of {fitted_on['data']}" if fitted_on else ""
        )
        yield f"temperature {calibration['temperature']:.3f}{on}"
        for name in ("val", "test", "train"):
            if name in calibration:
                yield f"  {name}: {moved(calibration[name], 'nll')}{moved(calibration[name], 'ece', ', ')}"
    if abstain := document["abstain"]:
        right = (
            "" if abstain["top1"] is None else f": top-1 {abstain['top1']:.2%}{ends_of(abstain['interval'])} on them"
        )
        answered = f"{abstain['answered']} images answered ({abstain['coverage']:.1%}){right}"
        yield f"below {abstain['below']:g} it is unsure: {answered}; AURC {abstain['aurc']:.2g}"
    if outliers := document["outliers"]:
        yield (
            f"unlike training images by a score of {outliers['median']:.1f} (median; theirs "
            f"{outliers['training_median']:.1f}), most of all:"
        )
        for row in outliers["top"][:5]:
            yield f"  {row['score']:.1f}  {row['path']}"
        if other := outliers["against"]:
            rates = f"AUROC {other['auroc']:.3f}, false-positive rate {other['fpr95']:.1%} at 95 % true positives"
            yield f"against {other['images']} images of {other['data']}: {rates}"
    if suspects := document["suspects"]:
        yield f"{suspects['count']} of {suspects['images']} labels are suspect: {suspects['file']}"
        for row in suspects["top"][:5]:
            verdict = f"model {row['class']} {row['probability']:.0%}, neighbours {row['knn_class']} {row['share']:.0%}"
            yield f"  {row['path']}: labelled {row['label']}; {verdict}"


def moved(calibration: dict[str, Any], name: str, before: str = "") -> str:
    """A figure before and after."""
    old, new = calibration["before"][name], calibration["after"][name]
    return "" if old is None else f"{before}{name.upper()} {old:.3f} -> {new:.3f}"


def ends_of(interval: list[float]) -> str:
    """An interval of an accuracy."""
    return f" ({interval[0]:.1%} to {interval[1]:.1%})"


def cells(row: dict[str, Any]) -> list[str]:
    """A class's row of the table; a class of images with several labels has an average precision."""
    shares = [share(row[name]) for name in ("ap", "recall", "precision", "f1") if name in row]
    return [row["class"], str(row["images"]), *shares, *([row["taken_for"] or "-"] if "taken_for" in row else [])]
