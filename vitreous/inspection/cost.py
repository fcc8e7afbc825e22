"""Inference cost of a model by image size: throughput, largest batch size and memory (arXiv:2010.11929, D.5 and Fig.
12).

B batch, C channels.
"""

from __future__ import annotations

import math
import time
import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from vitreous.inspection.hooks import eval_mode
from vitreous.models.base import VisionModel
from vitreous.system.machine import get_free_memory

DEFAULT_IMAGE_SIZES = (64, 128, 224, 384, 512)  # sides in pixels, as in the paper
MAX_TRIED_BATCH_SIZE = 4096  # largest batch size that is tried or reported
MAX_CPU_BATCH_SIZE = 64  # largest batch size on a CPU: larger ones are not faster
CPU_MEMORY_SHARE = 0.8  # share of a CPU's free memory that a batch may use
TIMING_SECONDS = 0.2  # seconds of repeated forward passes per batch size


@dataclass
class InferenceCost:
    """Inference cost at one image size.

    - `image`: the image size in pixels; `tokens` and `macs`: tokens and multiply-adds of one image.
    - `memory`: peak memory of a pass of one image in bytes, without the model.
    - `throughputs`: images/s by batch size.
    - `largest_batch_size`: the largest batch size, at most `MAX_TRIED_BATCH_SIZE`. If `is_measured` (on a GPU), it was
      run; otherwise it is estimated for `CPU_MEMORY_SHARE` of the free memory, 0 if unknown.
    """

    image: tuple[int, ...]
    tokens: int
    macs: int
    memory: int
    _: KW_ONLY
    throughputs: dict[int, float] = field(default_factory=dict)
    largest_batch_size: int = 0
    is_measured: bool = False

    @property
    def find_fastest(self) -> tuple[int, float]:
        """Return the batch size with the highest throughput, and its images/s."""
        return max(self.throughputs.items(), key=lambda pair: pair[1], default=(0, 0.0))


def round_image_sizes(model: VisionModel[Any], sizes: Sequence[int] = DEFAULT_IMAGE_SIZES) -> list[tuple[int, ...]]:
    """Round `sizes`, in pixels, to square image sizes that are multiples of the patch, without duplicates.

    For clips and volumes, the model's frames or slices are added in front; for signals, the sizes are lengths.
    """
    leading_axes, patch = model.config.image[:-2], model.config.patch[-2:]
    return sorted({(*leading_axes, *(max(1, round(size / p)) * p for p in patch)) for size in sizes})


def measure_inference_costs(
    model: VisionModel[Any], image_sizes: Sequence[tuple[int, ...]], batches: Sequence[int] = (), seconds: float = 60.0
) -> Iterator[InferenceCost]:
    """Measure forward passes of black images of several sizes, in evaluation mode and on the model's device, and yield
    the cost at each size.

    `batches` are the batch sizes to measure, of which those that do not fit into memory are skipped; by default they
    are powers of two. `seconds` is the total time, of which each size gets an equal share. Measurement ends at the
    first size whose single image would exceed the remaining time.
    """
    remaining, seconds_per_mac = seconds, 0.0
    for index, image in enumerate(image_sizes):
        macs = model.config.macs(image)
        if not batches and 3 * macs * seconds_per_mac > remaining:  # three passes: memory, warm-up and timing
            return
        began = time.perf_counter()
        cost = measure_inference_cost(model, image, batches, remaining / (len(image_sizes) - index))
        remaining -= time.perf_counter() - began
        seconds_per_mac = (
            max(seconds_per_mac, 1 / (cost.find_fastest[1] * macs)) if cost.throughputs else seconds_per_mac
        )
        yield cost


def measure_inference_cost(
    model: VisionModel[Any], image: tuple[int, ...], batches: Sequence[int], seconds: float
) -> InferenceCost:
    """Measure the cost at one image size, in about `seconds` unless `batches` are set."""
    config, parameter = model.config, next(model.parameters())
    tokens = config.prefix + math.prod(-(-length // p) for length, p in zip(image, config.patch, strict=True))
    black_image = torch.zeros(1, config.channels, *image, device=parameter.device, dtype=parameter.dtype)
    began = time.perf_counter()
    with eval_mode(model):
        single_trace = trace_memory_by_operation(model, black_image)
        cost = InferenceCost(image, tokens, config.macs(image), max(single_trace))
        is_gpu, free_bytes = parameter.is_cuda, get_free_memory(str(parameter.device))
        if not is_gpu:
            pair_trace = trace_memory_by_operation(model, black_image.expand(2, *black_image.shape[1:]).contiguous())
            cost.largest_batch_size = find_max_batch_size(int(CPU_MEMORY_SHARE * free_bytes), single_trace, pair_trace)
        cost.is_measured = is_gpu
        batch_limit = MAX_TRIED_BATCH_SIZE if is_gpu else cost.largest_batch_size or MAX_CPU_BATCH_SIZE
        for size in batches or list_powers_of_two(batch_limit if is_gpu else min(batch_limit, MAX_CPU_BATCH_SIZE)):
            elapsed = time.perf_counter() - began
            exceeds_time = (
                not batches and not is_gpu and elapsed + 2 * estimate_pass_seconds(cost.throughputs, size) > seconds
            )
            if size > batch_limit or exceeds_time:
                continue
            throughput = measure_forward_throughput(model, black_image.expand(size, *black_image.shape[1:]))
            if throughput is None:
                break
            cost.throughputs[size] = throughput
            cost.largest_batch_size = max(cost.largest_batch_size, size) if is_gpu else cost.largest_batch_size
    return cost


def estimate_pass_seconds(throughputs: Mapping[int, float], size: int) -> float:
    """Estimate the seconds of a pass of `size` images from measured throughputs (batch size -> images/s); 0 if there
    are none.

    The time is a constant plus a time per image, fitted to the two largest batch sizes; for a single batch size, it is
    proportional to the number of images.
    """
    points = [(0, 0.0), *((images, images / speed) for images, speed in sorted(throughputs.items()))][-2:]
    (few_images, few_seconds), (many_images, many_seconds) = points[0], points[-1]
    return many_seconds + (size - many_images) * max(0.0, many_seconds - few_seconds) / max(1, many_images - few_images)


def list_powers_of_two(maximum: int) -> list[int]:
    """Return 1, 2, 4, ... up to `maximum`."""
    return [2**n for n in range(max(1, maximum).bit_length())]


def measure_forward_throughput(model: VisionModel[Any], images: Tensor) -> float | None:
    """Measure the images/s of the fastest of several passes of images (B, C, *image), after a warm-up, within
    `TIMING_SECONDS`; None if out of memory."""
    is_cuda, best_seconds, began = images.is_cuda, float("inf"), 0.0
    try:
        images = images.contiguous()
        for pass_index in range(100):
            started = time.perf_counter()
            model(images)
            if is_cuda:
                torch.cuda.synchronize(images.device)
            ended = time.perf_counter()
            if pass_index:
                best_seconds = min(best_seconds, ended - started)
            began = began or ended
            if pass_index and ended - began > TIMING_SECONDS:
                break
    except torch.OutOfMemoryError:
        torch.cuda.empty_cache()
        return None
    return len(images) / best_seconds


def trace_memory_by_operation(model: VisionModel[Any], images: Tensor) -> list[int]:
    """Return the bytes of all live tensors after each operation of a pass of images (B, C, *image), including the
    images, without parameters.

    Buffers inside kernels and rounding of the allocator are not counted.
    """
    weight_storages = [tensor.untyped_storage() for tensor in (*model.parameters(), *model.buffers())]
    with LiveMemoryTracker(weight_storages) as tracker:
        tracker.track_storage(images)
        model(images)
    return tracker.live_bytes_history


def find_max_batch_size(available_bytes: int, single_trace: list[int], pair_trace: list[int]) -> int:
    """Return the largest batch size, at most `MAX_TRIED_BATCH_SIZE`, whose pass uses at most `available_bytes` after
    every operation.

    It is extrapolated from the traces of `trace_memory_by_operation` for one and for two images: memory that both use,
    such as standardised weights, does not grow with the batch.
    """
    if len(single_trace) != len(pair_trace):  # different operations: assume that everything grows with the batch
        return min(MAX_TRIED_BATCH_SIZE, available_bytes // max(single_trace))
    growth = [pair_bytes - single_bytes for single_bytes, pair_bytes in zip(single_trace, pair_trace, strict=True)]
    batch_sizes = [
        (available_bytes - single_bytes + bytes_per_image) // bytes_per_image
        for single_bytes, bytes_per_image in zip(single_trace, growth, strict=True)
        if bytes_per_image > 0
    ]
    return max(0, min([MAX_TRIED_BATCH_SIZE, *batch_sizes])) if available_bytes >= max(single_trace) else 0


class LiveMemoryTracker(TorchDispatchMode):
    """Context that counts the bytes of storages that are allocated and not yet freed, except for the given `storages`.

    `live_bytes_history` has the bytes after each operation, `peak` their maximum.
    """

    def __init__(self, storages: list[Any]) -> None:
        super().__init__()
        self.now = 0
        self.live_bytes_history: list[int] = []
        self.tracked_storages: dict[int, Any] = {storage.data_ptr(): storage for storage in storages}

    @property
    def peak(self) -> int:
        """Return the largest number of bytes after any operation."""
        return max(self.live_bytes_history, default=0)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation and count the storages of its outputs."""
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, Tensor):
                self.track_storage(leaf)
        self.live_bytes_history.append(self.now)
        return out

    def track_storage(self, tensor: Tensor) -> None:
        """Count the storage of a tensor, of any shape, until it is freed, unless it is already counted."""
        storage = tensor.untyped_storage()
        address, size = storage.data_ptr(), storage.nbytes()
        if address not in self.tracked_storages and size:
            self.now += size
            self.tracked_storages[address] = weakref.ref(storage, lambda _: self.release_storage(address, size))

    def release_storage(self, address: int, size: int) -> None:
        """Subtract the bytes of a freed storage."""
        del self.tracked_storages[address]
        self.now -= size
