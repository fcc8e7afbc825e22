"""Single-label and multi-label data: the differences for datasets, objectives and evaluation.

In shapes, n is images and K classes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

import numpy as np

from vitreous.errors import UsageError

MIN_VOTE_SHARE = 1e-30  # minimum vote share, so that its logarithm is finite


class LabelKind(ABC):
    """Base class of single-label and multi-label behaviour."""

    metric_key: ClassVar[str]  # key of the metric that evaluations are compared by
    least_classes: ClassVar[int]  # minimum number of classes with images for a classifier
    is_exclusive: ClassVar[bool]  # one softmax over classes, rather than a sigmoid for each class

    def require_single_label(self, problem: str, hint: str) -> None:  # noqa: B027
        """Raise UsageError if the data are multi-label."""

    def choose_loss(self, loss: str, requested_loss: str | None, source: str) -> str:
        """Choose the loss of logits: the `requested_loss` loss, or else the default `loss`. Raises UsageError if the
        named loss does not fit the labels of the data, `source`."""
        return loss

    def least_held_out(self, classes: int) -> int:
        """Return the minimum size of a held-out split so that each class can have an image in it."""
        return classes

    @abstractmethod
    def has_label(self, labels: np.ndarray) -> bool:
        """Return whether any image has a label; labels are (n,) or (n, K)."""

    @abstractmethod
    def count_classes(self, labels: np.ndarray, classes: int) -> np.ndarray:
        """Count the images of each class: labels of n images -> (K,)."""

    @abstractmethod
    def select_classes(self, labels: np.ndarray, present: np.ndarray, classes: int) -> np.ndarray:
        """Map the labels of n images to indices into the classes that are `present`, (K',) int64."""

    @abstractmethod
    def shares_to_logits(self, shares: np.ndarray) -> np.ndarray:
        """Convert (n, K) vote shares to (n, K) logits that yield them as probabilities."""


class SingleLabelKind(LabelKind):
    """Single-label data: labels (n,) int64, probabilities from a softmax over the classes."""

    metric_key = "top1"
    least_classes = 2
    is_exclusive = True

    def has_label(self, labels: np.ndarray) -> bool:
        """Return whether there are images: each has a label (n,)."""
        return len(labels) > 0

    def count_classes(self, labels: np.ndarray, classes: int) -> np.ndarray:
        """Count the images of each class: (n,) labels -> (K,)."""
        return np.bincount(labels, minlength=classes)

    def select_classes(self, labels: np.ndarray, present: np.ndarray, classes: int) -> np.ndarray:
        """Map (n,) labels to (n,) indices into `present`, -1 for other classes."""
        index_of_class = np.full(classes, -1)
        index_of_class[present] = np.arange(len(present))
        return index_of_class[labels]

    def shares_to_logits(self, shares: np.ndarray) -> np.ndarray:
        """Convert (n, K) shares to (n, K) logarithms."""
        return np.log(np.clip(shares, MIN_VOTE_SHARE, 1.0))


class MultilabelKind(LabelKind):
    """Multi-label data: labels (n, K) in {0, 1}, probabilities from a sigmoid for each class."""

    metric_key = "map"
    least_classes = 0
    is_exclusive = False

    def require_single_label(self, problem: str, hint: str) -> None:
        """Raise UsageError: the data are multi-label."""
        raise UsageError(problem, hint)

    def choose_loss(self, loss: str, requested_loss: str | None, source: str) -> str:
        """Choose a sigmoid loss instead of the default softmax. Raises UsageError if a softmax loss was requested."""
        if loss != "softmax":
            return loss
        if requested_loss == "softmax":
            problem = f"{source} has multi-label data, which a softmax loss cannot fit"
            raise UsageError(problem, "use --loss sigmoid")
        return "sigmoid"

    def least_held_out(self, classes: int) -> int:
        """Return 0: multi-label images are not held out by class."""
        return 0

    def has_label(self, labels: np.ndarray) -> bool:
        """Return whether any image has a label; labels are (n, K)."""
        return bool(labels.any())

    def count_classes(self, labels: np.ndarray, classes: int) -> np.ndarray:
        """Count the images of each class: (n, K) labels -> (K,)."""
        return labels.sum(0)

    def select_classes(self, labels: np.ndarray, present: np.ndarray, classes: int) -> np.ndarray:
        """Select the columns of the present classes: (n, K) labels -> (n, K') float32."""
        return labels[:, present].astype(np.float32)

    def shares_to_logits(self, shares: np.ndarray) -> np.ndarray:
        """Convert (n, K) shares to (n, K) log-odds."""
        shares = np.clip(shares, MIN_VOTE_SHARE, 1.0)
        return np.log(shares) - np.log(np.clip(1 - shares, MIN_VOTE_SHARE, 1.0))


SINGLE_LABEL, MULTILABEL = SingleLabelKind(), MultilabelKind()


def get_label_kind(multilabel: bool) -> LabelKind:
    """Return the label kind: multi-label if `multilabel`, else single-label."""
    return MULTILABEL if multilabel else SINGLE_LABEL
