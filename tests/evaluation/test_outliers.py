"""The relative Mahalanobis distance matches numpy; its covariance and detection rates match scikit-learn."""

from __future__ import annotations

import numpy as np
import pytest
from sklearn import metrics
from sklearn.covariance import LedoitWolf

from vitreous.errors import DataError
from vitreous.evaluation import familiarity as outliers
from vitreous.evaluation.familiarity import compute_outlier_separation, fit_gaussian, fit_mahalanobis_detector


def draw_clusters(images: int, width: int = 12, classes: int = 4, seed: int = 0):
    """Features around class means, with unequal variances, and labels."""
    generator = np.random.default_rng(seed)
    labels = generator.integers(0, classes, images)
    means = np.random.default_rng(9).normal(size=(classes, width)) * 3
    return (means[labels] + generator.normal(size=(images, width)) * np.linspace(0.2, 2, width)).astype(
        np.float32
    ), labels


def compute_min_mahalanobis_distance(points, centres, covariance):
    """The squared distance of each point to the nearest centre."""
    inverse = np.linalg.inv(covariance)
    return np.array([min((x - m) @ inverse @ (x - m) for m in centres) for x in points])


@pytest.mark.parametrize("images", [10, 60, 500])
def test_outlier_scores_match_plain_numpy(images, monkeypatch):
    monkeypatch.setattr(outliers, "CHUNK_IMAGES", 37)
    features, labels = draw_clusters(images)
    queries = draw_clusters(50, seed=3)[0] * 2
    # the last class has no images
    points, detector = features.astype(float), fit_mahalanobis_detector(features, labels, 5)
    means = [points[labels == k].mean(0) for k in np.unique(labels)]
    within = (
        LedoitWolf(assume_centered=True)
        .fit(points - np.array([points[labels == k].mean(0) for k in labels]))
        .covariance_
    )
    total = LedoitWolf().fit(points).covariance_
    expected = compute_min_mahalanobis_distance(queries, means, within) - compute_min_mahalanobis_distance(
        queries, [points.mean(0)], total
    )
    assert detector.scores(queries) == pytest.approx(expected, rel=1e-6, abs=1e-6)


def test_multilabel_images_are_fitted_as_one_class():
    features, labels = draw_clusters(200)
    detector = fit_mahalanobis_detector(features, np.eye(4, dtype=np.float32)[labels], 4)
    points = features.astype(float)
    assert detector.scores(features) == pytest.approx(
        compute_min_mahalanobis_distance(points, [points.mean(0)], LedoitWolf().fit(points).covariance_), rel=1e-6
    )


def test_outliers_score_higher():
    features, labels = draw_clusters(2000)
    detector = fit_mahalanobis_detector(features[:1500], labels[:1500], 4)
    inlier_scores, outlier_scores = (
        detector.scores(features[1500:]),
        detector.scores((features[1500:] + features[:500]) / 2),
    )
    assert compute_outlier_separation(inlier_scores, outlier_scores)["auroc"] > 0.75


def test_few_images_and_constant_features_are_accepted():
    features, labels = draw_clusters(5, width=40)
    assert np.isfinite(
        fit_mahalanobis_detector(features, labels, 4).scores(draw_clusters(9, width=40, seed=2)[0])
    ).all()
    assert np.isfinite(fit_gaussian(np.ones((6, 3), np.float32), np.zeros(6, int), 1).whiten).all()
    with pytest.raises(DataError, match="use at least 2"):
        fit_mahalanobis_detector(features[:1], labels[:1], 4)


@pytest.mark.parametrize("ties", [False, True])
def test_auroc_and_fpr_match_scikit_learn(ties):
    generator = np.random.default_rng(2)
    inliers, outliers = generator.normal(size=400), generator.normal(size=300) + 1
    if ties:
        inliers, outliers = inliers.round(), outliers.round()
    separation = compute_outlier_separation(inliers, outliers)
    truth, scores = np.r_[np.zeros(400), np.ones(300)], np.r_[inliers, outliers]
    assert separation["auroc"] == pytest.approx(metrics.roc_auc_score(truth, scores))
    limits = [limit for limit in np.unique(inliers) if (inliers <= limit).mean() >= 0.95]
    assert separation["limit"] == limits[0] and separation["fpr95"] == pytest.approx((outliers <= limits[0]).mean())
    assert compute_outlier_separation(inliers, inliers + 100) == {
        "auroc": 1.0,
        "fpr95": 0.0,
        "limit": separation["limit"],
    }
