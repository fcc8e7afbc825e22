"""COCO's average precision and recall from detections matched with objects, for all images or for bootstrap draws.

n images, K classes, T IoU thresholds, A area ranges, D draws of the bootstrap; m detections of a class, by descending
score. A draw is the number of times that each image occurs in it, so detections are sorted and matched only once.
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
    """Detections and objects of one class. `scores`, `images`, `ranks` (m,): of detections by descending score, their
    image index, and their rank within the class on that image. `hits` and `ignored` (A, T, m) bool: matched detections,
    and detections that do not count. `objects` (A, n) float32: counted objects per image."""

    scores: np.ndarray
    images: np.ndarray
    ranks: np.ndarray
    hits: np.ndarray
    ignored: np.ndarray
    objects: np.ndarray

    def average_precision(self, area: int, threshold: int, weights: np.ndarray) -> np.ndarray:
        """Compute the average precision (D,) of (n, D) draws, nan for a draw without objects."""
        rows = np.flatnonzero(~self.ignored[area, threshold])
        hits, images = self.hits[area, threshold, rows], self.images[rows]
        return compute_coco_average_precision(hits, images, self.objects[area], weights)

    def recall(self, area: int, cap: int, weights: np.ndarray) -> np.ndarray:
        """Compute the recall (D,) of at most `cap` detections per image, the mean over thresholds; nan as above."""
        good = self.hits[area] & ~self.ignored[area] & (self.ranks < cap)
        per_image = np.bincount(self.images, good.mean(0), self.objects.shape[1]) if len(self.images) else 0.0
        total = self.objects[area] @ weights
        right = np.broadcast_to(per_image, self.objects.shape[1:]) @ weights
        return np.divide(right, total, out=np.full(len(total), np.nan), where=total > 0)


def compute_coco_average_precision(
    hits: np.ndarray, images: np.ndarray, objects: np.ndarray, weights: np.ndarray
) -> np.ndarray:
    """Compute the average precision (D,) of m detections by descending score, nan for a draw without objects.

    `hits` (m,) bool, `images` (m,) int64, `objects` (n,) per image, `weights` (n, D) draw counts.

        precision and recall after each detection; precision[i] = max(precision[i:])
        mean over the recalls r of 0, 0.01 .. 1: precision of the first detection whose recall is at least r, or 0

    Precision peaks and recall changes only at hits, so nothing is computed between them.
    """
    total = (objects @ weights).astype(np.float64)
    places = np.flatnonzero(hits)
    result = np.where(total > 0, 0.0, np.nan)
    if not len(places):
        return result
    step = max(1, MAX_ELEMENTS_IN_MEMORY // (int(places[-1]) + 1))
    starts = np.append(0, places[:-1] + 1)
    for low in range(0, weights.shape[1], step):
        part = weights[:, low : low + step]
        seen = np.add.reduceat(part[images[: places[-1] + 1]], starts, 0).cumsum(0, dtype=np.float64)
        right = part[images[places]].cumsum(0, dtype=np.float64)
        precision = np.maximum.accumulate((right / (seen + np.spacing(1)))[::-1])[::-1]
        recall = right / np.maximum(total[low : low + step], 1)
        reached = np.searchsorted(RECALL_LEVELS, recall.ravel(), side="right").reshape(recall.shape)
        area = (precision * np.diff(reached, axis=0, prepend=0)).sum(0) / len(RECALL_LEVELS)
        result[low : low + step] = np.where(total[low : low + step] > 0, area, np.nan)
    return result


def group_matches_by_class(
    table: np.ndarray, images: np.ndarray, count: int, kind: int, classes: int
) -> list[ClassMatches]:
    """Group rows of all images (m, columns), as in `matching.MatchColumn`, by class, for the regions of index `kind`;
    `images` (m,) has the image index of each row, out of `count`."""
    part, answer = select_region_columns(table, kind), table[:, MatchColumn.TRUTH] == 0
    pairs = []
    for label in range(classes):
        own = table[:, MatchColumn.LABEL] == label
        rows = np.flatnonzero(own & answer)
        ranks = rank_in_class(images[rows])  # the detections of an image are sorted by descending score
        order = np.argsort(-table[rows, MatchColumn.SCORE], kind="stable")
        rows, ranks = rows[order], ranks[order]
        truth = np.flatnonzero(own & ~answer)
        counted = ~unpack_match_bits(part[truth, RegionColumn.IGNORED])[:, 0]
        objects = np.stack([np.bincount(images[truth[row]], minlength=count) for row in counted]).astype(np.float32)
        hits, ignored = (
            unpack_match_bits(part[rows, RegionColumn.MATCHED]),
            unpack_match_bits(part[rows, RegionColumn.IGNORED]),
        )
        pairs.append(
            ClassMatches(
                table[rows, MatchColumn.SCORE],
                images[rows],
                ranks=ranks,
                hits=hits & ~ignored,
                ignored=ignored,
                objects=objects,
            )
        )
    return pairs


def compute_coco_metrics(
    pairs: list[ClassMatches], weights: np.ndarray, frequency: Sequence[str] = ()
) -> Iterator[tuple[str, np.ndarray]]:
    """Yield COCO's metrics by name, (D,) each, for (n, D) draws: means over classes with objects, nan without any.

    `ap` is the mean over the thresholds; `ar1`, `ar10` and `ar100` are recalls of that many detections per image. If
    each class has a `frequency`, of `LVIS_FREQUENCIES`, the mean over each frequency group is added.
    """
    names = ("", "_small", "_medium", "_large")
    for area, name in enumerate(names):
        table = np.stack([compute_ap_per_threshold(one, area, weights) for one in pairs])  # (K, T, D)
        yield f"ap{name}", compute_nan_mean(table.reshape(-1, weights.shape[1]))
        if not area:
            yield "ap50", compute_nan_mean(table[:, 0])
            yield "ap75", compute_nan_mean(table[:, 5])
            for group in LVIS_FREQUENCIES if frequency else ():
                own = table[[label for label, name in enumerate(frequency) if name == group]]
                yield f"ap_{group}", compute_nan_mean(own.reshape(-1, weights.shape[1]))
    for cap in MAX_DETECTIONS_PER_IMAGE:
        yield f"ar{cap}", compute_nan_mean(np.stack([one.recall(0, cap, weights) for one in pairs]))
    for area, name in enumerate(names[1:], 1):
        yield (
            f"ar{name}",
            compute_nan_mean(np.stack([one.recall(area, MAX_DETECTIONS_PER_CLASS, weights) for one in pairs])),
        )


def compute_ap_per_threshold(pairs: ClassMatches, area: int, weights: np.ndarray) -> np.ndarray:
    """Compute the average precisions (T, D) of a class for (n, D) draws."""
    return np.stack([pairs.average_precision(area, level, weights) for level in range(len(IOU_THRESHOLDS))])


def compute_nan_mean(values: np.ndarray) -> np.ndarray:
    """Compute means (D,) of the values (m, D) that are not nan; nan if all are."""
    known = ~np.isnan(values)
    counts = known.sum(0)
    return np.divide(np.where(known, values, 0).sum(0), counts, out=np.full(len(counts), np.nan), where=counts > 0)


def compute_tide_ap50_gains(
    table: np.ndarray, images: np.ndarray, count: int, kind: int, classes: int
) -> dict[str, float]:
    """Compute the AP50 gained by fixing each `DetectionError`: AP50 of the fixed (m, columns) rows minus AP50
    (arXiv:2008.08115).

    A detection of the wrong class or location is corrected, unless another detection matches that object; then it is
    removed, as are the other error types. Missed objects are removed. 0 without objects.
    """
    part, answer = select_region_columns(table, kind), table[:, MatchColumn.TRUTH] == 0
    counted = ~unpack_match_bits(part[:, RegionColumn.IGNORED])[0, 0]
    weights = np.ones((count, 1), np.float32)

    def ap50(rows: np.ndarray, labels: np.ndarray, hits: np.ndarray) -> float:
        values = []
        for label in range(classes):
            own = np.flatnonzero((labels == label) & rows & answer)
            own = own[np.argsort(-table[own, MatchColumn.SCORE], kind="stable")]
            truth = (labels == label) & rows & ~answer
            objects = np.bincount(images[truth], minlength=count).astype(np.float32)
            values.append(compute_coco_average_precision(hits[own], images[own], objects, weights))
        return float(np.nan_to_num(compute_nan_mean(np.stack(values))[0]))

    labels, hits = table[:, MatchColumn.LABEL], unpack_match_bits(part[:, RegionColumn.MATCHED])[0, 0]
    before, costs = ap50(counted, labels, hits), {}
    for error in DetectionError:
        wrong = part[:, RegionColumn.ERROR] == error
        mended = wrong & answer & (part[:, RegionColumn.MENDED] >= 0)
        after = np.where(mended, part[:, RegionColumn.MENDED], labels)
        costs[error.name.lower()] = ap50(counted & ~(wrong & ~mended), after, hits | mended) - before
    return costs


def compute_precision_curves(pairs: list[ClassMatches], threshold: int) -> list[np.ndarray | None]:
    """Return precision at `RECALL_LEVELS` (101,) of each class at the IoU threshold of this index; None for a class
    without objects."""
    curves: list[np.ndarray | None] = []
    for one in pairs:
        rows = np.flatnonzero(~one.ignored[0, threshold])
        hits, total = one.hits[0, threshold, rows], one.objects[0].sum()
        if not total:
            curves.append(None)
            continue
        right = hits.cumsum()
        precision = np.maximum.accumulate((right / np.arange(1, len(hits) + 1))[::-1])[::-1]
        place = np.searchsorted(right / total, RECALL_LEVELS, side="left")
        curves.append(np.where(place < len(hits), np.append(precision, 0.0)[place], 0.0))
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
