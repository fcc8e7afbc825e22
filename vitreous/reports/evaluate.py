"""The verb `evaluate`: a trained model judged on a split, and the reading recorded in its run."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import numpy as np

from vitreous.data.loader import Judged
from vitreous.data.screen import readable, refuse
from vitreous.errors import UsageError
from vitreous.evaluation.classification import Report, judge
from vitreous.evaluation.engine import How, make_engine
from vitreous.evaluation.forward import CHUNK, logits_of
from vitreous.machine import default_workers, pick_device, warning
from vitreous.models.names import name_of
from vitreous.reports.opening import data_for, examples, matched, open_bundle
from vitreous.training.folder import Folder
from vitreous.training.session import Listener, Silent
from vitreous.weights.bundle import Bundle

READINGS = "evaluations.jsonl"


def evaluate(
    run: str | os.PathLike[str],
    data: str | os.PathLike[str] | None = None,
    split: str = "test",
    batch_size: int = CHUNK,
    workers: int | None = None,
    how: How | None = None,
    bad_images: str = "stop",
    listener: Listener | None = None,
) -> dict[str, Any]:
    """Judge a run's model on a split of its own data set, or of another one with classes of the same names.

    Figures, intervals, per-class table and confusion matrix come back as a document with the keys of `summary.json`, and
    each reading is added to the run's `evaluations.jsonl`. Images that cannot be read stop the evaluation with a DataError
    that names them; with `bad_images="skip"` they count as wrong, unless none can be read. `how` says what computes:
    device, precision, engine. `batch_size` pictures are decoded at a time; like `workers` it cannot change a figure.
    """
    bundle, folder, listener = open_bundle(run), Folder(Path(run)), listener or Silent()
    source, opened = data_for(run, data, split)
    chosen = matched(opened.split(split), opened, bundle.classes, bundle.several)
    if opened.several and bundle.loss == "softmax":
        raise UsageError(f"{run} names one class an image, {source} has several labels an image", "train with --loss sigmoid")
    how = how or How()
    if slow := warning(how.precision, pick_device(how.device)):
        listener.note(slow)
    answers = make_engine(bundle.model, bundle.preprocess, how, lambda: examples(opened, bundle.preprocess))
    started, done = time.perf_counter(), 0

    def each(images: int) -> None:
        nonlocal done
        done += images
        listener.progress("evaluate", done, len(chosen), f"{done / (time.perf_counter() - started):.0f} images/s")

    reader = Judged(chosen, bundle.preprocess, default_workers() if workers is None else workers)
    logits, bad = logits_of(answers, reader, batch_size, each)
    if bad and bad_images == "stop":
        raise refuse(bad, len(chosen))
    readable(chosen, bad)  # there must be some
    report = judge(logits, chosen.labels, bundle.classes, np.array([s not in bad for s in range(len(chosen))]))
    seconds = time.perf_counter() - started
    document = describe(bundle, report, split, source, str(run), seconds)
    if folder.config.is_file():
        with open(folder.path / READINGS, "a", encoding="utf-8") as file:
            file.write(
                json.dumps({"time": time.strftime("%Y-%m-%dT%H:%M:%S%z"), "data": source, "split": split, **report.summary()}) + "\n"
            )
    return document


def describe(bundle: Bundle, report: Report, split: str, source: str, run: str, seconds: float) -> dict[str, Any]:
    """The document of an evaluation."""
    keys = ["steps", "epochs", "seed", "exaflops", "flops_utilisation", "peak_memory_bytes", "train", "val", "test"]
    return {
        "model": name_of(bundle.model.config),
        "parameters": sum(p.numel() for p in bundle.model.parameters()),
        "data": source,
        **dict.fromkeys(keys),
        "wall_seconds": seconds,
        "images_per_second": report.images / seconds,
        split: report.summary(),
        "run": run,
        "bundle": run,
        "split": split,
        "classes": list(bundle.classes),
        "per_class": report.per_class,
        "confusion": None if report.confusion is None else report.confusion.tolist(),
    }
