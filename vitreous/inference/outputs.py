"""Packing of a detector's outputs in one array, and computation in fixed-size chunks.

Engines and exported graphs return packed outputs; PyTorch packs, NumPy unpacks. B images with N object slots each
(score 0 is padding), s the side of a mask inside its box.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

BOX_COLUMNS = 6  # columns of an object before its mask: box, score and label

DETECTION_OUTPUT_NAMES = ("boxes", "scores", "labels", "masks")  # output names in exported graphs

#: boxes (B, N, 4) float32, scores (B, N) float32, labels (B, N) int64 and optional masks (B, N, s, s) float32
Outputs = tuple[np.ndarray, ...]


def pack_outputs(outputs: tuple[Any, ...]) -> Any:
    """Pack a detector's outputs, tensors in the order of `Outputs`, into (B, N, 6) or (B, N, 6 + s * s) float32. The
    columns are box, score, label and mask."""
    import torch

    boxes, scores, labels, *masks = outputs
    columns = [boxes, scores[..., None], labels[..., None], *(mask.flatten(2) for mask in masks)]
    return torch.cat([column.float() for column in columns], -1)


def pack_arrays(outputs: Sequence[np.ndarray]) -> np.ndarray:
    """Pack a detector's outputs, arrays in the order of `Outputs`, into (B, N, 6) or (B, N, 6 + s * s) float32."""
    boxes, scores, labels, *masks = outputs
    columns = [boxes, scores[..., None], labels[..., None], *(mask.reshape(*mask.shape[:2], -1) for mask in masks)]
    return np.concatenate([column.astype(np.float32) for column in columns], -1)


def unpack_outputs(packed: np.ndarray) -> Outputs:
    """Unpack (B, N, 6) or (B, N, 6 + s * s) float32 of `pack_outputs` into the arrays of `Outputs`. Raises ValueError
    for another number of columns."""
    mask_size = math.isqrt(packed.shape[-1] - BOX_COLUMNS) if packed.shape[-1] >= BOX_COLUMNS else 0
    if packed.shape[-1] != BOX_COLUMNS + mask_size * mask_size:
        raise ValueError(f"{packed.shape[-1]} columns are not box, score, label and a square mask")
    box_outputs = packed[..., :4], packed[..., 4], packed[..., 5].astype(np.int64)
    return (
        (*box_outputs, packed[..., BOX_COLUMNS:].reshape(*packed.shape[:2], mask_size, mask_size))
        if mask_size
        else box_outputs
    )


def compute_in_chunks(compute: Callable[[np.ndarray], np.ndarray], pixels: np.ndarray, size: int) -> np.ndarray:
    """Compute the outputs (B, ...) of (B, C, *image) pixels in chunks of exactly `size` images, the last one padded
    with black images."""
    count = len(pixels)
    missing = -count % size
    padded = np.concatenate([pixels, np.zeros((missing, *pixels.shape[1:]), pixels.dtype)]) if missing else pixels
    return np.concatenate([compute(padded[start : start + size]) for start in range(0, len(padded), size)])[:count]
