"""Segmentation of images and volumes of any size by overlapping tiles of the model's size. Does not import torch.

C channels, K classes, H and W pixels; a volume has D slices, as the first axis. Where tiles overlap, their logits are
averaged with weights that fall linearly to the edges of each tile. An image smaller than a tile is mirror-padded.
Logits are completed from top to bottom, so memory holds at most the rows that one tile covers.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator

import numpy as np

from vitreous.data.decoding.spectral import DecodedSample
from vitreous.data.modalities.base import image_to_array

TILE_OVERLAP = 0.5  # share of a tile's side that its neighbour also covers
TILE_BATCH_SIZE = 8  # tiles per forward pass

TileFunction = Callable[[np.ndarray], np.ndarray]  # (B, C, *tile) pixels -> (B, K, *tile) float32 logits


def to_native_array(picture: DecodedSample) -> np.ndarray:
    """Convert a decoded image, one per channel, or a volume to (C, H, W) or (C, D, H, W) at its native size."""
    if isinstance(picture, np.ndarray):
        return picture
    bands = picture if isinstance(picture, tuple) else (picture,)
    return np.concatenate([image_to_array(band) for band in bands])


def segment_by_tiles(compute: TileFunction, pixels: np.ndarray, tile: tuple[int, ...]) -> np.ndarray:
    """Compute (K, *image) float32 logits of pixels (C, *image) of any size."""
    return np.concatenate(list(iterate_logit_rows(compute, pixels, tile)), 1)


def predict_class_map(compute: TileFunction, pixels: np.ndarray, tile: tuple[int, ...]) -> np.ndarray:
    """Compute (*image) int32 classes, the argmax of the logits of each pixel, from (C, *image) of any size."""
    return np.concatenate([logits.argmax(0).astype(np.int32) for logits in iterate_logit_rows(compute, pixels, tile)])


def iterate_logit_rows(compute: TileFunction, pixels: np.ndarray, tile: tuple[int, ...]) -> Iterator[np.ndarray]:
    """Yield (K, h, W) float32 logits of (C, H, W) pixels, h rows at a time from top to bottom; of (C, D, H, W) pixels
    (K, d, H, W), d slices at a time.

    Raises ValueError if pixels and tile have different numbers of axes.
    """
    if pixels.ndim != len(tile) + 1:
        raise ValueError(f"pixels {pixels.shape} and tile {tile} must have the same number of spatial axes")
    size = tuple(map(max, tile, pixels.shape[1:]))
    filled, weight, height = mirror_pad(pixels, size), build_tent_weights(tile), tile[0]
    tops = list_tile_starts(size[0], height)
    # the covered ranges of the other axes, one slice per axis
    sides = [
        [slice(low, low + own) for low in list_tile_starts(side, own)]
        for side, own in zip(size[1:], tile[1:], strict=True)
    ]
    places = list(itertools.product(*sides))
    inside = tuple(slice(length) for length in pixels.shape[2:])
    total: np.ndarray | None = None
    weights = np.zeros((height, *size[1:]), np.float32)
    for number, top in enumerate(tops):
        for begin in range(0, len(places), TILE_BATCH_SIZE):
            part = places[begin : begin + TILE_BATCH_SIZE]
            tiles = np.stack([filled[(slice(None), slice(top, top + height), *place)] for place in part])
            for place, logits in zip(part, compute(tiles), strict=True):
                if total is None:
                    total = np.zeros((len(logits), *weights.shape), np.float32)
                total[(slice(None), slice(None), *place)] += logits * weight
                weights[(slice(None), *place)] += weight
        assert total is not None
        done = (tops[number + 1] if number + 1 < len(tops) else size[0]) - top
        last = min(done, pixels.shape[1] - top)  # later rows are mirror padding
        yield total[(slice(None), slice(last), *inside)] / weights[(slice(last), *inside)]
        total = np.concatenate([total[:, done:], np.zeros_like(total[:, :done])], 1)
        weights = np.concatenate([weights[done:], np.zeros_like(weights[:done])])


def mirror_pad(pixels: np.ndarray, size: tuple[int, ...]) -> np.ndarray:
    """Mirror-pad pixels (C, *image) at the far end of each axis to (C, *size)."""
    lacking = [(0, max(0, side - length)) for side, length in zip(size, pixels.shape[1:], strict=True)]
    return np.pad(pixels, [(0, 0), *lacking], "symmetric") if any(map(any, lacking)) else pixels


def list_tile_starts(length: int, tile: int) -> list[int]:
    """List the starts of tiles along an axis: evenly spaced, at most (1 - OVERLAP) of a tile apart."""
    steps = -(-(length - tile) // max(1, int(tile * (1 - TILE_OVERLAP))))
    return [round(step * (length - tile) / steps) for step in range(steps + 1)] if steps else [0]


def build_tent_weights(size: tuple[int, ...]) -> np.ndarray:
    """Build weights (h, w) or (d, h, w) float32 in (0, 1]: the product over the axes of the distance to the nearer
    edge."""
    sides = [np.minimum(np.arange(n) + 0.5, n - np.arange(n) - 0.5) / (n / 2) for n in size]
    return functools.reduce(np.multiply, np.ix_(*sides)).astype(np.float32)
