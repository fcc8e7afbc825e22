"""Batches: dicts whose entries all have the sample axis first.

For B samples, a tensor is (B, …) and a list has length B. Entries: `images` (B, C, *image), `samples` (B,) int64
(indices in the split), and `labels` if the data have any. Multi-crop batches have global crops `images` (B, 2, C, h, w)
and local crops `local` (B, V, C, h, w). Boxes are a list of (n, 4), one tensor per image.
"""

from __future__ import annotations

from typing import Any

Batch = dict[str, Any]


def count_batch_samples(batch: Batch) -> int:
    """Return the number of samples in a batch."""
    return len(next(iter(batch.values())))


def slice_batch(batch: Batch, start: int, stop: int) -> Batch:
    """Return the batch of the samples [start, stop) of a batch; its tensors are views."""
    return {name: entry[start:stop] for name, entry in batch.items()}
