"""Choose the number of decoding processes from the model's throughput, the decoding time of an image and the
machine."""

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
DECODER_HEADROOM = 1.25  # headroom over the decoders that just keep up with a GPU, as images vary
MAX_WORKER_BYTES = 400 * 2**20  # estimated memory of a decoding process


def choose_worker_count(
    split: Split,
    preprocess: Preprocess,
    views: ViewAugmentation,
    rate: float | None = None,
    shares_cores: bool = True,
    exact: bool = False,
) -> int:
    """Choose the number of processes that decode a split for training.

    `rate`: the model's throughput in images/s with all cores and without waiting for data, if it was measured.
    `shares_cores`: the model runs on the same cores. A few images are decoded to measure the decoding time.
    """
    feed = TrainLoader(split, preprocess, views, 0, exact=exact)
    return balance_workers(
        measure_decode_seconds(feed), rate, count_usable_cores(), shares_cores, get_free_memory("cpu")
    )


def measure_decode_seconds(feed: TrainLoader) -> float:
    """Measure the median seconds per image on one core; 0 if no image can be read."""
    threads, began, seconds_each = torch.get_num_threads(), time.perf_counter(), []
    torch.set_num_threads(1)
    try:
        for sample in (
            np.linspace(0, len(feed.split) - 1, min(MAX_TIMED_IMAGES + 1, len(feed.split))).astype(int).tolist()
        ):
            started = time.perf_counter()
            try:
                feed.one(sample, 0, 0)
            except DataError:
                continue
            seconds_each.append(time.perf_counter() - started)
            if time.perf_counter() - began > MAX_TIMING_SECONDS:
                break
    finally:
        torch.set_num_threads(threads)
    return statistics.median(seconds_each[1:] or seconds_each or [0.0])  # the first imports libraries


def balance_workers(seconds: float, rate: float | None, cores: int, shares_cores: bool, room: int) -> int:
    """Balance model and decoders: core-seconds per image, the model's images/s and the machine -> processes, at least
    1.

    If model and decoders share the cores, an image costs cores / rate core-seconds for the model and `seconds` for
    decoding; with all cores busy, the decoders then need rate' * seconds cores. A GPU needs enough decoders to keep up
    with it. `room`, bytes of free memory (0 if unknown), limits both.
    """
    most = min(cores, max(1, room // (2 * MAX_WORKER_BYTES))) if room else cores
    if rate is None:
        return most
    wanted = seconds * cores / (cores / rate + seconds) if shares_cores else seconds * rate * DECODER_HEADROOM
    return max(1, min(most, math.ceil(wanted)))
