"""Metrics of multi-label classifiers.

In shapes, n is images, K classes, D draws of the bootstrap. The metrics themselves are computed like a single draw that
contains each image once.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import scipy

from vitreous.tasks.calibration import MULTILABEL_THRESHOLD, compute_image_nll
from vitreous.tasks.intervals import (
    DEFAULT_BOOTSTRAP_DRAWS,
    MIN_BOOTSTRAP_DRAWS,
    Interval,
    bootstrap_metrics,
    percentile_interval,
)
from vitreous.tasks.report import Report

MULTILABEL_BOOTSTRAP_BUDGET = 1e8  # maximum number of logits x draws that the bootstrap processes


def evaluate_multilabel(
    logits: np.ndarray, labels: np.ndarray, classes: tuple[str, ...], readable: np.ndarray
) -> Report:
    """Compute mAP, macro and micro F1 and NLL from logits (n, K) and labels (n, K) in {0, 1}, with intervals.

    A class is predicted if its probability is above `MULTILABEL_THRESHOLD`. mAP and macro F1 are means over the classes
    with positives; micro F1 counts all classes together. NLL is the sigmoid loss in nats, summed over classes. Images
    that are not `readable` (n,) are never retrieved and are excluded from NLL. Intervals cover 95 %, from 1000 seeded
    bootstrap draws, or fewer for many images.
    """
    positive, scores = labels > 0, np.where(readable[:, None], logits, -np.inf)
    predicted = scipy.special.expit(scores.astype(np.float64)) > MULTILABEL_THRESHOLD
    nll = np.where(readable, compute_image_nll(logits, labels), 0.0)
    mean_ap = MeanAveragePrecision(scores, positive)
    indicators = [indicator.astype(np.float32) for indicator in (positive & predicted, predicted, positive)]

    def metrics(counts: np.ndarray) -> dict[str, np.ndarray]:
        """Compute each metric (D,) from draw counts (n, D): how often each draw contains each image."""
        hits, predictions, support = ((indicator.T @ counts).astype(np.float64) for indicator in indicators)
        f1, present = 2 * hits / np.maximum(predictions + support, 1), support > 0
        return {
            "map": mean_ap(counts),
            "macro_f1": np.where(present, f1, 0).sum(0) / np.maximum(present.sum(0), 1),
            "micro_f1": 2 * hits.sum(0) / np.maximum((predictions + support).sum(0), 1),
            "nll": nll @ counts / np.maximum(readable @ counts, 1),
        }

    unit_counts = np.ones((len(labels), 1), np.float32)
    values: dict[str, float | None] = {name: float(value[0]) for name, value in metrics(unit_counts).items()}
    if not readable.any():
        values["nll"] = None
    undefined = dict.fromkeys(("top1", "top5", "ece"))
    intervals: dict[str, Interval | None] = undefined | dict.fromkeys(values)
    if readable.sum() > 1:
        draws = bootstrap_metrics(metrics, len(labels), choose_multilabel_draws(positive.size))
        intervals |= {name: percentile_interval(draw) for name, draw in draws.items()}
    class_rows = tabulate_multilabel_classes(
        positive, predicted, mean_ap.per_class(unit_counts)[:, 0].tolist(), classes
    )
    return Report(
        len(labels),
        int((~readable).sum()),
        metrics=values | undefined,
        intervals=intervals,
        per_class=class_rows,
        confusion_cells=None,
        primary="map",
    )


def choose_multilabel_draws(size: int) -> int:
    """Return the number of bootstrap draws for `size` logits, within `MULTILABEL_BOOTSTRAP_BUDGET`."""
    return max(MIN_BOOTSTRAP_DRAWS, min(DEFAULT_BOOTSTRAP_DRAWS, int(MULTILABEL_BOOTSTRAP_BUDGET / max(size, 1))))


class ClassRanking(NamedTuple):
    """The images of a class by descending score. They are divided into groups that end after each distinct score of a
    positive image, which are the thresholds of average precision."""

    order: np.ndarray  # (m,) image indices by descending score, down to the lowest score of a positive
    group_starts: np.ndarray  # (T,) start of each group in `order`; images of equal score are in the same group
    positives: np.ndarray  # (P,) image indices of the positives in that order
    group_indices: np.ndarray  # (P,) index of the group of each positive
    missed: np.ndarray  # image indices of positives without a score


def rank_images(scores: np.ndarray, positive: np.ndarray) -> ClassRanking:
    """Rank the images of a class by their scores (n,), -inf for an image without a score. `positive` is (n,) bool."""
    order = np.argsort(-scores, kind="stable")[: (scores > -np.inf).sum()]
    negated_scores, ranks = -scores[order], np.flatnonzero(positive[order])
    ends, group_indices = np.unique(
        np.searchsorted(negated_scores, negated_scores[ranks], side="right"), return_inverse=True
    )
    missed = np.flatnonzero(positive & ~(scores > -np.inf))
    return ClassRanking(
        order[: ends[-1] if len(ends) else 0], np.append(0, ends[:-1]), order[ranks], group_indices, missed
    )


def compute_class_ap(ranking: ClassRanking, counts: np.ndarray) -> np.ndarray:
    """Compute the average precision (D,) of a class in [0, 1] from draw counts (n, D); 0 without positives.

    For thresholds t from the highest score down: sum_t (recall_t - recall_{t-1}) precision_t. Equal scores have the
    same threshold.
    """
    if not len(ranking.positives):
        return np.zeros(int(counts.shape[1]))
    hits = counts.take(ranking.positives, 0)
    gained = np.add.reduceat(hits, np.searchsorted(ranking.group_indices, np.arange(len(ranking.group_starts))), 0)
    retrieved = np.add.reduceat(counts.take(ranking.order, 0), ranking.group_starts, 0).cumsum(0)
    precision = gained.cumsum(0, dtype=np.float64) / np.maximum(retrieved, 1)
    return (gained * precision).sum(0) / np.maximum(hits.sum(0) + counts[ranking.missed].sum(0), 1)


class MeanAveragePrecision:
    """The mAP of scores (n, K) and positives (n, K) bool, as a function of draw counts (n, D)."""

    def __init__(self, scores: np.ndarray, positive: np.ndarray) -> None:
        self.rankings = [rank_images(scores[:, c], positive[:, c]) for c in range(scores.shape[1])]
        self.positive = positive.astype(np.float32)

    def per_class(self, counts: np.ndarray) -> np.ndarray:
        """Compute the average precision of each class and draw, (K, D)."""
        return np.stack([compute_class_ap(ranking, counts) for ranking in self.rankings])

    def __call__(self, counts: np.ndarray) -> np.ndarray:
        """Compute the mean average precision (D,) of each draw, over the classes that have positives in it."""
        present = (self.positive.T @ counts > 0).sum(0)
        return self.per_class(counts).sum(0) / np.maximum(present, 1)


def tabulate_multilabel_classes(
    positive: np.ndarray, predicted: np.ndarray, precisions: list[float], classes: tuple[str, ...]
) -> list[dict[str, Any]]:
    """Return one row per class: number of images, AP, and recall, precision and F1 at the threshold. `positive` and
    `predicted` are (n, K) bool; `precisions` are the average precisions of the K classes."""
    counts = zip(*(indicator.sum(0).tolist() for indicator in (positive, predicted, positive & predicted)), strict=True)
    return [
        {
            "class": name,
            "images": images,
            "ap": ap if images else None,
            "recall": hits / images if images else None,
            "precision": hits / num_predicted if num_predicted else None,
            "f1": 2 * hits / (images + num_predicted) if images + num_predicted else None,
        }
        for name, ap, (images, num_predicted, hits) in zip(classes, precisions, counts, strict=True)
    ]
