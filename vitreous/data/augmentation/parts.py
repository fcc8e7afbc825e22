"""Crop, resize, rotate and flip an image together with its annotations: pixels, class map, boxes and masks.

A view is the result: an image of the model's size, resampled from a region of the source image.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from vitreous.data.annotations.target import IGNORE_INDEX, Target, mask_to_box
from vitreous.data.modalities.base import Preprocess

PIXEL_TOLERANCE = 1e-6  # rounding tolerance of coordinates, in pixels
MIN_OBJECT_SIDE = 1.0  # minimum width and height of an object, in pixels


@dataclass(frozen=True)
class CropRegion:
    """A rectangle of the source image, and the size of the view that it is resized to.

    `top`, `left`, `height` and `width` are in pixels of the source image; the rectangle may extend outside the image.
    `size` is (rows, columns) of the view.
    """

    top: float
    left: float
    height: float
    width: float
    size: tuple[int, int]

    def get_visible_window(self, image_size: tuple[int, ...]) -> tuple[int, int, int, int]:
        """Return the box of the view that is inside the source image: left, top, right and bottom in pixels of the
        view. Pixels that are partly outside are excluded. `image_size` is (height, width) of the source image."""
        ends = []
        for length, start, extent, pixels in zip(
            image_size, (self.top, self.left), (self.height, self.width), self.size, strict=True
        ):
            scale = pixels / extent
            first_pixel = max(0, math.ceil(-start * scale - PIXEL_TOLERANCE))
            ends.append(
                (first_pixel, max(first_pixel, min(pixels, math.floor((length - start) * scale + PIXEL_TOLERANCE))))
            )
        (top, bottom), (left, right) = ends
        return left, top, right, bottom


def crop_image(
    band: Image.Image, region: CropRegion, preprocess: Preprocess, colour: tuple[float, ...] = ()
) -> Image.Image:
    """Resize a region of one PIL image to the size of the view, with the filter of `preprocess`. Pixels outside the
    image get `colour`, one value per channel; black if it is empty."""
    left, top, right, bottom = region.get_visible_window((band.height, band.width))
    fill_values = tuple(colour) if band.mode == "F" else tuple(map(round, colour))
    fill = 0 if not fill_values else fill_values[0] if len(fill_values) == 1 else fill_values
    canvas = Image.new(band.mode, (region.size[1], region.size[0]), fill)
    if right > left and bottom > top:
        x, y = region.width / region.size[1], region.height / region.size[0]
        box = (region.left + left * x, region.top + top * y, region.left + right * x, region.top + bottom * y)
        box = (max(0.0, box[0]), max(0.0, box[1]), min(band.width, box[2]), min(band.height, box[3]))
        canvas.paste(band.resize((right - left, bottom - top), preprocess.resampling, box), (left, top))
    return canvas


def crop_class_map(classes: np.ndarray, region: CropRegion, outside_value: int = IGNORE_INDEX) -> np.ndarray:
    """Resize a region of a class map, (H, W) int32, to the size of the view, (rows, columns) int32, by nearest
    neighbour. Pixels outside the image get `outside_value`."""
    rows, columns = region.size
    left, top, right, bottom = region.get_visible_window(classes.shape)
    y = np.floor(region.top + (np.arange(top, bottom) + 0.5) * region.height / rows).astype(np.int64)
    x = np.floor(region.left + (np.arange(left, right) + 0.5) * region.width / columns).astype(np.int64)
    result = np.full(region.size, outside_value, np.int32)
    result[top:bottom, left:right] = classes[y[:, None], x[None]]
    return result


def crop_objects(target: Target, region: CropRegion, visible: float) -> dict[str, np.ndarray]:
    """Transform the objects of an image to the view of a region, and drop those that are outside.

    Returns `boxes` (n, 4) float32, `labels` (n,) int64 and `crowd` (n,) bool of the n kept objects, and `masks`
    (n, rows, columns) bool if the target has masks. An object is dropped if less than the share `visible` of its box is
    in the view, or less than a pixel in width or height. Boxes are clipped to the view. If there are masks, a clipped
    box is replaced by the bounding box of the visible mask. If a mask covers no pixel of the view, the pixel at the
    centre of the box is set.
    """
    scale = np.array([region.size[1] / region.width, region.size[0] / region.height] * 2)
    unclipped_boxes = (target.boxes.astype(np.float64) - [region.left, region.top] * 2) * scale
    left, top, right, bottom = region.get_visible_window(target.size)
    boxes = unclipped_boxes.clip([left, top] * 2, [right, bottom] * 2)
    clipped_sizes, unclipped_sizes = boxes[:, 2:] - boxes[:, :2], unclipped_boxes[:, 2:] - unclipped_boxes[:, :2]
    is_kept = (clipped_sizes >= MIN_OBJECT_SIDE - PIXEL_TOLERANCE).all(1) & (
        clipped_sizes.prod(1) >= visible * unclipped_sizes.prod(1) - PIXEL_TOLERANCE
    )
    kept_indices = np.flatnonzero(is_kept)
    objects = {"labels": target.labels[kept_indices], "crowd": target.crowd[kept_indices]}
    if target.layers is None:
        return {"boxes": boxes[kept_indices].astype(np.float32), **objects}
    layers = np.stack([crop_class_map(layer, region, outside_value=0) for layer in target.layers])
    masks = np.zeros((len(kept_indices), *region.size), bool)
    for position, (mask, index) in enumerate(zip(masks, kept_indices, strict=True)):
        mask |= (layers == index + 1).any(0)
        if not mask.any():
            x, y = (boxes[index, :2] + boxes[index, 2:]) / 2
            mask[min(int(y), region.size[0] - 1), min(int(x), region.size[1] - 1)] = True
        elif (np.abs(boxes[index] - unclipped_boxes[index]) > PIXEL_TOLERANCE).any():
            boxes[index] = mask_to_box(masks[position])
    return {"boxes": boxes[kept_indices].astype(np.float32), **objects, "masks": masks}


def rotate_and_flip(values: Tensor, orientation: tuple[bool, ...]) -> Tensor:
    """Rotate and flip a view, (..., h, w), by `orientation`: three flags for a rotation by 90 degrees, a horizontal and
    a vertical flip. If h and w differ, the rotation is omitted."""
    rotate, flip_horizontal, flip_vertical = orientation
    if rotate and values.shape[-1] == values.shape[-2]:
        values = values.rot90(1, (-2, -1))
    values = values.flip(-1) if flip_horizontal else values
    return (values.flip(-2) if flip_vertical else values).contiguous()


def rotate_and_flip_boxes(boxes: Tensor, size: tuple[int, int], orientation: tuple[bool, ...]) -> Tensor:
    """Rotate and flip boxes, (n, 4), as `rotate_and_flip` does with the view. `size` is (rows, columns) of the view."""
    (height, width), (rotate, flip_horizontal, flip_vertical) = size, orientation
    left, top, right, bottom = boxes.unbind(-1)
    if rotate and height == width:
        left, top, right, bottom = top, width - right, bottom, width - left
    if flip_horizontal:
        left, right = width - right, width - left
    if flip_vertical:
        top, bottom = height - bottom, height - top
    return torch.stack([left, top, right, bottom], -1)
