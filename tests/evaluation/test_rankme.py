"""RankMe matches its closed forms; metrics of features with and without labels."""

from __future__ import annotations

import math

import numpy as np
import pytest

from tests.evaluation.test_evaluator import CLASSES, make_engine, make_split
from vitreous.data.split import create_empty_labels
from vitreous.evaluation.evaluator import SplitOutputs
from vitreous.evaluation.knn import KNNEvaluator
from vitreous.evaluation.rankme import MAX_RANKME_FEATURES, FeatureEvaluator, compute_feature_std, compute_rankme


def test_collapsed_features_have_rank_one():
    draw = np.random.default_rng(0)
    features = draw.normal(size=(60, 1)) @ draw.normal(size=(1, 24))
    assert compute_rankme(features.astype(np.float32)) == pytest.approx(1, abs=1e-4)
    assert compute_rankme(np.zeros((4, 3), np.float32)) == 1


@pytest.mark.parametrize(("images", "width"), [(32, 8), (8, 32), (16, 16)])
def test_orthonormal_features_have_full_rank(images, width):
    q, _ = np.linalg.qr(np.random.default_rng(1).normal(size=(max(images, width),) * 2))
    features = q[:images, :width] if images >= width else q[:images]
    assert compute_rankme(3 * features) == pytest.approx(min(images, width), rel=1e-6)


def test_rankme_is_the_exponential_of_the_spectral_entropy():
    lengths = np.array([8.0, 4.0, 2.0, 0.0])
    shares = lengths[:3] / lengths.sum()
    assert compute_rankme(np.diag(lengths)) == pytest.approx(math.exp(-(shares * np.log(shares)).sum()))


def test_rankme_subsamples_and_is_nan_for_nonfinite_features():
    features = np.random.default_rng(2).normal(size=(2 * MAX_RANKME_FEATURES + 2, 4)).astype(np.float32)
    features[1] = np.nan  # not sampled, because only every third is used
    assert 3.99 < compute_rankme(features) <= 4
    assert math.isnan(compute_rankme(features[:3]))


def test_the_feature_std_depends_only_on_directions():
    same = np.random.default_rng(3).normal(size=(1, 12)) * np.arange(1, 9)[:, None]
    assert compute_feature_std(same) == pytest.approx(0, abs=1e-12)
    assert compute_feature_std(np.eye(16)) == pytest.approx(math.sqrt(1 / 16 * 15 / 16))


def test_features_are_evaluated_with_and_without_labels():
    split = make_split(24, 0)
    both = FeatureEvaluator(KNNEvaluator(CLASSES, make_split(60, 1)))
    report = both(make_engine(0), split, workers=0)
    assert list(report.metrics) == ["knn_top1", "rankme", "feature_std"] and report.primary == "knn_top1"
    alone = both.without_labels()
    assert alone.required_splits(split) == (split,)
    unlabelled_split = split.take(np.arange(24), create_empty_labels(24))
    unlabelled = alone(make_engine(0), unlabelled_split, workers=0)
    assert unlabelled.primary == "rankme" and unlabelled.headline == ("RankMe", report.metrics["rankme"])
    assert unlabelled.summary()["primary"] == "rankme" and 1 < report.metrics["rankme"] <= 24


def test_unreadable_images_are_ignored():
    features = np.eye(6, dtype=np.float32)
    outputs = SplitOutputs(make_split(6, 0), features, np.array([True, True, False, True, False, False]))
    report = FeatureEvaluator().report(outputs)
    assert report.metrics["rankme"] == pytest.approx(3) and (report.images, report.unreadable) == (6, 3)
    none = FeatureEvaluator().report(SplitOutputs(make_split(6, 0), features, np.zeros(6, dtype=bool)))
    assert none.metrics == {"rankme": None}
