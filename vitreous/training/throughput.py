"""What a run costs: time, operations, how much of the machine it used."""

from __future__ import annotations

import time
from dataclasses import KW_ONLY, dataclass, field

from vitreous.system.cores import peak_memory
from vitreous.training.loop import State
from vitreous.training.peak import quick_peak
from vitreous.training.ranks import Ranks


@dataclass
class ThroughputMeter:
    """Sums over all processes of a run and all its resumptions; `begin` starts the clock of this one.

    FLOPs are those of the model: three forward passes a picture, two to a multiply-add, without what patch dropout and
    progressive resolution leave out, and without what is computed again. Utilisation is their rate over the measured
    limit of matrix products on all devices, in the run's precision.
    """

    ranks: Ranks
    device: str
    precision: str
    _: KW_ONLY
    before: float = 0.0  # seconds of earlier processes
    limit: float = float("nan")  # operations a second of one device
    started: float = field(default_factory=time.perf_counter)
    marked: tuple[float, int, float, float] = (0.0, 0, 0.0, 0.0)
    rates: list[tuple[float, float]] = field(default_factory=list)  # images a second and utilisation, one a log line

    def begin(self, state: State) -> None:
        """Measure the machine's limit, and start the clock."""
        self.limit = quick_peak(self.device, self.precision)
        self.started = time.perf_counter()
        self.mark(state)

    @property
    def seconds(self) -> float:
        """Wall time of the run so far, earlier processes included."""
        return self.before + time.perf_counter() - self.started

    def mark(self, state: State) -> None:
        """Forget the time since the last line: it was no training."""
        self.marked = (time.perf_counter(), state.images, state.flops, state.waited)

    def line(self, state: State) -> dict[str, float]:
        """The figures of the time since the last mark."""
        then, images, flops, waited = self.marked
        passed = max(time.perf_counter() - then, 1e-9)
        rate, used = (state.images - images) / passed, (state.flops - flops) / passed / (self.limit * self.ranks.world)
        self.rates.append((rate, used))
        self.mark(state)
        return {
            "exaflops": state.flops / 1e18,
            "flops_utilisation": used,
            "waiting": (state.waited - waited) / passed,
            "seconds": self.seconds,
            "images_per_second": rate,
        }

    def totals(self, state: State) -> dict[str, float | None]:
        """The figures of the whole run; rates are medians over its log lines."""
        rates, used = (sorted(column) for column in zip(*self.rates, strict=True)) if self.rates else ([0.0], [None])
        seconds = self.seconds
        return {
            "wall_seconds": seconds,
            "images_per_second": rates[len(rates) // 2],
            "exaflops": state.flops / 1e18,
            "flops_utilisation": used[len(used) // 2],
            "peak_memory_bytes": peak_memory(self.device),
            "device_hours": seconds * self.ranks.world / 3600,
        }
