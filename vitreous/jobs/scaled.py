"""Plan a run for many devices without having them: `train DATA --dry-run --world 512 --device h100`."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from vitreous.data.loader import TrainLoader
from vitreous.data.pace import MAX_TIMED_IMAGES, measure_decode_seconds
from vitreous.data.split import Split
from vitreous.errors import DataError, UsageError
from vitreous.jobs.plan import plan_run, resolve_data_option
from vitreous.models.zoo import build_model
from vitreous.nn.no_init import NoInitMode
from vitreous.objectives.base import Objective
from vitreous.progress import ProgressListener
from vitreous.recipes.options import TrainOptions
from vitreous.training.ranks import Ranks
from vitreous.training.run import Run
from vitreous.training.scale import ACCELERATORS, forecast_run
from vitreous.training.slices import check_processes
from vitreous.training.tune import prepare_fine_tuning


def preview_distributed_run(options: TrainOptions, listener: ProgressListener) -> tuple[Run, dict[str, Any]]:
    """Build the run from the options, and its plan on `options.world` devices of type `options.device`.

    The data are read, but no step runs; `options.images` replaces the number of images. Raises UsageError for a device
    type without data sheet and for invalid numbers.
    """
    name, world = (options.device or "").lower(), options.world or 0
    if name not in ACCELERATORS:
        problem = (
            f"--device {options.device} has no data sheet, which --world needs" if name else "--world needs --device"
        )
        raise UsageError(problem, f"use one of {', '.join(ACCELERATORS)}")
    if world < 1 or (options.images is not None and options.images < 1):
        raise UsageError("--world and --images must be at least 1")
    precision = options.precision if options.precision not in (None, "auto") else "bf16"
    local = replace(resolve_data_option(options), device="cpu", precision=precision, shards=1, compile=False)
    _, run, inputs, _ = plan_run(local, listener)
    if options.images:
        run = replace(run, data=replace(run.data, images=options.images))
    check_processes(run, Ranks(0, world, 0, is_initialised=True))
    loader, length = (
        TrainLoader(inputs.train, run.preprocess, run.views, 0, exact=run.data.exact),
        measure_mean_file_size(inputs.train),
    )
    seconds = measure_decode_seconds(loader) if length else 0.0
    forecast = forecast_run(run, build_meta_objective(run), world, name, length)
    cores = float(str(forecast["images_per_second_per_machine"])) * seconds
    document = {
        "model": run.model.name(),
        "recipe": run.recipe,
        "parameters": forecast.pop("parameters"),
        "gflops_per_image": round(2 * run.model.macs() / 1e9, 4),
        "precision": run.precision,
        "images": run.data.images,
        "batch_size": run.batch_size,
        "steps": run.steps,
        "epochs": run.epochs,
        **forecast,
        "decoding_cores_per_machine": None if length is None else math.ceil(cores),
    }
    return run, document


def build_meta_objective(run: Run) -> Objective:
    """Build the objective of a run on the meta device: its tensors have shapes but no memory."""
    with torch.device("meta"), NoInitMode():
        model = build_model(run.model)
        prepare_fine_tuning(model, run.tune)
        return run.objective.build(model, run.objective_setting(multilabel=False))


def measure_mean_file_size(split: Split) -> float | None:
    """Return the mean file size of a few files, evenly spaced over a split. Returns None if the split has pixels and no
    files."""
    lengths = []
    for sample in np.linspace(0, len(split) - 1, min(MAX_TIMED_IMAGES, len(split))).astype(int).tolist():
        try:
            stored = split.raw(sample)
        except DataError:
            continue
        lengths += [len(stored)] if isinstance(stored, bytes) else []
    return float(np.mean(lengths)) if lengths else None
