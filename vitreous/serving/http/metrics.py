"""Counters for Prometheus, in its text format (version 0.0.4)."""

from __future__ import annotations

import os
import sys
from bisect import bisect_left
from collections import Counter
from collections.abc import Mapping
from itertools import accumulate

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
IMAGES = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0)


class Histogram:
    """How many values there were up to each bound, and their sum."""

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds, self.counts, self.sum = bounds, [0] * (len(bounds) + 1), 0.0

    def add(self, value: float) -> None:
        """One more value."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value

    def lines(self, name: str) -> list[str]:
        """As text."""
        totals = list(accumulate(self.counts))
        rows = [f'{name}_bucket{{le="{le}"}} {n}' for le, n in zip((*self.bounds, "+Inf"), totals, strict=True)]
        return [f"# TYPE {name} histogram", *rows, f"{name}_sum {self.sum:.6f}", f"{name}_count {totals[-1]}"]


class Metrics:
    """What the server counts itself; routes are names of a fixed set, so there are never many."""

    def __init__(self) -> None:
        self.requests: Counter[tuple[str, int]] = Counter()
        self.seconds, self.batches = Histogram(SECONDS), Histogram(IMAGES)

    def answered(self, route: str, status: int, seconds: float) -> None:
        """One more request."""
        self.requests[route, status] += 1
        self.seconds.add(seconds)

    def text(self, gauges: Mapping[str, float], counters: Mapping[str, float], name: str, version: str) -> str:
        """Everything, with the numbers that others keep."""
        lines = ["# TYPE vitreous_requests_total counter"]
        for (route, status), count in sorted(self.requests.items()):
            lines.append(f'vitreous_requests_total{{route="{route}",status="{status}"}} {count}')
        for kind, numbers in (("gauge", gauges), ("counter", counters)):
            for key, value in numbers.items():
                lines += [f"# TYPE {key} {kind}", f"{key} {value:g}" if value < 1e6 else f"{key} {value:.0f}"]
        lines += self.batches.lines("vitreous_batch_images") + self.seconds.lines("vitreous_request_seconds")
        told = f'name="{label(name)}",version="{label(version)}"'
        lines += ["# TYPE vitreous_model_info gauge", f"vitreous_model_info{{{told}}} 1"]
        return "\n".join(lines) + "\n"


def label(text: str) -> str:
    """A value as the format has it between quotation marks."""
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def process() -> dict[str, float]:
    """Memory and open files of this process, where the system tells."""
    if sys.platform != "linux":
        return {}
    with open("/proc/self/statm") as file:
        resident = int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return {
        "process_resident_memory_bytes": float(resident),
        "process_open_fds": float(len(os.listdir("/proc/self/fd"))),
    }
