"""Scaling laws: L(N, D) = E + A / N^a + B / D^b fitted to runs, confidence intervals, and the optimum for a compute
budget.

N are parameters, D samples seen, L a loss in nats, C training FLOPs. The fit is that of arXiv:2203.15556 (section 3.3
and appendix D.4): a Huber loss on logarithms, L-BFGS from a grid of starts. For images, arXiv:2106.04560 found
saturating laws; E is the irreducible loss. Shapes: n runs, K bootstrap samples.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from itertools import product

import numpy as np

from vitreous.errors import DataError

HUBER_WIDTH = 1e-3  # residual in log L above which the loss is linear
#: initial values of log E, log A, log B (for N, D and L divided by their geometric means), a and b
FIT_STARTS = ((-2.0, -0.5), (-1.0, 1.0), (-1.0, 1.0), (0.2, 0.6, 1.0), (0.2, 0.6, 1.0))
LAW_PARAMETERS = ("E", "A", "B", "a", "b")
MIN_FIT_RUNS = 6  # minimum runs of a fit: one more than it has parameters
BOOTSTRAP_DRAWS = 200  # number of bootstrap samples
MAX_EXPONENT_WIDTH = 0.3  # the law must not be extrapolated if the interval of an exponent is wider


@dataclass(frozen=True)
class ScalingLaw:
    """The five parameters of L(N, D) = E + A / N^a + B / D^b, all above 0."""

    E: float
    A: float
    B: float
    a: float
    _: KW_ONLY
    b: float

    @classmethod
    def from_row(cls, values: np.ndarray | tuple[float, ...]) -> ScalingLaw:
        """Return the law with (5,) parameters in the order of `LAW_PARAMETERS`."""
        E, A, B, a, b = values
        return cls(E, A, B, a, b=b)

    def loss(self, parameters: np.ndarray, samples: np.ndarray) -> np.ndarray:
        """Compute the (n,) losses L for (n,) parameters N and (n,) samples D."""
        return self.E + self.A / np.asarray(parameters, float) ** self.a + self.B / np.asarray(samples, float) ** self.b

    def optimum(self, flops: float, per_sample: float) -> tuple[float, float]:
        """Return the N and D that minimise the loss for `flops` C = k N D, with k = `per_sample` FLOPs per parameter
        and sample (arXiv:2203.15556, Eq. 4).

        With G = (a A / (b B))^(1 / (a + b)): N = G (C / k)^(b / (a + b)), and D = (C / k)^(a / (a + b)) / G.
        """
        ratio = (self.a * self.A / (self.b * self.B)) ** (1 / (self.a + self.b))
        budget = flops / per_sample
        return ratio * budget ** (self.b / (self.a + self.b)), budget ** (self.a / (self.a + self.b)) / ratio


@dataclass(frozen=True)
class ScalingLawFit:
    """A fitted law, the (K, 5) parameters of the laws fitted to bootstrap samples, the losses of held-out runs, and the
    limitations of the fit."""

    law: ScalingLaw
    bootstrap_laws: np.ndarray
    residual: float  # root mean square residual in log L of the fitted runs
    held_out: np.ndarray  # (m, 2): measured and predicted L of the held-out runs
    _: KW_ONLY
    doubts: tuple[str, ...]

    def bootstrap_interval(self, name: str, level: float = 0.95) -> tuple[float, float]:
        """Return the bootstrap confidence interval of the parameter `name`: E, A, B, a or b."""
        low, high = np.quantile(self.bootstrap_laws[:, LAW_PARAMETERS.index(name)], [(1 - level) / 2, (1 + level) / 2])
        return float(low), float(high)

    def predict_with_interval(
        self, parameters: float, samples: float, level: float = 0.95
    ) -> tuple[float, float, float]:
        """Predict L for N and D. Return (L, low, high), with the interval over the laws of the bootstrap samples."""
        losses = [
            float(ScalingLaw.from_row(draw).loss(np.array(parameters), np.array(samples)))
            for draw in self.bootstrap_laws
        ]
        low, high = np.quantile(losses, [(1 - level) / 2, (1 + level) / 2])
        return float(self.law.loss(np.array(parameters), np.array(samples))), float(low), float(high)

    @property
    def largest_error(self) -> float | None:
        """Return the largest relative error on held-out runs; None if no runs are held out."""
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
    """Fit the law to runs with (n,) N, (n,) D and (n,) L. The fraction `hold_out` of the runs with the most compute N D
    is not fitted, but predicted. Intervals are from a bootstrap of the residuals in log L.

    Raises DataError for fewer than six runs to fit, for values that are not positive and finite, and for fewer than
    three values of N or of D.
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
    # the fit passes nearly through as many runs as it has parameters, and absorbs part of the noise of the others:
    # the smallest residuals are not resampled, and the others are scaled up
    free_errors = errors[np.argsort(np.abs(errors))[len(LAW_PARAMETERS) :]]
    residuals = free_errors * np.sqrt(len(log_runs) / len(free_errors))
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
    return ScalingLawFit(
        fit.law, fit.bootstrap_laws, fit.residual, fit.held_out, doubts=describe_doubts(fit, fitted_runs)
    )


def check_fit_runs(runs: np.ndarray) -> None:
    """Raise DataError if no law can be fitted to runs (n, 3) of N, D, L."""
    if not (np.isfinite(runs).all() and (runs > 0).all()):
        raise DataError("parameters, samples and losses must be above 0 and finite", "remove diverged runs")
    if len(runs) < MIN_FIT_RUNS:
        raise DataError(
            f"{len(runs)} runs cannot fit a scaling law", f"train at least {MIN_FIT_RUNS} runs of different sizes"
        )
    for column, name in enumerate(("size of the model", "number of samples")):
        if len(np.unique(runs[:, column])) < 3:
            raise DataError(
                f"fewer than three values of the {name} cannot fit an exponent",
                "vary model size and number of samples in a grid",
            )


def predict_log_loss(theta: np.ndarray, log_runs: np.ndarray) -> np.ndarray:
    """Compute the (n,) log L of a law. `theta` (5,) is log E, log A, log B, log a, log b; `log_runs` (n, 3) is log N,
    log D, log L."""
    e, a, b, alpha, beta = theta[0], theta[1], theta[2], np.exp(theta[3]), np.exp(theta[4])
    return np.logaddexp(np.logaddexp(a - alpha * log_runs[:, 0], b - beta * log_runs[:, 1]), e)


def huber_objective(theta: np.ndarray, log_runs: np.ndarray) -> tuple[float, np.ndarray]:
    """Return the Huber loss of the residuals in log L, and its gradient (5,) with respect to `theta`. The loss is
    summed over runs (n, 3) of log N, log D, log L, and scaled by `HUBER_WIDTH`."""
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
    """Minimise the Huber loss over runs (n, 3) of log N, log D, log L with L-BFGS from (s, 5) starts. Return the best
    parameters (5,)."""
    from scipy.optimize import minimize

    bounds = [(-20.0, 5.0)] * 3 + [(np.log(0.01), np.log(5.0))] * 2
    minima = [
        minimize(huber_objective, start, (log_runs,), "L-BFGS-B", jac=True, bounds=bounds, options={"maxiter": 500})
        for start in starts
    ]
    return min(minima, key=lambda found_minimum: found_minimum.fun).x


def unscale_parameters(theta: np.ndarray, scale: np.ndarray) -> tuple[float, ...]:
    """Convert (5,) parameters to E, A, B, a, b. They were fitted to N, D and L divided by their geometric means,
    `scale` (3,)."""
    e, a, b = np.exp(theta[:3]) * scale[2]
    alpha, beta = np.exp(theta[3:])
    return float(e), float(a * scale[0] ** alpha), float(b * scale[1] ** beta), float(alpha), float(beta)


def describe_doubts(fit: ScalingLawFit, fitted_runs: np.ndarray) -> tuple[str, ...]:
    """Return one sentence for each limitation of a fit to runs (n, 3)."""
    doubts = []
    for name, column, subject in (("a", 0, "parameters"), ("b", 1, "samples")):
        low, high = fit.bootstrap_interval(name)
        if high - low > MAX_EXPONENT_WIDTH:
            ratio = fitted_runs[:, column].max() / fitted_runs[:, column].min()
            doubts.append(
                f"the exponent {name} is between {low:.2f} and {high:.2f}: {subject} that differ by a factor of "
                f"{ratio:.3g} are not enough to determine it"
            )
    if fit.bootstrap_interval("E")[0] < 0.05 * fitted_runs[:, 2].min():
        doubts.append("the irreducible loss E is not distinguishable from 0: no run is near it")
    error = fit.largest_error
    if error is not None and error > max(0.05, 4 * fit.residual):
        doubts.append(f"the error on a held-out run is {error:.0%}: do not extrapolate the law")
    return tuple(doubts)


@dataclass(frozen=True)
class IsoflopProfile:
    """An isoFLOP profile: among runs with one budget C, the N that minimises the loss, by a parabola in log N. N and
    loss are None if the smallest or the largest model is best."""

    flops: float
    parameters: float | None
    loss: float | None
    runs: int


def fit_isoflop_profiles(
    parameters: Sequence[float], flops: Sequence[float], losses: Sequence[float], tolerance: float = 0.1
) -> list[IsoflopProfile]:
    """Fit a profile to each group of at least three runs whose C differ by less than `tolerance`, given (n,) N, C and L
    (arXiv:2203.15556, section 3.2)."""
    table = np.stack([np.asarray(column, np.float64) for column in (parameters, flops, losses)], 1)
    table = table[np.argsort(table[:, 1], kind="stable")]
    steps = np.flatnonzero(np.diff(np.log(table[:, 1])) > np.log1p(tolerance)) + 1
    groups = np.split(table, steps)
    return [fit_isoflop_profile(group) for group in groups if len(np.unique(group[:, 0])) >= 3]


def fit_isoflop_profile(group: np.ndarray) -> IsoflopProfile:
    """Fit the profile of the runs with one budget, (n, 3) of N, C, L."""
    x, y = np.log(group[:, 0]), group[:, 2]
    budget = float(np.exp(np.log(group[:, 1]).mean()))
    curve, slope, level = np.polyfit(x - x.mean(), y, 2)
    lowest = -slope / (2 * curve) if curve > 0 else np.inf
    if not x.min() < lowest + x.mean() < x.max():
        return IsoflopProfile(budget, None, None, len(group))
    return IsoflopProfile(budget, float(np.exp(lowest + x.mean())), float(level - slope**2 / (4 * curve)), len(group))
