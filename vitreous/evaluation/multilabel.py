"""The figures of a classifier whose images have several labels: each class is a question of its own.

In shapes, n is images, K classes, D draws of the bootstrap. The figures themselves are a draw of every image once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from vitreous.evaluation.report import DRAWS, Report

THRESHOLD = 0.5  # probability above which a class is said to be there
BUDGET, FEWEST = 1e8, 100  # numbers that the bootstrap may look at, and the draws it makes at least
CHUNK = 1_000_000  # numbers of images x draws in memory at a time

Figures = Callable[[np.ndarray], dict[str, np.ndarray]]


def judge_several(logits: np.ndarray, labels: np.ndarray, classes: tuple[str, ...], readable: np.ndarray) -> Report:
    """(n, K) logits and (n, K) labels in {0, 1} -> mAP, macro and micro F1, negative log-likelihood, with intervals.

    mAP is the mean over classes with positives of their average precision, 0 where there are none. A class is predicted
    where its probability is above `THRESHOLD`; macro F1 is the mean over classes with positives, micro F1 counts all
    classes together. NLL is the sigmoid loss: nats, summed over classes. Images that are not `readable` (n,) are never
    retrieved: their positives are missed in AP and F1, and they have no part in NLL. Intervals cover 95 %, by 1000
    seeded bootstrap draws of the images, fewer where there are many.
    """
    positive, scores = labels > 0, np.where(readable[:, None], logits, -np.inf)
    predicted = sigmoid(scores) > THRESHOLD
    nll = np.where(readable, (np.logaddexp(0, logits.astype(np.float64)) - positive * logits).sum(1), 0.0)
    rankings = [ranking(scores[:, c], positive[:, c]) for c in range(len(classes))]
    counted = [part.astype(np.float32) for part in (positive & predicted, predicted, positive)]

    def figures(counts: np.ndarray) -> dict[str, np.ndarray]:
        """(n, D) how often each image is drawn -> each figure, (D,)."""
        precisions = np.stack([average_precision(ranked, counts) for ranked in rankings])
        hits, said, there = ((part.T @ counts).astype(np.float64) for part in counted)
        f1, present = 2 * hits / np.maximum(said + there, 1), there > 0
        some = np.maximum(present.sum(0), 1)
        return {
            "map": precisions.sum(0) / some,
            "macro_f1": np.where(present, f1, 0).sum(0) / some,
            "micro_f1": 2 * hits.sum(0) / np.maximum((said + there).sum(0), 1),
            "nll": nll @ counts / np.maximum(readable @ counts, 1),
        }

    one = np.ones((len(labels), 1), np.float32)
    found: dict[str, float | None] = {name: float(value[0]) for name, value in figures(one).items()}
    if not readable.any():
        found["nll"] = None
    none = dict.fromkeys(("top1", "top5", "ece"))
    draws = max(FEWEST, min(DRAWS, int(BUDGET / max(positive.size, 1))))
    intervals = none | (bootstrap(figures, len(labels), draws) if readable.sum() > 1 else dict.fromkeys(found))
    rows = table(positive, predicted, [float(average_precision(ranked, one)[0]) for ranked in rankings], classes)
    return Report(len(labels), int((~readable).sum()), found | none, intervals, rows, None, "map")


class Ranking(NamedTuple):
    """One class's images from the highest score down, cut after each score that positives have: what AP needs of
    them."""

    order: np.ndarray  # (m,) images, down to the last positive
    starts: np.ndarray  # (T,) where in `order` each part begins; images of one score are in one part
    positives: np.ndarray  # (P,) images in that order
    part: np.ndarray  # (P,) the part of each
    missed: np.ndarray  # positives that have no score


def ranking(scores: np.ndarray, positive: np.ndarray) -> Ranking:
    """(n,) scores, -inf for none, and (n,) bool -> the ranking of a class."""
    order = np.argsort(-scores, kind="stable")[: (scores > -np.inf).sum()]
    down, ranks = -scores[order], np.flatnonzero(positive[order])
    ends, part = np.unique(np.searchsorted(down, down[ranks], side="right"), return_inverse=True)
    missed = np.flatnonzero(positive & ~(scores > -np.inf))
    return Ranking(order[: ends[-1] if len(ends) else 0], np.append(0, ends[:-1]), order[ranks], part, missed)


def average_precision(ranked: Ranking, counts: np.ndarray) -> np.ndarray:
    """(n, D) how often each image is drawn -> (D,) a class's average precision in [0, 1], 0 without positives.

    For thresholds t from the highest score down: sum_t (recall_t - recall_{t-1}) precision_t. Equal scores are one
    threshold.
    """
    if not len(ranked.positives):
        return np.zeros(counts.shape[1])
    hits = counts.take(ranked.positives, 0)
    found = np.add.reduceat(hits, np.searchsorted(ranked.part, np.arange(len(ranked.starts))), 0)
    seen = np.add.reduceat(counts.take(ranked.order, 0), ranked.starts, 0).cumsum(0)
    precision = found.cumsum(0, dtype=np.float64) / np.maximum(seen, 1)
    return (found * precision).sum(0) / np.maximum(hits.sum(0) + counts[ranked.missed].sum(0), 1)


def bootstrap(figures: Figures, images: int, draws: int) -> dict[str, tuple[float, float]]:
    """95 % percentile intervals of figures over images drawn with replacement, always the same draws."""
    generator = np.random.default_rng(0)
    parts, size = [], max(1, CHUNK // images)
    for start in range(0, draws, size):
        counts = [
            np.bincount(generator.integers(images, size=images), minlength=images)
            for _ in range(min(size, draws - start))
        ]
        parts.append(figures(np.stack(counts, 1).astype(np.float32)))
    whole = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
    return {
        name: (float(np.percentile(values, 2.5)), float(np.percentile(values, 97.5))) for name, values in whole.items()
    }


def table(
    positive: np.ndarray, predicted: np.ndarray, precisions: list[float], classes: tuple[str, ...]
) -> list[dict[str, Any]]:
    """One row a class: images that have it, average precision, and recall, precision and F1 at the threshold."""
    counts = zip(*(part.sum(0).tolist() for part in (positive, predicted, positive & predicted)), strict=True)
    return [
        {
            "class": name,
            "images": there,
            "ap": precision if there else None,
            "recall": hits / there if there else None,
            "precision": hits / said if said else None,
            "f1": 2 * hits / (there + said) if there + said else None,
        }
        for name, precision, (there, said, hits) in zip(classes, precisions, counts, strict=True)
    ]


def sigmoid(logits: np.ndarray) -> np.ndarray:
    """Logits of any shape -> float64 probabilities, each of its own."""
    return np.exp(-np.logaddexp(0, -logits.astype(np.float64)))
