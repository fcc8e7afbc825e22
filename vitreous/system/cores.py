"""Cores, thread pools and memory of this process, and the CPU load of other processes. Does not import PyTorch."""

from __future__ import annotations

import math
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

#: Environment variables that limit how long idle OpenMP threads spin before they sleep. GNU's runtime, in PyTorch's
#: wheels for Linux, spins 300,000 times (7 ms) by default, which takes a core from other processes; 2,000 times are
#: about 50 us. The runtimes of LLVM and Intel spin 200 ms by default; their variable is in milliseconds.
SPIN_VARIABLES = {"GOMP_SPINCOUNT": "2000", "KMP_BLOCKTIME": "1"}
# file with a container's CPU quota: "200000 100000" is two cores, "max 100000" no limit
CGROUP_CPU_FILE = "/sys/fs/cgroup/cpu.max"
USER_WAIT_VARIABLES = ("OMP_WAIT_POLICY", *SPIN_VARIABLES)  # if the user has set one of these, no variable is changed


def limit_thread_pools() -> None:
    """Configure thread pools for a shared machine by environment variables: idle threads sleep soon, and there are no
    more threads than the container's CPU quota allows.

    Call it before PyTorch is imported, because OpenMP reads the variables when it is loaded. Child processes inherit
    them. The user's settings take precedence.
    """
    if not any(name in os.environ for name in USER_WAIT_VARIABLES):
        os.environ.update(SPIN_VARIABLES)
    if count_usable_cores() < count_affinity_cores():
        os.environ.setdefault("OMP_NUM_THREADS", str(count_usable_cores()))


@contextmanager
def restore_default_spinning() -> Iterator[None]:
    """Start processes in the block without the spin settings of `limit_thread_pools`, to measure another library with
    its default settings."""
    removed = {name: os.environ.pop(name) for name, value in SPIN_VARIABLES.items() if os.environ.get(name) == value}
    try:
        yield
    finally:
        os.environ.update(removed)


def count_usable_cores() -> int:
    """Count the cores that this process may use: those of its affinity mask, limited by the container's CPU quota."""
    count = count_affinity_cores()
    try:
        with open(CGROUP_CPU_FILE) as file:
            quota, period = file.read().split()
        return max(1, min(count, math.ceil(int(quota) / int(period))))
    except (OSError, ValueError):  # the file does not exist, or contains "max"
        return count


def count_compute_threads() -> int:
    """Count the threads that a runtime other than PyTorch gets: `OMP_NUM_THREADS` if it is set, as in PyTorch, but no
    more than usable cores."""
    value = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0].strip()  # "4,2": values for nested levels
    return min(int(value), count_usable_cores()) if value.isdecimal() and int(value) else count_usable_cores()


def count_affinity_cores() -> int:
    """Count the cores in the affinity mask of this process."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def default_worker_count() -> int:
    """Return the default number of worker processes that decode images: one per core, at most eight."""
    return min(count_usable_cores(), 8)


def synchronize_device(device: str) -> None:
    """Wait until a GPU has finished its queued work. Returns immediately for a CPU."""
    if device.startswith("cuda"):
        import torch

        torch.cuda.synchronize(device)


def get_peak_memory(device: str) -> int:
    """Return the peak memory of this process in bytes: allocated on the device for CUDA, else resident; 0 on
    Windows."""
    if device.startswith("cuda"):
        import torch

        return torch.cuda.max_memory_allocated(device)
    if sys.platform == "win32":
        return 0
    if sys.platform == "linux":  # getrusage would include the parent's memory at the time this process was started
        with open("/proc/self/status") as file:
            return next(int(line.split()[1]) * 1024 for line in file if line.startswith("VmHWM"))
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


class ContentionMonitor:
    """Measures the share of this process's cores that other processes use, and calls `warn` once if they slow down this
    process.

    Their share is the load of the cores minus that of this process and its descendants. With `siblings`, processes with
    the same parent, as in a distributed run, are not counted either. Works only on Linux; on other systems every
    measurement is None.
    """

    SECONDS, WINDOWS = 3.0, 2  # minimum seconds of a measurement, and number of consecutive measurements for a warning
    SHARE, FULL = 0.2, 0.9  # for a warning: minimum share of other processes, and of all processes

    def __init__(self, warn: Callable[[str], None] = lambda text: None, siblings: bool = False) -> None:
        self.warn, self.root = warn, os.getppid() if siblings else os.getpid()
        self.last_ticks, self.crowded, self.share = read_cpu_ticks(self.root), 0, None

    def measure(self) -> float | None:
        """Return the share of the cores, 0 to 1, that other processes have used since the last call, or since the
        monitor was created; None if it cannot be measured."""
        self.share, _ = self.measure_cpu_shares()
        return self.share

    def poll(self) -> None:
        """Measure, at most every `SECONDS`, and warn once when in `WINDOWS` consecutive measurements the cores were
        busy and other processes used a large share of them."""
        if (
            self.last_ticks is None
            or self.crowded >= self.WINDOWS
            or time.monotonic() - self.last_ticks[0] < self.SECONDS
        ):
            return
        self.share, busy_share = self.measure_cpu_shares()
        self.crowded = (
            self.crowded + 1 if self.share is not None and self.share >= self.SHARE and busy_share >= self.FULL else 0
        )
        if self.share is not None and self.crowded == self.WINDOWS:
            self.warn(describe_contention(self.share))

    def measure_cpu_shares(self) -> tuple[float | None, float]:
        """Return the shares of CPU time since the last call, 0 to 1: of other processes (None if it cannot be
        measured), and of all processes."""
        previous, now = self.last_ticks, read_cpu_ticks(self.root)
        self.last_ticks = now
        if previous is None or now is None or now[1] <= previous[1]:
            return None, 0.0
        total, idle, process_ticks = (b - a for a, b in zip(previous[1:], now[1:], strict=True))
        busy_share = 1 - idle / total
        return min(1.0, max(0.0, busy_share - process_ticks / total)), busy_share


def describe_contention(share: float) -> str:
    """Return the warning that other processes use a share of the cores."""
    cores = count_affinity_cores()
    return f"other processes use {share:.0%} of this machine's {cores} cores, which slows down this process"


def read_cpu_ticks(root: int) -> tuple[float, int, int, int] | None:
    """Read the clock in seconds, and tick counts since boot: total and idle time of the cores that this process may
    use, and CPU time of the process `root` and its descendants. Returns None if /proc cannot be read."""
    try:
        allowed = os.sched_getaffinity(0)
        total = idle = 0
        with open("/proc/stat") as file:
            for line in file:
                name, *fields = line.split()
                if name[:3] == "cpu" and name[3:].isdigit() and int(name[3:]) in allowed:
                    ticks = [int(field) for field in fields[:8]]  # user nice system idle iowait irq softirq steal
                    total, idle = total + sum(ticks), idle + ticks[3] + ticks[4]
        return time.monotonic(), total, idle, sum(map(read_process_ticks, [root, *list_descendants(root)]))
    except (OSError, AttributeError):
        return None


def read_process_ticks(process: int) -> int:
    """Read the CPU time of a process and of its finished children, in ticks; 0 if the process has ended."""
    try:
        with open(f"/proc/{process}/stat") as file:
            return sum(int(field) for field in file.read().rpartition(")")[2].split()[11:15])
    except OSError:
        return 0


def list_descendants(process: int) -> list[int]:
    """List the IDs of all descendants of a process."""
    try:
        children: list[int] = []
        for thread in os.listdir(f"/proc/{process}/task"):
            with open(f"/proc/{process}/task/{thread}/children") as file:
                children += map(int, file.read().split())
    except OSError:
        return []
    return [process for child in children for process in (child, *list_descendants(child))]
