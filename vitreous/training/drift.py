"""Drift guard: stop a run that continues from weights when its features become worse than at its start.

The guarded metric is the main metric of a self-supervised run: k-NN accuracy if the images have labels, otherwise
RankMe, on the same images in every evaluation.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

from vitreous.tasks.report import Report
from vitreous.training.run import Run


@dataclass(frozen=True)
class DriftGuard:
    """The evaluations that a drift guard compares, which a checkpoint stores in its state.json.

    - `metric`, `initial_value`: the name of the guarded metric, and its value before the first step.
    - `steps`, `values`: the last consecutive evaluations below the limit: their steps, and the values of the metric.
    """

    metric: str = ""
    initial_value: float = 0.0
    steps: tuple[int, ...] = ()
    values: tuple[float, ...] = ()

    def start(self, report: Report) -> DriftGuard:
        """Return a guard that compares with the evaluation of the initial weights."""
        metric, value = report.headline
        return DriftGuard(metric, value)

    def update(self, report: Report, step: int, share: float) -> DriftGuard:
        """Compare an evaluation with the initial value. The evaluation is below the limit if its value has fallen by
        more than `share` of the initial value; any other evaluation starts the count again."""
        value = report.headline[1]
        if not self.metric or value >= self.initial_value * (1 - share):
            return replace(self, steps=(), values=())
        return replace(self, steps=(*self.steps, step), values=(*self.values, value))

    def has_drifted(self, run: Run) -> bool:
        """Whether the run has to stop: its last `drift_patience` evaluations are below the limit."""
        return run.drift_guard > 0 and len(self.steps) >= run.drift_patience

    def describe_drift(self, run: Run) -> str:
        """Describe in one line why the run stopped: the metric at the start, the values below the limit, their
        steps."""
        values = ", ".join(f"{value:.4g} at step {step}" for step, value in zip(self.steps, self.values, strict=True))
        limit = self.initial_value * (1 - run.drift_guard)
        return f"drift guard: {self.metric} was {self.initial_value:.4g} at the start (limit {limit:.4g}), now {values}"

    def to_dict(self) -> dict[str, Any]:
        """Convert to a JSON object."""
        return asdict(self)

    @classmethod
    def from_dict(cls, stored: dict[str, Any] | None) -> DriftGuard:
        """Restore a guard from the output of `to_dict`."""
        return (
            cls(**{**stored, "steps": tuple(stored["steps"]), "values": tuple(stored["values"])}) if stored else cls()
        )
