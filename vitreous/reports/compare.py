"""Paired comparison of two runs on the same images."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from vitreous.data.run_data import choose_split, open_run_data
from vitreous.data.split import Data
from vitreous.errors import DataError, UsageError
from vitreous.inference.open_model import open_bundle, read_task_type
from vitreous.reports.answers import EvaluationSettings, SplitPredictions, predict_open_split
from vitreous.reports.dense import evaluate_dense_split
from vitreous.reports.readings import record_evaluation
from vitreous.reports.training_overlap import describe_training_overlap, find_training_overlap
from vitreous.tasks.comparison import Comparison, ModelOutputs
from vitreous.tasks.report import Report
from vitreous.training.folder import RunFolder
from vitreous.weights.adopt import locate_bundle
from vitreous.weights.bundle import Bundle
from vitreous.weights.model_paths import is_run_folder


def is_run_or_bundle(word: str) -> bool:
    """Return whether an argument is a run folder or a bundle, rather than data."""
    return is_run_folder(word) or locate_bundle(Path(word)) is not None


def compare_two_runs(
    first: str | os.PathLike[str],
    second: str | os.PathLike[str],
    data: str | os.PathLike[str] | None = None,
    split: str | None = None,
    computing: EvaluationSettings | None = None,
) -> dict[str, Any]:
    """Evaluate two runs on the same images: metrics of each, differences, and whether the differences are significant.

    The images are those of `data`, by default of the first run's data set, or of the second's if the first is a bundle
    without run. The default split is test, else val. Classes and targets are matched by name. Each evaluation is added
    to its run's `evaluations.jsonl`. Raises DataError for a class of the data that a model lacks, or a target without
    values; UsageError for runs of different tasks, and for a single-label run with a multi-label run.
    """
    computing, runs = computing or EvaluationSettings(), [os.fspath(first), os.fspath(second)]
    kinds = [read_task_type(run) for run in (first, second)]
    if any(one.is_dense for one in kinds):
        if kinds[0] is not kinds[1]:
            dense = 0 if kinds[0].is_dense else 1
            problem = f"{runs[dense]} {kinds[dense].does}, but {runs[1 - dense]} does not"
            raise UsageError(problem, "compare runs of the same task")
        return compare_dense_runs(runs, data, split, computing)
    bundles = [open_bundle(run, note=computing.listener.note) for run in (first, second)]
    tasks = [bundle.task for bundle in bundles]
    if line := tasks[0].check_comparison(tasks[1], (runs[0], runs[1])):
        computing.listener.note(line)
    home = runs[0] if data is not None or RunFolder(Path(runs[0])).config.is_file() else runs[1]
    columns = tuple(dict.fromkeys(name for task in tasks for name in task.label_columns))
    source, opened = open_run_data(home, data, split, targets=columns)
    split = choose_split(opened, split, computing.listener.note)
    for run, bundle in zip(runs, bundles, strict=True):
        check_labels(run, bundle, source, opened, split)
    pairs = zip(runs, bundles, strict=True)
    both = [
        predict_open_split(run, bundle, source=source, opened=opened, split=split, computing=computing)
        for run, bundle in pairs
    ]
    reports = [one.report for one in both]
    exposures = record_comparison(both, reports, None if data is not None else home, computing)
    first_outputs, second_outputs = (ModelOutputs(one.raw, one.split.labels, one.readable) for one in both)
    comparison = tasks[0].compare_outputs(tasks[1], first_outputs, second_outputs, opened)
    return build_comparison_document(both, reports, exposures, comparison)


def compare_dense_runs(
    runs: list[str], data: str | os.PathLike[str] | None, split: str | None, computing: EvaluationSettings
) -> dict[str, Any]:
    """Compare two segmentation models, or two detectors (by masks if both have them). Intervals come from a paired
    bootstrap over images.

    Raises DataError for images that one of them cannot read, and as `evaluate_dense_split`.
    """
    bundles = [open_bundle(run, note=computing.listener.note, dense=True) for run in runs]
    home = runs[0] if data is not None or RunFolder(Path(runs[0])).config.is_file() else runs[1]
    source, opened = open_run_data(home, data, split, labelled=False)
    split = choose_split(opened, split, computing.listener.note)
    boxes = not all(bundle.task.masks for bundle in bundles)
    pairs = zip(runs, bundles, strict=True)
    both, reports = zip(
        *(
            evaluate_dense_split(
                run, bundle, source=source, opened=opened, name=split, computing=computing, boxes=boxes
            )
            for run, bundle in pairs
        ),
        strict=True,
    )
    exposures = record_comparison(list(both), list(reports), None if data is not None else home, computing)
    metrics = {name: (reports[0].metrics[name], reports[1].metrics[name]) for name in reports[0].metrics}
    differences = {name: None if a is None or b is None else b - a for name, (a, b) in metrics.items()}
    evaluators: list[Any] = [one.evaluator for one in both]
    intervals = evaluators[0].paired_intervals(both[0].raw, evaluators[1], both[1].raw)
    comparison = Comparison(reports[0].primary, metrics, differences=differences, intervals=intervals)
    return build_comparison_document(list(both), list(reports), exposures, comparison)


def record_comparison(
    both: list[SplitPredictions], reports: list[Report], home: str | None, computing: EvaluationSettings
) -> list[dict[str, Any]]:
    """Add each evaluation to its run, log reasons for optimistic metrics, and return the training overlap of each run.

    `home`: the run whose data set was used, None for data passed by the user.
    """
    exposures = []
    for one, report in zip(both, reports, strict=True):
        facts = find_training_overlap(one, None if one.run == home else one.source)
        for line in describe_training_overlap(facts, one):
            computing.listener.note(line)
        record_evaluation(one.run, one.source, one.name, report.summary())
        exposures.append(facts)
    return exposures


def check_labels(run: str, bundle: Bundle, source: str, opened: Data, split: str) -> None:
    """Raise DataError, with the run's name, if the labels of a split do not match the run: a class that the model
    lacks, or a target without values in the data."""
    try:
        bundle.task.align_labels(opened.split(split), opened)
    except DataError as error:
        raise DataError(f"{run}, on {source}: {error.message}", error.hint) from None


def build_comparison_document(
    both: list[SplitPredictions], reports: list[Report], facts: list[dict[str, Any]], comparison: Comparison
) -> dict[str, Any]:
    """Build the document of a comparison: `a` and `b` are the runs as named, differences are b minus a."""
    a, b = both
    sides = []
    for one, report, seen_by in zip(both, reports, facts, strict=True):
        head = {
            "run": one.run,
            "model": one.bundle.model.config.name(),
            "temperature": one.bundle.classification.temperature,
        }
        sides.append(head | seen_by | report.summary())
    names = [os.path.basename(one.run.rstrip("/")) for one in both]
    names = names if names[0] != names[1] and all(names) else [a.run, b.run]
    return {
        "data": a.source,
        "split": a.name,
        "images": len(a.split),
        "a": sides[0],
        "b": sides[1],
        "correct": comparison.counts,
        "mcnemar_p": comparison.p,
        "difference": comparison.differences,
        "interval": {name: None if ends is None else list(ends) for name, ends in comparison.intervals.items()},
        "metrics": {name: list(pair) for name, pair in comparison.metrics.items()},
        "significant": comparison.significant,
        "verdict": comparison.verdict(*names),
        **comparison.details,
    }
