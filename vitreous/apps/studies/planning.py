"""What a study costs: counted for the list, and by a few timed steps before its first run."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import Any

from vitreous.apps.studies.factory import LEAST_STEPS, StudyRun
from vitreous.apps.studies.study import Cell, Scale, Setting, Study, with_parents
from vitreous.errors import UsageError
from vitreous.jobs.preview import time_steps
from vitreous.progress import Listener
from vitreous.recipes.architecture import architecture
from vitreous.recipes.derive import apply
from vitreous.recipes.names import OWN
from vitreous.recipes.options import TrainOptions
from vitreous.recipes.recipe import SETS
from vitreous.recipes.registry import RECIPES, find
from vitreous.system.cores import peak_memory
from vitreous.training.run import Run

TRAINED = 0.8  # of a budget is for steps, the rest for judging, saving and the pages


@dataclass(frozen=True)
class Forecast:
    """What the runs of a study that are not made yet cost here, one after another."""

    runs: int
    complete: int
    steps: int  # of all runs to make
    seconds: float  # of their steps
    _: KW_ONLY
    peak_memory_bytes: int | None
    exaflops: float

    def share_of(self, budget: float) -> float:
        """The share of the steps that fits into a budget in seconds, at most 1. Raises UsageError for one that is too
        short to train anything."""
        share = min(1.0, TRAINED * budget / self.seconds) if self.seconds else 1.0
        todo = self.runs - self.complete
        if share < 1 and share * self.steps < LEAST_STEPS * todo:
            least = LEAST_STEPS * todo * self.seconds / self.steps / TRAINED
            problem = f"a budget of {budget:g} s is too short for {todo} runs of {LEAST_STEPS} steps"
            raise UsageError(problem, f"give at least {least:.0f}s, or fewer --seeds")
        return share


def forecast_study(runs: list[StudyRun], listener: Listener) -> Forecast:
    """Time a few steps of each kind of run that is not complete, and add up. Writes nothing."""
    timed: dict[Any, float] = {}
    seconds, steps, exaflops = 0.0, 0, 0.0
    todo = [one for one in runs if not one.complete]
    for one in todo:
        run = one.run
        kind = (run.model, repr(run.objective), run.optimizer.name, run.step_size, repr(run.views))
        if kind not in timed:
            timed[kind] = time_steps(run, one.inputs, listener)[0]
        seconds += timed[kind] * run.steps
        steps += run.steps
        exaflops += training_flops(run) / 1e18
    memory = peak_memory(todo[0].run.device) if todo else None
    return Forecast(
        len(runs), len(runs) - len(todo), steps=steps, seconds=seconds, peak_memory_bytes=memory, exaflops=exaflops
    )


def training_flops(run: Run) -> float:
    """FLOPs of a run from labels: three forward passes of every sample. An objective with a decoder, a teacher or
    dropped patches needs more, or less."""
    return 6 * run.model.macs() * run.total


def counted_cost(study: Study, scale: Scale) -> dict[str, Any]:
    """Runs and exaFLOPs of a study on the data that a scale is meant for, without opening any; none of a study that
    trains nothing."""
    if not study.trained:
        return {"scale": scale.name, "runs": 0, "exaflops": 0.0}
    info, _ = SETS[scale.data]
    cells = with_parents(study.cells(Setting(scale, max(info.size))))
    flops = sum(training_flops(counted_run(cell, scale)) for cell in cells)
    return {"scale": scale.name, "runs": scale.seeds * len(cells), "exaflops": scale.seeds * flops / 1e18}


def cost_text(cost: dict[str, Any]) -> str:
    """What `counted_cost` gives, in words."""
    return f"{cost['runs']} runs, {cost['exaflops']:.2g} EFLOP" if cost["runs"] else "nothing is trained"


def counted_run(cell: Cell, scale: Scale) -> Run:
    """The run of a cell on the data that a scale is meant for."""
    info, classes = SETS[scale.data]
    options: TrainOptions = cell.options
    name = options.recipe or ("digits" if scale.data == "digits" else "small")
    recipe = find(name)
    model = architecture(
        options, info, classes if recipe.objective.labelled else 0, recipe=None if name in OWN else RECIPES[name]
    )
    return apply(recipe.make(model, info, options), options)
