"""The verb `evaluate`: a trained model judged on a split, and the reading recorded in its run."""

from __future__ import annotations

import json
import os
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from vitreous.data.keys import permutation
from vitreous.data.layouts.imagenet import is_ilsvrc2012
from vitreous.data.loader import Judged
from vitreous.data.preprocess import Preprocess
from vitreous.data.screen import readable, refuse
from vitreous.data.sources import open_data
from vitreous.data.split import Data, Split
from vitreous.errors import DataError, UsageError
from vitreous.evaluation.classification import Report, judge
from vitreous.evaluation.engine import How, make_engine
from vitreous.evaluation.forward import CHUNK, logits_of
from vitreous.machine import default_workers, pick_device, warning
from vitreous.models.names import name_of
from vitreous.training.folder import Folder
from vitreous.training.session import Listener, Silent
from vitreous.weights.adopt import bundle_in, open_weights
from vitreous.weights.bundle import Bundle, load_bundle

READINGS = "evaluations.jsonl"


def open_bundle(run: str | os.PathLike[str]) -> Bundle:
    """The bundle of a run folder, or that the folder is, or made of foreign weights. Raises WeightsError or UsageError."""
    path = Path(run)
    if ":" not in os.fspath(run) and not path.exists():
        raise UsageError(f"no run at {path}", "`vitreous train` makes one; runs/latest is the newest")
    if (path / "config.yaml").is_file() and not (path / "model").is_dir():
        raise UsageError(f"the run in {path} did not finish", f"continue it: vitreous train --resume --out {path}")
    folder = bundle_in(path)
    bundle = load_bundle(folder) if folder else open_weights(run).bundle()
    if not bundle.classes:
        raise UsageError(f"{run} has no head: it gives features, not classes", f"train one: vitreous train DATA --init {run}")
    return bundle


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
    source, split_seed, share, group_by = os.fspath(data) if data is not None else None, 0, None, None
    if folder.config.is_file():
        trained = folder.run().data
        source, split_seed = source or trained.source, trained.split_seed
        share, group_by = (trained.hold_out, trained.group_by) if data is None else (None, None)
    if source is None:
        raise UsageError(f"{run} is a bundle without a run: there are no data to judge it on", "name a data set after it")
    opened = open_data(source, split_seed, group_by).holding_out(share, split_seed)
    if data is not None and opened.unsplit and split == "test":
        opened = everything(opened)  # a folder of classes, named for the purpose, is judged whole
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


def examples(data: Data, preprocess: Preprocess) -> Iterator[Tensor]:
    """Pictures to calibrate int8 on, in a random order that is always the same: of the training split where there is one."""
    split = data.splits.get("train") or next(iter(data.splits.values()))
    for sample in permutation(len(split), 0, 0):
        try:
            yield preprocess.pixels(preprocess.decoded(split.raw(int(sample)), split.name(int(sample))))
        except DataError:
            continue


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


def everything(data: Data) -> Data:
    """All images of data without splits of their own, as the test split."""
    return Data(data.name, data.classes, {"test": data.whole or data.split("train")}, titles=data.titles)


def places(data: Data, classes: tuple[str, ...]) -> np.ndarray:
    """Where each class of the data is among the model's, (K,) int64: by its name, or by its title where no other has the same.

    A title is also known by its first word or words (`tench` of `tench, Tinca tinca`). Heads for ImageNet mostly have numbers
    only, in the order of its synsets; those fit the 1,000 synsets and nothing else. Raises DataError for an unknown class.
    """
    if classes == tuple(map(str, range(len(classes)))) and is_ilsvrc2012(data.classes):
        return np.arange(len(classes), dtype=np.int64)
    place = {name: index for index, name in enumerate(classes)}
    titles = [data.titles.get(name, "").split(",")[0] for name in data.classes]
    short = Counter(name.split(",")[0] for name in classes)
    called = {name.split(",")[0]: index for index, name in enumerate(classes) if short[name.split(",")[0]] == 1}
    once = {title for title, times in Counter(titles).items() if title and times == 1}
    found = [place.get(name, called.get(title, -1) if title in once else -1) for name, title in zip(data.classes, titles, strict=True)]
    times = Counter(found)
    unknown = [name for name, index in zip(data.classes, found, strict=True) if index < 0 or times[index] > 1]
    if unknown:
        raise DataError(f"the model does not know the classes {', '.join(unknown[:20])}", f"it knows {', '.join(classes[:20])}")
    return np.array(found, dtype=np.int64)


def matched(split: Split, data: Data, classes: tuple[str, ...], several: bool = False) -> Split:
    """The split with labels in the model's order, by class name: (n, K) where images have several labels, or `several` says so.

    Raises DataError for a class the model does not know.
    """
    order = places(data, classes)
    labels = np.zeros((len(split), len(classes)), dtype=np.float32)
    if split.labels.ndim == 2:
        labels[:, order] = split.labels
    elif several:
        labels[np.arange(len(split)), order[split.labels]] = 1
    else:
        labels = order[split.labels]
    return split.take(np.arange(len(split)), labels)
