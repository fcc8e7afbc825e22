"""Panoptic quality: how well all segments of images are found, those of things and those of what is not counted
(arXiv:1801.00868).

S segments of an image, K classes, H and W pixels; of volumes D slices in front.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import scipy.ndimage

from vitreous.data.annotations.target import IGNORE_INDEX, Target

MIN_SEGMENT_OVERLAP = 0.5  # share of an instance that must still be free; share of a segment that may be unknown


@dataclass(frozen=True, eq=False)
class PanopticSegments:
    """The segments of an image: `numbers` (*image) int32, the one of each pixel, or -1 where nobody knows; `labels`
    (S,) int64, their classes; `crowd` (S,) bool: many things that nobody told apart."""

    numbers: np.ndarray
    labels: np.ndarray
    crowd: np.ndarray


def segments_from_target(target: Target) -> PanopticSegments:
    """The segments of an image with a class map: each object, and what is left of each class.

    Raises ValueError without a class map.
    """
    if target.classes is None:
        raise ValueError("panoptic segments need a class map")
    numbers = np.full(target.classes.shape, -1, np.int32)
    for layer in target.layers if target.layers is not None else ():
        numbers = np.where(layer > 0, layer - 1, numbers)
    return add_remaining_segments(numbers, target.classes, target.labels, target.crowd)


def segments_from_class_map(classes: np.ndarray, things: np.ndarray) -> PanopticSegments:
    """A class map (*image) alone -> segments: connected parts of each class of `things` (K,) bool, which touch at a
    side or a corner, and each other class as it is."""
    numbers, labels = np.full(classes.shape, -1, np.int32), []
    for label in np.unique(classes[classes != IGNORE_INDEX]):
        if things[label]:
            parts = np.zeros(classes.shape, np.int32)
            scipy.ndimage.label(classes == label, np.ones((3,) * classes.ndim), output=parts)
            numbers[parts > 0] = parts[parts > 0] - 1 + len(labels)
            labels += [int(label)] * int(parts.max())
    own = np.array(labels, np.int64)
    return add_remaining_segments(
        numbers, np.where(things[classes], IGNORE_INDEX, classes), own, np.zeros(len(own), bool)
    )


def add_remaining_segments(
    numbers: np.ndarray, classes: np.ndarray, labels: np.ndarray, crowd: np.ndarray
) -> PanopticSegments:
    """Add a segment for what of each class of a map (*image) has none yet; `labels` (S,) and `crowd` (S,) are those of
    the `numbers` (*image) so far."""
    free = (numbers < 0) & (classes != IGNORE_INDEX)
    rest, places = np.unique(classes[free], return_inverse=True)
    numbers = numbers.copy()
    numbers[free] = len(labels) + places
    return PanopticSegments(
        numbers, np.append(labels, rest).astype(np.int64), np.append(crowd, np.zeros(len(rest), bool))
    )


def count_panoptic_matches(truth: PanopticSegments, answer: PanopticSegments, count: int) -> np.ndarray:
    """Pair the segments of an image: (K, 4) float64 of each class: the sum of IoU of pairs, pairs, answers without a
    true segment, true segments without an answer.

    Two segments of a class are a pair where their IoU is above 0.5, unknown pixels left out, which no other can be.
    Crowds are no segments; an answer of which more than half is unknown, or of a crowd of its class, does not count.
    """
    first, second = len(truth.labels), len(answer.labels)
    codes = (truth.numbers.astype(np.int64) + 1) * (second + 1) + answer.numbers + 1
    table = np.bincount(codes.ravel(), minlength=(first + 1) * (second + 1)).reshape(first + 1, second + 1)
    inner, unknown = table[1:, 1:], table[0, 1:]
    union = table[1:].sum(1)[:, None] + table[:, 1:].sum(0) - unknown - inner
    same = truth.labels[:, None] == answer.labels
    iou = np.where(same & ~truth.crowd[:, None], inner / np.maximum(union, 1), 0)
    rows, columns = np.nonzero(iou > 0.5)
    crowds = (inner * (same & truth.crowd[:, None])).sum(0)
    lost, false = ~truth.crowd, unknown + crowds <= MIN_SEGMENT_OVERLAP * table[:, 1:].sum(0)
    lost[rows], false[columns] = False, False
    counts = np.zeros((count, 4))
    np.add.at(counts[:, 0], truth.labels[rows], iou[rows, columns])
    for column, labels in enumerate((truth.labels[rows], answer.labels[false], truth.labels[lost]), 1):
        counts[:, column] = np.bincount(labels, minlength=count)
    return counts


def compute_panoptic_quality(counts: np.ndarray, things: np.ndarray) -> dict[str, float | None]:
    """(K, 4) sums of `count_panoptic_matches`, `things` (K,) bool -> panoptic quality `pq`, of things and of the rest
    alone, segmentation quality `sq` (the mean IoU of pairs) and recognition quality `rq` (F1 of segments).

    Means over the classes that have a segment in either; None for none.
    """
    total, pairs, false, lost = counts.T
    size = pairs + false / 2 + lost / 2
    present = size > 0
    pq, rq = (np.divide(part, size, out=np.zeros(len(size)), where=present) for part in (total, pairs))
    sq = np.divide(total, pairs, out=np.zeros(len(size)), where=pairs > 0)

    def mean(values: np.ndarray, chosen: np.ndarray) -> float | None:
        return float(values[chosen].mean()) if chosen.any() else None

    return {
        "pq": mean(pq, present),
        "sq": mean(sq, present),
        "rq": mean(rq, present),
        "pq_things": mean(pq, present & things),
        "pq_stuff": mean(pq, present & ~things),
    }
