"""The task of image classification, single-label or multi-label."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self, get_args

import numpy as np

from vitreous.config import list_differences
from vitreous.data.class_order import align_labels, find_class_indices
from vitreous.errors import UsageError, WeightsError
from vitreous.system.notebook import RawHTML, format_html_table
from vitreous.system.tables import escape_formula
from vitreous.tasks.base import Example, PredictionFormat, PredictionOptions, Task
from vitreous.tasks.features import FeatureExtraction
from vitreous.tasks.predictions import build_error_column, build_path_columns, format_predictions_html
from vitreous.tasks.report import Report

if TYPE_CHECKING:
    import pyarrow as pa

    from vitreous.data.split import Data, Split
    from vitreous.tasks.comparison import Comparison, ModelOutputs

ClassificationLoss = Literal["softmax", "sigmoid", "binary"]
LOSSES: tuple[str, ...] = get_args(ClassificationLoss)
DEFAULT_TOP = 5  # default number of classes of a single-label prediction


@dataclass(frozen=True)
class Prediction:
    """The prediction of a classifier for one image: class names, most probable first, with their probabilities; or the
    error.

    A multi-label prediction may have no classes. `unsure`: whether all probabilities are below
    `PredictionOptions.abstain`.
    """

    column: ClassVar[str] = "classes"

    path: str
    names: tuple[str, ...] = ()
    probabilities: tuple[float, ...] = ()
    error: str | None = None
    unsure: bool = False

    def _repr_html_(self) -> str:
        return format_predictions_html([self])

    def cell_html(self) -> Any:
        """Format the classes as HTML, each with a probability bar."""
        pairs = list(zip(self.names, self.probabilities, strict=True))
        if not pairs:
            return "none"
        bars = [(RawHTML(f'<meter value="{p:.4f}"></meter>'), f"{p:.1%}", name) for name, p in pairs]
        return RawHTML(format_html_table(bars, note="unsure" if self.unsure else ""))


@dataclass(frozen=True)
class ClassFormat(PredictionFormat):
    """The format of a classifier's predictions: at most `top` of the `classes`, with probabilities above `threshold`. A
    prediction is unsure if its highest probability is below `abstain`."""

    column: ClassVar[str] = "classes"

    classes: tuple[str, ...] = ()
    top: int = DEFAULT_TOP
    threshold: float = -1.0
    abstain: float = 0.0

    @property
    def csv_columns(self) -> list[str]:
        """List the columns of the CSV file: one row per predicted class, with its rank and probability."""
        return ["path", "rank", "class", "probability", "error", "unsure"]

    @property
    def settings(self) -> dict[str, Any]:
        """Return the options on which predictions depend: `top`, `threshold` and `abstain`."""
        return {"top": self.top, "threshold": self.threshold, "abstain": self.abstain}

    def predict(self, image_outputs: np.ndarray, path: str) -> Prediction:
        """Create the prediction for an image from its probabilities (K,)."""
        top_indices = [
            int(i) for i in np.argsort(-image_outputs, kind="stable")[: self.top] if image_outputs[i] > self.threshold
        ]
        names, values = tuple(self.classes[i] for i in top_indices), tuple(float(image_outputs[i]) for i in top_indices)
        return Prediction(path, names, values, unsure=bool(image_outputs.max() < self.abstain))

    def format_error(self, path: str, error: str) -> Prediction:
        """Create the prediction for an unreadable image, with its error."""
        return Prediction(path, error=error)

    def to_fields(self, prediction: Prediction) -> dict[str, Any]:
        """Return the JSON fields of a prediction: its classes with probabilities, and whether it is unsure."""
        pairs = zip(prediction.names, prediction.probabilities, strict=True)
        return {"classes": [{"class": name, "probability": p} for name, p in pairs], "unsure": prediction.unsure}

    def to_dict(self, prediction: Prediction) -> dict[str, Any]:
        """Convert a prediction to a dict with path, classes with probabilities, error and unsure."""
        fields = self.to_fields(prediction)
        classes, unsure = fields["classes"], fields["unsure"]
        return {"path": prediction.path, "classes": classes, "error": prediction.error, "unsure": unsure}

    def describe(self, prediction: Prediction) -> str:
        """Format the classes with their probabilities in per cent; of an unsure prediction only the first class."""
        texts = [f"{name} {p:.1%}" for name, p in zip(prediction.names, prediction.probabilities, strict=True)]
        return f"unsure ({texts[0] if texts else 'none'})" if prediction.unsure else "  ".join(texts) or "none"

    def to_csv_rows(self, prediction: Prediction) -> list[list[str]]:
        """Return one row per class, or one row without a class. `escape_formula` prevents spreadsheets from evaluating
        cells."""
        path_cell, unsure = escape_formula(prediction.path), "unsure" * prediction.unsure
        if not prediction.names:
            return [[path_cell, "", "", "", escape_formula(prediction.error or ""), unsure]]
        table = zip(prediction.names, prediction.probabilities, strict=True)
        return [
            [path_cell, str(rank), escape_formula(name), f"{p:.6f}", "", unsure]
            for rank, (name, p) in enumerate(table, 1)
        ]

    def starts_image(self, cells: Sequence[str]) -> bool:
        """Return whether a CSV row has the first class of its image, or no class."""
        return cells[1] in ("", "1")

    def to_arrow_table(self, predictions: Sequence[Prediction]) -> pa.Table:
        """Convert predictions to an Arrow table with one row per image; `classes` is a list of structs."""
        import pyarrow as pa

        pair = pa.struct([("class", pa.string()), ("probability", pa.float64())])
        classes = [None if prediction.error else self.to_fields(prediction)["classes"] for prediction in predictions]
        columns = {**build_path_columns(predictions), "classes": pa.array(classes, pa.list_(pair))}
        columns |= {"error": build_error_column(predictions)}
        return pa.table(columns | {"unsure": pa.array([prediction.unsure for prediction in predictions], pa.bool_())})


@dataclass(frozen=True)
class Classification(Task):
    """A classifier's task: logits of named `classes`, in the order of the logits.

    `multilabel`: whether an image may have any number of classes. `loss`: the training loss, which decides between
    softmax and sigmoid. `temperature`, above 0, divides the logits before softmax or sigmoid.
    """

    name: ClassVar[str] = "classification"
    verb_phrase: ClassVar[str] = "classifies images"
    hub_task: ClassVar[str] = "image-classification"
    evaluate_options: ClassVar[frozenset[str]] = frozenset(("calibrate", "abstain", "outliers", "against", "suspects"))

    classes: tuple[str, ...]
    multilabel: bool = False
    loss: ClassificationLoss = "softmax"
    temperature: float = 1.0

    def settings(self) -> dict[str, Any]:
        """Return classes, loss, multilabel and temperature by their keys in files."""
        return {
            "classes": list(self.classes),
            "loss": self.loss,
            "multilabel": self.multilabel,
            "temperature": self.temperature,
        }

    @classmethod
    def from_settings(cls, settings: dict[str, Any], classes: tuple[str, ...], origin: str) -> Self:
        """Create a classification from stored settings. Raises WeightsError for an invalid loss or temperature."""
        loss, multilabel = settings.get("loss", "softmax"), settings.get("multilabel", False)
        temperature = settings.get("temperature", 1.0)
        if loss not in LOSSES or not isinstance(multilabel, bool):
            raise WeightsError(
                f"{origin}: invalid loss {loss} or multilabel {multilabel}",
                f"loss must be {' or '.join(LOSSES)}, multilabel true or false",
            )
        if isinstance(temperature, bool) or not isinstance(temperature, int | float) or not 0 < temperature < math.inf:
            raise WeightsError(
                f"{origin}: invalid temperature {temperature}", "temperature must be above 0 (1 has no effect)"
            )
        return cls(classes, multilabel, loss, float(temperature))

    @classmethod
    def from_run(cls, settings: dict[str, Any], classes: tuple[str, ...], origin: str) -> Self:
        """Create a single-label classification, because the settings of an objective do not contain `multilabel`."""
        return cls(classes)

    @property
    def outputs(self) -> tuple[str, ...]:
        """The class names."""
        return self.classes

    @property
    def missing_outputs(self) -> tuple[str, str]:
        """Return the reason why the model has no outputs. A classification without classes has no head, like feature
        extraction."""
        return FeatureExtraction().missing_outputs

    @property
    def summary(self) -> str:
        """The task with the number of classes, and whether the model is multi-label: "classifies images into 37
        classes"."""
        return f"classifies images into {len(self.classes)} classes" + " (multi-label)" * self.multilabel

    @property
    def primary_metric(self) -> str:
        """The key of the primary metric: top-1, or mAP for a multi-label model."""
        return "map" if self.multilabel else "top1"

    @property
    def export_metadata(self) -> dict[str, Any]:
        """The loss and the temperature, which convert the outputs of an exported file to probabilities."""
        return {"output": {"loss": self.loss, "temperature": self.temperature}}

    def get_version_fields(self) -> list[Any]:
        """Return the values that predictions depend on: classes, loss, multilabel and temperature."""
        return [self.classes, self.loss, self.multilabel, self.temperature]

    def with_temperature(self, temperature: float) -> Self:
        """Return a copy with another temperature."""
        return replace(self, temperature=temperature)

    def activate(self, outputs: np.ndarray) -> np.ndarray:
        """Compute probabilities (n, K) from logits (n, K), divided by the temperature."""
        from vitreous.tasks.calibration import compute_probabilities

        return compute_probabilities(outputs.astype(np.float64) / self.temperature, self.loss)

    def prediction_format(self, options: PredictionOptions) -> ClassFormat:
        """Return the format of predictions.

        If `top` and `threshold` are unset, a single-label prediction has `options.default_top` classes. A multi-label
        prediction then has all classes above `MULTILABEL_THRESHOLD`. Raises UsageError for an invalid `abstain`.
        """
        from vitreous.tasks.calibration import MULTILABEL_THRESHOLD, check_abstain

        top, threshold = options.top, options.threshold
        check_abstain(options.abstain)
        if options.abstain is not None and self.multilabel:
            problem = "--abstain is for single-label models, but this model is multi-label"
            raise UsageError(problem, "use --threshold")
        if threshold is None:
            threshold = MULTILABEL_THRESHOLD if self.multilabel and top is None else -1.0
        top = top or (len(self.classes) if self.multilabel else options.default_top)
        return ClassFormat(self.classes, top, threshold, options.abstain or 0.0)

    def scale_logits(self, outputs: np.ndarray) -> np.ndarray:
        """Divide logits (n, K) by the temperature, in float64 so that distinct logits stay distinct."""
        return outputs if self.temperature == 1 else outputs.astype(np.float64) / self.temperature

    def describe_differences(self, other_task: Task) -> list[str]:
        """List differences in loss, multilabel and classes, one line each."""
        if not isinstance(other_task, Classification):
            return super().describe_differences(other_task)
        lines = list_differences(self.loss, other_task.loss, "loss")
        lines += list_differences(self.multilabel, other_task.multilabel, "multilabel")
        return lines + super().describe_differences(other_task)

    def check_comparison(self, other_task: Task, names: tuple[str, str]) -> str:
        """Check that both models are classifiers. Returns a note if they have different classes. Raises UsageError if
        the tasks differ."""
        note = super().check_comparison(other_task, names)
        if set(self.classes) != set(other_task.classes):
            note = "the runs have different classes; they are compared on the classes of the dataset"
        return note

    def compare_outputs(
        self, other_task: Task, outputs_a: ModelOutputs, outputs_b: ModelOutputs, data: Data
    ) -> Comparison:
        """Compare the logits of two classifiers, divided by their temperatures. Multi-label outputs are brought into
        the order of the dataset's classes."""
        from vitreous.tasks.comparison import ModelOutputs, compare_classifiers

        assert isinstance(other_task, Classification)
        scaled: list[ModelOutputs] = []
        for task, model_outputs in ((self, outputs_a), (other_task, outputs_b)):
            logits, labels = task.scale_logits(model_outputs.logits).astype(np.float64), model_outputs.labels
            if labels.ndim == 2:
                order = find_class_indices(data, task.classes)
                logits, labels = logits[:, order], labels[:, order]
            scaled.append(ModelOutputs(logits, labels, model_outputs.readable))
        return compare_classifiers(scaled[0], scaled[1])

    def evaluate(self, outputs: np.ndarray, labels: np.ndarray, readable: np.ndarray) -> Report:
        """Compute the metrics of logits (n, K), divided by the temperature (`evaluate_classification`)."""
        from vitreous.tasks.classification_metrics import evaluate_classification

        return evaluate_classification(self.scale_logits(outputs), labels, self.classes, readable)

    def align_labels(self, split: Split, data: Data) -> Split:
        """Return the split with labels in the model's class order.

        Raises DataError if the dataset has a class that the model does not have, UsageError if the data is multi-label
        and the model single-label.
        """
        aligned = align_labels(split, data, self.classes, self.multilabel)
        if data.multilabel and self.loss == "softmax":
            problem = f"the model is single-label, but {data.name} is multi-label"
            raise UsageError(problem, "train with --loss sigmoid")
        return aligned

    def choose_examples(
        self, outputs: np.ndarray, split: Split, readable: np.ndarray, count: int
    ) -> dict[str, list[Example]]:
        """Choose images for an evaluation page from logits (n, K).

        `worst`: wrong predictions with the lowest probability of the label, or multi-label images with the highest
        loss. `unsure`: images with the smallest difference between the two most probable classes, or multi-label images
        with a probability closest to 0.5.
        """
        from vitreous.tasks.calibration import compute_probabilities
        from vitreous.tasks.classification_metrics import score_images

        logits = self.scale_logits(outputs)
        loss, margin, wrong = score_images(logits, split.labels)
        worst = [int(s) for s in np.argsort(-loss, kind="stable") if readable[s] and wrong[s]][:count]
        unsure = [int(s) for s in np.argsort(margin, kind="stable") if readable[s]][:count]

        def make_example(sample: int) -> Example:
            """Describe an image of the split, with its label and its most probable class."""
            probabilities, label = (
                compute_probabilities(logits[sample : sample + 1], self.loss)[0],
                split.labels[sample],
            )
            predicted_index, class_indices = (
                int(probabilities.argmax()),
                np.flatnonzero(label > 0) if split.labels.ndim == 2 else [int(label)],
            )
            names = ", ".join(self.classes[class_index] for class_index in class_indices) or "none"
            return Example(sample, names, self.classes[predicted_index], float(probabilities[predicted_index]))

        return {"worst": [make_example(s) for s in worst], "unsure": [make_example(s) for s in unsure]}

    @property
    def example_notes(self) -> dict[str, str]:
        """Captions of the two groups of `choose_examples`."""
        nearest = "Images with the smallest difference between the two most probable classes."
        return {
            "worst": "Wrong predictions with the lowest probability of the label.",
            "unsure": "Images with a class probability nearest to 0.5." if self.multilabel else nearest,
        }

    def measure_agreement(self, ours: np.ndarray, theirs: np.ndarray) -> float:
        """Return the share of images with the same top-1 class, or of equal multi-label decisions, from the logits (n,
        K) of a model and of its exported file."""
        if not self.multilabel:
            return float((ours.argmax(1) == theirs.argmax(1)).mean())
        from vitreous.tasks.calibration import MULTILABEL_THRESHOLD

        decisions = [self.activate(logits) > MULTILABEL_THRESHOLD for logits in (ours, theirs)]
        return float((decisions[0] == decisions[1]).mean())

    def count_correct(self, outputs: np.ndarray, labels: np.ndarray) -> int | None:
        """Count the images whose label has the highest of the logits (n, K); None for multi-label data."""
        return int((outputs.argmax(1) == labels).sum()) if labels.ndim == 1 else None
