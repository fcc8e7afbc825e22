"""Judging models that give a class to every pixel or answer with objects, where it is known what is where."""

from __future__ import annotations

import os
import time
from dataclasses import replace
from typing import cast

from vitreous.data.annotations.painted import (
    has_object_masks,
    keep_object_targets,
    paint_class_maps,
    with_object_masks,
    wrap_splits,
)
from vitreous.data.annotations.panoptic import find_thing_classes
from vitreous.data.class_order import RelabelledSplit, find_class_indices
from vitreous.data.loader import EvalLoader
from vitreous.data.run_data import choose_split, iterate_calibration_images, iterate_sample_images, open_run_data
from vitreous.data.screen import check_unreadable_images, find_readable_samples
from vitreous.data.split import Data
from vitreous.errors import DataError
from vitreous.evaluation.coco import CocoEvaluator
from vitreous.evaluation.evaluator import Evaluator, SplitOutputs
from vitreous.evaluation.pixels import SegmentationEvaluator
from vitreous.inference.engine import build_readable_mask
from vitreous.inference.engine_choice import build_evaluation_engine
from vitreous.inference.open_model import open_bundle
from vitreous.reports.answers import EvaluationSettings, SplitPredictions, make_progress_counter
from vitreous.system.cores import default_worker_count
from vitreous.system.machine import describe_emulation, pick_device
from vitreous.tasks.detection import Detection
from vitreous.tasks.report import Report
from vitreous.tasks.segmentation import Segmentation
from vitreous.weights.bundle import Bundle


def evaluate_dense(
    run: str | os.PathLike[str],
    data: str | os.PathLike[str] | None,
    split: str | None,
    computing: EvaluationSettings,
    boundary: bool = False,
    tiles: bool = False,
) -> tuple[SplitPredictions, Report]:
    """Judge a model's class maps or objects on a split of `data`, by default the run's own; without a split, of test or
    else val. Of class maps the `boundary` is judged too, if so; objects are looked for by `tiles` of large images.

    `raw` of the answers is what the evaluator has for each image: a confusion matrix of pixels, (n, K * K) float32, or
    the pairs of answers and objects. Raises DataError for data without annotations, for classes that the model does not
    know, and for unreadable images, with bad_images `skip` only where none can be read; WeightsError and UsageError as
    `open_bundle` does.
    """
    bundle = open_bundle(run, note=computing.listener.note, dense=True)
    source, opened = open_run_data(run, data, split, labelled=False)
    name = choose_split(opened, split, computing.listener.note)
    return evaluate_dense_split(
        run, bundle, source=source, opened=opened, name=name, computing=computing, boundary=boundary, tiles=tiles
    )


def evaluate_dense_split(
    run: str | os.PathLike[str],
    bundle: Bundle,
    source: str,
    opened: Data,
    name: str,
    computing: EvaluationSettings,
    boxes: bool = False,
    boundary: bool = False,
    tiles: bool = False,
) -> tuple[SplitPredictions, Report]:
    """Judge a model on a split, by its `name`, of data that are open; objects by their `boxes` alone, if so, and by
    `tiles` of large images, class maps by their `boundary` too.

    Raises DataError as `evaluate_dense` does.
    """
    settings = {"boxes": boxes, "boundary": boundary, "tiles": tiles}
    opened, evaluator = EVALUATION_PREPARERS[bundle.task.name](bundle, opened, name, computing, settings)
    chosen, preprocess = opened.split(name), bundle.preprocess
    if slow := describe_emulation(computing.how.precision, pick_device(computing.how.device)):
        computing.listener.note(slow)
    engine = build_evaluation_engine(
        bundle.model,
        preprocess,
        options=computing.how,
        images=len(chosen),
        note=computing.listener.note,
        pictures=lambda: iterate_calibration_images(run, preprocess, lambda: iterate_sample_images(opened, preprocess)),
    )
    workers = default_worker_count() if computing.workers is None else computing.workers
    started, on_images = time.perf_counter(), make_progress_counter(computing.listener, "evaluate", len(chosen))
    rows, bad = evaluator.outputs(engine, EvalLoader(chosen, preprocess, workers), on_images)
    check_unreadable_images(bad, len(chosen), computing.bad_images)
    find_readable_samples(chosen, bad)  # there must be some
    answers = SplitPredictions(
        os.fspath(run),
        bundle,
        source=source,
        opened=opened,
        name=name,
        split=chosen,
        raw=rows,
        bad=frozenset(bad),
        started=started,
        evaluator=evaluator,
    )
    return answers, evaluator.report(SplitOutputs(chosen, rows, build_readable_mask(len(chosen), bad)))


def prepare_map_evaluation(
    bundle: Bundle, opened: Data, name: str, computing: EvaluationSettings, settings: dict[str, bool]
) -> tuple[Data, Evaluator]:
    """Return the data as class maps, and what evaluates them on the split `name`, the `boundary` too if that is set.
    Raises DataError as `evaluate_dense` does."""
    opened = paint_class_maps(opened)
    check_map_classes(bundle, opened)
    things = find_thing_classes(opened.split(name), len(opened.classes))
    return opened, SegmentationEvaluator(bundle.task.classes, settings["boundary"], things)


def prepare_object_evaluation(
    bundle: Bundle, opened: Data, name: str, computing: EvaluationSettings, settings: dict[str, bool]
) -> tuple[Data, Evaluator]:
    """Return the data as objects, and what evaluates them, by `boxes` alone or by `tiles` if these are set. Raises
    DataError as `evaluate_dense` does."""
    opened, masks = keep_object_targets(opened), cast(Detection, bundle.task).masks and not settings["boxes"]
    if masks and not has_object_masks(opened):
        computing.listener.note(f"{opened.name} has boxes, no masks: the model's boxes are judged")
        masks = False
    opened = renumber_classes(with_object_masks(opened, masks), bundle.task.classes)
    named = tuple(opened.frequency.get(name, "") for name in bundle.task.classes)
    return opened, CocoEvaluator(bundle.task.classes, masks, settings["tiles"], named if any(named) else ())


#: how data are prepared, and evaluated, for dense predictions of each task
EVALUATION_PREPARERS = {Segmentation.name: prepare_map_evaluation, Detection.name: prepare_object_evaluation}


def renumber_classes(opened: Data, classes: tuple[str, ...]) -> Data:
    """Return data whose objects have the numbers of a model's `classes`, by name; some may be none of the data's.

    Raises DataError for a class that the model does not know.
    """
    order = find_class_indices(opened, classes)
    if opened.classes == classes:
        return opened
    return replace(wrap_splits(opened, lambda split: RelabelledSplit(split, order, len(classes))), classes=classes)


def check_map_classes(bundle: Bundle, data: Data) -> None:
    """Raise DataError for data whose classes of pixels are not those of the model, in the same order."""
    if bundle.task.classes != data.classes:
        first, second = (
            ", ".join(names[:8]) + (", …" if len(names) > 8 else "") for names in (bundle.task.classes, data.classes)
        )
        problem = f"the classes of {data.name} are not the model's: the model has {first}, the data have {second}"
        raise DataError(problem, "name the classes of the maps as the model has them, a line each, in classes.txt")
