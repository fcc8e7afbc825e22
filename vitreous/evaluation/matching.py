"""Match the detections of an image with its objects as COCO does, and classify the errors of the others.

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
from vitreous.tasks.detections import Detections, encode_placed_mask

IOU_THRESHOLDS = np.linspace(0.5, 0.95, 10)  # IoU thresholds of COCO
AREA_RANGES = ((0.0, 1e10), (0.0, 32.0**2), (32.0**2, 96.0**2), (96.0**2, 1e10))  # pixels: all, small, medium, large
MAX_DETECTIONS_PER_CLASS = 100  # highest-scoring detections of a class on an image
BACKGROUND_IOU = 0.1  # below this IoU a detection is background (arXiv:2008.08115)
MAX_FEDERATED_DETECTIONS = 300  # detections per image of a federated data set


class MatchColumn(IntEnum):
    """Columns of the table; from `KINDS` on, `RegionColumn` per region type: boxes, or masks and then boxes."""

    TRUTH = 0  # 1: a ground-truth object, 0: a detection
    LABEL = 1
    SCORE = 2  # score: of a detection; of an object, of the detection with the highest IoU in any class, or -1
    PARTNER = 3  # of a detection: the class of the object with the highest IoU, or -1
    KINDS = 4


class RegionColumn(IntEnum):
    """Columns of one region type. Bits of `MATCHED` and `IGNORED` are numbered area * T + threshold."""

    MATCHED = 0  # of a detection: bits where it matches an object. Of an object: 1 if matched at the first threshold
    IGNORED = 1  # bits where it does not count; of an object for all thresholds of the area
    ERROR = 2  # a `DetectionError`, or 0
    MENDED = 3  # of a fixable detection: the class of the object it then matches, -1 if another one matches that
    WIDTH = 4


class DetectionError(IntEnum):
    """Errors of a detection or an object at an IoU of 0.5 (TIDE, arXiv:2008.08115)."""

    LOCALISATION = 1  # the right class, IoU from `BACKGROUND_IOU` to 0.5
    CLASS = 2  # IoU of at least 0.5 with an object of another class
    BOTH = 3  # another class, and IoU from `BACKGROUND_IOU` to 0.5
    DUPLICATE = 4  # a detection with a higher score matches the object
    NOTHING = 5  # background: no object is near
    MISSED = 6  # an object without any detection, not even one of a wrong class or location


def require_mask_library() -> None:
    """Raise ResourceError, with the command that installs it, if the mask library is missing."""
    import_mask_library()


def import_mask_library() -> Any:
    """Import the mask library. Raises ResourceError, with the command that installs it, if it is missing."""
    try:
        return import_optional_library("faster_coco_eval.core.mask")
    except ResourceError:
        raise ResourceError(
            "comparing masks needs faster-coco-eval, which is not installed", install_hint("dense")
        ) from None


def box_iou(answers: np.ndarray, truth: np.ndarray, crowd: np.ndarray) -> np.ndarray:
    """Compute (n, g) float64 IoU of (n, 4) and (g, 4) boxes; for a `crowd` (g,) bool, the share of the detection
    inside."""
    first, second = answers.astype(np.float64), truth.astype(np.float64)
    sides = np.minimum(first[:, None, 2:], second[None, :, 2:]) - np.maximum(first[:, None, :2], second[None, :, :2])
    inner = sides.clip(0).prod(2)
    own, other = ((part[:, 2:] - part[:, :2]).prod(1) for part in (first, second))
    return inner / np.where(crowd, own[:, None], own[:, None] + other - inner)


def mask_iou(
    answers: Sequence[Sequence[int]], truth: Sequence[Sequence[int]], crowd: np.ndarray, size: tuple[int, int]
) -> np.ndarray:
    """Compute (n, g) float64 IoU of masks as `box_iou`, from run lengths on an image (H, W). Raises ResourceError."""
    library = import_mask_library()
    if not len(answers) or not len(truth):
        return np.zeros((len(answers), len(truth)))
    parts = [[{"size": list(size), "counts": list(runs)} for runs in masks] for masks in (answers, truth)]
    first, second = (library.frPyObjects(part, *size) for part in parts)
    return np.asarray(library.iou(first, second, crowd.astype(np.uint8).tolist())).reshape(len(answers), len(truth))


def match_detections(
    iou: np.ndarray, crowd: np.ndarray, ignored: np.ndarray, thresholds: np.ndarray = IOU_THRESHOLDS
) -> np.ndarray:
    """Match detections and objects of one class: (A, T, n) int64, the object index of each detection, or -1.

    `iou` (n, g) of detections by descending score, `crowd` (g,) bool, `ignored` (A, g) bool. COCO's rule:

        for each detection: among unmatched objects with an IoU of at least the threshold (a crowd can match many),
        choose the highest IoU, the last of equals; choose an ignored object only if there is no other
    """
    limits = np.minimum(thresholds, 1 - 1e-10)
    taken = np.zeros((len(ignored), len(limits), iou.shape[1]), bool)
    owner = np.full((len(ignored), len(limits), len(iou)), -1, np.int64)
    if not iou.size:
        return owner
    last = iou.shape[1] - 1
    for answer in np.flatnonzero(iou.max(1) >= limits[0]):
        row = iou[answer]
        able = (row >= limits[:, None])[None] & (~taken | crowd)
        best = np.full(owner.shape[:2], -1)
        for group in (ignored, ~ignored):  # the second group takes precedence
            values = np.where(able & group[:, None], row, -1.0)
            place = last - values[..., ::-1].argmax(-1)
            best = np.where(values.max(-1) >= 0, place, best)
        area, level = np.nonzero(best >= 0)
        taken[area, level, best[area, level]] = True
        owner[:, :, answer] = best
    return owner


def flag_areas_out_of_range(areas: np.ndarray) -> np.ndarray:
    """Return (A, n) bool: the areas (n,) in pixels that are out of each range."""
    return np.stack([(areas < low) | (areas > high) for low, high in AREA_RANGES])


def match_image(answers: Detections, truth: Target, masks: bool) -> np.ndarray:
    """Match the detections of an image with its ground truth: a table (m, columns) of `MatchColumn`, detections first.

    Matches boxes or, with `masks`, masks and boxes. At most `MAX_DETECTIONS_PER_CLASS` detections of a class count. The
    area of an object is that of its mask, if it has one. In a federated data set, detections count if their class has
    an object in the image or is annotated as absent, at most `MAX_FEDERATED_DETECTIONS`; of a class that is not
    annotated exhaustively, only matched detections count (arXiv:1908.03195). Raises ValueError for detections or
    objects without required masks.
    """
    answers = answers.take(select_counted_detections(answers, truth))
    n, g, crowd = len(answers), len(truth), truth.crowd
    runs = get_true_mask_runs(truth)
    areas = (
        np.array([sum(one[1::2]) for one in runs], np.float64) if runs is not None else compute_box_areas(truth.boxes)
    )
    regions = [(box_iou(answers.boxes, truth.boxes, crowd), compute_box_areas(answers.boxes))]
    if masks:
        if answers.masks is None or (runs is None and g):
            raise ValueError("comparing masks needs masks of all detections and objects")
        own = np.array([sum(one[1::2]) for one in answers.masks], np.float64)
        regions.insert(0, (mask_iou(answers.masks, runs or [], crowd, answers.size), own))
    table = np.zeros((n + g, MatchColumn.KINDS + RegionColumn.WIDTH * len(regions)))
    table[n:, MatchColumn.TRUTH] = 1
    table[:, MatchColumn.LABEL] = np.concatenate([answers.labels, truth.labels])
    table[:n, MatchColumn.SCORE] = answers.scores
    table[:n, MatchColumn.PARTNER], table[n:, MatchColumn.SCORE] = match_across_classes(regions[0][0], answers, truth)
    ignored = flag_areas_out_of_range(areas) | crowd
    for kind, (iou, own) in enumerate(regions):
        owner = np.full((len(AREA_RANGES), len(IOU_THRESHOLDS), n), -1, np.int64)
        for label in np.unique(answers.labels):
            rows, objects = np.flatnonzero(answers.labels == label), np.flatnonzero(truth.labels == label)
            owned = match_detections(iou[np.ix_(rows, objects)], crowd[objects], ignored[:, objects])
            owner[:, :, rows] = np.where(owned >= 0, objects[owned], -1) if len(objects) else -1
        part = table[:, MatchColumn.KINDS + kind * RegionColumn.WIDTH :][:, : RegionColumn.WIDTH]
        none = owner < 0
        area = np.arange(len(AREA_RANGES))[:, None, None]
        unsure = flag_areas_out_of_range(own) | np.isin(
            answers.labels, truth.verified.partial if truth.verified else ()
        )
        left_out = np.where(none, unsure[:, None], ignored[area, owner] if g else False)
        part[:n, RegionColumn.MATCHED], part[:n, RegionColumn.IGNORED] = (
            pack_match_bits(~none),
            pack_match_bits(left_out),
        )
        part[n:, RegionColumn.IGNORED] = pack_match_bits(
            np.broadcast_to(ignored[:, None], (len(AREA_RANGES), len(IOU_THRESHOLDS), g))
        )
        classify_detection_errors(
            part, iou, owner=owner[0, 0], ignored=left_out[0, 0], labels=answers.labels, truth=truth
        )
    return table


def select_counted_detections(answers: Detections, truth: Target) -> np.ndarray:
    """Return the indices (m,) int64 of the detections that count, in order."""
    if truth.verified is None:
        return np.flatnonzero(rank_in_class(answers.labels) < MAX_DETECTIONS_PER_CLASS)
    known = np.isin(answers.labels, np.union1d(truth.labels, truth.verified.absent))
    return np.flatnonzero(known & (np.arange(len(answers)) < MAX_FEDERATED_DETECTIONS))


def get_true_mask_runs(truth: Target) -> list[list[int]] | None:
    """Return the run lengths of each object's mask, pasted into the full image; None for boxes only."""
    if truth.layers is None:
        return None
    height, width = truth.size
    runs = [[height * width] for _ in range(len(truth))]
    for layer in truth.layers:
        for number, place in enumerate(scipy.ndimage.find_objects(layer)):
            if place is not None:
                corner = place[0].start, place[1].start
                runs[number] = encode_placed_mask(layer[place] == number + 1, corner, (height, width))
    return runs


def compute_box_areas(boxes: np.ndarray) -> np.ndarray:
    """Compute the areas (n,) float64 of (n, 4) boxes."""
    return (boxes[:, 2:].astype(np.float64) - boxes[:, :2]).prod(1)


def rank_in_class(labels: np.ndarray) -> np.ndarray:
    """Return (n,) int64: the number of preceding entries with the same label."""
    order = np.argsort(labels, kind="stable")
    _, first, counts = np.unique(labels[order], return_index=True, return_counts=True)
    ranks = np.empty(len(labels), np.int64)
    ranks[order] = np.arange(len(labels)) - np.repeat(first, counts)
    return ranks


def pack_match_bits(flags: np.ndarray) -> np.ndarray:
    """Pack (A, T, n) bool into (n,) float64 integers below 2^53."""
    flat = flags.reshape(len(AREA_RANGES) * len(IOU_THRESHOLDS), flags.shape[2])
    return (2.0 ** np.arange(len(flat))) @ flat


def unpack_match_bits(numbers: np.ndarray) -> np.ndarray:
    """Unpack (n,) float64 of `pack_match_bits` into (A, T, n) bool."""
    bits = np.arange(len(AREA_RANGES) * len(IOU_THRESHOLDS))
    flat = numbers.astype(np.int64)[None] >> bits[:, None] & 1
    return flat.astype(bool).reshape(len(AREA_RANGES), len(IOU_THRESHOLDS), len(numbers))


def match_across_classes(iou: np.ndarray, answers: Detections, truth: Target) -> tuple[np.ndarray, np.ndarray]:
    """Match detections and objects regardless of class, at an IoU of 0.5, without crowds.

    Returns the class of each detection's object (n,), or -1, and the score of each object's detection (g,), or -1.
    `iou` is (n, g)."""
    objects = np.flatnonzero(~truth.crowd)
    owner = match_detections(
        iou[:, objects], truth.crowd[objects], np.zeros((1, len(objects)), bool), IOU_THRESHOLDS[:1]
    )[0, 0]
    labels, scores = np.full(len(answers), -1), np.full(len(truth), -1.0)
    has = np.flatnonzero(owner >= 0)
    labels[has] = truth.labels[objects[owner[has]]]
    scores[objects[owner[has]]] = answers.scores[has]
    return labels, scores


def classify_detection_errors(
    part: np.ndarray, iou: np.ndarray, owner: np.ndarray, ignored: np.ndarray, labels: np.ndarray, truth: Target
) -> None:
    """Set `ERROR` and `MENDED` of `part` (n + g, `RegionColumn` width), and `MATCHED` of objects.

    `iou` (n, g), `owner` (n,) the matched object index or -1, and `ignored` (n,) bool at an IoU of 0.5, `labels` (n,).
    """
    n, g = iou.shape
    same, single = labels[:, None] == truth.labels, ~truth.crowd
    used = np.zeros(g, bool)
    used[owner[owner >= 0]] = True
    part[n:, RegionColumn.MATCHED] = used
    part[:, RegionColumn.MENDED] = -1
    near = np.where(single, iou, 0.0)
    aimed: set[tuple[int, int]] = set()
    for answer in np.flatnonzero((owner < 0) & ~ignored):
        own, other = np.where(same[answer], near[answer], 0.0), np.where(same[answer], 0.0, near[answer])
        error = classify_unmatched_detection(own.max(initial=0.0), other.max(initial=0.0))
        part[answer, RegionColumn.ERROR] = error
        if error in (DetectionError.LOCALISATION, DetectionError.CLASS):
            place = int((own if error == DetectionError.LOCALISATION else other).argmax())
            if not used[place] and (error, place) not in aimed:
                part[answer, RegionColumn.MENDED] = truth.labels[place]
            aimed.add((error, place))
    spoken_for = {place for _, place in aimed}
    part[n:, RegionColumn.ERROR] = [
        DetectionError.MISSED if single[place] and not used[place] and place not in spoken_for else 0
        for place in range(g)
    ]


def classify_unmatched_detection(own: float, other: float) -> DetectionError:
    """Classify an unmatched detection by its highest IoU with objects of its class and of others."""
    first = IOU_THRESHOLDS[0]
    if BACKGROUND_IOU <= own < first:
        return DetectionError.LOCALISATION
    if other >= first:
        return DetectionError.CLASS
    if own >= first:
        return DetectionError.DUPLICATE
    return DetectionError.BOTH if other >= BACKGROUND_IOU else DetectionError.NOTHING


def select_region_columns(table: np.ndarray, kind: int) -> np.ndarray:
    """Select the columns of the region type of this index: (m, columns) -> (m, `RegionColumn` width)."""
    return table[:, MatchColumn.KINDS + kind * RegionColumn.WIDTH :][:, : RegionColumn.WIDTH]
