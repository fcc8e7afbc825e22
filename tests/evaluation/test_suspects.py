"""Flipped labels are found; neighbours match scikit-learn."""

from __future__ import annotations

import numpy as np
import pytest
from sklearn.neighbors import NearestNeighbors

from vitreous.evaluation.familiarity import compute_neighbour_shares, find_suspect_labels
from vitreous.tasks.calibration import compute_probabilities


def draw_labelled_features(images: int, seed: int, classes: int = 5, width: int = 16):
    """Features around class means, and their labels."""
    generator = np.random.default_rng(seed)
    means = np.random.default_rng(7).normal(size=(classes, width)) * 1.2
    labels = np.arange(images) % classes
    return (means[labels] + generator.normal(size=(images, width))).astype(np.float32), labels


@pytest.mark.parametrize("exclude_self", [False, True])
def test_neighbour_shares_use_the_nearest_by_cosine(exclude_self):
    memory, labels = draw_labelled_features(90, 0)
    features = memory if exclude_self else draw_labelled_features(40, 1)[0]
    shares = compute_neighbour_shares(features, memory, labels, 5, np.arange(90) if exclude_self else None, k=7)
    _, neighbours = (
        NearestNeighbors(n_neighbors=8 if exclude_self else 7, metric="cosine").fit(memory).kneighbors(features)
    )
    for i, near in enumerate(neighbours):
        near = [neighbour for neighbour in near if not (exclude_self and neighbour == i)]
        assert shares[i] == pytest.approx(np.bincount(labels[near], minlength=5) / 7)


def test_few_neighbours_are_all_neighbours_and_none_is_none():
    memory, labels = draw_labelled_features(3, 0)
    assert compute_neighbour_shares(memory[:1], memory, labels, 5, np.array([0]), k=10)[0] == pytest.approx(
        [0, 0.5, 0.5, 0, 0]
    )
    assert compute_neighbour_shares(memory[:1], memory[:1], labels[:1], 5, np.array([0]))[0].sum() == 0


def test_flipped_labels_are_found():
    """Of 1000 images, 60 have a wrong label: at least 90 % are found, and at most 10 % of the suspects are correct
    labels."""
    memory, memory_labels = draw_labelled_features(2000, 0)
    features, truth = draw_labelled_features(1000, 1)
    generator = np.random.default_rng(3)
    turned = generator.choice(1000, 60, replace=False)
    labels = truth.copy()
    labels[turned] = (truth[turned] + generator.integers(1, 5, 60)) % 5
    means = np.array([memory[memory_labels == k].mean(0) for k in range(5)])
    p = compute_probabilities(features @ means.T * 1.0 - (means**2).sum(1) / 2)
    suspects = find_suspect_labels(p, compute_neighbour_shares(features, memory, memory_labels, 5), labels)
    named = [suspect.sample for suspect in suspects]
    assert len(set(named) & set(turned)) >= 54
    assert len(set(named) - set(turned)) <= len(named) / 10
    assert [suspect.score for suspect in suspects] == sorted((suspect.score for suspect in suspects), reverse=True)
    assert set(named[:30]) <= set(turned)
    for suspect in suspects:
        assert suspect.label == labels[suspect.sample] and suspect.label not in (
            suspect.predicted_label,
            suspect.neighbour,
        )
        assert suspect.probability == p[suspect.sample].max() and 0 < suspect.score <= 1


def test_suspects_need_confident_disagreement_of_both_signals():
    p = np.array([[0.1, 0.9], [0.1, 0.9], [0.9, 0.1], [0.1, 0.9]])
    shares = np.array([[0.2, 0.8], [0.8, 0.2], [0.2, 0.8], [1.0, 0.0]])
    labels = np.array([0, 0, 0, 1])
    suspects = find_suspect_labels(p, shares, labels)
    assert [suspect.sample for suspect in suspects] == [0]
    assert suspects[0].score == pytest.approx((0.9 - 0.1 + 0.8 - 0.2) / 2)
    assert find_suspect_labels(np.array([[0.3, 0.4, 0.3]]), np.array([[0.0, 1.0, 0.0]]), np.array([0])) == []
