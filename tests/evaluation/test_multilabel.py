"""Multi-label metrics: scikit-learn's, hand-computed examples, unreadable images, and intervals."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
from sklearn import metrics

from vitreous.tasks.classification_metrics import evaluate_classification
from vitreous.tasks.multilabel_metrics import compute_class_ap, rank_images

CLASS_NAMES = tuple("abcdef")


def draw_logits_and_labels(images=300, ties=False, seed=0):
    """(n, K) informative logits and (n, K) labels of rare and common classes."""
    generator = np.random.default_rng(seed)
    labels = (generator.random((images, 6)) < [0.02, 0.1, 0.2, 0.3, 0.5, 0.9]).astype(np.float32)
    logits = (generator.normal(size=labels.shape) + 2 * labels - 1).astype(np.float32)
    return (logits.round() if ties else logits), labels


@pytest.mark.parametrize("ties", [False, True])
def test_metrics_match_scikit_learn(ties):
    logits, labels = draw_logits_and_labels(ties=ties)
    report = evaluate_classification(logits, labels, CLASS_NAMES)
    p = 1 / (1 + np.exp(-logits.astype(np.float64)))
    assert report.metrics["map"] == pytest.approx(metrics.average_precision_score(labels, logits, average="macro"))
    assert [class_metrics["ap"] for class_metrics in report.per_class] == pytest.approx(
        list(metrics.average_precision_score(labels, logits, average=None))
    )
    for name in ("macro", "micro"):
        assert report.metrics[f"{name}_f1"] == pytest.approx(
            metrics.f1_score(labels, p > 0.5, average=name, zero_division=0)
        )
    for name, score in (
        ("precision", metrics.precision_score),
        ("recall", metrics.recall_score),
        ("f1", metrics.f1_score),
    ):
        assert [class_metrics[name] for class_metrics in report.per_class] == pytest.approx(
            list(score(labels, p > 0.5, average=None))
        )
    losses = [metrics.log_loss(labels[:, c], p[:, c], labels=[0, 1]) for c in range(6)]
    assert report.metrics["nll"] == pytest.approx(sum(losses))
    assert report.headline == ("mAP", report.metrics["map"])
    assert report.confusion is None and report.metrics["top1"] is None


def compute_class_average_precision(scores, positive, counts=None):
    scores, positive = np.array(scores, float), np.array(positive, bool)
    drawn = np.ones((len(scores), 1), np.float32) if counts is None else np.array(counts, np.float32)[:, None]
    return float(compute_class_ap(rank_images(scores, positive), drawn)[0])


def test_average_precision_matches_hand_computed_examples():
    assert compute_class_average_precision([4, 3, 2, 1], [1, 0, 1, 0]) == pytest.approx((1 + 2 / 3) / 2)
    assert compute_class_average_precision([1, 1, 1, 1], [1, 0, 0, 0]) == pytest.approx(
        1 / 4
    )  # equal scores share one threshold
    assert compute_class_average_precision([2, 2, 1, 1], [1, 0, 1, 0]) == pytest.approx((1 / 2 + 2 / 4) / 2)
    assert compute_class_average_precision([1, 2, 3], [0, 0, 0]) == 0.0
    # a sample with score -inf is never found
    assert compute_class_average_precision([3, 2, -math.inf], [1, 0, 1]) == pytest.approx(1 / 2)


def test_bootstrap_counts_equal_repeated_images():
    generator = np.random.default_rng(3)
    scores, positive = generator.integers(0, 9, 40).astype(float), generator.random(40) < 0.3
    counts = generator.integers(0, 4, 40)
    assert compute_class_average_precision(scores, positive, counts) == pytest.approx(
        compute_class_average_precision(np.repeat(scores, counts), np.repeat(positive, counts))
    )


def test_unreadable_images_count_as_missed_and_have_no_loss():
    logits, labels = draw_logits_and_labels()
    readable = np.ones(300, bool)
    readable[:60] = False
    logits[:60] = 100.0  # logits of unreadable images are ignored
    report, all_readable = (
        evaluate_classification(logits, labels, CLASS_NAMES, readable),
        evaluate_classification(logits[60:], labels[60:], CLASS_NAMES),
    )
    assert (report.images, report.unreadable) == (300, 60)
    assert report.metrics["nll"] == pytest.approx(all_readable.metrics["nll"])
    for class_metrics, expected, num_positives in zip(
        report.per_class, all_readable.per_class, labels.sum(0), strict=True
    ):
        assert class_metrics["images"] == num_positives
        assert class_metrics["ap"] == pytest.approx(expected["ap"] * expected["images"] / num_positives)
        assert class_metrics["recall"] == pytest.approx(expected["recall"] * expected["images"] / num_positives)
        assert class_metrics["precision"] == expected["precision"]


def test_classes_without_images_are_excluded_from_means():
    logits, labels = draw_logits_and_labels()
    labels[:, 2] = 0
    report = evaluate_classification(logits, labels, CLASS_NAMES)
    assert report.per_class[2]["ap"] is None and report.per_class[2]["recall"] is None
    nonempty = [class_metrics for class_metrics in report.per_class if class_metrics["images"]]
    assert report.metrics["map"] == pytest.approx(np.mean([class_metrics["ap"] for class_metrics in nonempty]))
    assert report.metrics["macro_f1"] == pytest.approx(np.mean([class_metrics["f1"] for class_metrics in nonempty]))


def test_degenerate_predictions_give_serialisable_reports():
    """Zero logits predict no class; no readable images, one image and no positives are accepted."""
    _, labels = draw_logits_and_labels(20)
    for images, readable in ((20, True), (1, True), (20, False)):
        report = evaluate_classification(
            np.zeros((images, 6), np.float32), labels[:images], CLASS_NAMES, np.full(images, readable)
        )
        assert report.metrics["micro_f1"] == 0 and all(
            class_metrics["precision"] is None for class_metrics in report.per_class
        )
        assert json.loads(json.dumps(report.summary(), allow_nan=False)) == report.summary()
    report = evaluate_classification(np.zeros((5, 6), np.float32), np.zeros((5, 6), np.float32), CLASS_NAMES)
    assert report.headline == ("mAP", 0.0)


def test_intervals_contain_the_metrics_and_are_deterministic():
    logits, labels = draw_logits_and_labels(600)
    report, repeated = (
        evaluate_classification(logits, labels, CLASS_NAMES),
        evaluate_classification(logits, labels, CLASS_NAMES),
    )
    assert report.intervals == repeated.intervals
    for name in ("map", "macro_f1", "micro_f1", "nll"):
        low, high = report.intervals[name]
        assert low < report.metrics[name] < high and high - low < 0.5, name
    assert report.intervals["top1"] is None


def test_the_map_interval_has_its_nominal_coverage():
    logits, labels = draw_logits_and_labels(6000, seed=5)
    truth = metrics.average_precision_score(labels[:, 1:], logits[:, 1:])
    covered = 0
    for start in range(0, 6000, 200):
        sample_slice = slice(start, start + 200)
        low, high = evaluate_classification(
            logits[sample_slice, 1:], labels[sample_slice, 1:], CLASS_NAMES[1:]
        ).intervals["map"]
        covered += low <= truth <= high
    assert covered >= 25  # of 30; 28 or 29 are expected


def test_the_chunked_bootstrap_matches_the_full_bootstrap(monkeypatch):
    full = evaluate_classification(*draw_logits_and_labels(100), CLASS_NAMES).intervals
    monkeypatch.setattr("vitreous.tasks.intervals.BOOTSTRAP_CHUNK", 700)
    chunked = evaluate_classification(*draw_logits_and_labels(100), CLASS_NAMES).intervals
    for name in ("map", "macro_f1", "micro_f1", "nll"):
        assert chunked[name] == pytest.approx(full[name])


def test_single_label_reports_lead_with_top1():
    report = evaluate_classification(np.eye(3)[[0, 1, 1]], np.array([0, 1, 2]), ("a", "b", "c"))
    assert report.headline == ("top-1", pytest.approx(2 / 3))
