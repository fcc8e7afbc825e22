"""Principal components, of filters as of features."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Principal(NamedTuple):
    """The first K components of rows with F numbers: the `mean` (F,), `directions` (K, F) of length one, and `share`
    (K,), which part of the rows' variance each explains."""

    mean: Tensor
    directions: Tensor
    share: Tensor

    def scores(self, rows: Tensor) -> Tensor:
        """(n, F) -> (n, K): where rows lie along the directions."""
        return (rows - self.mean) @ self.directions.T


def principal(rows: Tensor, count: int) -> Principal:
    """(n, F) -> at most `count` components of the rows about their mean, float32, no more than there can be.

    A direction's sign is arbitrary; here its largest number is positive. Rows that do not vary have directions of
    zeros.
    """
    exact = rows.double()
    mean = exact.mean(0)
    centred = exact - mean
    wide = centred.shape[1] > centred.shape[0]
    values, vectors = torch.linalg.eigh(centred @ centred.T if wide else centred.T @ centred)  # the smaller of the two
    count = max(1, min(count, len(centred) - 1, centred.shape[1]))
    values, vectors = values.flip(0).clamp(min=0), vectors.flip(1)[:, :count].T
    directions = vectors @ centred if wide else vectors
    directions = directions / directions.norm(dim=1, keepdim=True).clamp(min=1e-30)
    largest = directions.gather(1, directions.abs().argmax(1, keepdim=True))
    directions = torch.where(largest < 0, -directions, directions) * (values.sum() > 0)
    return Principal(mean.float(), directions.float(), (values[:count] / values.sum().clamp(min=1e-300)).float())
