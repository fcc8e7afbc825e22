"""Views of objects: boxes and masks follow the image, and objects are dropped only by the documented rules."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image

from vitreous.data.annotations.target import Target, masks_to_boxes, stack_masks
from vitreous.data.augmentation.parts import CropRegion, crop_objects, rotate_and_flip, rotate_and_flip_boxes
from vitreous.data.augmentation.scenes import SceneViews
from vitreous.data.modalities.images import ImagePreprocess

IDENTITY_VIEWS = SceneViews(scale=(1.0, 1.0), flip=0.0)
IMAGE_SIZE = (48, 64)


def make_rectangles(seed: int, count: int = 4, size: tuple[int, int] = IMAGE_SIZE) -> tuple[np.ndarray, Target]:
    """Return an image (H, W, 3) of bright rectangles that do not overlap, and its target."""
    draw = np.random.default_rng(seed)
    pixels, masks = np.zeros((*size, 3), np.uint8), []
    for column in range(count):
        step = size[1] // count
        left = column * step + int(draw.integers(0, step // 3))
        top = int(draw.integers(0, size[0] // 2))
        width, height = int(draw.integers(6, step // 2 + 1)), int(draw.integers(6, size[0] // 3))
        mask = np.zeros(size, bool)
        mask[top : top + height, left : left + width] = True
        pixels[mask] = 240
        masks.append(mask)
    labels = np.arange(count, dtype=np.int64)
    layers = stack_masks(masks, size)
    return pixels, Target(size, labels, masks_to_boxes(masks), np.zeros(count, bool), layers=layers)


def find_bright_box(pixels: torch.Tensor) -> torch.Tensor:
    """Return the bounding box (4,) float32 of the bright pixels in (3, h, w)."""
    bright = pixels[0] > 120
    rows, columns = bright.any(1).nonzero().flatten(), bright.any(0).nonzero().flatten()
    return torch.tensor([columns[0], rows[0], columns[-1] + 1, rows[-1] + 1]).float()


VIEW_OPTIONS = [
    {"flip": 1.0}, {"flip_vertical": 1.0}, {"turn": True}, {"scale": (0.7, 2.0)}, {"fit": "whole", "scale": (0.8, 1.5)},
]  # fmt: skip


@pytest.mark.parametrize("change", VIEW_OPTIONS)
def test_boxes_and_masks_follow_the_augmented_image(change):
    scenes, checked = replace(IDENTITY_VIEWS, **change), 0
    for key in range(16):
        pixels, target = make_rectangles(key, count=1)
        view = scenes.augment_scene(Image.fromarray(pixels), target, ImagePreprocess((48, 48), filter="bilinear"), key)
        assert view.keys() == {"images", "boxes", "labels", "crowd", "masks"}
        for box, mask in zip(view["boxes"], view["masks"], strict=True):
            image_box = find_bright_box(view["images"])
            assert (image_box - box).abs().max() <= 1.0, (key, box, image_box)
            mask_box = torch.from_numpy(masks_to_boxes(mask[None].numpy()))[0]
            assert (mask_box - box).abs().max() <= 1.0
            checked += 1
    assert checked >= 12


@pytest.mark.parametrize("flips", [(a, b, c) for a in (False, True) for b in (False, True) for c in (False, True)])
@pytest.mark.parametrize("size", [(20, 20), (16, 24)])
def test_boxes_are_transformed_like_masks(flips, size):
    draw = np.random.default_rng(0)
    masks = torch.zeros(5, *size, dtype=torch.bool)
    for mask in masks:
        left, top = draw.integers(0, size[1] - 4), draw.integers(0, size[0] - 4)
        mask[top : top + draw.integers(1, 5), left : left + draw.integers(1, 5)] = True
    boxes = torch.from_numpy(masks_to_boxes(masks.numpy()))
    expected = torch.from_numpy(masks_to_boxes(rotate_and_flip(masks, flips).numpy()))
    assert torch.equal(rotate_and_flip_boxes(boxes, size, flips), expected)


def test_cropping_and_flipping_objects_match_torchvision():
    from torchvision import tv_tensors
    from torchvision.transforms.v2 import functional as F

    for seed in range(6):
        _, target = make_rectangles(seed)
        draw = np.random.default_rng(seed)
        top, left = (int(draw.integers(0, room)) for room in (16, 24))
        region = CropRegion(top, left, 32, 40, (32, 40))
        cropped = crop_objects(target, region, 0.0)
        boxes = tv_tensors.BoundingBoxes(torch.from_numpy(target.boxes), format="XYXY", canvas_size=IMAGE_SIZE)
        boxes = F.horizontal_flip(F.crop(boxes, top, left, 32, 40))
        masks = F.horizontal_flip(F.crop(tv_tensors.Mask(torch.from_numpy(target.masks())), top, left, 32, 40))
        stays = [int(label) for label in cropped["labels"]]
        assert set(range(4)) - set(stays) == {object_index for object_index, mask in enumerate(masks) if not mask.any()}
        flips = (False, True, False)
        ours = rotate_and_flip_boxes(torch.from_numpy(cropped["boxes"]), (32, 40), flips)
        assert torch.allclose(ours, boxes[stays].as_subclass(torch.Tensor))
        assert torch.equal(
            rotate_and_flip(torch.from_numpy(cropped["masks"]), flips), masks[stays].as_subclass(torch.Tensor)
        )


def make_single_object(box: tuple[float, ...], masks: bool = False) -> Target:
    """Return a target with one object; its mask covers the whole pixels in the box."""
    mask = np.zeros(IMAGE_SIZE, bool)
    mask[int(box[1]) : max(int(box[3]), int(box[1]) + 1), int(box[0]) : max(int(box[2]), int(box[0]) + 1)] = True
    table, layers = np.array([box], np.float32), stack_masks([mask], IMAGE_SIZE) if masks else None
    return Target(IMAGE_SIZE, np.array([2]), table, np.zeros(1, bool), layers=layers)


def test_mostly_cropped_objects_are_dropped():
    region = CropRegion(0, 20, 48, 44, (48, 44))  # keeps the columns from 20 on
    for right, stays in ((21.9, False), (22.1, True), (20.9, False)):
        assert len(crop_objects(make_single_object((0, 0, right, 10)), region, 0.09)["labels"]) == stays
    half = CropRegion(0, 0, 48, 64, (24, 32))
    for side, stays in ((1.9, False), (2.1, True)):  # less than one pixel of the view is dropped, more is kept
        assert len(crop_objects(make_single_object((10, 10, 10 + side, 20)), half, 0.0)["labels"]) == stays


def test_small_objects_keep_their_mask_and_box():
    quarter = CropRegion(0, 0, 48, 64, (12, 16))
    for left in range(8, 14):
        for top in range(8, 14):
            cropped = crop_objects(make_single_object((left, top, left + 4, top + 4), masks=True), quarter, 0.0)
            assert cropped["masks"].shape == (1, 12, 16) and cropped["masks"].any()
            np.testing.assert_allclose(cropped["boxes"][0], np.array([left, top, left + 4, top + 4]) / 4)
    thin_object = replace(
        make_single_object((8, 8, 12, 12)),
        layers=stack_masks([np.eye(*IMAGE_SIZE, dtype=bool) & (np.indices(IMAGE_SIZE)[0] == 9)], IMAGE_SIZE),
    )
    # nearest-neighbour sampling misses its single pixel
    cropped = crop_objects(thin_object, CropRegion(0, 0, 48, 64, (12, 16)), 0.0)
    assert cropped["masks"].sum() == 1 and cropped["masks"][0, 2, 2]


def test_cropped_boxes_enclose_the_cropped_mask():
    mask = np.zeros(IMAGE_SIZE, bool)
    mask[10:12, 5:40] = True  # a thin arm to the left of a block
    mask[5:30, 30:40] = True
    target = Target(
        IMAGE_SIZE, np.array([0]), masks_to_boxes([mask]), np.zeros(1, bool), layers=stack_masks([mask], IMAGE_SIZE)
    )
    region = CropRegion(0, 10, 48, 15, (48, 15))  # contains only a part of the arm
    assert crop_objects(target, region, 0.0)["boxes"].tolist() == [[0, 10, 15, 12]]
    assert crop_objects(target.without_masks(), region, 0.0)["boxes"].tolist() == [[0, 5, 15, 30]]


def test_padding_has_the_mean_and_images_may_have_no_objects():
    pixels, target = make_rectangles(0)
    preprocess = ImagePreprocess((96, 96), mean=(0.2, 0.4, 0.6))
    view = replace(IDENTITY_VIEWS, fill="mean").augment_scene(
        Image.fromarray(pixels), target.take(np.zeros(0, np.int64)), preprocess, 1
    )
    assert view["boxes"].shape == (0, 4) and view["masks"].shape == (0, 96, 96)
    outside = (view["images"] == torch.tensor([51, 102, 153])[:, None, None]).all(0)
    assert outside.sum() >= 96 * 96 - 49 * 65
    batch = IDENTITY_VIEWS.collate([view, view], preprocess)
    assert batch["images"].shape == (2, 3, 96, 96) and [len(rows) for rows in batch["boxes"]] == [0, 0]
