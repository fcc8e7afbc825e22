"""How many processes and threads are worth starting, and what one held. Apart from `machine`, so that asking does not import PyTorch."""

from __future__ import annotations

import math
import os
import sys


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


def peak_memory(device: str) -> int:
    """The most memory this process held so far, in bytes: on the device for CUDA, else resident."""
    if device.startswith("cuda"):
        import torch

        return torch.cuda.max_memory_allocated(device)
    if sys.platform == "win32":
        return 0
    if sys.platform == "linux":  # getrusage would count what the parent held when it started this process
        with open("/proc/self/status") as file:
            return next(int(line.split()[1]) * 1024 for line in file if line.startswith("VmHWM"))
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
