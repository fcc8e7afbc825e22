"""Crop a region of an image with its annotations: pixels, class maps, boxes and masks get the same transform."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from vitreous.data.annotations.target import IGNORE_INDEX, Target, mask_to_box
from vitreous.data.modalities.base import Preprocess

PIXEL_TOLERANCE = 1e-6  # pixels
MIN_OBJECT_SIDE = 1.0  # minimum width and height of an object, in pixels


@dataclass(frozen=True)
class CropRegion:
    """A rectangle of an image in source pixels, `top`, `left`, `height`, `width`, which may extend outside; and the
    size (rows, columns) that it is resized to."""

    top: float
    left: float
    height: float
    width: float
    size: tuple[int, int]

    def inside(self, image: tuple[int, ...]) -> tuple[int, int, int, int]:
        """Return left, top, right and bottom of the view's pixels that are completely inside an image of (height,
        width)."""
        ends = []
        for length, begin, side, pixels in zip(
            image, (self.top, self.left), (self.height, self.width), self.size, strict=True
        ):
            scale = pixels / side
            first = max(0, math.ceil(-begin * scale - PIXEL_TOLERANCE))
            ends.append((first, max(first, min(pixels, math.floor((length - begin) * scale + PIXEL_TOLERANCE)))))
        (top, bottom), (left, right) = ends
        return left, top, right, bottom


def crop_image(
    band: Image.Image, part: CropRegion, preprocess: Preprocess, colour: tuple[float, ...] = ()
) -> Image.Image:
    """Resample a region of an image; outside the image, fill with `colour`, by default black."""
    left, top, right, bottom = part.inside((band.height, band.width))
    numbers = tuple(colour) if band.mode == "F" else tuple(map(round, colour))
    fill = 0 if not numbers else numbers[0] if len(numbers) == 1 else numbers
    whole = Image.new(band.mode, (part.size[1], part.size[0]), fill)
    if right > left and bottom > top:
        x, y = part.width / part.size[1], part.height / part.size[0]
        box = (part.left + left * x, part.top + top * y, part.left + right * x, part.top + bottom * y)
        box = (max(0.0, box[0]), max(0.0, box[1]), min(band.width, box[2]), min(band.height, box[3]))
        whole.paste(band.resize((right - left, bottom - top), preprocess.resampling, box), (left, top))
    return whole


def crop_class_map(classes: np.ndarray, part: CropRegion, outside: int = IGNORE_INDEX) -> np.ndarray:
    """Crop an (H, W) int32 class map to (rows, columns) int32 by nearest neighbours; `outside` beyond the image."""
    rows, columns = part.size
    left, top, right, bottom = part.inside(classes.shape)
    y = np.floor(part.top + (np.arange(top, bottom) + 0.5) * part.height / rows).astype(np.int64)
    x = np.floor(part.left + (np.arange(left, right) + 0.5) * part.width / columns).astype(np.int64)
    whole = np.full(part.size, outside, np.int32)
    whole[top:bottom, left:right] = classes[y[:, None], x[None]]
    return whole


def crop_objects(target: Target, part: CropRegion, visible: float) -> dict[str, np.ndarray]:
    """Return the remaining objects in a region: `boxes` (n, 4) float32, `labels` (n,) int64, `crowd` (n,) bool, and
    `masks` (n, rows, columns) bool if every object of the target has one.

    A box is clipped to the view; if masks exist, a clipped box is the bounding box of the remaining mask. An object is
    dropped if less than the share `visible` of its box remains, or less than a pixel in width or height. An object too
    small to cover a pixel of the view gets the pixel at the centre of its box as mask.
    """
    scale = np.array([part.size[1] / part.width, part.size[0] / part.height] * 2)
    whole = (target.boxes.astype(np.float64) - [part.left, part.top] * 2) * scale
    left, top, right, bottom = part.inside(target.size)
    boxes = whole.clip([left, top] * 2, [right, bottom] * 2)
    sides, before = boxes[:, 2:] - boxes[:, :2], whole[:, 2:] - whole[:, :2]
    stays = (sides >= MIN_OBJECT_SIDE - PIXEL_TOLERANCE).all(1) & (
        sides.prod(1) >= visible * before.prod(1) - PIXEL_TOLERANCE
    )
    rows = np.flatnonzero(stays)
    objects = {"labels": target.labels[rows], "crowd": target.crowd[rows]}
    if target.layers is None:
        return {"boxes": boxes[rows].astype(np.float32), **objects}
    layers = np.stack([crop_class_map(layer, part, outside=0) for layer in target.layers])
    masks = np.zeros((len(rows), *part.size), bool)
    for place, (mask, row) in enumerate(zip(masks, rows, strict=True)):
        mask |= (layers == row + 1).any(0)
        if not mask.any():
            x, y = (boxes[row, :2] + boxes[row, 2:]) / 2
            mask[min(int(y), part.size[0] - 1), min(int(x), part.size[1] - 1)] = True
        elif (np.abs(boxes[row] - whole[row]) > PIXEL_TOLERANCE).any():
            boxes[row] = mask_to_box(masks[place])
    return {"boxes": boxes[rows].astype(np.float32), **objects, "masks": masks}


def rotate_and_flip(values: Tensor, turns: tuple[bool, ...]) -> Tensor:
    """Rotate (..., h, w) by 90 degrees and flip it along each axis, as set in `turns`; without rotation if h and w
    differ."""
    quarter, flip, vertical = turns
    if quarter and values.shape[-1] == values.shape[-2]:
        values = values.rot90(1, (-2, -1))
    values = values.flip(-1) if flip else values
    return (values.flip(-2) if vertical else values).contiguous()


def rotate_and_flip_boxes(boxes: Tensor, size: tuple[int, int], turns: tuple[bool, ...]) -> Tensor:
    """Transform (n, 4) boxes on a view of (rows, columns) in the same way as `rotate_and_flip`."""
    (height, width), (quarter, flip, vertical) = size, turns
    left, top, right, bottom = boxes.unbind(-1)
    if quarter and height == width:
        left, top, right, bottom = top, width - right, bottom, width - left
    if flip:
        left, right = width - right, width - left
    if vertical:
        top, bottom = height - bottom, height - top
    return torch.stack([left, top, right, bottom], -1)
