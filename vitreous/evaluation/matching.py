"""Match the detections of an image with its ground-truth objects as COCO does, and classify the errors of unmatched
detections.

n detections and g objects of an image; T thresholds of intersection over union (IoU), A area ranges. The result is a
float64 table with one row per detection and per object and the columns of `MatchColumn`.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from typing import Any

import numpy as np
import scipy.ndimage

from vitreous.data.annotations.target import Target
from vitreous.errors import ResourceError, install_hint
from vitreous.inference.libraries import import_optional_library
from vitreous.tasks.detections import Detections, encode_mask_crop

IOU_THRESHOLDS = np.linspace(0.5, 0.95, 10)  # IoU thresholds of COCO
AREA_RANGES = ((0.0, 1e10), (0.0, 32.0**2), (32.0**2, 96.0**2), (96.0**2, 1e10))  # pixels: all, small, medium, large
MAX_DETECTIONS_PER_CLASS = 100  # highest-scoring detections of a class on an image
BACKGROUND_IOU = 0.1  # a detection with a lower IoU is on the background (arXiv:2008.08115)
MAX_FEDERATED_DETECTIONS = 300  # detections per image of a federated dataset


class MatchColumn(IntEnum):
    """Columns of the table of an image. From `REGION_START` on, there are the columns of `RegionColumn` for each region
    type: boxes, or masks and then boxes."""

    TRUTH = 0  # 1: a ground-truth object, 0: a detection
    LABEL = 1
    SCORE = 2  # score of a detection; for an object, that of the detection matched regardless of class, or -1
    PARTNER = 3  # for a detection: class of the object matched regardless of class, or -1
    REGION_START = 4


class RegionColumn(IntEnum):
    """Columns of one region type. Bits of `MATCHED` and `IGNORED` are numbered area range * T + threshold."""

    MATCHED = 0  # for a detection: bits where it matches an object; for an object: 1 if matched at the first threshold
    IGNORED = 1  # bits where the row does not count; for an object, the same bit for all thresholds of an area range
    ERROR = 2  # a `DetectionError`, or 0
    FIXED_LABEL = 3  # class of a detection once its error is fixed; -1 if not fixable, or if its object is matched
    WIDTH = 4


class DetectionError(IntEnum):
    """Type of error of an unmatched detection or object, at an IoU of 0.5 (TIDE, arXiv:2008.08115)."""

    LOCALISATION = 1  # detection of the right class with an IoU from `BACKGROUND_IOU` to 0.5
    CLASS = 2  # detection with an IoU of at least 0.5 with an object of another class
    BOTH = 3  # detection of another class with an IoU from `BACKGROUND_IOU` to 0.5
    DUPLICATE = 4  # detection of an object that a detection with a higher score matches
    NOTHING = 5  # detection on the background: no IoU of at least `BACKGROUND_IOU` with any object
    MISSED = 6  # object without any detection, not even one of a wrong class or location


def require_mask_library() -> None:
    """Raise ResourceError, with the command that installs it, if the mask library faster-coco-eval is missing."""
    import_mask_library()


def import_mask_library() -> Any:
    """Import the mask library faster-coco-eval. Raises ResourceError, with the command that installs it, if it is
    missing."""
    try:
        return import_optional_library("faster_coco_eval.core.mask")
    except ResourceError:
        raise ResourceError(
            "comparing masks needs faster-coco-eval, which is not installed", install_hint("dense")
        ) from None


def box_iou(predictions: np.ndarray, truth: np.ndarray, crowd: np.ndarray) -> np.ndarray:
    """Compute the IoU (n, g) float64 of (n, 4) and (g, 4) boxes. For objects that are a `crowd` (g,) bool, it is the
    share of the detection's area inside the crowd."""
    boxes_a, boxes_b = predictions.astype(np.float64), truth.astype(np.float64)
    extents = np.minimum(boxes_a[:, None, 2:], boxes_b[None, :, 2:]) - np.maximum(
        boxes_a[:, None, :2], boxes_b[None, :, :2]
    )
    intersections = extents.clip(0).prod(2)
    areas_a, areas_b = ((boxes[:, 2:] - boxes[:, :2]).prod(1) for boxes in (boxes_a, boxes_b))
    return intersections / np.where(crowd, areas_a[:, None], areas_a[:, None] + areas_b - intersections)


def mask_iou(
    predictions: Sequence[Sequence[int]], truth: Sequence[Sequence[int]], crowd: np.ndarray, size: tuple[int, int]
) -> np.ndarray:
    """Compute the IoU (n, g) float64 of masks, given as run lengths on an image of `size` (H, W), with crowds as in
    `box_iou`. Raises ResourceError if the mask library is missing."""
    library = import_mask_library()
    if not len(predictions) or not len(truth):
        return np.zeros((len(predictions), len(truth)))
    mask_lists = [[{"size": list(size), "counts": list(runs)} for runs in masks] for masks in (predictions, truth)]
    encoded_a, encoded_b = (library.frPyObjects(mask_list, *size) for mask_list in mask_lists)
    return np.asarray(library.iou(encoded_a, encoded_b, crowd.astype(np.uint8).tolist())).reshape(
        len(predictions), len(truth)
    )


def match_detections(
    iou: np.ndarray, crowd: np.ndarray, ignored: np.ndarray, thresholds: np.ndarray = IOU_THRESHOLDS
) -> np.ndarray:
    """Match detections with objects of one class: (A, T, n) int64, the object index of each detection, or -1.

    `iou` (n, g) of detections by descending score, `crowd` (g,) bool, `ignored` (A, g) bool. COCO's rule:

        for each detection: among unmatched objects with an IoU of at least the threshold (a crowd can match many),
        choose the highest IoU, the last of equals; choose an ignored object only if there is no other
    """
    min_ious = np.minimum(thresholds, 1 - 1e-10)
    is_taken = np.zeros((len(ignored), len(min_ious), iou.shape[1]), bool)
    owner = np.full((len(ignored), len(min_ious), len(iou)), -1, np.int64)
    if not iou.size:
        return owner
    last_index = iou.shape[1] - 1
    for detection in np.flatnonzero(iou.max(1) >= min_ious[0]):
        overlaps = iou[detection]
        is_candidate = (overlaps >= min_ious[:, None])[None] & (~is_taken | crowd)
        best_objects = np.full(owner.shape[:2], -1)
        for group in (ignored, ~ignored):  # the second group takes precedence
            values = np.where(is_candidate & group[:, None], overlaps, -1.0)
            object_indices = last_index - values[..., ::-1].argmax(-1)
            best_objects = np.where(values.max(-1) >= 0, object_indices, best_objects)
        area_indices, threshold_indices = np.nonzero(best_objects >= 0)
        is_taken[area_indices, threshold_indices, best_objects[area_indices, threshold_indices]] = True
        owner[:, :, detection] = best_objects
    return owner


def flag_areas_out_of_range(areas: np.ndarray) -> np.ndarray:
    """Return which areas (n,), in pixels, are outside each area range: (A, n) bool."""
    return np.stack([(areas < low) | (areas > high) for low, high in AREA_RANGES])


def match_image(detections: Detections, truth: Target, masks: bool) -> np.ndarray:
    """Match the detections of an image with its ground truth: a table (m, columns) of `MatchColumn`, detections first.

    Matches boxes or, with `masks`, masks and boxes. At most `MAX_DETECTIONS_PER_CLASS` detections of a class count. The
    area of an object is that of its mask, if it has one. In a federated dataset, in which only some classes of an image
    are annotated, detections count if their class has an object in the image or is annotated as absent, at most
    `MAX_FEDERATED_DETECTIONS`. For a class that is not annotated exhaustively, only matched detections count
    (arXiv:1908.03195). Raises ValueError for detections or objects without required masks.
    """
    detections = detections.take(select_counted_detections(detections, truth))
    n, g, crowd = len(detections), len(truth), truth.crowd
    runs = get_true_mask_runs(truth)
    areas = (
        np.array([sum(mask_runs[1::2]) for mask_runs in runs], np.float64)
        if runs is not None
        else compute_box_areas(truth.boxes)
    )
    regions = [(box_iou(detections.boxes, truth.boxes, crowd), compute_box_areas(detections.boxes))]
    if masks:
        if detections.masks is None or (runs is None and g):
            raise ValueError("comparing masks needs masks of all detections and objects")
        detection_areas = np.array([sum(mask_runs[1::2]) for mask_runs in detections.masks], np.float64)
        regions.insert(0, (mask_iou(detections.masks, runs or [], crowd, detections.size), detection_areas))
    table = np.zeros((n + g, MatchColumn.REGION_START + RegionColumn.WIDTH * len(regions)))
    table[n:, MatchColumn.TRUTH] = 1
    table[:, MatchColumn.LABEL] = np.concatenate([detections.labels, truth.labels])
    table[:n, MatchColumn.SCORE] = detections.scores
    table[:n, MatchColumn.PARTNER], table[n:, MatchColumn.SCORE] = match_across_classes(
        regions[0][0], detections, truth
    )
    ignored = flag_areas_out_of_range(areas) | crowd
    for region_index, (iou, detection_areas) in enumerate(regions):
        owner = np.full((len(AREA_RANGES), len(IOU_THRESHOLDS), n), -1, np.int64)
        for label in np.unique(detections.labels):
            detection_indices, objects = (
                np.flatnonzero(detections.labels == label),
                np.flatnonzero(truth.labels == label),
            )
            matched_objects = match_detections(
                iou[np.ix_(detection_indices, objects)], crowd[objects], ignored[:, objects]
            )
            owner[:, :, detection_indices] = (
                np.where(matched_objects >= 0, objects[matched_objects], -1) if len(objects) else -1
            )
        region_columns = table[:, MatchColumn.REGION_START + region_index * RegionColumn.WIDTH :][
            :, : RegionColumn.WIDTH
        ]
        is_unmatched = owner < 0
        area = np.arange(len(AREA_RANGES))[:, None, None]
        is_ignorable = flag_areas_out_of_range(detection_areas) | np.isin(
            detections.labels, truth.verified.partial if truth.verified else ()
        )
        is_excluded = np.where(is_unmatched, is_ignorable[:, None], ignored[area, owner] if g else False)
        region_columns[:n, RegionColumn.MATCHED], region_columns[:n, RegionColumn.IGNORED] = (
            pack_match_bits(~is_unmatched),
            pack_match_bits(is_excluded),
        )
        region_columns[n:, RegionColumn.IGNORED] = pack_match_bits(
            np.broadcast_to(ignored[:, None], (len(AREA_RANGES), len(IOU_THRESHOLDS), g))
        )
        classify_detection_errors(
            region_columns, iou, owner=owner[0, 0], ignored=is_excluded[0, 0], labels=detections.labels, truth=truth
        )
    return table


def select_counted_detections(detections: Detections, truth: Target) -> np.ndarray:
    """Select the detections of an image that count: their indices (m,) int64, in order."""
    if truth.verified is None:
        return np.flatnonzero(rank_in_class(detections.labels) < MAX_DETECTIONS_PER_CLASS)
    is_annotated = np.isin(detections.labels, np.union1d(truth.labels, truth.verified.absent))
    return np.flatnonzero(is_annotated & (np.arange(len(detections)) < MAX_FEDERATED_DETECTIONS))


def get_true_mask_runs(truth: Target) -> list[list[int]] | None:
    """Return the run lengths of each object's mask on the full image; None if objects have only boxes."""
    if truth.layers is None:
        return None
    height, width = truth.size
    runs = [[height * width] for _ in range(len(truth))]
    for layer in truth.layers:
        for object_index, box in enumerate(scipy.ndimage.find_objects(layer)):
            if box is not None:
                corner = box[0].start, box[1].start
                runs[object_index] = encode_mask_crop(layer[box] == object_index + 1, corner, (height, width))
    return runs


def compute_box_areas(boxes: np.ndarray) -> np.ndarray:
    """Compute the areas (n,) float64 of (n, 4) boxes."""
    return (boxes[:, 2:].astype(np.float64) - boxes[:, :2]).prod(1)


def rank_in_class(labels: np.ndarray) -> np.ndarray:
    """Count, for each entry of `labels` (n,), the preceding entries with the same label: (n,) int64."""
    order = np.argsort(labels, kind="stable")
    _, first_indices, counts = np.unique(labels[order], return_index=True, return_counts=True)
    ranks = np.empty(len(labels), np.int64)
    ranks[order] = np.arange(len(labels)) - np.repeat(first_indices, counts)
    return ranks


def pack_match_bits(flags: np.ndarray) -> np.ndarray:
    """Pack flags (A, T, n) bool into (n,) float64 integers below 2^53, one bit per area range and threshold."""
    flat = flags.reshape(len(AREA_RANGES) * len(IOU_THRESHOLDS), flags.shape[2])
    return (2.0 ** np.arange(len(flat))) @ flat


def unpack_match_bits(packed: np.ndarray) -> np.ndarray:
    """Unpack (n,) float64 integers of `pack_match_bits` into flags (A, T, n) bool."""
    bits = np.arange(len(AREA_RANGES) * len(IOU_THRESHOLDS))
    flat = packed.astype(np.int64)[None] >> bits[:, None] & 1
    return flat.astype(bool).reshape(len(AREA_RANGES), len(IOU_THRESHOLDS), len(packed))


def match_across_classes(iou: np.ndarray, detections: Detections, truth: Target) -> tuple[np.ndarray, np.ndarray]:
    """Match detections with objects regardless of class, at an IoU of 0.5, without crowds. Returns the class of each
    detection's object, (n,), and the score of each object's detection, (g,); -1 if unmatched. `iou` is (n, g)."""
    objects = np.flatnonzero(~truth.crowd)
    owner = match_detections(
        iou[:, objects], truth.crowd[objects], np.zeros((1, len(objects)), bool), IOU_THRESHOLDS[:1]
    )[0, 0]
    labels, scores = np.full(len(detections), -1), np.full(len(truth), -1.0)
    matched = np.flatnonzero(owner >= 0)
    labels[matched] = truth.labels[objects[owner[matched]]]
    scores[objects[owner[matched]]] = detections.scores[matched]
    return labels, scores


def classify_detection_errors(
    region_columns: np.ndarray,
    iou: np.ndarray,
    owner: np.ndarray,
    ignored: np.ndarray,
    labels: np.ndarray,
    truth: Target,
) -> None:
    """Set `ERROR` and `FIXED_LABEL` in the rows `region_columns` (n + g, `RegionColumn` width), and `MATCHED` of
    objects, in place. At an IoU of 0.5, `owner` (n,) is the object index of each detection or -1, and `ignored` (n,)
    bool marks detections that do not count. `iou` is (n, g), `labels` (n,) are the detections' classes."""
    n, g = iou.shape
    same_class, is_single = labels[:, None] == truth.labels, ~truth.crowd
    is_matched = np.zeros(g, bool)
    is_matched[owner[owner >= 0]] = True
    region_columns[n:, RegionColumn.MATCHED] = is_matched
    region_columns[:, RegionColumn.FIXED_LABEL] = -1
    non_crowd_iou = np.where(is_single, iou, 0.0)
    claimed_errors: set[tuple[int, int]] = set()
    for detection in np.flatnonzero((owner < 0) & ~ignored):
        same_class_iou, other_class_iou = (
            np.where(same_class[detection], non_crowd_iou[detection], 0.0),
            np.where(same_class[detection], 0.0, non_crowd_iou[detection]),
        )
        error = classify_unmatched_detection(same_class_iou.max(initial=0.0), other_class_iou.max(initial=0.0))
        region_columns[detection, RegionColumn.ERROR] = error
        if error in (DetectionError.LOCALISATION, DetectionError.CLASS):
            object_index = int((same_class_iou if error == DetectionError.LOCALISATION else other_class_iou).argmax())
            if not is_matched[object_index] and (error, object_index) not in claimed_errors:
                region_columns[detection, RegionColumn.FIXED_LABEL] = truth.labels[object_index]
            claimed_errors.add((error, object_index))
    claimed_objects = {object_index for _, object_index in claimed_errors}
    region_columns[n:, RegionColumn.ERROR] = [
        DetectionError.MISSED
        if is_single[object_index] and not is_matched[object_index] and object_index not in claimed_objects
        else 0
        for object_index in range(g)
    ]


def classify_unmatched_detection(same_class_iou: float, other_class_iou: float) -> DetectionError:
    """Classify the error of an unmatched detection by its highest IoU with objects of its class and of other
    classes."""
    threshold = IOU_THRESHOLDS[0]
    if BACKGROUND_IOU <= same_class_iou < threshold:
        return DetectionError.LOCALISATION
    if other_class_iou >= threshold:
        return DetectionError.CLASS
    if same_class_iou >= threshold:
        return DetectionError.DUPLICATE
    return DetectionError.BOTH if other_class_iou >= BACKGROUND_IOU else DetectionError.NOTHING


def select_region_columns(table: np.ndarray, region_index: int) -> np.ndarray:
    """Select the columns of a region type, by its index, from the table (m, columns): (m, `RegionColumn` width)."""
    return table[:, MatchColumn.REGION_START + region_index * RegionColumn.WIDTH :][:, : RegionColumn.WIDTH]
