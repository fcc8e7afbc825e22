"""The result of a head of the protocol `heads`."""

from __future__ import annotations

from typing import Any, NamedTuple

from vitreous.evaluation.head_grid import CandidateHeads
from vitreous.tasks.report import Report


class HeadResult(NamedTuple):
    """The result of a head: its name and chosen settings, the metric on held-out training images, the report on the
    evaluated images, the duration, and the metric of every candidate. `heads` is the trained head, if it was trained by
    gradient descent."""

    head: str
    settings: dict[str, Any]
    val: float | None
    report: Report
    seconds: float
    candidates: list[dict[str, Any]]
    heads: CandidateHeads | None = None

    def summary(self) -> dict[str, Any]:
        """Return the entry of the document's `results`."""
        entry = {"head": self.head, "settings": self.settings, "val": self.val, "seconds": self.seconds}
        return entry | {"candidates": self.candidates} | self.report.summary()
