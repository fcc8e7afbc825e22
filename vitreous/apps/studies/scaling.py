"""Scaling laws: L(N, D) = E + A / N^a + B / D^b fitted to runs, its intervals, and the optimum for a compute budget.

N are parameters, D samples seen, L a loss in nats, C training FLOPs. The fit is that of arXiv:2203.15556 (section 3.3
and appendix D.4): a Huber loss on logarithms, L-BFGS from a grid of starts. For images arXiv:2106.04560 found laws that
saturate; E is what stays. In shapes, n is runs, K is samples of a bootstrap.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from itertools import product

import numpy as np

from vitreous.errors import DataError

HUBER_WIDTH = 1e-3  # of a residual in log L, from where the loss is linear
#: starts of log E, log A and log B in units of the data, of a and of b
FIT_STARTS = ((-2.0, -0.5), (-1.0, 1.0), (-1.0, 1.0), (0.2, 0.6, 1.0), (0.2, 0.6, 1.0))
LAW_PARAMETERS = ("E", "A", "B", "a", "b")
MIN_FIT_RUNS = 6  # runs: one more than numbers to fit
BOOTSTRAP_DRAWS = 200  # of the bootstrap
MAX_EXPONENT_WIDTH = 0.3  # width of an interval of an exponent, from which a law is not to be extrapolated


@dataclass(frozen=True)
class ScalingLaw:
    """The five numbers of L(N, D) = E + A / N^a + B / D^b, all above 0."""

    E: float
    A: float
    B: float
    a: float
    _: KW_ONLY
    b: float

    @classmethod
    def from_row(cls, values: np.ndarray | tuple[float, ...]) -> ScalingLaw:
        """The law of (5,) numbers in the order of NAMES."""
        E, A, B, a, b = values
        return cls(E, A, B, a, b=b)

    def loss(self, parameters: np.ndarray, samples: np.ndarray) -> np.ndarray:
        """(n,) N and (n,) D -> (n,) L."""
        return self.E + self.A / np.asarray(parameters, float) ** self.a + self.B / np.asarray(samples, float) ** self.b

    def optimum(self, flops: float, per_sample: float) -> tuple[float, float]:
        """N and D of the least loss for C = `per_sample` N D FLOPs (arXiv:2203.15556, Eq. 4).

        N = G (C / k)^(b / (a + b)) and D = (C / k)^(a / (a + b)) / G with k = `per_sample` and
        G = (a A / (b B))^(1 / (a + b)).
        """
        ratio = (self.a * self.A / (self.b * self.B)) ** (1 / (self.a + self.b))
        work = flops / per_sample
        return ratio * work ** (self.b / (self.a + self.b)), work ** (self.a / (self.a + self.b)) / ratio


@dataclass(frozen=True)
class ScalingLawFit:
    """A law, the bootstrap's laws, (K, 5), the error on runs that were held out, and what the data cannot tell."""

    law: ScalingLaw
    draws: np.ndarray
    residual: float  # root mean square of log L of the runs that were fitted
    held_out: np.ndarray  # (m, 2): L as measured and as predicted
    _: KW_ONLY
    doubts: tuple[str, ...]

    def interval(self, name: str, level: float = 0.95) -> tuple[float, float]:
        """The interval of one of E, A, B, a, b."""
        low, high = np.quantile(self.draws[:, LAW_PARAMETERS.index(name)], [(1 - level) / 2, (1 + level) / 2])
        return float(low), float(high)

    def predicted(self, parameters: float, samples: float, level: float = 0.95) -> tuple[float, float, float]:
        """L for N and D by the law, and the ends of its interval over the bootstrap's laws."""
        losses = [float(ScalingLaw.from_row(draw).loss(np.array(parameters), np.array(samples))) for draw in self.draws]
        low, high = np.quantile(losses, [(1 - level) / 2, (1 + level) / 2])
        return float(self.law.loss(np.array(parameters), np.array(samples))), float(low), float(high)

    @property
    def largest_error(self) -> float | None:
        """The largest relative error on the runs that were held out; None where there are none."""
        if not len(self.held_out):
            return None
        return float(np.abs(self.held_out[:, 1] / self.held_out[:, 0] - 1).max())


def fit_law(
    parameters: Sequence[float],
    samples: Sequence[float],
    losses: Sequence[float],
    hold_out: float = 0.0,
    draws: int = BOOTSTRAP_DRAWS,
    seed: int = 0,
) -> ScalingLawFit:
    """Fit the law to runs, (n,) N, (n,) D and (n,) L each; the share `hold_out` of them, those of the most compute N D,
    is predicted, not fitted. Intervals are of a bootstrap over the residuals in log L.

    Raises DataError for fewer than six runs to fit, values that are not above 0 and finite, and runs of one N or one D
    alone, which say nothing of the other.
    """
    table = np.stack([np.asarray(column, np.float64) for column in (parameters, samples, losses)], 1)
    order = np.argsort(table[:, 0] * table[:, 1], kind="stable")
    fitted_runs, held_out = np.split(table[order], [len(table) - round(hold_out * len(table))])
    check_fit_runs(fitted_runs)
    scale = np.exp(np.log(fitted_runs).mean(0))
    log_runs = np.log(fitted_runs / scale)
    starts = np.array(list(product(*FIT_STARTS)))
    best = minimise_huber_loss(log_runs, starts)
    errors = log_runs[:, 2] - predict_log_loss(best, log_runs)
    # the law passes nearly through as many runs as it has numbers, and takes part of the others' noise into them
    free = errors[np.argsort(np.abs(errors))[len(LAW_PARAMETERS) :]]
    residuals = free * np.sqrt(len(log_runs) / len(free))
    generator, laws = np.random.default_rng(seed), []
    for _ in range(draws):
        resampled = log_runs.copy()
        resampled[:, 2] = predict_log_loss(best, log_runs) + generator.choice(residuals, len(log_runs))
        laws.append(unscale_parameters(minimise_huber_loss(resampled, best[None]), scale))
    law = ScalingLaw.from_row(unscale_parameters(best, scale))
    predicted = law.loss(held_out[:, 0], held_out[:, 1])
    held_out_losses = np.stack([held_out[:, 2], predicted], 1)
    fit = ScalingLawFit(
        law,
        np.array(laws).reshape(-1, len(LAW_PARAMETERS)),
        float(np.sqrt((errors**2).mean())),
        held_out_losses,
        doubts=(),
    )
    return ScalingLawFit(fit.law, fit.draws, fit.residual, fit.held_out, doubts=describe_doubts(fit, fitted_runs))


def check_fit_runs(runs: np.ndarray) -> None:
    """(n, 3) N, D, L. Raises DataError for runs that no law can be fitted to."""
    if not (np.isfinite(runs).all() and (runs > 0).all()):
        raise DataError("parameters, samples and losses must be above 0 and finite", "remove diverged runs")
    if len(runs) < MIN_FIT_RUNS:
        raise DataError(
            f"{len(runs)} runs cannot fit five parameters", f"train {MIN_FIT_RUNS} or more, of several sizes"
        )
    for column, name in enumerate(("size of the model", "number of samples")):
        if len(np.unique(runs[:, column])) < 3:
            raise DataError(f"fewer than three values of the {name} cannot fit an exponent", "vary both, in a grid")


def predict_log_loss(theta: np.ndarray, log_runs: np.ndarray) -> np.ndarray:
    """(5,) log E, log A, log B, log a, log b and (n, 3) log N, log D, log L -> (n,) log L of the law."""
    e, a, b, alpha, beta = theta[0], theta[1], theta[2], np.exp(theta[3]), np.exp(theta[4])
    return np.logaddexp(np.logaddexp(a - alpha * log_runs[:, 0], b - beta * log_runs[:, 1]), e)


def huber_objective(theta: np.ndarray, log_runs: np.ndarray) -> tuple[float, np.ndarray]:
    """The Huber loss of the residuals over runs (n, 3), in units of its width, and its gradient (5,)."""
    predicted = predict_log_loss(theta, log_runs)
    x = (predicted - log_runs[:, 2]) / HUBER_WIDTH
    alpha, beta = np.exp(theta[3]), np.exp(theta[4])
    term_shares = np.exp(
        np.stack(
            [np.full(len(log_runs), theta[0]), theta[1] - alpha * log_runs[:, 0], theta[2] - beta * log_runs[:, 1]], 1
        )
        - predicted[:, None]
    )
    jacobian = np.column_stack(
        [term_shares, -alpha * log_runs[:, 0] * term_shares[:, 1], -beta * log_runs[:, 1] * term_shares[:, 2]]
    )
    slope = np.clip(x, -1, 1)
    value = np.where(np.abs(x) <= 1, 0.5 * x * x, np.abs(x) - 0.5).sum()
    return float(value) * HUBER_WIDTH, slope @ jacobian


def minimise_huber_loss(log_runs: np.ndarray, starts: np.ndarray) -> np.ndarray:
    """(n, 3) log N, log D, log L and (s, 5) starts -> (5,) of the least loss that L-BFGS finds from any of them."""
    from scipy.optimize import minimize

    bounds = [(-20.0, 5.0)] * 3 + [(np.log(0.01), np.log(5.0))] * 2
    minima = [
        minimize(huber_objective, start, (log_runs,), "L-BFGS-B", jac=True, bounds=bounds, options={"maxiter": 500})
        for start in starts
    ]
    return min(minima, key=lambda found_minimum: found_minimum.fun).x


def unscale_parameters(theta: np.ndarray, scale: np.ndarray) -> tuple[float, ...]:
    """(5,) as fitted to N, D and L over their geometric means (3,) -> E, A, B, a, b."""
    e, a, b = np.exp(theta[:3]) * scale[2]
    alpha, beta = np.exp(theta[3:])
    return float(e), float(a * scale[0] ** alpha), float(b * scale[1] ** beta), float(alpha), float(beta)


def describe_doubts(fit: ScalingLawFit, fitted_runs: np.ndarray) -> tuple[str, ...]:
    """What the runs (n, 3) cannot tell, a sentence each."""
    doubts = []
    for name, column, subject in (("a", 0, "parameters"), ("b", 1, "samples")):
        low, high = fit.interval(name)
        if high - low > MAX_EXPONENT_WIDTH:
            ratio = fitted_runs[:, column].max() / fitted_runs[:, column].min()
            doubts.append(
                f"the exponent {name} is between {low:.2f} and {high:.2f}: {subject} that differ by a factor of "
                f"{ratio:.3g} do not determine it"
            )
    if fit.interval("E")[0] < 0.05 * fitted_runs[:, 2].min():
        doubts.append("the irreducible loss E is not distinguishable from 0: no run is near it")
    error = fit.largest_error
    if error is not None and error > max(0.05, 4 * fit.residual):
        doubts.append(f"the law misses a run that was held out by {error:.0%}: do not extrapolate it")
    return tuple(doubts)


@dataclass(frozen=True)
class IsoflopProfile:
    """An isoFLOP profile: the N of the least loss among runs of one budget C, by a parabola in log N; None where the
    smallest or the largest model is the best, so that no minimum lies between."""

    flops: float
    parameters: float | None
    loss: float | None
    runs: int


def fit_isoflop_profiles(
    parameters: Sequence[float], flops: Sequence[float], losses: Sequence[float], tolerance: float = 0.1
) -> list[IsoflopProfile]:
    """(n,) N, C and L of runs -> a profile for each budget of three runs or more whose C differ by less than the
    `tolerance` (arXiv:2203.15556, section 3.2)."""
    table = np.stack([np.asarray(column, np.float64) for column in (parameters, flops, losses)], 1)
    table = table[np.argsort(table[:, 1], kind="stable")]
    steps = np.flatnonzero(np.diff(np.log(table[:, 1])) > np.log1p(tolerance)) + 1
    groups = np.split(table, steps)
    return [fit_isoflop_profile(group) for group in groups if len(np.unique(group[:, 0])) >= 3]


def fit_isoflop_profile(group: np.ndarray) -> IsoflopProfile:
    """(n, 3) N, C, L of one budget -> its profile."""
    x, y = np.log(group[:, 0]), group[:, 2]
    budget = float(np.exp(np.log(group[:, 1]).mean()))
    curve, slope, level = np.polyfit(x - x.mean(), y, 2)
    lowest = -slope / (2 * curve) if curve > 0 else np.inf
    if not x.min() < lowest + x.mean() < x.max():
        return IsoflopProfile(budget, None, None, len(group))
    return IsoflopProfile(budget, float(np.exp(lowest + x.mean())), float(level - slope**2 / (4 * curve)), len(group))
