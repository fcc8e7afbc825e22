"""The verb `evaluate`: evaluate a trained model on a split and record the result in its run."""

from __future__ import annotations

import os
import shlex
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack, cast

from vitreous.config import apply_keyword_options
from vitreous.data.clip_views import SINGLE_VIEW
from vitreous.errors import UsageError
from vitreous.inference.engine import ENGINE_CHUNK, InferenceOptions
from vitreous.inference.open_model import read_task_type
from vitreous.progress import NullListener, ProgressListener
from vitreous.reports.answers import EvaluationSettings, SplitPredictions, predict_split
from vitreous.reports.calibrate import calibrate_temperature, describe_temperature_effect
from vitreous.reports.dense import evaluate_dense
from vitreous.reports.familiarity import find_label_errors, score_outliers
from vitreous.reports.generated import GenerationOptions, measure_generator
from vitreous.reports.options import EvaluateOptions, ProtocolOptions
from vitreous.reports.readings import build_evaluation_document, get_page_path, record_evaluation, write_evaluation_page
from vitreous.reports.training_overlap import describe_training_overlap, find_training_overlap
from vitreous.reports.zero_shot import label_dataset_classes
from vitreous.tasks.base import Task
from vitreous.tasks.calibration import check_abstain, evaluate_abstention
from vitreous.tasks.classification_metrics import list_confused_pairs
from vitreous.tasks.documents import EvaluationDocument
from vitreous.tasks.report import Report
from vitreous.training.folder import RunFolder
from vitreous.weights.options import get_source_options

if TYPE_CHECKING:
    from vitreous.keywords import EvaluateKeywords

OPTIONAL_KEYS = ("abstain", "outliers", "suspects")  # document keys that options add
#: option that is limited to one task -> that task
TASK_OPTIONS = {"boundary": "semantic segmentation", "tiles": "object detection"} | dict.fromkeys(
    ("calibrate", "abstain", "outliers", "against", "suspects"), "image classification"
)
FEATURE_OPTIONS = ("outliers", "against", "suspects")  # options that compare features with those of training images
# parameters of `evaluate` that are not options
KNOWN_KEYWORDS = ("data", "split", "batch_size", "workers", "bad_images", "protocol", "listener")


def evaluate(
    run: str | os.PathLike[str],
    data: str | os.PathLike[str] | None = None,
    split: str | None = None,
    batch_size: int = ENGINE_CHUNK,
    workers: int | None = None,
    how: InferenceOptions | None = None,
    bad_images: str = "stop",
    listener: ProgressListener | None = None,
    protocol: str | ProtocolOptions = "top1",
    settings: EvaluateOptions | GenerationOptions | None = None,
    **options: Unpack[EvaluateKeywords],
) -> EvaluationDocument:
    """Evaluate a run's model on a split of its dataset, or of another dataset with the same class names.

    The split is test by default; if there is no test split, it is val, and this is logged. The returned document has
    the keys of `summary.json`: metrics, intervals, per-class table, confusion matrix, most confused classes. The
    evaluation is added to the run's `evaluations.jsonl`, and `report.html` is written. Unreadable images raise a
    DataError that lists them; with `bad_images="skip"` they count as wrong, unless none is readable. `batch_size`
    images are decoded at a time. Neither it nor `workers`, the number of decoding processes, affects metrics.
    `protocol` names an evaluation protocol other than top-1.

    `options` are those of the command line: the fields of `InferenceOptions` and `EvaluateOptions`; with a `protocol`
    those of `ProtocolOptions`; for a generative model those of `GenerationOptions`. They can also be passed as objects:
    `how` is an `InferenceOptions`, `settings` an `EvaluateOptions` or `GenerationOptions`, `protocol` a
    `ProtocolOptions`. Raises UsageError for an unknown option.
    """
    evaluation_settings = EvaluationSettings(
        batch_size, workers, how or InferenceOptions(), bad_images, listener=listener or NullListener()
    )
    task_type = read_task_type(run)
    if not task_type.reads_images:
        document = evaluate_generator(
            protocol, run, data, split, evaluation_settings, settings=settings, options=dict(options)
        )
        return cast(EvaluationDocument, document)
    if isinstance(settings, GenerationOptions):
        raise UsageError(f"GenerationOptions need a generative model, and {run} is not one", "leave them out")
    if protocol != "top1":
        document = evaluate_protocol(
            protocol, run, data=data, split=split, evaluation_settings=evaluation_settings, options=dict(options)
        )
        return cast(EvaluationDocument, document)
    how, settings = evaluation_settings.inference_options, settings or EvaluateOptions()
    how, evaluate_options = apply_keyword_options("evaluate", dict(options), how, settings, extra_names=KNOWN_KEYWORDS)
    evaluation_settings = replace(evaluation_settings, inference_options=how, cache=evaluate_options.cache)
    check_abstain(evaluate_options.abstain)
    run = label_dataset_classes(run, data, split, evaluate_options)
    task_type = read_task_type(run)
    check_task_options(evaluate_options, run, task_type, evaluation_settings.inference_options)
    if task_type.is_dense:
        calibration, boundary, tiles = {}, evaluate_options.boundary, evaluate_options.tiles
        predictions, report = evaluate_dense(
            run, data, split=split, evaluation_settings=evaluation_settings, boundary=boundary, tiles=tiles
        )
    else:
        calibration = calibrate_temperature(run, data, evaluation_settings) if evaluate_options.calibrate else {}
        predictions = predict_split(run, data, split, evaluation_settings)
        if evaluate_options.abstain is not None and predictions.split.labels.ndim == 2:
            hint = "for multi-label data, use predict with --threshold"
            raise UsageError("--abstain needs single-label data", hint)
        report = predictions.report
    document = build_head_document(run, data, predictions, report, evaluation_settings)
    document["calibration"] = (calibration | (describe_temperature_effect(predictions) or {})) or None
    document |= analyse_predictions(predictions, evaluation_settings, evaluate_options)
    record_evaluation(run, predictions.source, predictions.name, predictions.clip_views_entry | report.summary())
    page_path = (
        Path(evaluate_options.report) if evaluate_options.report else get_page_path(Path(run), data, predictions.name)
    )
    command = shlex.join(build_evaluate_command(run, data, predictions.name, evaluation_settings.inference_options))
    folder, listener = RunFolder(Path(run)), evaluation_settings.listener
    page = write_evaluation_page(
        page_path, folder, predictions=predictions, report=report, listener=listener, command=command
    )
    return cast(EvaluationDocument, document | {"report": os.fspath(page_path) if page else None})


def analyse_predictions(
    predictions: SplitPredictions, evaluation_settings: EvaluationSettings, options: EvaluateOptions
) -> dict[str, Any]:
    """Return the entries `abstain`, `outliers` and `suspects` of the document, each if its option is set."""
    entries: dict[str, Any] = {}
    if options.abstain is not None:
        entries["abstain"] = evaluate_abstention(predictions.confidence, predictions.is_correct, options.abstain)
    if options.outliers or options.against:
        entries["outliers"] = score_outliers(predictions, evaluation_settings, options.outliers, options.against)
    if options.suspects:
        entries["suspects"] = find_label_errors(predictions, evaluation_settings, options.suspects)
    return entries


def evaluate_generator(
    protocol: str | ProtocolOptions,
    run: str | os.PathLike[str],
    data: str | os.PathLike[str] | None,
    split: str | None,
    evaluation_settings: EvaluationSettings,
    settings: EvaluateOptions | GenerationOptions | None,
    options: dict[str, Any],
) -> dict[str, Any]:
    """Evaluate a generative model. `options` are fields of `InferenceOptions` and `GenerationOptions`.

    Raises UsageError for a `protocol` other than top1, and if `settings` are an `EvaluateOptions`.
    """
    if protocol != "top1" or isinstance(settings, EvaluateOptions):
        problem = f"--protocol {protocol}" if protocol != "top1" else "EvaluateOptions"
        raise UsageError(f"{problem} is for models that predict, but {run} is a generative model", "leave it out")
    inference_options, generation_options = apply_keyword_options(
        "evaluate",
        options,
        evaluation_settings.inference_options,
        settings or GenerationOptions(),
        extra_names=KNOWN_KEYWORDS,
    )
    return measure_generator(
        run, data, split, generation_options, replace(evaluation_settings, inference_options=inference_options)
    )


def check_task_options(
    options: EvaluateOptions, run: str | os.PathLike[str], task_type: type[Task], inference_options: InferenceOptions
) -> None:
    """Raise UsageError for options that the run's task does not support, and for clip views with options that compare
    features."""
    if inference_options.clip_views != SINGLE_VIEW and (
        feature_options := [name for name in FEATURE_OPTIONS if getattr(options, name)]
    ):
        raise UsageError(
            f"--{feature_options[0]} uses the features of one view of each clip, not of {inference_options.clip_views}",
            "leave --clip-views out",
        )
    unsupported = [name for name in TASK_OPTIONS if getattr(options, name) and name not in task_type.evaluate_options]
    if unsupported:
        raise UsageError(
            f"--{unsupported[0]} is for {TASK_OPTIONS[unsupported[0]]}, and {run} {task_type.verb_phrase}",
            "leave it out",
        )


def build_head_document(
    run: str | os.PathLike[str],
    data: str | os.PathLike[str] | None,
    predictions: SplitPredictions,
    report: Report,
    evaluation_settings: EvaluationSettings,
) -> dict[str, Any]:
    """Build the document of an evaluation of the model's head. Keys of unset options are None.

    Images that were used in training or selection are logged, since they make metrics optimistic.
    """
    seconds = time.perf_counter() - predictions.start_time
    document = build_evaluation_document(
        predictions.bundle, report, split=predictions.name, source=predictions.source, run=str(run), seconds=seconds
    )
    overlap = find_training_overlap(predictions, data)
    for overlap_note in describe_training_overlap(overlap, predictions):
        evaluation_settings.listener.note(overlap_note)
    labels, classes, pairs = predictions.split.labels, tuple(row["class"] for row in report.per_class), None
    if report.confusion_cells is not None:
        support = predictions.bundle.task.count_labels(labels, report.confusion_cells)
        pairs = list_confused_pairs(report.confusion_cells, support, classes)
    return (
        document
        | predictions.clip_views_entry
        | overlap
        | {"most_confused": pairs, "calibration": None, **dict.fromkeys(OPTIONAL_KEYS)}
    )


def evaluate_protocol(
    protocol: str | ProtocolOptions,
    run: str | os.PathLike[str],
    data: str | os.PathLike[str] | None,
    split: str | None,
    evaluation_settings: EvaluationSettings,
    options: dict[str, Any],
) -> dict[str, Any]:
    """Evaluate a model by a protocol other than top-1, such as k-NN.

    `options` are fields of `InferenceOptions` and `ProtocolOptions`. Raises UsageError for an unknown option.
    """
    from vitreous.reports.protocols.protocols import run_protocol

    settings = ProtocolOptions(protocol) if isinstance(protocol, str) else protocol
    inference_options, settings = apply_keyword_options(
        "evaluate", options, evaluation_settings.inference_options, settings, extra_names=KNOWN_KEYWORDS
    )
    document = run_protocol(
        settings, run, data, split, replace(evaluation_settings, inference_options=inference_options)
    )
    if not (folder := RunFolder(Path(run))).config.is_file():
        return document | {"report": None}  # the page of a run lists all its evaluations
    page_path = folder.path / f"report-{document['protocol']}.html"
    page = write_evaluation_page(page_path, folder, None, None, evaluation_settings.listener)
    return document | {"report": os.fspath(page_path) if page else None}


def build_evaluate_command(
    run: str | os.PathLike[str], data: str | os.PathLike[str] | None, split: str, inference_options: InferenceOptions
) -> list[str]:
    """Build the command that repeats an evaluation."""
    arguments = ["vitreous", "evaluate", os.fspath(run), *([] if data is None else [os.fspath(data)])]
    return (
        arguments
        + ["--split", split] * (split != "test")
        + ["--clip-views", inference_options.clip_views] * (inference_options.clip_views != SINGLE_VIEW)
        + get_source_options(run)
    )
