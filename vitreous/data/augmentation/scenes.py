"""Augment an image together with its annotations: class maps, masks, boxes."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from typing import ClassVar, Literal

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from vitreous.data.annotations.target import IGNORE_INDEX, Target
from vitreous.data.augmentation.parts import (
    CropRegion,
    crop_class_map,
    crop_image,
    crop_objects,
    rotate_and_flip,
    rotate_and_flip_boxes,
)
from vitreous.data.augmentation.photometric import DISTORTION_DRAWS, distort_colours, measure_largest_class
from vitreous.data.batch import Batch
from vitreous.data.decoding.regions import LazyImage
from vitreous.data.decoding.spectral import DecodedSample, list_bands
from vitreous.data.keys import draw_uniform, fork_torch_rng
from vitreous.data.modalities.base import Preprocess, image_to_array
from vitreous.data.modalities.images import ImagePreprocess
from vitreous.errors import UsageError

STACKED_ENTRIES = ("images", "classes")  # entries of a view that have one size for all images
BASE_DRAWS = 7  # random numbers per view
CROP_ATTEMPTS = 10  # with `max_class_share` below 1


@dataclass(frozen=True)
class SceneViews:
    """One view of an image and of its class map or its objects: scaled, cropped, flipped, colour-jittered.

    `scale`: the range of the factor that the image is scaled by before a crop of the model's size is taken at a
    uniformly drawn position; `scale_spacing`: whether the factor or its logarithm is uniform. At factor 1, the image
    has native resolution (`fit="native"`), fits into the model's size (`whole`, large-scale jittering of
    arXiv:2012.07177), or its short side has the model's size (`short`, mmsegmentation). Outside the image, the crop is
    black or the model's mean (`fill`), and IGNORE in the class map. Objects with less than the share `visible` of their
    box in the crop are dropped.

    `max_class_share` below 1: a crop is drawn again, up to ten times, while one class has at least this share of its
    labelled pixels (mmsegmentation's `cat_max_ratio`).

    `flip` and `flip_vertical` are probabilities; `turn` rotates by 90 degrees with probability 0.5. `jitter` changes
    brightness, contrast and saturation by factors within 1 +- x, and `hue` rotates the hue by up to +- that share of
    the circle: all of them with `jitter_probability` (`jitter_style="torchvision"`), or each with that probability,
    with additive brightness (`mmsegmentation`, `photometric.distort_colours`). Raises UsageError for values out of
    range.
    """

    takes_regions: ClassVar[bool] = False

    scale: tuple[float, float] = (0.5, 2.0)
    scale_spacing: Literal["log", "linear"] = "log"
    fit: Literal["native", "whole", "short"] = "native"
    max_class_share: float = 1.0
    flip: float = 0.5
    flip_vertical: float = 0.0
    turn: bool = False
    jitter: tuple[float, float, float] = (0.0, 0.0, 0.0)
    hue: float = 0.0
    jitter_probability: float = 0.8
    jitter_style: Literal["torchvision", "mmsegmentation"] = "torchvision"
    fill: Literal["black", "mean"] = "black"
    visible: float = 0.1
    name: Literal["scenes"] = "scenes"

    def __post_init__(self) -> None:
        if not 0 < self.scale[0] <= self.scale[1]:
            raise UsageError(f"invalid scale {self.scale}", "use factors above 0, the lower one first")
        if not all(0 <= p <= 1 for p in (self.flip, self.flip_vertical, self.jitter_probability, self.visible)):
            raise UsageError("flip, flip_vertical, jitter_probability and visible must be from 0 to 1")
        if min(self.jitter) < 0 or not 0 <= self.hue <= 0.5:
            raise UsageError(
                f"jitter {self.jitter} and hue {self.hue} are out of range", "use 0 or more; hue up to 0.5"
            )
        if not 0 < self.max_class_share <= 1:
            raise UsageError(f"max_class_share {self.max_class_share} is not a share", "use a number above 0, up to 1")

    def augment_scene(
        self, image: DecodedSample, target: Target, preprocess: Preprocess, sample_key: int
    ) -> dict[str, Tensor]:
        """Draw a view: `images` (C, *image) as from `Preprocess.pixels`, and if `target` has a class map, `classes`
        (*image) int32, the class of each pixel or IGNORE; else `boxes` (n, 4) float32, `labels` (n,) int64, `crowd`
        (n,) bool, and `masks` (n, *image) bool if objects have them."""
        bands = list_bands(image)
        size = bands[0].height, bands[0].width
        draws = draw_uniform(np.array([sample_key], np.uint64), BASE_DRAWS + 2 * CROP_ATTEMPTS + DISTORTION_DRAWS)[0]
        classes = None if target.classes is None else target.class_map()
        region = self.choose_crop_region(size, preprocess.plane, classes, draws[:-DISTORTION_DRAWS])
        orientation = self.turn and draws[3] < 0.5, draws[4] < self.flip, draws[5] < self.flip_vertical
        colours = self.get_fill_colours(preprocess, len(bands))
        crops = [crop_image(band, region, preprocess, colour) for band, colour in zip(bands, colours, strict=True)]
        pixels = torch.cat([torch.from_numpy(image_to_array(band)) for band in crops])
        if preprocess.has_colours and (any(self.jitter) or self.hue):
            pixels = self.jitter_colours(pixels, region.get_visible_window(size), draws, sample_key)
        view = {"images": rotate_and_flip(pixels, orientation)}
        if classes is not None:
            return view | {"classes": rotate_and_flip(torch.from_numpy(crop_class_map(classes, region)), orientation)}
        objects = {name: torch.from_numpy(array) for name, array in crop_objects(target, region, self.visible).items()}
        if "masks" in objects:
            objects["masks"] = rotate_and_flip(objects["masks"], orientation)
        return view | objects | {"boxes": rotate_and_flip_boxes(objects["boxes"], region.size, orientation)}

    def get_fill_colours(self, preprocess: Preprocess, bands: int) -> list[tuple[float, ...]]:
        """Return the fill colour outside the image for each of its Pillow images: values of its channels; empty for
        black."""
        if self.fill == "black":
            return [()] * bands
        mean = tuple(value * preprocess.peak for value in preprocess.mean)
        return [mean] if bands == 1 else [(value,) for value in mean]

    def jitter_colours(
        self, pixels: Tensor, inside_box: tuple[int, int, int, int], draws: np.ndarray, sample_key: int
    ) -> Tensor:
        """Jitter the colours of a view (C, h, w) by its draws; in mmsegmentation's style only in `inside_box`, the
        (left, top, right, bottom) of the image in the view."""
        if self.jitter_style == "mmsegmentation":
            left, top, right, bottom = inside_box
            if right > left and bottom > top:
                area = pixels[:, top:bottom, left:right]
                area = distort_colours(area, self.jitter, self.hue, self.jitter_probability, draws[-DISTORTION_DRAWS:])
                pixels[:, top:bottom, left:right] = area
            return pixels
        if draws[6] < self.jitter_probability:
            with fork_torch_rng(sample_key):
                pixels = create_colour_jitter(self.jitter, self.hue)(pixels)
        return pixels

    def choose_crop_region(
        self, size: tuple[int, int], image: tuple[int, int], classes: np.ndarray | None, draws: np.ndarray
    ) -> CropRegion:
        """Choose the region of an image of (height, width) `size` for a view of `image`; drawn again while one class of
        the map `classes` (H, W) has too large a share of it."""
        region = self.draw_crop_region(size, image, draws[:3])
        if classes is None or self.max_class_share >= 1:
            return region
        for positions in draws[BASE_DRAWS:].reshape(CROP_ATTEMPTS, 2):
            if measure_largest_class(crop_class_map(classes, region), IGNORE_INDEX) < self.max_class_share:
                break
            region = self.draw_crop_region(size, image, np.array([draws[0], *positions]))
        return region

    def draw_crop_region(self, size: tuple[int, int], image: tuple[int, int], draws: np.ndarray) -> CropRegion:
        """Return the region of an image of (height, width) `size` for a view of `image`, from (3,) float64 numbers in
        [0, 1)."""
        ratios = [target_length / length for target_length, length in zip(image, size, strict=True)]
        base_scale = {"native": 1.0, "whole": min(ratios), "short": max(ratios)}[self.fit]
        low, high = self.scale
        if self.scale_spacing == "linear":
            factor = base_scale * (low + (high - low) * draws[0])
        else:
            factor = base_scale * math.exp(math.log(low) + (math.log(high) - math.log(low)) * draws[0])
        region_size = image[0] / factor, image[1] / factor
        margins = [length - extent for length, extent in zip(size, region_size, strict=True)]
        top, left = (min(0.0, margin) + abs(margin) * draw for margin, draw in zip(margins, draws[1:], strict=True))
        return CropRegion(top, left, *region_size, image)

    def collate(self, scenes: list[dict[str, Tensor]], preprocess: Preprocess) -> Batch:
        """Collate B views of `augment_scene`: `images` (B, C, *image) and `classes` (B, *image) int32 are stacked,
        object entries are lists of B; B may be 0."""
        if scenes:
            columns = {name: [scene[name] for scene in scenes] for name in scenes[0]}
            return {
                name: torch.stack(column) if name in STACKED_ENTRIES else column for name, column in columns.items()
            }
        images = torch.empty(0, preprocess.channels, *preprocess.image, dtype=preprocess.dtype)
        return {"images": images, "classes": torch.empty(0, *preprocess.image, dtype=torch.int32)}

    def augment_image(self, image: DecodedSample | LazyImage, preprocess: Preprocess, sample_key: int) -> Tensor:
        """Raise UsageError: these views, (C, *image), need annotations."""
        raise UsageError("scene views need annotations", "use other views for images without annotations")

    def augment_batch(self, pixels: Tensor, keys: np.ndarray) -> Tensor:
        """Raise UsageError for (B, C, *image) images by (B,) keys, as `augment_image` does."""
        return self.augment_image(Image.new("L", (1, 1)), ImagePreprocess((1, 1)), 0)

    def unpack_batch(self, entries: Tensor, preprocess: Preprocess) -> dict[str, Tensor]:
        """Return (B, C, *image) as `images`."""
        return {"images": entries}


@cache
def create_colour_jitter(jitter: tuple[float, float, float], hue: float):
    """Compose torchvision's colour jitter of brightness, contrast, saturation and hue."""
    from torchvision.transforms import v2

    return v2.ColorJitter(*jitter, hue)
