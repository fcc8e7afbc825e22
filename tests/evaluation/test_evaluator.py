"""Evaluators: metrics from all outputs of a model or from shards, and comparison of two reports."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from sklearn.model_selection import LeaveOneOut, cross_val_score
from sklearn.neighbors import KNeighborsClassifier

from vitreous.data.loader import EvalLoader
from vitreous.data.modalities.images import ImagePreprocess
from vitreous.data.split import ArraySplit
from vitreous.errors import DataError
from vitreous.evaluation.evaluator import SplitOutputs, TaskEvaluator, compute_outputs
from vitreous.evaluation.knn import KNNEvaluator
from vitreous.inference.engine import TorchEngine
from vitreous.models.zoo import create_untrained_model
from vitreous.tasks.classification import Classification
from vitreous.tasks.classification_metrics import evaluate_classification
from vitreous.tasks.report import Report, get_primary_key, get_report_score

CLASSES = ("dark", "grey", "light")
PREPROCESS = ImagePreprocess((16, 16), 1, (0.5,), (0.5,))


def make_split(count, seed):
    """Images whose brightness depends on their class, with noise, so that some are misclassified."""
    generator = np.random.default_rng(seed)
    labels = generator.integers(0, 3, count)
    pixels = generator.normal(60 + 60 * labels[:, None, None], 40, (count, 16, 16)).clip(0, 255)
    return ArraySplit(pixels.astype(np.uint8), labels.astype(np.int64))


def make_engine(classes):
    torch.manual_seed(0)
    return TorchEngine(create_untrained_model("Ti/8", 16, classes, channels=1), PREPROCESS, precision="fp32")


def make_clustered_outputs(split, seed=3):
    """Outputs (n, 2) near the centre of their class; the second image is unreadable."""
    angles = split.labels * 2 + np.random.default_rng(seed).normal(0, 0.6, len(split))
    readable = np.ones(len(split), dtype=bool)
    readable[1] = False
    return SplitOutputs(split, np.stack([np.cos(angles), np.sin(angles)], 1).astype(np.float32), readable)


def test_classifiers_are_evaluated_from_their_logits():
    split, engine, evaluator = make_split(70, 0), make_engine(3), TaskEvaluator(Classification(CLASSES))
    outputs = compute_outputs(evaluator, engine, split, workers=0)
    report = evaluator(engine, split, workers=0)
    assert outputs.outputs.shape == (70, 3) and outputs.outputs.dtype == np.float32
    assert report.metrics == evaluate_classification(outputs.outputs, split.labels, CLASSES).metrics
    assert (evaluator.name, evaluator.better) == (report.primary, report.better) == ("top1", "higher")
    labels = np.eye(3, dtype=np.float32)[split.labels]
    multilabel = TaskEvaluator(Classification(CLASSES, multilabel=True))
    assert (
        multilabel.name == multilabel.report(replace(outputs, split=ArraySplit(split.pixels, labels))).primary == "map"
    )


def test_an_empty_shard_has_outputs_of_the_same_width():
    evaluator, engine, empty = (
        TaskEvaluator(Classification(CLASSES)),
        make_engine(3),
        make_split(4, 0).take(np.arange(0)),
    )
    rows, bad = evaluator.outputs(engine, EvalLoader(empty, PREPROCESS))
    assert rows.shape == (0, 3) and rows.dtype == np.float32 and not bad


def test_knn_evaluation_matches_scikit_learn():
    train, val = make_split(60, 1), make_split(40, 2)
    evaluator = KNNEvaluator(CLASSES, train, k=5)
    assert evaluator.required_splits(val) == (val, train)
    memory, evaluated = make_clustered_outputs(train), make_clustered_outputs(val, 4)
    report = evaluator.report(evaluated, memory)
    votes = KNeighborsClassifier(
        5, metric="cosine", weights=lambda distance: np.exp((1 - distance) / 0.07), algorithm="brute"
    ).fit(memory.outputs[memory.readable], train.labels[memory.readable])
    right = (votes.predict(evaluated.outputs) == val.labels) & evaluated.readable
    assert 0.5 < right.mean() < 1
    assert report.metrics == {"knn_top1": right.mean()} and report.images == 40 and report.unreadable == 1
    assert report.headline == ("k-NN top-1", right.mean()) and evaluator.name == report.primary
    assert report.intervals["knn_top1"][0] < right.mean() < report.intervals["knn_top1"][1]


def test_knn_without_a_memory_split_is_leave_one_out():
    val = make_split(40, 2)
    evaluated = make_clustered_outputs(val)
    report = KNNEvaluator(CLASSES, k=3).report(evaluated)
    votes = KNeighborsClassifier(
        3, metric="cosine", weights=lambda distance: np.exp((1 - distance) / 0.07), algorithm="brute"
    )
    is_readable = evaluated.readable
    right = cross_val_score(votes, evaluated.outputs[is_readable], val.labels[is_readable], cv=LeaveOneOut()).sum()
    assert report.metrics["knn_top1"] == pytest.approx(right / 40)


def test_a_headless_model_is_evaluated_by_its_features():
    train, val = make_split(90, 1), make_split(30, 2)
    report = KNNEvaluator(CLASSES, train)(make_engine(0), val, workers=0)
    assert report.metrics["knn_top1"] > 0.6


def test_neighbours_need_a_readable_image():
    split = make_split(2, 0)
    outputs = make_clustered_outputs(split)
    with pytest.raises(DataError, match="nearest neighbours need labelled images"):
        KNNEvaluator(CLASSES).report(outputs)


def test_better_reports_have_larger_scores():
    def report(value, nll, primary="top1", better="higher"):
        return Report(10, 0, {primary: value, "nll": nll}, {}, [], None, primary, better)

    ascending = [report(None, 0.1), report(0.4, None), report(0.4, float("nan")), report(0.4, 0.9), report(0.4, 0.5)]
    ascending.append(report(0.5, 2.0))
    scores = [report_item.score for report_item in ascending]
    assert scores == sorted(scores) and scores[3] < scores[4] < scores[5] and scores[1] == scores[2]
    distances = [report(value, None, "fid", "lower").score for value in (None, 30.0, 12.0)]
    assert distances[0] < distances[1] < distances[2]
    assert get_report_score(report(0.4, 0.5).summary()) == report(0.4, 0.5).score
    # summaries of earlier versions do not contain the name of the primary metric
    assert get_primary_key({"top1": 0.5, "nll": 1.0}) == "top1" and get_primary_key({"top1": None, "map": 0.2}) == "map"
