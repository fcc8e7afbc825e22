"""From a split to batches: the stream's positions, decoded and augmented, in this process or in workers."""

from __future__ import annotations

import signal
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from vitreous.data.augment import Augment
from vitreous.data.keys import key
from vitreous.data.preprocess import Preprocess
from vitreous.data.sampling import Order, stream
from vitreous.data.split import Split, picture_of
from vitreous.errors import DataError, ResourceError

Batch = dict[str, Tensor]
HANG = 120.0  # seconds after which a worker that sends nothing is given up


@dataclass(frozen=True)
class Feed:
    """Training batches of one split. `cached`: the pictures in memory, (n, C, *image) uint8; None reads files as they come.

    `sampling` balanced shows every class as often as any other; `repeats` is how often a picture is shown in an epoch, in so
    many views (`Order` has both). Raises UsageError for balanced sampling of images with several labels.
    """

    split: Split
    preprocess: Preprocess
    augment: Augment
    seed: int
    workers: int = 0
    cached: Tensor | None = None
    sampling: Literal["even", "balanced"] = "even"
    repeats: int = 1

    def __post_init__(self) -> None:
        _ = self.order

    @cached_property
    def order(self) -> Order:
        """Which picture stands at which position."""
        return Order(len(self.split), self.seed, self.split.labels if self.sampling == "balanced" else None, self.repeats)

    def batches(self, start: int, stop: int, size: int) -> Iterator[Batch]:
        """Positions [start, stop) in batches of `size`, the last one shorter."""
        return self.spans((low, min(low + size, stop)) for low in range(start, stop, size))

    def spans(self, spans: Iterable[tuple[int, int]]) -> Iterator[Batch]:
        """A batch for each (start, stop) of positions: images (B, C, *image) in 0..255, labels, samples.

        A span may be empty, and its batch is then. `spans` is read as batches are asked for, a few ahead where there are
        workers; it may have no end.
        """
        if self.cached is not None:
            return (self.from_memory(*span) for span in spans)
        return self.from_files(spans)

    def from_memory(self, start: int, stop: int) -> Batch:
        """One batch of pictures in memory, augmented as a whole."""
        assert self.cached is not None
        samples, epochs, views = stream(self.order, start, stop)
        images = self.augment.batch(self.cached[torch.from_numpy(samples)], self.keys(samples, epochs, views))
        return {"images": images, "labels": torch.from_numpy(self.split.labels[samples]), "samples": torch.from_numpy(samples)}

    def from_files(self, spans: Iterable[tuple[int, int]]) -> Iterator[Batch]:
        """Batches of files, decoded and augmented by the workers."""
        places = (list(zip(*(part.tolist() for part in stream(self.order, *span)), strict=True)) for span in spans)
        for samples, images in load(self, places, self.workers):
            labels = torch.from_numpy(self.split.labels[samples.numpy()])
            if not isinstance(images, Tensor):
                none = torch.empty(0, self.preprocess.channels, *self.preprocess.image, dtype=torch.uint8)
                images = torch.stack(complete(images)) if images else none
            yield {"images": images, "labels": labels, "samples": samples}

    def keys(self, samples: int | np.ndarray, epochs: int | np.ndarray, views: int | np.ndarray) -> np.ndarray:
        """(seed, epoch, sample, view) -> the key of each picture's augmentation."""
        return key(self.seed, epochs, samples, views)

    def one(self, sample: int, epoch: int, view: int) -> Tensor:
        """One decoded and augmented picture, (C, *image) uint8."""
        picture = picture_of(self.split, sample, self.preprocess.channels)
        return self.augment.picture(picture, self.preprocess, int(self.keys(sample, epoch, view)))


@dataclass(frozen=True)
class Judged:
    """A split for evaluation: every sample once, in order, without chance."""

    split: Split
    preprocess: Preprocess
    workers: int = 0

    def batches(self, size: int) -> Iterator[tuple[Tensor, list[Tensor | DataError]]]:
        """Sample numbers and, for each, its (C, *image) uint8 picture or why there is none."""
        places = ([(sample,) for sample in range(low, min(low + size, len(self.split)))] for low in range(0, len(self.split), size))
        for samples, images in load(self, places, self.workers):
            yield samples, list(images)

    def one(self, sample: int) -> Tensor:
        """One decoded picture, (C, *image) uint8."""
        return self.preprocess.pixels(picture_of(self.split, sample, self.preprocess.channels))


class Decoding(Dataset):
    """(sample, epoch, view), or (sample,) -> the sample, and its picture or the DataError that stands for it."""

    def __init__(self, reader: Feed | Judged) -> None:
        self.reader = reader

    def __getitem__(self, place: tuple[int, ...]) -> tuple[int, Tensor | DataError]:
        try:
            return place[0], self.reader.one(*place)
        except DataError as error:
            return place[0], error


def collate(rows: list[tuple[int, Any]]) -> tuple[Tensor, Tensor | list[Any]]:
    """Rows of `Decoding` -> samples, and the pictures: (B, C, *image), or a list where one is missing.

    One tensor goes from a worker to the main process in one piece of shared memory, a list in one for each.
    """
    if not rows:
        return torch.empty(0, dtype=torch.int64), []
    samples, images = zip(*rows, strict=True)
    whole = all(isinstance(image, Tensor) and image.shape == images[0].shape for image in images)
    return torch.tensor(samples), torch.stack(images) if whole else list(images)


def leave_signals(worker: int) -> None:
    """In a worker: end on SIGTERM, and leave Ctrl-C to the main process, whatever handlers were inherited."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def load(reader: Feed | Judged, places: Iterable[list[tuple[int, ...]]], workers: int) -> Iterator[tuple[Tensor, Tensor | list[Any]]]:
    """Decode lists of places in order, in `workers` processes. Raises ResourceError where a worker dies or hangs."""
    options = {"timeout": HANG, "prefetch_factor": 4, "worker_init_fn": leave_signals} if workers else {}
    loader = DataLoader(Decoding(reader), batch_sampler=places, num_workers=workers, collate_fn=collate, **options)
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
