"""Time, FLOPs and utilisation of a run, relative to the measured peak throughput of matrix products."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass, field
from functools import lru_cache

import torch

from vitreous.nn.frozen import PackedLinear, can_pack
from vitreous.system.cores import get_peak_memory, synchronize_device
from vitreous.system.machine import DTYPES, get_thread_pool, has_bf16
from vitreous.training.loop import TrainingState
from vitreous.training.ranks import Ranks


@dataclass
class ThroughputMeter:
    """Measures the time and FLOPs of a run over all its processes and resumptions. `begin` starts the clock of this
    process.

    FLOPs are those of the model: three forward passes per image, two FLOPs per multiply-add. Patches and pixels dropped
    by patch dropout and progressive resolution, and recomputation, are not counted. Utilisation is FLOP/s relative to
    the measured peak of matrix products on all devices in the run's precision.
    """

    ranks: Ranks
    device: str
    precision: str
    _: KW_ONLY
    earlier_seconds: float = 0.0  # seconds of the run before its last resumption
    peak_flops: float = float("nan")  # measured peak FLOP/s of one device
    started: float = field(default_factory=time.perf_counter)
    # at the last mark: clock, images, FLOPs, and seconds waited for data
    mark_time: tuple[float, int, float, float] = (0.0, 0, 0.0, 0.0)
    rates: list[tuple[float, float]] = field(default_factory=list)  # images/s and utilisation, one per log line

    def begin(self, state: TrainingState) -> None:
        """Measure the peak throughput of the device, and start the clock."""
        self.peak_flops = measure_peak_flops(self.device, self.precision)
        self.started = time.perf_counter()
        self.mark(state)

    @property
    def seconds(self) -> float:
        """Wall time of the run so far in seconds, including the time before its last resumption."""
        return self.earlier_seconds + time.perf_counter() - self.started

    def mark(self, state: TrainingState) -> None:
        """Start a new measurement interval now, from the counters of `state`; the next `line` reports it. Call it after
        an evaluation, so that its time is not counted."""
        self.mark_time = (time.perf_counter(), state.images, state.flops, state.waited)

    def line(self, state: TrainingState) -> dict[str, float]:
        """Return the metrics of the interval since the last mark, for a line of metrics.jsonl, and start a new
        interval."""
        start_time, images, flops, waited = self.mark_time
        elapsed = max(time.perf_counter() - start_time, 1e-9)
        images_per_second, utilisation = (
            (state.images - images) / elapsed,
            (state.flops - flops) / elapsed / (self.peak_flops * self.ranks.world),
        )
        self.rates.append((images_per_second, utilisation))
        self.mark(state)
        return {
            "exaflops": state.flops / 1e18,
            "flops_utilisation": utilisation,
            "data_wait": (state.waited - waited) / elapsed,
            "seconds": self.seconds,
            "images_per_second": images_per_second,
        }

    def totals(self, state: TrainingState) -> dict[str, float | None]:
        """Return the metrics of the whole run for summary.json. Throughput and utilisation are medians over its log
        lines."""
        throughputs, utilisations = (
            (sorted(column) for column in zip(*self.rates, strict=True)) if self.rates else ([0.0], [None])
        )
        seconds = self.seconds
        return {
            "wall_seconds": seconds,
            "images_per_second": throughputs[len(throughputs) // 2],
            "exaflops": state.flops / 1e18,
            "flops_utilisation": utilisations[len(utilisations) // 2],
            "peak_memory_bytes": get_peak_memory(self.device),
            "device_hours": seconds * self.ranks.world / 3600,
        }


#: sizes of square matrices, small enough for a measurement in a fraction of a second
PEAK_MATRIX_SIDES = {"cpu": 1024, "cuda": 8192}
EMULATED_MATRIX_SIDE = 128  # size for emulated bfloat16, which is a thousand times slower


@lru_cache(maxsize=4)
def measure_peak_flops(device: str, precision: str) -> float:
    """Measure the peak FLOP/s of matrix products on a device in a precision; a multiply-add counts as two. The
    measurement takes a fraction of a second and is cached."""
    is_emulated = precision == "bf16" and not has_bf16(device)
    matmul, flops_per_call = choose_fastest_matmul(
        device, precision, EMULATED_MATRIX_SIDE if is_emulated else PEAK_MATRIX_SIDES.get(device.split(":")[0], 1024)
    )
    return flops_per_call / measure_shortest_time(matmul, device)


def choose_fastest_matmul(device: str, precision: str, size: int) -> tuple[Callable[[], object], float]:
    """Return the fastest function that multiplies square matrices of this size on this machine, and the FLOPs of a
    call.

    On a CPU the candidates are PyTorch's standard product, oneDNN's packed product, and a separate product on every
    core.
    """
    dtype = DTYPES[precision]
    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    flops_per_product = 2.0 * size**3
    candidates: list[tuple[Callable[[], object], float]] = [(lambda: a @ b, flops_per_product)]
    if device == "cpu":
        if can_pack(dtype):
            packed = PackedLinear(torch.nn.Linear(size, size, bias=False), dtype)
            candidates.append((lambda: packed(a), flops_per_product))
        threads = torch.get_num_threads()
        candidates.append(
            (
                lambda: list(get_thread_pool(threads).map(torch.matmul, [a] * threads, [b] * threads)),
                threads * flops_per_product,
            )
        )
    return min(candidates, key=lambda candidate: measure_shortest_time(candidate[0], device) / candidate[1])


def measure_shortest_time(function: Callable[[], object], device: str, times: int = 3) -> float:
    """Return the seconds of the fastest of `times` calls of a function, after one warm-up call."""
    seconds = []
    with torch.inference_mode():
        for _ in range(times + 1):
            start_time = time.perf_counter()
            function()
            synchronize_device(device)
            seconds.append(time.perf_counter() - start_time)
    return min(seconds[1:])
