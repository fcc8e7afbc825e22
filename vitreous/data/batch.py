"""Batches: dicts whose entries all have the sample axis first.

A tensor is (B, …), a list has length B: `images` (B, C, *image), `labels` if the data have any, `samples` (B,) int64;
crops are `images` (B, 2, C, h, w) and `local` (B, V, C, h, w), boxes a list of (n, 4).
"""

from __future__ import annotations

from typing import Any

Batch = dict[str, Any]


def count_batch_samples(batch: Batch) -> int:
    """Return the number of samples in a batch."""
    return len(next(iter(batch.values())))


def slice_batch(batch: Batch, start: int, stop: int) -> Batch:
    """Return the samples [start, stop) of a batch; tensors are views."""
    return {name: entry[start:stop] for name, entry in batch.items()}
