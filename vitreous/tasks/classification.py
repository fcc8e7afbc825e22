"""Classification: one class, or several, for an image."""

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
DEFAULT_TOP = 5  # classes of a prediction of one class


@dataclass(frozen=True)
class Prediction:
    """One image's prediction: the class names, best first, with their probabilities; or why there is none.

    Where an image may have several classes, there may be no name. `unsure`: no probability reaches `abstain`.
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
        """The classes, with bars as long as they are probable."""
        pairs = list(zip(self.names, self.probabilities, strict=True))
        if not pairs:
            return "none"
        bars = [(RawHTML(f'<meter value="{p:.4f}"></meter>'), f"{p:.1%}", name) for name, p in pairs]
        return RawHTML(format_html_table(bars, note="unsure" if self.unsure else ""))


@dataclass(frozen=True)
class ClassFormat(PredictionFormat):
    """At most `top` of the `classes`, of a probability above `threshold`; unsure where the highest is below
    `abstain`."""

    column: ClassVar[str] = "classes"

    classes: tuple[str, ...] = ()
    top: int = DEFAULT_TOP
    threshold: float = -1.0
    abstain: float = 0.0

    @property
    def head(self) -> list[str]:
        """A column each for the rank, the class and its probability."""
        return ["path", "rank", "class", "probability", "error", "unsure"]

    @property
    def settings(self) -> dict[str, Any]:
        """The three numbers."""
        return {"top": self.top, "threshold": self.threshold, "abstain": self.abstain}

    def predict(self, row: np.ndarray, path: str) -> Prediction:
        """The prediction for an image from its (K,) probabilities."""
        best = [int(i) for i in np.argsort(-row, kind="stable")[: self.top] if row[i] > self.threshold]
        names, values = tuple(self.classes[i] for i in best), tuple(float(row[i]) for i in best)
        return Prediction(path, names, values, unsure=bool(row.max() < self.abstain))

    def fail(self, path: str, error: str) -> Prediction:
        """The prediction for an image that cannot be read."""
        return Prediction(path, error=error)

    def to_fields(self, prediction: Prediction) -> dict[str, Any]:
        """Classes with probabilities, and whether it is unsure."""
        pairs = zip(prediction.names, prediction.probabilities, strict=True)
        return {"classes": [{"class": name, "probability": p} for name, p in pairs], "unsure": prediction.unsure}

    def to_dict(self, prediction: Prediction) -> dict[str, Any]:
        """Path, classes with probabilities, error, unsure."""
        fields = self.to_fields(prediction)
        classes, unsure = fields["classes"], fields["unsure"]
        return {"path": prediction.path, "classes": classes, "error": prediction.error, "unsure": unsure}

    def describe(self, prediction: Prediction) -> str:
        """The classes with their probabilities in per cent."""
        best = [f"{name} {p:.1%}" for name, p in zip(prediction.names, prediction.probabilities, strict=True)]
        return f"unsure ({best[0] if best else 'none'})" if prediction.unsure else "  ".join(best) or "none"

    def cells(self, prediction: Prediction) -> list[list[str]]:
        """One row per class, or one without. `escape_formula` keeps spreadsheets from computing cells."""
        where, unsure = escape_formula(prediction.path), "unsure" * prediction.unsure
        if not prediction.names:
            return [[where, "", "", "", escape_formula(prediction.error or ""), unsure]]
        table = zip(prediction.names, prediction.probabilities, strict=True)
        return [
            [where, str(rank), escape_formula(name), f"{p:.6f}", "", unsure] for rank, (name, p) in enumerate(table, 1)
        ]

    def starts_image(self, cells: Sequence[str]) -> bool:
        """Whether a row is that of the first class, or of no class."""
        return cells[1] in ("", "1")

    def table(self, predictions: Sequence[Prediction]) -> pa.Table:
        """The same columns, `classes` a list of structs."""
        import pyarrow as pa

        pair = pa.struct([("class", pa.string()), ("probability", pa.float64())])
        classes = [None if row.error else self.to_fields(row)["classes"] for row in predictions]
        columns = {**build_path_columns(predictions), "classes": pa.array(classes, pa.list_(pair))}
        columns |= {"error": build_error_column(predictions)}
        return pa.table(columns | {"unsure": pa.array([row.unsure for row in predictions], pa.bool_())})


@dataclass(frozen=True)
class Classification(Task):
    """Logits of named classes: `classes` in their order.

    `multilabel`: an image may have any number of the classes. `loss`: what the model was trained with, which decides
    how logits become probabilities. `temperature`, above 0: what logits are divided by before that.
    """

    name: ClassVar[str] = "classification"
    does: ClassVar[str] = "names classes of images"
    hub_task: ClassVar[str] = "image-classification"
    evaluate_options: ClassVar[frozenset[str]] = frozenset(("calibrate", "abstain", "outliers", "against", "suspects"))

    classes: tuple[str, ...]
    multilabel: bool = False
    loss: ClassificationLoss = "softmax"
    temperature: float = 1.0

    def settings(self) -> dict[str, Any]:
        """The fields under their names in files."""
        return {
            "classes": list(self.classes),
            "loss": self.loss,
            "multilabel": self.multilabel,
            "temperature": self.temperature,
        }

    @classmethod
    def from_settings(cls, description: dict[str, Any], classes: tuple[str, ...], origin: str) -> Self:
        """The classification of a description. Raises WeightsError for another loss or temperature."""
        loss, multilabel = description.get("loss", "softmax"), description.get("multilabel", False)
        temperature = description.get("temperature", 1.0)
        if loss not in LOSSES or not isinstance(multilabel, bool):
            raise WeightsError(
                f"{origin}: loss {loss}, multilabel {multilabel}", f"there are {', '.join(LOSSES)}; true, false"
            )
        if isinstance(temperature, bool) or not isinstance(temperature, int | float) or not 0 < temperature < math.inf:
            raise WeightsError(f"{origin}: temperature {temperature}", "it is a number above 0; 1 changes nothing")
        return cls(classes, multilabel, loss, float(temperature))

    @classmethod
    def from_run(cls, settings: dict[str, Any], classes: tuple[str, ...], origin: str) -> Self:
        """One class an image: the settings of an objective do not tell whether there are several."""
        return cls(classes)

    @property
    def outputs(self) -> tuple[str, ...]:
        """The classes."""
        return self.classes

    @property
    def missing_outputs(self) -> tuple[str, str]:
        """That there is no head: a classification without classes is one of features."""
        return FeatureExtraction().missing_outputs

    @property
    def summary(self) -> str:
        """How many classes, and whether an image has several."""
        return f"names one of {len(self.classes)} classes" + ", or several" * self.multilabel

    @property
    def leading_metric(self) -> str:
        """top-1, or mAP where an image may have several classes."""
        return "map" if self.multilabel else "top1"

    @property
    def export_metadata(self) -> dict[str, Any]:
        """How logits become probabilities."""
        return {"answer": {"loss": self.loss, "temperature": self.temperature}}

    def get_version_fields(self) -> list[Any]:
        """Classes, loss, whether an image may have several, temperature."""
        return [self.classes, self.loss, self.multilabel, self.temperature]

    def with_temperature(self, temperature: float) -> Self:
        """The classification with another temperature."""
        return replace(self, temperature=temperature)

    def activate(self, outputs: np.ndarray) -> np.ndarray:
        """(n, K) logits, divided by the temperature -> (n, K) probabilities."""
        from vitreous.tasks.calibration import compute_probabilities

        return compute_probabilities(outputs.astype(np.float64) / self.temperature, self.loss)

    def prediction_format(self, options: PredictionOptions) -> ClassFormat:
        """Unset options: the best classes, or, where an image may have several, all above `MULTILABEL_THRESHOLD`.
        Raises UsageError for an `abstain` that cannot be."""
        from vitreous.tasks.calibration import MULTILABEL_THRESHOLD, check_abstain

        top, threshold = options.top, options.threshold
        check_abstain(options.abstain)
        if options.abstain is not None and self.multilabel:
            message = "--abstain is for models that name one class an image"
            raise UsageError(message, "use --threshold where there may be several")
        if threshold is None:
            threshold = MULTILABEL_THRESHOLD if self.multilabel and top is None else -1.0
        top = top or (len(self.classes) if self.multilabel else options.usual)
        return ClassFormat(self.classes, top, threshold, options.abstain or 0.0)

    def scale_logits(self, outputs: np.ndarray) -> np.ndarray:
        """(n, K) logits divided by the temperature, in float64, where logits that differ stay different."""
        return outputs if self.temperature == 1 else outputs.astype(np.float64) / self.temperature

    def describe_differences(self, other: Task) -> list[str]:
        """Loss, whether an image has several labels, and classes that only one of them has."""
        if not isinstance(other, Classification):
            return super().describe_differences(other)
        lines = list_differences(self.loss, other.loss, "loss")
        lines += list_differences(self.multilabel, other.multilabel, "several labels an image")
        return lines + super().describe_differences(other)

    def check_comparison(self, other: Task, names: tuple[str, str]) -> str:
        """Note classes that only one of them has."""
        note = super().check_comparison(other, names)
        if set(self.classes) != set(other.classes):
            note = "the runs do not know the same classes; they are compared on those of the data"
        return note

    def compare_outputs(self, other: Task, first: ModelOutputs, second: ModelOutputs, data: Data) -> Comparison:
        """Compare logits divided by the temperatures; several labels in the order of the data's classes."""
        from vitreous.tasks.comparison import ModelOutputs, compare_classifiers

        assert isinstance(other, Classification)
        scaled: list[ModelOutputs] = []
        for task, answers in ((self, first), (other, second)):
            logits, labels = task.scale_logits(answers.logits).astype(np.float64), answers.labels
            if labels.ndim == 2:
                order = find_class_indices(data, task.classes)
                logits, labels = logits[:, order], labels[:, order]
            scaled.append(ModelOutputs(logits, labels, answers.readable))
        return compare_classifiers(scaled[0], scaled[1])

    def evaluate(self, outputs: np.ndarray, labels: np.ndarray, readable: np.ndarray) -> Report:
        """The metrics of `evaluate_classification`, of (n, K) logits divided by the temperature."""
        from vitreous.tasks.classification_metrics import evaluate_classification

        return evaluate_classification(self.scale_logits(outputs), labels, self.classes, readable)

    def align_labels(self, split: Split, data: Data) -> Split:
        """Labels in the model's class order. Raises DataError for a class that the model does not know, UsageError for
        several labels an image and a model that names one class."""
        aligned = align_labels(split, data, self.classes, self.multilabel)
        if data.multilabel and self.loss == "softmax":
            problem = f"the model names one class an image, {data.name} has several labels an image"
            raise UsageError(problem, "train with --loss sigmoid")
        return aligned

    def choose_examples(
        self, outputs: np.ndarray, split: Split, readable: np.ndarray, count: int
    ) -> dict[str, list[Example]]:
        """(n, K) logits -> worst: of the wrong ones, where the label's probability is lowest; with several labels an
        image, the highest loss. Least certain: where the two best classes are nearest, or a class to 0.5."""
        from vitreous.tasks.calibration import compute_probabilities
        from vitreous.tasks.classification_metrics import score_images

        logits = self.scale_logits(outputs)
        loss, margin, wrong = score_images(logits, split.labels)
        worst = [int(s) for s in np.argsort(-loss, kind="stable") if readable[s] and wrong[s]][:count]
        unsure = [int(s) for s in np.argsort(margin, kind="stable") if readable[s]][:count]

        def describe(sample: int) -> Example:
            row, label = compute_probabilities(logits[sample : sample + 1], self.loss)[0], split.labels[sample]
            best, places = int(row.argmax()), np.flatnonzero(label > 0) if split.labels.ndim == 2 else [int(label)]
            names = ", ".join(self.classes[place] for place in places) or "none"
            return Example(sample, names, self.classes[best], float(row[best]))

        return {"worst": [describe(s) for s in worst], "unsure": [describe(s) for s in unsure]}

    @property
    def example_notes(self) -> dict[str, str]:
        """How a page describes the worst and the least certain images."""
        nearest = "Images with the smallest difference between the two most probable classes."
        return {
            "worst": "Wrong predictions with the lowest probability of the label.",
            "unsure": "Images with a class probability nearest to 0.5." if self.multilabel else nearest,
        }

    def measure_agreement(self, ours: np.ndarray, theirs: np.ndarray) -> float:
        """(n, K) logits of both -> the share of images with the same class first, or of equal decisions where there may
        be several."""
        if not self.multilabel:
            return float((ours.argmax(1) == theirs.argmax(1)).mean())
        from vitreous.tasks.calibration import MULTILABEL_THRESHOLD

        decided = [self.activate(side) > MULTILABEL_THRESHOLD for side in (ours, theirs)]
        return float((decided[0] == decided[1]).mean())

    def count_correct(self, outputs: np.ndarray, labels: np.ndarray) -> int | None:
        """(n, K) logits -> the number of images whose label has the highest logit; None for several labels an image."""
        return int((outputs.argmax(1) == labels).sum()) if labels.ndim == 1 else None
