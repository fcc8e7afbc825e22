"""Regression: one or several values per image, for example age, count or yield.

The head's outputs are standardised: value = output x std + mean, with mean and standard deviation of each target over
the training images, stored in `model.json`. In shapes, n is images and T targets.
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

AGREEMENT_TOLERANCE = 0.05  # predictions of a model and its export are equal within this many standard deviations
MAX_CHARTED_TARGETS = 3  # targets with separate charts on a page
MAX_CHART_POINTS = 2_000  # points of a chart, evenly sampled


@dataclass(frozen=True)
class ValuePrediction:
    """One image's prediction: the value of each target, in its unit; or the error."""

    column: ClassVar[str] = "values"

    path: str
    targets: tuple[str, ...] = ()
    values: tuple[float, ...] = ()
    error: str | None = None

    @property
    def names(self) -> tuple[str, ...]:
        """The target names, under the attribute name that other predictions use for classes."""
        return self.targets

    def _repr_html_(self) -> str:
        return format_predictions_html([self])

    def cell_html(self) -> str:
        """Return the values as text."""
        return describe_values(self.targets, self.values)


def describe_values(targets: Sequence[str], values: Sequence[float]) -> str:
    """Format values with the names of their targets: `weight 3.52  height 1.8`; a dash for NaN."""
    pairs = zip(targets, values, strict=True)
    return "  ".join(f"{name} {'–' if math.isnan(value) else format(value, '.5g')}".strip() for name, value in pairs)


@dataclass(frozen=True)
class ValueFormat(PredictionFormat):
    """The values of the `targets`, one column each."""

    column: ClassVar[str] = "values"

    targets: tuple[str, ...]

    @property
    def csv_columns(self) -> list[str]:
        """List path, one column per target, and error."""
        return ["path", *(escape_formula(name) for name in self.targets), "error"]

    def predict(self, image_outputs: np.ndarray, path: str) -> ValuePrediction:
        """Return the prediction for an image from its (T,) values."""
        return ValuePrediction(path, self.targets, tuple(map(float, image_outputs)))

    def format_error(self, path: str, error: str) -> ValuePrediction:
        """Return the prediction for an unreadable image."""
        return ValuePrediction(path, error=error)

    def to_fields(self, prediction: ValuePrediction) -> dict[str, Any]:
        """Return the value of each target; empty for an error."""
        return {"values": dict(zip(prediction.targets, prediction.values, strict=True))}

    def describe(self, prediction: ValuePrediction) -> str:
        """Format the values with five significant digits."""
        return describe_values(prediction.targets, prediction.values)

    def to_csv_rows(self, prediction: ValuePrediction) -> list[list[str]]:
        """Return one row: path, values with seven significant digits, error."""
        values = [f"{value:.7g}" for value in prediction.values] or [""] * len(self.targets)
        return [[escape_formula(prediction.path), *values, escape_formula(prediction.error or "")]]

    def to_arrow_table(self, predictions: Sequence[ValuePrediction]) -> pa.Table:
        """Return the same columns as an Arrow table."""
        import pyarrow as pa

        columns = build_path_columns(predictions)
        for target_index, name in enumerate(self.targets):
            values = [prediction.values[target_index] if prediction.values else None for prediction in predictions]
            columns[name] = pa.array(values, pa.float64())
        return pa.table(columns | {"error": build_error_column(predictions)})


@dataclass(frozen=True)
class Regression(Task):
    """Values of named `targets` in their order; `mean` and `std`, (T,) each, are over the training images."""

    name: ClassVar[str] = "regression"
    verb_phrase: ClassVar[str] = "predicts values of images"
    hub_task: ClassVar[str] = "image-feature-extraction"  # the Hub has no task for regression
    protocol: ClassVar[str] = "regression"
    # scale-free, so that the mean over several targets is meaningful; for one target it ranks models as the mean
    # squared error does
    primary: ClassVar[str] = "r2"
    output_noun: ClassVar[str] = "targets"

    classes: tuple[str, ...] = field(default=(), init=False, repr=False)

    targets: tuple[str, ...]
    mean: tuple[float, ...]
    std: tuple[float, ...]

    def settings(self) -> dict[str, Any]:
        """Return targets, means and standard deviations; no classes."""
        return {"classes": [], "targets": list(self.targets), "mean": list(self.mean), "std": list(self.std)}

    @classmethod
    def from_settings(cls, settings: dict[str, Any], classes: tuple[str, ...], origin: str) -> Self:
        """Create a regression from stored settings. Raises WeightsError unless each target has a mean and a standard
        deviation."""
        targets: Json | tuple[Any, ...] = settings.get("targets")
        if not isinstance(targets, list | tuple) or not targets or not all(isinstance(name, str) for name in targets):
            raise WeightsError(f"{origin}: targets {targets}", "targets must be a list of names")
        statistics = list[tuple[float, ...]]()
        for key in ("mean", "std"):
            values = settings.get(key)
            statistics.append(tuple(map(float, values)) if is_row_of_numbers(values) else ())
            if len(statistics[-1]) != len(targets) or (key == "std" and min(statistics[-1]) <= 0):
                raise WeightsError(
                    f"{origin}: {key} {values}", f"{key} must have {len(targets)} numbers, one per target"
                )
        mean, std = statistics
        return cls(tuple(targets), mean, std)

    @property
    def example_notes(self) -> dict[str, str]:
        """The caption of the worst images."""
        return {
            "worst": "Images with the largest error in standard deviations of the target (mean of several targets)."
        }

    @property
    def outputs(self) -> tuple[str, ...]:
        """The target names."""
        return self.targets

    @property
    def label_columns(self) -> tuple[str, ...]:
        """The target names."""
        return self.targets

    @property
    def summary(self) -> str:
        """The target names, as text."""
        return f"predicts {format_first_names(self.targets, 8)}"

    @property
    def export_metadata(self) -> dict[str, Any]:
        """Return the target names, means and standard deviations: value = output x std + mean."""
        target_metadata = {"targets": self.targets, "target_mean": self.mean, "target_std": self.std}
        return {**super().export_metadata, **target_metadata}

    def get_version_fields(self) -> list[Any]:
        """Return no classes, and the settings."""
        return [*super().get_version_fields(), self.settings()]

    def activate(self, outputs: np.ndarray) -> np.ndarray:
        """Convert (n, T) standardised outputs to (n, T) float64 values in the targets' units."""
        return outputs.astype(np.float64) * np.array(self.std) + np.array(self.mean)

    def prediction_format(self, options: PredictionOptions) -> ValueFormat:
        """Return a format with one value per target. Raises UsageError for options of classifiers."""
        reject_classifier_options(self, options)
        return ValueFormat(self.targets)

    def evaluate(self, outputs: np.ndarray, labels: np.ndarray, readable: np.ndarray) -> Report:
        """Compute R2, MAE, RMSE and Spearman's correlation of each target, and their means."""
        from vitreous.tasks.regression_metrics import evaluate_regression

        return evaluate_regression(self.activate(outputs), labels, self.targets, readable)

    def describe_differences(self, other_task: Task) -> list[str]:
        """List targets that only one model has, and targets with different means or standard deviations."""
        lines = super().describe_differences(other_task)
        if lines or not isinstance(other_task, Regression):
            return lines
        for own_index, name in enumerate(self.targets):
            other_index = other_task.targets.index(name)
            own_stats, other_stats = (
                (self.mean[own_index], self.std[own_index]),
                (other_task.mean[other_index], other_task.std[other_index]),
            )
            lines += list_differences(own_stats, other_stats, f"mean and std of {name}")
        return lines

    def shared_targets(self, other_task: Task) -> list[str]:
        """List the targets of both models, in the order of this one."""
        return [name for name in self.targets if name in other_task.outputs]

    def check_comparison(self, other_task: Task, names: tuple[str, str]) -> str:
        """Return a note if some targets differ. Raises UsageError if the models have no target in common."""
        super().check_comparison(other_task, names)
        if not (shared := self.shared_targets(other_task)):
            problem = f"{names[0]} {self.summary}, {names[1]} {other_task.summary}: they have no target in common"
            raise UsageError(problem, "compare runs that predict the same targets")
        has_same_targets = set(self.targets) == set(other_task.outputs)
        return (
            ""
            if has_same_targets
            else f"the runs predict different targets; compared on {format_first_names(shared, 8)}"
        )

    def compare_outputs(
        self, other_task: Task, outputs_a: ModelOutputs, outputs_b: ModelOutputs, data: Data
    ) -> Comparison:
        """Compare the values of the targets that both models have."""
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
        """Return label values in the order of the targets. Raises DataError for data without values of a target."""
        if not data.targets:
            problem = f"{data.name} has {'classes' if data.labelled else 'no labels'}, and the model {self.verb_phrase}"
            raise DataError(problem, f"use a dataset with the regression targets {format_first_names(self.targets, 8)}")
        if missing := [name for name in self.targets if name not in data.targets]:
            raise DataError(
                f"{data.name} has no values of {format_first_names(missing, 8)}",
                f"it has values of {format_first_names(data.targets, 8)}",
            )
        columns = [data.targets.index(name) for name in self.targets]
        return split.take(np.arange(len(split)), split.labels[:, columns])

    def choose_examples(
        self, outputs: np.ndarray, split: Split, readable: np.ndarray, count: int
    ) -> dict[str, list[Example]]:
        """Choose the images with the largest error in standard deviations, the mean over targets; (n, T) outputs."""
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
        """Return charts of the first targets: predictions over labels, and residuals over predictions."""
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
        """Return the share of images with all values within `AGREEMENT_TOLERANCE` standard deviations."""
        return float((np.abs(ours - theirs).max(1) <= AGREEMENT_TOLERANCE).mean())


def is_row_of_numbers(value: Json | tuple[Any, ...]) -> TypeGuard[Sequence[float]]:
    """Return whether a JSON value is a list of finite numbers."""
    return isinstance(value, list | tuple) and all(map(is_finite_number, value))


def is_finite_number(value: Any) -> bool:
    """Return whether a JSON value is a finite number."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
