"""Select a run's best weights by its evaluations on the validation images, and decide on early stopping.

An evaluation is better than another if its main metric is better. If the main metrics are equal, the evaluation with
the lower negative log-likelihood (NLL) is better (`Report.score`).
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, replace
from typing import Any

from vitreous.data.split import Split
from vitreous.errors import UsageError
from vitreous.tasks.report import Report
from vitreous.training.drift import DriftGuard
from vitreous.training.run import Run


@dataclass(frozen=True)
class BestEvaluation:
    """The best evaluation of a run so far, which a checkpoint stores in its state.json.

    - `step`, `epoch`: the optimiser step and the epoch of the best evaluation; 0 before the first evaluation.
    - `metric`, `value`, `nll`: the name and value of its main metric, and its negative log-likelihood.
    - `better`: whether the "higher" or the "lower" value of the metric is better.
    - `evaluations`: the number of evaluations so far.
    - `evaluations_since`: the number of evaluations since the last improvement.
    """

    step: int = 0
    epoch: float = 0.0
    metric: str = ""
    value: float = -math.inf
    nll: float = math.inf
    evaluations: int = 0
    evaluations_since: int = 0
    better: str = "higher"

    @property
    def score(self) -> tuple[float, float]:
        """The `Report.score` of the best evaluation; lower than any other score before the first evaluation."""
        return (self.value if self.better == "higher" or not self.step else -self.value), -self.nll

    def update(self, report: Report, step: int, epoch: float) -> BestEvaluation:
        """Compare a further evaluation with the best one, and return the new best evaluation.

        If the scores are equal and there is no NLL, as for a detector that detects nothing yet, the later evaluation
        becomes the best, but it does not count as an improvement.
        """
        metric, value = report.headline
        nll = report.metrics.get("nll")
        nll = math.inf if nll is None or not math.isfinite(nll) else nll
        if report.score > self.score or (report.score == self.score and nll == math.inf):
            evaluations_since = 0 if report.score > self.score else self.evaluations_since + 1
            return BestEvaluation(
                step,
                epoch,
                metric=metric,
                value=value,
                nll=nll,
                evaluations=self.evaluations + 1,
                evaluations_since=evaluations_since,
                better=report.better,
            )
        return replace(self, evaluations=self.evaluations + 1, evaluations_since=self.evaluations_since + 1)

    def is_out_of_patience(self, run: Run) -> bool:
        """Whether the run stops early: `evaluations_since` has reached `run.early_stop`."""
        return run.early_stop is not None and self.evaluations_since >= run.early_stop

    def to_dict(self) -> dict[str, Any] | None:
        """Convert to a JSON object; None before the first evaluation."""
        return asdict(self) | {"nll": self.nll if math.isfinite(self.nll) else None} if self.step else None

    @classmethod
    def from_dict(cls, stored: dict[str, Any] | None) -> BestEvaluation:
        """Restore the best evaluation from the output of `to_dict`."""
        if not stored:
            return cls()
        fields: dict[str, Any] = {**stored, "nll": math.inf if stored["nll"] is None else stored["nll"]}
        return cls(**fields)


def check_selection(run: Run, val: Split | None) -> None:
    """Raise UsageError if `keep_best` or `early_stop` is set, but the data has no labels or the run has no validation
    images."""
    option = "--keep-best" if run.keep_best else "--early-stop"
    if (run.keep_best or run.early_stop) and not (run.objective.labelled or run.data.classes):
        raise UsageError(
            f"{option} requires labelled validation images, but the data has no labels",
            f"use data with classes, or leave {option} out",
        )
    if (run.keep_best or run.early_stop) and (val is None or not len(val)):
        raise UsageError(
            f"{option} requires validation images, but the run has none",
            f"use data with a val split, or leave {option} out",
        )


def describe_selection(
    run: Run, best: BestEvaluation, bundle_step: int, step: int, *, drift: DriftGuard
) -> dict[str, Any] | None:
    """Return the `selection` entry of summary.json: whether the bundle has the best or the last weights, and whether
    the run stopped early. `bundle_step` is the step of the bundle's weights, `step` the last step. None if neither
    `keep_best` nor `early_stop` is set, and `drift` has not ended the run."""
    has_drifted = drift.has_drifted(run)
    if not (run.keep_best or run.early_stop or has_drifted):
        return None
    return {
        "weights": "best" if (run.keep_best or has_drifted) and bundle_step == best.step else "last",
        "weights_step": bundle_step,
        "stopped_early": step < run.steps,
        "drift": drift.describe_drift(run) if has_drifted else None,
        "best": best.to_dict(),
    }
