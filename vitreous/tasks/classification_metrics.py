"""Metrics of a classifier from its logits and the labels.

Accuracies are quotients of integer counts, and sums run in float64 in the order of the samples. Metrics therefore do
not depend on the batch size or the number of workers. In shapes, n is images, K classes, D draws of the bootstrap.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from vitreous.errors import NonFiniteError
from vitreous.tasks.calibration import (
    CalibrationGaps,
    compute_image_gaps,
    compute_image_nll,
    compute_probabilities,
    expected_calibration_error,
    log_softmax,
)
from vitreous.tasks.intervals import (
    DEFAULT_BOOTSTRAP_DRAWS,
    Interval,
    bootstrap_metrics,
    percentile_interval,
    wilson_interval,
)
from vitreous.tasks.metrics import CLASSIFICATION_METRICS
from vitreous.tasks.multilabel_metrics import evaluate_multilabel
from vitreous.tasks.report import Report

MIN_TOP5_CLASSES = 10  # minimum number of classes for top-5
#: key of a metric that is a mean over classes -> key of the per-class metric
CLASS_MEANS = {metric.key: metric.class_mean for metric in CLASSIFICATION_METRICS if metric.class_mean}
MAX_CONFUSED_PAIRS = 10  # maximum length of the list of most confused classes


def evaluate_classification(
    logits: np.ndarray, labels: np.ndarray, classes: tuple[str, ...], readable: np.ndarray | None = None
) -> Report:
    """Compute the metrics of logits (n, K) and labels (n,): top-1, top-5, means over classes (`CLASS_MEANS`), negative
    log-likelihood (NLL) and calibration error (ECE).

    Labels (n, K) are evaluated by `evaluate_multilabel`. Images that are not `readable` (n,) count as wrong in
    accuracies and recalls, and are excluded from NLL and ECE. Equal logits rank by index. top-5 is None for fewer than
    `MIN_TOP5_CLASSES` classes. NLL is in nats; ECE has 15 equal bins of the highest probability (arXiv:1706.04599).
    Intervals cover 95 %: Wilson's for accuracies, a seeded bootstrap for the other metrics, corrected for the bias of
    the ECE. Raises NonFiniteError for logits without finite probabilities.
    """
    readable = np.ones(len(labels), dtype=bool) if readable is None else readable
    if labels.ndim == 2:
        return evaluate_multilabel(logits, labels, classes, readable)
    count, scores = len(labels), logits.astype(np.float64)
    ranks, predicted, log_p = rank_labels(scores, labels), scores.argmax(1), log_softmax(scores)
    if np.isnan(log_p[readable]).any():
        raise NonFiniteError("the model's outputs are not finite", "use a lower --lr, or --precision fp32")
    nll = -log_p[np.arange(count), labels][readable]
    confidence, correct = np.exp(log_p.max(1))[readable], (predicted == labels)[readable]
    hits = {"top1": int((readable & (ranks < 1)).sum()), "top5": int((readable & (ranks < 5)).sum())}
    if len(classes) < MIN_TOP5_CLASSES:
        del hits["top5"]
    cells = count_confusion_cells(labels[readable], predicted[readable], len(classes))
    support, predictions, correct_per_class = (
        np.bincount(class_indices, minlength=len(classes))
        for class_indices in (labels, predicted[readable], labels[readable][correct])
    )
    present = support > 0
    rates = class_rates(correct_per_class, predictions, support)
    metrics = {"top1": None, "top5": None} | {name: hit / count for name, hit in hits.items()}
    metrics |= {
        name: float(rates[class_metric][present].mean()) if present.any() else 0.0
        for name, class_metric in CLASS_MEANS.items()
    }
    metrics["nll"] = float(nll.mean()) if len(nll) else None
    metrics["ece"] = expected_calibration_error(confidence, correct) if len(nll) else None
    intervals: dict[str, Interval | None] = dict.fromkeys(metrics)
    intervals |= {name: wilson_interval(hit, count) for name, hit in hits.items()}
    intervals |= bootstrap_intervals(labels[readable], predicted[readable], nll, confidence, len(classes))
    class_rows = tabulate_classes(correct_per_class, predictions, support, cells, classes)
    return Report(
        count, int((~readable).sum()), metrics=metrics, intervals=intervals, per_class=class_rows, confusion_cells=cells
    )


def class_rates(correct: np.ndarray, predictions: np.ndarray, support: np.ndarray) -> dict[str, np.ndarray]:
    """Compute recall, precision and F1 per class from counts (K, ...) of correct predictions, predictions and images; 0
    if the denominator is 0."""
    return {
        "recall": correct / np.maximum(support, 1),
        "precision": correct / np.maximum(predictions, 1),
        "f1": 2 * correct / np.maximum(support + predictions, 1),
    }


def rank_labels(scores: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """Return the rank (n,) of each label's score, 0 for the highest, from scores (n, K) and labels (n,). Equal scores
    rank by index."""
    label_scores, count = scores[np.arange(len(labels)), labels][:, None], int(scores.shape[1])
    precedes_label: np.ndarray = np.arange(count)[None] < labels[:, None]
    return ((scores > label_scores) | ((scores == label_scores) & precedes_label)).sum(1)


def count_confusion_cells(labels: np.ndarray, predicted: np.ndarray, num_classes: int) -> np.ndarray:
    """Return the non-zero cells of the confusion matrix, (m, 3) int64: label, prediction, count. From labels and
    predicted classes (n,).

    The full matrix of 10,000 classes would take 800 MB.
    """
    codes, counts = np.unique(labels * num_classes + predicted, return_counts=True)
    return np.stack([codes // num_classes, codes % num_classes, counts], 1)


def bootstrap_intervals(
    labels: np.ndarray, predicted: np.ndarray, nll: np.ndarray, confidence: np.ndarray, num_classes: int
) -> dict[str, Interval]:
    """Compute bootstrap intervals of the means over classes, NLL and ECE from arrays (n,) of the readable images.
    Returns an empty dict for fewer than two images."""
    count, correct = len(nll), labels == predicted
    if count < 2:
        return {}
    gaps = compute_image_gaps(confidence, correct)

    def metrics(counts: np.ndarray) -> dict[str, np.ndarray]:
        """Compute means over classes and NLL (D,), and gaps of the calibration error (BINS, D), from draw counts (n,
        D): how often each draw contains each image."""
        support, predictions = sum_by_class(labels, counts, num_classes), sum_by_class(predicted, counts, num_classes)
        rates = class_rates(sum_by_class(labels[correct], counts[correct], num_classes), predictions, support)
        present = support > 0
        means = {
            name: rates[class_metric].sum(0, where=present) / present.sum(0)
            for name, class_metric in CLASS_MEANS.items()
        }
        return {**means, "nll": nll @ counts / count, "gaps": gaps.T @ counts / count}

    draws = bootstrap_metrics(
        metrics, count, DEFAULT_BOOTSTRAP_DRAWS if count * num_classes < 5e6 else DEFAULT_BOOTSTRAP_DRAWS // 10
    )
    intervals = {name: percentile_interval(draws[name]) for name in (*CLASS_MEANS, "nll")}
    return intervals | {"ece": CalibrationGaps.of_images(gaps).interval(draws["gaps"].T)}


def sum_by_class(class_indices: np.ndarray, values: np.ndarray, num_classes: int) -> np.ndarray:
    """Sum the rows of `values` (n, D) of each class, given class indices (n,). Returns (K, D) float64."""
    sums = np.zeros((num_classes, values.shape[1]))
    order = np.argsort(class_indices, kind="stable")
    present, starts = np.unique(class_indices[order], return_index=True)
    if len(present):
        sums[present] = np.add.reduceat(values[order], starts)
    return sums


def tabulate_classes(
    correct: np.ndarray, predictions: np.ndarray, support: np.ndarray, cells: np.ndarray, classes: tuple[str, ...]
) -> list[dict[str, Any]]:
    """Return one row per class: number of images, recall, precision, F1, and the class with which it is most often
    confused.

    `correct`, `predictions` and `support` are counts (K,) of correct predictions, predictions and images; `cells` is
    the output of `count_confusion_cells`.
    """
    wrong = cells[cells[:, 0] != cells[:, 1]]
    wrong = wrong[np.lexsort((wrong[:, 1], -wrong[:, 2], wrong[:, 0]))]  # most frequent prediction of each label first
    first_indices = np.unique(wrong[:, 0], return_index=True)[1]
    confused_with = {int(label): classes[int(predicted_index)] for label, predicted_index, _ in wrong[first_indices]}
    return [
        {
            "class": name,
            "images": images,
            "recall": hits / images if images else None,
            "precision": hits / num_predicted if num_predicted else None,
            "f1": 2 * hits / (images + num_predicted) if images + num_predicted else None,
            "confused_with": confused_with.get(index),
        }
        for index, (name, hits, num_predicted, images) in enumerate(
            zip(classes, correct.tolist(), predictions.tolist(), support.tolist(), strict=True)
        )
    ]


def evaluate_label_sets(logits: np.ndarray, correct_classes: np.ndarray, readable: np.ndarray) -> Report:
    """Compute top-1 and top-5 from logits (n, K) and sets of correct classes (n, K) bool, with Wilson's 95 % intervals.

    For ImageNet ReaL (arXiv:2006.07159) and ObjectNet: an image is correct if its set contains the class with the
    highest logit (top-1), or one of the classes with the five highest logits (top-5). Equal logits rank by index.
    Images with an empty set are skipped; images that are not `readable` (n,) count as wrong.
    """
    has_label = correct_classes.any(1)
    top5_indices = np.argsort(-logits[has_label], axis=1, kind="stable")[:, :5]
    matches = np.take_along_axis(correct_classes[has_label], top5_indices, 1) & readable[has_label, None]
    count, hits = len(matches), {"top1": int(matches[:, 0].sum()), "top5": int(matches.any(1).sum())}
    metrics: dict[str, float | None] = {name: hit / count if count else None for name, hit in hits.items()}
    undefined = dict.fromkeys((*CLASS_MEANS, "nll", "ece"))
    intervals: dict[str, Interval | None] = {name: wilson_interval(hit, count) for name, hit in hits.items()}
    return Report(
        count,
        int((~readable[has_label]).sum()),
        metrics=metrics | undefined,
        intervals=intervals | undefined,
        per_class=[],
        confusion_cells=None,
    )


def list_confused_pairs(
    cells: np.ndarray, support: np.ndarray, classes: tuple[str, ...], limit: int = MAX_CONFUSED_PAIRS
) -> dict[str, list[dict[str, Any]]]:
    """Return the most confused pairs of classes from `count_confusion_cells` and the number of images per class,
    `support` (K,).

    `ordered`: images of the class `label` predicted as `prediction`, with their `count` and `share` of the label's
    images. `unordered`: errors between two `classes` in either direction, and their share of the images of both. Pairs
    of equal counts are sorted by share, then by the order of the classes.
    """
    label_indices, predicted_indices, counts = cells[cells[:, 0] != cells[:, 1]].T
    shares = counts / np.maximum(support[label_indices], 1)
    ordered = [
        {
            "label": classes[int(label_indices[i])],
            "prediction": classes[int(predicted_indices[i])],
            "count": int(counts[i]),
            "share": float(shares[i]),
        }
        for i in np.lexsort((-shares, -counts))[:limit]
    ]
    codes, pair_indices = np.unique(
        np.minimum(label_indices, predicted_indices) * len(classes) + np.maximum(label_indices, predicted_indices),
        return_inverse=True,
    )
    totals = np.bincount(pair_indices, weights=counts, minlength=len(codes)).astype(np.int64)
    low, high = codes // len(classes), codes % len(classes)
    shares = totals / np.maximum(support[low] + support[high], 1)
    unordered = [
        {"classes": [classes[low[i]], classes[high[i]]], "count": int(totals[i]), "share": float(shares[i])}
        for i in np.lexsort((-shares, -totals))[:limit]
    ]
    return {"ordered": ordered, "unordered": unordered}


def score_images(logits: np.ndarray, labels: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the loss, the margin, and whether the prediction is wrong, (n,) each, from logits (n, K) and labels (n,)
    or (n, K).

    The margin is the difference between the two highest probabilities; for multi-label data, the smallest distance of a
    probability from 0.5.
    """
    loss = compute_image_nll(logits, labels)
    if labels.ndim == 2:
        return (
            loss,
            np.abs(compute_probabilities(logits, "sigmoid") - 0.5).min(1),
            ((logits > 0) != (labels > 0)).any(1),
        )
    top_two = np.sort(compute_probabilities(logits), 1)[:, -2:]
    return loss, top_two[:, -1] - top_two[:, 0], logits.argmax(1) != labels
