"""COCO's average precision and recall from detections matched with objects, for all images or for bootstrap draws.

n images, K classes, T IoU thresholds, A area ranges, D draws of the bootstrap; m detections of a class, by descending
score. A draw is given by the number of times that it contains each image, `draw_counts` (n, D), so detections are
sorted and matched only once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from vitreous.evaluation.matching import (
    AREA_RANGES,
    IOU_THRESHOLDS,
    MAX_DETECTIONS_PER_CLASS,
    DetectionError,
    MatchColumn,
    RegionColumn,
    rank_in_class,
    select_region_columns,
    unpack_match_bits,
)

RECALL_LEVELS = np.linspace(0, 1, 101)  # recalls at which precision is evaluated
LVIS_FREQUENCIES = ("rare", "common", "frequent")
MAX_DETECTIONS_PER_IMAGE = (1, 10, 100)  # highest-scoring detections of a class on an image
MAX_ELEMENTS_IN_MEMORY = 10_000_000  # array elements in memory at a time


@dataclass(frozen=True, eq=False)
class ClassMatches:
    """Detections and objects of one class, after matching.

    `scores`, `images`, `ranks` (m,): of detections by descending score, their score, image index, and rank within the
    class on that image. `hits` and `ignored` (A, T, m) bool: detections that match an object, and detections that do
    not count. `objects` (A, n) float32: number of counted objects per image.
    """

    scores: np.ndarray
    images: np.ndarray
    ranks: np.ndarray
    hits: np.ndarray
    ignored: np.ndarray
    objects: np.ndarray

    def average_precision(self, area_index: int, threshold_index: int, draw_counts: np.ndarray) -> np.ndarray:
        """Compute the average precision (D,) for the area range and IoU threshold of these indices, nan for a draw
        without objects. `draw_counts` (n, D): number of times that each image is drawn."""
        indices = np.flatnonzero(~self.ignored[area_index, threshold_index])
        hits, images = self.hits[area_index, threshold_index, indices], self.images[indices]
        return compute_coco_average_precision(hits, images, self.objects[area_index], draw_counts)

    def recall(self, area_index: int, max_detections: int, draw_counts: np.ndarray) -> np.ndarray:
        """Compute the recall (D,) with at most `max_detections` detections per image, averaged over IoU thresholds, for
        the area range of index `area_index`; nan for a draw without objects. `draw_counts` (n, D): number of times that
        each image is drawn."""
        is_hit = self.hits[area_index] & ~self.ignored[area_index] & (self.ranks < max_detections)
        per_image = np.bincount(self.images, is_hit.mean(0), self.objects.shape[1]) if len(self.images) else 0.0
        total = self.objects[area_index] @ draw_counts
        num_correct = np.broadcast_to(per_image, self.objects.shape[1:]) @ draw_counts
        return np.divide(num_correct, total, out=np.full(len(total), np.nan), where=total > 0)


def compute_coco_average_precision(
    hits: np.ndarray, images: np.ndarray, objects: np.ndarray, draw_counts: np.ndarray
) -> np.ndarray:
    """Compute COCO's average precision (D,) of m detections by descending score, nan for a draw without objects.

    `hits` (m,) bool, `images` (m,) int64, `objects` (n,) per image, `draw_counts` (n, D).

        precision and recall after each detection; precision[i] = max(precision[i:])
        mean over the recalls r of 0, 0.01 .. 1: precision of the first detection whose recall is at least r, or 0

    Precision peaks and recall changes only at hits, so nothing is computed between them.
    """
    total = (objects @ draw_counts).astype(np.float64)
    hit_indices = np.flatnonzero(hits)
    result = np.where(total > 0, 0.0, np.nan)
    if not len(hit_indices):
        return result
    step = max(1, MAX_ELEMENTS_IN_MEMORY // (int(hit_indices[-1]) + 1))
    starts = np.append(0, hit_indices[:-1] + 1)
    for start in range(0, draw_counts.shape[1], step):
        chunk_counts = draw_counts[:, start : start + step]
        num_detections = np.add.reduceat(chunk_counts[images[: hit_indices[-1] + 1]], starts, 0).cumsum(
            0, dtype=np.float64
        )
        num_correct = chunk_counts[images[hit_indices]].cumsum(0, dtype=np.float64)
        precision = np.maximum.accumulate((num_correct / (num_detections + np.spacing(1)))[::-1])[::-1]
        recall = num_correct / np.maximum(total[start : start + step], 1)
        levels_reached = np.searchsorted(RECALL_LEVELS, recall.ravel(), side="right").reshape(recall.shape)
        area = (precision * np.diff(levels_reached, axis=0, prepend=0)).sum(0) / len(RECALL_LEVELS)
        result[start : start + step] = np.where(total[start : start + step] > 0, area, np.nan)
    return result


def group_matches_by_class(
    table: np.ndarray, images: np.ndarray, num_images: int, region_index: int, num_classes: int
) -> list[ClassMatches]:
    """Group the rows of `table` (m, columns), as in `matching.MatchColumn`, by class, for the region type (boxes or
    masks) of index `region_index`. `images` (m,): image index of each row, out of `num_images`."""
    region_columns, is_detection = select_region_columns(table, region_index), table[:, MatchColumn.TRUTH] == 0
    class_matches = []
    for label in range(num_classes):
        is_class = table[:, MatchColumn.LABEL] == label
        detections = np.flatnonzero(is_class & is_detection)
        ranks = rank_in_class(images[detections])  # the detections of an image are sorted by descending score
        order = np.argsort(-table[detections, MatchColumn.SCORE], kind="stable")
        detections, ranks = detections[order], ranks[order]
        truth = np.flatnonzero(is_class & ~is_detection)
        is_counted = ~unpack_match_bits(region_columns[truth, RegionColumn.IGNORED])[:, 0]
        objects = np.stack(
            [np.bincount(images[truth[in_area]], minlength=num_images) for in_area in is_counted]
        ).astype(np.float32)
        hits, ignored = (
            unpack_match_bits(region_columns[detections, RegionColumn.MATCHED]),
            unpack_match_bits(region_columns[detections, RegionColumn.IGNORED]),
        )
        class_matches.append(
            ClassMatches(
                table[detections, MatchColumn.SCORE],
                images[detections],
                ranks=ranks,
                hits=hits & ~ignored,
                ignored=ignored,
                objects=objects,
            )
        )
    return class_matches


def compute_coco_metrics(
    class_matches: list[ClassMatches], draw_counts: np.ndarray, class_frequencies: Sequence[str] = ()
) -> Iterator[tuple[str, np.ndarray]]:
    """Yield the name and values (D,) of each COCO metric for D bootstrap draws; `draw_counts` (n, D) has the number of
    times that each image is drawn.

    Metrics are means over classes with objects, NaN if there are none. `ap` is the mean over the thresholds; `ar1`,
    `ar10` and `ar100` are recalls of that many detections per image. With `class_frequencies`, one per class, of
    `LVIS_FREQUENCIES`, the mean over each frequency group is added.
    """
    names = ("", "_small", "_medium", "_large")
    for area_index, name in enumerate(names):
        # (K, T, D)
        precisions = np.stack([compute_ap_per_threshold(matches, area_index, draw_counts) for matches in class_matches])
        yield f"ap{name}", compute_nan_mean(precisions.reshape(-1, draw_counts.shape[1]))
        if not area_index:
            yield "ap50", compute_nan_mean(precisions[:, 0])
            yield "ap75", compute_nan_mean(precisions[:, 5])
            for group in LVIS_FREQUENCIES if class_frequencies else ():
                group_precisions = precisions[[label for label, name in enumerate(class_frequencies) if name == group]]
                yield f"ap_{group}", compute_nan_mean(group_precisions.reshape(-1, draw_counts.shape[1]))
    for max_detections in MAX_DETECTIONS_PER_IMAGE:
        yield (
            f"ar{max_detections}",
            compute_nan_mean(np.stack([matches.recall(0, max_detections, draw_counts) for matches in class_matches])),
        )
    for area_index, name in enumerate(names[1:], 1):
        yield (
            f"ar{name}",
            compute_nan_mean(
                np.stack(
                    [matches.recall(area_index, MAX_DETECTIONS_PER_CLASS, draw_counts) for matches in class_matches]
                )
            ),
        )


def compute_ap_per_threshold(matches: ClassMatches, area_index: int, draw_counts: np.ndarray) -> np.ndarray:
    """Compute the average precision of a class at each IoU threshold, (T, D), for D bootstrap draws, `draw_counts` (n,
    D)."""
    return np.stack(
        [
            matches.average_precision(area_index, threshold_index, draw_counts)
            for threshold_index in range(len(IOU_THRESHOLDS))
        ]
    )


def compute_nan_mean(values: np.ndarray) -> np.ndarray:
    """Compute the means (D,) of values (m, D), ignoring NaN; NaN in columns without other values."""
    is_defined = ~np.isnan(values)
    counts = is_defined.sum(0)
    return np.divide(np.where(is_defined, values, 0).sum(0), counts, out=np.full(len(counts), np.nan), where=counts > 0)


def compute_tide_ap50_gains(
    table: np.ndarray, images: np.ndarray, num_images: int, region_index: int, num_classes: int
) -> dict[str, float]:
    """Compute the AP50 gained by fixing each type of `DetectionError`: AP50 of the fixed (m, columns) rows minus AP50
    (arXiv:2008.08115).

    A detection of the wrong class or location is corrected, unless another detection matches that object; then it is
    removed, as are detections with the other error types. Missed objects are removed. The gain is 0 without objects.
    """
    region_columns, is_detection = select_region_columns(table, region_index), table[:, MatchColumn.TRUTH] == 0
    is_counted = ~unpack_match_bits(region_columns[:, RegionColumn.IGNORED])[0, 0]
    draw_counts = np.ones((num_images, 1), np.float32)

    def compute_ap50(is_used: np.ndarray, labels: np.ndarray, hits: np.ndarray) -> float:
        """Compute AP50 of the rows that are used, with these labels and hits."""
        values = []
        for label in range(num_classes):
            indices = np.flatnonzero((labels == label) & is_used & is_detection)
            indices = indices[np.argsort(-table[indices, MatchColumn.SCORE], kind="stable")]
            truth = (labels == label) & is_used & ~is_detection
            objects = np.bincount(images[truth], minlength=num_images).astype(np.float32)
            values.append(compute_coco_average_precision(hits[indices], images[indices], objects, draw_counts))
        return float(np.nan_to_num(compute_nan_mean(np.stack(values))[0]))

    labels, hits = table[:, MatchColumn.LABEL], unpack_match_bits(region_columns[:, RegionColumn.MATCHED])[0, 0]
    base_ap, gains = compute_ap50(is_counted, labels, hits), {}
    for error in DetectionError:
        has_error = region_columns[:, RegionColumn.ERROR] == error
        is_fixed = has_error & is_detection & (region_columns[:, RegionColumn.FIXED_LABEL] >= 0)
        fixed_labels = np.where(is_fixed, region_columns[:, RegionColumn.FIXED_LABEL], labels)
        gains[error.name.lower()] = (
            compute_ap50(is_counted & ~(has_error & ~is_fixed), fixed_labels, hits | is_fixed) - base_ap
        )
    return gains


def compute_precision_curves(class_matches: list[ClassMatches], threshold_index: int) -> list[np.ndarray | None]:
    """Compute the precision of each class at `RECALL_LEVELS`, (101,), for the IoU threshold of index `threshold_index`;
    None for a class without objects."""
    curves: list[np.ndarray | None] = []
    for matches in class_matches:
        indices = np.flatnonzero(~matches.ignored[0, threshold_index])
        hits, total = matches.hits[0, threshold_index, indices], matches.objects[0].sum()
        if not total:
            curves.append(None)
            continue
        num_correct = hits.cumsum()
        precision = np.maximum.accumulate((num_correct / np.arange(1, len(hits) + 1))[::-1])[::-1]
        level_indices = np.searchsorted(num_correct / total, RECALL_LEVELS, side="left")
        curves.append(np.where(level_indices < len(hits), np.append(precision, 0.0)[level_indices], 0.0))
    return curves


__all__ = [
    "AREA_RANGES",
    "ClassMatches",
    "compute_tide_ap50_gains",
    "compute_coco_average_precision",
    "group_matches_by_class",
    "compute_coco_metrics",
    "compute_precision_curves",
]
