"""Reading, computing and what comes after, at the same time: order kept, and never more than four chunks of pictures in
memory.

Files are decoded by threads, since Pillow lets go of Python's lock while it works, and processes cost seconds to start
and time to send pictures between.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice
from typing import Any, TypeVar

import numpy as np

from vitreous.data.modalities.base import Preprocess
from vitreous.errors import DataError
from vitreous.inference.sources import Item
from vitreous.system.cores import default_worker_count

PIPELINE_CHUNK = 64  # images that are computed at a time
MAX_CHUNK_BYTES = 2**26  # bytes of the pictures of a chunk, where that is fewer images
PREFETCHED_CHUNKS = 2  # chunks that are decoded before they are asked for

T = TypeVar("T")  # an item, or what stands for it
#: an image, and its row of numbers or why there is none
ItemOutput = tuple[Item, np.ndarray | DataError]


def choose_chunk_size(preprocess: Preprocess) -> int:
    """Images of a chunk, so that its pixels fit in `MAX_CHUNK_BYTES` bytes."""
    return max(1, min(PIPELINE_CHUNK, MAX_CHUNK_BYTES // preprocess.nbytes))


def run_pipeline(
    items: Iterable[T],
    decode: Callable[[T], np.ndarray | DataError],
    compute: Callable[[Any], Any],
    chunk: int = PIPELINE_CHUNK,
) -> Iterator[list[tuple[T, Any]]]:
    """Items -> their answers in order, chunk by chunk: (C, *image) pictures by `decode`, rows of (B, ...) by `compute`,
    which is given a list where pictures differ in size.

    What the items themselves raise is raised behind the answers to those before. Whoever stops early leaves no thread
    behind.
    """
    rest, failure = iter(items), list[Exception]()
    decoding, computing = ThreadPoolExecutor(default_worker_count(), "decode"), ThreadPoolExecutor(1, "compute")
    waiting: deque[list[tuple[T, Future[np.ndarray | DataError]]]] = deque()
    running: deque[Future[list[tuple[T, Any]]]] = deque()

    def fill() -> None:
        while len(waiting) < PREFETCHED_CHUNKS and not failure:
            batch: list[tuple[T, Future[np.ndarray | DataError]]] = []
            try:
                batch.extend((item, decoding.submit(decode, item)) for item in islice(rest, chunk))
            except Exception as error:
                failure.append(error)
            if not batch:
                return
            waiting.append(batch)

    try:
        fill()
        while waiting:
            pictures = [(item, future.result()) for item, future in waiting.popleft()]
            running.append(computing.submit(compute_items, pictures, compute))
            fill()
            while len(running) > bool(waiting):
                yield running.popleft().result()
        if failure:
            raise failure[0]
    finally:
        for pool in (decoding, computing):
            pool.shutdown(cancel_futures=True)


def compute_items(
    pictures: list[tuple[T, np.ndarray | DataError]], compute: Callable[[Any], Any]
) -> list[tuple[T, Any]]:
    """The rows of the images that could be read: (C, *image) each, `compute` maps (B, C, *image) to B rows."""
    rows = iter(
        compute(stack_same_size(good)) if (good := [one for _, one in pictures if isinstance(one, np.ndarray)]) else ()
    )
    return [(item, next(rows) if isinstance(picture, np.ndarray) else picture) for item, picture in pictures]


def stack_same_size(images: list[np.ndarray]) -> np.ndarray | list[np.ndarray]:
    """B images (C, *image) -> (B, C, *image), or as they are where their sizes differ."""
    return np.stack(images) if all(image.shape == images[0].shape for image in images) else images
