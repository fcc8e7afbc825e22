"""The command `train --dry-run`: show the plan of a run, its cost, and its duration on this machine, without
training."""

from __future__ import annotations

import math
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

from vitreous.jobs.plan import plan_run, resolve_data_option
from vitreous.jobs.transfer import check_lr_grid_options, forecast_lr_grid, plan_transfer_protocol
from vitreous.nn.sizes import format_size
from vitreous.progress import ProgressListener
from vitreous.recipes.options import TrainOptions
from vitreous.system.cores import get_peak_memory
from vitreous.system.machine import configure_process
from vitreous.training.batches import RunInputs
from vitreous.training.folder import RunFolder
from vitreous.training.loop import TrainingState, run_training_loop
from vitreous.training.run import Run
from vitreous.training.scale import check_activation_memory
from vitreous.training.session import Session

TIMED_STEPS = 4  # number of timed steps, after a warm-up step


def preview_run(options: TrainOptions, listener: ProgressListener) -> tuple[Run, dict[str, Any]]:
    """Build the run from the options, and the document of its plan. A few steps are timed on the real data; their
    results are discarded."""
    options = resolve_data_option(options)
    check_lr_grid_options(options)
    folder, run, inputs, dataset = plan_run(options, listener)
    check_activation_memory(run, 1)
    seconds, parameters = time_training_steps(run, inputs, listener)
    document = {
        "model": run.model.name(),
        "recipe": run.recipe,
        "resolution": format_size(run.model.image),
        "tokens": run.model.prefix + math.prod(run.model.grid),
        "parameters": parameters,
        "gflops_per_image": round(2 * run.model.macs() / 1e9, 4),
        "device": run.device,
        "precision": run.precision,
        "images": run.data.images,
        "batch_size": run.batch_size,
        "steps": run.steps,
        "epochs": run.epochs,
        "peak_memory_bytes": get_peak_memory(run.device),
        "seconds_per_step": round(seconds, 4),
        "images_per_second": round(run.step_size / seconds, 1),
        "minutes": round(seconds * run.steps / 60, 1),
        "out": str(folder.path),
    }
    if options.lr_grid is not None:
        document |= forecast_lr_grid(run, plan_transfer_protocol(run, dataset, inputs, options), seconds)
    return run, document


def time_training_steps(run: Run, inputs: RunInputs, listener: ProgressListener) -> tuple[float, int]:
    """Measure the median seconds of a training step on the real data, after a warm-up step. The trained weights are
    discarded.

    Also returns the number of parameters of the objective, including a decoder or a teacher.
    """
    configure_process()
    times: list[float] = []
    step_text = f"{run.step_size} images per step"

    def record_step_time(state: TrainingState) -> None:
        """Record the time at the end of a step, and stop the loop after the last timed step."""
        times.append(time.perf_counter())
        listener.progress("timing steps", len(times), TIMED_STEPS + 1, step_text)
        state.should_stop = len(times) > TIMED_STEPS

    with tempfile.TemporaryDirectory() as scratch:
        session = Session(run, inputs, RunFolder(Path(scratch)), listener)
        state = session.build()
        listener.progress("timing steps", 0, TIMED_STEPS + 1, step_text)
        run_training_loop(state, session.batches(state), [(1, record_step_time)])
    steps = [end - start for start, end in pairwise(times)] or [float("nan")]
    return sorted(steps)[len(steps) // 2], sum(p.numel() for p in state.objective.parameters())
