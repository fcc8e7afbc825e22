"""The contract of a task: what a model is for, and everything that differs between tasks.

A task is a frozen dataclass in a file of its own and one row of `tasks.table`. `predict`, `serve`, `export`, `evaluate`
and the pages call its methods; they do not test which task it is. Nothing here imports PyTorch.

In shapes, n is images and K the numbers that a head gives for an image (`Task.outputs`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Self

import numpy as np

from vitreous.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Sequence

    import pyarrow as pa

    from vitreous.data.split import Data, Split
    from vitreous.tasks.report import Report


@dataclass(frozen=True)
class PredictionOptions:
    """Options of `predict` that tasks may take: at most `top` classes, of a probability above `threshold`; unsure where
    the highest is below `abstain`. None: unset; then a prediction of one class has the `usual` number of classes."""

    top: int | None = None
    threshold: float | None = None
    abstain: float | None = None
    usual: int = 5

    @property
    def given(self) -> list[str]:
        """The names of the options that are set."""
        return [name for name in ("top", "threshold", "abstain") if getattr(self, name) is not None]


class PredictionFormat(ABC):
    """How the outputs for an image become a prediction: as a Python object, in JSON, CSV, Parquet and a terminal.

    A prediction is a frozen object with at least `path` and `error`; `error` says why there is none.
    """

    formats: tuple[str, ...] = (".jsonl", ".csv", ".parquet")
    part = 4096  # predictions in memory at a time where a format writes many at once
    column: str  # the heading of `describe` in a terminal
    head: list[str]  # the columns of CSV

    @property
    def settings(self) -> dict[str, Any]:
        """The settings that a file of predictions depends on."""
        return {}

    @abstractmethod
    def predict(self, row: np.ndarray, path: str) -> Any:
        """The prediction for an image from its (K,) float64 values, as `Task.activate` returns them."""

    @abstractmethod
    def fail(self, path: str, error: str) -> Any:
        """The prediction for an image that cannot be read."""

    @abstractmethod
    def to_fields(self, prediction: Any) -> dict[str, Any]:
        """What JSON has beside the image's name and the error."""

    @abstractmethod
    def describe(self, prediction: Any) -> str:
        """A cell of a terminal's table."""

    @abstractmethod
    def cells(self, prediction: Any) -> list[list[str]]:
        """Rows of CSV, at least one."""

    @abstractmethod
    def table(self, predictions: Sequence[Any]) -> pa.Table:
        """A table of Arrow, a row for each prediction."""

    def starts_image(self, cells: Sequence[str]) -> bool:
        """Whether a row of CSV is the first one of its image."""
        return True

    def plain(self, prediction: Any) -> dict[str, Any]:
        """A prediction as JSON has it."""
        return {"path": prediction.path, **self.to_fields(prediction), "error": prediction.error}


@dataclass(frozen=True, eq=False)
class Scatter:
    """A chart of points: `x` and `y`, (m,) float64 each. `diagonal`: with the line y = x; `level`: with the line
    y = 0."""

    title: str
    x_label: str
    y_label: str
    x: np.ndarray
    y: np.ndarray
    diagonal: bool = False
    level: bool = False


@dataclass(frozen=True)
class Example:
    """An image that a page shows: its position in the split, its label and its prediction as text, and the probability
    of the prediction, if it has one."""

    sample: int
    label: str
    prediction: str
    probability: float | None = None


class Task(ABC):
    """What a model is for. Subclasses are frozen dataclasses whose fields are what `model.json` stores.

    The second half of the methods is for tasks with `outputs`: K numbers for a whole image.
    """

    name: ClassVar[str]
    does: ClassVar[str]  # what a model does, for messages: "names classes of images"
    hub_task: ClassVar[str]  # the Hugging Face Hub's name of the task
    leading: str = "top1"  # the key of the metric that evaluations are compared by
    evaluate_options: ClassVar[frozenset[str]] = frozenset()  # of `evaluate`, that are for this task and not for all
    example_notes: ClassVar[dict[str, str]] = {}  # how a page describes each kind of `choose_examples`
    protocol: ClassVar[str] = "top1"  # what a reading of this task is called in evaluations.jsonl

    @abstractmethod
    def settings(self) -> dict[str, Any]:
        """The fields as JSON has them; `classes` is always among them, empty where a task has none."""

    @classmethod
    @abstractmethod
    def from_settings(cls, description: dict[str, Any], classes: tuple[str, ...], origin: str) -> Self:
        """The task that `settings` wrote. Raises WeightsError, naming `origin`, for values that cannot be."""

    @property
    def outputs(self) -> tuple[str, ...]:
        """The names of the K numbers that the head gives for a whole image; none for a model without a head and for
        one whose outputs have places in the image."""
        return ()

    @property
    def label_columns(self) -> tuple[str, ...]:
        """The columns of a table whose values are the labels; none where labels are classes."""
        return ()

    @property
    def summary(self) -> str:
        """What a model does, with its counts: "names one of 37 classes"."""
        return self.does

    @property
    def export_metadata(self) -> dict[str, Any]:
        """What programs that run an exported file need to interpret its outputs, beside the classes."""
        return {}

    def activate(self, outputs: np.ndarray) -> np.ndarray:
        """(n, K) outputs of the head -> (n, K) float64 of what they mean: probabilities, or values in their units."""
        raise NotImplementedError(f"{self.name} has no outputs for whole images")

    def prediction_format(self, options: PredictionOptions) -> PredictionFormat:
        """How outputs become predictions. Raises UsageError for options that the task does not have."""
        raise NotImplementedError(f"{self.name} has no outputs for whole images")

    def evaluate(self, outputs: np.ndarray, labels: np.ndarray, readable: np.ndarray) -> Report:
        """(n, K) outputs of the head, labels of n images, (n,) bool whether each could be read -> metrics. Raises
        NonFiniteError for outputs that are not finite."""
        raise NotImplementedError(f"{self.name} has no outputs for whole images")

    def align_labels(self, split: Split, data: Data) -> Split:
        """The split of a data set with its labels in the order of `outputs`. Raises DataError for labels that the
        model does not know, or of another kind."""
        raise NotImplementedError(f"{self.name} has no outputs for whole images")

    def choose_examples(
        self, outputs: np.ndarray, split: Split, readable: np.ndarray, count: int
    ) -> dict[str, list[Example]]:
        """(n, K) outputs -> images for an evaluation's page, `count` of a kind at most: `worst`, those that the model
        is most wrong about, and `unsure`, those that it is least certain about. `example_notes` describes each kind."""
        raise NotImplementedError(f"{self.name} has no outputs for whole images")

    def draw_charts(self, outputs: np.ndarray, labels: np.ndarray, readable: np.ndarray) -> list[Scatter]:
        """(n, K) outputs, and the labels of n images -> the charts of an evaluation's page."""
        return []

    def measure_agreement(self, ours: np.ndarray, theirs: np.ndarray) -> float:
        """The share of equal predictions in two arrays of (n, K) outputs: of a model, and of its exported file."""
        raise NotImplementedError(f"{self.name} has no outputs for whole images")

    def count_hits(self, outputs: np.ndarray, labels: np.ndarray) -> int | None:
        """(n, K) outputs -> the number of the images whose prediction is the label; None where labels are not matched
        exactly."""
        return None


def refuse_options(task: Task, options: PredictionOptions) -> None:
    """Raise UsageError for options of `predict` that are for classifiers."""
    if options.given:
        problem = f"--{options.given[0]} is for models that name classes of images, and this one {task.does}"
        raise UsageError(problem, "leave it out")
