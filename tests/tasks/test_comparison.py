"""Comparison of two models on the same images: checked with scipy, explicit loops and simulations."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.stats import binomtest

from vitreous.tasks.classification_metrics import evaluate_classification
from vitreous.tasks.comparison import (
    ModelOutputs,
    compare_classifiers,
    format_p_value,
    mcnemar_p_value,
    paired_accuracy_interval,
)


def simulate_outputs(
    images: int, sharp: float, seed: int, classes: int = 4, is_multilabel: bool = False
) -> ModelOutputs:
    """Outputs of a model whose logits lean towards the label by `sharp`; the labels are those of seed 0."""
    generator = np.random.default_rng(0)
    labels = generator.integers(0, classes, images)
    target = np.eye(classes)[labels]
    if is_multilabel:
        target = (generator.random((images, classes)) < 0.4).astype(float)
    logits = np.random.default_rng(seed).normal(size=(images, classes)) + sharp * target
    return ModelOutputs(logits, target.astype(np.float32) if is_multilabel else labels, np.ones(images, bool))


@pytest.mark.parametrize("cells", [(0, 0), (1, 0), (3, 3), (5, 14), (40, 12), (700, 610), (30_000, 31_000), (0, 2000)])
def test_mcnemar_matches_the_binomial_test(cells):
    expected = binomtest(cells[0], sum(cells)).pvalue if sum(cells) else 1.0
    assert mcnemar_p_value(*cells) == pytest.approx(expected, rel=1e-9)
    assert mcnemar_p_value(*cells) == mcnemar_p_value(*cells[::-1])


def test_counts_and_metrics_match_each_model_alone():
    a, b = simulate_outputs(500, 1.0, 1), simulate_outputs(500, 1.5, 2)
    comparison = compare_classifiers(a, b)
    right = [outputs.logits.argmax(1) == outputs.labels for outputs in (a, b)]
    assert comparison.counts == {
        "both": (right[0] & right[1]).sum(),
        "only_a": (right[0] & ~right[1]).sum(),
        "only_b": (~right[0] & right[1]).sum(),
        "neither": (~right[0] & ~right[1]).sum(),
    }
    for index, outputs in enumerate((a, b)):
        report = evaluate_classification(outputs.logits, outputs.labels, tuple("abcd"))
        for name in ("top1", "nll", "ece"):
            assert comparison.metrics[name][index] == pytest.approx(report.metrics[name]), name
    for name, (first, second) in comparison.metrics.items():
        low, high = comparison.intervals[name]
        assert comparison.differences[name] == pytest.approx(second - first) and low <= second - first <= high, name
    assert comparison.significant and comparison.verdict("one", "two").startswith("two is better by ")


def test_the_bootstrap_pairs_the_images_of_both_models():
    """Adding a constant to each image's loss changes the difference by that constant in every bootstrap draw."""
    a = simulate_outputs(300, 1.0, 1)
    wide = ModelOutputs(np.hstack([a.logits, np.full((300, 1), -np.inf)]), a.labels, a.readable)
    # each p is halved
    flat = ModelOutputs(np.hstack([a.logits, np.logaddexp.reduce(a.logits, 1, keepdims=True)]), a.labels, a.readable)
    low, high = compare_classifiers(wide, flat).intervals["nll"]
    assert low == pytest.approx(np.log(2)) and high == pytest.approx(np.log(2))


def test_swapping_the_models_swaps_the_sign():
    a, b = simulate_outputs(200, 1.0, 1), simulate_outputs(200, 1.4, 2)
    forward, backward = compare_classifiers(a, b), compare_classifiers(b, a)
    assert forward.p == backward.p
    for name in forward.differences:
        assert forward.differences[name] == pytest.approx(-backward.differences[name])
        assert forward.intervals[name] == pytest.approx(tuple(-end for end in backward.intervals[name][::-1]))


def test_the_paired_interval_has_its_nominal_coverage():
    generator, covered = np.random.default_rng(0), 0
    for _ in range(2000):
        gained, lost, _ = generator.multinomial(150, (0.12, 0.06, 0.82))
        low, high = paired_accuracy_interval(gained, lost, 150)
        covered += low <= 0.06 <= high
    assert 0.935 < covered / 2000 < 0.97


def test_multilabel_models_are_compared_by_map():
    a, b = simulate_outputs(300, 0.5, 1, is_multilabel=True), simulate_outputs(300, 1.5, 2, is_multilabel=True)
    comparison = compare_classifiers(a, b)
    assert comparison.p is None and comparison.counts is None and comparison.primary == "map" and comparison.significant
    for index, outputs in enumerate((a, b)):
        report = evaluate_classification(outputs.logits, outputs.labels, tuple("abcd"))
        assert comparison.metrics["map"][index] == pytest.approx(report.metrics["map"])
        assert comparison.metrics["nll"][index] == pytest.approx(report.metrics["nll"])
    assert "two is better by" in comparison.verdict("one", "two") and "mAP" in comparison.verdict("one", "two")
    assert not compare_classifiers(a, a).significant and "both have the same mAP" in compare_classifiers(a, a).verdict(
        "one", "two"
    )


def test_unreadable_images_count_as_wrong_and_have_no_loss():
    a, b = simulate_outputs(100, 2.0, 1), simulate_outputs(100, 2.0, 1)
    readable = np.ones(100, bool)
    readable[:10] = False
    comparison = compare_classifiers(a, ModelOutputs(b.logits, b.labels, readable))
    hits = a.is_correct[:10].sum()
    assert comparison.counts["only_a"] == hits and comparison.counts["only_b"] == 0
    assert (
        comparison.differences["nll"] == 0 and comparison.differences["ece"] == 0
    )  # over the ninety images readable by both
    none = compare_classifiers(a, ModelOutputs(b.logits, b.labels, np.zeros(100, bool)))
    assert none.metrics["nll"] == (None, None) and none.metrics["top1"][1] == 0


@pytest.mark.parametrize("images", [1, 40])
def test_all_correct_or_all_wrong_predictions_are_compared(images):
    labels, ones = np.zeros(images, np.int64), np.ones(images, bool)
    right = ModelOutputs(np.tile([1.0, 0.0], (images, 1)), labels, ones)
    wrong = ModelOutputs(np.tile([0.0, 1.0], (images, 1)), labels, ones)
    for pair, difference in (((right, right), 0), ((wrong, wrong), 0), ((wrong, right), 1), ((right, wrong), -1)):
        comparison = compare_classifiers(*pair)
        low, high = comparison.intervals["top1"]
        assert comparison.differences["top1"] == difference and -1 <= low < high <= 1
        assert comparison.significant == (difference != 0 and images > 1)
        assert ("no significant difference" in comparison.verdict("a", "b")) == (not comparison.significant)


def test_p_values_are_formatted_readably():
    assert [format_p_value(p) for p in (1.0, 0.0312, 0.00004)] == ["= 1", "= 0.031", "< 0.0001"]
