"""Logits of many images, the same bits whatever the batches that the images arrive in."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import numpy as np
import torch
from torch import Tensor

from vitreous.data.loader import EvalLoader
from vitreous.errors import DataError
from vitreous.evaluation.engine import Engine

CHUNK = 64  # images that an engine is given at a time


def logits_of(
    engine: Engine, reader: EvalLoader, batch_size: int = CHUNK, each: Callable[[int], None] = lambda images: None
) -> tuple[np.ndarray, dict[int, DataError]]:
    """The (n, K) float32 logits of every picture of a split, in order, and the pictures that could not be read.

    The engine is given CHUNK pictures at a time, however many are decoded at a time: `batch_size` changes nothing but
    memory. The row of an unreadable picture is that of a black one. `each` gets the number of images of every step.
    An empty split gives (0, K).
    """
    rows: list[np.ndarray] = []
    bad: dict[int, DataError] = {}
    for samples, images in chunks(reader.batches(batch_size), CHUNK):
        bad |= {s: image for s, image in zip(samples, images, strict=True) if isinstance(image, DataError)}
        rows.append(answer(engine, images))
        each(len(images))
    return np.concatenate(rows) if rows else answer(engine, [DataError("no image")])[:0], bad


def answer(engine: Engine, images: list[Tensor | DataError]) -> np.ndarray:
    """(n, K) float32 logits of pictures, each (C, *image) uint8; an unreadable one is taken to be black."""
    blank = torch.zeros(engine.preprocess.channels, *engine.preprocess.image, dtype=engine.preprocess.dtype)
    return engine(torch.stack([blank if isinstance(image, DataError) else image for image in images])).numpy()


def chunks(batches: Iterable[tuple[Tensor, list]], size: int) -> Iterator[tuple[list[int], list]]:
    """Batches of any size -> batches of `size`, the last one shorter."""
    samples: list[int] = []
    images: list = []
    for more_samples, more_images in batches:
        samples, images = samples + more_samples.tolist(), images + more_images
        while len(images) >= size:
            yield samples[:size], images[:size]
            samples, images = samples[size:], images[size:]
    if images:
        yield samples, images
