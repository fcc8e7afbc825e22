"""The interface of evaluators, which compute a model's outputs for each image, and metrics from the outputs of all
images.

Outputs are per image, so several processes can each compute a share and gather them before `report`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Self

import numpy as np

from vitreous.data.loader import EvalLoader
from vitreous.data.split import Split
from vitreous.errors import DataError
from vitreous.inference.engine import ModelEngine, build_readable_mask, compute_split_logits
from vitreous.system.cores import default_worker_count
from vitreous.tasks.base import Task
from vitreous.tasks.intervals import Interval
from vitreous.tasks.report import MetricDirection, Report


@dataclass(frozen=True, eq=False)
class Ragged:
    """A variable number of rows for each of n images: `table` (m, K), sorted by image, and `lengths` (n,) int64, the
    number of rows of each image."""

    table: np.ndarray
    lengths: np.ndarray

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def images(self) -> np.ndarray:
        """The image index of each row, (m,) int64."""
        return np.repeat(np.arange(len(self)), self.lengths)

    def take(self, images: np.ndarray) -> Ragged:
        """Return the rows of the images at these indices (k,), in the order of the indices."""
        image_rows = np.split(self.table, np.cumsum(self.lengths)[:-1]) if len(self) else []
        return Ragged(np.concatenate([self.table[:0], *(image_rows[index] for index in images)]), self.lengths[images])


@dataclass(frozen=True)
class SplitOutputs:
    """Outputs of a model for every image of `split`, in its order, and whether each image is `readable`, (n,) bool.
    `outputs`: (n, K) float32, or `Ragged` for evaluators with a variable number of rows per image. The row of an
    unreadable image is computed from a black image."""

    split: Split
    outputs: Any
    readable: np.ndarray


class Evaluator(ABC):
    """Evaluates a model on a split: outputs for each image, then metrics from all outputs. `name` is the key of the
    primary metric in `Report.metrics`; `better` states whether higher or lower values are better."""

    name: str
    better: MetricDirection = "higher"

    def required_splits(self, split: Split) -> tuple[Split, ...]:
        """Return the splits whose outputs `report` needs, with the evaluated split first."""
        return (split,)

    def without_labels(self) -> Evaluator | None:
        """Return a variant of this evaluator that needs no labels, which runs without a validation split use; None if
        no such variant exists."""
        return None

    def outputs(
        self, engine: ModelEngine, reader: EvalLoader, on_images: Callable[[int], None] = lambda images: None
    ) -> tuple[Any, dict[int, DataError]]:
        """Compute a model's outputs, (n, K) float32 or `Ragged`, for the images of `reader.split`, and read errors by
        image index. `on_images` is called with the number of images of every step. No images give (0, K)."""
        return compute_split_logits(engine, reader, on_images=on_images)

    def paired_intervals(self, outputs: Any, other_evaluator: Self, other_outputs: Any) -> dict[str, Interval | None]:
        """Compute the 95 % intervals of the metric differences, the other model minus this one, from the outputs of
        both for the same images."""
        raise NotImplementedError(f"the evaluator {self.name} does not compute paired intervals")

    @abstractmethod
    def report(self, outputs: SplitOutputs, *extra_outputs: SplitOutputs) -> Report:
        """Compute the metrics from the complete outputs of the `required_splits`, in that order."""

    def __call__(self, engine: ModelEngine, split: Split, workers: int | None = None) -> Report:
        """Evaluate a model on a split in this process, without a process group."""
        return self.report(
            *(compute_outputs(self, engine, needed_split, workers) for needed_split in self.required_splits(split))
        )


class TaskEvaluator(Evaluator):
    """Evaluates outputs (n, K) with the metrics of the model's task (`Task.evaluate`)."""

    def __init__(self, task: Task) -> None:
        self.task, self.name = task, task.primary_metric

    def report(self, outputs: SplitOutputs, *extra_outputs: SplitOutputs) -> Report:
        """Compute the metrics of the model's task."""
        return self.task.evaluate(outputs.outputs, outputs.split.labels, outputs.readable)


def compute_outputs(
    evaluator: Evaluator, engine: ModelEngine, split: Split, workers: int | None = None
) -> SplitOutputs:
    """Compute the evaluator's outputs for every image of a split in this process."""
    reader = EvalLoader(split, engine.preprocess, default_worker_count() if workers is None else workers)
    outputs, read_errors = evaluator.outputs(engine, reader)
    return SplitOutputs(split, outputs, build_readable_mask(len(split), read_errors))
