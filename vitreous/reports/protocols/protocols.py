"""The protocols of the verb `evaluate`: what a simple classifier can do with a model's features, and ImageNet's other
labels."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from vitreous.data.holdout import hold_out
from vitreous.data.screen import refuse
from vitreous.data.split import Data, Split
from vitreous.errors import DataError, UsageError, nearest
from vitreous.evaluation import fewshot as few
from vitreous.evaluation import knn
from vitreous.evaluation.classification import judge
from vitreous.evaluation.features import Features, features_of
from vitreous.evaluation.intervals import wilson
from vitreous.evaluation.linear import TRIES, LabelledFeatures, fit, swept
from vitreous.evaluation.report import Report
from vitreous.machine import pick_device, warning
from vitreous.reports.answers import Computing
from vitreous.reports.evaluate import describe, record
from vitreous.reports.opening import choose_split, data_for, open_bundle
from vitreous.weights.bundle import Bundle

NEIGHBOURS, HEADLINE = (10, 20, 100, 200), 20  # DINO's list; nothing is chosen by what is judged
SHOTS = 5  # the paper's "linear 5-shot"
HELD_OUT, AT_MOST = 0.2, 20_000  # share and number of training images that choose linear's penalty


@dataclass(frozen=True)
class ProtocolOptions:
    """What is judged how, in the words of the command line; `cli.protocols` says what each means."""

    protocol: str
    k: tuple[int, ...] = ()
    temperature: float = knn.TEMPERATURE
    shots: tuple[int, ...] = ()
    seeds: int = 3
    l2: float | None = None
    labels: str | None = None
    cache: bool = True
    seed: int = 0

    def __post_init__(self) -> None:
        if self.temperature <= 0 or (self.l2 is not None and self.l2 <= 0):
            raise UsageError("--temperature and --l2 are above 0")
        if min((*self.k, *self.shots, self.seeds)) < 1:
            raise UsageError("--k, --shots and --seeds are at least 1")


@dataclass(frozen=True)
class Case:
    """A model, the data it is judged on, and the terms."""

    run: str
    source: str
    data: Data
    split: str
    bundle: Bundle
    terms: ProtocolOptions
    computing: Computing

    @cached_property
    def training(self) -> Split:
        """The images that a classifier learns from: all but those judged and, where `val` is judged, all but `test`.
        Raises DataError."""
        if self.split == "train":
            raise UsageError(f"--protocol {self.terms.protocol} learns from the train split", "judge val or test")
        found = (
            self.data.whole if self.split == "test" and self.data.whole is not None else self.data.splits.get("train")
        )
        if found is None:
            raise DataError(
                f"{self.source} has no training images",
                f"--protocol {self.terms.protocol} needs a train split beside the one judged",
            )
        return found

    @property
    def judged(self) -> Split:
        """The images that are judged."""
        return self.data.split(self.split)

    @property
    def classes(self) -> int:
        """How many there are."""
        return len(self.data.classes)

    @property
    def device(self) -> str:
        """What computes."""
        return pick_device(self.computing.how.device)

    def features(self, name: str, split: Split) -> Features:
        """The features of a split that is called so. Raises DataError for unreadable images, unless they are
        skipped."""
        s, done, began = self.computing, 0, time.perf_counter()

        def each(images: int) -> None:
            nonlocal done
            done += images
            s.listener.progress(
                f"features of {name}", done, len(split), f"{done / (time.perf_counter() - began):.0f} images/s"
            )

        found = features_of(
            self.bundle.model, self.bundle.preprocess, split, s.how, s.batch_size, s.workers, self.terms.cache, each
        )
        if found.bad and s.bad_images == "stop":
            raise refuse({sample: DataError(why) for sample, why in found.bad.items()}, len(split))
        if not found.good.any():
            raise DataError(
                f"none of {len(split)} images of {name} can be read; the first: {next(iter(found.bad.values()))}"
            )
        if found.file:
            s.listener.note(f"features of {name} {'found' if found.reused else 'kept'} in {found.file}")
        return found

    def pair(self) -> tuple[Features, Features]:
        """The features of the training images, and of those judged; says which they are.

        Raises DataError where training has less than two classes.
        """
        labels = self.training.labels
        there = int((labels.sum(0) > 0).sum()) if labels.ndim == 2 else len(np.unique(labels))
        if there < 2 and labels.ndim == 1:
            raise DataError(f"all training images of {self.source} are of one class", "a classifier needs two")
        if there < self.classes:
            self.computing.listener.note(f"{self.classes - there} of {self.classes} classes have no training image")
        parts = self.parts
        bank = (
            f"learns from {parts['bank']['images']} images of {self.source} ({' and '.join(parts['bank']['splits'])})"
        )
        self.computing.listener.note(
            f"{self.terms.protocol} {bank}, is judged on {len(self.judged)} others of it ({self.split})"
        )
        return self.features("train", self.training), self.features(self.split, self.judged)

    @property
    def parts(self) -> dict[str, Any]:
        """Which images a classifier learns from (`bank`), and which are judged, as the document has them."""
        whole = self.split == "test" and self.data.whole is not None
        splits = [name for name in ("train", "val") if name == "train" or (whole and name in self.data.splits)]
        return {
            "bank": {"data": self.source, "splits": splits, "images": len(self.training)},
            "judged": {"data": self.source, "split": self.split, "images": len(self.judged)},
        }


@dataclass(frozen=True)
class Found:
    """What a protocol found: a report of its headline, every figure, and further keys of the document."""

    report: Report
    figures: list[dict[str, Any]]
    further: dict[str, Any]


def judge_by(
    protocol: str | ProtocolOptions,
    run: str | os.PathLike[str],
    data: str | os.PathLike[str] | None,
    split: str | None,
    computing: Computing,
) -> dict[str, Any]:
    """Judge a model by a protocol; the document has the keys of `evaluate`'s, `protocol`, and `figures`, one object for
    each setting.

    Raises UsageError for an unknown protocol, DataError for data that it cannot be carried out on.
    """
    terms = ProtocolOptions(protocol) if isinstance(protocol, str) else protocol
    if terms.protocol not in (known := (*JUDGES, "vtab", "real", "objectnet")):
        raise UsageError(
            f"no protocol {terms.protocol}", nearest(terms.protocol, known) or f"there are top1, {', '.join(known)}"
        )
    if slow := warning(computing.how.precision, pick_device(computing.how.device)):
        computing.listener.note(slow)
    began, note = time.perf_counter(), computing.listener.note
    bundle = open_bundle(run, terms.protocol in (*JUDGES, "vtab"), note)
    if terms.protocol == "vtab":
        from vitreous.reports.protocols.vtab import vtab

        return vtab(os.fspath(run), data, bundle, terms, computing)
    if terms.protocol in JUDGES:
        source, opened = data_for(run, data, "train")
        case = Case(os.fspath(run), source, opened, choose_split(opened, split, note), bundle, terms, computing)
        found = JUDGES[terms.protocol](case)
    else:
        from vitreous.reports.protocols.sets import SETS

        source, opened = data_for(run, data, split)
        case = Case(os.fspath(run), source, opened, choose_split(opened, split, note), bundle, terms, computing)
        found = SETS[terms.protocol](case)
    return written(case, found, time.perf_counter() - began)


def written(case: Case, found: Found, seconds: float) -> dict[str, Any]:
    """The document of a protocol, added to the run's readings."""
    task = replace(case.bundle.classification, classes=case.data.classes, multilabel=case.data.multilabel)
    own = replace(case.bundle, task=task)
    document = describe(own, found.report, case.split, case.source, case.run, seconds)
    parts = case.parts if case.terms.protocol in JUDGES else {}
    told = {"protocol": case.terms.protocol, **parts, **found.further, "figures": found.figures}
    settings = {name: value for name, value in found.further.items() if not isinstance(value, dict)}
    record(case.run, case.source, case.split, {"protocol": case.terms.protocol, **settings, **found.report.summary()})
    return document | told


def used(train: Features, judged: Features, split: str) -> dict[str, Any]:
    """What a document says of features."""
    return {
        name: {
            "images": len(one.rows),
            "width": one.rows.shape[1],
            "file": one.file and os.fspath(one.file),
            "reused": one.reused,
        }
        for name, one in (("train", train), (split, judged))
    }


def by_neighbours(case: Case) -> Found:
    """kNN: weighted votes of the nearest training images, for several k. The headline is k = 20, or the first k asked
    for without it."""
    train, judged = case.pair()
    rows = np.flatnonzero(train.good)
    if case.terms.k and max(case.terms.k) > len(rows):
        raise UsageError(
            f"--k {max(case.terms.k)} neighbours of {len(rows)} training images", f"use at most --k {len(rows)}"
        )
    ks = sorted(set(case.terms.k)) or [k for k in NEIGHBOURS if k <= len(rows)] or [len(rows)]
    memory = train.rows if train.good.all() else train.rows[rows]
    labels, several = case.training.labels[rows], case.data.multilabel
    cosines, near = knn.neighbours(memory, judged.rows, max(ks), case.device)
    head = HEADLINE if HEADLINE in ks else ks[0]
    figures, headline = [], None
    for k in ks:
        shares = knn.votes(cosines[:, :k], near[:, :k], labels, case.classes, case.terms.temperature)
        report = judge(knn.logits_of(shares, several), case.judged.labels, case.data.classes, judged.good)
        report.figures["nll"] = report.intervals["nll"] = None  # a class without a vote has no finite one
        figures.append({"k": k, **report.summary()})
        headline = report if k == head else headline
    assert headline is not None
    further = {"k": head, "temperature": case.terms.temperature, "features": used(train, judged, case.split)}
    return Found(headline, figures, further)


def by_regression(case: Case) -> Found:
    """Logistic regression; its penalty from --l2, or from a sweep on training images held out, and then all of them are
    used."""
    train, judged = case.pair()
    known = LabelledFeatures(train.rows, case.training.labels, np.flatnonzero(train.good), case.classes, case.device)
    l2, dev = (case.terms.l2, None) if case.terms.l2 else chosen_penalty(case, known)
    report = judge(fit(known, l2).logits(judged.rows), case.judged.labels, case.data.classes, judged.good)
    figures = [{"l2": l2, "dev": dev, **report.summary()}]
    return Found(report, figures, {"l2": l2, "dev": dev, "features": used(train, judged, case.split)})


def chosen_penalty(case: Case, known: LabelledFeatures) -> tuple[float, dict[str, Any]]:
    """The penalty of a sweep on a share of the training images, drawn by the seed; and what it scored there."""
    labels, groups = known.labels[known.rows], case.data.groups
    share = min(HELD_OUT, AT_MOST / len(labels))
    apart = groups[known.rows] if groups is not None and len(groups) == len(known.labels) else None
    parts = hold_out(labels, case.terms.seed, {"dev": share}, apart)
    if not len(parts["dev"]):
        raise DataError("too few training images to choose a penalty on some of them", "say it: --l2 0.01")
    return sweep(case, known.taking(known.rows[parts["train"]]), known.taking(known.rows[parts["dev"]]))


def sweep(
    case: Case, train: LabelledFeatures, dev: LabelledFeatures, label: str = "penalty"
) -> tuple[float, dict[str, Any]]:
    """The best penalty for images held out, and what a document says of it."""
    tried: list[dict[str, float]] = []
    name = "map" if train.several else "top1"

    def each(l2: float, score: float) -> None:
        tried.append({"l2": l2, name: score})
        case.computing.listener.progress(label, len(tried), TRIES, f"l2 {l2:.2g}: {score:.1%} held out")

    l2, score = swept(train, dev, each)
    return l2, {name: score, "images": len(dev.rows), "tried": tried}


def by_few(case: Case) -> Found:
    """The paper's few-shot regression: each number of shots for several draws of the training images."""
    if case.data.multilabel:
        raise UsageError(f"{case.source} has several labels an image: few-shot has one", "use --protocol linear or knn")
    train, judged = case.pair()
    rows = np.flatnonzero(train.good)
    labels, wanted = case.training.labels[rows], case.judged.labels
    counts = np.bincount(labels, minlength=case.classes)
    shots = sorted(set(case.terms.shots)) or [shots for shots in few.SHOTS if shots <= counts.max()]
    if lacking := int((counts < max(shots)).sum()):
        case.computing.listener.note(
            f"{lacking} of {case.classes} classes have less than {max(shots)} training images: all of theirs are used"
        )
    l2, total = case.terms.l2 or few.L2, case.terms.seeds
    hits: dict[int, list[int]] = {shot: [] for shot in shots}
    for seed in range(case.terms.seed, case.terms.seed + total):
        order = few.draws(labels, case.classes, seed)
        for shot in shots:
            drawn = np.concatenate([of_class[:shot] for of_class in order])
            found = few.ridge(train.rows[rows[drawn]], labels[drawn], case.classes, l2)
            hits[shot].append(int(((found.scores(judged.rows).argmax(1) == wanted) & judged.good).sum()))
            case.computing.listener.progress(
                "few-shot", sum(map(len, hits.values())), total * len(shots), f"{shot} a class"
            )
    figures = [of_draws(shot, hits[shot], len(wanted), case.terms.seed, int((counts < shot).sum())) for shot in shots]
    head = next((row for row in figures if row["shots"] == SHOTS), figures[-1])
    report = bare(len(wanted), int((~judged.good).sum()), head["top1"])
    return Found(report, figures, {"shots": head["shots"], "l2": l2, "features": used(train, judged, case.split)})


def bare(images: int, unreadable: int, top1: float | None) -> Report:
    """A report of a mean: it has no interval of its own."""
    names = ("top1", "top5", "macro_f1", "nll", "ece")
    return Report(images, unreadable, {**dict.fromkeys(names), "top1": top1}, dict.fromkeys(names), [], None)


def of_draws(shots: int, hits: list[int], images: int, seed: int, short: int) -> dict[str, Any]:
    """The figures of a number of shots: mean and (sample) standard deviation over draws, and each draw with its
    interval."""
    top1 = [hit / images for hit in hits]
    return {
        "shots": shots,
        "top1": float(np.mean(top1)),
        "std": float(np.std(top1, ddof=1)) if len(top1) > 1 else None,
        "per_seed": [
            {"seed": seed + n, "top1": value, "interval": list(wilson(hits[n], images))} for n, value in enumerate(top1)
        ],
        "classes_with_fewer": short,
    }


JUDGES = {"knn": by_neighbours, "linear": by_regression, "fewshot": by_few}
