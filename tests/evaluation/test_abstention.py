"""Coverage, risk and the area under their curve match explicit loops; pairs of confused classes."""

from __future__ import annotations

import numpy as np
import pytest

from vitreous.errors import UsageError
from vitreous.tasks.calibration import check_abstain, evaluate_abstention, selective_risk
from vitreous.tasks.classification_metrics import list_confused_pairs


def test_abstention_metrics_match_a_naive_loop():
    generator = np.random.default_rng(0)
    confidence = generator.permutation(np.linspace(0.2, 1, 400))
    right = generator.random(400) < confidence
    metrics = evaluate_abstention(confidence, right, 0.7)
    answered = [i for i in range(400) if confidence[i] >= 0.7]
    assert metrics["accepted"] == len(answered) and metrics["rejected"] == 400 - len(answered)
    assert metrics["coverage"] == pytest.approx(len(answered) / 400)
    assert metrics["top1"] == pytest.approx(np.mean([right[i] for i in answered]))
    best = sorted(range(400), key=lambda i: -confidence[i])
    risks = [1 - np.mean([right[i] for i in best[: n + 1]]) for n in range(400)]
    assert metrics["aurc"] == pytest.approx(np.mean(risks))
    assert metrics["curve"][-1] == pytest.approx([1.0, 1 - right.mean()]) and len(metrics["curve"]) == 100
    assert metrics["interval"][0] < metrics["top1"] < metrics["interval"][1]


def test_equal_confidences_do_not_depend_on_the_order():
    right = np.array([True, False, False, True])
    assert selective_risk(np.full(4, 0.5), right) == pytest.approx([0.5] * 4)
    confidence = np.array([0.9, 0.5, 0.5, 0.9])
    assert selective_risk(confidence, right) == pytest.approx(selective_risk(confidence, right[::-1].copy()))


@pytest.mark.parametrize("right", [True, False])
def test_abstention_with_all_correct_or_all_wrong_predictions(right):
    for images in (1, 5):
        metrics = evaluate_abstention(np.full(images, 0.6), np.full(images, right), 0.6)
        assert metrics["coverage"] == 1 and metrics["top1"] == right and metrics["aurc"] == (not right)
    none = evaluate_abstention(np.full(3, 0.6), np.full(3, right), 0.61)
    assert none["accepted"] == 0 and none["top1"] is None and none["interval"] is None


@pytest.mark.parametrize("below", [0.0, -0.1, 1.0001, float("nan")])
def test_invalid_abstention_thresholds_are_rejected(below):
    check_abstain(None)
    check_abstain(1.0)
    with pytest.raises(UsageError, match="abstain"):
        check_abstain(below)


def to_confusion_cells(counts):
    """The cells of a confusion matrix as rows of label, prediction, count."""
    return np.array([[label, prediction, count] for (label, prediction), count in np.ndenumerate(counts) if count])


def test_confused_pairs_match_a_hand_computed_example():
    counts = np.array([[5, 3, 0, 2], [4, 1, 0, 0], [0, 2, 7, 0], [0, 0, 0, 9]])
    pairs = list_confused_pairs(to_confusion_cells(counts), counts.sum(1), tuple("abcd"))
    assert pairs["ordered"] == [
        {"label": "b", "prediction": "a", "count": 4, "share": 0.8},
        {"label": "a", "prediction": "b", "count": 3, "share": 0.3},
        {"label": "c", "prediction": "b", "count": 2, "share": 2 / 9},
        {"label": "a", "prediction": "d", "count": 2, "share": 0.2},
    ]
    assert pairs["unordered"] == [
        {"classes": ["a", "b"], "count": 7, "share": 7 / 15},
        {"classes": ["b", "c"], "count": 2, "share": 2 / 14},
        {"classes": ["a", "d"], "count": 2, "share": 2 / 19},
    ]
    assert list_confused_pairs(to_confusion_cells(np.diag([3, 4])), np.array([3, 4]), ("a", "b")) == {
        "ordered": [],
        "unordered": [],
    }
    assert (
        len(
            list_confused_pairs(
                to_confusion_cells(np.ones((20, 20), int)), np.full(20, 20), tuple("abcdefghijklmnopqrst")
            )["ordered"]
        )
        == 10
    )
