"""Nearest-neighbour segmentation of patch features matches loops, and ignores unlabelled patches."""

from __future__ import annotations

import numpy as np
import pytest

from vitreous.data.annotations.target import IGNORE_INDEX
from vitreous.evaluation.patch_neighbours import (
    count_patch_classes,
    evaluate_patch_neighbours,
    get_patch_labels,
    vote_patch_classes,
)


def test_patch_classes_are_the_pixels_of_each_patch():
    draw = np.random.default_rng(0)
    class_map = draw.integers(-1, 3, (12, 20)).astype(np.int32)
    counts = count_patch_classes(class_map, (3, 4), 3)
    for row in range(3):
        for column in range(4):
            pixels = class_map[4 * row : 4 * row + 4, 5 * column : 5 * column + 5]
            assert counts[row, column].tolist() == [int((pixels == label).sum()) for label in range(3)]
    volume = count_patch_classes(np.ones((4, 6, 8), np.int32), (2, 3, 2), 2)
    assert (volume[..., 1] == 16).all() and not volume[..., 0].any()
    odd = count_patch_classes(np.zeros((7, 5), np.int32), (2, 3), 1)  # pixel centres decide, all pixels are counted
    assert odd.sum() == 35 and odd[..., 0].min() > 0


def test_patches_without_labelled_pixels_have_no_class():
    counts = np.array([[0, 0], [1, 3], [2, 1]])
    assert get_patch_labels(counts).tolist() == [IGNORE_INDEX, 1, 0]


def test_votes_match_a_loop():
    draw = np.random.default_rng(1)
    memory, queries = draw.normal(size=(40, 6)).astype(np.float32), draw.normal(size=(9, 6)).astype(np.float32)
    shares = draw.dirichlet(np.ones(3), 40).astype(np.float32)
    votes = vote_patch_classes(memory, shares, queries, k=5, temperature=0.1)
    for query, vote in zip(queries, votes, strict=True):
        cosines = memory @ query / np.linalg.norm(memory, axis=1) / np.linalg.norm(query)
        nearest = np.argsort(-cosines)[:5]
        weights = np.exp(cosines[nearest] / 0.1)
        np.testing.assert_allclose(vote, weights @ shares[nearest] / weights.sum(), rtol=1e-4)


def test_separable_patches_are_segmented_without_errors():
    draw = np.random.default_rng(2)
    labels = np.arange(60) % 3
    features = (10 * np.eye(3, 8)[labels] + draw.normal(size=(60, 8))).astype(np.float32)
    labels[:3] = IGNORE_INDEX
    metrics = evaluate_patch_neighbours(features[:30], labels[:30], features[30:], labels[30:], num_classes=3, k=5)
    assert metrics == {"miou": 1.0, "accuracy": 1.0}
    none = np.full(30, IGNORE_INDEX)
    unlabelled = evaluate_patch_neighbours(features[30:], labels[30:], features[:30], none, num_classes=3)
    assert unlabelled == {"miou": None, "accuracy": None}
    with pytest.raises(ValueError, match="at least one labelled patch"):
        evaluate_patch_neighbours(features[:30], none, features[30:], labels[30:], num_classes=3)


def test_features_without_information_are_near_chance():
    draw = np.random.default_rng(3)
    features, labels = draw.normal(size=(2000, 16)).astype(np.float32), draw.integers(0, 4, 2000)
    metrics = evaluate_patch_neighbours(features[:1000], labels[:1000], features[1000:], labels[1000:], num_classes=4)
    assert metrics["accuracy"] == pytest.approx(0.25, abs=0.05)
