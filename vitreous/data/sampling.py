"""Which image stands at a position of the stream: a function of the seed and of the position alone.

A run sees one endless stream, epoch after epoch, each in its own order; an epoch has as many positions as there are
images. So a run continues anywhere by knowing one integer, nothing is dropped at the end of an epoch, and a batch may
reach over it.
"""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from functools import lru_cache

import numpy as np

from vitreous.data.keys import derive_keys, draw_permutation, draw_uniform
from vitreous.errors import UsageError

#: the last part of the keys of a class's own order, of the classes' order in a block, and of showings
_TURN_PART, _BLOCK_PART, _SHOWING_PART = 1, 2, 3
LABEL_CHUNK_SIZE = 4096  # of labels that are looked at together


@dataclass(frozen=True, eq=False)
class SampleOrder:
    """The order of `samples` images in every epoch. Every image once is what `repeats` 1 without `labels` means.

    `labels`, (samples,) int64: balanced. Each block of C positions shows each of the C classes that have images once,
    in a random order, and the k-th showing of a class is the k-th of its own order; a short class goes round again, in
    a new order and as another view. `repeats` r > 1 is repeated augmentation (arXiv:1902.05509, arXiv:2012.12877): the
    epoch is cut after ceil(samples / r) images, and each of them stands r times in a row, as r views. `factors`,
    (samples,) float64 of at least 1: how much more often an image is shown than one of factor 1, as
    `draw_repeat_factor_order` has it. `buckets`, (samples,) int64: images of one bucket stand together in batches of
    `batch`, as `draw_bucket_order` has it. Raises UsageError for labels that are not one class to an image, or fewer
    than one repeat.
    """

    samples: int
    seed: int
    labels: np.ndarray | None = None
    repeats: int = 1
    _: KW_ONLY
    factors: np.ndarray | None = None
    buckets: np.ndarray | None = None
    batch: int = 1

    def __post_init__(self) -> None:
        if self.labels is not None and self.labels.ndim != 1:
            raise UsageError("balanced sampling needs one class to an image, these have several", "use --sampling even")
        if self.repeats < 1:
            raise UsageError(f"repeats must be at least 1, not {self.repeats}")

    def epoch(self, number: int) -> tuple[np.ndarray, np.ndarray]:
        """Samples and views of one epoch, (samples,) int64 each."""
        distinct = -(-self.samples // self.repeats)
        if self.factors is not None:
            order, views = draw_repeat_factor_order(self.factors, self.seed, number, distinct)
        elif self.buckets is not None:
            order = draw_bucket_order(self.buckets, self.batch, self.seed, number)
            views = np.zeros_like(order)
        elif self.labels is None:
            order = draw_permutation(self.samples, self.seed, number)[:distinct]
            views = np.zeros_like(order)
        else:
            order, views = draw_balanced_order(self.labels, self.seed, number, distinct)
        if self.repeats > 1:
            order = np.repeat(order, self.repeats)[: self.samples]
            views = (views[:, None] * self.repeats + np.arange(self.repeats)).ravel()[: self.samples]
        return order, views


def get_stream_samples(order: SampleOrder, start: int, stop: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Positions [start, stop) of the stream -> their samples, epochs and views, int64 each.

    for position in range(start, stop): samples[position % n], position // n, views[position % n], of that epoch
    """
    epochs = np.arange(start, stop) // order.samples
    parts = []
    for epoch in range(start // order.samples, -(-stop // order.samples)):
        first = epoch * order.samples
        parts.append([part[max(start - first, 0) : stop - first] for part in _cached_epoch(order, epoch)])
    samples, views = (np.concatenate(part) for part in zip(*parts, strict=True)) if parts else (epochs, epochs)
    return samples, epochs, views


def find_bucket_boundaries(order: SampleOrder, start: int, stop: int) -> list[int]:
    """Where parts of one bucket of the positions [start, stop) begin and end."""
    if order.buckets is None:
        return [start, stop]
    own = order.buckets[get_stream_samples(order, start, stop)[0]]
    return [start, *(start + 1 + np.flatnonzero(np.diff(own))).tolist(), stop]


def draw_bucket_order(buckets: np.ndarray, batch: int, seed: int, epoch: int) -> np.ndarray:
    """Buckets (n,) -> samples (n,), each once, such that most batches, [k batch, (k + 1) batch) of the stream, have
    samples of one bucket. Of one bucket alone that is the order without buckets.

        sort the order of the epoch by bucket, buckets by their first sample
        lead = the first (-epoch n) % batch samples, which end the batch that the epoch before has begun
        cut what is left of each bucket to blocks of `batch`, the last one shorter
        lead, then whole blocks, then shorter ones, both by the place of their first sample in the order
    """
    order = draw_permutation(len(buckets), seed, epoch)
    own = buckets[order]
    first = np.full(own.max(initial=0) + 1, len(order))
    np.minimum.at(first, own, np.arange(len(order)))
    places = np.argsort(first[own], kind="stable")
    lead, places = np.split(places, [(-epoch * len(order)) % batch])
    runs = np.split(places, 1 + np.flatnonzero(np.diff(own[places])))
    blocks = [run[low : low + batch] for run in runs for low in range(0, len(run), batch)]
    blocks.sort(key=lambda block: (len(block) < batch, int(block[0])))
    return order[np.concatenate([lead, *blocks])]


def draw_balanced_order(labels: np.ndarray, seed: int, epoch: int, length: int) -> tuple[np.ndarray, np.ndarray]:
    """Labels (n,) -> `length` samples of all classes alike, and their views: how often the class has gone round."""
    classes, counts = np.unique(labels, return_counts=True)
    members = np.split(np.argsort(labels, kind="stable"), np.cumsum(counts)[:-1])
    blocks = -(-length // len(classes))
    samples, views = np.empty((blocks, len(classes)), np.int64), np.empty((blocks, len(classes)), np.int64)
    for column, own in enumerate(members):
        turns = np.arange(-(-blocks // len(own)))
        orders = np.argsort(derive_keys(seed, epoch, own[None], turns[:, None], _TURN_PART), axis=1)
        samples[:, column] = own[orders].ravel()[:blocks]
        views[:, column] = np.repeat(turns, len(own))[:blocks]
    places = np.argsort(derive_keys(seed, epoch, np.arange(blocks)[:, None], classes[None], _BLOCK_PART), axis=1)
    return np.take_along_axis(samples, places, 1).ravel()[:length], np.take_along_axis(views, places, 1).ravel()[
        :length
    ]


def draw_repeat_factor_order(factors: np.ndarray, seed: int, epoch: int, length: int) -> tuple[np.ndarray, np.ndarray]:
    """Factors (n,) of at least 1 -> `length` samples, at most n, and their views: repeat-factor sampling (LVIS,
    arXiv:1908.03195, appendix B.2). The list of an epoch, of which the rest is left out, is in a random order:

        for image in range(n):
            showings = floor(factors[image]) + (u[image] < factors[image] - floor(factors[image]))
            the list gets (image, view) for view in range(showings)
    """
    samples = np.arange(len(factors))
    chance = draw_uniform(derive_keys(seed, epoch, samples, _SHOWING_PART), 1)[:, 0]
    showings = np.floor(factors).astype(np.int64) + (chance < factors - np.floor(factors))
    order = np.repeat(samples, showings)
    views = np.arange(len(order)) - np.repeat(np.cumsum(showings) - showings, showings)
    places = np.argsort(derive_keys(seed, epoch, order, views, _SHOWING_PART), kind="stable")[:length]
    return order[places], views[places]


def compute_repeat_factors(labels: np.ndarray, threshold: float) -> np.ndarray:
    """Labels (n,) int64 of classes, or (n, K) float32 with 1 for each class on an image -> (n,) float64 of at least 1,
    how often an image is shown (LVIS, arXiv:1908.03195, appendix B.2); f is the share of the images that have a class.

        for image in range(n):
            factor[image] = max(1, sqrt(threshold / f[k]) for classes k on the image)

    Raises UsageError for a threshold that is no share of images.
    """
    if not 0 <= threshold <= 1:
        raise UsageError(f"a repeat threshold of {threshold:g} is no share of images", "use one from 0 to 1")
    counts = np.bincount(labels) if labels.ndim == 1 else (labels > 0).sum(0)
    rates = np.sqrt(threshold * len(labels) / np.maximum(counts, 1))
    if labels.ndim == 1:
        return np.maximum(1.0, rates[labels])
    parts = (labels[low : low + LABEL_CHUNK_SIZE] > 0 for low in range(0, len(labels), LABEL_CHUNK_SIZE))
    return np.concatenate([np.where(part, rates, 1.0).max(1, initial=1.0) for part in parts])


_cached_epoch = lru_cache(maxsize=2)(SampleOrder.epoch)
