"""`Target`: boxes, layered masks and class maps."""

import numpy as np
import pytest

from vitreous.data.annotations.target import IGNORE_INDEX, Target, create_empty_target, masks_to_boxes, stack_masks


def random_masks(count: int, size: tuple[int, ...], seed: int = 0) -> np.ndarray:
    """Return (count, *size) bool masks of overlapping boxes."""
    draw = np.random.default_rng(seed)
    masks = np.zeros((count, *size), bool)
    for mask in masks:
        corner = [draw.integers(0, side - 1) for side in size]
        mask[tuple(slice(low, low + draw.integers(1, 6)) for low in corner)] = True
    return masks


def make_target(masks: np.ndarray, labels: list[int], crowd: tuple[int, ...] = ()) -> Target:
    marks = np.isin(np.arange(len(masks)), crowd)
    return Target(
        masks.shape[1:], np.array(labels), masks_to_boxes(masks), marks, layers=stack_masks(masks, masks.shape[1:])
    )


@pytest.mark.parametrize("size", [(12, 20), (5, 9, 7)])
def test_layers_store_overlapping_masks(size):
    masks = random_masks(9, size)
    layers = stack_masks(masks, size)
    assert 1 < len(layers) < 9
    boxes = np.zeros((9, 4), np.float32)
    target = Target(size, np.zeros(9, np.int64), boxes, np.zeros(9, bool), layers=layers)
    assert np.array_equal(target.masks(), masks)
    rows = np.array([7, 2, 4])
    assert np.array_equal(target.take(rows).masks(), masks[rows])


def test_boxes_enclose_their_masks():
    masks = np.zeros((2, 6, 8), bool)
    masks[0, 2:5, 1:8] = True
    masks[1, 3, 4] = True
    assert masks_to_boxes(masks).tolist() == [[1, 2, 8, 5], [4, 3, 5, 4]]
    assert masks_to_boxes(masks[:0]).shape == (0, 4)


def test_class_maps_paint_small_objects_last_and_ignore_crowds():
    masks = np.zeros((3, 4, 4), bool)
    masks[0, :3, :3], masks[1, 1, 1], masks[2, 3, 3] = True, True, True
    painted = make_target(masks[[1, 0, 2]], [2, 1, 1], crowd=(2,)).class_map(background=0)
    assert painted.tolist() == [[1, 1, 1, 0], [1, 2, 1, 0], [1, 1, 1, 0], [0, 0, 0, IGNORE_INDEX]]


def test_stored_class_maps_are_returned_unchanged():
    class_map = np.full((3, 3), 5, np.int32)
    assert create_empty_target((3, 3), class_map).class_map() is class_map
    assert create_empty_target((3, 3)).class_map(2).tolist() == [[2] * 3] * 3
    boxes = Target((3, 3), np.zeros(1, int), np.zeros((1, 4)), np.zeros(1, bool))
    for target, background in ((boxes, 0), (make_target(random_masks(1, (9, 9)), [0]), None)):
        with pytest.raises(ValueError, match="class"):
            target.class_map(background)
    with pytest.raises(ValueError, match="layers"):
        Target((3, 3), np.zeros(0, int), np.zeros((0, 4)), np.zeros(0, bool), layers=np.zeros((1, 4, 4), np.int32))
