"""Input and result of every protocol of the verb `evaluate`."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from vitreous.data.holdout import draw_stratified_splits
from vitreous.data.split import Data, Split
from vitreous.errors import DataError, UsageError
from vitreous.evaluation.head_grid import CandidateHeads
from vitreous.inference.features import SplitFeatures, check_cache_space
from vitreous.inference.frozen_encoder import FrozenEncoder
from vitreous.reports.answers import EvaluationSettings, compute_split_arrays, compute_split_features
from vitreous.reports.options import ProtocolOptions
from vitreous.system.machine import pick_device
from vitreous.tasks.classification_metrics import CLASS_MEANS
from vitreous.tasks.report import Report
from vitreous.weights.bundle import Bundle

# most training images that are held out to select a penalty or a head
MAX_HELD_OUT_SHARE, MAX_HELD_OUT_IMAGES = 0.2, 20_000


@dataclass(frozen=True)
class ProtocolTask:
    """The input of a protocol: a model, the dataset with the name of the evaluated split, and the options."""

    run: str
    source: str
    data: Data
    split: str
    bundle: Bundle
    options: ProtocolOptions
    evaluation_settings: EvaluationSettings

    @cached_property
    def training_split(self) -> Split:
        """Return the images that a classifier trains on: `train`, and `val` too if `test` is evaluated and `val` was
        split from `train`.

        Raises UsageError if `train` is evaluated, DataError if there are no training images.
        """
        if self.split == "train":
            raise UsageError(f"--protocol {self.options.protocol} trains on the train split", "evaluate val or test")
        training = self.data.splits.get("train")
        if self.split == "test" and self.data.full_train_split is not None:
            training = self.data.full_train_split
        if training is None:
            hint = f"--protocol {self.options.protocol} needs a train split in addition to the evaluated one"
            raise DataError(f"{self.source} has no training images", hint)
        return training

    def require_single_label(self, reason: str, hint: str) -> None:
        """Raise UsageError for multi-label data; `reason` is appended to the message."""
        self.data.label_kind.require_single_label(f"{self.source} has several labels per image{reason}", hint)

    @property
    def evaluated_split(self) -> Split:
        """Return the evaluated images."""
        return self.data.split(self.split)

    @property
    def num_classes(self) -> int:
        """Return the number of classes."""
        return len(self.data.classes)

    @property
    def device(self) -> str:
        """Return the device of the model: cpu, cuda or mps."""
        return pick_device(self.evaluation_settings.inference_options.device)

    def features(self, name: str, split: Split) -> SplitFeatures:
        """Compute the features of a split, or read them from the cache, and log the cache file.

        Raises DataError for unreadable images, unless they are skipped.
        """
        evaluation_settings = replace(self.evaluation_settings, cache=self.options.cache)
        features = compute_split_features(self.bundle, split, f"{name} images", evaluation_settings)
        if features.file:
            state = "read from" if features.reused else "cached in"
            self.evaluation_settings.listener.note(f"features of {name} {state} {features.file}")
        return features

    def feature_arrays(self, name: str, split: Split, encoder: FrozenEncoder) -> dict[str, SplitFeatures]:
        """Compute all arrays of features of a split in one pass, or read them from the cache, and log their size.

        Raises DataError for unreadable images, unless they are skipped.
        """
        evaluation_settings = replace(self.evaluation_settings, cache=self.options.cache)
        features = compute_split_arrays(self.bundle, encoder, split, f"{name} images", evaluation_settings)
        size = f"{sum(array.features.nbytes for array in features.values()) / 2**20:,.1f} MiB"
        state = "read from" if all(array.reused for array in features.values()) else "cached in"
        folders = {os.fspath(array.file.parent) for array in features.values() if array.file}
        place = f", {state} {folders.pop()}" if folders else ", not cached"
        self.evaluation_settings.listener.note(f"features of {name}: {size} ({', '.join(features)}){place}")
        return features

    def check_feature_space(self, encoder: FrozenEncoder) -> None:
        """Raise ResourceError if the features of the training and the evaluated images do not fit on the disk."""
        image_bytes = sum(array.nbytes for array in encoder.describe_arrays(self.bundle.preprocess.image))
        num_bytes = image_bytes * (len(self.training_split) + len(self.evaluated_split))
        check_cache_space(num_bytes, self.options.cache)

    def hold_out(self, labels: np.ndarray, samples: np.ndarray) -> dict[str, np.ndarray]:
        """Split the training samples `samples` (m,) at random, by the seed, into `train` and `dev` for model selection.

        `labels` are those of all training images, (n,) or (n, K). Returns indices into `samples`; `dev` is empty if
        there are too few samples.
        """
        share, groups = min(MAX_HELD_OUT_SHARE, MAX_HELD_OUT_IMAGES / len(samples)), self.data.groups
        sample_groups = groups[samples] if groups is not None and len(groups) == len(labels) else None
        return draw_stratified_splits(labels[samples], self.options.seed, {"dev": share}, sample_groups)

    def check_classes(self) -> None:
        """Log classes without training images. Raises DataError if the training images have fewer than two classes."""
        labels = self.training_split.labels
        present = int((labels.sum(0) > 0).sum()) if labels.ndim == 2 else len(np.unique(labels))
        if present < 2 and labels.ndim == 1:
            raise DataError(f"all training images of {self.source} have one class", "use data with more classes")
        if present < self.num_classes:
            self.evaluation_settings.listener.note(
                f"{self.num_classes - present} of {self.num_classes} classes have no training image"
            )

    def pair(self) -> tuple[SplitFeatures, SplitFeatures]:
        """Return the features of the training images and of the evaluated images, and log both splits.

        Raises DataError if the training images have fewer than two classes.
        """
        self.check_classes()
        splits = " and ".join(self.describe_splits["train_data"]["splits"])
        self.evaluation_settings.listener.note(
            f"{self.options.protocol} trains on {len(self.training_split)} images of {self.source} ({splits}) "
            f"and is evaluated on {len(self.evaluated_split)} {self.split} images"
        )
        return self.features("train", self.training_split), self.features(self.split, self.evaluated_split)

    @property
    def describe_splits(self) -> dict[str, Any]:
        """Describe the images a classifier trains on (`train_data`) and the evaluated images, for the document."""
        uses_val = self.split == "test" and self.data.full_train_split is not None
        splits = [name for name in ("train", "val") if name == "train" or (uses_val and name in self.data.splits)]
        return {
            "train_data": {"data": self.source, "splits": splits, "images": len(self.training_split)},
            "evaluated": {"data": self.source, "split": self.split, "images": len(self.evaluated_split)},
        }


@dataclass(frozen=True)
class ProtocolResult:
    """The result of a protocol: the report of the headline metric, `results` of every setting, and `extra` keys of the
    document."""

    report: Report
    results: list[dict[str, Any]]
    extra: dict[str, Any]


class HeadResult(NamedTuple):
    """The result of a head: its name and chosen settings, the metric on held-out training images, the report on the
    evaluated images, the duration, and the metric of every candidate. `heads` is the trained head, if it was trained by
    gradient descent."""

    head: str
    settings: dict[str, Any]
    val: float | None
    report: Report
    seconds: float
    candidates: list[dict[str, Any]]
    heads: CandidateHeads | None = None

    def summary(self) -> dict[str, Any]:
        """Return the entry of the document's `results`."""
        entry = {"head": self.head, "settings": self.settings, "val": self.val, "seconds": self.seconds}
        return entry | {"candidates": self.candidates} | self.report.summary()


def build_mean_report(images: int, unreadable: int, top1: float | None) -> Report:
    """Return a report whose only metric is `top1`, a mean over draws or tasks, without a confidence interval."""
    names = ("top1", "top5", *CLASS_MEANS, "nll", "ece")
    return Report(
        images,
        unreadable,
        metrics={**dict.fromkeys(names), "top1": top1},
        intervals=dict.fromkeys(names),
        per_class=[],
        confusion_cells=None,
    )
