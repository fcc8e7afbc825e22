"""The task of regression: one or several values per image, for example age, count or yield.

The head's outputs are standardised: value = output x std + mean, with the mean and standard deviation of each target
over the training images, stored in `model.json`. In shapes, n is images and T targets.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Self, TypeGuard

import numpy as np

from vitreous.config import Json, list_differences
from vitreous.errors import DataError, UsageError, WeightsError, format_first_names
from vitreous.system.tables import escape_formula
from vitreous.tasks.base import (
    Example,
    PredictionFormat,
    PredictionOptions,
    ScatterChart,
    Task,
    reject_classifier_options,
)
from vitreous.tasks.predictions import build_error_column, build_path_columns, format_predictions_html
from vitreous.tasks.report import Report

if TYPE_CHECKING:
    import pyarrow as pa

    from vitreous.data.split import Data, Split
    from vitreous.tasks.comparison import Comparison, ModelOutputs

AGREEMENT_TOLERANCE = 0.05  # standard deviations by which equal predictions of a model and its export may differ
MAX_CHARTED_TARGETS = 3  # maximum number of targets with charts on a page
MAX_CHART_POINTS = 2_000  # maximum number of points of a chart, evenly sampled


@dataclass(frozen=True)
class ValuePrediction:
    """The prediction of a regression for one image: the value of each target in its unit; or the error."""

    column: ClassVar[str] = "values"

    path: str
    targets: tuple[str, ...] = ()
    values: tuple[float, ...] = ()
    error: str | None = None

    @property
    def names(self) -> tuple[str, ...]:
        """The target names. Other predictions have their class names under this attribute."""
        return self.targets

    def _repr_html_(self) -> str:
        return format_predictions_html([self])

    def cell_html(self) -> str:
        """Format the values as text for a cell of an HTML table."""
        return describe_values(self.targets, self.values)


def describe_values(targets: Sequence[str], values: Sequence[float]) -> str:
    """Format values with the names of their targets, such as `weight 3.52  height 1.8`; NaN becomes a dash."""
    pairs = zip(targets, values, strict=True)
    return "  ".join(f"{name} {'–' if math.isnan(value) else format(value, '.5g')}".strip() for name, value in pairs)


@dataclass(frozen=True)
class ValueFormat(PredictionFormat):
    """The format of a regression's predictions: the value of each of the `targets`, one column per target."""

    column: ClassVar[str] = "values"

    targets: tuple[str, ...]

    @property
    def csv_columns(self) -> list[str]:
        """List the columns of the CSV file: path, one column per target, and error."""
        return ["path", *(escape_formula(name) for name in self.targets), "error"]

    def predict(self, image_outputs: np.ndarray, path: str) -> ValuePrediction:
        """Create the prediction for an image from its values (T,)."""
        return ValuePrediction(path, self.targets, tuple(map(float, image_outputs)))

    def format_error(self, path: str, error: str) -> ValuePrediction:
        """Create the prediction for an unreadable image, with its error."""
        return ValuePrediction(path, error=error)

    def to_fields(self, prediction: ValuePrediction) -> dict[str, Any]:
        """Return the value of each target by name; empty for an error."""
        return {"values": dict(zip(prediction.targets, prediction.values, strict=True))}

    def describe(self, prediction: ValuePrediction) -> str:
        """Format the values with five significant digits."""
        return describe_values(prediction.targets, prediction.values)

    def to_csv_rows(self, prediction: ValuePrediction) -> list[list[str]]:
        """Return the CSV row of a prediction: path, values with seven significant digits, error."""
        values = [f"{value:.7g}" for value in prediction.values] or [""] * len(self.targets)
        return [[escape_formula(prediction.path), *values, escape_formula(prediction.error or "")]]

    def to_arrow_table(self, predictions: Sequence[ValuePrediction]) -> pa.Table:
        """Convert predictions to an Arrow table with one column per target."""
        import pyarrow as pa

        columns = build_path_columns(predictions)
        for target_index, name in enumerate(self.targets):
            values = [prediction.values[target_index] if prediction.values else None for prediction in predictions]
            columns[name] = pa.array(values, pa.float64())
        return pa.table(columns | {"error": build_error_column(predictions)})


@dataclass(frozen=True)
class Regression(Task):
    """The task of regression: values of named `targets`. `mean` and `std` have T values each, from the training
    images."""

    name: ClassVar[str] = "regression"
    verb_phrase: ClassVar[str] = "predicts values of images"
    hub_task: ClassVar[str] = "image-feature-extraction"  # the Hub has no task for regression
    protocol: ClassVar[str] = "regression"
    # R2 is scale-free, so its mean over several targets is meaningful; for a single target it ranks models like the
    # mean squared error
    primary: ClassVar[str] = "r2"
    output_noun: ClassVar[str] = "targets"

    classes: tuple[str, ...] = field(default=(), init=False, repr=False)

    targets: tuple[str, ...]
    mean: tuple[float, ...]
    std: tuple[float, ...]

    def settings(self) -> dict[str, Any]:
        """Return targets, means and standard deviations by their keys in files, and an empty list of classes."""
        return {"classes": [], "targets": list(self.targets), "mean": list(self.mean), "std": list(self.std)}

    @classmethod
    def from_settings(cls, settings: dict[str, Any], classes: tuple[str, ...], origin: str) -> Self:
        """Create a regression from stored settings. Raises WeightsError if `targets` is no list of names, or if a
        target lacks a mean or a standard deviation above 0."""
        targets: Json | tuple[Any, ...] = settings.get("targets")
        if not isinstance(targets, list | tuple) or not targets or not all(isinstance(name, str) for name in targets):
            raise WeightsError(f"{origin}: invalid targets {targets}", "targets must be a list of names")
        statistics = list[tuple[float, ...]]()
        for key in ("mean", "std"):
            values = settings.get(key)
            statistics.append(tuple(map(float, values)) if is_row_of_numbers(values) else ())
            if len(statistics[-1]) != len(targets) or (key == "std" and min(statistics[-1]) <= 0):
                raise WeightsError(
                    f"{origin}: invalid {key} {values}",
                    f"{key} must have {len(targets)} numbers{' above 0' * (key == 'std')}, one per target",
                )
        mean, std = statistics
        return cls(tuple(targets), mean, std)

    @property
    def example_notes(self) -> dict[str, str]:
        """The caption of the worst images of `choose_examples`."""
        return {
            "worst": "Images with the largest error in standard deviations of the target (mean of several targets)."
        }

    @property
    def outputs(self) -> tuple[str, ...]:
        """The names of the head's outputs: the target names."""
        return self.targets

    @property
    def label_columns(self) -> tuple[str, ...]:
        """The columns of a table that contain the labels: the target names."""
        return self.targets

    @property
    def summary(self) -> str:
        """The task with the first target names: "predicts weight, height"."""
        return f"predicts {format_first_names(self.targets, 8)}"

    @property
    def export_metadata(self) -> dict[str, Any]:
        """The target names, means and standard deviations, which convert the outputs of an exported file: value =
        output x std + mean."""
        target_metadata = {"targets": self.targets, "target_mean": self.mean, "target_std": self.std}
        return {**super().export_metadata, **target_metadata}

    def get_version_fields(self) -> list[Any]:
        """Return the values that predictions depend on: no classes, and the settings."""
        return [*super().get_version_fields(), self.settings()]

    def activate(self, outputs: np.ndarray) -> np.ndarray:
        """Convert standardised outputs (n, T) to values in the targets' units, (n, T) float64."""
        return outputs.astype(np.float64) * np.array(self.std) + np.array(self.mean)

    def prediction_format(self, options: PredictionOptions) -> ValueFormat:
        """Return a format with one value per target. Raises UsageError if an option is set that only classifiers
        support."""
        reject_classifier_options(self, options)
        return ValueFormat(self.targets)

    def evaluate(self, outputs: np.ndarray, labels: np.ndarray, readable: np.ndarray) -> Report:
        """Compute R2, MAE, RMSE and Spearman's correlation of each target, and their means, from outputs and labels (n,
        T)."""
        from vitreous.tasks.regression_metrics import evaluate_regression

        return evaluate_regression(self.activate(outputs), labels, self.targets, readable)

    def describe_differences(self, other_task: Task) -> list[str]:
        """List the targets that only one model has, or else the targets with different means or standard deviations."""
        lines = super().describe_differences(other_task)
        if lines or not isinstance(other_task, Regression):
            return lines
        for self_index, name in enumerate(self.targets):
            other_index = other_task.targets.index(name)
            self_moments, other_moments = (
                (self.mean[self_index], self.std[self_index]),
                (other_task.mean[other_index], other_task.std[other_index]),
            )
            lines += list_differences(self_moments, other_moments, f"mean and std of {name}")
        return lines

    def shared_targets(self, other_task: Task) -> list[str]:
        """List the targets that both tasks have, in the order of this one."""
        return [name for name in self.targets if name in other_task.outputs]

    def check_comparison(self, other_task: Task, names: tuple[str, str]) -> str:
        """Check that two models can be compared. Returns a note if some targets differ. Raises UsageError if the tasks
        differ or have no target in common."""
        super().check_comparison(other_task, names)
        if not (shared := self.shared_targets(other_task)):
            problem = f"{names[0]} {self.summary}, {names[1]} {other_task.summary}: they have no target in common"
            raise UsageError(problem, "compare runs that predict the same targets")
        has_same_targets = set(self.targets) == set(other_task.outputs)
        return (
            ""
            if has_same_targets
            else f"the runs predict different targets; they are compared on {format_first_names(shared, 8)}"
        )

    def compare_outputs(
        self, other_task: Task, outputs_a: ModelOutputs, outputs_b: ModelOutputs, data: Data
    ) -> Comparison:
        """Compare the predicted values of two models for the targets that both have."""
        from vitreous.tasks.comparison import ModelOutputs
        from vitreous.tasks.regression_metrics import compare_values

        assert isinstance(other_task, Regression)
        shared = self.shared_targets(other_task)
        aligned: list[ModelOutputs] = []
        for task, model_outputs in ((self, outputs_a), (other_task, outputs_b)):
            columns = [task.targets.index(name) for name in shared]
            values, labels = task.activate(model_outputs.logits)[:, columns], model_outputs.labels[:, columns]
            aligned.append(ModelOutputs(values, labels, model_outputs.readable))
        return compare_values(aligned[0], aligned[1], tuple(shared))

    def align_labels(self, split: Split, data: Data) -> Split:
        """Return the split with label values in the order of the targets. Raises DataError if the dataset lacks a
        target."""
        if not data.targets:
            problem = f"{data.name} has {'classes' if data.labelled else 'no labels'}, but the model {self.verb_phrase}"
            raise DataError(problem, f"use a dataset with the regression targets {format_first_names(self.targets, 8)}")
        if missing := [name for name in self.targets if name not in data.targets]:
            raise DataError(
                f"{data.name} has no values of {format_first_names(missing, 8)}, only of "
                f"{format_first_names(data.targets, 8)}",
                "use a dataset with all targets of the model",
            )
        columns = [data.targets.index(name) for name in self.targets]
        return split.take(np.arange(len(split)), split.labels[:, columns])

    def choose_examples(
        self, outputs: np.ndarray, split: Split, readable: np.ndarray, count: int
    ) -> dict[str, list[Example]]:
        """Choose the images with the largest error, in standard deviations and averaged over targets, from outputs (n,
        T). There are no unsure images."""
        values = self.activate(outputs)
        errors = np.abs(values - split.labels) / np.array(self.std)
        present = ~np.isnan(errors)
        mean = np.where(present, errors, 0).sum(1) / np.maximum(present.sum(1), 1)
        usable = np.flatnonzero(readable & present.any(1))
        worst = usable[np.argsort(-mean[usable], kind="stable")[:count]].tolist()
        names = self.targets if len(self.targets) > 1 else ("",)  # a single target is not named in captions
        labels, predictions = (
            [describe_values(names, target_values[sample].tolist()) for sample in worst]
            for target_values in (split.labels, values)
        )
        return {"worst": list(map(Example, worst, labels, predictions)), "unsure": []}

    def draw_charts(self, outputs: np.ndarray, labels: np.ndarray, readable: np.ndarray) -> list[ScatterChart]:
        """Return charts of the first targets from outputs and labels (n, T): predictions over labels, and residuals
        over predictions."""
        values, charts = self.activate(outputs), list[ScatterChart]()
        for target_index, name in enumerate(self.targets[:MAX_CHARTED_TARGETS]):
            indices = np.flatnonzero(readable & ~np.isnan(labels[:, target_index]))
            if not len(indices):
                continue
            indices = indices[np.linspace(0, len(indices) - 1, min(MAX_CHART_POINTS, len(indices))).astype(np.int64)]
            true, predicted = labels[indices, target_index], values[indices, target_index]
            charts.append(
                ScatterChart(f"{name}: predicted and true", "true", "predicted", x=true, y=predicted, diagonal=True)
            )
            residuals = predicted - true
            charts.append(
                ScatterChart(
                    f"{name}: residuals", "predicted", "predicted - true", x=predicted, y=residuals, level=True
                )
            )
        return charts

    def measure_agreement(self, ours: np.ndarray, theirs: np.ndarray) -> float:
        """Return the share of images whose outputs (n, T) differ by at most `AGREEMENT_TOLERANCE` standard deviations
        between a model and its exported file."""
        return float((np.abs(ours - theirs).max(1) <= AGREEMENT_TOLERANCE).mean())


def is_row_of_numbers(value: Json | tuple[Any, ...]) -> TypeGuard[Sequence[float]]:
    """Return whether a JSON value is a list of finite numbers."""
    return isinstance(value, list | tuple) and all(map(is_finite_number, value))


def is_finite_number(value: Any) -> bool:
    """Return whether a JSON value is a finite number."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
