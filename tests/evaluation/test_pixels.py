"""Evaluation of class maps: confusion, metrics, and large images split into tiles."""

import itertools

import numpy as np
import pytest
import torch

from vitreous.data.annotations.target import IGNORE_INDEX
from vitreous.data.modalities.images import ImagePreprocess
from vitreous.data.split import ArraySplit
from vitreous.evaluation.evaluator import SplitOutputs
from vitreous.evaluation.pixels import (
    SegmentationEvaluator,
    compute_pixel_confusion,
    compute_segmentation_metrics,
    make_logits_function,
)
from vitreous.tasks.tiles import list_tile_starts, mirror_pad, predict_class_map, segment_by_tiles

CLASSES = ("ground", "square", "disc")


class PixelEngine:
    """Predicts each pixel from its value alone: logit k of value v is -(v - k)^2."""

    preprocess, precision = ImagePreprocess((16, 24), 1, (0.5,), (0.5,)), "fp32"

    def __call__(self, pixels):
        assert pixels.shape[1:] == (1, 16, 24) and len(pixels) <= 8
        return -((pixels.float() - torch.arange(3).view(1, 3, 1, 1)) ** 2)


@pytest.mark.parametrize("size", [(16, 24), (17, 25), (40, 31), (5, 7), (100, 24), (1, 60)])
def test_tiled_segmentation_matches_the_whole_image(size):
    pixels = np.random.default_rng(1).integers(0, 3, (1, *size)).astype(np.uint8)
    logits = segment_by_tiles(make_logits_function(PixelEngine()), pixels, (16, 24))
    assert logits.shape == (3, *size)
    assert np.allclose(logits, -((pixels.astype(float) - np.arange(3).reshape(3, 1, 1)) ** 2), atol=1e-5)
    assert np.array_equal(predict_class_map(make_logits_function(PixelEngine()), pixels, (16, 24)), pixels[0])


def test_overlapping_tile_logits_are_averaged_with_weights():
    def output_tile_number(tiles):
        nonlocal count
        count += 1
        return np.full((len(tiles), 1, 4, 4), count, np.float32)

    count, pixels = 0, np.zeros((1, 8, 4), np.float32)
    column = segment_by_tiles(output_tile_number, pixels, (4, 4))[0, :, 0]
    share = np.array([0.25, 0.75])  # weights along an axis are 1/4, 3/4, 3/4, 1/4
    blend = [(1 * b + 2 * a) / (a + b) for a, b in zip(share, share[::-1], strict=True)]
    further = [(2 * b + 3 * a) / (a + b) for a, b in zip(share, share[::-1], strict=True)]
    assert column == pytest.approx([1, 1, *blend, *further, 3, 3])


def test_tiles_cover_all_and_overlap():
    for length in range(16, 90):
        starts = list_tile_starts(length, 16)
        assert starts[0] == 0 and starts[-1] == length - 16
        assert all(0 < b - a <= 8 for a, b in itertools.pairwise(starts))
    assert mirror_pad(np.arange(3).reshape(1, 1, 3), (1, 8)).tolist() == [[[0, 1, 2, 2, 1, 0, 0, 1]]]


def test_pixel_confusion_matches_a_loop():
    draw = np.random.default_rng(0)
    true, prediction = draw.integers(-1, 3, (9, 7)), draw.integers(0, 3, (9, 7))
    expected = np.zeros((3, 3), int)
    for label, predicted in zip(true.ravel(), prediction.ravel(), strict=True):
        if label != IGNORE_INDEX:
            expected[label, predicted] += 1
    assert np.array_equal(compute_pixel_confusion(true, prediction, 3), expected)


def test_metrics_match_torchmetrics():
    from torchmetrics.functional.classification import multiclass_jaccard_index
    from torchmetrics.functional.segmentation import dice_score

    draw = np.random.default_rng(1)
    true, prediction = draw.integers(0, 3, (4, 9, 7)), draw.integers(0, 3, (4, 9, 7))
    metrics = compute_segmentation_metrics(compute_pixel_confusion(true, prediction, 3).astype(float))
    tensors = torch.from_numpy(prediction), torch.from_numpy(true)
    assert metrics["miou"] == pytest.approx(multiclass_jaccard_index(*tensors, 3).item(), abs=1e-6)
    pooled_dice = dice_score(*(t.view(1, -1) for t in tensors), 3, average="macro", input_format="index")
    assert metrics["dice"] == pytest.approx(pooled_dice.item(), abs=1e-6)
    assert metrics["pixel_accuracy"] == (true == prediction).mean()


def test_absent_classes_are_excluded_from_the_report():
    counts = np.zeros((2, 9), np.float32)
    counts[0, [0, 1, 4]] = 6, 2, 2  # 6 and 2 pixels of ground, 2 pixels of ground predicted as squares, 2 of squares
    report = SegmentationEvaluator(CLASSES).report(
        SplitOutputs(ArraySplit(np.zeros((2, 1, 1)), np.zeros((2, 3))), counts, np.array([True, False]))
    )
    assert report.metrics["miou"] == pytest.approx((6 / 8 + 2 / 4) / 2)
    assert report.metrics["dice"] == pytest.approx((12 / 14 + 4 / 6) / 2)
    assert report.unreadable == 1 and report.headline[0] == "mIoU"
    assert report.per_class[0]["confused_with"] == "square" and report.per_class[2]["iou"] is None
    low, high = report.intervals["miou"]
    assert low <= report.metrics["miou"] <= high
    assert compute_segmentation_metrics(np.zeros((3, 3)))["miou"] is None
