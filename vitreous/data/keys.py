"""Randomness as a function of where it is used, never of what ran before: (seed, epoch, sample, view) or (seed, step).

Nothing has to be saved to continue a run, and the number of workers cannot matter.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

_GOLDEN, _M1, _M2 = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_UINT64_MAX = 2**64 - 1


def derive_keys(*parts: int | np.ndarray) -> np.ndarray:
    """Integers (or arrays that broadcast) -> uint64 keys: SplitMix64's finaliser (Steele et al., 2014), part after
    part."""
    with np.errstate(over="ignore"):
        state = np.uint64(0)
        for part in parts:
            state = state + np.asarray(part).astype(np.uint64) + _GOLDEN
            state = (state ^ (state >> np.uint64(30))) * _M1
            state = (state ^ (state >> np.uint64(27))) * _M2
            state = state ^ (state >> np.uint64(31))
    return np.asarray(state)


def derive_key(*parts: int) -> int:
    """The same of integers alone, as an integer: for one image, a tenth of what arrays cost."""
    state = 0
    for part in parts:
        state = (state + int(part) + int(_GOLDEN)) & _UINT64_MAX
        state = ((state ^ (state >> 30)) * int(_M1)) & _UINT64_MAX
        state = ((state ^ (state >> 27)) * int(_M2)) & _UINT64_MAX
        state ^= state >> 31
    return state


def draw_uniform(keys: np.ndarray, draws: int) -> np.ndarray:
    """(n,) keys -> (n, draws) float64 numbers in [0, 1), 53 bits each."""
    return (derive_keys(keys[:, None], np.arange(draws)[None]) >> np.uint64(11)) * 2.0**-53


def draw_normal(keys: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """(n,) keys -> (n, *shape) float32 numbers of a standard normal distribution, each row by a generator of its
    own."""
    rows = np.empty((len(keys), *shape), np.float32)
    for row, one in zip(rows, keys.tolist(), strict=True):
        np.random.Generator(np.random.Philox(key=one)).standard_normal(out=row, dtype=np.float32)
    return rows


def draw_permutation(count: int, seed: int, epoch: int) -> np.ndarray:
    """The order of `count` samples in an epoch, (count,) int64: their keys, sorted."""
    return np.argsort(derive_keys(seed, epoch, np.arange(count)), kind="stable")


@contextmanager
def fork_torch_rng(*parts: int) -> Iterator[None]:
    """Run a piece of library code that draws from torch's global CPU generator, seeded by a key, and leave no trace.

    The generator is seeded by itself: `torch.manual_seed` would prepare GPUs too, two milliseconds for every image.
    """
    import torch  # here: opening a data set takes a tenth of a second without it, and seconds with it

    before = torch.default_generator.get_state()
    try:
        torch.default_generator.manual_seed(derive_key(*parts) >> 1)
        yield
    finally:
        torch.default_generator.set_state(before)
