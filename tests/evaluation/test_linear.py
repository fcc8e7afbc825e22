"""Logistic regression has scikit-learn's optimum, with either solver; the search of its penalty."""

from __future__ import annotations

import numpy as np
import pytest
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import average_precision_score
from sklearn.preprocessing import StandardScaler

from vitreous.errors import DataError
from vitreous.evaluation import linear
from vitreous.evaluation.linear import (
    ABSENT_CLASS_MARGIN,
    COARSE_PENALTIES,
    LabelledFeatures,
    fit_linear_classifier,
    score_logits,
    search_penalty,
)


def make_labelled_features(classes=4, images=240, width=5, seed=0, multilabel=False):
    """Features of different scales whose classes overlap."""
    generator = np.random.default_rng(seed)
    labels = generator.integers(0, classes, images)
    centres = np.random.default_rng(7).normal(size=(classes, width))
    scale, shift = np.array([1, 10, 0.1, 3, 1])[:width], np.array([0, 50, -1, 2, 0])[:width]
    if multilabel:
        labels = (generator.random((images, classes)) < 0.3).astype(np.float32)
        features = labels @ centres + generator.normal(size=(images, width))
    else:
        features = centres[labels] + generator.normal(size=(images, width))
    return LabelledFeatures((features * scale + shift).astype(np.float32), labels, np.arange(images), classes)


@pytest.fixture(params=["library", "streamed"])
def solver(request, monkeypatch):
    """Scikit-learn, or our chunked solver with odd chunk sizes."""
    monkeypatch.setattr(linear, "MAX_SKLEARN_ELEMENTS", 10**9 if request.param == "library" else 0)
    monkeypatch.setattr(linear, "LOSS_CHUNK_IMAGES", 37)
    return request.param


@pytest.mark.parametrize("classes", [2, 4])
@pytest.mark.parametrize("l2", [1.0, 0.01])
def test_the_optimum_matches_scikit_learn(solver, classes, l2):
    data = make_labelled_features(classes)
    scaler = StandardScaler().fit(data.features.astype(np.float64))
    # for two classes scikit-learn penalises w1 - w0; half of its square is the sum of the squares of w0 and w1
    penalty_factor = 2 if classes == 2 else 1
    reference = LogisticRegression(C=penalty_factor / (l2 * len(data.sample_indices)), tol=1e-10, max_iter=10_000)
    reference.fit(scaler.transform(data.features), data.labels)
    weights = fit_linear_classifier(data, l2)
    weight, bias = weights.weight * scaler.scale_, weights.bias + weights.weight @ scaler.mean_
    if classes == 2:
        weight, bias = weight[1:] - weight[:1], bias[1:] - bias[:1]
    assert abs(weight - reference.coef_).max() < 1e-3
    centred, expected = (
        (bias, reference.intercept_)
        if classes == 2
        else (bias - bias.mean(), reference.intercept_ - reference.intercept_.mean())
    )
    assert abs(centred - expected).max() < 1e-3
    logits = weights.logits(data.features)
    p = np.exp(logits - logits.max(1, keepdims=True))
    np.testing.assert_allclose(
        p / p.sum(1, keepdims=True), reference.predict_proba(scaler.transform(data.features)), atol=1e-3
    )


def test_multilabel_classes_are_fitted_independently():
    data = make_labelled_features(multilabel=True)
    scaler = StandardScaler().fit(data.features.astype(np.float64))
    weights = fit_linear_classifier(data, 0.05)
    for label in range(4):
        reference = LogisticRegression(C=1 / (0.05 * len(data.sample_indices)), tol=1e-10, max_iter=10_000)
        reference.fit(scaler.transform(data.features), data.labels[:, label])
        assert abs(weights.weight[label] * scaler.scale_ - reference.coef_[0]).max() < 1e-3
    logits = weights.logits(data.features)
    assert score_logits(logits, data.labels) == pytest.approx(
        average_precision_score(data.labels, logits, average="macro"), abs=1e-6
    )


def test_row_subsets_and_warm_starts_give_the_same_optimum(solver):
    data = make_labelled_features()
    subset = np.arange(0, 240, 3)
    expected = fit_linear_classifier(
        LabelledFeatures(data.features[subset], data.labels[subset], np.arange(80), 4), 0.02
    )
    weights = fit_linear_classifier(data.with_rows(subset), 0.02, fit_linear_classifier(data, 3.0))
    assert abs(weights.weight - expected.weight).max() < 1e-2 * abs(expected.weight).max()


def test_classes_without_images_have_the_lowest_logits(solver):
    data = make_labelled_features()
    five = LabelledFeatures(
        data.features, np.where(data.labels > 1, data.labels + 1, data.labels), data.sample_indices, 5
    )
    logits, expected = (
        fit_linear_classifier(five, 0.1).logits(data.features),
        fit_linear_classifier(data, 0.1).logits(data.features),
    )
    np.testing.assert_allclose(logits[:, [0, 1, 3, 4]], expected, atol=1e-4)
    assert (logits[:, 2] < logits[:, [0, 1, 3, 4]].min(1) - ABSENT_CLASS_MARGIN / 2).all()
    single_class = LabelledFeatures(data.features, np.ones_like(data.labels), data.sample_indices, 4)
    with pytest.raises(DataError, match="one class"):
        fit_linear_classifier(single_class, 0.1)


def test_a_constant_feature_does_not_change_the_logits(solver):
    data = make_labelled_features()
    features = np.concatenate([data.features, np.full((240, 1), 7.3, np.float32)], 1)
    logits = fit_linear_classifier(LabelledFeatures(features, data.labels, data.sample_indices, 4), 0.1).logits(
        features
    )
    np.testing.assert_allclose(logits, fit_linear_classifier(data, 0.1).logits(data.features), atol=1e-3)


def test_the_penalty_search_matches_a_scikit_learn_grid():
    """With many features and few images, the weakest penalty is not the best."""
    generator = np.random.default_rng(0)
    labels = generator.integers(0, 3, 160)
    features = (np.eye(3, 60)[labels] * 1.5 + generator.normal(size=(160, 60))).astype(np.float32)
    all_data = LabelledFeatures(features, labels, np.arange(160), 3)
    train, dev = all_data.with_rows(np.arange(60)), all_data.with_rows(np.arange(60, 160))
    tried = []
    l2, best = search_penalty(train, dev, lambda l2, score: tried.append((l2, score)))
    scaler = StandardScaler().fit(features[:60])
    scores = {}
    for penalty in COARSE_PENALTIES:
        reference = LogisticRegression(C=1 / (penalty * 60), max_iter=5_000).fit(
            scaler.transform(features[:60]), labels[:60]
        )
        scores[penalty] = reference.score(scaler.transform(features[60:]), labels[60:])
    assert best >= max(scores.values()) > scores[COARSE_PENALTIES[-1]]
    assert (l2, best) in tried and len(tried) == linear.NUM_PENALTY_FITS
    assert l2 == max(penalty for penalty, score in tried if score == best)
