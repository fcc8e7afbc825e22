"""Segment images and volumes of any size by overlapping tiles of the model's size. Does not import torch.

In shapes, C is channels, K classes, H and W pixels; a volume has D slices as its first axis. If tiles overlap, their
logits are averaged with weights that fall linearly to the edges of each tile. An image smaller than a tile is
mirror-padded. Logits are completed from top to bottom, so memory holds at most the rows that one tile covers.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator

import numpy as np

from vitreous.data.decoding.spectral import DecodedSample
from vitreous.data.modalities.base import image_to_array

TILE_OVERLAP = 0.5  # minimum share of a tile's height and width that the next tile also covers
TILE_BATCH_SIZE = 8  # tiles per forward pass

TileFunction = Callable[[np.ndarray], np.ndarray]  # pixels (B, C, *tile) -> logits (B, K, *tile) float32


def to_native_array(image: DecodedSample) -> np.ndarray:
    """Convert a decoded sample to an array of its native size: an image, or one image per channel, to (C, H, W), a
    volume to (C, D, H, W)."""
    if isinstance(image, np.ndarray):
        return image
    bands = image if isinstance(image, tuple) else (image,)
    return np.concatenate([image_to_array(band) for band in bands])


def segment_by_tiles(compute: TileFunction, pixels: np.ndarray, tile: tuple[int, ...]) -> np.ndarray:
    """Compute the logits (K, *image) float32 of pixels (C, *image) of any size."""
    return np.concatenate(list(iterate_logit_rows(compute, pixels, tile)), 1)


def predict_class_map(compute: TileFunction, pixels: np.ndarray, tile: tuple[int, ...]) -> np.ndarray:
    """Compute the class of each pixel, (*image) int32, from pixels (C, *image) of any size: the argmax of the
    logits."""
    return np.concatenate([logits.argmax(0).astype(np.int32) for logits in iterate_logit_rows(compute, pixels, tile)])


def iterate_logit_rows(compute: TileFunction, pixels: np.ndarray, tile: tuple[int, ...]) -> Iterator[np.ndarray]:
    """Yield the logits of pixels of any size, a few rows at a time from top to bottom.

    Pixels (C, H, W) give float32 logits (K, h, W), h rows at a time; volumes (C, D, H, W) give (K, d, H, W), d slices
    at a time. Raises ValueError if pixels and tile have different numbers of axes.
    """
    if pixels.ndim != len(tile) + 1:
        raise ValueError(f"pixels {pixels.shape} and tile {tile} must have the same number of spatial axes")
    size = tuple(map(max, tile, pixels.shape[1:]))
    padded, weight, height = mirror_pad(pixels, size), build_tent_weights(tile), tile[0]
    tops = list_tile_starts(size[0], height)
    # ranges of tiles along the other axes
    axis_slices = [
        [slice(tile_start, tile_start + tile_length) for tile_start in list_tile_starts(image_length, tile_length)]
        for image_length, tile_length in zip(size[1:], tile[1:], strict=True)
    ]
    tile_slices = list(itertools.product(*axis_slices))
    image_region = tuple(slice(length) for length in pixels.shape[2:])
    total: np.ndarray | None = None
    weights = np.zeros((height, *size[1:]), np.float32)
    for row_index, top in enumerate(tops):
        for start in range(0, len(tile_slices), TILE_BATCH_SIZE):
            batch = tile_slices[start : start + TILE_BATCH_SIZE]
            tiles = np.stack([padded[(slice(None), slice(top, top + height), *slices)] for slices in batch])
            for slices, logits in zip(batch, compute(tiles), strict=True):
                if total is None:
                    total = np.zeros((len(logits), *weights.shape), np.float32)
                total[(slice(None), slice(None), *slices)] += logits * weight
                weights[(slice(None), *slices)] += weight
        assert total is not None
        finished_rows = (tops[row_index + 1] if row_index + 1 < len(tops) else size[0]) - top
        num_rows = min(finished_rows, pixels.shape[1] - top)  # later rows are mirror padding
        yield total[(slice(None), slice(num_rows), *image_region)] / weights[(slice(num_rows), *image_region)]
        total = np.concatenate([total[:, finished_rows:], np.zeros_like(total[:, :finished_rows])], 1)
        weights = np.concatenate([weights[finished_rows:], np.zeros_like(weights[:finished_rows])])


def mirror_pad(pixels: np.ndarray, size: tuple[int, ...]) -> np.ndarray:
    """Mirror-pad pixels (C, *image) at the end of each axis to (C, *size)."""
    padding = [
        (0, max(0, target_length - length)) for target_length, length in zip(size, pixels.shape[1:], strict=True)
    ]
    return np.pad(pixels, [(0, 0), *padding], "symmetric") if any(map(any, padding)) else pixels


def list_tile_starts(length: int, tile: int) -> list[int]:
    """List the starts of tiles along an axis: evenly spaced, with an overlap of at least `TILE_OVERLAP`."""
    steps = -(-(length - tile) // max(1, int(tile * (1 - TILE_OVERLAP))))
    return [round(step * (length - tile) / steps) for step in range(steps + 1)] if steps else [0]


def build_tent_weights(size: tuple[int, ...]) -> np.ndarray:
    """Build the weights of a tile's logits, (h, w) or (d, h, w) float32 in (0, 1]: the product over the axes of the
    distance to the nearer edge."""
    axis_weights = [np.minimum(np.arange(n) + 0.5, n - np.arange(n) - 0.5) / (n / 2) for n in size]
    return functools.reduce(np.multiply, np.ix_(*axis_weights)).astype(np.float32)
