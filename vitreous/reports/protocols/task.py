"""What every protocol of the verb `evaluate` is given, and what it returns."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from vitreous.data.holdout import draw_stratified_splits
from vitreous.data.split import Data, Split
from vitreous.errors import DataError, UsageError
from vitreous.inference.features import SplitFeatures
from vitreous.reports.answers import EvaluationSettings, compute_split_features
from vitreous.reports.options import ProtocolOptions
from vitreous.system.machine import pick_device
from vitreous.tasks.classification_metrics import CLASS_MEANS
from vitreous.tasks.report import Report
from vitreous.weights.bundle import Bundle

MAX_HELD_OUT_SHARE, MAX_HELD_OUT_IMAGES = (
    0.2,
    20_000,
)  # share and number of training images that choose a penalty, or a head


@dataclass(frozen=True)
class ProtocolTask:
    """A model, the data that it is judged on, and the options."""

    run: str
    source: str
    data: Data
    split: str
    bundle: Bundle
    options: ProtocolOptions
    computing: EvaluationSettings

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

    def require_single_label(self, reason: str, hint: str) -> None:
        """Raise UsageError, with a `reason` behind the problem, for several labels an image."""
        self.data.label_kind.require_single_label(f"{self.source} has several labels an image{reason}", hint)

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

    def features(self, name: str, split: Split) -> SplitFeatures:
        """Return the features of a split. Raises DataError for unreadable images, unless they are skipped."""
        computing = replace(self.computing, cache=self.options.cache)
        features = compute_split_features(self.bundle, split, f"{name} images", computing)
        if features.file:
            state = "found" if features.reused else "kept"
            self.computing.listener.note(f"features of {name} {state} in {features.file}")
        return features

    def hold_out(self, labels: np.ndarray, rows: np.ndarray) -> dict[str, np.ndarray]:
        """Draw a seeded share of `rows` (m,) of the training images, which have (n,) or (n, K) labels, for choices.

        Returns positions among the rows: `train`, and `dev`, which is empty where there are too few.
        """
        share, groups = min(MAX_HELD_OUT_SHARE, MAX_HELD_OUT_IMAGES / len(rows)), self.data.groups
        apart = groups[rows] if groups is not None and len(groups) == len(labels) else None
        return draw_stratified_splits(labels[rows], self.options.seed, {"dev": share}, apart)

    def check_classes(self) -> None:
        """Note classes without training images. Raises DataError where training images have less than two classes."""
        labels = self.training.labels
        present = int((labels.sum(0) > 0).sum()) if labels.ndim == 2 else len(np.unique(labels))
        if present < 2 and labels.ndim == 1:
            raise DataError(f"all training images of {self.source} are of one class", "a classifier needs two")
        if present < self.classes:
            self.computing.listener.note(f"{self.classes - present} of {self.classes} classes have no training image")

    def pair(self) -> tuple[SplitFeatures, SplitFeatures]:
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


def build_mean_report(images: int, unreadable: int, top1: float | None) -> Report:
    """Return a report of a mean, which has no interval of its own."""
    names = ("top1", "top5", *CLASS_MEANS, "nll", "ece")
    return Report(
        images,
        unreadable,
        figures={**dict.fromkeys(names), "top1": top1},
        intervals=dict.fromkeys(names),
        per_class=[],
        cells=None,
    )
