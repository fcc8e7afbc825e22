"""The differences between single-label and multi-label data, for datasets, objectives and evaluation.

In shapes, n is images and K is classes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

import numpy as np

from vitreous.errors import UsageError

MIN_VOTE_SHARE = 1e-30  # minimum vote share, so that its logarithm is finite


class LabelKind(ABC):
    """Base class of the operations that differ between single-label and multi-label data."""

    metric_key: ClassVar[str]  # name of the metric by which evaluations are compared
    least_classes: ClassVar[int]  # minimum number of classes that must have images to train a classifier
    is_exclusive: ClassVar[bool]  # probabilities are a softmax over the classes, rather than a sigmoid for each class

    def require_single_label(self, problem: str, hint: str) -> None:  # noqa: B027
        """Raise UsageError, with `problem` and `hint`, if the data are multi-label."""

    def choose_loss(self, loss: str, requested_loss: str | None, source: str) -> str:
        """Return the loss of the logits that fits the labels: `loss`, or a replacement of the default softmax.
        `requested_loss` is the loss that the user set, if any. Raises UsageError, with the name `source` of the data,
        if the requested loss does not fit."""
        return loss

    def least_held_out(self, classes: int) -> int:
        """Return the minimum number of images of a held-out split of data with that number of classes."""
        return classes

    @abstractmethod
    def has_label(self, labels: np.ndarray) -> bool:
        """Return whether any image has a label; labels are (n,) or (n, K)."""

    @abstractmethod
    def count_classes(self, labels: np.ndarray, classes: int) -> np.ndarray:
        """Count the images of each class: labels of n images -> (K,)."""

    @abstractmethod
    def select_classes(self, labels: np.ndarray, present: np.ndarray, classes: int) -> np.ndarray:
        """Restrict the labels of n images to the classes `present`, class indices (K',) int64; `classes` is K."""

    @abstractmethod
    def shares_to_logits(self, shares: np.ndarray) -> np.ndarray:
        """Convert shares of nearest-neighbour votes (n, K) to logits (n, K) whose probabilities are the shares."""


class SingleLabelKind(LabelKind):
    """Single-label data: labels (n,) int64, probabilities from a softmax over the classes."""

    metric_key = "top1"
    least_classes = 2
    is_exclusive = True

    def has_label(self, labels: np.ndarray) -> bool:
        """Return whether any image has a label: every one of labels (n,) is one, so whether n > 0."""
        return len(labels) > 0

    def count_classes(self, labels: np.ndarray, classes: int) -> np.ndarray:
        """Count the images of each class: (n,) labels -> (K,)."""
        return np.bincount(labels, minlength=classes)

    def select_classes(self, labels: np.ndarray, present: np.ndarray, classes: int) -> np.ndarray:
        """Map labels (n,) to their indices in `present`, class indices (K',) int64; -1 for other classes."""
        index_of_class = np.full(classes, -1)
        index_of_class[present] = np.arange(len(present))
        return index_of_class[labels]

    def shares_to_logits(self, shares: np.ndarray) -> np.ndarray:
        """Convert vote shares (n, K) to logits (n, K): their logarithms."""
        return np.log(np.clip(shares, MIN_VOTE_SHARE, 1.0))


class MultilabelKind(LabelKind):
    """Multi-label data: labels (n, K) in {0, 1}, probabilities from a sigmoid for each class."""

    metric_key = "map"
    least_classes = 0
    is_exclusive = False

    def require_single_label(self, problem: str, hint: str) -> None:
        """Raise UsageError with `problem` and `hint`, since the data are multi-label."""
        raise UsageError(problem, hint)

    def choose_loss(self, loss: str, requested_loss: str | None, source: str) -> str:
        """Return the loss of the logits: sigmoid instead of the default softmax, any other loss unchanged. Raises
        UsageError if the user set a softmax loss."""
        if loss != "softmax":
            return loss
        if requested_loss == "softmax":
            problem = f"{source} has multi-label data, which a softmax loss cannot fit"
            raise UsageError(problem, "use --loss sigmoid")
        return "sigmoid"

    def least_held_out(self, classes: int) -> int:
        """Return the minimum number of images of a held-out split: 0, as multi-label images are not held out by
        class."""
        return 0

    def has_label(self, labels: np.ndarray) -> bool:
        """Return whether any image has a label; labels are (n, K)."""
        return bool(labels.any())

    def count_classes(self, labels: np.ndarray, classes: int) -> np.ndarray:
        """Count the images of each class: (n, K) labels -> (K,)."""
        return labels.sum(0)

    def select_classes(self, labels: np.ndarray, present: np.ndarray, classes: int) -> np.ndarray:
        """Select the columns of the classes `present`, class indices (K',): labels (n, K) -> (n, K') float32."""
        return labels[:, present].astype(np.float32)

    def shares_to_logits(self, shares: np.ndarray) -> np.ndarray:
        """Convert vote shares (n, K) to logits (n, K): their log-odds."""
        shares = np.clip(shares, MIN_VOTE_SHARE, 1.0)
        return np.log(shares) - np.log(np.clip(1 - shares, MIN_VOTE_SHARE, 1.0))


SINGLE_LABEL, MULTILABEL = SingleLabelKind(), MultilabelKind()


def get_label_kind(multilabel: bool) -> LabelKind:
    """Return the operations for multi-label data if `multilabel`, else those for single-label data."""
    return MULTILABEL if multilabel else SINGLE_LABEL
