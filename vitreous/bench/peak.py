"""The limit of the machine: the most that a product of two large matrices reaches."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from vitreous.bench.work import Turn, Work
from vitreous.machine import DTYPES, team
from vitreous.nn.frozen import Packed, can_pack

SIZE = {"cpu": 2048, "cuda": 8192}


def peak(work: Work, precision: str) -> Turn:
    """Turns that multiply square matrices and return operations, a multiply-add counted as two.

    On a CPU the fastest of three ways counts, chosen when the turn is built: PyTorch's own product, oneDNN's packed one, and
    every core with a product of its own.
    """
    kind, dtype = work.device.split(":")[0], DTYPES[precision]
    size = SIZE.get(kind, 2048)
    a, b = (torch.randn(size, size, device=work.device).to(dtype) for _ in range(2))
    once = 2.0 * size**3
    ways: list[tuple[Callable[[], object], float]] = [(lambda: a @ b, once)]
    if kind == "cpu":
        if can_pack(dtype):
            packed = Packed(torch.nn.Linear(size, size, bias=False), dtype)
            ways.append((lambda: packed(a), once))
        threads = torch.get_num_threads()
        ways.append((lambda: list(team(threads).map(torch.matmul, [a] * threads, [b] * threads)), threads * once))
    fastest, operations = min(ways, key=lambda way: best_of(way[0], work.device) / way[1])

    @torch.inference_mode()
    def turn() -> float:
        fastest()
        synchronise(work.device)
        return operations

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
