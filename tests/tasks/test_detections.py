"""Detections on images: scaling to the model and back, masks as run lengths, and merging of detections across tiles."""

import numpy as np
import pytest
import scipy.ndimage
import torch
import torch.nn.functional as F

from vitreous.data.annotations.shapes import mask_to_rle, rle_to_mask
from vitreous.data.modalities.images import ImagePreprocess
from vitreous.tasks.detections import (
    Detections,
    decode_detections,
    detect_objects,
    encode_mask_crop,
    fit_image,
    paste_mask_runs,
    union_mask_runs,
)
from vitreous.tasks.tile_merging import merge_tiles

MODEL_PREPROCESS = ImagePreprocess((32, 48), 1, (0.25,), (0.5,), filter="bilinear")
NUM_DETECTIONS = 20  # detections of the painted model per image


def detect_painted_rectangles(tiles):
    """Detects the painted rectangles of each tile: class 0 for values from 100, class 1 from 200; its masks contain the
    painted pixels at 28 x 28 points of the box. Scores fall with the area."""
    outputs = [
        np.zeros((len(tiles), NUM_DETECTIONS, 4)),
        np.zeros((len(tiles), NUM_DETECTIONS)),
        np.zeros((len(tiles), NUM_DETECTIONS), np.int64),
    ]
    masks = np.zeros((len(tiles), NUM_DETECTIONS, 28, 28), np.float32)
    for tile_index, tile in enumerate(tiles):
        row = 0
        for value in (100, 200):
            areas, _ = scipy.ndimage.label(tile[0] == value)
            for index, (rows, columns) in enumerate(scipy.ndimage.find_objects(areas)):
                outputs[0][tile_index, row] = columns.start, rows.start, columns.stop, rows.stop
                outputs[1][tile_index, row] = 0.9 - 1e-4 * (areas == index + 1).sum()
                outputs[2][tile_index, row] = value // 100 - 1
                masks[tile_index, row] = 1
                row += 1
    return [*outputs, masks]


def draw_rectangles(size, *objects):
    """A black image (1, H, W) with rectangles of (left, top, right, bottom, value)."""
    pixels = np.zeros((1, *size), np.uint8)
    for left, top, right, bottom, value in objects:
        pixels[0, top:bottom, left:right] = value
    return pixels


def list_detections(detections):
    """Detections as a sorted list of box and class."""
    return sorted(
        (*map(float, box), int(label)) for box, label in zip(detections.boxes, detections.labels, strict=True)
    )


@pytest.mark.parametrize("size", [(32, 48), (64, 96), (100, 40), (7, 90), (333, 500), (20, 20), (1, 1)])
def test_boxes_are_scaled_to_the_model_and_back(size):
    pixels, scale = fit_image(np.zeros((1, *size), np.uint8), MODEL_PREPROCESS)
    assert pixels.shape == (1, 32, 48) and pixels.dtype == np.uint8
    assert min(abs(side * by - model_side) for side, by, model_side in zip(size, scale, (32, 48), strict=True)) < 1e-9
    draw = np.random.default_rng(0)
    low = draw.uniform(0, 0.5, (9, 2)) * size[::-1]
    boxes = np.concatenate([low, low + draw.uniform(0.1, 0.5, (9, 2)) * size[::-1]], 1)
    inside = boxes * np.array([scale[1], scale[0]] * 2)
    assert (inside[:, 2:] <= [48.001, 32.001]).all()
    back = decode_detections([inside, np.linspace(1, 0.1, 9), np.zeros(9, int)], size, scale)
    assert np.allclose(back.boxes, boxes, atol=1e-4)


def test_padding_is_zero_after_normalisation():
    for dtype, step in ((np.uint8, 0.5 / 255 / 0.5), (np.float32, 1e-6)):
        image = np.full((1, 16, 48), 200, dtype)
        pixels, _ = fit_image(image, MODEL_PREPROCESS)
        assert np.array_equal(pixels[:, :16], image)
        normal = MODEL_PREPROCESS.normalise(torch.from_numpy(pixels[None]))[0, 0]
        assert (normal[16:].abs() <= step).all() and (normal[:16] > 1).all()


def test_boxes_are_clipped_and_detections_in_padding_are_dropped():
    boxes = [
        [-5, -5, 10, 10],
        [40, 20, 60, 40],
        [50, 2, 60, 9],
        [1, 1, 1, 9],
        [0, 0, np.nan, 4],
        [0, 0, 9, 9],
        [1, 2, 3, 4],
    ]
    scores, labels = [0.5, 0.9, 0.8, 0.7, 0.6, 0.0, 0.05], [3, 1, 1, 1, 1, 1, 2]
    detections = decode_detections([np.array(boxes), np.array(scores), np.array(labels)], (32, 48))
    assert detections.boxes.tolist() == [[40, 20, 48, 32], [0, 0, 10, 10], [1, 2, 3, 4]]
    assert detections.labels.tolist() == [1, 3, 2] and detections.scores.tolist() == pytest.approx([0.9, 0.5, 0.05])
    assert len(detections.filter_by_score(0.5)) == 2 and detections.take(np.array([2])).labels.tolist() == [2]
    assert len(decode_detections([np.array(boxes), np.array(scores), np.array(labels)], (32, 48), threshold=0.6)) == 1
    with pytest.raises(ValueError, match="scores must be sorted from the highest to the lowest"):
        Detections((4, 4), np.zeros((2, 4)), np.zeros(2, int), np.array([0.1, 0.2]))
    with pytest.raises(ValueError, match="labels"):
        Detections((4, 4), np.zeros((2, 4)), np.zeros(1, int), np.array([0.2]))


def paste_mask_with_detectron2(probabilities, box, size):
    """Detectron2's `_do_paste_mask`: the mask sampled at the centres of all pixels of the image."""
    x0, y0, x1, y1 = box
    y = ((torch.arange(size[0]) + 0.5 - y0) / (y1 - y0) * 2 - 1).float()
    x = ((torch.arange(size[1]) + 0.5 - x0) / (x1 - x0) * 2 - 1).float()
    grid = torch.stack(torch.meshgrid(x, y, indexing="xy"), -1)[None]
    return F.grid_sample(torch.from_numpy(probabilities)[None, None], grid, align_corners=False)[0, 0].numpy()


def test_pasted_masks_match_detectron2():
    draw, size = np.random.default_rng(0), (40, 60)
    for _ in range(200):
        probabilities = draw.random((28, 28), np.float32)
        x0, y0 = draw.uniform(-10, 50), draw.uniform(-10, 35)
        box = np.array([x0, y0, x0 + draw.uniform(0.3, 40), y0 + draw.uniform(0.3, 40)])
        expected = paste_mask_with_detectron2(probabilities, box, size)
        mask = rle_to_mask(paste_mask_runs(probabilities, box, size, (0, 0, 60, 40)), size)
        sure = np.abs(expected - 0.5) > 1e-4
        assert np.array_equal(mask[sure], expected[sure] >= 0.5) and sure.mean() > 0.99


def test_run_lengths_of_a_placed_mask_match_the_full_mask():
    draw, size = np.random.default_rng(1), (5, 6)
    for _ in range(300):
        height, width = draw.integers(1, 6), draw.integers(1, 7)
        top, left = draw.integers(0, 6 - height), draw.integers(0, 7 - width)
        patch, full_mask = draw.random((height, width)) < draw.choice([0.2, 0.8, 1.0]), np.zeros(size, bool)
        full_mask[top : top + height, left : left + width] = patch
        assert encode_mask_crop(patch, (top, left), size) == mask_to_rle(full_mask)
        masks = [draw.random(size) < draw.choice([0.0, 0.3, 0.9]) for _ in range(3)]
        assert union_mask_runs([mask_to_rle(mask) for mask in masks]) == mask_to_rle(np.any(masks, 0))


OBJECTS = [
    (3, 4, 20, 12, 100),
    (60, 3, 70, 30, 200),
    (90, 40, 99, 80, 100),
    (40, 60, 60, 70, 200),
    (41, 61, 45, 64, 100),
]


@pytest.mark.parametrize("size", [(90, 100), (32, 100), (85, 130), (33, 101)])
def test_tiled_detection_matches_the_whole_image(size):
    pixels = draw_rectangles(size, *(painted for painted in OBJECTS if painted[3] <= size[0]))
    untiled = decode_detections([output[0] for output in detect_painted_rectangles(pixels[None])], size)
    tiled = detect_objects(detect_painted_rectangles, pixels, MODEL_PREPROCESS, tiles=True)
    assert list_detections(tiled) == list_detections(untiled) and len(tiled) >= 2
    for box, runs in zip(tiled.boxes.astype(int), tiled.masks, strict=True):
        expected = np.zeros(size, bool)
        expected[box[1] : box[3], box[0] : box[2]] = True
        assert np.array_equal(rle_to_mask(runs, size), expected)
    again = detect_objects(detect_painted_rectangles, pixels, MODEL_PREPROCESS, tiles=True)
    assert again.boxes.tobytes() == tiled.boxes.tobytes() and again.masks == tiled.masks


def test_an_object_is_detected_once_at_any_position():
    for left in range(0, 100, 11):
        for top in range(0, 60, 7):
            pixels = draw_rectangles((80, 120), (left, top, left + 18, top + 13, 100))
            assert list_detections(detect_objects(detect_painted_rectangles, pixels, MODEL_PREPROCESS, tiles=True)) == [
                (left, top, left + 18, top + 13, 0)
            ]


def test_an_object_larger_than_a_tile_is_merged():
    pixels = draw_rectangles((100, 200), (10, 30, 170, 90, 200), (12, 5, 30, 20, 200))
    detections = detect_objects(detect_painted_rectangles, pixels, MODEL_PREPROCESS, tiles=True)
    assert list_detections(detections) == [(10, 30, 170, 90, 1), (12, 5, 30, 20, 1)]
    big = int(detections.boxes[:, 2].argmax())
    assert np.array_equal(rle_to_mask(detections.masks[big], (100, 200))[30:90, 10:170], np.ones((60, 160), bool))


def test_neighbouring_objects_and_classes_are_not_merged():
    objects = [(20, 10, 40, 20, 100), (41, 10, 60, 20, 100), (60, 10, 80, 20, 200), (20, 21, 40, 60, 100)]
    detections = detect_objects(
        detect_painted_rectangles, draw_rectangles((80, 120), *objects), MODEL_PREPROCESS, tiles=True
    )
    assert list_detections(detections) == sorted(
        (*map(float, painted[:4]), painted[4] // 100 - 1) for painted in objects
    )


def test_detections_of_one_tile_are_not_merged():
    windows, size = np.array([(0, 0, 20, 20), (10, 0, 30, 20)]), (20, 30)
    boxes = np.array([[11, 5, 18, 12], [11, 5, 18, 13], [11.5, 5, 18.5, 12], [12, 5, 18, 12]], np.float32)
    scores, tile = np.array([0.6, 0.5, 0.9, 0.4]), np.array([0, 0, 1, 1])
    assert merge_tiles(boxes, np.zeros(4, int), scores, tile, windows, size) == [[2], [3]]
    assert merge_tiles(boxes, np.arange(4), scores, tile, windows, size) == [[2], [0], [1], [3]]
    assert merge_tiles(boxes[:0], np.zeros(0, int), scores[:0], tile[:0], windows, size) == []


def test_small_images_are_enlarged_and_large_ones_reduced():
    small = detect_objects(
        detect_painted_rectangles,
        draw_rectangles((16, 24), (4, 4, 12, 10, 100)),
        ImagePreprocess((16, 24), 1),
        tiles=True,
    )
    assert list_detections(small) == [(4, 4, 12, 10, 0)]
    pixels = np.repeat(np.repeat(draw_rectangles((32, 48), (10, 10, 20, 16, 100)), 3, 1), 3, 2)

    def blocks(tiles):
        assert tiles.shape == (1, 1, 32, 48)
        return detect_painted_rectangles(np.where(tiles > 50, 100, 0))

    detections = detect_objects(blocks, pixels, MODEL_PREPROCESS)
    assert detections.size == (96, 144) and np.abs(detections.boxes - [[30, 30, 60, 48]]).max() <= 1.5
    assert (
        detect_objects(
            lambda tiles: detect_painted_rectangles(tiles)[:3], draw_rectangles((9, 9)), MODEL_PREPROCESS
        ).masks
        is None
    )
