"""What an evaluation found, for one label an image or several."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

DRAWS = 1000  # bootstrap
DENSE = 2000  # classes of a confusion matrix that is written down whole


@dataclass(frozen=True)
class Report:
    """What `judge` found; `summary` is what people and files are shown."""

    images: int
    unreadable: int
    figures: dict[str, float | None]
    intervals: dict[str, tuple[float, float] | None]
    per_class: list[dict[str, Any]]
    # (m, 3) int64: label, answer, count, where there are any; None where images have several labels
    cells: np.ndarray | None

    @property
    def several(self) -> bool:
        """Whether images have several labels."""
        return self.cells is None

    @property
    def confusion(self) -> np.ndarray | None:
        """(K, K) int64 counts, rows are labels; None where images have several labels, or there are more than `DENSE`
        classes."""
        if self.cells is None or len(self.per_class) > DENSE:
            return None
        matrix = np.zeros((len(self.per_class),) * 2, np.int64)
        matrix[self.cells[:, 0], self.cells[:, 1]] = self.cells[:, 2]
        return matrix

    @property
    def leading(self) -> tuple[str, float]:
        """The figure to look at first, by its name for people: top-1, or mAP where images have several labels."""
        name = "map" if "map" in self.figures else "top1"
        return {"map": "mAP", "top1": "top-1"}[name], self.figures[name] or 0.0

    @property
    def ends(self) -> dict[str, list[float] | None]:
        """The intervals as lists, which is what they are in a file."""
        return {name: None if interval is None else list(interval) for name, interval in self.intervals.items()}

    def summary(self) -> dict[str, Any]:
        """The figures, the number of images, and the 95 % intervals."""
        return {**self.figures, "images": self.images, "unreadable": self.unreadable, "interval": self.ends}
