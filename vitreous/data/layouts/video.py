"""Clips as folders of frames: `[SPLIT/]CLASS/CLIP/*.jpg`. The frames of one clip, in the order of their names, are one
sample.

`Split.raw` may give pixels of any number of axes: an image (H, W[, C]), a clip (T, H, W, C). Nothing else about a
split changes; what takes images only refuses a clip by its axes. Video files themselves are not read yet.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from itertools import chain, groupby
from pathlib import Path
from typing import Any

import numpy as np

from vitreous.data.decoding.decode import decode
from vitreous.data.layouts.folder import folder
from vitreous.data.split import Data, Files, Paths, Split, with_val
from vitreous.errors import DataError, printable


@dataclass(frozen=True)
class Clips:
    """Frames of n clips: those of clip i are `paths[bounds[i]:bounds[i + 1]]`, of which `frames` are taken, evenly
    spread. `bounds`, (n + 1,) int64; `labels`, (n,) int64."""

    paths: Paths
    bounds: np.ndarray
    labels: np.ndarray
    frames: int

    def __len__(self) -> int:
        return len(self.bounds) - 1

    def chosen(self, sample: int) -> np.ndarray:
        """The places of a clip's frames in `paths`, (T,) int64: the middle of each of T equal parts of it."""
        first, count = int(self.bounds[sample]), int(self.bounds[sample + 1] - self.bounds[sample])
        return first + ((2 * np.arange(self.frames) + 1) * count) // (2 * self.frames)

    def raw(self, sample: int) -> np.ndarray:
        """(T, H, W, 3) uint8. Raises DataError for a frame that cannot be read, or one of another size than the
        first."""
        pictures = [decode(self.paths[int(place)]) for place in self.chosen(sample)]
        sizes = {picture.size for picture in pictures}
        if len(sizes) > 1:
            raise DataError(f"{self.name(sample)}: its frames are of {len(sizes)} sizes", "make them one size")
        return np.stack([np.asarray(picture) for picture in pictures])

    def name(self, sample: int) -> str:
        return printable(self.paths[int(self.bounds[sample])].parent)

    def take(self, rows: np.ndarray, labels: np.ndarray | None = None) -> Clips:
        spans = [(int(self.bounds[row]), int(self.bounds[row + 1])) for row in rows]
        paths = Paths(self.paths.word(place) for place in chain.from_iterable(range(*span) for span in spans))
        bounds = np.cumsum([0, *(stop - start for start, stop in spans)], dtype=np.int64)
        return replace(self, paths=paths, bounds=bounds, labels=self.labels[rows] if labels is None else labels)

    def update(self, digest: Any) -> None:
        digest.update(f"{self.frames} frames\n".encode() + self.bounds.tobytes())
        Files(self.paths, self.labels).update(digest)


def clips(root: Path, frames: int = 16, split_seed: int = 0) -> Data:
    """A folder of classes of folders of frames, as clips of T = `frames` each; a tenth of the clips is `val` where
    there is none.

    Raises DataError as a folder of images does.
    """
    data = folder(root, split_seed)
    parts = {name: split for name, split in data.splits.items() if name != "val"} if data.whole else data.splits
    parts = {**parts, "train": data.whole or parts["train"]}
    splits: dict[str, Split] = {name: clips_of(part, frames) for name, part in parts.items() if isinstance(part, Files)}
    notes: list[str] = []
    splits, whole = with_val(splits, split_seed, notes)
    return replace(data, splits=splits, notes=notes or data.notes, whole=whole)


def clips_of(split: Files, frames: int) -> Clips:
    """Frames of one folder, which stand together in a split -> one clip."""
    homes = groupby(range(len(split)), key=lambda row: os.path.dirname(os.fspath(split.paths[row])))
    starts = [next(iter(rows)) for _, rows in homes]
    bounds = np.array([*starts, len(split)], dtype=np.int64)
    assert isinstance(split.paths, Paths)
    return Clips(split.paths, bounds, split.labels[bounds[:-1]], frames)
