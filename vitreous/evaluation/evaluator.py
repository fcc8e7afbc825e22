"""The contract of evaluators: outputs of a deployed model per image, and figures from all of them.

Outputs are per image, so that several processes may compute a share each and gather them before `report`.
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
    """Any number of rows for each of n images: `table` (m, K), those of the first image first, and `lengths` (n,)
    int64, how many are of each."""

    table: np.ndarray
    lengths: np.ndarray

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def images(self) -> np.ndarray:
        """(m,) int64, the image of each row."""
        return np.repeat(np.arange(len(self)), self.lengths)

    def take(self, images: np.ndarray) -> Ragged:
        """The rows of the images at these positions (k,), in this order."""
        parts = np.split(self.table, np.cumsum(self.lengths)[:-1]) if len(self) else []
        return Ragged(np.concatenate([self.table[:0], *(parts[one] for one in images)]), self.lengths[images])


@dataclass(frozen=True)
class SplitOutputs:
    """Outputs of a model for every image of `split`, in its order: `rows` (n, K) float32, or `Ragged` of an evaluator
    that needs any number of them, and `readable` (n,) bool.

    The row of an unreadable image is the output for a black one.
    """

    split: Split
    rows: Any
    readable: np.ndarray


class Evaluator(ABC):
    """Judges a deployed model on a split.

    `name` is the leading figure's key in `Report.figures`, `better` its direction.
    """

    name: str
    better: MetricDirection = "higher"

    def splits(self, split: Split) -> tuple[Split, ...]:
        """The splits whose outputs `report` takes: the judged one first."""
        return (split,)

    def without_labels(self) -> Evaluator | None:
        """What can be measured on training images where there is no validation split; None: nothing."""
        return None

    def outputs(
        self, engine: ModelEngine, reader: EvalLoader, on_images: Callable[[int], None] = lambda images: None
    ) -> tuple[Any, dict[int, DataError]]:
        """(n, K) float32 outputs, or `Ragged`, for the images of `reader.split`, and the unreadable ones by position.

        `on_images` gets the number of images of every step. No images give (0, K).
        """
        return compute_split_logits(engine, reader, on_images=on_images)

    def paired_intervals(self, rows: Any, other: Self, other_rows: Any) -> dict[str, Interval | None]:
        """95 % intervals of another model's figures less this one's, from the outputs of both for the same images."""
        raise NotImplementedError(f"{self.name} has no paired intervals")

    @abstractmethod
    def report(self, outputs: SplitOutputs, *others: SplitOutputs) -> Report:
        """The figures from the outputs of `splits`, whole and in that order."""

    def __call__(self, engine: ModelEngine, split: Split, workers: int | None = None) -> Report:
        """Judge a model on a split in this process alone."""
        return self.report(*(compute_outputs(self, engine, part, workers) for part in self.splits(split)))


class TaskEvaluator(Evaluator):
    """Evaluates outputs (n, K) as the task of the model does, by `Task.evaluate`."""

    def __init__(self, task: Task) -> None:
        self.task, self.name = task, task.leading_metric

    def report(self, outputs: SplitOutputs, *others: SplitOutputs) -> Report:
        """The metrics of the task."""
        return self.task.evaluate(outputs.rows, outputs.split.labels, outputs.readable)


def compute_outputs(
    evaluator: Evaluator, engine: ModelEngine, split: Split, workers: int | None = None
) -> SplitOutputs:
    """Return the outputs of a model for a whole split, computed by this process."""
    reader = EvalLoader(split, engine.preprocess, default_worker_count() if workers is None else workers)
    rows, bad = evaluator.outputs(engine, reader)
    return SplitOutputs(split, rows, build_readable_mask(len(split), bad))
