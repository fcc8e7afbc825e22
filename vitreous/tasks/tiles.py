"""A class for every pixel of images and volumes of any size, by tiles of the model's size that overlap. Without torch.

C channels, K classes, H and W pixels; a volume has D slices of them in front. Where tiles overlap, their logits are
averaged with weights that fall linearly to the edges of each; an image smaller than a tile is mirrored at its ends.
Logits are finished from the top downwards, so there are never more in memory than those of the rows that one tile
covers.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator

import numpy as np

from vitreous.data.decoding.spectral import DecodedSample
from vitreous.data.modalities.base import image_to_array

TILE_OVERLAP = 0.5  # share of a tile's side that its neighbour covers too
TILE_BATCH_SIZE = 8  # tiles that are computed at a time

TileFunction = Callable[[np.ndarray], np.ndarray]  # (B, C, *tile) pixels -> (B, K, *tile) float32 logits


def to_native_array(picture: DecodedSample) -> np.ndarray:
    """A decoded image, one for each channel, or a volume -> (C, H, W) or (C, D, H, W), at its own size."""
    if isinstance(picture, np.ndarray):
        return picture
    bands = picture if isinstance(picture, tuple) else (picture,)
    return np.concatenate([image_to_array(band) for band in bands])


def segment_by_tiles(compute: TileFunction, pixels: np.ndarray, tile: tuple[int, ...]) -> np.ndarray:
    """(C, *image) of any size -> (K, *image) float32 logits."""
    return np.concatenate(list(iterate_logit_rows(compute, pixels, tile)), 1)


def predict_class_map(compute: TileFunction, pixels: np.ndarray, tile: tuple[int, ...]) -> np.ndarray:
    """(C, *image) of any size -> (*image) int32: the class of the highest logit of each pixel."""
    return np.concatenate([logits.argmax(0).astype(np.int32) for logits in iterate_logit_rows(compute, pixels, tile)])


def iterate_logit_rows(compute: TileFunction, pixels: np.ndarray, tile: tuple[int, ...]) -> Iterator[np.ndarray]:
    """(C, H, W) -> (K, h, W) float32 logits of h rows at a time, from the top downwards; of (C, D, H, W) those of some
    slices at a time, (K, d, H, W).

    Raises ValueError for pixels of another number of axes than a tile.
    """
    if pixels.ndim != len(tile) + 1:
        raise ValueError(f"pixels {pixels.shape} by tiles of {tile}")
    size = tuple(map(max, tile, pixels.shape[1:]))
    filled, weight, height = mirror_pad(pixels, size), build_tent_weights(tile), tile[0]
    tops = list_tile_starts(size[0], height)
    # what is covered beside the first axis, one slice an axis
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
        last = min(done, pixels.shape[1] - top)  # rows behind are mirrored ones
        yield total[(slice(None), slice(last), *inside)] / weights[(slice(last), *inside)]
        total = np.concatenate([total[:, done:], np.zeros_like(total[:, :done])], 1)
        weights = np.concatenate([weights[done:], np.zeros_like(weights[:done])])


def mirror_pad(pixels: np.ndarray, size: tuple[int, ...]) -> np.ndarray:
    """(C, *image) -> (C, *size): mirrored at the far end of each axis until it is so large."""
    lacking = [(0, max(0, side - length)) for side, length in zip(size, pixels.shape[1:], strict=True)]
    return np.pad(pixels, [(0, 0), *lacking], "symmetric") if any(map(any, lacking)) else pixels


def list_tile_starts(length: int, tile: int) -> list[int]:
    """Where tiles begin along an axis: evenly spread, at most (1 - OVERLAP) of a tile apart."""
    steps = -(-(length - tile) // max(1, int(tile * (1 - TILE_OVERLAP))))
    return [round(step * (length - tile) / steps) for step in range(steps + 1)] if steps else [0]


def build_tent_weights(size: tuple[int, ...]) -> np.ndarray:
    """Weights (h, w) or (d, h, w) float32: the product over the axes of the distance to the nearer edge, above 0, at
    most 1."""
    sides = [np.minimum(np.arange(n) + 0.5, n - np.arange(n) - 0.5) / (n / 2) for n in size]
    return functools.reduce(np.multiply, np.ix_(*sides)).astype(np.float32)
