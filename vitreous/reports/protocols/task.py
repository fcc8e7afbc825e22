"""What every protocol of the verb `evaluate` is given, and what it returns."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from vitreous.data.holdout import hold_out
from vitreous.data.split import Data, Split
from vitreous.errors import DataError, UsageError, nearest
from vitreous.evaluation import knn
from vitreous.evaluation.report import Report
from vitreous.inference.features import Features
from vitreous.reports.answers import Computing, split_features
from vitreous.system.machine import pick_device
from vitreous.weights.bundle import Bundle

#: how `linear` fits its head: at the optimum, or by the steps of a publication
PROBES_OF_LINEAR = ("regression", "mae", "dino", "dinov2")
HELD_OUT, AT_MOST = 0.2, 20_000  # share and number of training images that choose a penalty, or a head


@dataclass(frozen=True)
class ProtocolOptions:
    """How to judge: the options of the command line, which `cli.evaluate` documents."""

    protocol: str
    k: tuple[int, ...] = ()
    temperature: float = knn.TEMPERATURE
    shots: tuple[int, ...] = ()
    seeds: int = 3
    l2: float | None = None
    labels: str | None = None
    cache: bool = True
    seed: int = 0
    probe: str = "regression"
    epochs: float | None = None
    steps: int | None = None
    probe_batch: int | None = None
    probe_augment: bool = True

    def __post_init__(self) -> None:
        self.check_probe()
        if self.temperature <= 0 or (self.l2 is not None and self.l2 <= 0):
            raise UsageError("--temperature and --l2 are above 0")
        if min((*self.k, *self.shots, self.seeds)) < 1:
            raise UsageError("--k, --shots and --seeds are at least 1")

    def check_probe(self) -> None:
        """Raise UsageError for an unknown probe, and for options that do not go with the one asked for."""
        if self.probe not in PROBES_OF_LINEAR:
            hint = nearest(self.probe, PROBES_OF_LINEAR) or f"there are {', '.join(PROBES_OF_LINEAR)}"
            raise UsageError(f"no probe {self.probe}", hint)
        named = [name for name in ("epochs", "steps", "probe_batch") if getattr(self, name) is not None]
        if self.probe == "regression":
            named += [] if self.probe_augment else ["no_probe_augment"]
            if named:
                problem = f"--{named[0].replace('_', '-')} is about heads that are trained by steps"
                raise UsageError(problem, "add --probe mae, dino or dinov2, or leave it out")
            return
        if self.protocol != "linear":
            raise UsageError(f"--probe {self.probe} is about --protocol linear, not {self.protocol}", "add it")
        if self.l2 is not None:
            raise UsageError(f"--probe {self.probe} has no penalty", "leave --l2 out, or --probe")
        if self.epochs is not None and self.steps is not None:
            raise UsageError("--epochs and --steps say the same thing", "use one of them")
        if (self.epochs is not None and self.epochs <= 0) or (self.steps is not None and self.steps < 1):
            raise UsageError("--epochs is above 0, --steps at least 1")
        if self.probe_batch is not None and self.probe_batch < 2:
            raise UsageError(f"--probe-batch is at least 2, not {self.probe_batch}")


@dataclass(frozen=True)
class ProtocolTask:
    """A model, the data that it is judged on, and the options."""

    run: str
    source: str
    data: Data
    split: str
    bundle: Bundle
    options: ProtocolOptions
    computing: Computing

    @cached_property
    def training(self) -> Split:
        """The images to learn from: all but those judged and, where `val` is judged, all but `test`.

        Raises UsageError where `train` is judged, DataError where there are none.
        """
        if self.split == "train":
            raise UsageError(f"--protocol {self.options.protocol} learns from the train split", "judge val or test")
        training = self.data.splits.get("train")
        if self.split == "test" and self.data.whole is not None:
            training = self.data.whole
        if training is None:
            hint = f"--protocol {self.options.protocol} needs a train split beside the one judged"
            raise DataError(f"{self.source} has no training images", hint)
        return training

    @property
    def judged(self) -> Split:
        """The images that are judged."""
        return self.data.split(self.split)

    @property
    def classes(self) -> int:
        """The number of classes."""
        return len(self.data.classes)

    @property
    def device(self) -> str:
        """The device that computes."""
        return pick_device(self.computing.how.device)

    def features(self, name: str, split: Split) -> Features:
        """Return the features of a split. Raises DataError for unreadable images, unless they are skipped."""
        computing = replace(self.computing, cache=self.options.cache)
        features = split_features(self.bundle, split, f"{name} images", computing)
        if features.file:
            state = "found" if features.reused else "kept"
            self.computing.listener.note(f"features of {name} {state} in {features.file}")
        return features

    def hold_out(self, labels: np.ndarray, rows: np.ndarray) -> dict[str, np.ndarray]:
        """Draw a seeded share of `rows` (m,) of the training images, which have (n,) or (n, K) labels, for choices.

        Returns positions among the rows: `train`, and `dev`, which is empty where there are too few.
        """
        share, groups = min(HELD_OUT, AT_MOST / len(rows)), self.data.groups
        apart = groups[rows] if groups is not None and len(groups) == len(labels) else None
        return hold_out(labels[rows], self.options.seed, {"dev": share}, apart)

    def check_classes(self) -> None:
        """Note classes without training images. Raises DataError where training images have less than two classes."""
        labels = self.training.labels
        present = int((labels.sum(0) > 0).sum()) if labels.ndim == 2 else len(np.unique(labels))
        if present < 2 and labels.ndim == 1:
            raise DataError(f"all training images of {self.source} are of one class", "a classifier needs two")
        if present < self.classes:
            self.computing.listener.note(f"{self.classes - present} of {self.classes} classes have no training image")

    def pair(self) -> tuple[Features, Features]:
        """Return the features of the training images and of those judged, and note which they are.

        Raises DataError where training images have less than two classes.
        """
        self.check_classes()
        splits = " and ".join(self.parts["bank"]["splits"])
        self.computing.listener.note(
            f"{self.options.protocol} learns from {len(self.training)} images of {self.source} ({splits}), "
            f"is judged on {len(self.judged)} others of it ({self.split})"
        )
        return self.features("train", self.training), self.features(self.split, self.judged)

    @property
    def parts(self) -> dict[str, Any]:
        """Which images a classifier learns from (`bank`), and which are judged, for the document."""
        whole = self.split == "test" and self.data.whole is not None
        splits = [name for name in ("train", "val") if name == "train" or (whole and name in self.data.splits)]
        return {
            "bank": {"data": self.source, "splits": splits, "images": len(self.training)},
            "judged": {"data": self.source, "split": self.split, "images": len(self.judged)},
        }


@dataclass(frozen=True)
class ProtocolResult:
    """A report of the headline, the figures of every setting, and further keys of the document."""

    report: Report
    figures: list[dict[str, Any]]
    extra: dict[str, Any]


def mean_report(images: int, unreadable: int, top1: float | None) -> Report:
    """Return a report of a mean, which has no interval of its own."""
    names = ("top1", "top5", "macro_f1", "nll", "ece")
    return Report(
        images,
        unreadable,
        figures={**dict.fromkeys(names), "top1": top1},
        intervals=dict.fromkeys(names),
        per_class=[],
        cells=None,
    )
