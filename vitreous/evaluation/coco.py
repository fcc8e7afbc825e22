"""Evaluate detectors as COCO does: average precision and recall of boxes and masks, with confidence intervals and error
types.

n images, K classes, D draws of the bootstrap. A region type is boxes or masks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np
import torch

from vitreous.data.annotations.target import AnnotatedSplit, Target, create_empty_target
from vitreous.data.loader import EvalLoader
from vitreous.errors import DataError
from vitreous.evaluation.average_precision import (
    RECALL_LEVELS,
    ClassMatches,
    compute_ap_per_threshold,
    compute_coco_metrics,
    compute_nan_mean,
    compute_precision_curves,
    compute_tide_ap50_gains,
    group_matches_by_class,
)
from vitreous.evaluation.evaluator import Evaluator, Ragged, SplitOutputs
from vitreous.evaluation.matching import (
    MatchColumn,
    RegionColumn,
    match_image,
    require_mask_library,
    select_region_columns,
)
from vitreous.inference.engine import ModelEngine
from vitreous.inference.outputs import unpack_outputs
from vitreous.tasks.detections import Detections, DetectorFunction, detect_objects
from vitreous.tasks.intervals import (
    DEFAULT_BOOTSTRAP_DRAWS,
    MIN_BOOTSTRAP_DRAWS,
    Interval,
    MetricFunction,
    bootstrap_metrics,
    percentile_interval,
)
from vitreous.tasks.metrics import BOX_PREFIX
from vitreous.tasks.report import Report

COCO_BOOTSTRAP_BUDGET = 5e8  # detections x thresholds x areas x bootstrap draws: a few seconds
MAX_COCO_CONFUSION_CLASSES = 200  # largest number of classes for a stored confusion matrix


class CocoEvaluator(Evaluator):
    """Evaluates boxes, or with `masks` masks and boxes, by COCO's average precision (AP).

    With `tiles`, large images are processed at their native resolution. `frequency`: rare, common or frequent for each
    class, as in LVIS. A model's outputs for an image are the rows of `match_image`. Raises ResourceError if the mask
    library is not installed.
    """

    name = "ap"

    def __init__(
        self, classes: tuple[str, ...], masks: bool = False, tiles: bool = False, frequency: tuple[str, ...] = ()
    ) -> None:
        self.classes, self.masks, self.tiles, self.frequency = classes, masks, tiles, frequency
        if masks:
            require_mask_library()

    @property
    def region_prefixes(self) -> tuple[str, ...]:
        """The prefixes of metric names, one per region type; the first is that of the leading metrics."""
        return ("", BOX_PREFIX) if self.masks else ("",)

    def outputs(
        self, engine: ModelEngine, reader: EvalLoader, on_images: Callable[[int], None] = lambda images: None
    ) -> tuple[Ragged, dict[int, DataError]]:
        """Match the detections of the images of `reader.split`: rows (m, columns) float64, and read errors by image
        index. The objects of unreadable images count as missed. Raises DataError for annotations that cannot be read,
        or lack masks."""
        assert isinstance(reader.split, AnnotatedSplit), "the split must have annotations"
        tables: list[np.ndarray] = []
        split, read_errors = reader.split, {}
        for sample, (pixels, truth) in enumerate(prefetch_samples(reader)):
            if isinstance(truth, DataError):
                raise truth
            if self.masks and len(truth) and truth.layers is None:
                raise DataError(f"{split.name(sample)} has boxes but no masks", "add masks, or evaluate boxes only")
            if isinstance(pixels, DataError):
                read_errors[sample], detections = pixels, make_empty_detections(truth.size[:2], self.masks)
            else:
                detections = detect_objects(make_detection_function(engine), pixels, engine.preprocess, self.tiles)
            tables.append(match_image(detections, truth, self.masks))
            on_images(1)
        # without rows: gives the number of columns if there are no images
        tables.append(match_image(make_empty_detections((1, 1), self.masks), create_empty_target((1, 1)), self.masks))
        lengths = np.array([len(table) for table in tables[:-1]], np.int64)
        return Ragged(np.concatenate(tables), lengths), read_errors

    def report(self, outputs: SplitOutputs, *extra_outputs: SplitOutputs) -> Report:
        """Compute COCO's twelve metrics per region type, 95 % bootstrap intervals over images, and metrics per class. A
        metric without objects is None. `details["objects"]` has the AP50 gained by fixing each type of
        `DetectionError`, precision curves, and the confusion matrix above the score threshold with the highest F1."""
        match_rows: Ragged = outputs.outputs
        region_matches = group_matches_by_region(match_rows, len(self.classes))
        metrics = make_coco_metric_function(region_matches, self.frequency)
        estimates = metrics(np.ones((len(match_rows), 1), np.float32))
        values = {name: None if np.isnan(value[0]) else float(value[0]) for name, value in estimates.items()}
        intervals = bootstrap_coco_intervals(metrics, match_rows) if len(match_rows) > 1 else dict.fromkeys(values)
        threshold = find_best_f1_threshold(region_matches[0])
        matrix = compute_detection_confusion(match_rows.table, threshold, len(self.classes))
        details = {
            "threshold": threshold,
            "tiles": self.tiles,
            "errors": {
                prefix + name: cost
                for region_index, prefix in enumerate(self.region_prefixes)
                for name, cost in compute_tide_ap50_gains(
                    match_rows.table, match_rows.images, len(match_rows), region_index, len(self.classes)
                ).items()
            },
            "confusion": matrix.tolist() if len(self.classes) <= MAX_COCO_CONFUSION_CLASSES else None,
            "curves": build_precision_curves(region_matches[0], self.classes),
        }
        table = build_coco_class_table(region_matches, self, match_rows, matrix, threshold)
        unreadable = int((~outputs.readable).sum())
        return Report(
            len(match_rows),
            unreadable,
            metrics=values,
            intervals=intervals,
            per_class=table,
            confusion_cells=None,
            primary="ap",
            details={"objects": details},
        )

    def paired_intervals(
        self, outputs: Ragged, other_evaluator: CocoEvaluator, other_outputs: Ragged
    ) -> dict[str, Interval | None]:
        """Compute the 95 % intervals of the differences of all metrics, the other model minus this one, for the same
        images."""
        models = ((outputs, self), (other_outputs, other_evaluator))
        compute_a, compute_b = (
            make_coco_metric_function(group_matches_by_region(match_rows, len(evaluator.classes)))
            for match_rows, evaluator in models
        )
        return bootstrap_coco_differences(compute_a, compute_b, outputs)


class LoadedSample(NamedTuple):
    """An image as (C, H, W) pixels at its native size, and its annotation; either can be its read error instead."""

    image: np.ndarray | DataError
    target: Target | DataError


def prefetch_samples(reader: EvalLoader) -> Iterator[LoadedSample]:
    """Yield the images and annotations of a split in order, prefetched by as many threads as the reader has workers."""
    from vitreous.tasks.tiles import to_native_array

    split, preprocess = reader.split, reader.preprocess
    assert isinstance(split, AnnotatedSplit), "the split must have annotations"

    def load_sample(sample: int) -> LoadedSample:
        """Load an image and its annotation. The read error of an image hides that of its annotation."""
        try:
            pixels = to_native_array(preprocess.decode(split.raw(sample), split.name(sample)))
        except DataError as error:
            pixels = error
        try:
            truth = split.target(sample)
        except DataError as error:
            truth = create_empty_target((1, 1)) if isinstance(pixels, DataError) else error
        return LoadedSample(pixels, truth)

    if not reader.workers:
        yield from map(load_sample, range(len(split)))
        return
    with ThreadPoolExecutor(reader.workers) as pool:
        futures = []
        for sample in range(len(split)):
            futures.append(pool.submit(load_sample, sample))
            if len(futures) > 2 * reader.workers:
                yield futures.pop(0).result()
        yield from (future.result() for future in futures)


def make_detection_function(engine: ModelEngine) -> DetectorFunction:
    """Return a function that computes a detector's fixed-shape outputs of (B, C, *image) pixels with an engine."""
    return lambda pixels: unpack_outputs(engine(torch.from_numpy(pixels)).numpy())


def make_empty_detections(size: tuple[int, ...], masks: bool) -> Detections:
    """Create empty detections for an image of `size` (H, W)."""
    none = np.zeros(0, np.float32)
    return Detections((size[0], size[1]), none.reshape(0, 4), none.astype(np.int64), none, masks=() if masks else None)


def group_matches_by_region(match_rows: Ragged, num_classes: int) -> list[list[ClassMatches]]:
    """Group matched rows by region type, then by class."""
    num_region_types = (match_rows.table.shape[1] - MatchColumn.REGION_START) // RegionColumn.WIDTH
    return [
        group_matches_by_class(match_rows.table, match_rows.images, len(match_rows), region_index, num_classes)
        for region_index in range(num_region_types)
    ]


def make_coco_metric_function(
    region_matches: list[list[ClassMatches]], frequency: tuple[str, ...] = ()
) -> MetricFunction:
    """Return a function that computes each metric, (D,), from the draw counts of the images, (n, D). `region_matches`:
    matches by region type and class, as `group_matches_by_region` returns them."""
    prefixes = ("", BOX_PREFIX)[: len(region_matches)]

    def metrics(counts: np.ndarray) -> dict[str, np.ndarray]:
        """Compute each metric (D,) from draw counts (n, D)."""
        pairs = zip(prefixes, region_matches, strict=True)
        return {
            start + name: value
            for start, class_matches in pairs
            for name, value in compute_coco_metrics(class_matches, counts, frequency)
        }

    return metrics


def bootstrap_coco_intervals(metrics: MetricFunction, match_rows: Ragged) -> dict[str, Interval | None]:
    """Compute 95 % bootstrap intervals over images of metrics (D,), from the draws in which each metric is defined.
    None for a metric that is undefined in more than a tenth of the draws."""
    values = bootstrap_metrics(metrics, len(match_rows), choose_coco_bootstrap_draws(match_rows))
    defined = {name: draw[~np.isnan(draw)] for name, draw in values.items()}
    return {
        name: percentile_interval(draw) if len(draw) >= 0.9 * len(values[name]) else None
        for name, draw in defined.items()
    }


def bootstrap_coco_differences(
    compute_a: MetricFunction, compute_b: MetricFunction, match_rows: Ragged
) -> dict[str, Interval | None]:
    """Compute 95 % intervals of the metric differences of two models, second minus first, by a bootstrap over the same
    images. `compute_a` and `compute_b`: functions of `make_coco_metric_function`. `match_rows`: rows of either model,
    which determine the number of draws. None for fewer than two images."""

    def metrics(counts: np.ndarray) -> dict[str, np.ndarray]:
        """Compute each difference (D,) from draw counts (n, D)."""
        before, after = compute_a(counts), compute_b(counts)
        return {name: after[name] - before[name] for name in before}

    if len(match_rows) < 2:
        return dict.fromkeys(metrics(np.ones((len(match_rows), 1), np.float32)))
    return bootstrap_coco_intervals(metrics, match_rows)


def choose_coco_bootstrap_draws(match_rows: Ragged) -> int:
    """Choose the number of bootstrap draws: fewer for many detections, to limit the time."""
    num_region_types = (match_rows.table.shape[1] - MatchColumn.REGION_START) // RegionColumn.WIDTH
    return int(
        max(
            MIN_BOOTSTRAP_DRAWS,
            min(
                DEFAULT_BOOTSTRAP_DRAWS, COCO_BOOTSTRAP_BUDGET // max(1, 40 * num_region_types * len(match_rows.table))
            ),
        )
    )


def find_best_f1_threshold(class_matches: list[ClassMatches]) -> float:
    """Return the score threshold with the highest F1 over all classes at an IoU of 0.5; 0 if no detection is
    correct."""
    counted_masks = [~matches.ignored[0, 0] for matches in class_matches]
    scores = np.concatenate(
        [matches.scores[is_counted] for matches, is_counted in zip(class_matches, counted_masks, strict=True)]
    )
    hits = np.concatenate(
        [matches.hits[0, 0, is_counted] for matches, is_counted in zip(class_matches, counted_masks, strict=True)]
    )
    if not hits.any():
        return 0.0
    order = np.argsort(-scores, kind="stable")
    f1 = (
        2
        * hits[order].cumsum()
        / (np.arange(1, len(hits) + 1) + sum(matches.objects[0].sum() for matches in class_matches))
    )
    is_last_of_ties = np.append(np.diff(scores[order]) != 0, True)  # the last of equal scores
    return float(scores[order][np.where(is_last_of_ties, f1, -1).argmax()])


def compute_detection_confusion(table: np.ndarray, threshold: float, num_classes: int) -> np.ndarray:
    """Count objects by true and predicted class, (K + 1, K + 1) int64, from the matched rows (m, columns). The last row
    holds false positives, the last column missed objects. Detections and objects are matched at an IoU of 0.5
    regardless of class, without crowds; detections below `threshold` are ignored."""
    is_object, label = table[:, MatchColumn.TRUTH] == 1, table[:, MatchColumn.LABEL].astype(np.int64)
    above_threshold = table[:, MatchColumn.SCORE] >= threshold
    ignored = select_region_columns(table, 0)[:, RegionColumn.IGNORED] % 2 == 1  # of an object: a crowd
    partner = table[:, MatchColumn.PARTNER].astype(np.int64)
    is_prediction, is_missed = (
        ~is_object & above_threshold & (~ignored | (partner >= 0)),
        is_object & ~above_threshold & ~ignored,
    )
    codes = np.where(partner < 0, num_classes, partner)[is_prediction] * (num_classes + 1) + label[is_prediction]
    codes = np.concatenate([codes, label[is_missed] * (num_classes + 1) + num_classes])
    return np.bincount(codes, minlength=(num_classes + 1) ** 2).reshape(num_classes + 1, num_classes + 1)


def build_precision_curves(class_matches: list[ClassMatches], classes: tuple[str, ...]) -> dict[str, Any]:
    """Build the report's precision curves, at an IoU of 0.5: precision at 101 recalls of each class with objects, and
    their mean."""
    curves = compute_precision_curves(class_matches, 0)
    defined = {name: curve for name, curve in zip(classes, curves, strict=True) if curve is not None}
    rounded = {name: np.round(curve, 4).tolist() for name, curve in defined.items()}
    mean = np.mean(list(defined.values()), 0) if defined else np.zeros(len(RECALL_LEVELS))
    return {"iou": 0.5, "recall": RECALL_LEVELS.tolist(), "mean": np.round(mean, 4).tolist(), "classes": rounded}


def build_coco_class_table(
    region_matches: list[list[ClassMatches]],
    evaluator: CocoEvaluator,
    match_rows: Ragged,
    matrix: np.ndarray,
    threshold: float,
) -> list[dict[str, object]]:
    """Build the report's table of classes: images, objects, AP and AP50 per region type; recall, precision and F1 at
    the score threshold; and the most frequently confused class. `matrix` (K + 1, K + 1): counts of
    `compute_detection_confusion`."""
    weights, table = np.ones((len(match_rows), 1), np.float32), []
    for label, name in enumerate(evaluator.classes):
        leading_matches = region_matches[0][label]
        objects = int(leading_matches.objects[0].sum())
        is_counted = ~leading_matches.ignored[0, 0] & (leading_matches.scores >= threshold)
        num_correct, num_detections = int(leading_matches.hits[0, 0, is_counted].sum()), int(is_counted.sum())
        confusions = matrix[label, :-1].copy()
        confusions[label] = 0
        class_row: dict[str, object] = {
            "class": name,
            "images": int((leading_matches.objects[0] > 0).sum()),
            "objects": objects,
        }
        for prefix, class_matches in zip(evaluator.region_prefixes, region_matches, strict=True):
            values = compute_ap_per_threshold(class_matches[label], 0, weights)[:, 0]
            class_row[f"{prefix}ap"] = float(compute_nan_mean(values[:, None])[0]) if objects else None
            class_row[f"{prefix}ap50"] = float(values[0]) if objects else None
        class_row["recall"] = num_correct / objects if objects else None
        class_row["precision"] = num_correct / num_detections if num_detections else None
        class_row["f1"] = 2 * num_correct / (objects + num_detections) if objects + num_detections else None
        class_row["confused_with"] = evaluator.classes[int(confusions.argmax())] if confusions.any() else None
        table.append(class_row)
    return table
