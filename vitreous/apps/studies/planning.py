"""The cost of a study: a rough estimate for the list of studies, and a forecast from a few timed steps before its first
run."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import Any

from vitreous.apps.studies.factory import MIN_RUN_STEPS, StudyRun
from vitreous.apps.studies.study import Scale, Study, StudyCell, StudySetting, order_with_parents
from vitreous.errors import UsageError
from vitreous.jobs.preview import time_training_steps
from vitreous.progress import ProgressListener
from vitreous.recipes.architecture import choose_architecture
from vitreous.recipes.derive import apply_train_options
from vitreous.recipes.names import DEFAULT_RECIPE_NAMES
from vitreous.recipes.options import TrainOptions
from vitreous.recipes.recipe import REFERENCE_DATASETS
from vitreous.recipes.registry import RECIPES, get_recipe
from vitreous.system.cores import get_peak_memory
from vitreous.training.run import Run

TRAINING_BUDGET_SHARE = 0.8  # fraction of a budget for training steps; the rest is for evaluation, saving and pages


@dataclass(frozen=True)
class Forecast:
    """The cost of the missing runs of a study on this machine, if they are trained one after the other."""

    runs: int
    num_complete: int
    steps: int  # total of the missing runs
    seconds: float  # total of these steps
    _: KW_ONLY
    peak_memory_bytes: int | None
    exaflops: float

    def affordable_share(self, budget: float) -> float:
        """Return the fraction of the steps that fits into a budget in seconds, at most 1. Raises UsageError if the
        budget is too short."""
        share = min(1.0, TRAINING_BUDGET_SHARE * budget / self.seconds) if self.seconds else 1.0
        num_missing = self.runs - self.num_complete
        if share < 1 and share * self.steps < MIN_RUN_STEPS * num_missing:
            min_seconds = MIN_RUN_STEPS * num_missing * self.seconds / self.steps / TRAINING_BUDGET_SHARE
            problem = f"a budget of {budget:g} s is too short for {num_missing} runs of {MIN_RUN_STEPS} steps"
            raise UsageError(problem, f"use at least {min_seconds:.0f}s, or fewer --seeds")
        return share


def forecast_study(runs: list[StudyRun], listener: ProgressListener) -> Forecast:
    """Time a few steps of each kind of incomplete run, and add up the cost. Nothing is written."""
    seconds_by_key: dict[Any, float] = {}
    seconds, steps, exaflops = 0.0, 0, 0.0
    missing_runs = [study_run for study_run in runs if not study_run.is_complete]
    for study_run in missing_runs:
        run = study_run.run
        timing_key = (run.model, repr(run.objective), run.optimizer.name, run.step_size, repr(run.views))
        if timing_key not in seconds_by_key:
            seconds_by_key[timing_key] = time_training_steps(run, study_run.inputs, listener)[0]
        seconds += seconds_by_key[timing_key] * run.steps
        steps += run.steps
        exaflops += estimate_training_flops(run) / 1e18
    memory = get_peak_memory(missing_runs[0].run.device) if missing_runs else None
    return Forecast(
        len(runs),
        len(runs) - len(missing_runs),
        steps=steps,
        seconds=seconds,
        peak_memory_bytes=memory,
        exaflops=exaflops,
    )


def estimate_training_flops(run: Run) -> float:
    """Estimate the FLOPs of a run as three forward passes per sample. Objectives with a decoder, a teacher or dropped
    patches differ."""
    return 6 * run.model.macs() * run.total


def estimate_study_cost(study: Study, scale: Scale) -> dict[str, Any]:
    """Estimate the number of runs and the exaFLOPs of a study on the reference dataset of a scale, without opening the
    dataset. A study without training costs 0."""
    if not study.trains_models:
        return {"scale": scale.name, "runs": 0, "exaflops": 0.0}
    info, _ = REFERENCE_DATASETS[scale.data]
    cells = order_with_parents(study.cells(StudySetting(scale, max(info.size))))
    flops = sum(estimate_training_flops(derive_scale_run(cell, scale)) for cell in cells)
    return {"scale": scale.name, "runs": scale.seeds * len(cells), "exaflops": scale.seeds * flops / 1e18}


def format_study_cost(cost: dict[str, Any]) -> str:
    """Format the result of `estimate_study_cost`: runs and exaFLOPs."""
    return f"{cost['runs']} runs, {cost['exaflops']:.2g} exaFLOPs" if cost["runs"] else "no training"


def derive_scale_run(cell: StudyCell, scale: Scale) -> Run:
    """Return the run of a cell on the reference dataset of a scale."""
    info, classes = REFERENCE_DATASETS[scale.data]
    options: TrainOptions = cell.options
    name = options.recipe or ("digits" if scale.data == "digits" else "small")
    recipe = get_recipe(name)
    model = choose_architecture(
        options,
        info,
        classes if recipe.objective.labelled else 0,
        recipe=None if name in DEFAULT_RECIPE_NAMES else RECIPES[name],
    )
    return apply_train_options(recipe.make(model, info, options), options)
