"""Scaling laws are recovered from synthetic runs with the nominal coverage, and unreliable fits are reported."""

from __future__ import annotations

import numpy as np
import pytest

from vitreous.apps.studies.scaling import (
    LAW_PARAMETERS,
    ScalingLaw,
    fit_isoflop_profiles,
    fit_law,
    huber_objective,
    predict_log_loss,
)
from vitreous.errors import DataError

TRUE_LAW = ScalingLaw(E=0.5, A=60.0, B=900.0, a=0.4, b=0.5)
SIZE_DATA_GRID = np.array([(n, d) for n in np.logspace(5, 8, 6) for d in np.logspace(5.5, 8.5, 6)])


def simulate_runs(seed: int, noise: float = 0.005) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return 36 runs (N, D, loss) over three decades of N and D, with multiplicative noise."""
    errors = np.random.default_rng(seed).normal(0.0, noise, len(SIZE_DATA_GRID))
    return (
        SIZE_DATA_GRID[:, 0],
        SIZE_DATA_GRID[:, 1],
        TRUE_LAW.loss(SIZE_DATA_GRID[:, 0], SIZE_DATA_GRID[:, 1]) * np.exp(errors),
    )


@pytest.mark.slow
def test_law_intervals_cover_the_truth_in_19_of_20_draws():
    covered = np.zeros((20, 5), bool)
    for seed in range(20):
        fit = fit_law(*simulate_runs(seed), draws=60)
        intervals = [fit.bootstrap_interval(name) for name in LAW_PARAMETERS]
        covered[seed] = [
            low <= getattr(TRUE_LAW, name) <= high for name, (low, high) in zip(LAW_PARAMETERS, intervals, strict=True)
        ]
        assert not fit.doubts
    assert (covered.sum(0) >= 19).all()


def test_noiseless_runs_recover_the_exact_law():
    n, d, losses = SIZE_DATA_GRID[:, 0], SIZE_DATA_GRID[:, 1], TRUE_LAW.loss(SIZE_DATA_GRID[:, 0], SIZE_DATA_GRID[:, 1])
    fit = fit_law(n, d, losses, draws=2)
    assert [getattr(fit.law, name) for name in LAW_PARAMETERS] == pytest.approx(
        [getattr(TRUE_LAW, name) for name in LAW_PARAMETERS], rel=1e-2
    )


def test_held_out_runs_are_predicted():
    fit = fit_law(*simulate_runs(1), hold_out=0.25, draws=60)
    assert len(fit.held_out) == 9 and fit.largest_error < 0.05
    value, low, high = fit.predict_with_interval(1e9, 1e9)
    assert low <= TRUE_LAW.loss(np.array(1e9), np.array(1e9)) <= high and low < value < high


def test_the_huber_gradient_matches_finite_differences():
    theta, log_losses = (
        np.array([-0.5, -0.2, 0.1, -0.9, -0.7]),
        np.log(np.random.default_rng(0).uniform(0.5, 2.0, (9, 3))),
    )
    step = 1e-7 * np.eye(5)
    differences = [
        (huber_objective(theta + direction, log_losses)[0] - huber_objective(theta - direction, log_losses)[0]) / 2e-7
        for direction in step
    ]
    assert huber_objective(theta, log_losses)[1] == pytest.approx(differences, rel=1e-4, abs=1e-6)
    by_hand = (
        np.exp(-0.5) + np.exp(-0.2 - np.exp(-0.9) * log_losses[:, 0]) + np.exp(0.1 - np.exp(-0.7) * log_losses[:, 1])
    )
    assert np.exp(predict_log_loss(theta, log_losses)) == pytest.approx(by_hand)


def test_the_optimum_of_a_budget_minimises_the_loss():
    n, d = TRUE_LAW.optimum(1e18, 6.0)
    assert 6 * n * d == pytest.approx(1e18)
    other_sizes = n * np.logspace(-1, 1, 41)
    assert TRUE_LAW.loss(np.array(n), np.array(d)) <= TRUE_LAW.loss(other_sizes, 1e18 / 6 / other_sizes).min() + 1e-12
    published = ScalingLaw(E=1.69, A=406.4, B=410.7, a=0.34, b=0.28)  # arXiv:2203.15556, Eq. 10
    n, d = published.optimum(5.76e23, 6.0)
    assert n == pytest.approx(3.2190e10, rel=1e-3) and d == pytest.approx(2.9823e12, rel=1e-3)
    assert published.loss(np.array(n), np.array(d)) == pytest.approx(1.93075, rel=1e-4)


def test_isoflop_profiles_find_interior_optima_only():
    budgets, sizes = (1e15, 1e17), np.logspace(-0.6, 0.6, 7)
    table = []
    for flops in budgets:
        n = TRUE_LAW.optimum(flops, 6.0)[0] * sizes
        table += zip(n, np.full(7, flops), TRUE_LAW.loss(n, flops / 6 / n), strict=True)
    profiles = fit_isoflop_profiles(*np.array(table).T)
    assert [profile.runs for profile in profiles] == [7, 7]
    for profile, flops in zip(profiles, budgets, strict=True):
        assert profile.flops == pytest.approx(flops)
        assert profile.parameters == pytest.approx(TRUE_LAW.optimum(flops, 6.0)[0], rel=0.15)
    edge = [(n, 1e15, loss) for n, loss in ((1e5, 3.0), (1e6, 2.0), (1e7, 1.5))]
    assert fit_isoflop_profiles(*np.array(edge).T)[0].parameters is None


def test_insufficient_runs_are_reported_or_rejected():
    n, d, losses = simulate_runs(0, noise=0.05)
    narrow = (d > 1e7) & (n < 3e6)
    assert any("exponent b" in text for text in fit_law(n[narrow], d[narrow], losses[narrow], draws=40).doubts)
    for runs, message in (
        ((n[:5], d[:5], losses[:5]), "5 runs"),
        ((np.full(36, 1e6), d, losses), "size of the model"),
        ((n, d, losses * np.nan), "above 0 and finite"),
    ):
        with pytest.raises(DataError, match=message):
            fit_law(*runs)
