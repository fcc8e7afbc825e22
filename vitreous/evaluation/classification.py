"""The figures of a classifier, from its logits and the labels.

Accuracies are quotients of integer counts, and sums run in float64 in the order of the samples, so that batch size and
number of workers cannot change a figure.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from vitreous.evaluation.report import DRAWS, Report
from vitreous.evaluation.several import judge_several

BINS = 15  # of the calibration error


def judge(logits: np.ndarray, labels: np.ndarray, classes: tuple[str, ...], readable: np.ndarray | None = None) -> Report:
    """(n, K) logits and (n,) labels -> top-1, top-5, macro F1, negative log-likelihood, calibration error, with intervals.

    Labels (n, K), several to an image, are judged by `judge_several`: mAP in the place of top-1. Images that are not `readable`
    (n,) count as wrong in accuracies and recalls, and have no part in NLL and ECE. A label of equal logits ranks by position.
    top-5 is None for five classes or fewer. NLL in nats; ECE over 15 equal bins of the highest probability (arXiv:1706.04599);
    intervals cover 95 %: Wilson's for the accuracies, of 1000 seeded bootstrap draws for the others.
    """
    readable = np.ones(len(labels), dtype=bool) if readable is None else readable
    if labels.ndim == 2:
        return judge_several(logits, labels, classes, readable)
    count, scores = len(labels), logits.astype(np.float64)
    ranks = rank_of(scores, labels)
    predicted = scores.argmax(1)
    log_p = scores - scores.max(1, keepdims=True)
    log_p -= np.log(np.exp(log_p).sum(1, keepdims=True))
    nll = -log_p[np.arange(count), labels][readable]
    confidence, right = np.exp(log_p.max(1))[readable], (predicted == labels)[readable]
    confusion = np.bincount(labels[readable] * len(classes) + predicted[readable], minlength=len(classes) ** 2)
    confusion = confusion.reshape(len(classes), len(classes))
    support = np.bincount(labels, minlength=len(classes))
    hits = {"top1": int((readable & (ranks < 1)).sum()), "top5": int((readable & (ranks < 5)).sum())}
    if len(classes) <= 5:
        del hits["top5"]
    figures = {"top1": None, "top5": None} | {name: hit / count for name, hit in hits.items()}
    intervals: dict[str, Any] = {"top1": None, "top5": None} | {name: wilson(hit, count) for name, hit in hits.items()}
    figures["macro_f1"] = macro_f1(confusion, support)
    figures["nll"] = float(nll.mean()) if len(nll) else None
    figures["ece"] = calibration_error(confidence, right) if len(nll) else None
    intervals |= bootstrap(labels, predicted, readable, nll, confidence, right, len(classes))
    return Report(count, int((~readable).sum()), figures, intervals, table(confusion, support, classes), confusion)


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


def macro_f1(confusion: np.ndarray, support: np.ndarray) -> float:
    """The mean over classes with images of F1 = 2 TP / (images + predictions)."""
    present = support > 0
    f1 = 2 * np.diagonal(confusion) / np.maximum(support + confusion.sum(0), 1)
    return float(f1[present].mean()) if present.any() else 0.0


def calibration_error(confidence: np.ndarray, right: np.ndarray) -> float:
    """Expected calibration error: the mean over images of |accuracy - confidence| of their bin."""
    bins = np.minimum((confidence * BINS).astype(int), BINS - 1)
    gaps = np.bincount(bins, weights=right - confidence, minlength=BINS)
    return float(np.abs(gaps).sum() / len(confidence))


def bootstrap(
    labels: np.ndarray,
    predicted: np.ndarray,
    readable: np.ndarray,
    nll: np.ndarray,
    confidence: np.ndarray,
    right: np.ndarray,
    classes: int,
) -> dict[str, tuple[float, float] | None]:
    """95 % percentile intervals of macro F1, NLL and ECE over images drawn with replacement, always the same draws."""
    if len(nll) < 2:
        return {"macro_f1": None, "nll": None, "ece": None}
    generator = np.random.default_rng(0)
    draws: dict[str, list[float]] = {"macro_f1": [], "nll": [], "ece": []}
    cells = labels[readable] * classes + predicted[readable]
    draw_count = DRAWS if len(nll) * classes < 5e6 else DRAWS // 10
    for _ in range(draw_count):
        rows = generator.integers(len(nll), size=len(nll))
        confusion = np.bincount(cells[rows], minlength=classes**2).reshape(classes, classes)
        draws["macro_f1"].append(macro_f1(confusion, confusion.sum(1)))
        draws["nll"].append(float(nll[rows].mean()))
        draws["ece"].append(calibration_error(confidence[rows], right[rows]))
    return {name: (float(np.percentile(values, 2.5)), float(np.percentile(values, 97.5))) for name, values in draws.items()}


def table(confusion: np.ndarray, support: np.ndarray, classes: tuple[str, ...]) -> list[dict[str, Any]]:
    """One row a class: images, recall, precision, F1, and the class it is most often taken for."""
    rows = []
    for index, name in enumerate(classes):
        hits, predictions = int(confusion[index, index]), int(confusion[:, index].sum())
        wrong = confusion[index].copy()
        wrong[index] = 0
        rows.append(
            {
                "class": name,
                "images": int(support[index]),
                "recall": hits / support[index] if support[index] else None,
                "precision": hits / predictions if predictions else None,
                "f1": 2 * hits / (support[index] + predictions) if support[index] + predictions else None,
                "taken_for": classes[int(wrong.argmax())] if wrong.any() else None,
            }
        )
    return rows
