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
from vitreous.tasks.export_proof import ExportComparison, compare_outputs

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import pyarrow as pa

    from vitreous.data.decoding.spectral import DecodedSample
    from vitreous.data.modalities.base import Preprocess
    from vitreous.data.split import Data, Split
    from vitreous.tasks.comparison import Comparison, ModelOutputs
    from vitreous.tasks.detection_proof import ObjectComparison
    from vitreous.tasks.export_proof import VerificationImages
    from vitreous.tasks.report import Report

#: options of `predict` that tasks may take -> the models that they are for
PREDICT_OPTIONS: dict[str, str] = {
    **dict.fromkeys(("to", "coco_ids", "tiles"), "detectors"),
    **dict.fromkeys(("top", "threshold", "abstain", "csv", "ray"), "models that name classes of images"),
    "overlay": "models that say what is where",
}


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
    column: ClassVar[str]  # the heading of `describe` in a terminal

    @property
    @abstractmethod
    def head(self) -> list[str]:
        """The columns of CSV."""

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

    def to_dict(self, prediction: Any) -> dict[str, Any]:
        """A prediction as JSON has it."""
        return {"path": prediction.path, **self.to_fields(prediction), "error": prediction.error}


@dataclass(frozen=True, eq=False)
class ScatterChart:
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


@dataclass(frozen=True)
class ExportRules:
    """What differs between the exported files of tasks.

    `outputs`: what the graph returns, in one word. `batch`: the graph takes any number of images, else one. `by_onnx`:
    OpenVINO converts the ONNX graph, not that of PyTorch. `int8_refusal`: why int8 is refused, "" where it is not.
    `fit`: how images are fitted to the model's size, where it is not as its preprocessing does.
    """

    outputs: str = "logits"
    batch: bool = True
    by_onnx: bool = False
    int8_refusal: str = ""
    fit: str = ""


class Task(ABC):
    """What a model is for. Subclasses are frozen dataclasses whose fields are what `model.json` stores.

    The second half of the methods is for tasks with `outputs`: K numbers for a whole image.
    """

    name: ClassVar[str]
    does: ClassVar[str]  # what a model does, for messages: "names classes of images"
    hub_task: ClassVar[str]  # the Hugging Face Hub's name of the task
    verb: ClassVar[str] = "predict"  # the command that answers
    endpoint: ClassVar[str] = "predict"  # the address of the server, and the method of `Predictor`, that do
    reads_images: ClassVar[bool] = True  # rather than generates them
    inspectable: ClassVar[bool] = True  # a page of the server shows attention, positions and filters
    has_head: ClassVar[bool] = True
    is_dense: ClassVar[bool] = False  # a model is a backbone with a head that wraps it, and predicts what is where
    predict_options: ClassVar[frozenset[str]] = frozenset(("top", "threshold", "abstain", "csv", "ray"))
    export_rules: ClassVar[ExportRules] = ExportRules()
    export_tolerance: ClassVar[float] = 0.0  # the share of predictions of an export in float32 that may differ
    leading: ClassVar[str] = "top1"  # the key of `leading_metric`, where settings do not choose it
    evaluate_options: ClassVar[frozenset[str]] = frozenset()  # of `evaluate`, that are for this task and not for all
    protocol: ClassVar[str] = "top1"  # what a reading of this task is called in evaluations.jsonl
    output_noun: ClassVar[str] = "classes"  # what `outputs` are

    classes: tuple[str, ...]  # none where a task has none
    masks: bool = False  # whether objects have masks beside their boxes
    autoencoder: str = ""  # that decodes the latents which a model makes

    @abstractmethod
    def settings(self) -> dict[str, Any]:
        """The fields as JSON has them; `classes` is always among them, empty where a task has none."""

    @classmethod
    @abstractmethod
    def from_settings(cls, description: dict[str, Any], classes: tuple[str, ...], origin: str) -> Self:
        """The task that `settings` wrote. Raises WeightsError, naming `origin`, for values that cannot be."""

    @classmethod
    def from_run(cls, settings: dict[str, Any], classes: tuple[str, ...], origin: str) -> Self:
        """The task of a run that has not finished, from the settings of its objective and its `targets`. Raises
        WeightsError as `from_settings`."""
        return cls.from_settings(settings, classes, origin)

    @classmethod
    def example_command(cls, run: str, clips: bool) -> str:
        """The command that puts a trained `run` to use; `clips`: of clips rather than images."""
        return f"vitreous {cls.verb} {run} IMAGE …"

    @property
    def outputs(self) -> tuple[str, ...]:
        """The names of the K numbers that the head gives for a whole image; none for a model without a head and for
        one whose outputs have places in the image."""
        return ()

    @property
    def leading_metric(self) -> str:
        """The key of the metric that evaluations are compared by."""
        return self.leading

    @property
    def example_notes(self) -> dict[str, str]:
        """How a page describes each kind of `choose_examples`."""
        return {}

    @property
    def label_columns(self) -> tuple[str, ...]:
        """The columns of a table whose values are the labels; none where labels are classes."""
        return ()

    @property
    def summary(self) -> str:
        """What a model does, with its counts: "names one of 37 classes"."""
        return self.does

    @property
    def missing_outputs(self) -> tuple[str, str]:
        """Why a model has no `outputs`, for messages, and what to use instead."""
        return f"{self.does}, and names no classes of images", f"use {self.endpoint}"

    @property
    def overlay_classes(self) -> tuple[str, ...]:
        """The classes that are drawn over images, each in its colour."""
        return ()

    @property
    def export_metadata(self) -> dict[str, Any]:
        """What programs that run an exported file need to interpret its outputs, beside the classes."""
        return {"answer": {"loss": "softmax", "temperature": 1.0}}

    def get_version_fields(self) -> list[Any]:
        """What predictions depend on, as JSON has it; the version of a model is a digest of it: class names, loss,
        whether an image may have several classes, temperature, and other settings."""
        return [self.classes, "softmax", False, 1.0]

    def answers_at(self, endpoint: str) -> bool:
        """Whether that method of `Predictor`, or address of the server, makes the predictions."""
        return self.endpoint == endpoint

    def require_endpoint(self, endpoint: str, problem: str) -> None:
        """Raise UsageError, with the `problem`, where another method of `Predictor` makes the predictions."""
        if not self.answers_at(endpoint):
            raise UsageError(problem, f"use {self.endpoint}")

    def with_temperature(self, temperature: float) -> Self:
        """The task with a temperature that logits are divided by; itself where it has none."""
        return self

    def check_predict_options(self, source: str, values: dict[str, Any]) -> None:
        """Raise UsageError for an option of `vitreous predict`, by the name of its field, that this task does not
        take; `source` is the model as it was named."""
        for name, models in PREDICT_OPTIONS.items():
            if values[name] not in (None, False) and name not in self.predict_options:
                problem = f"--{name.replace('_', '-')} is for {models}; {source} {self.does}"
                raise UsageError(problem, "leave it out")

    def check_predict_keywords(self, model: str, options: PredictionOptions) -> None:
        """Raise UsageError for a keyword of `Predictor.predict` that this task does not take; `model` is its name."""
        if refused := [name for name in options.given if name not in self.predict_options]:
            problem = f"predict({refused[0]}=…) is for models that name classes; {model} {self.does}"
            raise UsageError(problem, "leave it out")

    def predict_images(
        self, predictor: Any, images: Any, options: PredictionOptions, bad_images: str, on_images: Callable[[int], None]
    ) -> Any:
        """The predictions of a `Predictor` for images, one for one image and a list for several; `on_images` is called
        with their number. Raises UsageError for options that the task does not have."""
        return predictor.predict_outputs(images, options, bad_images, on_images)

    def prepare_input(self, picture: DecodedSample, preprocess: Preprocess) -> np.ndarray:
        """A decoded image -> (C, *image) pixels that an exported file takes."""
        return preprocess.to_array(picture)

    def compute(self, engine: Any, pixels: np.ndarray) -> np.ndarray:
        """(B, C, *image) pixels -> (B, ...) outputs of an `Engine`."""
        return engine.logits(pixels)

    def output_shape(self, image: tuple[int, ...]) -> tuple[int | None, ...]:
        """The shape of `compute` for one image, which has the model's `image` size; None for a length that varies."""
        return (len(self.outputs),)

    def compare_export(
        self, original: Any, export: Any, images: VerificationImages, config: Any, progress: Callable[[int], None]
    ) -> ExportComparison | ObjectComparison:
        """Compare the `Engine` of a model, which has this `config`, with that of its exported file."""
        return compare_outputs(original, export, images, self, progress)

    def count_labels(self, labels: np.ndarray, cells: np.ndarray) -> np.ndarray:
        """Labels of n images, and `Report.cells` -> (K,) int64: how often each class is a label."""
        return np.bincount(labels, minlength=len(self.classes)).astype(np.int64)

    def select_headline_metrics(self, figures: dict[str, float | None]) -> dict[str, float | None]:
        """The metrics of an evaluation that are on top of its page."""
        return figures

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

    def draw_charts(self, outputs: np.ndarray, labels: np.ndarray, readable: np.ndarray) -> list[ScatterChart]:
        """(n, K) outputs, and the labels of n images -> the charts of an evaluation's page."""
        return []

    def measure_agreement(self, ours: np.ndarray, theirs: np.ndarray) -> float:
        """(n, ...) outputs of a model, and of its exported file -> the share of equal predictions."""
        raise NotImplementedError(f"{self.name} has no outputs for whole images")

    def describe_differences(self, other: Task) -> list[str]:
        """In what the outputs of two models have other meanings, a line each; their order means nothing."""
        if type(self) is not type(other):
            return [f"task: {self.name} -> {other.name}"]
        ours, theirs = set(self.outputs) - set(other.outputs), set(other.outputs) - set(self.outputs)
        first, second = (", ".join(sorted(names)[:20]) or "none" for names in (ours, theirs))
        return [f"{self.output_noun}: {first} -> {second} besides those of both"] if ours or theirs else []

    def check_comparison(self, other: Task, names: tuple[str, str]) -> str:
        """Return a note about what is compared, "" if nothing is to be said. Raises UsageError, with the `names` of
        both models, where they do not answer one question by outputs for whole images."""
        for task, name in zip((self, other), names, strict=True):
            if not task.outputs:
                problem = f"{name} {task.does}, and runs are compared by outputs for whole images"
                raise UsageError(problem, "compare their metrics: vitreous evaluate RUN")
        if type(self) is not type(other) or self.leading_metric != other.leading_metric:
            problem = f"{names[0]} {self.summary}, {names[1]} {other.summary}"
            raise UsageError(problem, "compare runs that answer the same question")
        return ""

    def compare_outputs(self, other: Task, first: ModelOutputs, second: ModelOutputs, data: Data) -> Comparison:
        """Compare the (n, K) outputs of a model of this task and of one of the `other`, whose labels are in the order
        of each one's outputs, on the same images of `data`; differences are the second's less the first's."""
        raise NotImplementedError(f"{self.name} has no outputs for whole images")

    def count_correct(self, outputs: np.ndarray, labels: np.ndarray) -> int | None:
        """(n, K) outputs -> the number of the images whose prediction is the label; None where labels are not matched
        exactly."""
        return None


def reject_classifier_options(task: Task, options: PredictionOptions) -> None:
    """Raise UsageError for options of `predict` that are for classifiers."""
    if options.given:
        problem = f"--{options.given[0]} is for models that name classes of images, and this one {task.does}"
        raise UsageError(problem, "leave it out")
