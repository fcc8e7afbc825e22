"""The contract of tasks: what commands, files, pages and exports require of every task."""

from __future__ import annotations

import json
from dataclasses import fields

import numpy as np
import pytest

from vitreous.data.split import ArraySplit, Data
from vitreous.errors import UsageError, WeightsError
from vitreous.reports.options import EvaluateOptions
from vitreous.tasks.base import PredictionFormat, PredictionOptions, Task
from vitreous.tasks.classification import Classification
from vitreous.tasks.comparison import ModelOutputs
from vitreous.tasks.detection import Detection
from vitreous.tasks.features import FeatureExtraction
from vitreous.tasks.generation import Generation
from vitreous.tasks.metrics import METRICS
from vitreous.tasks.regression import Regression
from vitreous.tasks.segmentation import Segmentation
from vitreous.tasks.table import TASKS, task_from_json, task_to_json

CLASS_NAMES = ("ant", "=bee", "cät")
EXAMPLE_TASKS = {
    "classification": Classification(CLASS_NAMES),
    "multilabel": Classification(CLASS_NAMES, multilabel=True, loss="sigmoid"),
    "features": FeatureExtraction(),
    "segmentation": Segmentation(CLASS_NAMES),
    "detection": Detection(CLASS_NAMES, masks=True),
    "generation": Generation(CLASS_NAMES),
    "regression": Regression(CLASS_NAMES, (1.0, 2.0, 3.0), (1.0, 0.5, 2.0)),
}
#: labels of eight images for each image-level task
LABELS_BY_TASK = {
    "classification": np.arange(8) % 3,
    "multilabel": np.eye(3, dtype=np.float32)[np.arange(8) % 3],
    "regression": np.random.default_rng(1).normal(size=(8, 3)),
}
OUTPUTS = np.random.default_rng(0).normal(size=(8, 3)).astype(np.float32)
READABLE = np.arange(8) != 5


def test_every_task_has_an_example():
    assert {type(task) for task in EXAMPLE_TASKS.values()} == set(TASKS.values())
    assert all(task_class.name == name and issubclass(task_class, Task) for name, task_class in TASKS.items())


@pytest.mark.parametrize("name", EXAMPLE_TASKS)
def test_tasks_survive_a_json_round_trip(name):
    task = EXAMPLE_TASKS[name]
    document = json.loads(json.dumps(task_to_json(task)))
    assert task_from_json(document, "x") == task and isinstance(document["classes"], list)
    with pytest.raises(WeightsError, match="x: task other is not one of"):
        task_from_json(document | {"task": {"name": "other"}}, "x")


@pytest.mark.parametrize("name", EXAMPLE_TASKS)
def test_every_task_is_described(name):
    task = EXAMPLE_TASKS[name]
    assert task.verb_phrase.split()[0].endswith("s") and task.summary and task.hub_task.count("-") >= 1
    assert task.evaluate_options <= {field.name for field in fields(EvaluateOptions)}
    assert task.protocol and METRICS[task.primary_metric].is_primary


@pytest.mark.parametrize("name", [name for name, task in EXAMPLE_TASKS.items() if not task.outputs])
def test_tasks_without_image_outputs_reject_activate(name):
    with pytest.raises(NotImplementedError, match="has no image-level outputs"):
        EXAMPLE_TASKS[name].activate(OUTPUTS)


@pytest.mark.parametrize("name", LABELS_BY_TASK)
def test_predictions_are_written_in_every_format(name):
    task = EXAMPLE_TASKS[name]
    outputs = task.activate(OUTPUTS)
    form = task.prediction_format(PredictionOptions())
    assert isinstance(form, PredictionFormat) and outputs.shape == (8, 3) and outputs.dtype == np.float64
    predictions = [form.predict(row, f"{index}.png") for index, row in enumerate(outputs)]
    predictions.append(form.format_error("bad.png", "bad.png: no image"))
    for prediction in predictions:
        document = json.loads(json.dumps(form.to_dict(prediction)))
        assert document["path"] == prediction.path and document["error"] == prediction.error
        assert document.items() >= form.to_fields(prediction).items()
        cells = form.to_csv_rows(prediction)
        assert all(len(row) == len(form.csv_columns) for row in cells)
        assert [form.starts_image(row) for row in cells] == [True, *[False] * (len(cells) - 1)]
        assert not any(cell.startswith("=") for row in [form.csv_columns, *cells] for cell in row)
        assert isinstance(form.describe(prediction), str) and prediction.path in prediction._repr_html_()
    table = form.to_arrow_table(predictions)
    assert table.num_rows == 9 and {"path", "path_bytes", "error"} <= set(table.column_names)
    assert json.dumps(form.settings)


@pytest.mark.parametrize("name", LABELS_BY_TASK)
def test_an_evaluation_has_metrics_examples_and_charts(name):
    task, labels = EXAMPLE_TASKS[name], LABELS_BY_TASK[name]
    report = task.evaluate(OUTPUTS, labels, READABLE)
    assert (report.images, report.unreadable, report.primary) == (8, 1, task.primary_metric)
    assert report.metrics.keys() <= METRICS.keys() and report.metrics[task.primary_metric] is not None
    assert json.loads(json.dumps(report.summary() | report.details))
    split = ArraySplit(np.zeros((8, 2, 2), np.uint8), labels)
    examples = task.choose_examples(OUTPUTS, split, READABLE, 3)
    assert examples.keys() == {"worst", "unsure"} and len(examples["worst"]) == 3
    assert all(task.example_notes[group] for group, group_examples in examples.items() if group_examples)
    assert 5 not in {example.sample for group_examples in examples.values() for example in group_examples}
    assert all(len(chart.x) == len(chart.y) <= 7 for chart in task.draw_charts(OUTPUTS, labels, READABLE))


@pytest.mark.parametrize("name", LABELS_BY_TASK)
def test_a_model_compared_with_itself_has_no_difference(name):
    task, labels = EXAMPLE_TASKS[name], LABELS_BY_TASK[name]
    side = ModelOutputs(OUTPUTS, labels, READABLE)
    split = ArraySplit(np.zeros((8, 2, 2), np.uint8), labels)
    data = Data("x", classes=task.classes, splits={"test": split}, targets=task.label_columns)
    assert task.describe_differences(task) == [] and task.check_comparison(task, ("a", "b")) == ""
    comparison = task.compare_outputs(task, side, side, data)
    assert comparison.primary == task.primary_metric and set(comparison.differences.values()) == {0}
    assert comparison.verdict("a", "b").startswith("no significant difference: both have the same ")
    assert json.loads(json.dumps(comparison.details)) == comparison.details


@pytest.mark.parametrize("name", [name for name in EXAMPLE_TASKS if name != "multilabel"])
def test_models_of_other_tasks_are_not_compared(name):
    task, other_task = EXAMPLE_TASKS[name], EXAMPLE_TASKS["multilabel"]
    with pytest.raises(UsageError, match=r"^(one|two) "):
        task.check_comparison(other_task, ("one", "two"))
    assert task.describe_differences(other_task)


@pytest.mark.parametrize("name", LABELS_BY_TASK)
def test_agreement_is_one_only_for_equal_outputs(name):
    task = EXAMPLE_TASKS[name]
    assert task.measure_agreement(OUTPUTS, OUTPUTS) == 1 > task.measure_agreement(OUTPUTS, -OUTPUTS)
    hits = task.count_correct(OUTPUTS, LABELS_BY_TASK[name])
    assert hits is None or 0 <= hits <= 8
    assert json.dumps(task.export_metadata)
