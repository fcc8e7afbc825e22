"""COCO's average precision and recall from answers that are paired with objects, for all images or for draws of them.

n images, K classes, T thresholds of IoU, A ranges of areas, D draws of the bootstrap; m answers of a class, by falling
score. A draw is how often each image is in it, so that no answer is ever sorted or paired again.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from vitreous.evaluation.matching import (
    AREAS,
    MOST,
    THRESHOLDS,
    Column,
    Error,
    Part,
    columns_of,
    from_bits,
    rank_in_class,
)

RECALLS = np.linspace(0, 1, 101)  # at which precision is read
FREQUENCIES = ("rare", "common", "frequent")
CAPS = (1, 10, 100)  # answers of a class on an image, those of the highest scores
TOGETHER = 10_000_000  # numbers in memory at a time


@dataclass(frozen=True, eq=False)
class ClassPairs:
    """Answers of one class and its objects. `scores`, `images`, `ranks` (m,): of answers by falling score, their image,
    and how many of the class are in front on it. `hits` and `ignored` (A, T, m) bool: which have an object, and which
    do not count. `objects` (A, n) float32: those of each image that count."""

    scores: np.ndarray
    images: np.ndarray
    ranks: np.ndarray
    hits: np.ndarray
    ignored: np.ndarray
    objects: np.ndarray

    def average_precision(self, area: int, threshold: int, weights: np.ndarray) -> np.ndarray:
        """(n, D) draws -> (D,) average precision, nan where a draw has no object."""
        rows = np.flatnonzero(~self.ignored[area, threshold])
        hits, images = self.hits[area, threshold, rows], self.images[rows]
        return average_precision(hits, images, self.objects[area], weights)

    def recall(self, area: int, cap: int, weights: np.ndarray) -> np.ndarray:
        """(n, D) draws -> (D,) recall of at most `cap` answers an image, the mean over the thresholds; nan as above."""
        good = self.hits[area] & ~self.ignored[area] & (self.ranks < cap)
        per_image = np.bincount(self.images, good.mean(0), self.objects.shape[1]) if len(self.images) else 0.0
        total = self.objects[area] @ weights
        right = np.broadcast_to(per_image, self.objects.shape[1:]) @ weights
        return np.divide(right, total, out=np.full(len(total), np.nan), where=total > 0)


def average_precision(hits: np.ndarray, images: np.ndarray, objects: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """Average precision of m answers by falling score: (D,), nan where a draw has no object.

    `hits` (m,) bool, `images` (m,) int64, `objects` (n,) of each image, `weights` (n, D) how often it is drawn.

        precision and recall after each answer; precision[i] = max(precision[i:])
        mean over the recalls r of 0, 0.01 .. 1: precision of the first answer whose recall is at least r, or 0

    Precision is the highest, and recall changes, only at hits: nothing is computed between them.
    """
    total = (objects @ weights).astype(np.float64)
    places = np.flatnonzero(hits)
    result = np.where(total > 0, 0.0, np.nan)
    if not len(places):
        return result
    step = max(1, TOGETHER // (int(places[-1]) + 1))
    starts = np.append(0, places[:-1] + 1)
    for low in range(0, weights.shape[1], step):
        part = weights[:, low : low + step]
        seen = np.add.reduceat(part[images[: places[-1] + 1]], starts, 0).cumsum(0, dtype=np.float64)
        right = part[images[places]].cumsum(0, dtype=np.float64)
        precision = np.maximum.accumulate((right / (seen + np.spacing(1)))[::-1])[::-1]
        recall = right / np.maximum(total[low : low + step], 1)
        reached = np.searchsorted(RECALLS, recall.ravel(), side="right").reshape(recall.shape)
        area = (precision * np.diff(reached, axis=0, prepend=0)).sum(0) / len(RECALLS)
        result[low : low + step] = np.where(total[low : low + step] > 0, area, np.nan)
    return result


def class_pairs(table: np.ndarray, images: np.ndarray, count: int, kind: int, classes: int) -> list[ClassPairs]:
    """Rows of all images (m, columns) as `matching.Column` has them, and the image (m,) of each, of `count` -> the
    pairs of each class, for the regions of number `kind`."""
    part, answer = columns_of(table, kind), table[:, Column.TRUTH] == 0
    pairs = []
    for label in range(classes):
        own = table[:, Column.LABEL] == label
        rows = np.flatnonzero(own & answer)
        ranks = rank_in_class(images[rows])  # the answers of an image are by falling score
        order = np.argsort(-table[rows, Column.SCORE], kind="stable")
        rows, ranks = rows[order], ranks[order]
        truth = np.flatnonzero(own & ~answer)
        counted = ~from_bits(part[truth, Part.IGNORED])[:, 0]
        objects = np.stack([np.bincount(images[truth[row]], minlength=count) for row in counted]).astype(np.float32)
        hits, ignored = from_bits(part[rows, Part.MATCHED]), from_bits(part[rows, Part.IGNORED])
        pairs.append(
            ClassPairs(
                table[rows, Column.SCORE],
                images[rows],
                ranks=ranks,
                hits=hits & ~ignored,
                ignored=ignored,
                objects=objects,
            )
        )
    return pairs


def figures_of(
    pairs: list[ClassPairs], weights: np.ndarray, frequency: Sequence[str] = ()
) -> Iterator[tuple[str, np.ndarray]]:
    """COCO's figures by name, (D,) each, for (n, D) draws: means over the classes that have objects, nan without any.

    `ap` is the mean over the thresholds; `ar1`, `ar10` and `ar100` are recalls of so many answers an image. Where each
    class has a `frequency`, of `FREQUENCIES`, there is also the mean over those of each.
    """
    names = ("", "_small", "_medium", "_large")
    for area, name in enumerate(names):
        table = np.stack([by_threshold(one, area, weights) for one in pairs])  # (K, T, D)
        yield f"ap{name}", mean_of(table.reshape(-1, weights.shape[1]))
        if not area:
            yield "ap50", mean_of(table[:, 0])
            yield "ap75", mean_of(table[:, 5])
            for group in FREQUENCIES if frequency else ():
                own = table[[label for label, name in enumerate(frequency) if name == group]]
                yield f"ap_{group}", mean_of(own.reshape(-1, weights.shape[1]))
    for cap in CAPS:
        yield f"ar{cap}", mean_of(np.stack([one.recall(0, cap, weights) for one in pairs]))
    for area, name in enumerate(names[1:], 1):
        yield f"ar{name}", mean_of(np.stack([one.recall(area, MOST, weights) for one in pairs]))


def by_threshold(pairs: ClassPairs, area: int, weights: np.ndarray) -> np.ndarray:
    """(n, D) draws -> (T, D) average precisions of a class."""
    return np.stack([pairs.average_precision(area, level, weights) for level in range(len(THRESHOLDS))])


def mean_of(values: np.ndarray) -> np.ndarray:
    """(m, D) -> (D,) means of what is not nan; nan where all are."""
    known = ~np.isnan(values)
    counts = known.sum(0)
    return np.divide(np.where(known, values, 0).sum(0), counts, out=np.full(len(counts), np.nan), where=counts > 0)


def ap50_mended(table: np.ndarray, images: np.ndarray, count: int, kind: int, classes: int) -> dict[str, float]:
    """What each kind of `Error` costs: AP50 of (m, columns) rows after it is mended, less AP50 (arXiv:2008.08115).

    An answer of the wrong class or place gets the right one, unless another one has that object, when it is left out
    like one of another kind; objects that are missed are not counted. 0 for no objects.
    """
    part, answer = columns_of(table, kind), table[:, Column.TRUTH] == 0
    counted = ~from_bits(part[:, Part.IGNORED])[0, 0]
    weights = np.ones((count, 1), np.float32)

    def ap50(rows: np.ndarray, labels: np.ndarray, hits: np.ndarray) -> float:
        values = []
        for label in range(classes):
            own = np.flatnonzero((labels == label) & rows & answer)
            own = own[np.argsort(-table[own, Column.SCORE], kind="stable")]
            truth = (labels == label) & rows & ~answer
            objects = np.bincount(images[truth], minlength=count).astype(np.float32)
            values.append(average_precision(hits[own], images[own], objects, weights))
        return float(np.nan_to_num(mean_of(np.stack(values))[0]))

    labels, hits = table[:, Column.LABEL], from_bits(part[:, Part.MATCHED])[0, 0]
    before, costs = ap50(counted, labels, hits), {}
    for error in Error:
        wrong = part[:, Part.ERROR] == error
        mended = wrong & answer & (part[:, Part.MENDED] >= 0)
        after = np.where(mended, part[:, Part.MENDED], labels)
        costs[error.name.lower()] = ap50(counted & ~(wrong & ~mended), after, hits | mended) - before
    return costs


def precision_recall(pairs: list[ClassPairs], threshold: int) -> list[np.ndarray | None]:
    """Precision at `RECALLS` (101,) of each class at a threshold of IoU, by number; None for one without objects."""
    curves: list[np.ndarray | None] = []
    for one in pairs:
        rows = np.flatnonzero(~one.ignored[0, threshold])
        hits, total = one.hits[0, threshold, rows], one.objects[0].sum()
        if not total:
            curves.append(None)
            continue
        right = hits.cumsum()
        precision = np.maximum.accumulate((right / np.arange(1, len(hits) + 1))[::-1])[::-1]
        place = np.searchsorted(right / total, RECALLS, side="left")
        curves.append(np.where(place < len(hits), np.append(precision, 0.0)[place], 0.0))
    return curves


__all__ = ["AREAS", "ClassPairs", "ap50_mended", "average_precision", "class_pairs", "figures_of", "precision_recall"]
