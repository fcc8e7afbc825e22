"""The classes of a dataset in a model's order: labels, and objects by the numbers of their classes."""

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
    """Return the index of each class of the data among the model's, (K,) int64: by its name, or by a unique title.

    A title is also known by its first words (`tench` of `tench, Tinca tinca`). Heads with numbers for classes fit the
    1,000 synsets of ImageNet in order, and nothing else. Raises DataError for an unknown class.
    """
    if classes == tuple(map(str, range(len(classes)))) and is_ilsvrc2012(data.classes):
        return np.arange(len(classes), dtype=np.int64)
    place = {name: index for index, name in enumerate(classes)}
    titles = [data.titles.get(name, "").split(",")[0] for name in data.classes]
    short = Counter(name.split(",")[0] for name in classes)
    called = {name.split(",")[0]: index for index, name in enumerate(classes) if short[name.split(",")[0]] == 1}
    once = {title for title, times in Counter(titles).items() if title and times == 1}
    indices = [
        place.get(name, called.get(title, -1) if title in once else -1)
        for name, title in zip(data.classes, titles, strict=True)
    ]
    times = Counter(indices)
    unknown = [name for name, index in zip(data.classes, indices, strict=True) if index < 0 or times[index] > 1]
    if unknown:
        problem = f"the model does not know the classes {', '.join(unknown[:20])}"
        raise DataError(problem, f"it knows {', '.join(classes[:20])}")
    return np.array(indices, dtype=np.int64)


def align_labels(split: Split, data: Data, classes: tuple[str, ...], multilabel: bool = False) -> Split:
    """Return the split with labels in the model's class order: (n, K) for several labels an image or `multilabel`.

    Raises DataError for a class the model does not know.
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
    """A split whose objects of class k have the label `order[k]`, (K,) int64, of `count` classes."""

    order: np.ndarray
    count: int

    @property
    def labels(self) -> np.ndarray:
        """(n, count) float32, 1 for each class that an image holds."""
        table = np.zeros((len(self.split), self.count), np.float32)
        table[:, self.order] = self.split.labels
        return table

    def target(self, sample: int) -> Target:
        """Read what is on an image. Raises DataError."""
        own = self.split.target(sample)
        verified = None if own.verified is None else own.verified.take(self.order)
        return replace(own, labels=self.order[own.labels], verified=verified)
