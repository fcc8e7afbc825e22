"""The limit of the machine: the most that a product of two large matrices reaches."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import lru_cache

import torch

from vitreous.nn.frozen import Packed, can_pack
from vitreous.system.cores import synchronise
from vitreous.system.machine import DTYPES, has_bf16, thread_pool

QUICK = {"cpu": 1024, "cuda": 8192}  # sides of the matrices, small enough that measuring takes a fraction of a second
EMULATED = 128  # where bfloat16 is: a thousandth of the speed


@lru_cache(maxsize=4)
def quick_peak(device: str, precision: str) -> float:
    """Operations a second, a multiply-add counted as two; measured once a process, in a fraction of a second."""
    emulated = precision == "bf16" and not has_bf16(device)
    product, operations = fastest(device, precision, EMULATED if emulated else QUICK.get(device.split(":")[0], 1024))
    return operations / best_of(product, device)


def fastest(device: str, precision: str, size: int) -> tuple[Callable[[], object], float]:
    """The fastest way here to multiply square matrices of a side, and its operations.

    On a CPU it is one of three: PyTorch's own product, oneDNN's packed one, and every core with a product of its own.
    """
    dtype = DTYPES[precision]
    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    once = 2.0 * size**3
    ways: list[tuple[Callable[[], object], float]] = [(lambda: a @ b, once)]
    if device == "cpu":
        if can_pack(dtype):
            packed = Packed(torch.nn.Linear(size, size, bias=False), dtype)
            ways.append((lambda: packed(a), once))
        threads = torch.get_num_threads()
        ways.append(
            (lambda: list(thread_pool(threads).map(torch.matmul, [a] * threads, [b] * threads)), threads * once)
        )
    return min(ways, key=lambda product: best_of(product[0], device) / product[1])


def best_of(product: Callable[[], object], device: str, times: int = 3) -> float:
    """The shortest of some runs, in seconds, after one to warm up."""
    seconds = []
    with torch.inference_mode():
        for _ in range(times + 1):
            started = time.perf_counter()
            product()
            synchronise(device)
            seconds.append(time.perf_counter() - started)
    return min(seconds[1:])
