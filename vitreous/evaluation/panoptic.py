"""Panoptic quality of segments: countable things and uncountable stuff (arXiv:1801.00868).

S segments of an image, K classes, H and W pixels; volumes have D slices as the first axis.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import scipy.ndimage

from vitreous.data.annotations.target import IGNORE_INDEX, Target

MIN_SEGMENT_OVERLAP = 0.5  # a predicted segment does not count if a larger share of it is unknown or in a crowd


@dataclass(frozen=True, eq=False)
class PanopticSegments:
    """The segments of an image. `segment_indices` (*image) int32: the segment index of each pixel, -1 if unknown.
    `labels` (S,) int64: the class of each segment. `crowd` (S,) bool: segments of several objects that are not
    separated."""

    segment_indices: np.ndarray
    labels: np.ndarray
    crowd: np.ndarray


def segments_from_target(target: Target) -> PanopticSegments:
    """Build the segments of an annotation with a class map: one per object, and one per class for the remaining pixels.
    Raises ValueError if there is no class map."""
    if target.classes is None:
        raise ValueError("the target has no class map, which panoptic segments require")
    segment_map = np.full(target.classes.shape, -1, np.int32)
    for layer in target.layers if target.layers is not None else ():
        segment_map = np.where(layer > 0, layer - 1, segment_map)
    return add_remaining_segments(segment_map, target.classes, target.labels, target.crowd)


def segments_from_class_map(classes: np.ndarray, things: np.ndarray) -> PanopticSegments:
    """Build the segments of a predicted class map (*image). Each connected component (diagonal neighbours included) of
    a class in `things` (K,) bool is a segment, and each other class is one."""
    segment_map, labels = np.full(classes.shape, -1, np.int32), []
    for label in np.unique(classes[classes != IGNORE_INDEX]):
        if things[label]:
            components = np.zeros(classes.shape, np.int32)
            scipy.ndimage.label(classes == label, np.ones((3,) * classes.ndim), output=components)
            segment_map[components > 0] = components[components > 0] - 1 + len(labels)
            labels += [int(label)] * int(components.max())
    label_array = np.array(labels, np.int64)
    return add_remaining_segments(
        segment_map, np.where(things[classes], IGNORE_INDEX, classes), label_array, np.zeros(len(label_array), bool)
    )


def add_remaining_segments(
    segment_map: np.ndarray, classes: np.ndarray, labels: np.ndarray, crowd: np.ndarray
) -> PanopticSegments:
    """Add one segment per class for the pixels of a class map (*image) that have no segment. `segment_map` (*image),
    `labels` (S,) and `crowd` (S,) describe the existing segments."""
    free = (segment_map < 0) & (classes != IGNORE_INDEX)
    new_labels, new_indices = np.unique(classes[free], return_inverse=True)
    segment_map = segment_map.copy()
    segment_map[free] = len(labels) + new_indices
    return PanopticSegments(
        segment_map, np.append(labels, new_labels).astype(np.int64), np.append(crowd, np.zeros(len(new_labels), bool))
    )


def count_panoptic_matches(truth: PanopticSegments, prediction: PanopticSegments, num_classes: int) -> np.ndarray:
    """Match the segments of an image and count per class, (K, 4) float64: sum of the IoU of matches, matches, false
    positives, false negatives.

    Two segments of a class match if their IoU is above 0.5, without unknown pixels; such a match is unique. Crowds are
    not segments. A predicted segment does not count if more than half of it is unknown, or in a crowd of its class.
    """
    num_true, num_predicted = len(truth.labels), len(prediction.labels)
    codes = (truth.segment_indices.astype(np.int64) + 1) * (num_predicted + 1) + prediction.segment_indices + 1
    table = np.bincount(codes.ravel(), minlength=(num_true + 1) * (num_predicted + 1)).reshape(
        num_true + 1, num_predicted + 1
    )
    intersections, unknown_pixels = table[1:, 1:], table[0, 1:]
    union = table[1:].sum(1)[:, None] + table[:, 1:].sum(0) - unknown_pixels - intersections
    same_class = truth.labels[:, None] == prediction.labels
    iou = np.where(same_class & ~truth.crowd[:, None], intersections / np.maximum(union, 1), 0)
    true_indices, predicted_indices = np.nonzero(iou > 0.5)
    crowds = (intersections * (same_class & truth.crowd[:, None])).sum(0)
    is_missed, is_false_positive = ~truth.crowd, unknown_pixels + crowds <= MIN_SEGMENT_OVERLAP * table[:, 1:].sum(0)
    is_missed[true_indices], is_false_positive[predicted_indices] = False, False
    counts = np.zeros((num_classes, 4))
    np.add.at(counts[:, 0], truth.labels[true_indices], iou[true_indices, predicted_indices])
    for column, labels in enumerate(
        (truth.labels[true_indices], prediction.labels[is_false_positive], truth.labels[is_missed]), 1
    ):
        counts[:, column] = np.bincount(labels, minlength=num_classes)
    return counts


def compute_panoptic_quality(counts: np.ndarray, things: np.ndarray) -> dict[str, float | None]:
    """Compute panoptic quality from the (K, 4) counts of `count_panoptic_matches`, summed over images, and `things`
    (K,) bool.

    `pq` is panoptic quality, `pq_things` and `pq_stuff` that of countable and other classes, `sq` segmentation quality
    (mean IoU of matches), `rq` recognition quality (F1 of segments). Each is the mean over the classes with a segment
    in prediction or ground truth; None if there are none.
    """
    iou_sum, num_matches, num_false_positives, num_missed = counts.T
    size = num_matches + num_false_positives / 2 + num_missed / 2
    is_present = size > 0
    pq, rq = (
        np.divide(numerator, size, out=np.zeros(len(size)), where=is_present) for numerator in (iou_sum, num_matches)
    )
    sq = np.divide(iou_sum, num_matches, out=np.zeros(len(size)), where=num_matches > 0)

    def mean_over_classes(values: np.ndarray, selected: np.ndarray) -> float | None:
        """Return the mean over the selected classes; None if there are none."""
        return float(values[selected].mean()) if selected.any() else None

    return {
        "pq": mean_over_classes(pq, is_present),
        "sq": mean_over_classes(sq, is_present),
        "rq": mean_over_classes(rq, is_present),
        "pq_things": mean_over_classes(pq, is_present & things),
        "pq_stuff": mean_over_classes(pq, is_present & ~things),
    }
