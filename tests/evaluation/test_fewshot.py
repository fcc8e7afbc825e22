"""Few-shot regression: the specification's example, a direct solve on both sides of n = d + 1, and the draws."""

from __future__ import annotations

import numpy as np
import pytest

from vitreous.evaluation.linear import fit_ridge_classifier, shuffle_rows_by_class


def test_ridge_weights_match_the_specification():
    """SPEC-VIT.md part 10, item 5."""
    weights = fit_ridge_classifier(
        np.array([[1, 2], [2, 1], [3, 5], [4, 3], [0, 1]], np.float32), np.array([0, 0, 1, 1, 0]), 2
    )
    expected = [[-0.00410973, 0.00410973], [-0.00414243, 0.00414243], [0.00195986, -0.00195986]]
    np.testing.assert_allclose(weights.weight, expected, atol=5e-9)
    np.testing.assert_allclose(weights.scores(np.array([[2.5, 2.5]])), [[0.19425643, -0.19425643]], atol=5e-9)


@pytest.mark.parametrize("images", [8, 12, 13, 14, 60])
@pytest.mark.parametrize("l2", [1024.0, 0.5])
def test_ridge_weights_match_a_direct_solve(images, l2):
    """d = 12; with the constant, 13 features."""
    generator = np.random.default_rng(images)
    features, labels = generator.normal(2, 5, (images, 12)).astype(np.float32), generator.integers(0, 3, images)
    x = features.astype(np.float64)
    mean, deviation = x.mean(0), x.std(0) + 1e-5
    x = np.concatenate([(x - mean) / deviation, np.full((images, 1), 100.0)], 1)
    y = np.where(np.arange(3) == labels[:, None], 1.0, -1.0)
    expected = np.linalg.solve(x.T @ x + l2 * np.eye(13), x.T @ y)
    np.testing.assert_allclose(fit_ridge_classifier(features, labels, 3, l2).weight, expected, atol=1e-9)


def test_few_shot_draws_are_determined_by_the_seed():
    labels = np.array([1, 0, 0, 1, 3, 0, 1])
    generator = np.random.default_rng(5)
    expected = [
        generator.permutation([sample for sample in range(7) if labels[sample] == label]).tolist() for label in range(4)
    ]
    assert [drawn.tolist() for drawn in shuffle_rows_by_class(labels, 4, 5)] == expected
    assert len(shuffle_rows_by_class(labels, 4, 5)[2]) == 0
