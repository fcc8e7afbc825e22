"""A class for every pixel of images of any size, by tiles of the model's size that overlap. Without torch.

C channels, K classes, H and W pixels. Where tiles overlap, their logits are averaged with weights that fall linearly to
the edges of each; an image smaller than a tile is mirrored at its ends. Logits are finished from the top downwards, so
there are never more in memory than those of the rows that one tile covers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from vitreous.data.decoding.spectral import Picture
from vitreous.data.preprocess import to_array

OVERLAP = 0.5  # share of a tile's side that its neighbour covers too
TOGETHER = 8  # tiles that are computed at a time

Compute = Callable[[np.ndarray], np.ndarray]  # (B, C, *tile) pixels -> (B, K, *tile) float32 logits


def native_pixels(picture: Picture) -> np.ndarray:
    """A decoded image, or one for each channel -> (C, H, W), at its own size."""
    bands = picture if isinstance(picture, tuple) else (picture,)
    return np.concatenate([to_array(band) for band in bands])


def segment(compute: Compute, pixels: np.ndarray, tile: tuple[int, int]) -> np.ndarray:
    """(C, H, W) of any size -> (K, H, W) float32 logits."""
    return np.concatenate(list(finished_rows(compute, pixels, tile)), 1)


def class_map(compute: Compute, pixels: np.ndarray, tile: tuple[int, int]) -> np.ndarray:
    """(C, H, W) of any size -> (H, W) int32: the class of the highest logit of each pixel."""
    return np.concatenate([logits.argmax(0).astype(np.int32) for logits in finished_rows(compute, pixels, tile)])


def finished_rows(compute: Compute, pixels: np.ndarray, tile: tuple[int, int]) -> Iterator[np.ndarray]:
    """(C, H, W) -> (K, h, W) float32 logits of h rows at a time, from the top downwards."""
    height, width = tile
    size = (max(height, pixels.shape[1]), max(width, pixels.shape[2]))
    filled, weight = mirror(pixels, size), tent(tile)
    tops, lefts = starts(size[0], height), starts(size[1], width)
    total, weights = None, np.zeros((height, size[1]), np.float32)
    for number, top in enumerate(tops):
        for begin in range(0, len(lefts), TOGETHER):
            part = lefts[begin : begin + TOGETHER]
            tiles = np.stack([filled[:, top : top + height, left : left + width] for left in part])
            for left, logits in zip(part, compute(tiles), strict=True):
                if total is None:
                    total = np.zeros((len(logits), height, size[1]), np.float32)
                total[:, :, left : left + width] += logits * weight
                weights[:, left : left + width] += weight
        assert total is not None
        done = (tops[number + 1] if number + 1 < len(tops) else size[0]) - top
        last = min(done, pixels.shape[1] - top)  # rows behind are mirrored ones
        yield total[:, :last, : pixels.shape[2]] / weights[:last, : pixels.shape[2]]
        total = np.concatenate([total[:, done:], np.zeros_like(total[:, :done])], 1)
        weights = np.concatenate([weights[done:], np.zeros_like(weights[:done])])


def mirror(pixels: np.ndarray, size: tuple[int, int]) -> np.ndarray:
    """(C, H, W) -> (C, *size): mirrored at the lower and right end until it is so large."""
    lacking = [(0, max(0, side - length)) for side, length in zip(size, pixels.shape[1:], strict=True)]
    return np.pad(pixels, [(0, 0), *lacking], "symmetric") if any(map(any, lacking)) else pixels


def starts(length: int, tile: int) -> list[int]:
    """Where tiles begin along an axis: evenly spread, at most (1 - OVERLAP) of a tile apart."""
    steps = -(-(length - tile) // max(1, int(tile * (1 - OVERLAP))))
    return [round(step * (length - tile) / steps) for step in range(steps + 1)] if steps else [0]


def tent(size: tuple[int, int]) -> np.ndarray:
    """(h, w) float32 weights: the product over the axes of the distance to the nearer edge, above 0, at most 1."""
    sides = [np.minimum(np.arange(n) + 0.5, n - np.arange(n) - 0.5) / (n / 2) for n in size]
    return (sides[0][:, None] * sides[1][None]).astype(np.float32)
