"""The outputs of a model for validation images, computed by all processes of a run."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from vitreous.data.loader import EvalLoader
from vitreous.data.split import Split
from vitreous.errors import Interrupted
from vitreous.evaluation.evaluator import Evaluator, Outputs, Ragged
from vitreous.evaluation.rankme import FeatureEvaluator
from vitreous.evaluation.report import Report
from vitreous.inference.engine import CHUNK, TorchEngine, readable_mask
from vitreous.training.batches import Inputs
from vitreous.training.ranks import Ranks

VAL, TRAINING_IMAGES = "val/", "training_images/"  # what figures begin with in the metrics, by the images judged
SAMPLED = 2_048  # training images that are judged where there are none for validation


class Measured(NamedTuple):
    """The images that a run is judged on, what judges it, and what the names of its figures begin with."""

    split: Split
    evaluators: list[Evaluator]
    prefix: str


def measured(evaluators: Sequence[Evaluator], inputs: Inputs) -> Measured:
    """The validation images and all evaluators; without such images some of the training images, evenly spread, and
    what can be said of these."""
    if inputs.val is not None:
        return Measured(inputs.val, list(evaluators), VAL)
    train = inputs.train
    rows = np.linspace(0, len(train) - 1, min(SAMPLED, len(train))).astype(np.int64)
    able = [other for one in evaluators if (other := one.without_labels()) is not None]
    return Measured(train.take(rows), able, TRAINING_IMAGES)


def sample_features(images: Measured) -> Measured:
    """Return at most `SAMPLED` of the images, evenly spread, with metrics of features that need no labels: cheap enough
    to measure a model before its first step."""
    rows = np.linspace(0, len(images.split) - 1, min(SAMPLED, len(images.split))).astype(np.int64)
    return Measured(images.split.take(rows), [FeatureEvaluator()], images.prefix)


def feature_history(report: Report, images: Measured, metrics: Path) -> dict[str, float]:
    """Return the metrics of features of an evaluation, and "highest_rankme", the highest rank in a file of `metrics`,
    for alarms to compare with."""
    history = {name: report.figures.get(name) for name in ("rankme", "feature_deviation")}
    if history["rankme"] is not None:
        history["highest_rankme"] = max(recorded_values(metrics, f"{images.prefix}rankme"), default=None)
    return {name: value for name, value in history.items() if value is not None}


def recorded_values(path: Path, name: str) -> list[float]:
    """Return the values of a metric in a file of metrics, in order."""
    lines = path.read_text("utf-8").splitlines() if path.is_file() else []
    values = [json.loads(line)[name] for line in lines if f'"{name}"' in line and line.endswith("}")]
    return [value for value in values if value is not None]


def shared_outputs(
    engine: TorchEngine, ranks: Ranks, workers: int, stopped: Callable[[], bool], evaluator: Evaluator, split: Split
) -> Outputs:
    """The outputs of a model for a split, of which every process computes a share, each image once.

    Raises Interrupted, in all processes, when `stopped` says so in one.
    """

    def check_signals(images: int) -> None:
        if stopped():
            raise Interrupted("evaluation cut short")

    positions, device = np.arange(len(split)), str(engine.device)
    mine = positions[positions // CHUNK % ranks.world == ranks.rank]
    cut, rows, readable = 0.0, np.zeros((0, 0), np.float32), np.ones(0, dtype=bool)
    try:
        reader = EvalLoader(split if ranks.world == 1 else split.take(mine), engine.preprocess, workers)
        rows, bad = evaluator.outputs(engine, reader, on_images=check_signals)
        readable = readable_mask(len(mine), bad)
    except Interrupted:
        cut = 1.0
    if ranks.all_reduce_max([cut], device)[0]:
        raise Interrupted("evaluation cut short")
    if ranks.world > 1:
        parts = [mine, readable, *((rows.table, rows.lengths) if isinstance(rows, Ragged) else (rows,))]
        gathered = [ranks.gather(torch.from_numpy(part).to(device)) for part in parts]
        order, readable, *whole = (torch.cat(parts).cpu().numpy() for parts in gathered)
        back = np.argsort(order)
        rows, readable = Ragged(*whole).take(back) if len(whole) > 1 else whole[0][back], readable[back]
    return Outputs(split, rows, readable)
