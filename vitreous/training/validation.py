"""Evaluation during training: the choice of images and metrics, and model outputs computed by all processes of a
run."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
import torch

from vitreous.data.loader import EvalLoader
from vitreous.data.split import Split
from vitreous.errors import Interrupted
from vitreous.evaluation.evaluator import Evaluator, Ragged, SplitOutputs
from vitreous.evaluation.rankme import FeatureEvaluator
from vitreous.inference.engine import ENGINE_CHUNK, TorchEngine, build_readable_mask
from vitreous.inference.options import Precision
from vitreous.models.zoo import Model
from vitreous.tasks.report import Report
from vitreous.training.batches import RunInputs
from vitreous.training.ranks import Ranks
from vitreous.training.run import Run

VAL_PREFIX, TRAINING_IMAGES_PREFIX = "val/", "training_images/"  # prefixes of metric names, by the evaluated images
MAX_SAMPLED_IMAGES = 2_048  # maximum number of training images that are evaluated without validation images


class ValidationImages(NamedTuple):
    """The images on which a run is evaluated, the evaluators that compute its metrics, and the prefix of the metrics'
    names."""

    split: Split
    evaluators: list[Evaluator]
    prefix: str


def choose_validation_images(evaluators: Sequence[Evaluator], inputs: RunInputs) -> ValidationImages:
    """Choose the images and evaluators of a run: the validation images with all evaluators.

    If there are no validation images, at most `MAX_SAMPLED_IMAGES` evenly spaced training images are used, with the
    evaluators that need no labels.
    """
    if inputs.val is not None:
        return ValidationImages(inputs.val, list(evaluators), VAL_PREFIX)
    train = inputs.train
    indices = np.linspace(0, len(train) - 1, min(MAX_SAMPLED_IMAGES, len(train))).astype(np.int64)
    unlabelled = [
        unlabelled_evaluator
        for evaluator in evaluators
        if (unlabelled_evaluator := evaluator.without_labels()) is not None
    ]
    return ValidationImages(train.take(indices), unlabelled, TRAINING_IMAGES_PREFIX)


def sample_feature_images(images: ValidationImages) -> ValidationImages:
    """Return at most `MAX_SAMPLED_IMAGES` of the images, evenly spaced, with an evaluator of features that needs no
    labels. The evaluation is fast enough to run before the first step."""
    indices = np.linspace(0, len(images.split) - 1, min(MAX_SAMPLED_IMAGES, len(images.split))).astype(np.int64)
    return ValidationImages(images.split.take(indices), [FeatureEvaluator()], images.prefix)


def feature_history(report: Report, images: ValidationImages, metrics: Path) -> dict[str, float]:
    """Return the feature metrics of an evaluation for collapse warnings. "highest_rankme" is the highest RankMe
    (effective rank of the features) in the file `metrics`, a metrics.jsonl."""
    history = {name: report.metrics.get(name) for name in ("rankme", "feature_std")}
    if history["rankme"] is not None:
        history["highest_rankme"] = max(read_metric_values(metrics, f"{images.prefix}rankme"), default=None)
    return {name: value for name, value in history.items() if value is not None}


def read_metric_values(path: Path, name: str) -> list[float]:
    """Return all values of a metric in a metrics.jsonl, in order."""
    lines = path.read_text("utf-8").splitlines() if path.is_file() else []
    values = [json.loads(line)[name] for line in lines if f'"{name}"' in line and line.endswith("}")]
    return [value for value in values if value is not None]


def evaluate_images(
    images: ValidationImages,
    model: Model,
    run: Run,
    precision: Precision | Literal["fp16"],
    *,
    ranks: Ranks,
    is_stopped: Callable[[], bool],
) -> tuple[Report, dict[str, float | None]]:
    """Evaluate a model on `images`, of which every process computes a share.

    Returns the report of the primary evaluator, and all metrics by their names in metrics.jsonl. Raises Interrupted, in
    all processes, when `is_stopped` returns true in one process.
    """
    engine_precision: Precision = "fp32" if precision == "fp16" else precision
    engine = TorchEngine(model, run.preprocess, ranks.device(run.device), engine_precision)
    compute_outputs = partial(compute_distributed_outputs, engine, ranks, run.data.workers, is_stopped)
    reports = [
        evaluator.report(*(compute_outputs(evaluator, split) for split in evaluator.required_splits(images.split)))
        for evaluator in images.evaluators
    ]
    metrics = {name: value for report in reversed(reports) for name, value in report.metrics.items()}
    return reports[0], {f"{images.prefix}{name}": value for name, value in metrics.items()}


def compute_distributed_outputs(
    engine: TorchEngine, ranks: Ranks, workers: int, is_stopped: Callable[[], bool], evaluator: Evaluator, split: Split
) -> SplitOutputs:
    """Compute the outputs of a model for a split. Every process computes a share of the images, each image once, and
    receives all outputs.

    Raises Interrupted, in all processes, when `is_stopped` returns true in one process.
    """

    def check_signals(images: int) -> None:
        """Raise Interrupted if this process has to stop; called after every chunk of images."""
        if is_stopped():
            raise Interrupted("evaluation interrupted")

    positions, device = np.arange(len(split)), str(engine.device)
    local_indices = positions[positions // ENGINE_CHUNK % ranks.world == ranks.rank]
    interrupted, outputs, readable = 0.0, np.zeros((0, 0), np.float32), np.ones(0, dtype=bool)
    try:
        reader = EvalLoader(split if ranks.world == 1 else split.take(local_indices), engine.preprocess, workers)
        outputs, unreadable = evaluator.outputs(engine, reader, on_images=check_signals)
        readable = build_readable_mask(len(local_indices), unreadable)
    except Interrupted:
        interrupted = 1.0
    if ranks.all_reduce_max([interrupted], device)[0]:
        raise Interrupted("evaluation interrupted")
    if ranks.world > 1:
        arrays = [
            local_indices,
            readable,
            *((outputs.table, outputs.lengths) if isinstance(outputs, Ragged) else (outputs,)),
        ]
        gathered = [ranks.gather(torch.from_numpy(array).to(device)) for array in arrays]
        order, readable, *gathered_outputs = (torch.cat(arrays).cpu().numpy() for arrays in gathered)
        inverse_order = np.argsort(order)
        outputs, readable = (
            Ragged(*gathered_outputs).take(inverse_order)
            if len(gathered_outputs) > 1
            else gathered_outputs[0][inverse_order],
            readable[inverse_order],
        )
    return SplitOutputs(split, outputs, readable)
