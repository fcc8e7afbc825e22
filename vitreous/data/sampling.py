"""Map a position of the training stream to a sample, as a function of the seed and the position alone.

A run reads one endless stream of epochs. Each epoch has as many positions as there are samples, in a separate random
order. A run can therefore resume from its position, one integer. No sample is dropped at the end of an epoch: a batch
may extend into the next epoch.
"""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from functools import lru_cache

import numpy as np

from vitreous.data.keys import derive_keys, draw_permutation, draw_uniform
from vitreous.errors import UsageError

#: last component of the random keys for the sample order of a class, the class order of a block, and repeat-factor
#: sampling
_SAMPLE_ORDER_KEY, _CLASS_ORDER_KEY, _REPEAT_FACTOR_KEY = 1, 2, 3
LABEL_CHUNK_SIZE = 4096  # labels per chunk


@dataclass(frozen=True, eq=False)
class SampleOrder:
    """The order of `samples` images in every epoch. By default an epoch shows every image once, in random order.

    - `labels`, (samples,) int64: balanced sampling. Each block of C positions shows each of the C classes with images
      once, in random order. Within a class, images are shown in a random order; when all have been shown, the class
      starts again in a new order, with new views.
    - `repeats` r > 1: repeated augmentation (arXiv:1902.05509, arXiv:2012.12877). An epoch has the first
      ceil(samples / r) images, each r times in succession, as r views.
    - `factors`, (samples,) float64 of at least 1: repeat-factor sampling. An image is shown `factors` times as often as
      an image of factor 1, see `draw_repeat_factor_order`.
    - `buckets`, (samples,) int64: images of one bucket are grouped into batches of `batch`, see `draw_bucket_order`.

    Raises UsageError for labels without exactly one class per image, or fewer than one repeat.
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
            raise UsageError("balanced sampling needs one class per image, not several", "use --sampling even")
        if self.repeats < 1:
            raise UsageError(f"repeats {self.repeats} is below 1", "use 1 or more")

    def draw_epoch(self, epoch_index: int) -> tuple[np.ndarray, np.ndarray]:
        """Draw one epoch: the sample at each position and its view number, (samples,) int64 each."""
        distinct = -(-self.samples // self.repeats)
        if self.factors is not None:
            order, views = draw_repeat_factor_order(self.factors, self.seed, epoch_index, distinct)
        elif self.buckets is not None:
            order = draw_bucket_order(self.buckets, self.batch, self.seed, epoch_index)
            views = np.zeros_like(order)
        elif self.labels is None:
            order = draw_permutation(self.samples, self.seed, epoch_index)[:distinct]
            views = np.zeros_like(order)
        else:
            order, views = draw_balanced_order(self.labels, self.seed, epoch_index, distinct)
        if self.repeats > 1:
            order = np.repeat(order, self.repeats)[: self.samples]
            views = (views[:, None] * self.repeats + np.arange(self.repeats)).ravel()[: self.samples]
        return order, views


def get_stream_samples(order: SampleOrder, start: int, stop: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the samples, epochs and view numbers at the positions [start, stop) of the stream, (stop - start,) int64
    each.

        for position in range(start, stop):
            epoch = position // n, for n samples
            samples, views = order.draw_epoch(epoch)
            samples[position % n], epoch, views[position % n]
    """
    epochs = np.arange(start, stop) // order.samples
    epoch_slices = []
    for epoch in range(start // order.samples, -(-stop // order.samples)):
        epoch_start = epoch * order.samples
        epoch_slices.append(
            [values[max(start - epoch_start, 0) : stop - epoch_start] for values in _cached_epoch(order, epoch)]
        )
    samples, views = (
        (np.concatenate(values) for values in zip(*epoch_slices, strict=True)) if epoch_slices else (epochs, epochs)
    )
    return samples, epochs, views


def find_bucket_boundaries(order: SampleOrder, start: int, stop: int) -> list[int]:
    """Return the positions that divide [start, stop) into spans of a single bucket, including start and stop."""
    if order.buckets is None:
        return [start, stop]
    bucket_of = order.buckets[get_stream_samples(order, start, stop)[0]]
    return [start, *(start + 1 + np.flatnonzero(np.diff(bucket_of))).tolist(), stop]


def draw_bucket_order(buckets: np.ndarray, batch: int, seed: int, epoch: int) -> np.ndarray:
    """Draw the order of the samples of an epoch so that most batches have a single bucket: buckets (n,) -> samples (n,)
    int64.

    Batches are the positions [k batch, (k + 1) batch) of the stream. If all samples have the same bucket, the order is
    that without buckets.

        sort the order of the epoch by bucket, buckets by their first sample
        lead = the first (-epoch n) % batch samples, which complete the last batch of the previous epoch
        cut the rest of each bucket into blocks of `batch`, the last one shorter
        lead, then full blocks, then shorter ones, both ordered by their first sample's position in the order
    """
    order = draw_permutation(len(buckets), seed, epoch)
    bucket_of = buckets[order]
    first_position = np.full(bucket_of.max(initial=0) + 1, len(order))
    np.minimum.at(first_position, bucket_of, np.arange(len(order)))
    positions = np.argsort(first_position[bucket_of], kind="stable")
    leading, positions = np.split(positions, [(-epoch * len(order)) % batch])
    runs = np.split(positions, 1 + np.flatnonzero(np.diff(bucket_of[positions])))
    blocks = [run[low : low + batch] for run in runs for low in range(0, len(run), batch)]
    blocks.sort(key=lambda block: (len(block) < batch, int(block[0])))
    return order[np.concatenate([leading, *blocks])]


def draw_balanced_order(labels: np.ndarray, seed: int, epoch: int, length: int) -> tuple[np.ndarray, np.ndarray]:
    """Draw `length` samples with equal class frequencies: labels (n,) -> samples and their view numbers, (length,)
    int64 each. The view number counts the passes through the samples of the class."""
    classes, counts = np.unique(labels, return_counts=True)
    members = np.split(np.argsort(labels, kind="stable"), np.cumsum(counts)[:-1])
    blocks = -(-length // len(classes))
    samples, views = np.empty((blocks, len(classes)), np.int64), np.empty((blocks, len(classes)), np.int64)
    for column, class_samples in enumerate(members):
        turns = np.arange(-(-blocks // len(class_samples)))
        orders = np.argsort(derive_keys(seed, epoch, class_samples[None], turns[:, None], _SAMPLE_ORDER_KEY), axis=1)
        samples[:, column] = class_samples[orders].ravel()[:blocks]
        views[:, column] = np.repeat(turns, len(class_samples))[:blocks]
    block_orders = np.argsort(
        derive_keys(seed, epoch, np.arange(blocks)[:, None], classes[None], _CLASS_ORDER_KEY), axis=1
    )
    return np.take_along_axis(samples, block_orders, 1).ravel()[:length], np.take_along_axis(
        views, block_orders, 1
    ).ravel()[:length]


def draw_repeat_factor_order(factors: np.ndarray, seed: int, epoch: int, length: int) -> tuple[np.ndarray, np.ndarray]:
    """Draw `length` samples, at most n, by repeat-factor sampling: factors (n,) of at least 1 -> samples and their view
    numbers, (length,) int64 each.

    LVIS, arXiv:1908.03195, appendix B.2. The list of an epoch is shuffled and truncated to `length`:

        for image in range(n):
            showings = floor(factors[image]) + (u[image] < factors[image] - floor(factors[image]))
            append (image, view) to the list for view in range(showings)
    """
    samples = np.arange(len(factors))
    chance = draw_uniform(derive_keys(seed, epoch, samples, _REPEAT_FACTOR_KEY), 1)[:, 0]
    showings = np.floor(factors).astype(np.int64) + (chance < factors - np.floor(factors))
    order = np.repeat(samples, showings)
    views = np.arange(len(order)) - np.repeat(np.cumsum(showings) - showings, showings)
    kept_positions = np.argsort(derive_keys(seed, epoch, order, views, _REPEAT_FACTOR_KEY), kind="stable")[:length]
    return order[kept_positions], views[kept_positions]


def compute_repeat_factors(labels: np.ndarray, threshold: float) -> np.ndarray:
    """Compute the repeat factor of each image, (n,) float64 of at least 1 (LVIS, arXiv:1908.03195, appendix B.2).

    Labels are (n,) int64 classes, or (n, K) float32 with 1 for each class that an image contains; f[k] is the share of
    images with class k.

        for image in range(n):
            factor[image] = max(1, sqrt(threshold / f[k]) for classes k on the image)

    Raises UsageError for a threshold outside 0 to 1.
    """
    if not 0 <= threshold <= 1:
        raise UsageError(f"the repeat threshold {threshold:g} is not between 0 and 1", "use a value from 0 to 1")
    counts = np.bincount(labels) if labels.ndim == 1 else (labels > 0).sum(0)
    class_factors = np.sqrt(threshold * len(labels) / np.maximum(counts, 1))
    if labels.ndim == 1:
        return np.maximum(1.0, class_factors[labels])
    chunks = (labels[low : low + LABEL_CHUNK_SIZE] > 0 for low in range(0, len(labels), LABEL_CHUNK_SIZE))
    return np.concatenate([np.where(chunk, class_factors, 1.0).max(1, initial=1.0) for chunk in chunks])


_cached_epoch = lru_cache(maxsize=2)(SampleOrder.draw_epoch)
