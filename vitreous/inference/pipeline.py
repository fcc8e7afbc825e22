"""A pipeline of threads that decodes images and computes outputs concurrently, in order, with at most four chunks of
images in memory.

Files are decoded by threads: Pillow releases the GIL, while processes take seconds to start and need time to transfer
images.
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

PIPELINE_CHUNK = 64  # images per chunk
MAX_CHUNK_BYTES = 2**26  # largest number of bytes of a chunk's images; large images give smaller chunks
PREFETCHED_CHUNKS = 2  # chunks decoded in advance

T = TypeVar("T")  # an item, or an object that contains an item
#: an item, and its output, one row of the batch's output, or its read error
ItemOutput = tuple[Item, np.ndarray | DataError]


def choose_chunk_size(preprocess: Preprocess) -> int:
    """Choose the number of images per chunk, so that their pixels fit in `MAX_CHUNK_BYTES` bytes."""
    return max(1, min(PIPELINE_CHUNK, MAX_CHUNK_BYTES // preprocess.nbytes))


def run_pipeline(
    items: Iterable[T],
    decode: Callable[[T], np.ndarray | DataError],
    compute: Callable[[Any], Any],
    chunk: int = PIPELINE_CHUNK,
) -> Iterator[list[tuple[T, Any]]]:
    """Yield the items with their outputs in order, chunk by chunk.

    `decode` returns the (C, *image) pixels of an item, or its read error, which replaces the output. `compute` maps a
    batch (B, ...) to B outputs; if image sizes differ, it receives a list. An exception of the iterator `items` is
    raised after the outputs of the preceding items. Stopping early leaves no thread running.
    """
    remaining, failure = iter(items), list[Exception]()
    decoding, computing = ThreadPoolExecutor(default_worker_count(), "decode"), ThreadPoolExecutor(1, "compute")
    decoding_chunks: deque[list[tuple[T, Future[np.ndarray | DataError]]]] = deque()
    computing_chunks: deque[Future[list[tuple[T, Any]]]] = deque()

    def submit_decoding() -> None:
        """Submit items for decoding until `PREFETCHED_CHUNKS` chunks are pending; store an exception of the
        iterator."""
        while len(decoding_chunks) < PREFETCHED_CHUNKS and not failure:
            batch: list[tuple[T, Future[np.ndarray | DataError]]] = []
            try:
                batch.extend((item, decoding.submit(decode, item)) for item in islice(remaining, chunk))
            except Exception as error:
                failure.append(error)
            if not batch:
                return
            decoding_chunks.append(batch)

    try:
        submit_decoding()
        while decoding_chunks:
            decoded = [(item, future.result()) for item, future in decoding_chunks.popleft()]
            computing_chunks.append(computing.submit(compute_items, decoded, compute))
            submit_decoding()
            while len(computing_chunks) > bool(decoding_chunks):
                yield computing_chunks.popleft().result()
        if failure:
            raise failure[0]
    finally:
        for pool in (decoding, computing):
            pool.shutdown(cancel_futures=True)


def compute_items(
    decoded: list[tuple[T, np.ndarray | DataError]], compute: Callable[[Any], Any]
) -> list[tuple[T, Any]]:
    """Compute the outputs of decoded items, (C, *image) pixels or a read error each; a read error is returned as the
    output."""
    outputs = iter(
        compute(stack_same_size(readable))
        if (readable := [array for _, array in decoded if isinstance(array, np.ndarray)])
        else ()
    )
    return [(item, next(outputs) if isinstance(pixels, np.ndarray) else pixels) for item, pixels in decoded]


def stack_same_size(images: list[np.ndarray]) -> np.ndarray | list[np.ndarray]:
    """Stack B images (C, *image) of equal size to (B, C, *image); if their sizes differ, return the list."""
    return np.stack(images) if all(image.shape == images[0].shape for image in images) else images
