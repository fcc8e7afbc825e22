"""How many processes and threads are worth starting. Apart from `machine`, so that asking does not import PyTorch."""

from __future__ import annotations

import math
import os


def cores() -> int:
    """Cores that this process may use: those it is bound to, and no more than a container's share of the machine's time."""
    found = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        with open("/sys/fs/cgroup/cpu.max") as file:
            quota, period = file.read().split()
        return max(1, min(found, math.ceil(int(quota) / int(period))))
    except (OSError, ValueError):  # no such file, or "max"
        return found


def default_workers() -> int:
    """Processes that decode images: one a core, at most eight."""
    return min(cores(), 8)
