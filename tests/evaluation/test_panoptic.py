"""Panoptic quality of segments, and the F score of boundaries."""

import math

import numpy as np
import pytest
import torch

from vitreous.data.annotations.target import IGNORE_INDEX, Target, stack_masks
from vitreous.evaluation.boundary import compute_boundary_f, count_boundary_pixels, find_boundary_pixels
from vitreous.evaluation.evaluator import SplitOutputs
from vitreous.evaluation.panoptic import (
    PanopticSegments,
    compute_panoptic_quality,
    count_panoptic_matches,
    segments_from_class_map,
    segments_from_target,
)
from vitreous.evaluation.pixels import SegmentationEvaluator, compute_segmentation_metrics, extract_confusion_matrices

IS_THING = np.array([True, True, True, False, False])


def draw_panoptic_map(draw):
    """Classes and instances of 30 x 40 pixels in blocks; classes 3 and 4 have one instance."""
    blocks = np.repeat(np.repeat(draw.integers(0, 9, (6, 8)), 5, 0), 5, 1)
    classes = draw.integers(0, 5, 9)[blocks]
    return classes, np.where(IS_THING[classes], blocks, 0)


def make_segments(classes, instances):
    segment_ids, segment_indices = np.unique(classes * 100 + instances, return_inverse=True)
    return PanopticSegments(
        segment_indices.reshape(classes.shape).astype(np.int32), segment_ids // 100, np.zeros(len(segment_ids), bool)
    )


def test_panoptic_quality_matches_torchmetrics():
    from torchmetrics.functional.detection import panoptic_quality

    draw, counts, pairs = np.random.default_rng(0), np.zeros((5, 4)), []
    for _ in range(15):
        truth, noise_map = draw_panoptic_map(draw), draw_panoptic_map(draw)
        noise = draw.random((30, 40)) < 0.15
        prediction = [np.where(noise, b, a) for a, b in zip(truth, noise_map, strict=True)]
        counts += count_panoptic_matches(make_segments(*truth), make_segments(*prediction), 5)
        pairs.append([np.stack(pair_item, -1) for pair_item in (prediction, truth)])
    tensors = [torch.from_numpy(np.stack(pair_item)) for pair_item in zip(*pairs, strict=True)]
    expected = panoptic_quality(*tensors, {0, 1, 2}, {3, 4}, return_sq_and_rq=True).tolist()
    metrics = compute_panoptic_quality(counts, IS_THING)
    assert [metrics[name] for name in ("pq", "sq", "rq")] == pytest.approx(
        expected, abs=1e-7
    )  # torchmetrics rounds to float32
    per_class = panoptic_quality(*tensors, {0, 1, 2}, {3, 4}, return_per_class=True).numpy().ravel()
    assert metrics["pq_things"] == pytest.approx(per_class[:3].mean(), abs=1e-7)
    assert metrics["pq_stuff"] == pytest.approx(per_class[3:].mean(), abs=1e-7)
    assert set(compute_panoptic_quality(np.zeros((5, 4)), IS_THING).values()) == {None}


def make_road_scene():
    """Sky (class 0) over a road (1) with two cars (2) and a crowd of cars; one corner is unlabelled."""
    classes = np.zeros((20, 30), np.int32)
    classes[10:] = 1
    masks = [np.zeros((20, 30), bool) for _ in range(3)]
    masks[0][12:16, 2:8], masks[1][12:16, 10:16], masks[2][11:19, 20:29] = True, True, True
    for mask in masks:
        classes[mask] = 2
    classes[:4, :4] = IGNORE_INDEX
    boxes = np.zeros((3, 4), np.float32)
    return Target(
        (20, 30),
        np.array([2, 2, 2]),
        boxes,
        np.array([False, False, True]),
        layers=stack_masks(masks, (20, 30)),
        classes=classes,
    )


def test_crowds_and_ignored_pixels_are_not_counted_as_errors():
    target, is_thing = make_road_scene(), np.array([False, False, True])
    prediction = np.where(
        target.classes == IGNORE_INDEX, 1, target.classes
    )  # road is predicted at the unlabelled pixels
    counts = count_panoptic_matches(segments_from_target(target), segments_from_class_map(prediction, is_thing), 3)
    assert counts.tolist() == [
        [1, 1, 0, 0],
        [1, 1, 0, 0],
        [2, 2, 0, 0],
    ]  # cars in the crowd are neither correct nor wrong
    joined = prediction.copy()
    joined[12:16, 8:10] = 2  # the two cars become one segment, with an IoU of 24 / 56 with each
    counts = count_panoptic_matches(segments_from_target(target), segments_from_class_map(joined, is_thing), 3)
    assert counts[2].tolist() == [0, 0, 1, 2] and counts[1, 1] == 1
    with pytest.raises(ValueError, match="class map"):
        segments_from_target(Target((1, 1), np.zeros(0, int), np.zeros((0, 4)), np.zeros(0, bool)))


def count_boundary_by_loops(classes, prediction, label, reach):
    """Boundary pixels of a class, and those near one of the other map, pixel by pixel."""
    height, width = classes.shape
    beside = ((0, 1), (1, 0), (0, -1), (-1, 0))
    labelled = {(y, x) for y in range(height) for x in range(width) if classes[y, x] != IGNORE_INDEX}
    sides = []
    for class_map in (prediction, classes):
        class_pixels = {pixel for pixel in labelled if class_map[pixel] == label}
        sides.append(
            [(y, x) for y, x in class_pixels if any((y + a, x + b) in labelled - class_pixels for a, b in beside)]
        )
    near = [
        sum(any(math.hypot(y - v, x - u) <= reach for v, u in reference_side) for y, x in side)
        for side, reference_side in (sides, sides[::-1])
    ]
    return [near[0], len(sides[0]), near[1], len(sides[1])]


def test_boundary_counts_match_a_loop_over_pixels():
    draw = np.random.default_rng(3)
    for _ in range(4):
        classes, prediction = (np.repeat(np.repeat(draw.integers(0, 3, (3, 4)), 5, 0), 4, 1) for _ in range(2))
        classes = np.where(draw.random(classes.shape) < 0.03, IGNORE_INDEX, classes)
        counts = count_boundary_pixels(classes, prediction, 4, 0.06)
        for label in range(4):
            assert counts[label].tolist() == count_boundary_by_loops(
                classes, prediction, label, math.ceil(0.06 * math.hypot(15, 16))
            )
    square = np.zeros((40, 40), np.int32)
    square[10:30, 10:30] = 1
    assert compute_boundary_f(count_boundary_pixels(square, square, 2)) == 1
    # boundary pixels are one pixel apart
    assert compute_boundary_f(count_boundary_pixels(square, np.roll(square, 1, 0), 2)) == 1
    assert 0.3 < compute_boundary_f(count_boundary_pixels(square, np.roll(square, 4, 0), 2)) < 0.9
    assert compute_boundary_f(count_boundary_pixels(square, np.zeros_like(square), 2)) == 0
    assert compute_boundary_f(np.zeros((2, 4))) is None
    solid = np.zeros((6, 6, 6), np.int32)
    solid[2:4, 2:4, 2:4] = 1
    assert (
        find_boundary_pixels(solid == 1, solid == solid).sum() == 8
        and compute_boundary_f(count_boundary_pixels(solid, solid, 2)) == 1
    )


def test_the_evaluator_counts_confusion_panoptic_and_boundaries():
    target, is_thing = make_road_scene(), np.array([False, False, True])
    predictions = [np.where(target.classes == IGNORE_INDEX, 0, target.classes), np.ones((20, 30), np.int32)]
    evaluator = SegmentationEvaluator(("sky", "road", "car"), True, is_thing)
    counts = np.stack([evaluator.count_image(target, prediction) for prediction in predictions])
    report = evaluator.report(SplitOutputs(None, counts, np.ones(2, bool)))
    alone = SegmentationEvaluator(("sky", "road", "car")).report(SplitOutputs(None, counts[:, :9], np.ones(2, bool)))
    assert next(iter(report.metrics)) == "miou" and alone.metrics.items() <= report.metrics.items()
    assert alone.intervals.items() <= report.intervals.items() and alone.per_class == report.per_class
    assert report.metrics["miou"] == compute_segmentation_metrics(extract_confusion_matrices(counts, 3).sum(0))["miou"]
    # sky: one match and one missed; road: one match, one prediction with IoU below 0.5 and one missed; cars: two
    # matches and two missed
    assert report.metrics["pq"] == pytest.approx((1 / 1.5 + 1 / 2 + 2 / 3) / 3)
    assert report.metrics["pq_things"] == pytest.approx(2 / 3) and 0 < report.metrics["boundary_f"] < 1
    low, high = report.intervals["boundary_f"]
    assert low == 0 and high == 1


def test_pixel_metrics_match_torchmetrics_and_scikit_learn():
    from sklearn.metrics import accuracy_score, f1_score, jaccard_score
    from torchmetrics.functional.classification import multiclass_confusion_matrix

    draw = np.random.default_rng(4)
    true, prediction = draw.integers(0, 5, (6, 31, 17)), draw.integers(0, 5, (6, 31, 17))
    evaluator = SegmentationEvaluator(tuple("abcde"))
    counts = sum(evaluator.count_image(make_target(a), b) for a, b in zip(true, prediction, strict=True)).reshape(5, 5)
    assert (
        counts.tolist() == multiclass_confusion_matrix(torch.from_numpy(prediction), torch.from_numpy(true), 5).tolist()
    )
    metrics, flat = compute_segmentation_metrics(counts), (true.ravel(), prediction.ravel())
    assert metrics["miou"] == pytest.approx(jaccard_score(*flat, average="macro"), abs=1e-9)
    assert metrics["dice"] == pytest.approx(f1_score(*flat, average="macro"), abs=1e-9)
    assert metrics["pixel_accuracy"] == pytest.approx(accuracy_score(*flat), abs=1e-9)


def make_target(classes):
    return Target(
        classes.shape, np.zeros(0, int), np.zeros((0, 4), np.float32), np.zeros(0, bool), layers=None, classes=classes
    )
