"""A detector's outputs as one array, and outputs in chunks.

Engines and exported graphs hand packed outputs on; PyTorch packs, NumPy unpacks. B images, N objects of each, of which
those with score 0 are padding, s the side of a mask inside its box.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

BOX_COLUMNS = 6  # numbers of an object in front of its mask: box, score and label

DETECTION_OUTPUT_NAMES = ("boxes", "scores", "labels", "masks")  # of the arrays, in exported graphs

#: boxes (B, N, 4) float32, scores (B, N) float32, labels (B, N) int64 and, of instances, masks (B, N, s, s) float32
Outputs = tuple[np.ndarray, ...]


def pack_outputs(outputs: tuple[Any, ...]) -> Any:
    """Tensors of a detector, as `Outputs` -> one (B, N, 6) or (B, N, 6 + s * s) float32: box, score, label, mask."""
    import torch

    boxes, scores, labels, *masks = outputs
    parts = [boxes, scores[..., None], labels[..., None], *(mask.flatten(2) for mask in masks)]
    return torch.cat([part.float() for part in parts], -1)


def pack_arrays(outputs: Sequence[np.ndarray]) -> np.ndarray:
    """The same of arrays: (B, N, 6) or (B, N, 6 + s * s) float32."""
    boxes, scores, labels, *masks = outputs
    parts = [boxes, scores[..., None], labels[..., None], *(mask.reshape(*mask.shape[:2], -1) for mask in masks)]
    return np.concatenate([part.astype(np.float32) for part in parts], -1)


def unpack_outputs(rows: np.ndarray) -> Outputs:
    """(B, N, 6) or (B, N, 6 + s * s) float32, as `pack_outputs` makes it -> the arrays.

    Raises ValueError for other widths.
    """
    side = math.isqrt(rows.shape[-1] - BOX_COLUMNS) if rows.shape[-1] >= BOX_COLUMNS else 0
    if rows.shape[-1] != BOX_COLUMNS + side * side:
        raise ValueError(f"{rows.shape[-1]} numbers of an object are no box, score, label and square mask")
    plain = rows[..., :4], rows[..., 4], rows[..., 5].astype(np.int64)
    return (*plain, rows[..., BOX_COLUMNS:].reshape(*rows.shape[:2], side, side)) if side else plain


def compute_in_chunks(compute: Callable[[np.ndarray], np.ndarray], pixels: np.ndarray, size: int) -> np.ndarray:
    """Compute (B, C, *image) pixels in chunks of exactly `size` images, the last one padded; returns (B, ...)."""
    count = len(pixels)
    missing = -count % size
    whole = np.concatenate([pixels, np.zeros((missing, *pixels.shape[1:]), pixels.dtype)]) if missing else pixels
    return np.concatenate([compute(whole[start : start + size]) for start in range(0, len(whole), size)])[:count]
