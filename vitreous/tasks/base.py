"""The interface of a task: the code that differs between classification, detection, generation and so on.

A task is a frozen dataclass in a separate file and one row of `tasks.table`. `predict`, `serve`, `export`, `evaluate`
and the pages call its methods; they do not test which task it is. This module does not import PyTorch.

In shapes, n is the number of images and K the number of outputs that a head computes per image (`Task.outputs`).
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

#: options of `predict` that only some tasks support -> the models that support them
PREDICT_OPTIONS: dict[str, str] = {
    **dict.fromkeys(("to", "coco_ids", "tiles"), "detectors"),
    **dict.fromkeys(("top", "threshold", "abstain", "csv", "ray"), "image classifiers"),
    "overlay": "segmentation and detection models",
}


@dataclass(frozen=True)
class PredictionOptions:
    """Prediction options of classifiers: at most `top` classes with a probability above `threshold`. A prediction is
    unsure if its highest probability is below `abstain`. None means unset; if `top` is unset, a single-label
    prediction has `default_top` classes."""

    top: int | None = None
    threshold: float | None = None
    abstain: float | None = None
    default_top: int = 5

    @property
    def list_set_options(self) -> list[str]:
        """List the names of the options that are set."""
        return [name for name in ("top", "threshold", "abstain") if getattr(self, name) is not None]


class PredictionFormat(ABC):
    """Convert the outputs for an image to a prediction: Python object, JSON, CSV, Parquet and terminal text.

    A prediction is a frozen object with at least `path` and `error`; `error` is the reason for a missing prediction.
    """

    formats: tuple[str, ...] = (".jsonl", ".csv", ".parquet")
    rows_per_chunk = 4096  # predictions in memory at a time in formats that write in batches
    column: ClassVar[str]  # heading of the column of `describe` in a terminal table

    @property
    @abstractmethod
    def csv_columns(self) -> list[str]:
        """List the columns of the CSV file."""

    @property
    def settings(self) -> dict[str, Any]:
        """Return the settings that a prediction file depends on."""
        return {}

    @abstractmethod
    def predict(self, image_outputs: np.ndarray, path: str) -> Any:
        """Return the prediction for an image from its (K,) float64 values, as `Task.activate` returns them."""

    @abstractmethod
    def format_error(self, path: str, error: str) -> Any:
        """Create the prediction for an unreadable image, which has only its path and the `error`."""

    @abstractmethod
    def to_fields(self, prediction: Any) -> dict[str, Any]:
        """Return the JSON fields of a prediction, without the image's name and the error."""

    @abstractmethod
    def describe(self, prediction: Any) -> str:
        """Return a prediction as text for one cell of a terminal table."""

    @abstractmethod
    def to_csv_rows(self, prediction: Any) -> list[list[str]]:
        """Return the CSV rows of a prediction, at least one."""

    @abstractmethod
    def to_arrow_table(self, predictions: Sequence[Any]) -> pa.Table:
        """Return an Arrow table with one row per prediction."""

    def starts_image(self, cells: Sequence[str]) -> bool:
        """Return whether a CSV row is the first row of its image."""
        return True

    def to_dict(self, prediction: Any) -> dict[str, Any]:
        """Return a prediction as a JSON-serialisable dict."""
        return {"path": prediction.path, **self.to_fields(prediction), "error": prediction.error}


@dataclass(frozen=True, eq=False)
class ScatterChart:
    """A scatter chart: `x` and `y` are (m,) float64. `diagonal` draws the line y = x, `level` the line y = 0."""

    title: str
    x_label: str
    y_label: str
    x: np.ndarray
    y: np.ndarray
    diagonal: bool = False
    level: bool = False


@dataclass(frozen=True)
class Example:
    """An image that a page shows: its index in the split, its label and its prediction as text, and the probability
    of the prediction, if it has one."""

    sample: int
    label: str
    prediction: str
    probability: float | None = None


@dataclass(frozen=True)
class ExportRules:
    """Task-specific properties of exported files.

    `outputs`: a one-word name of the graph's outputs. `batch`: the graph accepts any number of images, else exactly
    one. `by_onnx`: OpenVINO converts the ONNX graph instead of the PyTorch graph. `int8_refusal`: why int8 is not
    supported, "" if it is. `fit`: how images are resized to the model's size, if not by its preprocessing.
    """

    outputs: str = "logits"
    batch: bool = True
    by_onnx: bool = False
    int8_refusal: str = ""
    fit: str = ""


class Task(ABC):
    """The interface of a task. Subclasses are frozen dataclasses whose fields are stored in `model.json`.

    The second half of the methods is for tasks with `outputs`, K numbers per image.
    """

    name: ClassVar[str]
    verb_phrase: ClassVar[str]  # verb and object of a model, for messages: "classifies images"
    hub_task: ClassVar[str]  # the Hugging Face Hub's name of the task
    verb: ClassVar[str] = "predict"  # the CLI command that computes predictions
    endpoint: ClassVar[str] = "predict"  # the server's endpoint, and the method of `Predictor`, for predictions
    reads_images: ClassVar[bool] = True  # False: the model generates images
    inspectable: ClassVar[bool] = True  # the server's inspection page shows attention, positions and filters
    has_head: ClassVar[bool] = True
    is_dense: ClassVar[bool] = False  # a model is a backbone wrapped by a dense head: segmentation, detection
    predict_options: ClassVar[frozenset[str]] = frozenset(("top", "threshold", "abstain", "csv", "ray"))
    export_rules: ClassVar[ExportRules] = ExportRules()
    export_tolerance: ClassVar[float] = 0.0  # share of predictions that may change in a float32 export
    primary: ClassVar[str] = "top1"  # the key of `primary_metric`, unless settings choose another
    evaluate_options: ClassVar[frozenset[str]] = frozenset()  # options of `evaluate` that are specific to this task
    protocol: ClassVar[str] = "top1"  # name of this task's evaluation protocol in evaluations.jsonl
    output_noun: ClassVar[str] = "classes"  # plural noun for `outputs`

    classes: tuple[str, ...]  # empty for tasks without classes
    masks: bool = False  # whether objects have masks in addition to boxes
    autoencoder: str = ""  # decodes the latents that a generative model samples

    @abstractmethod
    def settings(self) -> dict[str, Any]:
        """Return the task's fields as JSON values, as stored in model.json; `classes` is always present, empty for
        tasks without classes."""

    @classmethod
    @abstractmethod
    def from_settings(cls, settings: dict[str, Any], classes: tuple[str, ...], origin: str) -> Self:
        """Create a task from stored `settings`. Raises WeightsError, naming `origin`, for invalid values."""

    @classmethod
    def from_run(cls, settings: dict[str, Any], classes: tuple[str, ...], origin: str) -> Self:
        """Create the task of an unfinished run from the settings of its objective and its `targets`. Raises
        WeightsError as `from_settings`."""
        return cls.from_settings(settings, classes, origin)

    @classmethod
    def example_command(cls, run: str, clips: bool) -> str:
        """Return an example command that uses a trained `run`; `clips`: its inputs are clips rather than images."""
        return f"vitreous {cls.verb} {run} IMAGE …"

    @property
    def outputs(self) -> tuple[str, ...]:
        """The names of the head's K outputs per image; empty for a model without a head or with per-pixel or
        per-object outputs."""
        return ()

    @property
    def primary_metric(self) -> str:
        """The key of the metric by which evaluations are compared."""
        return self.primary

    @property
    def example_notes(self) -> dict[str, str]:
        """Captions for the groups of `choose_examples` on an evaluation page."""
        return {}

    @property
    def label_columns(self) -> tuple[str, ...]:
        """The columns of a table that contain the labels; empty if labels are classes."""
        return ()

    @property
    def summary(self) -> str:
        """The model's task with its counts: "classifies images into 37 classes"."""
        return self.verb_phrase

    @property
    def missing_outputs(self) -> tuple[str, str]:
        """Return why a model has no `outputs`, for messages, and the alternative."""
        return f"{self.verb_phrase} and does not classify whole images", f"use {self.endpoint}"

    @property
    def overlay_classes(self) -> tuple[str, ...]:
        """The classes that are drawn over images, one colour per class."""
        return ()

    @property
    def export_metadata(self) -> dict[str, Any]:
        """The metadata that a runtime needs to interpret the outputs of an exported file, in addition to the
        classes."""
        return {"output": {"loss": "softmax", "temperature": 1.0}}

    def get_version_fields(self) -> list[Any]:
        """Return the values that predictions depend on; the version of a model is a digest of them: class names, loss,
        multilabel, temperature, and other settings."""
        return [self.classes, "softmax", False, 1.0]

    def answers_at(self, endpoint: str) -> bool:
        """Return whether `endpoint`, a method of `Predictor` and endpoint of the server, computes the predictions of
        this task."""
        return self.endpoint == endpoint

    def require_endpoint(self, endpoint: str, problem: str) -> None:
        """Raise UsageError with the message `problem` unless `endpoint` computes the predictions of this task."""
        if not self.answers_at(endpoint):
            raise UsageError(problem, f"use {self.endpoint}")

    def with_temperature(self, temperature: float) -> Self:
        """Return a copy with a new temperature, the divisor of the logits; unchanged for tasks without temperature."""
        return self

    def check_predict_options(self, source: str, values: dict[str, Any]) -> None:
        """Raise UsageError for a set option of `vitreous predict`, by field name, that this task does not support;
        `source` is the name of the model for messages."""
        for name, models in PREDICT_OPTIONS.items():
            if values[name] not in (None, False) and name not in self.predict_options:
                problem = f"--{name.replace('_', '-')} is for {models}; {source} {self.verb_phrase}"
                raise UsageError(problem, "leave it out")

    def check_predict_keywords(self, model: str, options: PredictionOptions) -> None:
        """Raise UsageError for a set keyword of `Predictor.predict` that this task does not support."""
        if refused := [name for name in options.list_set_options if name not in self.predict_options]:
            problem = f"predict({refused[0]}=…) is for image classifiers; {model} {self.verb_phrase}"
            raise UsageError(problem, "leave it out")

    def predict_images(
        self, predictor: Any, images: Any, options: PredictionOptions, bad_images: str, on_images: Callable[[int], None]
    ) -> Any:
        """Predict images with a `Predictor`: one prediction for one image, a list for several. `on_images` is called
        with the number of finished images. Raises UsageError for options that the task does not support."""
        return predictor.predict_outputs(images, options, bad_images, on_images)

    def prepare_input(self, image: DecodedSample, preprocess: Preprocess) -> np.ndarray:
        """Convert a decoded image to the (C, *image) pixels that an exported file expects."""
        return preprocess.to_array(image)

    def compute(self, engine: Any, pixels: np.ndarray) -> np.ndarray:
        """Compute the (B, ...) outputs of an `Engine` for (B, C, *image) pixels."""
        return engine.logits(pixels)

    def output_shape(self, image_size: tuple[int, ...]) -> tuple[int | None, ...]:
        """Return the shape of `compute` for one image of the model's `image_size` size; None for a variable length."""
        return (len(self.outputs),)

    def compare_export(
        self, original: Any, export: Any, images: VerificationImages, config: Any, progress: Callable[[int], None]
    ) -> ExportComparison | ObjectComparison:
        """Compare the `Engine` of a model, whose config is `config`, with that of its exported file."""
        return compare_outputs(original, export, images, self, progress)

    def count_labels(self, labels: np.ndarray, cells: np.ndarray) -> np.ndarray:
        """Count how often each class is a label: labels of n images, and `Report.cells` -> (K,) int64."""
        return np.bincount(labels, minlength=len(self.classes)).astype(np.int64)

    def select_headline_metrics(self, metrics: dict[str, float | None]) -> dict[str, float | None]:
        """Select the metrics at the top of an evaluation page."""
        return metrics

    def activate(self, outputs: np.ndarray) -> np.ndarray:
        """Convert (n, K) outputs of the head to (n, K) float64 probabilities or values in their units."""
        raise NotImplementedError(f"the task {self.name} has no image-level outputs")

    def prediction_format(self, options: PredictionOptions) -> PredictionFormat:
        """Return the format of predictions. Raises UsageError for options that the task does not support."""
        raise NotImplementedError(f"the task {self.name} has no image-level outputs")

    def evaluate(self, outputs: np.ndarray, labels: np.ndarray, readable: np.ndarray) -> Report:
        """Compute the metrics of n images: (n, K) outputs of the head, labels, and `readable` (n,) bool. Raises
        NonFiniteError for outputs that are not finite."""
        raise NotImplementedError(f"the task {self.name} has no image-level outputs")

    def align_labels(self, split: Split, data: Data) -> Split:
        """Return the split of a dataset with its labels in the order of `outputs`. Raises DataError for labels that
        are not among the model's outputs or have another type."""
        raise NotImplementedError(f"the task {self.name} has no image-level outputs")

    def choose_examples(
        self, outputs: np.ndarray, split: Split, readable: np.ndarray, count: int
    ) -> dict[str, list[Example]]:
        """Choose images for an evaluation page from (n, K) outputs, at most `count` per group: `worst` has the largest
        errors, `unsure` the lowest confidence. `example_notes` has a caption for each group."""
        raise NotImplementedError(f"the task {self.name} has no image-level outputs")

    def draw_charts(self, outputs: np.ndarray, labels: np.ndarray, readable: np.ndarray) -> list[ScatterChart]:
        """Return the charts of an evaluation page from (n, K) outputs and the labels of n images."""
        return []

    def measure_agreement(self, ours: np.ndarray, theirs: np.ndarray) -> float:
        """Return the share of equal predictions: (n, ...) outputs of a model and of its exported file."""
        raise NotImplementedError(f"the task {self.name} has no image-level outputs")

    def describe_differences(self, other_task: Task) -> list[str]:
        """List differences in the meaning of the outputs of two models, one line each; the order of outputs is
        ignored."""
        if type(self) is not type(other_task):
            return [f"task: {self.name} -> {other_task.name}"]
        only_self, only_other = set(self.outputs) - set(other_task.outputs), set(other_task.outputs) - set(self.outputs)
        self_text, other_text = (", ".join(sorted(names)[:20]) or "none" for names in (only_self, only_other))
        return (
            [f"{self.output_noun}: {self_text} -> {other_text} (shared ones are not listed)"]
            if only_self or only_other
            else []
        )

    def check_comparison(self, other_task: Task, names: tuple[str, str]) -> str:
        """Return a note about the compared outputs, "" if there is none. Raises UsageError, with the `names` of both
        models, if their tasks differ or have no outputs for whole images."""
        for task, name in zip((self, other_task), names, strict=True):
            if not task.outputs:
                problem = f"{name} {task.verb_phrase}, but runs are compared by their outputs for whole images"
                raise UsageError(problem, "compare their metrics: vitreous evaluate RUN")
        if type(self) is not type(other_task) or self.primary_metric != other_task.primary_metric:
            problem = f"{names[0]} {self.summary}, {names[1]} {other_task.summary}"
            raise UsageError(problem, "compare runs of the same task")
        return ""

    def compare_outputs(
        self, other_task: Task, outputs_a: ModelOutputs, outputs_b: ModelOutputs, data: Data
    ) -> Comparison:
        """Compare the (n, K) outputs of two models, of this task and of `other_task`, on the same images of `data`.

        The labels of each model are in the order of its outputs. Differences are second minus first."""
        raise NotImplementedError(f"{self.name} has no outputs for whole images")

    def count_correct(self, outputs: np.ndarray, labels: np.ndarray) -> int | None:
        """Count the images whose prediction equals the label, from (n, K) outputs; None for tasks without exact
        matches."""
        return None


def reject_classifier_options(task: Task, options: PredictionOptions) -> None:
    """Raise UsageError for prediction options of classifiers."""
    if options.list_set_options:
        problem = f"--{options.list_set_options[0]} is for image classifiers, and this model {task.verb_phrase}"
        raise UsageError(problem, "leave it out")
