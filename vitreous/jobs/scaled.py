"""Estimate a run on many devices that this machine does not have: `train DATA --dry-run --world 512 --device h100`."""

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
    """Build the run from the options, and the document of its plan on `options.world` devices of the type
    `options.device`.

    The dataset is read, but no step is executed. `options.images` replaces the number of training images. Raises
    UsageError for a device type without a data sheet and for invalid numbers.
    """
    name, world = (options.device or "").lower(), options.world or 0
    if name not in ACCELERATORS:
        problem = (
            f"--world needs the data sheet of a device, and --device {options.device} has none"
            if name
            else "--world needs --device"
        )
        raise UsageError(problem, f"use one of {', '.join(ACCELERATORS)}")
    if world < 1 or (options.images is not None and options.images < 1):
        raise UsageError("--world and --images must be at least 1")
    precision = options.precision if options.precision not in (None, "auto") else "bf16"
    local_options = replace(resolve_data_option(options), device="cpu", precision=precision, shards=1, compile=False)
    _, run, inputs, _ = plan_run(local_options, listener)
    if options.images:
        run = replace(run, data=replace(run.data, images=options.images))
    check_processes(run, Ranks(0, world, 0, is_initialised=True))
    loader = TrainLoader(inputs.train, run.preprocess, run.views, 0, exact=run.data.exact)
    file_size = measure_mean_file_size(inputs.train)
    decode_seconds = measure_decode_seconds(loader) if file_size else 0.0
    forecast = forecast_run(run, build_meta_objective(run), world, name, file_size)
    decoding_cores = float(str(forecast["images_per_second_per_machine"])) * decode_seconds
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
        "decoding_cores_per_machine": None if file_size is None else math.ceil(decoding_cores),
    }
    return run, document


def build_meta_objective(run: Run) -> Objective:
    """Build the objective of a run on the meta device, where tensors have shapes but no memory."""
    with torch.device("meta"), NoInitMode():
        model = build_model(run.model)
        prepare_fine_tuning(model, run.tune)
        return run.objective.build(model, run.objective_setting(multilabel=False))


def measure_mean_file_size(split: Split) -> float | None:
    """Return the mean file size in bytes of a few images, evenly spaced over a split. Returns None if the split
    contains pixels instead of files."""
    file_sizes = []
    for sample in np.linspace(0, len(split) - 1, min(MAX_TIMED_IMAGES, len(split))).astype(int).tolist():
        try:
            content = split.raw(sample)
        except DataError:
            continue
        file_sizes += [len(content)] if isinstance(content, bytes) else []
    return float(np.mean(file_sizes)) if file_sizes else None
