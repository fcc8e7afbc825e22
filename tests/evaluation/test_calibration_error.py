"""The interval of the calibration error contains the reported value and the error of the distribution."""

from __future__ import annotations

import numpy as np
import pytest

from vitreous.tasks.calibration import (
    CALIBRATION_BINS,
    CalibrationGaps,
    bound_difference_errors,
    compute_image_gaps,
    confidence_bins,
    expected_calibration_error,
)
from vitreous.tasks.classification_metrics import evaluate_classification
from vitreous.tasks.comparison import ModelOutputs, compare_classifiers

#: how the probability of a correct prediction depends on the confidence, and confidences (n,) of n images
CALIBRATION_MODELS = {
    "calibrated": (lambda c: c, lambda rng, n: rng.uniform(0.1, 1, n)),
    "slightly overconfident": (lambda c: np.clip(c - 0.03, 0, 1), lambda rng, n: rng.uniform(0.1, 1, n)),
    "overconfident": (lambda c: c - 0.1 * (c > 0.5), lambda rng, n: rng.uniform(0.3, 1, n)),
    "underconfident": (lambda c: 1 - (1 - c) * 0.1, lambda rng, n: 1 - rng.gamma(1, 0.1, n).clip(0.001, 0.85)),
}


def compute_true_error(world: str) -> float:
    """The calibration error of the distribution, whose probability of a correct prediction is known."""
    chance, confidences = CALIBRATION_MODELS[world]
    confidence = confidences(np.random.default_rng(0), 1_000_000)
    gaps = np.bincount(confidence_bins(confidence), chance(confidence) - confidence, CALIBRATION_BINS)
    return float(np.abs(gaps).sum() / len(confidence))


def draw_image_gaps(world: str, rng: np.random.Generator, count: int) -> np.ndarray:
    """(count, BINS) gaps of images sampled from a distribution."""
    chance, confidences = CALIBRATION_MODELS[world]
    confidence = confidences(rng, count)
    return compute_image_gaps(confidence, rng.random(count) < chance(confidence))


def draw_bootstrap_weights(rng: np.random.Generator, count: int, draws: int = 200) -> np.ndarray:
    """(draws, count): how often each image is drawn, divided by the number of images."""
    return rng.multinomial(count, np.full(count, 1 / count), size=draws) / count


@pytest.mark.parametrize("world", CALIBRATION_MODELS)
@pytest.mark.parametrize("count", [180, 500])
def test_the_ece_interval_has_its_nominal_coverage(world, count):
    true, rng, covered = compute_true_error(world), np.random.default_rng(1), 0
    for _ in range(100):
        gaps = draw_image_gaps(world, rng, count)
        low, high = CalibrationGaps.of_images(gaps).interval(draw_bootstrap_weights(rng, count) @ gaps)
        assert low <= np.abs(gaps.mean(0)).sum() <= high
        covered += low <= true <= high
    assert covered >= 89  # nominal coverage is 95 %; at 93 %, fewer would be chance in one of 20 cases


def test_far_from_calibration_the_interval_matches_the_bootstrap():
    rng = np.random.default_rng(0)
    gaps = draw_image_gaps("underconfident", rng, 5000)
    draws = draw_bootstrap_weights(rng, 5000) @ gaps
    low, high = CalibrationGaps.of_images(gaps).interval(draws)
    plain = np.percentile(np.abs(draws).sum(1), [2.5, 97.5])
    assert high - low < 1.5 * (plain[1] - plain[0])


def draw_predictions(seed: int, count: int = 180, classes: int = 10, sharpness: float = 1.0) -> ModelOutputs:
    """Outputs of a calibrated model with logits multiplied by `sharpness`."""
    rng = np.random.default_rng(seed)
    logits = 2 * rng.normal(size=(count, classes))
    p = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    labels = (p.cumsum(1) > rng.random((count, 1))).argmax(1)
    return ModelOutputs(sharpness * logits, labels, np.ones(count, bool))


def test_the_reported_ece_is_in_its_interval():
    for seed in range(12):
        outputs = draw_predictions(seed)
        report = evaluate_classification(outputs.logits, outputs.labels, tuple("abcdefghij"))
        (low, high), ece = report.intervals["ece"], report.metrics["ece"]
        assert 0 <= low <= ece <= high, seed
        right = outputs.logits.argmax(1) == outputs.labels
        confidence = np.exp(outputs.logits).max(1) / np.exp(outputs.logits).sum(1)
        assert ece == pytest.approx(expected_calibration_error(confidence, right))


@pytest.mark.parametrize("sharpness, expected", [((1, 1), 0.0), ((1, 2), 0.206), ((1.5, 0.6), 0.034)])
def test_the_interval_of_an_ece_difference_covers_the_truth(sharpness, expected):
    covered = 0
    for seed in range(20):
        first_outputs, second_outputs = (draw_predictions(seed, sharpness=factor) for factor in sharpness)
        comparison = compare_classifiers(first_outputs, second_outputs)
        low, high = comparison.intervals["ece"]
        assert low <= comparison.differences["ece"] <= high
        covered += low <= expected <= high
    assert covered >= 18
    if sharpness == (1, 1):
        assert (low, high) == (0, 0)


def test_difference_bounds_match_a_loop_over_bins_and_draws():
    rng = np.random.default_rng(3)
    first_gaps, second_gaps, weights = (
        draw_image_gaps("overconfident", rng, 300),
        draw_image_gaps("calibrated", rng, 300),
        draw_bootstrap_weights(rng, 300, 5),
    )
    gaps, drawn = (first_gaps.mean(0), second_gaps.mean(0)), (weights @ first_gaps, weights @ second_gaps)
    least, most = bound_difference_errors(
        CalibrationGaps.of_images(first_gaps), CalibrationGaps.of_images(second_gaps), *drawn
    )
    for draw in range(5):
        low = high = 0.0
        for b in range(CALIBRATION_BINS):
            bounds = []
            for values, g, star in zip((first_gaps, second_gaps), gaps, drawn, strict=True):
                moved = star[draw, b] - g[b]
                signed = moved if g[b] >= 0 else -moved
                away = np.abs(values[:, b])
                uncalibrated = abs(g[b]) > np.sqrt(
                    np.log(300) / 300 * max(values[:, b].var(), (away * (1 - away)).mean())
                )
                bounds.append((signed, signed if uncalibrated else abs(moved)))
            apart = gaps[1][b] - gaps[0][b]
            cap = 2 * abs(apart) + abs(drawn[1][draw, b] - drawn[0][draw, b] - apart)
            low += max(bounds[1][0] - bounds[0][1], -cap)
            high += min(bounds[1][1] - bounds[0][0], cap)
        assert (least[draw], most[draw]) == pytest.approx((low, high))
