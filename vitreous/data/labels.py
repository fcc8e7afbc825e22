"""Labels of one class an image, and of several: what data, objectives and evaluations do differently for each.

In shapes, n is images and K classes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

import numpy as np

from vitreous.errors import UsageError

MIN_VOTE_SHARE = 1e-30  # of votes, so that its logarithm is a number


class LabelKind(ABC):
    """What differs between labels of one class an image and of several."""

    metric: ClassVar[str]  # the key of the metric that evaluations are compared by
    least_classes: ClassVar[int]  # that a classifier needs images of
    is_exclusive: ClassVar[bool]  # a classifier has one softmax, and not a sigmoid for each class

    def require_single_label(self, problem: str, hint: str) -> None:  # noqa: B027
        """Raise UsageError where an image may have several labels."""

    def choose_loss(self, loss: str, named: str | None, source: str) -> str:
        """The loss of logits: `loss`, by default, or the one that was `named`. Raises UsageError for one that labels of
        the data, `source`, do not fit."""
        return loss

    def least_held_out(self, classes: int) -> int:
        """Images that a share of the data must have so that each class may have one among them."""
        return classes

    @abstractmethod
    def has_label(self, labels: np.ndarray) -> bool:
        """Labels (n,) or (n, K) -> whether any image has one."""

    @abstractmethod
    def count_classes(self, labels: np.ndarray, classes: int) -> np.ndarray:
        """Labels of n images -> (K,): how many images each class has."""

    @abstractmethod
    def select_classes(self, labels: np.ndarray, present: np.ndarray, classes: int) -> np.ndarray:
        """Labels of n images -> labels in the positions (K',) int64 of the classes that are `present`."""

    @abstractmethod
    def shares_to_logits(self, shares: np.ndarray) -> np.ndarray:
        """(n, K) shares of votes -> (n, K) logits whose probabilities they are."""


class SingleLabelKind(LabelKind):
    """Labels (n,) int64; probabilities are a softmax over the classes."""

    metric = "top1"
    least_classes = 2
    is_exclusive = True

    def has_label(self, labels: np.ndarray) -> bool:
        """(n,) labels: all images have one."""
        return len(labels) > 0

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
        return np.log(np.clip(shares, MIN_VOTE_SHARE, 1.0))


class MultilabelKind(LabelKind):
    """Labels (n, K) in {0, 1}; probabilities are a sigmoid for each class."""

    metric = "map"
    least_classes = 0
    is_exclusive = False

    def require_single_label(self, problem: str, hint: str) -> None:
        """Raise UsageError."""
        raise UsageError(problem, hint)

    def choose_loss(self, loss: str, named: str | None, source: str) -> str:
        """A sigmoid in the place of the default softmax. Raises UsageError for a softmax that was named."""
        if loss != "softmax":
            return loss
        if named == "softmax":
            problem = f"images of {source} have several labels, and a softmax gives one"
            raise UsageError(problem, "use --loss sigmoid")
        return "sigmoid"

    def least_held_out(self, classes: int) -> int:
        """None: images are not held out by class."""
        return 0

    def has_label(self, labels: np.ndarray) -> bool:
        """(n, K) labels."""
        return bool(labels.any())

    def count_classes(self, labels: np.ndarray, classes: int) -> np.ndarray:
        """(n, K) labels -> (K,)."""
        return labels.sum(0)

    def select_classes(self, labels: np.ndarray, present: np.ndarray, classes: int) -> np.ndarray:
        """(n, K) labels -> (n, K') float32."""
        return labels[:, present].astype(np.float32)

    def shares_to_logits(self, shares: np.ndarray) -> np.ndarray:
        """(n, K) shares -> (n, K) log-odds."""
        shares = np.clip(shares, MIN_VOTE_SHARE, 1.0)
        return np.log(shares) - np.log(np.clip(1 - shares, MIN_VOTE_SHARE, 1.0))


SINGLE_LABEL, MULTILABEL = SingleLabelKind(), MultilabelKind()


def get_label_kind(multilabel: bool) -> LabelKind:
    """The kind of labels: of several classes an image if `multilabel`."""
    return MULTILABEL if multilabel else SINGLE_LABEL
