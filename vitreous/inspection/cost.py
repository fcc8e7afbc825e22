"""Inference cost of a model by input size: throughput, largest batch, memory (arXiv:2010.11929, D.5 and Fig. 12)."""

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

DEFAULT_IMAGE_SIZES = (64, 128, 224, 384, 512)  # as in the paper
MAX_TRIED_BATCH_SIZE = 4096  # largest batch size that is tried or reported
MAX_CPU_BATCH_SIZE = 64  # largest batch size on a CPU: larger ones are not faster
CPU_MEMORY_SHARE = 0.8  # share of a CPU's free memory that a batch may use
TIMING_SECONDS = 0.2  # seconds of repeated passes per batch size


@dataclass
class InferenceCost:
    """Cost at one input size: `image` in pixels, and for one image its `tokens`, `macs` and peak `memory` in bytes.

    `memory` excludes the model. `rate`: images/s by batch size. `largest`: the largest batch, at most
    `MAX_TRIED_BATCH_SIZE`: measured if `tried` (GPU), else estimated for `CPU_MEMORY_SHARE` of the free memory, 0 if
    unknown.
    """

    image: tuple[int, ...]
    tokens: int
    macs: int
    memory: int
    _: KW_ONLY
    rate: dict[int, float] = field(default_factory=dict)
    largest: int = 0
    tried: bool = False

    @property
    def best(self) -> tuple[int, float]:
        """The fastest batch size, and its images/s."""
        return max(self.rate.items(), key=lambda pair: pair[1], default=(0, 0.0))


def round_image_sizes(model: VisionModel[Any], wanted: Sequence[int] = DEFAULT_IMAGE_SIZES) -> list[tuple[int, ...]]:
    """Round `wanted` pixels to square image sizes that are multiples of the patch, without duplicates; clips and
    volumes get the model's frames and slices, signals get lengths."""
    own, patch = model.config.image[:-2], model.config.patch[-2:]
    return sorted({(*own, *(max(1, round(size / p)) * p for p in patch)) for size in wanted})


def measure_inference_costs(
    model: VisionModel[Any], wanted: Sequence[tuple[int, ...]], batches: Sequence[int] = (), seconds: float = 60.0
) -> Iterator[InferenceCost]:
    """Yield the cost of forward passes of black images of these sizes, in evaluation mode, on the model's device.

    `batches` are the batch sizes, without those that do not fit in memory; by default powers of two, with an equal
    share of `seconds` per size. Sizes for which one image would exceed the remaining time are skipped.
    """
    left, pace = seconds, 0.0
    for number, image in enumerate(wanted):
        work = model.config.macs(image)
        if not batches and 3 * work * pace > left:  # three passes: memory, warm-up and timing
            return
        began = time.perf_counter()
        cost = measure_inference_cost(model, image, batches, left / (len(wanted) - number))
        left -= time.perf_counter() - began
        pace = max(pace, 1 / (cost.best[1] * work)) if cost.rate else pace
        yield cost


def measure_inference_cost(
    model: VisionModel[Any], image: tuple[int, ...], batches: Sequence[int], seconds: float
) -> InferenceCost:
    """Measure the cost of one size, in about `seconds` unless `batches` are set."""
    c, own = model.config, next(model.parameters())
    tokens = c.prefix + math.prod(-(-side // p) for side, p in zip(image, c.patch, strict=True))
    black = torch.zeros(1, c.channels, *image, device=own.device, dtype=own.dtype)
    began = time.perf_counter()
    with eval_mode(model):
        one = trace_memory_by_operation(model, black)
        cost = InferenceCost(image, tokens, c.macs(image), max(one))
        gpu, free = own.is_cuda, get_free_memory(str(own.device))
        if not gpu:
            two = trace_memory_by_operation(model, black.expand(2, *black.shape[1:]).contiguous())
            cost.largest = find_max_batch_size(int(CPU_MEMORY_SHARE * free), one, two)
        cost.tried = gpu
        room = MAX_TRIED_BATCH_SIZE if gpu else cost.largest or MAX_CPU_BATCH_SIZE
        for size in batches or list_powers_of_two(room if gpu else min(room, MAX_CPU_BATCH_SIZE)):
            spent = time.perf_counter() - began
            late = not batches and not gpu and spent + 2 * estimate_pass_seconds(cost.rate, size) > seconds
            if size > room or late:
                continue
            rate = measure_forward_throughput(model, black.expand(size, *black.shape[1:]))
            if rate is None:
                break
            cost.rate[size] = rate
            cost.largest = max(cost.largest, size) if gpu else cost.largest
    return cost


def estimate_pass_seconds(rate: Mapping[int, float], size: int) -> float:
    """Estimate the seconds of a pass of `size` images from the timed ones, 0 without any: a constant plus a time per
    image, from the last two; from a single one in proportion."""
    points = [(0, 0.0), *((images, images / speed) for images, speed in sorted(rate.items()))][-2:]
    (few, short), (many, long) = points[0], points[-1]
    return long + (size - many) * max(0.0, long - short) / max(1, many - few)


def list_powers_of_two(most: int) -> list[int]:
    """Return 1, 2, 4, ... up to `most`."""
    return [2**n for n in range(max(1, most).bit_length())]


def measure_forward_throughput(model: VisionModel[Any], images: Tensor) -> float | None:
    """Measure images/s of the fastest pass of (B, C, *image) after a warm-up, within `TIMING_SECONDS`; None if out of
    memory."""
    cuda, best, began = images.is_cuda, float("inf"), 0.0
    try:
        images = images.contiguous()
        for number in range(100):
            started = time.perf_counter()
            model(images)
            if cuda:
                torch.cuda.synchronize(images.device)
            ended = time.perf_counter()
            if number:
                best = min(best, ended - started)
            began = began or ended
            if number and ended - began > TIMING_SECONDS:
                break
    except torch.OutOfMemoryError:
        torch.cuda.empty_cache()
        return None
    return len(images) / best


def trace_memory_by_operation(model: VisionModel[Any], images: Tensor) -> list[int]:
    """Return the bytes of tensors after each operation of a pass of (B, C, *image), with images, without parameters.

    Buffers inside kernels are not counted, nor is rounding of the allocator.
    """
    known = [tensor.untyped_storage() for tensor in (*model.parameters(), *model.buffers())]
    with LiveMemoryTracker(known) as alive:
        alive.see(images)
        model(images)
    return alive.after


def find_max_batch_size(room: int, one: list[int], two: list[int]) -> int:
    """Return the largest batch, at most `MAX_TRIED_BATCH_SIZE`, whose pass uses at most `room` bytes after any
    operation.

    Extrapolates from passes of one and of two images: memory that both use, such as standardised weights, does not grow
    with the batch.
    """
    if len(one) != len(two):  # different operations: assume that everything grows with the batch
        return min(MAX_TRIED_BATCH_SIZE, room // max(one))
    growth = [second - first for first, second in zip(one, two, strict=True)]
    fits = [(room - first + more) // more for first, more in zip(one, growth, strict=True) if more > 0]
    return max(0, min([MAX_TRIED_BATCH_SIZE, *fits])) if room >= max(one) else 0


class LiveMemoryTracker(TorchDispatchMode):
    """Counts the bytes of storages that are allocated and not yet freed: `after` each operation, and their `peak`."""

    def __init__(self, known: list[Any]) -> None:
        super().__init__()
        self.now = 0
        self.after: list[int] = []
        self.seen: dict[int, Any] = {storage.data_ptr(): storage for storage in known}

    @property
    def peak(self) -> int:
        """The largest number of bytes after any operation."""
        return max(self.after, default=0)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operation and count its outputs."""
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, Tensor):
                self.see(leaf)
        self.after.append(self.now)
        return out

    def see(self, tensor: Tensor) -> None:
        """Count the storage of a tensor of any shape until it is freed, if it is new."""
        storage = tensor.untyped_storage()
        place, size = storage.data_ptr(), storage.nbytes()
        if place not in self.seen and size:
            self.now += size
            self.seen[place] = weakref.ref(storage, lambda _: self.release_storage(place, size))

    def release_storage(self, place: int, size: int) -> None:
        """Subtract a freed storage."""
        del self.seen[place]
        self.now -= size
