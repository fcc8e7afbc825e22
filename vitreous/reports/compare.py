"""Two runs judged on the same images."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np

from vitreous.data.class_order import class_indices
from vitreous.data.run_data import choose_split, open_run_data
from vitreous.data.split import Data
from vitreous.errors import DataError, UsageError
from vitreous.evaluation.comparison import Answers, Comparison
from vitreous.evaluation.comparison import compare as compared
from vitreous.inference.open_model import open_bundle, read_task
from vitreous.reports.answers import Answered, Computing, answers_to
from vitreous.reports.dense import judge_opened
from vitreous.reports.readings import record
from vitreous.reports.training_overlap import exposure_notes, seen
from vitreous.tasks.classification_metrics import judge
from vitreous.tasks.report import Report
from vitreous.training.folder import Folder
from vitreous.weights.adopt import bundle_in
from vitreous.weights.bundle import Bundle
from vitreous.weights.model_paths import is_run_folder


def is_run(word: str) -> bool:
    """Tell whether an argument names a run folder or a bundle, rather than data."""
    return is_run_folder(word) or bundle_in(Path(word)) is not None


def compare(
    first: str | os.PathLike[str],
    second: str | os.PathLike[str],
    data: str | os.PathLike[str] | None = None,
    split: str | None = None,
    computing: Computing | None = None,
) -> dict[str, Any]:
    """Judge two runs on the same images: each one's figures, their differences, and whether chance explains them.

    The images are of `data`, by default of the first run's data set, or of the second's where the first is a bundle
    alone: of test unless another split is named, or val. Classes are matched by name. Each reading is added to its
    run's `evaluations.jsonl`. Raises DataError for a class of the data that a model does not know; UsageError where one
    takes images for one label and the other for several.
    """
    computing, runs = computing or Computing(), [os.fspath(first), os.fspath(second)]
    kinds = [read_task(run) for run in (first, second)]
    if any(one.is_dense for one in kinds):
        if kinds[0] is not kinds[1]:
            dense = 0 if kinds[0].is_dense else 1
            problem = f"{runs[dense]} {kinds[dense].does}, {runs[1 - dense]} does not"
            raise UsageError(problem, "compare runs that answer the same question")
        return compare_scenes(runs, data, split, computing)
    bundles = [open_bundle(run, note=computing.listener.note) for run in (first, second)]
    if other := next((one for one in zip(runs, bundles, strict=True) if not one[1].classes), None):
        problem = f"{other[0]} {other[1].task.does}, and runs are compared that name classes of images"
        raise UsageError(problem, "compare their metrics: vitreous evaluate RUN")
    if bundles[0].task.leading_metric != bundles[1].task.leading_metric:
        problem = f"{runs[bundles[0].multilabel]} names one class an image, the other run names several"
        raise UsageError(problem, "compare runs that answer the same question")
    home = runs[0] if data is not None or Folder(Path(runs[0])).config.is_file() else runs[1]
    source, opened = open_run_data(home, data, split)
    split = choose_split(opened, split, computing.listener.note)
    for run, bundle in zip(runs, bundles, strict=True):
        known_to(run, bundle, source, opened)
    if set(bundles[0].classes) != set(bundles[1].classes):
        computing.listener.note("the runs do not know the same classes; they are compared on those of the data")
    pairs = zip(runs, bundles, strict=True)
    both = [
        answers_to(run, bundle, source=source, opened=opened, split=split, computing=computing) for run, bundle in pairs
    ]
    reports = [judge(one.logits, one.split.labels, one.bundle.classes, one.readable) for one in both]
    exposures = recorded(both, reports, None if data is not None else home, computing)
    comparison = compared(*(answers_of(one) for one in both))
    return describe_comparison(both, reports, exposures, comparison)


def compare_scenes(
    runs: list[str], data: str | os.PathLike[str] | None, split: str | None, computing: Computing
) -> dict[str, Any]:
    """Compare two models that give a class to every pixel, or two that answer with objects, by masks where both have
    them; intervals are of a bootstrap over the same images.

    Raises DataError for images that one of them cannot read, and as `judge_scenes` does.
    """
    bundles = [open_bundle(run, note=computing.listener.note, dense=True) for run in runs]
    home = runs[0] if data is not None or Folder(Path(runs[0])).config.is_file() else runs[1]
    source, opened = open_run_data(home, data, split, labelled=False)
    split = choose_split(opened, split, computing.listener.note)
    boxes = not all(getattr(bundle.task, "masks", False) for bundle in bundles)
    pairs = zip(runs, bundles, strict=True)
    both, reports = zip(
        *(
            judge_opened(run, bundle, source=source, opened=opened, name=split, computing=computing, boxes=boxes)
            for run, bundle in pairs
        ),
        strict=True,
    )
    exposures = recorded(list(both), list(reports), None if data is not None else home, computing)
    figures = {name: (reports[0].figures[name], reports[1].figures[name]) for name in reports[0].figures}
    differences = {name: None if a is None or b is None else b - a for name, (a, b) in figures.items()}
    evaluators: list[Any] = [one.evaluator for one in both]
    intervals = evaluators[0].paired_intervals(both[0].raw, evaluators[1], both[1].raw)
    comparison = Comparison(
        reports[0].figure, figures, differences=differences, intervals=intervals, counts=None, p=None
    )
    return describe_comparison(list(both), list(reports), exposures, comparison)


def recorded(
    both: list[Answered], reports: list[Report], home: str | None, computing: Computing
) -> list[dict[str, Any]]:
    """Add each reading to its run, note what flatters it, and return what each run has seen of the images.

    `home`: the run whose own data they are, None for data that were named.
    """
    exposures = []
    for one, report in zip(both, reports, strict=True):
        facts = seen(one, None if one.run == home else one.source)
        for line in exposure_notes(facts, one):
            computing.listener.note(line)
        record(one.run, one.source, one.name, report.summary())
        exposures.append(facts)
    return exposures


def known_to(run: str, bundle: Bundle, source: str, opened: Data) -> None:
    """Raise DataError, with the run's name, where a run does not know a class of the data."""
    try:
        class_indices(opened, bundle.classes)
    except DataError as error:
        raise DataError(f"{run}, on {source}: {error.message}", error.hint) from None


def answers_of(answers: Answered) -> Answers:
    """Return logits (n, K) and labels of a comparison: several labels in the order of the data's classes."""
    logits, labels = answers.logits.astype(np.float64), answers.split.labels
    if labels.ndim == 2:
        order = class_indices(answers.opened, answers.bundle.classes)
        return Answers(logits[:, order], labels[:, order], answers.readable)
    return Answers(logits, labels, answers.readable)


def describe_comparison(
    both: list[Answered], reports: list[Report], facts: list[dict[str, Any]], comparison: Comparison
) -> dict[str, Any]:
    """Return the document of a comparison: `a` and `b` are the runs as named, differences are b less a."""
    a, b = both
    sides = []
    for one, report, seen_by in zip(both, reports, facts, strict=True):
        head = {"run": one.run, "model": one.bundle.model.config.name(), "temperature": one.bundle.temperature}
        sides.append(head | seen_by | report.summary())
    names = [os.path.basename(one.run.rstrip("/")) for one in both]
    names = names if names[0] != names[1] and all(names) else [a.run, b.run]
    return {
        "data": a.source,
        "split": a.name,
        "images": len(a.split),
        "a": sides[0],
        "b": sides[1],
        "counts": comparison.counts,
        "mcnemar_p": comparison.p,
        "difference": comparison.differences,
        "interval": {name: None if ends is None else list(ends) for name, ends in comparison.intervals.items()},
        "figures": {name: list(pair) for name, pair in comparison.figures.items()},
        "significant": comparison.significant,
        "verdict": comparison.verdict(*names),
    }
