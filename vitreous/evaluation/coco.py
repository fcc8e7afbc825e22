"""Evaluate detectors as COCO does: average precision and recall of boxes and masks, with intervals and error types.

n images, K classes, D draws of the bootstrap.
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
    """Evaluates boxes, or with `masks` masks and boxes, by COCO's average precision (AP). With `tiles`, large images
    are processed at their native resolution. `frequency`: rare, common or frequent for each class, as in LVIS. A
    model's outputs for an image are the rows of `match_image`.

    Raises ResourceError if the mask library is not installed.
    """

    name = "ap"

    def __init__(
        self, classes: tuple[str, ...], masks: bool = False, tiles: bool = False, frequency: tuple[str, ...] = ()
    ) -> None:
        self.classes, self.masks, self.tiles, self.frequency = classes, masks, tiles, frequency
        if masks:
            require_mask_library()

    @property
    def kinds(self) -> tuple[str, ...]:
        """The prefixes of metric names for each type of region, the leading one first."""
        return ("", BOX_PREFIX) if self.masks else ("",)

    def outputs(
        self, engine: ModelEngine, reader: EvalLoader, on_images: Callable[[int], None] = lambda images: None
    ) -> tuple[Ragged, dict[int, DataError]]:
        """Compute the rows of the images of `reader.split`, (m, columns) float64, and the unreadable images by index,
        whose objects count as missed. Raises DataError for annotations that cannot be read, or lack masks."""
        assert isinstance(reader.split, AnnotatedSplit), "the split must have annotations"
        tables: list[np.ndarray] = []
        split, bad = reader.split, {}
        for sample, (picture, truth) in enumerate(prefetch_samples(reader)):
            if isinstance(truth, DataError):
                raise truth
            if self.masks and len(truth) and truth.layers is None:
                raise DataError(f"{split.name(sample)} has boxes, no masks", "add masks, or evaluate boxes only")
            if isinstance(picture, DataError):
                bad[sample], answers = picture, make_empty_detections(truth.size[:2], self.masks)
            else:
                answers = detect_objects(make_detection_function(engine), picture, engine.preprocess, self.tiles)
            tables.append(match_image(answers, truth, self.masks))
            on_images(1)
        tables.append(
            match_image(make_empty_detections((1, 1), self.masks), create_empty_target((1, 1)), self.masks)
        )  # their columns
        lengths = np.array([len(table) for table in tables[:-1]], np.int64)
        return Ragged(np.concatenate(tables), lengths), bad

    def report(self, outputs: SplitOutputs, *others: SplitOutputs) -> Report:
        """Compute COCO's twelve metrics per type of region, 95 % bootstrap intervals over images, and metrics per
        class.

        None for a metric without objects. `details["objects"]` has the AP50 lost to each `DetectionError`, precision
        curves, and the confusion matrix above the score of the highest F1.
        """
        rows: Ragged = outputs.rows
        sides = group_matches_by_region(rows, len(self.classes))
        metrics = make_coco_metric_function(sides, self.frequency)
        once = metrics(np.ones((len(rows), 1), np.float32))
        values = {name: None if np.isnan(value[0]) else float(value[0]) for name, value in once.items()}
        intervals = bootstrap_coco_intervals(metrics, rows) if len(rows) > 1 else dict.fromkeys(values)
        threshold = find_best_f1_threshold(sides[0])
        matrix = compute_detection_confusion(rows.table, threshold, len(self.classes))
        details = {
            "threshold": threshold,
            "tiles": self.tiles,
            "errors": {
                start + name: cost
                for kind, start in enumerate(self.kinds)
                for name, cost in compute_tide_ap50_gains(
                    rows.table, rows.images, len(rows), kind, len(self.classes)
                ).items()
            },
            "confusion": matrix.tolist() if len(self.classes) <= MAX_COCO_CONFUSION_CLASSES else None,
            "curves": build_precision_curves(sides[0], self.classes),
        }
        table = build_coco_class_table(sides, self, rows, matrix, threshold)
        unreadable = int((~outputs.readable).sum())
        return Report(
            len(rows),
            unreadable,
            metrics=values,
            intervals=intervals,
            per_class=table,
            cells=None,
            primary="ap",
            details={"objects": details},
        )

    def paired_intervals(self, rows: Ragged, other: CocoEvaluator, other_rows: Ragged) -> dict[str, Interval | None]:
        """Return the 95 % intervals of the differences of all metrics."""
        sides = ((rows, self), (other_rows, other))
        first, second = (
            make_coco_metric_function(group_matches_by_region(table, len(own.classes))) for table, own in sides
        )
        return bootstrap_coco_differences(first, second, rows)


class LoadedSample(NamedTuple):
    """An image as (C, H, W) pixels at its native size, and its annotation; or the read error of either."""

    picture: np.ndarray | DataError
    truth: Target | DataError


def prefetch_samples(reader: EvalLoader) -> Iterator[LoadedSample]:
    """Yield the images of a split in order, prefetched by as many threads as the reader has workers."""
    from vitreous.tasks.tiles import to_native_array

    split, preprocess = reader.split, reader.preprocess
    assert isinstance(split, AnnotatedSplit), "the split must have annotations"

    def load(sample: int) -> LoadedSample:
        try:
            picture = to_native_array(preprocess.decode(split.raw(sample), split.name(sample)))
        except DataError as error:
            picture = error
        try:
            truth = split.target(sample)
        except DataError as error:
            truth = create_empty_target((1, 1)) if isinstance(picture, DataError) else error
        return LoadedSample(picture, truth)

    if not reader.workers:
        yield from map(load, range(len(split)))
        return
    with ThreadPoolExecutor(reader.workers) as pool:
        waiting = []
        for sample in range(len(split)):
            waiting.append(pool.submit(load, sample))
            if len(waiting) > 2 * reader.workers:
                yield waiting.pop(0).result()
        yield from (one.result() for one in waiting)


def make_detection_function(engine: ModelEngine) -> DetectorFunction:
    """Return a function that computes a detector's fixed-shape outputs from (B, C, *image) pixels with an engine."""
    return lambda pixels: unpack_outputs(engine(torch.from_numpy(pixels)).numpy())


def make_empty_detections(size: tuple[int, ...], masks: bool) -> Detections:
    """Return no detections for an image of `size` (H, W)."""
    none = np.zeros(0, np.float32)
    return Detections((size[0], size[1]), none.reshape(0, 4), none.astype(np.int64), none, masks=() if masks else None)


def group_matches_by_region(rows: Ragged, classes: int) -> list[list[ClassMatches]]:
    """Group the matches by region type and class."""
    kinds = (rows.table.shape[1] - MatchColumn.KINDS) // RegionColumn.WIDTH
    return [group_matches_by_class(rows.table, rows.images, len(rows), kind, classes) for kind in range(kinds)]


def make_coco_metric_function(sides: list[list[ClassMatches]], frequency: tuple[str, ...] = ()) -> MetricFunction:
    """Return a function that computes each metric, (D,), from draw counts of the images, (n, D), for the rows of
    `group_matches_by_region`."""
    starts = ("", BOX_PREFIX)[: len(sides)]

    def metrics(counts: np.ndarray) -> dict[str, np.ndarray]:
        pairs = zip(starts, sides, strict=True)
        return {
            start + name: value
            for start, side in pairs
            for name, value in compute_coco_metrics(side, counts, frequency)
        }

    return metrics


def bootstrap_coco_intervals(metrics: MetricFunction, rows: Ragged) -> dict[str, Interval | None]:
    """Compute 95 % bootstrap intervals over images of metrics (D,), from the draws in which they are defined; None if
    they are undefined in more than a tenth of the draws."""
    values = bootstrap_metrics(metrics, len(rows), choose_coco_bootstrap_draws(rows))
    known = {name: draw[~np.isnan(draw)] for name, draw in values.items()}
    return {
        name: percentile_interval(draw) if len(draw) >= 0.9 * len(values[name]) else None
        for name, draw in known.items()
    }


def bootstrap_coco_differences(
    first: MetricFunction, second: MetricFunction, rows: Ragged
) -> dict[str, Interval | None]:
    """Compute 95 % intervals of the metric differences of `make_coco_metric_function`, second minus first, by a
    bootstrap over the same images; `rows` are those of either model. None for fewer than two images."""

    def metrics(counts: np.ndarray) -> dict[str, np.ndarray]:
        """Compute each difference (D,) from draw counts (n, D)."""
        before, after = first(counts), second(counts)
        return {name: after[name] - before[name] for name in before}

    if len(rows) < 2:
        return dict.fromkeys(metrics(np.ones((len(rows), 1), np.float32)))
    return bootstrap_coco_intervals(metrics, rows)


def choose_coco_bootstrap_draws(rows: Ragged) -> int:
    """Choose the number of bootstrap draws: fewer for many detections."""
    kinds = (rows.table.shape[1] - MatchColumn.KINDS) // RegionColumn.WIDTH
    return int(
        max(
            MIN_BOOTSTRAP_DRAWS,
            min(DEFAULT_BOOTSTRAP_DRAWS, COCO_BOOTSTRAP_BUDGET // max(1, 40 * kinds * len(rows.table))),
        )
    )


def find_best_f1_threshold(pairs: list[ClassMatches]) -> float:
    """Return the score threshold with the highest F1 over all classes at an IoU of 0.5; 0 if nothing is correct."""
    counted = [~one.ignored[0, 0] for one in pairs]
    scores = np.concatenate([one.scores[rows] for one, rows in zip(pairs, counted, strict=True)])
    hits = np.concatenate([one.hits[0, 0, rows] for one, rows in zip(pairs, counted, strict=True)])
    if not hits.any():
        return 0.0
    order = np.argsort(-scores, kind="stable")
    f1 = 2 * hits[order].cumsum() / (np.arange(1, len(hits) + 1) + sum(one.objects[0].sum() for one in pairs))
    last = np.append(np.diff(scores[order]) != 0, True)  # the last of equal scores
    return float(scores[order][np.where(last, f1, -1).argmax()])


def compute_detection_confusion(table: np.ndarray, threshold: float, classes: int) -> np.ndarray:
    """Compute (K + 1, K + 1) int64 counts of objects by true and predicted class from (m, columns) rows.

    The last row holds false positives, the last column missed objects. Detections and objects are matched at an IoU of
    0.5 regardless of class, without crowds; detections below `threshold` are ignored."""
    truth, label = table[:, MatchColumn.TRUTH] == 1, table[:, MatchColumn.LABEL].astype(np.int64)
    shown = table[:, MatchColumn.SCORE] >= threshold
    ignored = select_region_columns(table, 0)[:, RegionColumn.IGNORED] % 2 == 1  # of an object: a crowd
    partner = table[:, MatchColumn.PARTNER].astype(np.int64)
    answers, missed = ~truth & shown & (~ignored | (partner >= 0)), truth & ~shown & ~ignored
    codes = np.where(partner < 0, classes, partner)[answers] * (classes + 1) + label[answers]
    codes = np.concatenate([codes, label[missed] * (classes + 1) + classes])
    return np.bincount(codes, minlength=(classes + 1) ** 2).reshape(classes + 1, classes + 1)


def build_precision_curves(pairs: list[ClassMatches], classes: tuple[str, ...]) -> dict[str, Any]:
    """Return precision at 101 recalls of each class with objects, at an IoU of 0.5, and their mean."""
    curves = compute_precision_curves(pairs, 0)
    known = {name: curve for name, curve in zip(classes, curves, strict=True) if curve is not None}
    rows = {name: np.round(curve, 4).tolist() for name, curve in known.items()}
    mean = np.mean(list(known.values()), 0) if known else np.zeros(len(RECALL_LEVELS))
    return {"iou": 0.5, "recall": RECALL_LEVELS.tolist(), "mean": np.round(mean, 4).tolist(), "classes": rows}


def build_coco_class_table(
    sides: list[list[ClassMatches]], evaluator: CocoEvaluator, rows: Ragged, matrix: np.ndarray, threshold: float
) -> list[dict[str, object]]:
    """Return one row per class: images, objects, AP and AP50 per type of region, recall, precision and F1 at the score
    threshold, and the class it is most often confused with. `matrix` (K + 1, K + 1)."""
    weights, table = np.ones((len(rows), 1), np.float32), []
    for label, name in enumerate(evaluator.classes):
        lead = sides[0][label]
        objects = int(lead.objects[0].sum())
        counted = ~lead.ignored[0, 0] & (lead.scores >= threshold)
        right, answers = int(lead.hits[0, 0, counted].sum()), int(counted.sum())
        others = matrix[label, :-1].copy()
        others[label] = 0
        row: dict[str, object] = {"class": name, "images": int((lead.objects[0] > 0).sum()), "objects": objects}
        for start, side in zip(evaluator.kinds, sides, strict=True):
            values = compute_ap_per_threshold(side[label], 0, weights)[:, 0]
            row[f"{start}ap"] = float(compute_nan_mean(values[:, None])[0]) if objects else None
            row[f"{start}ap50"] = float(values[0]) if objects else None
        row["recall"] = right / objects if objects else None
        row["precision"] = right / answers if answers else None
        row["f1"] = 2 * right / (objects + answers) if objects + answers else None
        row["confused_with"] = evaluator.classes[int(others.argmax())] if others.any() else None
        table.append(row)
    return table
