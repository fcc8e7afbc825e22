"""The limit of the machine: the most that a product of two large matrices reaches."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from vitreous.bench.work import Turn, Work
from vitreous.machine import DTYPES
from vitreous.nn.frozen import Packed, can_pack

SIZE = {"cpu": 2048, "cuda": 8192}


def peak(work: Work, precision: str) -> Turn:
    """Turns that multiply square matrices and return operations, a multiply-add counted as two.

    On a CPU the faster of PyTorch's own product and oneDNN's packed one counts, chosen when the turn is built.
    """
    kind, dtype = work.device.split(":")[0], DTYPES[precision]
    size = SIZE.get(kind, 2048)
    a, b = (torch.randn(size, size, device=work.device).to(dtype) for _ in range(2))
    ways = [lambda: a @ b]
    if kind == "cpu" and can_pack(dtype):
        packed = Packed(torch.nn.Linear(size, size, bias=False), dtype)
        ways.append(lambda: packed(a))
    fastest = min(ways, key=lambda way: best_of(way, work.device))

    @torch.inference_mode()
    def turn() -> float:
        fastest()
        synchronise(work.device)
        return 2.0 * size**3

    return turn


def best_of(way: Callable[[], object], device: str, times: int = 3) -> float:
    """The shortest of some runs, in seconds, after one to warm up."""
    seconds = []
    with torch.inference_mode():
        for _ in range(times + 1):
            started = time.perf_counter()
            way()
            synchronise(device)
            seconds.append(time.perf_counter() - started)
    return min(seconds[1:])


def synchronise(device: str) -> None:
    """Wait until a GPU has done what it was told."""
    if device.startswith("cuda"):
        torch.cuda.synchronize(device)
