"""Choose the number of worker processes that decode training images, from the model's throughput, the decoding time of
an image, and the cores and memory of the machine."""

from __future__ import annotations

import math
import statistics
import time

import numpy as np
import torch

from vitreous.data.augmentation.augment import ViewAugmentation
from vitreous.data.loader import TrainLoader
from vitreous.data.modalities.base import Preprocess
from vitreous.data.split import Split
from vitreous.errors import DataError
from vitreous.system.cores import count_usable_cores
from vitreous.system.machine import get_free_memory

MAX_TIMED_IMAGES = 12  # maximum images to time
MAX_TIMING_SECONDS = 2.0  # time limit of the measurement
DECODER_HEADROOM = 1.25  # factor on the decoders that keep up with a GPU on average, as decoding times vary
MAX_WORKER_BYTES = 400 * 2**20  # estimated memory of a decoding process


def choose_worker_count(
    split: Split,
    preprocess: Preprocess,
    views: ViewAugmentation,
    throughput: float | None = None,
    shares_cores: bool = True,
    exact: bool = False,
) -> int:
    """Choose the number of processes that decode a split for training.

    `throughput`: the model's throughput in images/s with all cores and without waiting for data, if it was measured.
    `shares_cores`: the model runs on the CPU cores that decode. A few images are decoded to measure the decoding
    time.
    """
    loader = TrainLoader(split, preprocess, views, 0, exact=exact)
    return balance_workers(
        measure_decode_seconds(loader), throughput, count_usable_cores(), shares_cores, get_free_memory("cpu")
    )


def measure_decode_seconds(loader: TrainLoader) -> float:
    """Measure the median time of decoding and augmenting an image on one core, in seconds; 0 if no image can be
    read."""
    threads, start_time, seconds_each = torch.get_num_threads(), time.perf_counter(), []
    torch.set_num_threads(1)
    try:
        for sample in (
            np.linspace(0, len(loader.split) - 1, min(MAX_TIMED_IMAGES + 1, len(loader.split))).astype(int).tolist()
        ):
            image_start = time.perf_counter()
            try:
                loader.load_sample(sample, 0, 0)
            except DataError:
                continue
            seconds_each.append(time.perf_counter() - image_start)
            if time.perf_counter() - start_time > MAX_TIMING_SECONDS:
                break
    finally:
        torch.set_num_threads(threads)
    return statistics.median(seconds_each[1:] or seconds_each or [0.0])  # the first imports libraries


def balance_workers(seconds: float, throughput: float | None, cores: int, shares_cores: bool, free_bytes: int) -> int:
    """Return the number of decoding processes, at least 1, that balances the speed of model and decoders.

    `seconds` is the decoding time of an image, `throughput` the model's images/s (None: all cores decode). If model and
    decoders share the cores, an image costs cores / throughput core-seconds in the model and `seconds` for decoding.
    With all cores busy, the decoders need the share seconds / (cores / throughput + seconds) of the cores. A model on a
    GPU needs seconds * throughput cores, times DECODER_HEADROOM. `free_bytes`, the free memory (0 if unknown), limits
    the number in either case.
    """
    max_workers = min(cores, max(1, free_bytes // (2 * MAX_WORKER_BYTES))) if free_bytes else cores
    if throughput is None:
        return max_workers
    num_decoders = (
        seconds * cores / (cores / throughput + seconds) if shares_cores else seconds * throughput * DECODER_HEADROOM
    )
    return max(1, min(max_workers, math.ceil(num_decoders)))
