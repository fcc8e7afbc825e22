"""Train on images that are in memory, as `train` does, in a temporary run folder; what stays is the bundle."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from vitreous.data.augmentation.augment import Augment
from vitreous.data.split import Data
from vitreous.errors import Interrupted, NonFiniteError
from vitreous.jobs.plan import plan_run
from vitreous.jobs.trial import run_trial
from vitreous.progress import ProgressListener
from vitreous.recipes.options import TrainOptions
from vitreous.training.folder import RunFolder, read_json_lines
from vitreous.weights.bundle import Bundle, load_bundle

SIGINT_CODE = 130  # of Interrupted
NO_CHECKPOINT_STEPS = 10**9  # steps between two checkpoints of a run that nobody resumes


def train_in_memory(
    data: Data, options: TrainOptions, listener: ProgressListener, augment: bool = True
) -> tuple[Bundle, dict[str, Any], list[dict[str, Any]]]:
    """Train on `data` by the plan and the loop of `train`: the bundle, the summary, and the lines of metrics.

    The run folder is a temporary one, which is removed, and no page is written. `augment=False` shows every image as it
    is. PyTorch's random generator is left as it was. Raises what `train` raises, but for signals: SIGINT is a
    KeyboardInterrupt, SIGTERM a SystemExit, and nothing is kept.
    """
    with TemporaryDirectory(prefix="vitreous-") as home, torch.random.fork_rng(devices=[]):
        options = replace(options, out=str(Path(home) / "run"), save_every=options.save_every or NO_CHECKPOINT_STEPS)
        folder, run, inputs, _ = plan_run(options, listener, opened=data)
        if not augment and isinstance(run.views, Augment):
            run = replace(run, views=Augment())
        try:
            run_trial(run, inputs, folder, listener)
        except Interrupted as stop:  # callers that go on after any other error, as grids do, have to end
            raise (KeyboardInterrupt() if stop.code == SIGINT_CODE else SystemExit(stop.code)) from None
        return (*read_run_results(folder), read_json_lines(folder.metrics))


def read_run_results(folder: RunFolder) -> tuple[Bundle, dict[str, Any]]:
    """The bundle and the summary of a run that has ended. Raises NonFiniteError where its loss became infinite."""
    summary = json.loads(folder.summary.read_text("utf-8"))
    if "failure" in summary:
        raise NonFiniteError(summary["failure"], "try a lower learning rate")
    return load_bundle(folder.bundle), {key: value for key, value in summary.items() if key not in ("run", "bundle")}
