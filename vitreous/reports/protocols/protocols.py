"""The protocols of the verb `evaluate`: classifiers on a model's features, and ImageNet's other labels."""

from __future__ import annotations

import os
import time
from dataclasses import replace
from typing import Any

from vitreous.data.run_data import choose_split, open_run_data
from vitreous.errors import UsageError, first_names, nearest
from vitreous.inference.open_model import open_bundle
from vitreous.reports.answers import Computing
from vitreous.reports.protocols.answer_sets import ANSWER_SETS
from vitreous.reports.protocols.probes import PROBES
from vitreous.reports.protocols.task import ProtocolOptions, ProtocolResult, ProtocolTask
from vitreous.reports.protocols.vtab import vtab
from vitreous.reports.readings import describe, record
from vitreous.system.machine import pick_device, warning
from vitreous.tasks.classification import Classification


def judge_by(
    protocol: str | ProtocolOptions,
    run: str | os.PathLike[str],
    data: str | os.PathLike[str] | None,
    split: str | None,
    computing: Computing,
) -> dict[str, Any]:
    """Judge a model by a protocol; the document also has `protocol`, and `figures` for each setting.

    Raises UsageError for an unknown protocol, DataError for data that it cannot be carried out on.
    """
    options = ProtocolOptions(protocol) if isinstance(protocol, str) else protocol
    name, protocols = options.protocol, PROBES | ANSWER_SETS
    if name not in (known := (*PROBES, "vtab", *ANSWER_SETS)):
        raise UsageError(f"no protocol {name}", nearest(name, known) or f"there are top1, {', '.join(known)}")
    if slow := warning(computing.how.precision, pick_device(computing.how.device)):
        computing.listener.note(slow)
    started, note = time.perf_counter(), computing.listener.note
    bundle = open_bundle(run, name not in ANSWER_SETS, note)
    if name == "vtab":
        return vtab(os.fspath(run), data, bundle, options, computing)
    source, opened = open_run_data(run, data, "train" if name in PROBES else split)
    if opened.targets:
        problem = f"--protocol {name} is for classes, and {source} has values of {first_names(opened.targets, 5)}"
        raise UsageError(problem, "leave --protocol out, or name data with classes")
    chosen = choose_split(opened, split, note)
    task = ProtocolTask(
        os.fspath(run), source, data=opened, split=chosen, bundle=bundle, options=options, computing=computing
    )
    return write_document(task, protocols[name](task), time.perf_counter() - started)


def write_document(task: ProtocolTask, result: ProtocolResult, seconds: float) -> dict[str, Any]:
    """Return the document of a protocol, and add it to the run's readings."""
    bundle = replace(task.bundle, task=Classification(task.data.classes, task.data.multilabel))
    protocol = {"protocol": task.options.protocol}
    document = describe(
        bundle,
        result.report,
        split=task.split,
        source=task.source,
        run=task.run,
        seconds=seconds,
        protocol=task.options.protocol,
    )
    parts = task.parts if task.options.protocol in PROBES else {}
    settings = {name: value for name, value in result.extra.items() if not isinstance(value, dict)}
    record(task.run, task.source, task.split, protocol | settings | result.report.summary())
    return document | protocol | parts | result.extra | {"figures": result.figures}
