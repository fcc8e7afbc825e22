"""Labels of one class an image, and of several: what evaluations on features do differently for each.

In shapes, n is images and K classes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

import numpy as np

LEAST_SHARE = 1e-30  # of votes, so that its logarithm is a number


class LabelKind(ABC):
    """What differs between labels of one class an image and of several."""

    metric: ClassVar[str]  # the key of the metric that evaluations are compared by
    least_classes: ClassVar[int]  # that a classifier needs images of
    is_exclusive: ClassVar[bool]  # a classifier has one softmax, and not a sigmoid for each class

    @abstractmethod
    def count_classes(self, labels: np.ndarray, classes: int) -> np.ndarray:
        """Labels of n images -> (K,): how many images each class has."""

    @abstractmethod
    def select_classes(self, labels: np.ndarray, present: np.ndarray, classes: int) -> np.ndarray:
        """Labels of n images -> labels in the positions (K',) int64 of the classes that are `present`."""

    @abstractmethod
    def shares_to_logits(self, shares: np.ndarray) -> np.ndarray:
        """(n, K) shares of votes -> (n, K) logits whose probabilities they are."""


class OneLabel(LabelKind):
    """Labels (n,) int64; probabilities are a softmax over the classes."""

    metric = "top1"
    least_classes = 2
    is_exclusive = True

    def count_classes(self, labels: np.ndarray, classes: int) -> np.ndarray:
        """(n,) labels -> (K,)."""
        return np.bincount(labels, minlength=classes)

    def select_classes(self, labels: np.ndarray, present: np.ndarray, classes: int) -> np.ndarray:
        """(n,) labels -> (n,) positions in `present`, -1 of other classes."""
        place = np.full(classes, -1)
        place[present] = np.arange(len(present))
        return place[labels]

    def shares_to_logits(self, shares: np.ndarray) -> np.ndarray:
        """(n, K) shares -> (n, K) logarithms."""
        return np.log(np.clip(shares, LEAST_SHARE, 1.0))


class SeveralLabels(LabelKind):
    """Labels (n, K) in {0, 1}; probabilities are a sigmoid for each class."""

    metric = "map"
    least_classes = 0
    is_exclusive = False

    def count_classes(self, labels: np.ndarray, classes: int) -> np.ndarray:
        """(n, K) labels -> (K,)."""
        return labels.sum(0)

    def select_classes(self, labels: np.ndarray, present: np.ndarray, classes: int) -> np.ndarray:
        """(n, K) labels -> (n, K') float32."""
        return labels[:, present].astype(np.float32)

    def shares_to_logits(self, shares: np.ndarray) -> np.ndarray:
        """(n, K) shares -> (n, K) log-odds."""
        shares = np.clip(shares, LEAST_SHARE, 1.0)
        return np.log(shares) - np.log(np.clip(1 - shares, LEAST_SHARE, 1.0))


ONE_LABEL, SEVERAL_LABELS = OneLabel(), SeveralLabels()


def label_kind(multilabel: bool) -> LabelKind:
    """The kind of labels: of several classes an image if `multilabel`."""
    return SEVERAL_LABELS if multilabel else ONE_LABEL
