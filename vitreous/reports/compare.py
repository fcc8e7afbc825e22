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


def is_run_or_bundle(argument: str) -> bool:
    """Return whether a path is a run folder or a bundle; datasets are neither."""
    return is_run_folder(argument) or locate_bundle(Path(argument)) is not None


def compare_two_runs(
    run_a: str | os.PathLike[str],
    run_b: str | os.PathLike[str],
    data: str | os.PathLike[str] | None = None,
    split: str | None = None,
    evaluation_settings: EvaluationSettings | None = None,
) -> dict[str, Any]:
    """Evaluate two runs on the same images: metrics of each, differences, and whether the differences are significant.

    The images are those of `data`. If it is None, they are those of the first run's dataset, or of the second run's if
    the first is a bundle without a run. If `split` is None, it is `test`, or `val` if there is no test split. Classes
    and targets are matched by name. Each evaluation is added to its run's `evaluations.jsonl`. Raises DataError for a
    class of the data that a model lacks, or a target without values; UsageError for runs of different tasks, and for a
    single-label run with a multi-label run.
    """
    evaluation_settings, runs = evaluation_settings or EvaluationSettings(), [os.fspath(run_a), os.fspath(run_b)]
    task_types = [read_task_type(run) for run in (run_a, run_b)]
    if any(run_predictions.is_dense for run_predictions in task_types):
        if task_types[0] is not task_types[1]:
            dense_index = 0 if task_types[0].is_dense else 1
            problem = f"{runs[dense_index]} {task_types[dense_index].verb_phrase}, but {runs[1 - dense_index]} does not"
            raise UsageError(problem, "compare runs of the same task")
        return compare_dense_runs(runs, data, split, evaluation_settings)
    bundles = [open_bundle(run, note=evaluation_settings.listener.note) for run in (run_a, run_b)]
    tasks = [bundle.task for bundle in bundles]
    if task_note := tasks[0].check_comparison(tasks[1], (runs[0], runs[1])):
        evaluation_settings.listener.note(task_note)
    data_run = runs[0] if data is not None or RunFolder(Path(runs[0])).config.is_file() else runs[1]
    columns = tuple(dict.fromkeys(name for task in tasks for name in task.label_columns))
    source, dataset = open_run_data(data_run, data, split, targets=columns)
    split = choose_split(dataset, split, evaluation_settings.listener.note)
    for run, bundle in zip(runs, bundles, strict=True):
        check_labels(run, bundle, source, dataset, split)
    pairs = zip(runs, bundles, strict=True)
    predictions = [
        predict_open_split(
            run, bundle, source=source, dataset=dataset, split=split, evaluation_settings=evaluation_settings
        )
        for run, bundle in pairs
    ]
    reports = [run_predictions.report for run_predictions in predictions]
    overlaps = record_comparison(predictions, reports, None if data is not None else data_run, evaluation_settings)
    first_outputs, second_outputs = (
        ModelOutputs(run_predictions.raw_logits, run_predictions.split.labels, run_predictions.readable)
        for run_predictions in predictions
    )
    comparison = tasks[0].compare_outputs(tasks[1], first_outputs, second_outputs, dataset)
    return build_comparison_document(predictions, reports, overlaps, comparison)


def compare_dense_runs(
    runs: list[str], data: str | os.PathLike[str] | None, split: str | None, evaluation_settings: EvaluationSettings
) -> dict[str, Any]:
    """Compare two segmentation models, or two detectors. Detectors are compared by masks if both predict masks.

    Confidence intervals are computed by a paired bootstrap over images. Raises DataError for unreadable images, and as
    `evaluate_dense_split`.
    """
    bundles = [open_bundle(run, note=evaluation_settings.listener.note, dense=True) for run in runs]
    data_run = runs[0] if data is not None or RunFolder(Path(runs[0])).config.is_file() else runs[1]
    source, dataset = open_run_data(data_run, data, split, labelled=False)
    split = choose_split(dataset, split, evaluation_settings.listener.note)
    boxes = not all(bundle.task.masks for bundle in bundles)
    pairs = zip(runs, bundles, strict=True)
    predictions, reports = zip(
        *(
            evaluate_dense_split(
                run,
                bundle,
                source=source,
                dataset=dataset,
                name=split,
                evaluation_settings=evaluation_settings,
                boxes=boxes,
            )
            for run, bundle in pairs
        ),
        strict=True,
    )
    overlaps = record_comparison(
        list(predictions), list(reports), None if data is not None else data_run, evaluation_settings
    )
    metrics = {name: (reports[0].metrics[name], reports[1].metrics[name]) for name in reports[0].metrics}
    differences = {name: None if a is None or b is None else b - a for name, (a, b) in metrics.items()}
    evaluators: list[Any] = [prediction.evaluator for prediction in predictions]
    intervals = evaluators[0].paired_intervals(predictions[0].raw_logits, evaluators[1], predictions[1].raw_logits)
    comparison = Comparison(reports[0].primary, metrics, differences=differences, intervals=intervals)
    return build_comparison_document(list(predictions), list(reports), overlaps, comparison)


def record_comparison(
    predictions: list[SplitPredictions],
    reports: list[Report],
    data_run: str | None,
    evaluation_settings: EvaluationSettings,
) -> list[dict[str, Any]]:
    """Add each evaluation to its run, and return the training overlap of each run.

    Images that were used in training or selection are logged, since they make metrics optimistic. `data_run` is the run
    whose dataset was used; None for a dataset passed by the user.
    """
    overlaps = []
    for prediction, report in zip(predictions, reports, strict=True):
        overlap = find_training_overlap(prediction, None if prediction.run == data_run else prediction.source)
        for overlap_note in describe_training_overlap(overlap, prediction):
            evaluation_settings.listener.note(overlap_note)
        record_evaluation(prediction.run, prediction.source, prediction.name, report.summary())
        overlaps.append(overlap)
    return overlaps


def check_labels(run: str, bundle: Bundle, source: str, dataset: Data, split: str) -> None:
    """Raise DataError, with the name of the run, if the data have a class that the model lacks, or no values for one of
    its targets."""
    try:
        bundle.task.align_labels(dataset.split(split), dataset)
    except DataError as error:
        raise DataError(f"{run}, on {source}: {error.message}", error.hint) from None


def build_comparison_document(
    predictions: list[SplitPredictions], reports: list[Report], overlaps: list[dict[str, Any]], comparison: Comparison
) -> dict[str, Any]:
    """Build the document of `evaluate A B --json`: `a` is the first run, `b` the second, differences are b minus a."""
    a, b = predictions
    run_documents = []
    for prediction, report, overlap in zip(predictions, reports, overlaps, strict=True):
        run_info = {
            "run": prediction.run,
            "model": prediction.bundle.model.config.name(),
            "temperature": prediction.bundle.classification.temperature,
        }
        run_documents.append(run_info | overlap | report.summary())
    names = [os.path.basename(prediction.run.rstrip("/")) for prediction in predictions]
    names = names if names[0] != names[1] and all(names) else [a.run, b.run]
    return {
        "data": a.source,
        "split": a.name,
        "images": len(a.split),
        "a": run_documents[0],
        "b": run_documents[1],
        "correct": comparison.counts,
        "mcnemar_p": comparison.p,
        "difference": comparison.differences,
        "interval": {name: None if bounds is None else list(bounds) for name, bounds in comparison.intervals.items()},
        "metrics": {name: list(pair) for name, pair in comparison.metrics.items()},
        "significant": comparison.significant,
        "verdict": comparison.verdict(*names),
        **comparison.details,
    }
