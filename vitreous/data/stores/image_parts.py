"""A store that consists of other stores, such as those of the splits of a dataset."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from vitreous.data.split import Store


@dataclass(frozen=True, eq=False)
class ConcatenatedStore:
    """Store of the images of several stores, in order. `starts` (stores + 1) are the index of the first image of each
    store, and the number of all images."""

    stores: tuple[Store, ...]
    starts: tuple[int, ...]

    def locate(self, index: int) -> tuple[Store, int]:
        """Return the store of an image, and the index of the image in it."""
        position = int(np.searchsorted(self.starts, index, side="right")) - 1
        return self.stores[position], index - self.starts[position]

    def read(self, index: int) -> bytes | np.ndarray:
        """Return the stored bytes of an image file, or pixels (H, W[, C]). Raises DataError."""
        store, local_index = self.locate(index)
        return store.read(local_index)

    def name(self, index: int) -> str:
        """Return the name of an image for messages."""
        store, local_index = self.locate(index)
        return store.name(local_index)

    def update(self, digest: Any, indices: np.ndarray) -> None:
        """Update a hashlib digest with the identities of the images at `indices` (n,)."""
        for position, store in enumerate(self.stores):
            start, stop = self.starts[position : position + 2]
            store.update(digest, indices[(indices >= start) & (indices < stop)] - start)
