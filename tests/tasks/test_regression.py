"""The regression task: metrics compared with explicit loops, its description, predictions in every format, its page."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
from scipy.stats import spearmanr
from sklearn.metrics import mean_absolute_error, r2_score, root_mean_squared_error

from vitreous.data.split import ArraySplit, Data
from vitreous.errors import DataError, NonFiniteError, UsageError, WeightsError
from vitreous.tasks.base import PredictionOptions
from vitreous.tasks.comparison import ModelOutputs
from vitreous.tasks.regression import Regression
from vitreous.tasks.regression_metrics import (
    REGRESSION_METRIC_KEYS,
    compare_values,
    compute_weighted_errors,
    evaluate_regression,
    rank_values,
)
from vitreous.tasks.table import task_from_json, task_to_json

TASK = Regression(("age", "height"), (40.0, 1.5), (10.0, 0.25))
NAN = math.nan


def make_labels_and_predictions(count=60, seed=0):
    """Labels of two targets with missing values, and predictions."""
    generator = np.random.default_rng(seed)
    labels = generator.normal([40, 1.5], [10, 0.25], (count, 2)).round(1)
    predicted = labels + generator.normal(0, [4, 0.2], (count, 2))
    labels[::7, 0], labels[::4, 1] = NAN, NAN
    return labels, predicted


def test_metrics_match_scikit_learn_and_scipy():
    labels, predicted = make_labels_and_predictions()
    readable = np.arange(60) % 11 != 0
    report = evaluate_regression(predicted, labels, TASK.targets, readable)
    for target_index, target in enumerate(report.details["targets"]):
        valid = readable & ~np.isnan(labels[:, target_index])
        y, p = labels[valid, target_index], predicted[valid, target_index]
        assert (target["target"], target["images"]) == (TASK.targets[target_index], valid.sum())
        assert target["mae"] == pytest.approx(mean_absolute_error(y, p)) and target["r2"] == pytest.approx(
            r2_score(y, p)
        )
        assert target["rmse"] == pytest.approx(root_mean_squared_error(y, p))
        assert target["spearman"] == pytest.approx(spearmanr(y, p).statistic)
        assert all(low <= target[key] <= high for key, (low, high) in target["interval"].items())
    targets = report.details["targets"]
    assert report.metrics == {
        key: pytest.approx(np.mean([target[key] for target in targets])) for key in REGRESSION_METRIC_KEYS
    }
    assert (report.images, report.unreadable, report.headline) == (60, 6, ("R²", report.metrics["r2"]))
    again = evaluate_regression(predicted, labels, TASK.targets, readable)
    assert again.summary() == report.summary()  # the bootstrap has a separate seed


def test_weighted_metrics_match_repeated_images():
    """The vectorised weights equal a loop over draws that repeats each drawn image."""
    labels, predicted = np.repeat([3.0, 5, 5, 8, 1, 5], 2), np.array([2.0, 5, 6, 6, 1, 2, 7, 7, 7, 1, 5, 4])
    counts = np.random.default_rng(1).integers(0, 4, (12, 5)).astype(np.float32)
    errors = compute_weighted_errors(labels, predicted, counts)
    for draw in range(5):
        drawn = np.repeat(np.arange(12), counts[:, draw].astype(int))
        y, p = labels[drawn], predicted[drawn]
        assert errors["mae"][draw] == pytest.approx(mean_absolute_error(y, p))
        assert errors["rmse"][draw] == pytest.approx(root_mean_squared_error(y, p))
        assert errors["r2"][draw] == pytest.approx(r2_score(y, p))
        assert errors["spearman"][draw] == pytest.approx(spearmanr(y, p).statistic)


def test_ranks_of_repeated_values_are_averaged():
    ranks = rank_values(np.array([5.0, 1, 5, 9]), np.array([[1, 2], [1, 0], [1, 1], [1, 3]]))
    assert ranks[:, 0].tolist() == [2.5, 1, 2.5, 4] and ranks[[0, 2, 3], 1].tolist() == [2, 2, 5]


def test_models_are_compared_on_images_readable_by_both():
    """Differences match scikit-learn's metrics, and the interval matches a loop over drawn images."""
    labels, predicted = make_labels_and_predictions(40)
    second_model = predicted + np.random.default_rng(5).normal(0, [1, 0.1], predicted.shape)
    readable = np.arange(40) % 9 != 0, np.arange(40) % 13 != 0
    sides = [ModelOutputs(side, labels, good) for side, good in zip((predicted, second_model), readable, strict=True)]
    comparison = compare_values(sides[0], sides[1], TASK.targets)
    for target_index, row in enumerate(comparison.details["targets"]):
        valid = readable[0] & readable[1] & ~np.isnan(labels[:, target_index])
        y, a, b = labels[valid, target_index], predicted[valid, target_index], second_model[valid, target_index]
        assert row["images"] == valid.sum() and row["metrics"]["mae"] == pytest.approx(
            [mean_absolute_error(y, a), mean_absolute_error(y, b)]
        )
        assert row["difference"]["r2"] == pytest.approx(r2_score(y, b) - r2_score(y, a))
        generator, draws = np.random.default_rng(0), []
        for _ in range(1000):
            rows = generator.integers(len(y), size=len(y))
            draws.append(r2_score(y[rows], b[rows]) - r2_score(y[rows], a[rows]))
        assert row["interval"]["r2"] == pytest.approx(np.percentile(draws, [2.5, 97.5]))
    rows = comparison.details["targets"]
    assert comparison.differences["r2"] == pytest.approx(np.mean([row["difference"]["r2"] for row in rows]))


def test_r2_is_not_compared_for_constant_labels():
    side = ModelOutputs(np.array([[1.0], [2.0]]), np.array([[3.0], [3.0]]), np.ones(2, bool))
    comparison = compare_values(side, side, ("age",))
    assert (
        comparison.metrics["r2"] == (None, None) and comparison.differences["mae"] == 0 and not comparison.significant
    )
    assert comparison.verdict("a", "b") == "cannot compare: R² is not defined for both models on these images"


def test_large_values_keep_all_digits():
    labels = 1e9 + np.arange(40.0)
    report = evaluate_regression(labels[:, None] + 1, labels[:, None], ("time",), np.ones(40, bool))
    assert report.metrics["r2"] == pytest.approx(r2_score(labels - 1e9, labels - 1e9 + 1))
    assert report.metrics["mae"] == 1 and report.intervals["mae"] == (1, 1)


@pytest.mark.parametrize(("labels", "defined"), [
    ([], ()), ([2.0], ("mae", "rmse")), ([2.0, 2.0, 2.0], ("mae", "rmse")), ([NAN, NAN], ()),
])  # fmt: skip
def test_undefined_metrics_are_none(labels, defined):
    table = np.array(labels, np.float64).reshape(-1, 1)
    report = evaluate_regression(np.ones_like(table), table, ("a",), np.ones(len(table), bool))
    assert {key for key, value in report.metrics.items() if value is not None} == set(defined)
    assert json.loads(json.dumps(report.summary())) and report.score[0] == -math.inf


def test_non_finite_outputs_are_rejected():
    with pytest.raises(NonFiniteError, match="not finite"):
        TASK.evaluate(np.full((2, 2), np.nan), np.zeros((2, 2)), np.ones(2, bool))
    report = TASK.evaluate(np.array([[np.nan] * 2, [0, 0]]), np.zeros((2, 2)), np.array([False, True]))
    assert report.metrics["mae"] == pytest.approx((40 + 1.5) / 2)


def test_the_task_survives_a_json_round_trip():
    assert task_from_json(json.loads(json.dumps(task_to_json(TASK))), "x") == TASK
    assert TASK.outputs == TASK.label_columns == ("age", "height")


@pytest.mark.parametrize(("change", "message"), [
    ({"targets": []}, r"x: targets \[\]"), ({"targets": "age"}, "x: targets age"), ({"mean": [1]}, r"x: mean \[1\]"),
    ({"std": [1, 0]}, r"x: std \[1, 0\]"), ({"std": [1, True]}, "std"), ({"mean": [1, None]}, "mean"),
])  # fmt: skip
def test_a_damaged_description_is_rejected(change, message):
    with pytest.raises(WeightsError, match=message):
        task_from_json(task_to_json(TASK) | change, "x")


def test_predictions_are_written_in_every_format():
    form = TASK.prediction_format(PredictionOptions())
    (output,) = TASK.activate(np.array([[1.0, -2.0]], np.float32))
    assert output.tolist() == [50, 1]
    prediction, bad = form.predict(output, "=a.png"), form.format_error("b.png", "b.png: no image")
    assert form.to_dict(prediction) == {"path": "=a.png", "values": {"age": 50, "height": 1}, "error": None}
    assert form.to_dict(bad) == {"path": "b.png", "values": {}, "error": "b.png: no image"}
    assert form.csv_columns == ["path", "age", "height", "error"]
    assert form.to_csv_rows(prediction) == [["'=a.png", "50", "1", ""]] and form.to_csv_rows(bad) == [
        ["b.png", "", "", "b.png: no image"]
    ]
    assert form.describe(prediction) == "age 50  height 1" and form.starts_image(["a", "7"])
    table = form.to_arrow_table([prediction, bad]).to_pydict()
    assert table["age"] == [50, None] and table["error"] == [None, "b.png: no image"]
    assert "age 50  height 1" in prediction._repr_html_() and "no image" in bad._repr_html_()


@pytest.mark.parametrize("options", [{"top": 3}, {"threshold": 0.5}, {"abstain": 0.5}])
def test_classification_options_are_rejected(options):
    with pytest.raises(UsageError, match=f"{next(iter(options))} is for image classifiers"):
        TASK.prediction_format(PredictionOptions(**options))


def make_data(labels, **fields):
    """A dataset of black images with these labels."""
    return Data("x", splits={"train": ArraySplit(np.zeros((len(labels), 2, 2), np.uint8), labels)}, **fields)


def test_targets_are_matched_by_name():
    data = make_data(np.array([[1.0, 2, 3], [4, 5, 6]]), classes=(), targets=("height", "weight", "age"))
    assert TASK.align_labels(data.splits["train"], data).labels.tolist() == [[3, 1], [6, 4]]
    other_data = make_data(np.array([[1.0]]), classes=(), targets=("weight",))
    with pytest.raises(DataError, match="x has no values of age, height, only of weight") as error:
        TASK.align_labels(other_data.splits["train"], other_data)
    assert error.value.hint == "use a dataset with all targets of the model"
    classes = make_data(np.array([0, 1]), classes=("a", "b"))
    with pytest.raises(DataError, match="x has classes, and the model predicts values"):
        TASK.align_labels(classes.splits["train"], classes)


def test_worst_images_have_the_largest_standardised_error():
    labels = np.array([[40.0, 1.5], [60, NAN], [40, 1.0], [NAN, NAN], [90, 1.5]])
    split = ArraySplit(np.zeros((5, 2, 2), np.uint8), labels)
    chosen = TASK.choose_examples(np.zeros((5, 2)), split, np.array([True] * 4 + [False]), 8)
    assert [example.sample for example in chosen["worst"]] == [1, 2, 0] and chosen["unsure"] == []
    worst = chosen["worst"][0]
    assert (worst.label, worst.prediction, worst.probability) == ("age 60  height –", "age 40  height 1.5", None)


def test_charts_show_readable_images_with_a_value():
    labels, _ = make_labels_and_predictions()
    charts = TASK.draw_charts(np.zeros((60, 2)), labels, np.arange(60) > 0)
    assert [chart.title for chart in charts] == [
        "age: predicted and true", "age: residuals", "height: predicted and true", "height: residuals"
    ]  # fmt: skip
    assert len(charts[0].x) == (~np.isnan(labels[1:, 0])).sum() and (charts[0].y == 40).all() and charts[0].diagonal
    assert np.allclose(charts[1].y, 40 - charts[0].x) and charts[1].level


def test_agreement_counts_images_within_the_tolerance():
    ours = np.zeros((4, 2))
    assert TASK.measure_agreement(ours, ours + [[0, 0], [0.04, -0.04], [0.06, 0], [0, 0]]) == 0.75
    assert TASK.count_correct(ours, ours) is None
