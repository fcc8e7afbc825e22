"""Judging models that give a class to every pixel, on images whose class maps are known."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

from vitreous.cores import default_workers
from vitreous.data.annotations.painted import paint_classes
from vitreous.data.loader import EvalLoader
from vitreous.data.screen import readable, refuse
from vitreous.data.split import Data
from vitreous.errors import DataError
from vitreous.evaluation.engine import make_engine, readable_mask
from vitreous.evaluation.evaluator import Outputs
from vitreous.evaluation.pixels import SegmentationEvaluator
from vitreous.evaluation.report import Report
from vitreous.machine import pick_device, warning
from vitreous.reports.answers import Answered, Computing, progress_counter
from vitreous.reports.opening import calibrating, choose_split, data_for, examples, open_bundle
from vitreous.weights.adopt import bundle_in
from vitreous.weights.bundle import DESCRIPTION, Bundle
from vitreous.weights.options import known_of
from vitreous.weights.tasks import Segmentation


def gives_class_maps(run: str | os.PathLike[str]) -> bool:
    """Whether a run or a bundle gives a class to every pixel, by its description alone; False for what has none."""
    try:
        folder = None if known_of(run) else bundle_in(Path(run))
        task = json.loads((folder / DESCRIPTION).read_text("utf-8")).get("task") if folder else None
    except (OSError, ValueError, AttributeError, TypeError):
        return False
    return isinstance(task, dict) and task.get("name") == Segmentation.name


def judge_scenes(
    run: str | os.PathLike[str], data: str | os.PathLike[str] | None, split: str | None, computing: Computing
) -> tuple[Answered, Report]:
    """Judge a model's class maps on a split of `data`, by default the run's own; without a split, of test or else val.

    `raw` of the answers has an image's confusion matrix in each row, (n, K * K) float32. Raises DataError for data
    without annotations, for other classes, and for unreadable images, with bad_images `skip` only where none can be
    read; WeightsError and UsageError as `open_bundle` does.
    """
    bundle = open_bundle(run, note=computing.listener.note, dense=True)
    source, opened = data_for(run, data, split, labelled=False)
    opened = paint_classes(opened)
    name = choose_split(opened, split, computing.listener.note)
    return judge_opened(run, bundle, source, opened, name, computing)


def judge_opened(
    run: str | os.PathLike[str], bundle: Bundle, source: str, opened: Data, name: str, computing: Computing
) -> tuple[Answered, Report]:
    """Judge a model's class maps on a split, by its `name`, of data that are open and have class maps.

    Raises DataError as `judge_scenes` does.
    """
    check_classes(bundle, opened)
    chosen, preprocess = opened.split(name), bundle.preprocess
    if slow := warning(computing.how.precision, pick_device(computing.how.device)):
        computing.listener.note(slow)
    engine = make_engine(
        bundle.model,
        preprocess,
        computing.how,
        lambda: calibrating(run, preprocess, lambda: examples(opened, preprocess)),
    )
    evaluator = SegmentationEvaluator(bundle.pixel_classes)
    workers = default_workers() if computing.workers is None else computing.workers
    started, on_images = time.perf_counter(), progress_counter(computing.listener, "evaluate", len(chosen))
    rows, bad = evaluator.outputs(engine, EvalLoader(chosen, preprocess, workers), on_images)
    if bad and computing.bad_images == "stop":
        raise refuse(bad, len(chosen))
    readable(chosen, bad)  # there must be some
    answers = Answered(os.fspath(run), bundle, source, opened, name, chosen, rows, frozenset(bad), started)
    return answers, evaluator.report(Outputs(chosen, rows, readable_mask(len(chosen), bad)))


def check_classes(bundle: Bundle, data: Data) -> None:
    """Raise DataError for data whose classes of pixels are not those of the model, in the same order."""
    if bundle.pixel_classes != data.classes:
        first, second = (
            ", ".join(names[:8]) + (", …" if len(names) > 8 else "") for names in (bundle.pixel_classes, data.classes)
        )
        problem = f"the classes of {data.name} are not the model's: the model has {first}, the data have {second}"
        raise DataError(problem, "name the classes of the maps as the model has them, a line each, in classes.txt")
