"""Augment images together with their annotations, for semantic segmentation, instance segmentation and detection."""

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

STACKED_ENTRIES = ("images", "classes")  # entries of a view that have the same shape for all images
BASE_DRAWS = 7  # random numbers of a view, without those for repeated crops and for colour distortion
CROP_ATTEMPTS = 10  # maximum number of repeated crops if `max_class_share` is below 1


@dataclass(frozen=True)
class SceneViews:
    """Settings for augmenting an annotated image to one view: scaled, cropped, rotated, flipped, with changed colours.

    The image is scaled by a random factor, and a crop of the model's input size is taken at a uniform random position.
    `scale` is the range of the factor, log-uniform or, with `scale_spacing="linear"`, uniform. `fit` defines factor 1:
    native resolution (`native`); the complete image fits into the input size (`whole`, large-scale jittering of
    arXiv:2012.07177); or the shorter side has the input size (`short`, as in mmsegmentation). Pixels outside the image
    are black or the mean of the preprocessing (`fill`), and IGNORE in the class map. An object is dropped if less than
    the share `visible` of its box is in the crop.

    If `max_class_share` is below 1, a crop is drawn again, up to ten times, while one class has at least this share of
    its labelled pixels (mmsegmentation's `cat_max_ratio`).

    `flip` and `flip_vertical` are probabilities; `turn` enables a rotation by 90 degrees with probability 0.5. `jitter`
    are the strengths x of brightness, contrast and saturation, whose factors are within 1 +- x. `hue` is the maximum
    rotation of the hue, as a share of the circle. With `jitter_style="torchvision"`, all colour changes are applied
    together with `jitter_probability`. With `mmsegmentation`, each is applied with that probability, and brightness is
    added (`photometric.distort_colours`). Raises UsageError for values out of range.
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
        for name in ("flip", "flip_vertical", "jitter_probability", "visible"):
            if not 0 <= getattr(self, name) <= 1:
                raise UsageError(f"{name} {getattr(self, name)} is out of range", "use a value from 0 to 1")
        if min(self.jitter) < 0 or not 0 <= self.hue <= 0.5:
            raise UsageError(
                f"jitter {self.jitter} and hue {self.hue} are out of range",
                "use jitter of at least 0, and a hue from 0 to 0.5",
            )
        if not 0 < self.max_class_share <= 1:
            raise UsageError(f"max_class_share {self.max_class_share} is out of range", "use a number above 0, up to 1")

    def augment_scene(
        self, image: DecodedSample, target: Target, preprocess: Preprocess, sample_key: int
    ) -> dict[str, Tensor]:
        """Draw a random view of an image and its annotations, determined by `sample_key`.

        Returns `images` (C, *image) in the dtype of `Preprocess.to_array`. If `target` has a class map, also `classes`
        (*image) int32, the class index of each pixel or IGNORE. Otherwise also the n visible objects: `boxes` (n, 4)
        float32, `labels` (n,) int64, `crowd` (n,) bool, and `masks` (n, *image) bool if `target` has masks. *image is
        (height, width) of the model's input.
        """
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
        """Return the fill colour of pixels outside the image, for each of the `bands` PIL images of a sample: one
        value per channel, or () for black."""
        if self.fill == "black":
            return [()] * bands
        mean = tuple(value * preprocess.peak for value in preprocess.mean)
        return [mean] if bands == 1 else [(value,) for value in mean]

    def jitter_colours(
        self, pixels: Tensor, inside_box: tuple[int, int, int, int], draws: np.ndarray, sample_key: int
    ) -> Tensor:
        """Change the colours of a view (C, h, w) uint8, by its random numbers `draws`. In mmsegmentation's style, only
        pixels of the source image are changed: those in `inside_box`, (left, top, right, bottom) in the view."""
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
        self, image_size: tuple[int, int], view_size: tuple[int, int], classes: np.ndarray | None, draws: np.ndarray
    ) -> CropRegion:
        """Choose the region of an image that becomes the view. If `classes` (H, W), the class map, is not None, draw
        again while one class has `max_class_share` of the region. Sizes are (height, width)."""
        region = self.draw_crop_region(image_size, view_size, draws[:3])
        if classes is None or self.max_class_share >= 1:
            return region
        for positions in draws[BASE_DRAWS:].reshape(CROP_ATTEMPTS, 2):
            if measure_largest_class(crop_class_map(classes, region), IGNORE_INDEX) < self.max_class_share:
                break
            region = self.draw_crop_region(image_size, view_size, np.array([draws[0], *positions]))
        return region

    def draw_crop_region(
        self, image_size: tuple[int, int], view_size: tuple[int, int], draws: np.ndarray
    ) -> CropRegion:
        """Draw the region of an image that becomes the view. `draws` (3,) float64 in [0, 1) determine scale, top and
        left. Sizes are (height, width)."""
        ratios = [view_length / length for view_length, length in zip(view_size, image_size, strict=True)]
        base_scale = {"native": 1.0, "whole": min(ratios), "short": max(ratios)}[self.fit]
        low, high = self.scale
        if self.scale_spacing == "linear":
            factor = base_scale * (low + (high - low) * draws[0])
        else:
            factor = base_scale * math.exp(math.log(low) + (math.log(high) - math.log(low)) * draws[0])
        region_size = view_size[0] / factor, view_size[1] / factor
        margins = [length - extent for length, extent in zip(image_size, region_size, strict=True)]
        top, left = (min(0.0, margin) + abs(margin) * draw for margin, draw in zip(margins, draws[1:], strict=True))
        return CropRegion(top, left, *region_size, view_size)

    def collate(self, scenes: list[dict[str, Tensor]], preprocess: Preprocess) -> Batch:
        """Collate B results of `augment_scene` to a batch: `images` (B, C, *image) and `classes` (B, *image) int32 are
        stacked; entries of objects become lists of length B. B may be 0."""
        if scenes:
            columns = {name: [scene[name] for scene in scenes] for name in scenes[0]}
            return {
                name: torch.stack(column) if name in STACKED_ENTRIES else column for name, column in columns.items()
            }
        images = torch.empty(0, preprocess.channels, *preprocess.image, dtype=preprocess.dtype)
        return {"images": images, "classes": torch.empty(0, *preprocess.image, dtype=torch.int32)}

    def augment_image(self, image: DecodedSample | LazyImage, preprocess: Preprocess, sample_key: int) -> Tensor:
        """Raise UsageError: a view (C, *image) cannot be drawn without annotations."""
        raise UsageError("scene views need images with annotations", "omit --views.name")

    def augment_batch(self, pixels: Tensor, keys: np.ndarray) -> Tensor:
        """Raise UsageError: views of images (B, C, *image) with (B,) keys cannot be drawn without annotations."""
        return self.augment_image(Image.new("L", (1, 1)), ImagePreprocess((1, 1)), 0)

    def unpack_batch(self, entries: Tensor, preprocess: Preprocess) -> dict[str, Tensor]:
        """Return the batch {"images": entries}, of shape (B, C, *image)."""
        return {"images": entries}


@cache
def create_colour_jitter(jitter: tuple[float, float, float], hue: float):
    """Create torchvision's ColorJitter; `jitter` are the strengths of brightness, contrast and saturation."""
    from torchvision.transforms import v2

    return v2.ColorJitter(*jitter, hue)
