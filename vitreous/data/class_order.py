"""Map the classes of a dataset to a model's class order, for labels and for annotated objects."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace

import numpy as np

from vitreous.data.annotations.painted import TargetSplitWrapper
from vitreous.data.annotations.target import Target
from vitreous.data.layouts.imagenet import is_ilsvrc2012
from vitreous.data.split import Data, Split
from vitreous.errors import DataError


def find_class_indices(data: Data, classes: tuple[str, ...]) -> np.ndarray:
    """Find the index of each of the K dataset classes in the model's list `classes`: (K,) int64.

    A class matches by name. Otherwise its title, up to the first comma (`tench` of `tench, Tinca tinca`), is compared
    with the model's class names up to their first comma, if both are unique. A model whose classes are numbered 0 to K
    - 1 matches only the 1,000 synsets of ImageNet, in order. Raises DataError for a class without a match, and for two
    classes with the same match.
    """
    if classes == tuple(map(str, range(len(classes)))) and is_ilsvrc2012(data.classes):
        return np.arange(len(classes), dtype=np.int64)
    index_by_name = {name: index for index, name in enumerate(classes)}
    titles = [data.titles.get(name, "").split(",")[0] for name in data.classes]
    first_word_counts = Counter(name.split(",")[0] for name in classes)
    index_by_first_word = {
        name.split(",")[0]: index for index, name in enumerate(classes) if first_word_counts[name.split(",")[0]] == 1
    }
    unique_titles = {title for title, count in Counter(titles).items() if title and count == 1}
    indices = [
        index_by_name.get(name, index_by_first_word.get(title, -1) if title in unique_titles else -1)
        for name, title in zip(data.classes, titles, strict=True)
    ]
    match_counts = Counter(indices)
    unmatched = [
        name for name, index in zip(data.classes, indices, strict=True) if index < 0 or match_counts[index] > 1
    ]
    if unmatched:
        problem = f"the model has no classes named {', '.join(unmatched[:20])}"
        raise DataError(problem, f"its classes are {', '.join(classes[:20])}")
    return np.array(indices, dtype=np.int64)


def align_labels(split: Split, data: Data, classes: tuple[str, ...], multilabel: bool = False) -> Split:
    """Convert the labels of a split to the model's class order: (n,) int64, or (n, K) float32 for multi-label data or
    if `multilabel`. K is the number of classes of the model.

    Raises DataError for a class that the model does not have.
    """
    order = find_class_indices(data, classes)
    labels = np.zeros((len(split), len(classes)), dtype=np.float32)
    if split.labels.ndim == 2:
        labels[:, order] = split.labels
    elif multilabel:
        labels[np.arange(len(split)), order[split.labels]] = 1
    else:
        labels = order[split.labels]
    return split.take(np.arange(len(split)), labels)


@dataclass(frozen=True, eq=False)
class RelabelledSplit(TargetSplitWrapper):
    """Wrap an annotated split so that its objects of class k get the label `order[k]`. `order` is (K,) int64 for K
    dataset classes; `count` is the number of the model's classes."""

    order: np.ndarray
    count: int

    @property
    def labels(self) -> np.ndarray:
        """The labels (n, count) float32, 1 for each class that an image contains."""
        table = np.zeros((len(self.split), self.count), np.float32)
        table[:, self.order] = self.split.labels
        return table

    def target(self, sample: int) -> Target:
        """Read the annotations of an image, with relabelled objects. Raises DataError if they cannot be read."""
        target = self.split.target(sample)
        verified = None if target.verified is None else target.verified.take(self.order)
        return replace(target, labels=self.order[target.labels], verified=verified)
