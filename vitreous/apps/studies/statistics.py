"""Means over seeds, their confidence intervals, and differences between runs with the same seeds.

Shapes: n seeds.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import scipy

CONFIDENCE_LEVEL = 0.95  # confidence level of all intervals

Verdict = Literal["higher", "lower", "inconclusive"]


@dataclass(frozen=True)
class Estimate:
    """The mean of `count` values and its 95 % confidence interval, which is None for a single value."""

    mean: float
    interval: tuple[float, float] | None
    count: int

    @property
    def verdict(self) -> Verdict:
        """Return whether a mean difference is `higher` or `lower` than 0. It is `inconclusive` if its interval contains
        0, or if there is only one seed."""
        if self.interval is None or self.interval[0] <= 0 <= self.interval[1]:
            return "inconclusive"
        return "higher" if self.mean > 0 else "lower"


def estimate_mean(values: Sequence[float], level: float = CONFIDENCE_LEVEL) -> Estimate:
    """Estimate the mean of (n,) values with Student's t interval: mean ± t s / sqrt(n), with n - 1 degrees of freedom.

    Assumes that the values of different seeds are independent and nearly normal. Raises ValueError if there are no
    values.
    """
    array = np.asarray(values, np.float64)
    if not len(array):
        raise ValueError("a mean needs a value")
    mean, count = float(array.mean()), len(array)
    if count == 1:
        return Estimate(mean, None, 1)
    quantile = float(scipy.special.stdtrit(count - 1, (1 + level) / 2))
    half_width = quantile * float(array.std(ddof=1)) / math.sqrt(count)
    return Estimate(mean, (mean - half_width, mean + half_width), count)


def estimate_difference(
    first: dict[int, float], second: dict[int, float], level: float = CONFIDENCE_LEVEL
) -> Estimate | None:
    """Estimate the mean of second - first over common seeds, with the interval of a paired t test. `first` and `second`
    are {seed: value}.

    Runs with the same seed share initial weights and image order as far as their models allow, which reduces the
    variance of their difference. Returns None if there is no common seed.
    """
    shared = sorted(first.keys() & second.keys())
    if not shared:
        return None
    return estimate_mean([second[seed] - first[seed] for seed in shared], level)
