"""The figures of a classifier, from its logits and the labels.

Accuracies are quotients of integer counts, and sums run in float64 in the order of the samples, so that batch size and
number of workers cannot change a figure.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from vitreous.evaluation.calibration_error import BINS, Gaps, calibration_error, confidence_bins, image_gaps
from vitreous.evaluation.evaluator import Evaluator, Outputs
from vitreous.evaluation.multilabel import judge_several
from vitreous.evaluation.report import DRAWS, Report
from vitreous.evaluation.temperature import log_softmax

TOGETHER = 30_000  # numbers that draws of the bootstrap, made at once, hold


class ClassificationEvaluator(Evaluator):
    """Judges logits (n, K) of `classes` by `judge`: top-1, or mAP where an image may have several labels."""

    def __init__(self, classes: tuple[str, ...], multilabel: bool = False) -> None:
        self.classes = classes
        self.name = "map" if multilabel else "top1"

    def report(self, outputs: Outputs, *others: Outputs) -> Report:
        """The figures of a classifier's logits."""
        return judge(outputs.rows, outputs.split.labels, self.classes, outputs.readable)


def judge(
    logits: np.ndarray, labels: np.ndarray, classes: tuple[str, ...], readable: np.ndarray | None = None
) -> Report:
    """(n, K) logits and (n,) labels -> top-1, top-5, macro F1, negative log-likelihood, calibration error, with
    intervals.

    Labels (n, K), several to an image, are judged by `judge_several`: mAP in the place of top-1. Images that are not
    `readable` (n,) count as wrong in accuracies and recalls, and have no part in NLL and ECE. A label of equal logits
    ranks by position. top-5 is None for five classes or fewer. NLL in nats; ECE over 15 equal bins of the highest
    probability (arXiv:1706.04599); intervals cover 95 %: Wilson's for the accuracies, of 1000 seeded bootstrap draws
    for the others, corrected for the bias of the ECE.
    """
    readable = np.ones(len(labels), dtype=bool) if readable is None else readable
    if labels.ndim == 2:
        return judge_several(logits, labels, classes, readable)
    count, scores = len(labels), logits.astype(np.float64)
    ranks = rank_of(scores, labels)
    predicted = scores.argmax(1)
    log_p = log_softmax(scores)
    nll = -log_p[np.arange(count), labels][readable]
    confidence, right = np.exp(log_p.max(1))[readable], (predicted == labels)[readable]
    found = cells(labels[readable], predicted[readable], len(classes))
    support, said = (np.bincount(part, minlength=len(classes)) for part in (labels, predicted[readable]))
    right_of = np.bincount(labels[readable][right], minlength=len(classes))
    hits = {"top1": int((readable & (ranks < 1)).sum()), "top5": int((readable & (ranks < 5)).sum())}
    if len(classes) <= 5:
        del hits["top5"]
    figures = {"top1": None, "top5": None} | {name: hit / count for name, hit in hits.items()}
    intervals: dict[str, Any] = {"top1": None, "top5": None} | {name: wilson(hit, count) for name, hit in hits.items()}
    figures["macro_f1"] = macro_f1(right_of, said, support)
    figures["nll"] = float(nll.mean()) if len(nll) else None
    figures["ece"] = calibration_error(confidence, right) if len(nll) else None
    intervals |= bootstrap(labels, predicted, readable, nll, confidence, right, len(classes))
    rows = table(right_of, said, support, found, classes)
    return Report(count, int((~readable).sum()), figures, intervals, rows, found)


def rank_of(scores: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """(n, K) scores and (n,) labels -> (n,) ranks of the labels from 0; equal scores rank by position."""
    own = scores[np.arange(len(labels)), labels][:, None]
    earlier = np.arange(scores.shape[1])[None] < labels[:, None]
    return ((scores > own) | ((scores == own) & earlier)).sum(1)


def wilson(hits: int, count: int, z: float = 1.959963984540054) -> tuple[float, float]:
    """The 95 % interval of a proportion (Wilson, 1927)."""
    if not count:
        return 0.0, 1.0
    p, spread = hits / count, z * z / count
    middle = (p + spread / 2) / (1 + spread)
    half = z / (1 + spread) * math.sqrt(p * (1 - p) / count + spread / (4 * count))
    return max(0.0, middle - half), min(1.0, middle + half)


def cells(labels: np.ndarray, predicted: np.ndarray, classes: int) -> np.ndarray:
    """(n,) labels and answers -> (m, 3) int64: the label, answer and count of every cell of the confusion matrix that
    is not empty.

    The whole matrix of 10,000 classes would take 800 MB.
    """
    codes, counts = np.unique(labels * classes + predicted, return_counts=True)
    return np.stack([codes // classes, codes % classes, counts], 1)


def macro_f1(right: np.ndarray, said: np.ndarray, support: np.ndarray) -> float:
    """The mean over classes with images of F1 = 2 TP / (images + predictions), from the counts of each class."""
    present = support > 0
    f1 = 2 * right / np.maximum(support + said, 1)
    return float(f1[present].mean()) if present.any() else 0.0


def bootstrap(
    labels: np.ndarray,
    predicted: np.ndarray,
    readable: np.ndarray,
    nll: np.ndarray,
    confidence: np.ndarray,
    right: np.ndarray,
    classes: int,
) -> dict[str, tuple[float, float] | None]:
    """95 % intervals over images drawn with replacement, always the same draws: percentiles of macro F1 and NLL, and
    the ECE's."""
    count = len(nll)
    if count < 2:
        return {"macro_f1": None, "nll": None, "ece": None}
    generator = np.random.default_rng(0)
    draws: dict[str, list[float]] = {"macro_f1": [], "nll": []}
    gaps: list[np.ndarray] = []
    labels, predicted, bins, gap = (
        labels[readable],
        predicted[readable],
        confidence_bins(confidence),
        right - confidence,
    )
    left = DRAWS if count * classes < 5e6 else DRAWS // 10
    while left:
        rows = generator.integers(count, size=(min(left, max(1, TOGETHER // max(count, classes))), count))
        support, said = sums(labels[rows], classes), sums(predicted[rows], classes)
        f1 = 2 * sums(labels[rows], classes, right[rows]) / np.maximum(support + said, 1)
        draws["macro_f1"] += (f1.sum(1) / (support > 0).sum(1)).tolist()
        draws["nll"] += nll[rows].mean(1).tolist()
        gaps.append(sums(bins[rows], BINS, gap[rows]) / count)
        left -= len(rows)
    intervals: dict[str, tuple[float, float] | None] = {
        name: (float(np.percentile(values, 2.5)), float(np.percentile(values, 97.5))) for name, values in draws.items()
    }
    return intervals | {"ece": Gaps.of_images(image_gaps(confidence, right)).interval(np.concatenate(gaps))}


def sums(codes: np.ndarray, size: int, weights: np.ndarray | None = None) -> np.ndarray:
    """(D, n) codes below `size` -> (D, size): how often each comes in its row, or the sum of its (D, n) weights."""
    places = codes + size * np.arange(len(codes))[:, None]
    found = np.bincount(places.ravel(), None if weights is None else weights.ravel(), len(codes) * size)
    return found.reshape(len(codes), size)


def table(
    right: np.ndarray, said: np.ndarray, support: np.ndarray, found: np.ndarray, classes: tuple[str, ...]
) -> list[dict[str, Any]]:
    """One row a class: images, recall, precision, F1, and the class it is most often taken for; `found` are `cells`."""
    wrong = found[found[:, 0] != found[:, 1]]
    # of each label, the answer given most often comes first
    wrong = wrong[np.lexsort((wrong[:, 1], -wrong[:, 2], wrong[:, 0]))]
    taken = dict(
        zip(*(column.tolist() for column in wrong[np.unique(wrong[:, 0], return_index=True)[1]].T[:2]), strict=True)
    )
    rows = []
    for index, name in enumerate(classes):
        hits, predictions, images = int(right[index]), int(said[index]), int(support[index])
        rows.append(
            {
                "class": name,
                "images": images,
                "recall": hits / images if images else None,
                "precision": hits / predictions if predictions else None,
                "f1": 2 * hits / (images + predictions) if images + predictions else None,
                "taken_for": classes[taken[index]] if index in taken else None,
            }
        )
    return rows
