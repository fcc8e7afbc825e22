"""Confidence intervals match scipy, and differences that include zero are inconclusive."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

from vitreous.apps.studies.statistics import estimate_difference, estimate_mean


@pytest.mark.parametrize("count", [2, 3, 10])
def test_mean_intervals_match_students_t(count):
    values = np.random.default_rng(count).normal(0.7, 0.1, count)
    estimate = estimate_mean(values)
    low, high = stats.t.interval(0.95, count - 1, values.mean(), stats.sem(values))
    assert estimate.interval == pytest.approx((low, high)) and estimate.mean == pytest.approx(values.mean())


def test_differences_are_paired_over_shared_seeds():
    first, second = {0: 0.70, 1: 0.60, 2: 0.65, 3: 0.9}, {2: 0.67, 1: 0.63, 0: 0.71}
    estimate = estimate_difference(first, second)
    paired = stats.ttest_rel([0.71, 0.63, 0.67], [0.70, 0.60, 0.65]).confidence_interval()
    assert estimate.interval == pytest.approx((paired.low, paired.high)) and estimate.count == 3
    assert estimate_difference({0: 1.0}, {1: 1.0}) is None


def test_the_verdict_follows_from_the_interval():
    assert estimate_mean([0.1, 0.11, 0.12]).verdict == "higher"
    assert estimate_mean([-0.1, -0.11, -0.12]).verdict == "lower"
    assert estimate_mean([-0.1, 0.11, 0.12]).verdict == "inconclusive"
    assert estimate_mean([0.5]).interval is None and estimate_mean([0.5]).verdict == "inconclusive"
    assert estimate_mean([0.0, 0.0]).verdict == "inconclusive"
    with pytest.raises(ValueError):
        estimate_mean([])


def test_mean_intervals_have_their_nominal_coverage():
    draws = np.random.default_rng(0).normal(0.0, 1.0, (2000, 4))
    covered = [low <= 0 <= high for low, high in (estimate_mean(row).interval for row in draws)]
    assert 0.935 < np.mean(covered) < 0.965
