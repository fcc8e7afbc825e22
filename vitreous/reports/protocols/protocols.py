"""Run the protocols of the verb `evaluate`: classifiers on a model's features, alternative ImageNet labels, and
retrieval."""

from __future__ import annotations

import os
import time
from dataclasses import replace
from typing import Any

from vitreous.data.annotations.painted import paint_class_maps
from vitreous.data.annotations.target import AnnotatedSplit
from vitreous.data.run_data import choose_split, open_run_data
from vitreous.errors import UsageError, format_first_names, suggest_nearest
from vitreous.inference.open_model import open_bundle
from vitreous.reports.answers import EvaluationSettings
from vitreous.reports.protocols.answer_sets import LABEL_SET_PROTOCOLS
from vitreous.reports.protocols.frozen import evaluate_heads
from vitreous.reports.protocols.probes import PROBES
from vitreous.reports.protocols.retrieval import evaluate_retrieval, prepare_pairs
from vitreous.reports.protocols.task import ProtocolOptions, ProtocolResult, ProtocolTask
from vitreous.reports.protocols.vtab import evaluate_vtab
from vitreous.reports.readings import build_evaluation_document, record_evaluation
from vitreous.system.machine import describe_emulation, pick_device
from vitreous.tasks.classification import Classification

#: protocols that train on features of the training images
FEATURE_PROTOCOLS = PROBES | {"heads": evaluate_heads}
#: protocols that train nothing
DIRECT_PROTOCOLS = {"retrieval": evaluate_retrieval} | LABEL_SET_PROTOCOLS


def run_protocol(
    protocol: str | ProtocolOptions,
    run: str | os.PathLike[str],
    data: str | os.PathLike[str] | None,
    split: str | None,
    evaluation_settings: EvaluationSettings,
) -> dict[str, Any]:
    """Evaluate a model by a protocol other than top-1, and record the result in its run.

    Returns the document of an evaluation; its additional keys include `protocol`, and `results` for each setting.
    Raises UsageError for an unknown protocol, for a model that does not support it and for regression targets,
    DataError for unsuitable data.
    """
    options = ProtocolOptions(protocol) if isinstance(protocol, str) else protocol
    name, protocols = options.protocol, FEATURE_PROTOCOLS | DIRECT_PROTOCOLS
    if name not in (protocol_names := (*FEATURE_PROTOCOLS, "vtab", *DIRECT_PROTOCOLS)):
        raise UsageError(
            f"unknown protocol {name}",
            suggest_nearest(name, protocol_names) or f"use top1, {', '.join(protocol_names)}",
        )
    if emulation_note := describe_emulation(
        evaluation_settings.inference_options.precision, pick_device(evaluation_settings.inference_options.device)
    ):
        evaluation_settings.listener.note(emulation_note)
    started, note = time.perf_counter(), evaluation_settings.listener.note
    bundle = open_bundle(run, name not in LABEL_SET_PROTOCOLS, note)
    if name == "vtab":
        return evaluate_vtab(os.fspath(run), data, bundle, options, evaluation_settings)
    is_retrieval = name == "retrieval"
    source, dataset = open_run_data(run, data, "train" if name in FEATURE_PROTOCOLS else split, not is_retrieval)
    if is_retrieval:
        dataset = prepare_pairs(dataset, bundle, os.fspath(run))
    if dataset.targets:
        problem = (
            f"--protocol {name} is for classes, but {source} has values of {format_first_names(dataset.targets, 5)}"
        )
        raise UsageError(problem, "leave --protocol out, or use data with classes")
    if name == "heads" and isinstance(next(iter(dataset.splits.values())), AnnotatedSplit):
        dataset = paint_class_maps(dataset)
    split_name = choose_split(dataset, split, note)
    task = ProtocolTask(
        os.fspath(run),
        source,
        data=dataset,
        split=split_name,
        bundle=bundle,
        options=options,
        evaluation_settings=evaluation_settings,
    )
    return record_protocol_result(task, protocols[name](task), time.perf_counter() - started)


def record_protocol_result(task: ProtocolTask, result: ProtocolResult, seconds: float) -> dict[str, Any]:
    """Add the result of a protocol to the run's `evaluations.jsonl`, and return its document."""
    bundle = task.bundle
    if task.data.classes:
        bundle = replace(bundle, task=Classification(task.data.classes, task.data.multilabel))
    protocol = {"protocol": task.options.protocol}
    document = build_evaluation_document(
        bundle,
        result.report,
        split=task.split,
        source=task.source,
        run=task.run,
        seconds=seconds,
        protocol=task.options.protocol,
    )
    data_description = task.describe_splits if task.options.protocol in FEATURE_PROTOCOLS else {}
    settings = {name: value for name, value in result.extra.items() if not isinstance(value, dict)}
    record_evaluation(task.run, task.source, task.split, protocol | settings | result.report.summary())
    return document | protocol | data_description | result.extra | {"results": result.results}
