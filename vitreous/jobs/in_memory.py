"""Train on images in memory. The run folder is temporary, and only the trained model is kept."""

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

SIGINT_CODE = 130  # exit code of Interrupted after SIGINT
NO_CHECKPOINT_STEPS = 10**9  # checkpoint interval in steps for no checkpoints, because the run is never resumed


def train_in_memory(
    data: Data, options: TrainOptions, listener: ProgressListener, augment: bool = True
) -> tuple[Bundle, dict[str, Any], list[dict[str, Any]]]:
    """Train on a dataset in memory in the same way as `train`. Returns the bundle, the summary and the lines of
    metrics.

    The temporary run folder is removed, and no page is written. `augment=False` disables augmentation. The state of
    PyTorch's random generator is restored. Raises the errors of `train`. SIGINT raises KeyboardInterrupt and SIGTERM
    raises SystemExit; the model is then lost.
    """
    with TemporaryDirectory(prefix="vitreous-") as temporary_folder, torch.random.fork_rng(devices=[]):
        options = replace(
            options, out=str(Path(temporary_folder) / "run"), save_every=options.save_every or NO_CHECKPOINT_STEPS
        )
        folder, run, inputs, _ = plan_run(options, listener, dataset=data)
        if not augment and isinstance(run.views, Augment):
            run = replace(run, views=Augment())
        try:
            run_trial(run, inputs, folder, listener)
        except Interrupted as interruption:  # callers may continue after other errors, but must stop after a signal
            code = interruption.code
            raise (KeyboardInterrupt() if code == SIGINT_CODE else SystemExit(code)) from None
        return (*read_run_results(folder), read_json_lines(folder.metrics))


def read_run_results(folder: RunFolder) -> tuple[Bundle, dict[str, Any]]:
    """Read the bundle and the summary of a run that has ended. Raises NonFiniteError if its loss became NaN or
    infinite."""
    summary = json.loads(folder.summary.read_text("utf-8"))
    if "failure" in summary:
        raise NonFiniteError(summary["failure"], "use a lower learning rate")
    return load_bundle(folder.bundle), {key: value for key, value in summary.items() if key not in ("run", "bundle")}
