"""From a split to batches, in an order that is a function of the seed and of the position alone.

A run sees one endless stream: epoch after epoch, each in its own order. Position `i` of the stream is sample
`permutation(n, seed, i // n)[i % n]`, so a run continues anywhere by knowing one integer, nothing is dropped at the
end of an epoch, and a batch may reach over it.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from vitreous.data.augment import Augment
from vitreous.data.keys import key, permutation
from vitreous.data.preprocess import Preprocess
from vitreous.data.sources import Split
from vitreous.errors import DataError, ResourceError

Batch = dict[str, Tensor]
HANG = 120.0  # seconds after which a worker that sends nothing is given up


def stream(samples: int, seed: int, start: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
    """Positions [start, stop) of the stream -> their samples and epochs."""
    position = np.arange(start, stop)
    epochs = position // samples
    order = {int(epoch): _order(samples, seed, int(epoch)) for epoch in np.unique(epochs)}
    return np.array([order[int(e)][i] for e, i in zip(epochs, position % samples, strict=True)], dtype=np.int64), epochs


_order = lru_cache(maxsize=4)(permutation)


@dataclass(frozen=True)
class Feed:
    """Training batches of one split. `cached`: the pictures in memory, (n, C, *image) uint8; None reads files as they come."""

    split: Split
    preprocess: Preprocess
    augment: Augment
    seed: int
    workers: int = 0
    cached: Tensor | None = None

    def batches(self, start: int, stop: int, size: int) -> Iterator[Batch]:
        """Positions [start, stop) in batches of `size`, the last one shorter: images (B, C, *image) in 0..255, labels, samples."""
        spans = [(low, min(low + size, stop)) for low in range(start, stop, size)]
        if self.cached is not None:
            return (self.from_memory(*span) for span in spans)
        return self.from_files(spans)

    def from_memory(self, start: int, stop: int) -> Batch:
        """One batch of pictures in memory, augmented as a whole."""
        assert self.cached is not None
        samples, epochs = stream(len(self.split), self.seed, start, stop)
        images = self.augment.batch(self.cached[torch.from_numpy(samples)], self.keys(samples, epochs))
        return {"images": images, "labels": torch.from_numpy(self.split.labels[samples]), "samples": torch.from_numpy(samples)}

    def from_files(self, spans: Sequence[tuple[int, int]]) -> Iterator[Batch]:
        """Batches of files, decoded and augmented by the workers."""
        for samples, _, images in load(self, Spans(spans, len(self.split), self.seed), self.workers):
            labels = torch.from_numpy(self.split.labels[samples.numpy()])
            yield {"images": images if isinstance(images, Tensor) else torch.stack(complete(images)), "labels": labels, "samples": samples}

    def keys(self, samples: np.ndarray, epochs: np.ndarray) -> np.ndarray:
        """(seed, epoch, sample, view) -> the key of each picture's augmentation."""
        return key(self.seed, epochs, samples, 0)

    def one(self, sample: int, epoch: int) -> Tensor:
        """One decoded and augmented picture, (C, *image) uint8."""
        picture = self.split.picture(sample, self.preprocess.channels)
        return self.augment.picture(picture, self.preprocess, int(self.keys(np.array(sample), np.array(epoch))))


@dataclass(frozen=True)
class Judged:
    """A split for evaluation: every sample once, in order, without chance."""

    split: Split
    preprocess: Preprocess
    workers: int = 0

    def batches(self, size: int) -> Iterator[tuple[Tensor, list[Tensor | DataError]]]:
        """Sample numbers and, for each, its (C, *image) uint8 picture or why there is none."""
        spans = [(low, min(low + size, len(self.split))) for low in range(0, len(self.split), size)]
        for samples, _, images in load(self, Spans(spans), self.workers):
            yield samples, list(images)

    def one(self, sample: int, _: int) -> Tensor:
        """One decoded picture, (C, *image) uint8."""
        return self.preprocess.pixels(self.split.picture(sample, self.preprocess.channels))


@dataclass(frozen=True)
class Spans:
    """Spans of positions -> lists of (sample, epoch); without `samples`, positions are samples."""

    spans: Sequence[tuple[int, int]]
    samples: int = 0
    seed: int = 0

    def __iter__(self) -> Iterator[list[tuple[int, int]]]:
        for start, stop in self.spans:
            if self.samples:
                yield list(zip(*(part.tolist() for part in stream(self.samples, self.seed, start, stop)), strict=True))
            else:
                yield [(sample, 0) for sample in range(start, stop)]

    def __len__(self) -> int:
        return len(self.spans)


class Decoding(Dataset):
    """(sample, epoch) -> the sample, the epoch, and its picture or the DataError that stands for it."""

    def __init__(self, reader: Feed | Judged) -> None:
        self.reader = reader

    def __getitem__(self, place: tuple[int, int]) -> tuple[int, int, Tensor | DataError]:
        try:
            return *place, self.reader.one(*place)
        except DataError as error:
            return *place, error


def collate(rows: list[tuple[int, int, Any]]) -> tuple[Tensor, Tensor, Tensor | list[Any]]:
    """Rows of `Decoding` -> samples, epochs, and the pictures: (B, C, *image), or a list where one is missing.

    One tensor goes from a worker to the main process in one piece of shared memory, a list in one for each.
    """
    samples, epochs, images = zip(*rows, strict=True)
    whole = all(isinstance(image, Tensor) and image.shape == images[0].shape for image in images)
    return torch.tensor(samples), torch.tensor(epochs), torch.stack(images) if whole else list(images)


def leave_signals(worker: int) -> None:
    """In a worker: end on SIGTERM, and leave Ctrl-C to the main process, whatever handlers were inherited."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def load(reader: Feed | Judged, spans: Spans, workers: int) -> Iterator[tuple[Tensor, Tensor, Tensor | list[Any]]]:
    """Decode the spans in order, in `workers` processes. Raises ResourceError where a worker dies or hangs."""
    options = {"timeout": HANG, "prefetch_factor": 4, "worker_init_fn": leave_signals} if workers else {}
    loader = DataLoader(Decoding(reader), batch_sampler=spans, num_workers=workers, collate_fn=collate, **options)
    try:
        yield from loader
    except RuntimeError as error:
        if "DataLoader" not in str(error):
            raise
        raise ResourceError(f"a data worker stopped: {str(error).splitlines()[0]}", "try fewer --workers, or --workers 0") from None


def complete(images: Sequence[Tensor | DataError]) -> list[Tensor]:
    """Pictures of which none may be missing. Raises the first DataError there is."""
    for image in images:
        if isinstance(image, DataError):
            raise image
    return list(images)  # type: ignore[arg-type]
