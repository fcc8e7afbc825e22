"""Distances between generated and real images match closed forms, scipy and explicit loops."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import linalg
from scipy.spatial.distance import cdist

from vitreous.evaluation.frechet import (
    compute_density_coverage,
    compute_moments,
    compute_precision_recall,
    frechet_distance,
    frechet_distance_of_moments,
    measure_copy_share,
)


def draw_features(seed, count=200, shift=0.0, scale=1.0, width=6):
    rng = np.random.default_rng(seed)
    mixed = np.eye(width) + np.linspace(-0.5, 0.5, width * width).reshape(width, width)
    return rng.normal(size=(count, width)) @ mixed * scale + shift


def test_few_images_with_many_features_match_the_moment_formula():
    rng = np.random.default_rng(0)
    real, fake = rng.normal(size=(20, 30)), rng.normal(0.3, 1.2, (25, 30))
    assert frechet_distance(real, fake) == pytest.approx(
        frechet_distance_of_moments(compute_moments(real), compute_moments(fake)), rel=1e-6
    )


def test_the_frechet_distance_matches_its_formula():
    a, b = draw_features(0), draw_features(1, shift=0.3, scale=1.4)
    (m, c), (n, d) = ((features.mean(0), np.cov(features.T)) for features in (a, b))
    expected = ((m - n) ** 2).sum() + np.trace(c + d - 2 * linalg.sqrtm(c @ d).real)
    assert frechet_distance(a, b) == pytest.approx(expected, rel=1e-6)
    assert frechet_distance(b, a) == pytest.approx(expected, rel=1e-6)
    assert frechet_distance(a, a) == pytest.approx(0, abs=1e-9)
    assert frechet_distance(a, a + 2.0) == pytest.approx(6 * 4, rel=1e-9)
    with pytest.raises(ValueError, match="two images"):
        frechet_distance(a[:1], b)


def test_fewer_images_than_features_give_a_finite_distance():
    a, b = draw_features(0, 4, width=30), draw_features(1, 5, width=30)
    assert np.isfinite(frechet_distance(a, b)) and frechet_distance(a, a) == pytest.approx(0, abs=1e-6)


def test_precision_recall_density_coverage_match_loops():
    real, fake = draw_features(0, 60), draw_features(1, 50, shift=0.2)

    def radii(features, k):
        return np.sort(cdist(features, features), 1)[:, k]

    table = cdist(fake, real)
    precision = np.mean([(distances <= radii(real, 3)).any() for distances in table])
    recall = np.mean([(distances <= radii(fake, 3)).any() for distances in table.T])
    assert compute_precision_recall(real, fake) == pytest.approx((precision, recall))
    inside = table <= radii(real, 5)
    density = sum(inside.sum(1)) / (5 * len(fake))
    assert compute_density_coverage(real, fake) == pytest.approx((density, inside.any(0).mean()))


def test_precision_and_coverage_separate_distributions():
    real, same, shifted = draw_features(0), draw_features(1), draw_features(2, shift=50.0)
    assert min(compute_precision_recall(real, same)) > 0.8 and compute_precision_recall(real, shifted) == (0.0, 0.0)
    assert compute_density_coverage(real, shifted) == (0.0, 0.0) and compute_density_coverage(real, same)[1] > 0.8


def test_memorised_images_are_detected():
    train, new = draw_features(0), draw_features(1, 40)
    share, limit = measure_copy_share(train, np.concatenate([train[:10], new[:30] + 9.0]))
    assert share == 0.25
    assert limit == pytest.approx(np.quantile(np.sort(cdist(train, train), 1)[:, 1], 0.01), rel=1e-4)
