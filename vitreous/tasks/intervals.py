"""95 % intervals and significance tests: closed forms for proportions, a seeded bootstrap over images for other
metrics.

In shapes, n is images, D draws of the bootstrap.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import scipy

DEFAULT_BOOTSTRAP_DRAWS, MIN_BOOTSTRAP_DRAWS = 1000, 100  # bootstrap draws: default, and minimum for large data
BOOTSTRAP_CHUNK = 1_000_000  # maximum number of images x draws in memory at a time
NORMAL_QUANTILE = 1.959963984540054  # 97.5 % quantile of the normal distribution

Interval = tuple[float, float]
#: draw counts (n, D), how often each draw contains each image -> values (..., D) of each metric by key
MetricFunction = Callable[[np.ndarray], dict[str, np.ndarray]]


def wilson_interval(hits: int, count: int) -> Interval:
    """Return the 95 % interval of the proportion hits / count (Wilson, 1927).

    The result equals `scipy.stats.binomtest(hits, count).proportion_ci(method="wilson")`, whose import takes a second.
    """
    if not count:
        return 0.0, 1.0
    p, spread = hits / count, NORMAL_QUANTILE * NORMAL_QUANTILE / count
    middle = (p + spread / 2) / (1 + spread)
    half = NORMAL_QUANTILE / (1 + spread) * math.sqrt(p * (1 - p) / count + spread / (4 * count))
    return max(0.0, middle - half), min(1.0, middle + half)


def mcnemar_p_value(only_a: int, only_b: int) -> float:
    """Return the exact two-sided p-value of McNemar's test (1947) from the numbers of images that only one of two
    models predicts correctly.

    The p-value is min(1, 2 P(X <= min(only_a, only_b))) with X binomial of only_a + only_b trials of probability 1/2; 1
    without such images.
    """
    return min(1.0, 2 * float(scipy.special.bdtr(min(only_a, only_b), only_a + only_b, 0.5)))


def paired_accuracy_interval(gained: int, lost: int, num_images: int) -> Interval:
    """Return the 95 % interval of the difference of two accuracies on the same images, (gained - lost) / num_images
    (Bonett and Price, 2012).

    `gained` and `lost` are the numbers of images that only the second and only the first model predicts correctly.
    """
    gained_share, lost_share = (gained + 1) / (num_images + 2), (lost + 1) / (num_images + 2)
    difference = gained_share - lost_share
    half = NORMAL_QUANTILE * math.sqrt(max(0.0, gained_share + lost_share - difference**2) / (num_images + 2))
    return max(-1.0, difference - half), min(1.0, difference + half)


def bootstrap_metrics(
    metrics: MetricFunction, num_images: int, draws: int = DEFAULT_BOOTSTRAP_DRAWS
) -> dict[str, np.ndarray]:
    """Bootstrap metrics over images. Returns the values (..., D) of each metric in D draws, which are the same in every
    call.

    `metrics` is called with the draw counts (n, d) float32 of a chunk of d draws, and returns values (..., d).
    """
    generator = np.random.default_rng(0)
    chunks, size = list[dict[str, np.ndarray]](), max(1, BOOTSTRAP_CHUNK // num_images)
    for start in range(0, draws, size):
        resampled_indices = (generator.integers(num_images, size=num_images) for _ in range(min(size, draws - start)))
        counts = [np.bincount(indices, minlength=num_images) for indices in resampled_indices]
        chunks.append(metrics(np.stack(counts, 1).astype(np.float32)))
    return {name: np.concatenate([chunk[name] for chunk in chunks], -1) for name in chunks[0]}


def percentile_interval(values: np.ndarray) -> Interval:
    """Return the interval between the 2.5 % and 97.5 % quantiles of the values (D,) of a metric in bootstrap draws."""
    return float(np.percentile(values, 2.5)), float(np.percentile(values, 97.5))
