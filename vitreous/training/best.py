"""Which weights of a run are the best on its validation images, and when no better ones are to be expected.

An evaluation is better than another one if its leading figure is better or, where that is the same, its NLL is lower
(`Report.score`).
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, replace
from typing import Any

from vitreous.data.split import Split
from vitreous.errors import UsageError
from vitreous.tasks.report import Report
from vitreous.training.run import Run


@dataclass(frozen=True)
class BestEvaluation:
    """The best evaluation so far, which a checkpoint keeps in its state.json.

    `step`: the optimiser step after which it was made, 0 before the first; `epoch` the same in epochs. `value` is its
    leading figure, called `figure`, of which the higher or lower is `better`. `evaluations`: how many were made;
    `since`: how many after the first one of this value, none of them better.
    """

    step: int = 0
    epoch: float = 0.0
    figure: str = ""
    value: float = -math.inf
    nll: float = math.inf
    evaluations: int = 0
    since: int = 0
    better: str = "higher"

    @property
    def score(self) -> tuple[float, float]:
        """`Report.score` of the best evaluation; before the first one, less than any other."""
        return (self.value if self.better == "higher" or not self.step else -self.value), -self.nll

    def after(self, report: Report, step: int, epoch: float) -> BestEvaluation:
        """The best of these evaluations and a further one; of equal ones without an NLL, as of a detector that finds
        nothing yet, the later, which does not restart `since`."""
        figure, value = report.leading
        nll = report.figures.get("nll")
        nll = math.inf if nll is None or not math.isfinite(nll) else nll
        if report.score > self.score or (report.score == self.score and nll == math.inf):
            since = 0 if report.score > self.score else self.since + 1
            return BestEvaluation(
                step,
                epoch,
                figure=figure,
                value=value,
                nll=nll,
                evaluations=self.evaluations + 1,
                since=since,
                better=report.better,
            )
        return replace(self, evaluations=self.evaluations + 1, since=self.since + 1)

    def is_out_of_patience(self, run: Run) -> bool:
        """Whether the run ends here: as many evaluations in a row as it has patience for were not better."""
        return run.early_stop is not None and self.since >= run.early_stop

    def to_dict(self) -> dict[str, Any] | None:
        """As JSON has it; None before the first evaluation."""
        return asdict(self) | {"nll": self.nll if math.isfinite(self.nll) else None} if self.step else None

    @classmethod
    def from_dict(cls, stored: dict[str, Any] | None) -> BestEvaluation:
        """What `to_dict` wrote."""
        if not stored:
            return cls()
        known: dict[str, Any] = {**stored, "nll": math.inf if stored["nll"] is None else stored["nll"]}
        return cls(**known)


def check_selection(run: Run, val: Split | None) -> None:
    """Raise UsageError where a run is to choose by validation images, and there are none, or none with labels."""
    option = "--keep-best" if run.keep_best else "--early-stop"
    if (run.keep_best or run.early_stop) and not (run.objective.labelled or run.data.classes):
        raise UsageError(
            f"{option} chooses by the labels of validation images, and these have none",
            "name data with classes, or leave it out",
        )
    if (run.keep_best or run.early_stop) and (val is None or not len(val)):
        raise UsageError(
            f"{option} chooses by the validation images, and the run has none",
            "name data with a val split, or leave it out",
        )


def describe_selection(run: Run, best: BestEvaluation, shipped_step: int, step: int) -> dict[str, Any] | None:
    """What the summary says: `shipped_step` is the step whose weights the bundle has, `step` the last one. None for a
    run that chooses nothing."""
    if not (run.keep_best or run.early_stop):
        return None
    return {
        "kept": "best" if run.keep_best and shipped_step == best.step else "last",
        "kept_step": shipped_step,
        "stopped_early": step < run.steps,
    } | {"best": best.to_dict()}
