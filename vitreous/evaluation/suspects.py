"""Labels that are probably wrong: where the model and the nearest training images both say something else, with
confidence.

In shapes, n is images, m training images, d features, K classes.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from vitreous.evaluation.knn import neighbours

K = 10  # neighbours
CONFIDENT = 0.5  # probability, and share of the neighbours, that another class than the label's must have


@dataclass(frozen=True)
class Suspect:
    """An image whose label is probably wrong; classes are positions. `score`, 0 to 1: the mean of how far the model's
    probability and the neighbours' share of their class are above those of the label."""

    sample: int
    label: int
    answer: int
    probability: float
    neighbour: int
    share: float
    score: float


def suspects(p: np.ndarray, shares: np.ndarray, labels: np.ndarray) -> list[Suspect]:
    """(n, K) probabilities, (n, K) shares of the neighbours and (n,) labels -> the suspects, the surest first.

    A label is suspect where both name another class, each with `CONFIDENT` at least; they may name different ones.
    """
    rows = np.arange(len(labels))
    answer, neighbour = p.argmax(1), shares.argmax(1)
    probability, share = p[rows, answer], shares[rows, neighbour]
    found = (answer != labels) & (neighbour != labels) & (probability >= CONFIDENT) & (share >= CONFIDENT)
    score = (probability - p[rows, labels] + share - shares[rows, labels]) / 2
    order = [int(sample) for sample in np.argsort(-score, kind="stable") if found[sample]]
    return [
        Suspect(
            s,
            int(labels[s]),
            int(answer[s]),
            float(probability[s]),
            int(neighbour[s]),
            float(share[s]),
            float(score[s]),
        )
        for s in order
    ]


def neighbour_shares(
    features: np.ndarray,
    memory: np.ndarray,
    labels: np.ndarray,
    classes: int,
    own: np.ndarray | None = None,
    k: int = K,
) -> np.ndarray:
    """(n, d) features, (m, d) training features and their (m,) labels -> (n, K): the share of each class among the k
    nearest.

    Nearest is by cosine. `own` (n,): where each image itself is among the training images, -1 for none; it is no
    neighbour of its own. With fewer than k others, all of them are the neighbours; shares are 0 where there is none.
    """
    _, rows = neighbours(memory, features, min(k + 1, len(memory)))
    itself = rows == (np.full(len(features), -1) if own is None else own)[:, None]
    near = np.take_along_axis(rows, np.argsort(itself, axis=1, kind="stable"), 1)[:, :k]  # the image itself comes last
    counted = np.arange(near.shape[1])[None] < np.minimum(k, rows.shape[1] - itself.sum(1))[:, None]
    cells = np.arange(len(features))[:, None] * classes + labels[near]
    shares = np.bincount(cells[counted], minlength=len(features) * classes).reshape(len(features), classes)
    return shares / np.maximum(shares.sum(1, keepdims=True), 1)
