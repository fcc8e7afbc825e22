"""Means over seeds, their intervals, and differences between runs of the same seeds.

In shapes, n is seeds.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import scipy

CONFIDENCE_LEVEL = 0.95  # of all intervals

Verdict = Literal["higher", "lower", "inconclusive"]


@dataclass(frozen=True)
class Estimate:
    """A mean of `count` values and its 95 % confidence interval, None for one value."""

    mean: float
    interval: tuple[float, float] | None
    count: int

    @property
    def verdict(self) -> Verdict:
        """Return whether a mean difference is above or below 0, or inconclusive: its interval contains 0, or it has one
        seed."""
        if self.interval is None or self.interval[0] <= 0 <= self.interval[1]:
            return "inconclusive"
        return "higher" if self.mean > 0 else "lower"


def estimate_mean(values: Sequence[float], level: float = CONFIDENCE_LEVEL) -> Estimate:
    """Estimate the mean of (n,) values with Student's t interval: mean ± t s / sqrt(n), with n - 1 degrees of freedom.

    Assumes that values of different seeds are independent and nearly normal. Raises ValueError without values.
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
    """Estimate the mean of second - first, {seed: value}, over common seeds with the interval of a paired t test.

    Runs of one seed share initial weights and image order as far as their models allow, which reduces the variance of
    their difference. Returns None without a common seed.
    """
    shared = sorted(first.keys() & second.keys())
    if not shared:
        return None
    return estimate_mean([second[seed] - first[seed] for seed in shared], level)
