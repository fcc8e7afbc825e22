"""Augmentation that moves an image together with what is known of its places: class maps, masks, boxes."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from typing import ClassVar, Literal

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from vitreous.data.annotations.target import IGNORE, Target
from vitreous.data.decoding.regions import Regions
from vitreous.data.decoding.spectral import Picture, bands_of
from vitreous.data.keys import seeded, uniform
from vitreous.data.preprocess import Preprocess, to_array
from vitreous.errors import UsageError

ROUNDING = 1e-6  # pixels


@dataclass(frozen=True)
class Part:
    """A rectangle of an image in its own pixels, `top`, `left`, `height`, `width`, which may reach outside; and the
    size (rows, columns) that it is scaled to."""

    top: float
    left: float
    height: float
    width: float
    size: tuple[int, int]

    def inside(self, image: tuple[int, ...]) -> tuple[int, int, int, int]:
        """Return left, top, right and bottom of the pixels of the view that lie whole in an image of (height,
        width)."""
        ends = []
        for length, begin, side, pixels in zip(
            image, (self.top, self.left), (self.height, self.width), self.size, strict=True
        ):
            scale = pixels / side
            first = max(0, math.ceil(-begin * scale - ROUNDING))
            ends.append((first, max(first, min(pixels, math.floor((length - begin) * scale + ROUNDING)))))
        (top, bottom), (left, right) = ends
        return left, top, right, bottom


@dataclass(frozen=True)
class Scenes:
    """One view of an image and of its class map: scaled, cut out, flipped, recoloured.

    `scale`: the range of the factor, log-uniform, that the image is scaled by before a part of the model's size is cut
    out at a place drawn evenly; what lies outside the image is black, and IGNORE in the class map. `fit`: factor 1 is
    the image at its own resolution (`native`), or as large as it fits into the model's size (`whole`, large-scale
    jittering of arXiv:2012.07177). `flip` and `flip_vertical` are probabilities; `turn` quarter turns, as often as not.
    `jitter` changes brightness, contrast and saturation by factors within 1 +- x, with `jitter_probability`. Raises
    UsageError for values out of range.
    """

    takes_regions: ClassVar[bool] = False

    scale: tuple[float, float] = (0.5, 2.0)
    fit: Literal["native", "whole"] = "native"
    flip: float = 0.5
    flip_vertical: float = 0.0
    turn: bool = False
    jitter: tuple[float, float, float] = (0.0, 0.0, 0.0)
    jitter_probability: float = 0.8
    name: Literal["scenes"] = "scenes"

    def __post_init__(self) -> None:
        if not 0 < self.scale[0] <= self.scale[1]:
            raise UsageError(f"a scale of {self.scale} is none", "factors are above 0, the low one before the high one")
        if not all(0 <= p <= 1 for p in (self.flip, self.flip_vertical, self.jitter_probability)):
            raise UsageError("flip, flip_vertical and jitter_probability are probabilities")
        if min(self.jitter) < 0:
            raise UsageError("jitter is not below 0")

    def scene(self, picture: Picture, target: Target, preprocess: Preprocess, sample_key: int) -> dict[str, Tensor]:
        """Draw a view: `images` (C, *image) as `Preprocess.pixels` gives it, and `classes` (*image) int32, the class of
        each pixel or IGNORE. `target` has a class map."""
        bands = bands_of(picture)
        draws = uniform(np.array([sample_key], np.uint64), 7)[0]
        part = self.part((bands[0].height, bands[0].width), preprocess.plane, draws[:3])
        turns = self.turn and draws[3] < 0.5, draws[4] < self.flip, draws[5] < self.flip_vertical
        pixels = torch.cat([torch.from_numpy(to_array(cut(band, part, preprocess))) for band in bands])
        if preprocess.numbers == "colours" and any(self.jitter) and draws[6] < self.jitter_probability:
            with seeded(sample_key):
                pixels = recolour(self.jitter)(pixels)
        classes = torch.from_numpy(cut_map(target.class_map(), part))
        return {"images": moved(pixels, turns), "classes": moved(classes, turns)}

    def part(self, size: tuple[int, int], image: tuple[int, int], draws: np.ndarray) -> Part:
        """Return the part of an image of (height, width) `size` that a view of `image` shows, for (3,) float64 numbers
        in [0, 1)."""
        unit = 1.0 if self.fit == "native" else min(wanted / own for wanted, own in zip(image, size, strict=True))
        low, high = map(math.log, self.scale)
        factor = unit * math.exp(low + (high - low) * draws[0])
        sides = image[0] / factor, image[1] / factor
        rooms = [own - side for own, side in zip(size, sides, strict=True)]
        top, left = (min(0.0, room) + abs(room) * draw for room, draw in zip(rooms, draws[1:], strict=True))
        return Part(top, left, *sides, image)

    def collate(self, scenes: list[dict[str, Tensor]], preprocess: Preprocess) -> dict[str, Tensor]:
        """Stack B views of `scene`: `images` (B, C, *image) and `classes` (B, *image) int32; B may be 0."""
        if scenes:
            return {name: torch.stack([scene[name] for scene in scenes]) for name in scenes[0]}
        images = torch.empty(0, preprocess.channels, *preprocess.image, dtype=preprocess.dtype)
        return {"images": images, "classes": torch.empty(0, *preprocess.image, dtype=torch.int32)}

    def picture(self, picture: Picture | Regions, preprocess: Preprocess, sample_key: int) -> Tensor:
        """Raise UsageError: these views, (C, *image), need to know what is where."""
        raise UsageError("views of scenes need annotations", "use other views for images without any")

    def batch(self, pixels: Tensor, keys: np.ndarray) -> Tensor:
        """Raise UsageError for (B, C, *image) images by (B,) keys, as `picture` does."""
        return self.picture(Image.new("L", (1, 1)), Preprocess((1, 1)), 0)

    def unpack(self, rows: Tensor, preprocess: Preprocess) -> dict[str, Tensor]:
        """Return (B, C, *image) as `images`."""
        return {"images": rows}


def cut(band: Image.Image, part: Part, preprocess: Preprocess) -> Image.Image:
    """Resample a part of an image; black where it reaches outside."""
    left, top, right, bottom = part.inside((band.height, band.width))
    whole = Image.new(band.mode, (part.size[1], part.size[0]))
    if right > left and bottom > top:
        x, y = part.width / part.size[1], part.height / part.size[0]
        box = (part.left + left * x, part.top + top * y, part.left + right * x, part.top + bottom * y)
        box = (max(0.0, box[0]), max(0.0, box[1]), min(band.width, box[2]), min(band.height, box[3]))
        filters = {"bilinear": Image.Resampling.BILINEAR, "bicubic": Image.Resampling.BICUBIC}
        whole.paste(band.resize((right - left, bottom - top), filters[preprocess.filter], box), (left, top))
    return whole


def cut_map(classes: np.ndarray, part: Part) -> np.ndarray:
    """(H, W) int32 class map -> (rows, columns) int32: that of the part, each pixel that of the nearest one; IGNORE
    where it reaches outside."""
    rows, columns = part.size
    left, top, right, bottom = part.inside(classes.shape)
    y = np.floor(part.top + (np.arange(top, bottom) + 0.5) * part.height / rows).astype(np.int64)
    x = np.floor(part.left + (np.arange(left, right) + 0.5) * part.width / columns).astype(np.int64)
    whole = np.full(part.size, IGNORE, np.int32)
    whole[top:bottom, left:right] = classes[y[:, None], x[None]]
    return whole


def moved(values: Tensor, turns: tuple[bool, ...]) -> Tensor:
    """(..., h, w) -> the same turned by a quarter and flipped along each axis, as `turns` says; turning is left out
    where sides differ."""
    quarter, flip, vertical = turns
    if quarter and values.shape[-1] == values.shape[-2]:
        values = values.rot90(1, (-2, -1))
    values = values.flip(-1) if flip else values
    return (values.flip(-2) if vertical else values).contiguous()


@cache
def recolour(jitter: tuple[float, float, float]):
    """Compose torchvision's colour jitter of brightness, contrast and saturation."""
    from torchvision.transforms import v2

    return v2.ColorJitter(*jitter)
