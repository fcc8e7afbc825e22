"""Objects of a data set by the numbers that a model has for their classes."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from vitreous.data.annotations.painted import Prepared
from vitreous.data.annotations.target import Target


@dataclass(frozen=True, eq=False)
class Renumbered(Prepared):
    """A split whose objects of class k have the label `order[k]`, (K,) int64, of `count` classes."""

    order: np.ndarray
    count: int

    @property
    def labels(self) -> np.ndarray:
        """(n, count) float32, 1 for each class that an image holds."""
        table = np.zeros((len(self.split), self.count), np.float32)
        table[:, self.order] = self.split.labels
        return table

    def target(self, sample: int) -> Target:
        """Read what is on an image. Raises DataError."""
        own = self.split.target(sample)
        verified = None if own.verified is None else own.verified.take(self.order)
        return replace(own, labels=self.order[own.labels], verified=verified)
