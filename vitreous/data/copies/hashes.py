"""Digests that are equal."""

from __future__ import annotations

import numpy as np


def first_equal(keys: np.ndarray) -> np.ndarray:
    """(n, 2) uint64 -> (n,) int64: for each row the first one that is equal to it, which may be itself."""
    order = np.lexsort((keys[:, 1], keys[:, 0]))  # stable: equal rows stay in their order
    ranked = keys[order]
    new = np.ones(len(keys), bool)
    new[1:] = (ranked[1:] != ranked[:-1]).any(1)
    first = np.empty(len(keys), np.int64)
    first[order] = order[np.maximum.accumulate(np.where(new, np.arange(len(keys)), 0))]
    return first
