"""Nearest neighbours match scikit-learn's in chunks of any size, with DINO's weighted votes."""

from __future__ import annotations

import numpy as np
import pytest
from sklearn.neighbors import KNeighborsClassifier, NearestNeighbors

from vitreous.data.labels import MULTILABEL, SINGLE_LABEL
from vitreous.evaluation import knn
from vitreous.evaluation.knn import compute_neighbour_votes, find_nearest_neighbours


def draw_clusters(count, seed, classes=4, width=6):
    """(n, d) features near the centre of their class, and labels."""
    generator = np.random.default_rng(seed)
    labels = generator.integers(0, classes, count)
    centres = np.random.default_rng(9).normal(size=(classes, width))
    return (centres[labels] + generator.normal(size=(count, width))).astype(np.float32) * 3, labels


@pytest.mark.parametrize("chunks", [(16_384, 1_024), (13, 7), (3, 100)])
@pytest.mark.parametrize("k", [1, 5, 60])
def test_neighbours_and_votes_match_scikit_learn(chunks, k, monkeypatch):
    monkeypatch.setattr(knn, "MEMORY_CHUNK", chunks[0])
    monkeypatch.setattr(knn, "QUERY_CHUNK", chunks[1])
    (memory, labels), (queries, _) = draw_clusters(60, 0), draw_clusters(31, 1)
    classifier = KNeighborsClassifier(
        k, metric="cosine", weights=lambda distance: np.exp((1 - distance) / 0.07), algorithm="brute"
    )
    classifier.fit(memory, labels)
    cosines, neighbours = find_nearest_neighbours(memory, queries, k)
    distances, expected = classifier.kneighbors(queries)
    assert np.array_equal(neighbours, expected)
    np.testing.assert_allclose(cosines, 1 - distances, atol=2e-6)
    shares = compute_neighbour_votes(cosines, neighbours, labels, 4)
    np.testing.assert_allclose(shares, classifier.predict_proba(queries), atol=2e-4)
    logits = SINGLE_LABEL.shares_to_logits(shares)
    np.testing.assert_allclose(np.exp(logits) / np.exp(logits).sum(1, keepdims=True), shares, atol=1e-12)


def test_samples_are_excluded_from_their_own_neighbours(monkeypatch):
    monkeypatch.setattr(knn, "MEMORY_CHUNK", 11)
    monkeypatch.setattr(knn, "QUERY_CHUNK", 4)
    memory, _ = draw_clusters(40, 2)
    # without queries, scikit-learn excludes each sample itself
    _, expected = NearestNeighbors(n_neighbors=39, metric="cosine").fit(memory).kneighbors()
    _, neighbours = find_nearest_neighbours(memory, memory, 39, exclude_self=True)
    assert np.array_equal(neighbours, expected)
    with pytest.raises(ValueError, match="40 neighbours were requested, but there are only 39"):
        find_nearest_neighbours(memory, memory, 40, exclude_self=True)


def test_multilabel_votes_are_weighted_means():
    generator = np.random.default_rng(0)
    labels = (generator.random((20, 3)) < 0.4).astype(np.float32)
    cosines, neighbours = (
        np.sort(generator.uniform(-1, 1, (5, 4)))[:, ::-1].astype(np.float32),
        generator.integers(0, 20, (5, 4)),
    )
    weights = np.exp(cosines / 0.5)
    expected = np.stack([np.average(labels[neighbours[m]], axis=0, weights=weights[m]) for m in range(5)])
    shares = compute_neighbour_votes(cosines, neighbours, labels, 3, 0.5)
    np.testing.assert_allclose(shares, expected, atol=1e-6)
    np.testing.assert_allclose(1 / (1 + np.exp(-MULTILABEL.shares_to_logits(shares))), expected, atol=1e-6)


def test_zero_features_have_zero_similarity():
    memory = np.array([[0, 0], [1, 0], [-1, 0]], np.float32)
    cosines, neighbours = find_nearest_neighbours(memory, np.array([[2, 0], [0, 0]], np.float32), 3)
    assert neighbours[0].tolist() == [1, 0, 2] and cosines.tolist() == [[1, 0, -1], [0, 0, 0]]
