"""Images together with what is known of their places, kept in memory where they fit: masks take long to read."""

from __future__ import annotations

from typing import Any

import numpy as np

from vitreous.data.annotations.target import AnnotatedSplit, Target
from vitreous.data.decoding.spectral import Picture
from vitreous.data.preprocess import Preprocess
from vitreous.system.machine import free_memory

SHARE = 0.1  # of the memory that is free, for images and targets that are kept


class SceneReader:
    """Reads the images of a split and their class maps; those that are read first stay in memory, as many as fit."""

    def __init__(self, split: AnnotatedSplit, preprocess: Preprocess) -> None:
        self.split, self.preprocess = split, preprocess
        self.scenes: dict[int, tuple[Picture, Target]] = {}
        self.left = SHARE * (free_memory("cpu") or 0)  # bytes

    def read(self, sample: int) -> tuple[Picture, Target]:
        """Read an image, and what is on it: its class map alone, where it has one. Raises DataError."""
        if sample in self.scenes:
            return self.scenes[sample]
        name = self.split.name(sample)
        picture, target = self.preprocess.decoded(self.split.raw(sample), name), self.split.target(sample)
        if target.classes is not None:
            target = target.without_masks().take(np.zeros(0, np.int64))
        size = picture_bytes(picture) + target.nbytes
        if size <= self.left:
            self.left -= size
            self.scenes[sample] = picture, target
        return picture, target

    def __getstate__(self) -> dict[str, Any]:
        """What a worker gets: nothing that is kept, which it would have to be sent."""
        return self.__dict__ | {"scenes": {}}


def picture_bytes(picture: Picture) -> int:
    """Bytes of a decoded image, or of one for each channel."""
    if isinstance(picture, np.ndarray):
        return picture.nbytes
    bands = picture if isinstance(picture, tuple) else (picture,)
    return sum(band.width * band.height * {"L": 1, "RGB": 3}.get(band.mode, 4) for band in bands)
