"""Evaluate semantic segmentation, object detection and instance segmentation on annotated data."""

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
    evaluation_settings: EvaluationSettings,
    boundary: bool = False,
    tiles: bool = False,
) -> tuple[SplitPredictions, Report]:
    """Open a run and a dataset, and evaluate the predicted class maps or objects of a split.

    `data` is the path of the dataset; None: the dataset of the run. If `split` is None, `test` is evaluated, or `val`
    if there is no test split. `boundary` adds boundary metrics for class maps. `tiles` detects objects in tiles of
    large images. `raw_logits` of the returned predictions is the evaluator's record of each image: a confusion matrix
    of pixels, (n, K * K) float32, or the matched predictions and objects. Raises DataError for data without
    annotations, for classes that the model lacks, and for unreadable images, with bad_images `skip` only if none is
    readable; WeightsError and UsageError as `open_bundle`.
    """
    bundle = open_bundle(run, note=evaluation_settings.listener.note, dense=True)
    source, dataset = open_run_data(run, data, split, labelled=False)
    name = choose_split(dataset, split, evaluation_settings.listener.note)
    return evaluate_dense_split(
        run,
        bundle,
        source=source,
        dataset=dataset,
        name=name,
        evaluation_settings=evaluation_settings,
        boundary=boundary,
        tiles=tiles,
    )


def evaluate_dense_split(
    run: str | os.PathLike[str],
    bundle: Bundle,
    source: str,
    dataset: Data,
    name: str,
    evaluation_settings: EvaluationSettings,
    boxes: bool = False,
    boundary: bool = False,
    tiles: bool = False,
) -> tuple[SplitPredictions, Report]:
    """Evaluate a segmentation model or a detector on the split `name` of an open dataset.

    `boxes` evaluates objects by boxes only, `tiles` detects them in tiles of large images, `boundary` adds boundary
    metrics for class maps. Raises DataError as `evaluate_dense`.
    """
    settings = {"boxes": boxes, "boundary": boundary, "tiles": tiles}
    dataset, evaluator = EVALUATION_PREPARERS[bundle.task.name](bundle, dataset, name, evaluation_settings, settings)
    data_split, preprocess = dataset.split(name), bundle.preprocess
    if emulation_note := describe_emulation(
        evaluation_settings.inference_options.precision, pick_device(evaluation_settings.inference_options.device)
    ):
        evaluation_settings.listener.note(emulation_note)
    engine = build_evaluation_engine(
        bundle.model,
        preprocess,
        options=evaluation_settings.inference_options,
        num_images=len(data_split),
        note=evaluation_settings.listener.note,
        calibration_images=lambda: iterate_calibration_images(
            run, preprocess, lambda: iterate_sample_images(dataset, preprocess)
        ),
    )
    workers = default_worker_count() if evaluation_settings.workers is None else evaluation_settings.workers
    start_time, on_images = (
        time.perf_counter(),
        make_progress_counter(evaluation_settings.listener, "evaluate", len(data_split)),
    )
    outputs, read_errors = evaluator.outputs(engine, EvalLoader(data_split, preprocess, workers), on_images)
    check_unreadable_images(read_errors, len(data_split), evaluation_settings.bad_images)
    find_readable_samples(data_split, read_errors)  # raises DataError if none is readable
    predictions = SplitPredictions(
        os.fspath(run),
        bundle,
        source=source,
        data=dataset,
        name=name,
        split=data_split,
        raw_logits=outputs,
        unreadable=frozenset(read_errors),
        start_time=start_time,
        evaluator=evaluator,
    )
    return predictions, evaluator.report(
        SplitOutputs(data_split, outputs, build_readable_mask(len(data_split), read_errors))
    )


def prepare_map_evaluation(
    bundle: Bundle, dataset: Data, name: str, evaluation_settings: EvaluationSettings, settings: dict[str, bool]
) -> tuple[Data, Evaluator]:
    """Convert the annotations to class maps, and build their evaluator for the split `name`.

    `settings["boundary"]` adds boundary metrics. Raises DataError as `evaluate_dense`.
    """
    dataset = paint_class_maps(dataset)
    check_map_classes(bundle, dataset)
    thing_classes = find_thing_classes(dataset.split(name), len(dataset.classes))
    return dataset, SegmentationEvaluator(bundle.task.classes, settings["boundary"], thing_classes)


def prepare_object_evaluation(
    bundle: Bundle, dataset: Data, name: str, evaluation_settings: EvaluationSettings, settings: dict[str, bool]
) -> tuple[Data, Evaluator]:
    """Convert the annotations to objects, and build their evaluator.

    `settings["boxes"]` ignores masks, `settings["tiles"]` detects objects in tiles. Raises DataError as
    `evaluate_dense`.
    """
    dataset, masks = keep_object_targets(dataset), cast(Detection, bundle.task).masks and not settings["boxes"]
    if masks and not has_object_masks(dataset):
        evaluation_settings.listener.note(f"{dataset.name} has boxes but no masks: evaluating the model's boxes")
        masks = False
    dataset = renumber_classes(with_object_masks(dataset, masks), bundle.task.classes)
    class_frequencies = tuple(dataset.frequency.get(name, "") for name in bundle.task.classes)
    return dataset, CocoEvaluator(
        bundle.task.classes, masks, settings["tiles"], class_frequencies if any(class_frequencies) else ()
    )


#: task name -> function that returns the converted dataset and its evaluator
EVALUATION_PREPARERS = {Segmentation.name: prepare_map_evaluation, Detection.name: prepare_object_evaluation}


def renumber_classes(dataset: Data, classes: tuple[str, ...]) -> Data:
    """Convert the class indices of objects to those of the model's `classes`, matched by name.

    The data may lack some of the classes. Raises DataError for a class that the model lacks.
    """
    order = find_class_indices(dataset, classes)
    if dataset.classes == classes:
        return dataset
    return replace(wrap_splits(dataset, lambda split: RelabelledSplit(split, order, len(classes))), classes=classes)


def check_map_classes(bundle: Bundle, data: Data) -> None:
    """Raise DataError if the data do not have the model's pixel classes, in the same order."""
    if bundle.task.classes != data.classes:
        model_classes, data_classes = (
            ", ".join(names[:8]) + (", …" if len(names) > 8 else "") for names in (bundle.task.classes, data.classes)
        )
        problem = (
            f"classes of {data.name} differ from the model's: the model has "
            f"{model_classes}, the data have {data_classes}"
        )
        raise DataError(problem, "list the model's class names in classes.txt, one per line")
