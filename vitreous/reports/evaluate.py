"""The verb `evaluate`: a trained model judged on a split, and the reading recorded in its run."""

from __future__ import annotations

import json
import os
import re
import shlex
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from vitreous.config import apply_options
from vitreous.errors import UsageError, VitreousError
from vitreous.evaluation.calibration import check_abstain, judge_abstention
from vitreous.evaluation.classification import Report, judge, most_confused
from vitreous.evaluation.engine import CHUNK, InferenceOptions
from vitreous.models.names import name_of
from vitreous.progress import Listener, NullListener
from vitreous.reports.answers import Answered, Computing, answered
from vitreous.reports.calibrate import calibrate, effect
from vitreous.reports.familiarity import outliers, suspected
from vitreous.reports.pages import report as pages
from vitreous.reports.seen import seen, told
from vitreous.training.folder import Folder
from vitreous.weights.bundle import Bundle
from vitreous.weights.options import words_of

if TYPE_CHECKING:
    from vitreous.reports.protocols.protocols import ProtocolOptions

READINGS = "evaluations.jsonl"
# of `evaluate`, beside the fields of its options
KNOWN = ("data", "split", "batch_size", "workers", "bad_images", "protocol", "listener")


@dataclass(frozen=True)
class EvaluateOptions:
    """What else is asked of an evaluation.

    `calibrate` fits a temperature first and stores it in the bundle. `abstain`: what is gained by not answering below
    this highest probability, in (0, 1]. `outliers` and `suspects` are CSV files to write: how unlike the training
    images each image is, and whose label is probably wrong. `against`: other data that are to be told from the judged
    images. `cache` keeps features for the next time. `report`: where the page goes, by default RUN/report.html, with
    the names of other data and of another split than `test` in it.
    """

    calibrate: bool = False
    abstain: float | None = None
    outliers: str | None = None
    against: str | None = None
    suspects: str | None = None
    cache: bool = True
    report: str | None = None


def evaluate(
    run: str | os.PathLike[str],
    data: str | os.PathLike[str] | None = None,
    split: str | None = None,
    batch_size: int = CHUNK,
    workers: int | None = None,
    how: InferenceOptions | None = None,
    bad_images: str = "stop",
    listener: Listener | None = None,
    protocol: str | ProtocolOptions = "top1",
    further: EvaluateOptions | None = None,
    **options: Any,
) -> dict[str, Any]:
    """Judge a run's model on a split of its own data set, or of another one with classes of the same names; by default
    on test, or on val where there is no test split, which is then noted and is the document's `split`.

    Figures, intervals, per-class table, confusion matrix and most confused classes come back as a document with the
    keys of `summary.json`, and each reading is added to the run's `evaluations.jsonl`. Images that cannot be read stop
    the evaluation with a DataError that names them; with `bad_images="skip"` they count as wrong, unless none can be
    read. `batch_size` pictures are decoded at a time; like `workers` it cannot change a figure. `protocol`: another way
    to judge, by its name.

    `options` are what the command line has: `device`, `precision`, `engine`, `merge_tokens` (the fields of
    `InferenceOptions`), and `calibrate`, `abstain`, `outliers` … (those of `EvaluateOptions`; with another `protocol`,
    those of its `ProtocolOptions`). `how`, `further` and a `ProtocolOptions` as the `protocol` say the same. A page
    with all of it, `report.html`, is written too. Raises UsageError for an unknown option.
    """
    if protocol != "top1":
        computing = Computing(batch_size, workers, how or InferenceOptions(), bad_images, listener or NullListener())
        return evaluate_protocol(protocol, run, data, split, computing, options)
    how, asked = apply_options(
        "evaluate", options, how or InferenceOptions(), further or EvaluateOptions(), known=KNOWN
    )
    computing = Computing(
        batch_size, workers, how or InferenceOptions(), bad_images, listener or NullListener(), asked.cache
    )
    check_abstain(asked.abstain)
    fitted = calibrate(run, data, computing) if asked.calibrate else {}
    found = answered(run, data, split, computing)
    labels, classes = found.split.labels, found.bundle.classes
    if asked.abstain is not None and labels.ndim == 2:
        raise UsageError(
            "--abstain is for data with one label an image", "use predict --threshold where there may be several"
        )
    report = judge(found.logits, labels, classes, found.readable)
    document = describe(found.bundle, report, found.name, found.source, str(run), time.perf_counter() - found.started)
    facts = seen(found, data)
    for line in told(facts, found):
        computing.listener.note(line)
    document |= {
        **facts,
        "confused": None
        if report.cells is None
        else most_confused(report.cells, np.bincount(labels, minlength=len(classes)), classes),
        "calibration": (fitted | (effect(found) or {})) or None,
        "abstain": None if asked.abstain is None else judge_abstention(found.confidence, found.right, asked.abstain),
        "outliers": None,
        "suspects": None,
    }
    if asked.outliers or asked.against:
        document["outliers"] = outliers(found, computing, asked.outliers, asked.against)
    if asked.suspects:
        document["suspects"] = suspected(found, computing, asked.suspects)
    record(run, found.source, found.name, report.summary())
    place = Path(asked.report) if asked.report else page_of(Path(run), data, found.name)
    written = write_page(
        place, Folder(Path(run)), found, report, computing.listener, shlex.join(command_of(run, data, found.name))
    )
    return document | {"report": os.fspath(place) if written else None}


def evaluate_protocol(
    protocol: str | ProtocolOptions,
    run: str | os.PathLike[str],
    data: str | os.PathLike[str] | None,
    split: str | None,
    computing: Computing,
    options: dict[str, Any],
) -> dict[str, Any]:
    """`evaluate` by another protocol than top-1; `options` are keywords of `InferenceOptions` and `ProtocolOptions`.
    Raises UsageError for others."""
    from vitreous.reports.protocols.protocols import ProtocolOptions, judge_by

    terms = ProtocolOptions(protocol) if isinstance(protocol, str) else protocol
    how, terms = apply_options("evaluate", options, computing.how, terms, known=KNOWN)
    document = judge_by(terms, run, data, split, replace(computing, how=how))
    if not (folder := Folder(Path(run))).config.is_file():
        return document | {"report": None}  # the page is of the run, with all that it was ever judged by
    place = folder.path / f"report-{document['protocol']}.html"
    written = write_page(place, folder, None, None, computing.listener)
    return document | {"report": os.fspath(place) if written else None}


def page_of(run: Path, data: str | os.PathLike[str] | None, split: str) -> Path:
    """Where the page of an evaluation goes: into the folder of the run, or here for weights that are not one."""
    words = ["report", *([] if run.is_dir() else [stem(run.name)]), *([] if data is None else [stem(Path(data).name)])]
    words += [] if split == "test" else [split]
    return (run if (run / "config.yaml").is_file() else Path()) / f"{'-'.join(words)}.html"


def stem(name: str) -> str:
    """A name as part of a file's."""
    return re.sub(r"[^A-Za-z0-9.]+", "-", name).strip("-.") or "data"


def command_of(run: str | os.PathLike[str], data: str | os.PathLike[str] | None, split: str) -> list[str]:
    """What repeats an evaluation."""
    words = ["vitreous", "evaluate", os.fspath(run), *([] if data is None else [os.fspath(data)])]
    return words + ["--split", split] * (split != "test") + words_of(run)


def write_page(
    path: Path, folder: Folder, found: Answered | None, report: Report | None, listener: Listener, command: str = ""
) -> bool:
    """Write the page, or say why it could not be written: no figure is lost for it. Returns whether it was."""
    try:
        pages.write_report(path, folder, found, report, command or None)
    except (OSError, VitreousError) as error:
        listener.note(f"no page at {path}: {error}")
        return False
    return True


def record(run: str | os.PathLike[str], source: str, split: str, found: dict[str, Any]) -> None:
    """Add a reading of a split to a run's `evaluations.jsonl`; other weights have no such file."""
    folder = Folder(Path(run))
    if folder.config.is_file():
        with open(folder.path / READINGS, "a", encoding="utf-8") as file:
            file.write(
                json.dumps({"time": time.strftime("%Y-%m-%dT%H:%M:%S%z"), "data": source, "split": split, **found})
                + "\n"
            )


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
