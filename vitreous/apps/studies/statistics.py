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

CONFIDENCE_LEVEL = 0.95  # of every interval

Verdict = Literal["higher", "lower", "cannot be told"]


@dataclass(frozen=True)
class Estimate:
    """A mean of `count` values, and the interval that holds the true mean in 95 of 100 cases; none for one value."""

    mean: float
    interval: tuple[float, float] | None
    count: int

    @property
    def verdict(self) -> Verdict:
        """Whether the mean, of a difference, is above or below 0; an interval that contains 0 or one seed is
        inconclusive."""
        if self.interval is None or self.interval[0] <= 0 <= self.interval[1]:
            return "cannot be told"
        return "higher" if self.mean > 0 else "lower"


def estimate_mean(values: Sequence[float], level: float = CONFIDENCE_LEVEL) -> Estimate:
    """The mean of values, (n,), with Student's t interval: mean +- t s / sqrt(n), s with n - 1, t of n - 1 degrees.

    It assumes that values of different seeds are independent and nearly normal. Raises ValueError for no value.
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
    """The mean of second - first over the seeds that both have, {seed: value}, with the interval of a paired t test.

    Runs of one seed share their weights' draws and the order of the images, as far as their models allow; a difference
    within a seed varies less for it. None where no seed has both.
    """
    shared = sorted(first.keys() & second.keys())
    if not shared:
        return None
    return estimate_mean([second[seed] - first[seed] for seed in shared], level)
