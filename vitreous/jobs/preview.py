"""A run looked at before it is made: what it is, what it costs, and how long it will take here."""

from __future__ import annotations

import math
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

from vitreous.jobs.plan import plan, with_data
from vitreous.jobs.transfer import check_options, forecast, plan_protocol
from vitreous.nn.sizes import format_size
from vitreous.progress import Listener
from vitreous.recipes.options import TrainOptions
from vitreous.system.cores import peak_memory
from vitreous.system.machine import settle_process
from vitreous.training.batches import Inputs
from vitreous.training.folder import Folder
from vitreous.training.loop import State, fit
from vitreous.training.run import Run
from vitreous.training.session import Session

TIMED = 4  # steps, after one to warm up


def preview(options: TrainOptions, listener: Listener) -> tuple[Run, dict[str, Any]]:
    """The run that the options give, and its plan; a few steps are timed on the real data and thrown away."""
    options = with_data(options)
    check_options(options)
    folder, run, inputs, opened = plan(options, listener)
    seconds, parameters = time_steps(run, inputs, listener)
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
        "peak_memory_bytes": peak_memory(run.device),
        "seconds_per_step": round(seconds, 4),
        "images_per_second": round(run.step_size / seconds, 1),
        "minutes": round(seconds * run.steps / 60, 1),
        "out": str(folder.path),
    }
    if options.lr_grid is not None:
        document |= forecast(run, plan_protocol(run, opened, inputs, options), seconds)
    return run, document


def time_steps(run: Run, inputs: Inputs, listener: Listener) -> tuple[float, int]:
    """Seconds of a training step, the median of a few on the real data after one to warm up, which are thrown away; and
    the parameters of the objective, its decoder or teacher included."""
    settle_process()
    times: list[float] = []
    size = f"{run.step_size} images each"

    def tick(state: State) -> None:
        times.append(time.perf_counter())
        listener.progress("timing steps", len(times), TIMED + 1, size)
        state.halt = len(times) > TIMED

    with tempfile.TemporaryDirectory() as scratch:
        session = Session(run, inputs, Folder(Path(scratch)), listener)
        state = session.build()
        listener.progress("timing steps", 0, TIMED + 1, size)
        fit(state, session.batches(state), [(1, tick)])
    steps = [after - before for before, after in pairwise(times)] or [float("nan")]
    return sorted(steps)[len(steps) // 2], sum(p.numel() for p in state.objective.parameters())
