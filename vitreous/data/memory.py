"""Datasets from images in memory: one array, or lists of arrays, PIL images or paths."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from PIL import Image

from vitreous.data.decoding.decode import decode_to_pillow
from vitreous.data.split import ArraySplit, Data, FileSplit, Split, StoreSplit, create_empty_labels
from vitreous.errors import UsageError

MEMORY_SOURCE_NAME = "memory"  # name of datasets in memory in a run's config


@dataclass(frozen=True, eq=False)
class ImageStore:
    """Store of images in memory whose sizes differ, each (H, W) or (H, W, 3) uint8."""

    images: tuple[np.ndarray, ...]

    def read(self, index: int) -> np.ndarray:
        """Return the pixels of an image, (H, W) or (H, W, 3)."""
        return self.images[index]

    def name(self, index: int) -> str:
        """Return the image's name for messages."""
        return f"image {index}"

    def update(self, digest: Any, indices: np.ndarray) -> None:
        """Update a hashlib digest with the pixels of the images at indices (n,)."""
        for index in indices.tolist():
            digest.update(np.ascontiguousarray(self.images[index]).tobytes())


def create_memory_data(
    images: np.ndarray | Sequence[Any],
    labels: np.ndarray | None = None,
    classes: Sequence[str] = (),
    targets: Sequence[str] = (),
) -> Data:
    """Create a dataset with a training split only.

    `images` are an array (n, H, W) or (n, H, W, C), or a list of arrays (H, W[, C]), PIL images, or paths of files.
    `labels` (n,) int64 are indices in `classes`, or (n, T) float64 values of `targets`; None: no labels. Raises
    UsageError for a list of anything else.
    """
    labels = create_empty_labels(len(images)) if labels is None else labels
    return Data(
        MEMORY_SOURCE_NAME, tuple(classes), {"train": create_memory_split(images, labels)}, targets=tuple(targets)
    )


def create_memory_split(images: np.ndarray | Sequence[Any], labels: np.ndarray) -> Split:
    """Create a split from images as in `create_memory_data`, and labels (n,) int64, (n, K) float32 or (n, T) float64.
    Raises UsageError for a list of anything but arrays, PIL images or paths."""
    if isinstance(images, np.ndarray):
        return ArraySplit(images, labels)
    if all(isinstance(image, str | os.PathLike) for image in images):
        return FileSplit(images, labels)
    arrays = []
    for index, image in enumerate(images):
        if isinstance(image, Image.Image):
            image = np.array(decode_to_pillow(image, 1 if image.mode in ("1", "L") else 3, f"image {index}"))
        if not isinstance(image, np.ndarray):
            problem = f"image {index} has the unsupported type {type(image).__name__}"
            raise UsageError(problem, "pass a list of arrays (H, W[, C]), of PIL images, or of paths; do not mix them")
        arrays.append(image)
    if len({(array.shape, array.dtype) for array in arrays}) == 1:
        return ArraySplit(np.stack(arrays), labels)
    return StoreSplit(ImageStore(tuple(arrays)), np.arange(len(arrays)), labels)
