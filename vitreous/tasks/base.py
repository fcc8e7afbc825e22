"""The interface of a task: the code that differs between classification, detection, generation and so on.

A task is a frozen dataclass in a separate file and an entry of `tasks.table.TASKS`. `predict`, `serve`, `export`,
`evaluate` and the web pages call its methods instead of testing the type of the task. This module does not import
PyTorch.

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

#: option of `predict` that only some tasks support -> the models that support it, for messages
PREDICT_OPTIONS: dict[str, str] = {
    **dict.fromkeys(("to", "coco_ids", "tiles"), "detectors"),
    **dict.fromkeys(("top", "threshold", "abstain", "csv", "ray"), "image classifiers"),
    "overlay": "segmentation and detection models",
}


@dataclass(frozen=True)
class PredictionOptions:
    """Prediction options of classifiers. None means unset.

    A prediction has at most `top` classes, all with a probability above `threshold`. It is unsure if its highest
    probability is below `abstain`. If `top` is unset, a single-label prediction has `default_top` classes.
    """

    top: int | None = None
    threshold: float | None = None
    abstain: float | None = None
    default_top: int = 5

    @property
    def list_set_options(self) -> list[str]:
        """List the names of the options that are set."""
        return [name for name in ("top", "threshold", "abstain") if getattr(self, name) is not None]


class PredictionFormat(ABC):
    """Converts the outputs for an image to a prediction: Python object, JSON, CSV, Parquet and terminal text.

    A prediction is a frozen object with at least `path` and `error`. If there is no prediction, `error` is the reason.
    """

    formats: tuple[str, ...] = (".jsonl", ".csv", ".parquet")  # extensions of supported prediction files
    rows_per_chunk = 4096  # predictions in memory at a time, for file formats that are written in batches
    column: ClassVar[str]  # heading of the column with the text of `describe` in a terminal table

    @property
    @abstractmethod
    def csv_columns(self) -> list[str]:
        """List the columns of the CSV file."""

    @property
    def settings(self) -> dict[str, Any]:
        """Return the options on which the content of a prediction file depends."""
        return {}

    @abstractmethod
    def predict(self, image_outputs: np.ndarray, path: str) -> Any:
        """Create the prediction for an image from its (K,) float64 values, which `Task.activate` returned."""

    @abstractmethod
    def format_error(self, path: str, error: str) -> Any:
        """Create the prediction for an unreadable image, which has only its path and the `error`."""

    @abstractmethod
    def to_fields(self, prediction: Any) -> dict[str, Any]:
        """Return the JSON fields of a prediction, without its path and error."""

    @abstractmethod
    def describe(self, prediction: Any) -> str:
        """Format a prediction as text for a cell of a terminal table."""

    @abstractmethod
    def to_csv_rows(self, prediction: Any) -> list[list[str]]:
        """Return the CSV rows of a prediction, at least one."""

    @abstractmethod
    def to_arrow_table(self, predictions: Sequence[Any]) -> pa.Table:
        """Return an Arrow table with one row per prediction."""

    def starts_image(self, cells: Sequence[str]) -> bool:
        """Return whether a CSV row, as its cells, is the first row of its image."""
        return True

    def to_dict(self, prediction: Any) -> dict[str, Any]:
        """Convert a prediction to a JSON-serialisable dict with path, fields and error."""
        return {"path": prediction.path, **self.to_fields(prediction), "error": prediction.error}


@dataclass(frozen=True, eq=False)
class ScatterChart:
    """A scatter chart of m points: `x` and `y` are (m,) float64. `diagonal` adds the line y = x, `level` the line y =
    0."""

    title: str
    x_label: str
    y_label: str
    x: np.ndarray
    y: np.ndarray
    diagonal: bool = False
    level: bool = False


@dataclass(frozen=True)
class Example:
    """An image that an evaluation page shows: its index in the split, its label and prediction as text, and the
    probability of the prediction, if there is one."""

    sample: int
    label: str
    prediction: str
    probability: float | None = None


@dataclass(frozen=True)
class ExportRules:
    """Task-specific properties of exported files.

    - `outputs`: name of the graph's outputs, one word.
    - `any_batch_size`: whether the graph accepts any number of images; otherwise it accepts exactly one.
    - `use_onnx_graph`: whether OpenVINO converts the ONNX graph instead of the PyTorch graph.
    - `int8_refusal`: the reason why int8 is not supported; "" if it is supported.
    - `fit`: the resize mode in the file's metadata; "" for that of the model's preprocessing.
    """

    outputs: str = "logits"
    any_batch_size: bool = True
    use_onnx_graph: bool = False
    int8_refusal: str = ""
    fit: str = ""


class Task(ABC):
    """The interface of a task. Subclasses are frozen dataclasses whose fields are stored in `model.json`.

    Methods from `activate` on are only for tasks with `outputs`, K numbers per image.
    """

    name: ClassVar[str]
    verb_phrase: ClassVar[str]  # predicate of a sentence about a model, for messages: "classifies images"
    hub_task: ClassVar[str]  # the Hugging Face Hub's name of the task
    verb: ClassVar[str] = "predict"  # the CLI command that computes predictions
    endpoint: ClassVar[str] = "predict"  # the server's endpoint, and the method of `Predictor`, for predictions
    reads_images: ClassVar[bool] = True  # whether the model takes images; False if it generates images
    # whether the server's inspection page can show attention, positions and filters
    inspectable: ClassVar[bool] = True
    has_head: ClassVar[bool] = True
    # whether a model is a backbone wrapped by a dense head, as in segmentation and detection
    is_dense: ClassVar[bool] = False
    predict_options: ClassVar[frozenset[str]] = frozenset(("top", "threshold", "abstain", "csv", "ray"))
    export_rules: ClassVar[ExportRules] = ExportRules()
    export_tolerance: ClassVar[float] = 0.0  # share of predictions that may change in a float32 export
    primary: ClassVar[str] = "top1"  # the key of `primary_metric`, unless settings choose another
    evaluate_options: ClassVar[frozenset[str]] = frozenset()  # options of `evaluate` that are specific to this task
    protocol: ClassVar[str] = "top1"  # name of this task's evaluation protocol in evaluations.jsonl
    output_noun: ClassVar[str] = "classes"  # plural noun for `outputs`

    classes: tuple[str, ...]  # empty for tasks without classes
    masks: bool = False  # whether objects have masks in addition to boxes
    autoencoder: str = ""  # folder or `hf:` name of the autoencoder that decodes the latents of a generative model

    @abstractmethod
    def settings(self) -> dict[str, Any]:
        """Return the task's fields as JSON values, as stored in model.json. `classes` is always present, and empty for
        tasks without classes."""

    @classmethod
    @abstractmethod
    def from_settings(cls, settings: dict[str, Any], classes: tuple[str, ...], origin: str) -> Self:
        """Create a task from stored `settings`. Raises WeightsError for invalid values; `origin`, the name of their
        file, is part of the message."""

    @classmethod
    def from_run(cls, settings: dict[str, Any], classes: tuple[str, ...], origin: str) -> Self:
        """Create the task of an unfinished run from the settings of its objective and its `targets`. Raises
        WeightsError for invalid values; `origin`, the name of their file, is part of the message."""
        return cls.from_settings(settings, classes, origin)

    @classmethod
    def example_command(cls, run: str, clips: bool) -> str:
        """Return an example command that uses a trained `run`. `clips`: whether its inputs are clips instead of
        images."""
        return f"vitreous {cls.verb} {run} IMAGE …"

    @property
    def outputs(self) -> tuple[str, ...]:
        """The names of the head's K outputs per image. Empty for a model without a head, and for a model with per-pixel
        or per-object outputs."""
        return ()

    @property
    def primary_metric(self) -> str:
        """The key of the metric by which evaluations of this task are compared."""
        return self.primary

    @property
    def example_notes(self) -> dict[str, str]:
        """Captions for the groups of `choose_examples` on an evaluation page."""
        return {}

    @property
    def label_columns(self) -> tuple[str, ...]:
        """The columns of a table that contain the labels of images; empty if labels are classes."""
        return ()

    @property
    def summary(self) -> str:
        """A short description of a model of this task with its counts, such as "classifies images into 37 classes"."""
        return self.verb_phrase

    @property
    def missing_outputs(self) -> tuple[str, str]:
        """Return, for a model without `outputs`, the reason as text for a message, and a hint to use another
        command."""
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
        """Return the values that predictions depend on: class names, loss, multilabel, temperature, and other settings.
        The version of a model is a digest of them."""
        return [self.classes, "softmax", False, 1.0]

    def supports_endpoint(self, endpoint: str) -> bool:
        """Return whether `endpoint` computes the predictions of this task. An endpoint is a method of `Predictor` and a
        path of the server."""
        return self.endpoint == endpoint

    def require_endpoint(self, endpoint: str, problem: str) -> None:
        """Raise UsageError with the message `problem` unless `endpoint` computes the predictions of this task."""
        if not self.supports_endpoint(endpoint):
            raise UsageError(problem, f"use {self.endpoint}")

    def with_temperature(self, temperature: float) -> Self:
        """Return a copy with a new temperature, the divisor of the logits. Tasks without temperature return
        themselves."""
        return self

    def check_predict_options(self, source: str, values: dict[str, Any]) -> None:
        """Raise UsageError if an option of `vitreous predict` is set that this task does not support. `values` are the
        options by field name, `source` is the name of the model."""
        for name, models in PREDICT_OPTIONS.items():
            if values[name] not in (None, False) and name not in self.predict_options:
                option = f"--{name.replace('_', '-')}"
                raise UsageError(f"{option} is for {models}; {source} {self.verb_phrase}", f"leave out {option}")

    def check_predict_keywords(self, model: str, options: PredictionOptions) -> None:
        """Raise UsageError if a keyword of `Predictor.predict` is set that this task does not support. `model` is the
        name of the model."""
        if unsupported := [name for name in options.list_set_options if name not in self.predict_options]:
            problem = f"predict({unsupported[0]}=…) is for image classifiers; {model} {self.verb_phrase}"
            raise UsageError(problem, f"leave out {unsupported[0]}")

    def predict_images(
        self, predictor: Any, images: Any, options: PredictionOptions, bad_images: str, on_images: Callable[[int], None]
    ) -> Any:
        """Predict images with a `Predictor`: one prediction for a single image, a list for several images.

        `bad_images` selects the treatment of unreadable images. `on_images` is called with the number of finished
        images. Raises UsageError for options that the task does not support.
        """
        return predictor.predict_outputs(images, options, bad_images, on_images)

    def prepare_input(self, image: DecodedSample, preprocess: Preprocess) -> np.ndarray:
        """Convert a decoded image to the pixels (C, *image) that an exported file expects."""
        return preprocess.to_array(image)

    def compute(self, engine: Any, pixels: np.ndarray) -> np.ndarray:
        """Compute the outputs (B, ...) of an `Engine` for pixels (B, C, *image)."""
        return engine.logits(pixels)

    def output_shape(self, image_size: tuple[int, ...]) -> tuple[int | None, ...]:
        """Return the shape of the outputs of `compute` for one image of the model's `image_size`; None for a variable
        length."""
        return (len(self.outputs),)

    def compare_export(
        self, original: Any, export: Any, images: VerificationImages, config: Any, progress: Callable[[int], None]
    ) -> ExportComparison | ObjectComparison:
        """Compare the outputs of the engines of a model and of its exported file on verification images. `config` is
        the model's config; `progress` is called with the number of finished images."""
        return compare_outputs(original, export, images, self, progress)

    def count_labels(self, labels: np.ndarray, cells: np.ndarray) -> np.ndarray:
        """Count how often each class is a label, (K,) int64, from the labels of n images, or from
        `Report.confusion_cells` (m, 3) for tasks with per-pixel labels."""
        return np.bincount(labels, minlength=len(self.classes)).astype(np.int64)

    def select_headline_metrics(self, metrics: dict[str, float | None]) -> dict[str, float | None]:
        """Select the metrics that are shown at the top of an evaluation page."""
        return metrics

    def activate(self, outputs: np.ndarray) -> np.ndarray:
        """Convert outputs (n, K) of the head to probabilities, or to values in their units, (n, K) float64."""
        raise NotImplementedError(f"the task {self.name} has no image-level outputs")

    def prediction_format(self, options: PredictionOptions) -> PredictionFormat:
        """Return the format of this task's predictions. Raises UsageError for options that the task does not
        support."""
        raise NotImplementedError(f"the task {self.name} has no image-level outputs")

    def evaluate(self, outputs: np.ndarray, labels: np.ndarray, readable: np.ndarray) -> Report:
        """Compute the metrics of n images from the head's outputs (n, K), the labels, and `readable` (n,) bool. Raises
        NonFiniteError if an output is not finite."""
        raise NotImplementedError(f"the task {self.name} has no image-level outputs")

    def align_labels(self, split: Split, data: Data) -> Split:
        """Return a split of a dataset with its labels in the order of `outputs`. Raises DataError if a label is not
        among the model's outputs or has another type."""
        raise NotImplementedError(f"the task {self.name} has no image-level outputs")

    def choose_examples(
        self, outputs: np.ndarray, split: Split, readable: np.ndarray, count: int
    ) -> dict[str, list[Example]]:
        """Choose images for an evaluation page from outputs (n, K), at most `count` per group.

        The group `worst` has the images with the largest errors, `unsure` those with the lowest confidence.
        `example_notes` has a caption for each group.
        """
        raise NotImplementedError(f"the task {self.name} has no image-level outputs")

    def draw_charts(self, outputs: np.ndarray, labels: np.ndarray, readable: np.ndarray) -> list[ScatterChart]:
        """Return the charts of an evaluation page from outputs (n, K) and the labels of n images."""
        return []

    def measure_agreement(self, ours: np.ndarray, theirs: np.ndarray) -> float:
        """Return the share of equal predictions in the outputs (n, ...) of a model and of its exported file."""
        raise NotImplementedError(f"the task {self.name} has no image-level outputs")

    def describe_differences(self, other_task: Task) -> list[str]:
        """List differences between the outputs of this task and `other_task`, one line each. The order of outputs is
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
        """Check that the outputs of two models can be compared. Returns a note about the comparison, or "".

        Raises UsageError if their tasks differ, or if they have no outputs for whole images. `names` are the names of
        the models.
        """
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
        """Compare the outputs (n, K) of a model of this task with those of a model of `other_task`, on the same images
        of `data`.

        The labels of each model are in the order of its outputs. Differences are second minus first.
        """
        raise NotImplementedError(f"the task {self.name} has no image-level outputs")

    def count_correct(self, outputs: np.ndarray, labels: np.ndarray) -> int | None:
        """Count the images whose prediction equals the label, from outputs (n, K). None for tasks in which predictions
        and labels are not compared for equality."""
        return None


def reject_classifier_options(task: Task, options: PredictionOptions) -> None:
    """Raise UsageError if an option is set that only classifiers support."""
    if options.list_set_options:
        option = f"--{options.list_set_options[0]}"
        problem = f"{option} is for image classifiers, and this model {task.verb_phrase}"
        raise UsageError(problem, f"leave out {option}")
