"""Conversion of polygons and run lengths to masks, and of objects to targets."""

import numpy as np
import pytest

from vitreous.data.annotations.shapes import (
    Shape,
    decode_compressed_rle,
    encode_compressed_rle,
    mask_to_polygon,
    mask_to_rle,
    polygon_to_mask,
    rle_to_mask,
    rle_to_mask_window,
    shapes_to_target,
)
from vitreous.errors import DataError

coco_mask = pytest.importorskip("pycocotools.mask")


def draw_mask(seed, size=(23, 17)):
    return np.random.default_rng(seed).random(size) < 0.4


@pytest.mark.parametrize("seed", range(5))
def test_run_lengths_match_pycocotools(seed):
    mask = draw_mask(seed, (23 + seed, 41))
    compressed = coco_mask.encode(np.asfortranarray(mask.astype(np.uint8)))
    runs = decode_compressed_rle(compressed["counts"].decode())
    assert runs == mask_to_rle(mask) and encode_compressed_rle(runs) == compressed["counts"].decode()
    assert np.array_equal(rle_to_mask(runs, mask.shape), mask)
    for left, top, right, bottom in [(0, 0, 41, 23), (3, 5, 20, 11), (40, 2, 41, 3), (7, 7, 7, 9)]:
        assert np.array_equal(
            rle_to_mask_window(runs, mask.shape, (left, top, right, bottom)), mask[top:bottom, left:right]
        )
    encoded = coco_mask.frPyObjects({"counts": runs, "size": list(mask.shape)}, *mask.shape)
    assert np.array_equal(coco_mask.decode(encoded), mask)


@pytest.mark.parametrize("mask", [np.zeros((3, 4), bool), np.ones((3, 4), bool)])
def test_uniform_masks_survive_run_length_encoding(mask):
    assert np.array_equal(rle_to_mask(mask_to_rle(mask), mask.shape), mask)


def test_polygons_cover_pixels_by_their_centre():
    def is_inside(x, y, corners):
        """Even-odd rule with a ray to the right."""
        count = 0
        for (x0, y0), (x1, y1) in zip(corners, np.roll(corners, -1, 0), strict=True):
            if (y0 <= y) != (y1 <= y):
                count += x0 + (y - y0) * (x1 - x0) / (y1 - y0) > x
        return count % 2 == 1

    draw = np.random.default_rng(0)
    for corners in [draw.uniform(-4, 24, (count, 2)) for count in (3, 4, 5, 9)]:
        expected = [[is_inside(x + 0.5, y + 0.5, corners) for x in range(20)] for y in range(16)]
        assert np.array_equal(polygon_to_mask(corners, (16, 20)), expected)
    square = np.array([(2, 3), (7, 3), (7, 9), (2, 9)])
    mask = polygon_to_mask(square, (16, 20))
    assert mask.sum() == 30 and mask[3:9, 2:7].all()
    assert not polygon_to_mask(square[:2], (16, 20)).any()


def test_polygon_masks_are_close_to_pycocotools():
    angles = np.linspace(0, 2 * np.pi, 30, endpoint=False)
    corners = np.stack([50 + 30 * np.cos(angles), 40 + 20 * np.sin(angles)], 1)
    theirs = coco_mask.decode(coco_mask.frPyObjects([corners.ravel().tolist()], 90, 110))[..., 0].astype(bool)
    ours = polygon_to_mask(corners, (90, 110))
    assert (ours & theirs).sum() / (ours | theirs).sum() > 0.95
    # area of the regular polygon
    assert ours.sum() == pytest.approx(0.5 * 30 * 20 * 30 * np.sin(2 * np.pi / 30), rel=0.01)


def test_objects_are_converted_to_a_target():
    square = np.array([(2, 3), (7, 3), (7, 9), (2, 9)], np.float32)
    hole = Shape(1, None, (square, square[:, ::-1]))
    shapes = [Shape(0, None, (square,)), hole, Shape(2, (-5, -5, 40, 6), (square,), crowd=True)]
    target = shapes_to_target(shapes, (16, 20), "a.json")
    assert target.labels.tolist() == [0, 1, 2] and target.crowd.tolist() == [False, False, True]
    assert target.boxes.tolist() == [[2, 3, 7, 9], [2, 2, 9, 9], [0, 0, 20, 6]]
    assert len(target.layers) == 3 and np.array_equal(target.mask(0), polygon_to_mask(square, (16, 20)))
    boxes = shapes_to_target(
        [Shape(0, (1, 1, 4, 4)), Shape(0, None, (square,)), Shape(1, (30, 1, 40, 4))], (16, 20), "a"
    )
    assert boxes.layers is None and boxes.boxes.tolist() == [[1, 1, 4, 4], [2, 3, 7, 9]]
    runs = Shape(0, None, (), mask_to_rle(draw_mask(0)))
    assert shapes_to_target([runs], (23, 17), "a").boxes.tolist() == [[0, 0, 17, 23]]
    with pytest.raises(DataError, match=r"a\.json, object 1: the run lengths cover 391 pixels, the image has 392"):
        shapes_to_target([runs], (28, 14), "a.json")
    assert len(shapes_to_target([], (4, 4), "a")) == 0


@pytest.mark.parametrize("text", ["\x1f", "o", "ÿ"])
def test_damaged_run_lengths_are_rejected(text):
    with pytest.raises(ValueError, match="run lengths"):
        decode_compressed_rle(text)


@pytest.mark.parametrize("share", [0.1, 0.5, 0.9, 1.0])
def test_polygons_of_masks_reproduce_the_mask(share):
    draw = np.random.default_rng(4)
    for _ in range(60):
        height, width = draw.integers(1, 16, 2).tolist()
        mask = draw.random((height, width)) < share
        mask[draw.integers(height), draw.integers(width)] = True
        corners = mask_to_polygon(mask)
        assert corners.min() >= 0 and (corners <= [width, height]).all()
        assert np.array_equal(polygon_to_mask(corners, mask.shape), mask)
        steps = np.roll(corners, -1, 0) - corners
        # every edge is horizontal or vertical, also the edges that connect separate regions
        assert ((steps == 0).sum(1) >= 1).all()


def test_polygons_of_masks_have_exact_corners():
    mask = np.zeros((9, 9), bool)
    mask[2:7, 1:8] = True
    assert sorted(mask_to_polygon(mask).tolist()) == [[1, 2], [1, 7], [8, 2], [8, 7]]
    mask[4, 4] = False
    assert {(4, 4), (5, 4), (5, 5), (4, 5)} <= set(map(tuple, mask_to_polygon(mask).tolist()))
