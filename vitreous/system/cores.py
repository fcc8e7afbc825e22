"""Cores, thread pools and memory of this process, and what other processes take. Does not import PyTorch."""

from __future__ import annotations

import math
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

#: How long an OpenMP thread that waits for others spins before it sleeps, where nobody has set it. GNU's runtime, that
#: of PyTorch's wheels for Linux, spins 300,000 times, 7 ms, and takes a core from other processes meanwhile; 2,000 are
#: some 50 us. LLVM's and Intel's runtimes spin 200 ms by default, and take milliseconds.
SPIN_VARIABLES = {"GOMP_SPINCOUNT": "2000", "KMP_BLOCKTIME": "1"}
# a container's share of the machine's time: "200000 100000" is two cores, "max 100000" all
CGROUP_CPU_FILE = "/sys/fs/cgroup/cpu.max"
USER_WAIT_VARIABLES = ("OMP_WAIT_POLICY", *SPIN_VARIABLES)  # a user who has set one of these is not overruled


def limit_thread_pools() -> None:
    """Have thread pools share the machine: threads that wait for others sleep soon, and there are no more than a
    container's share of cores. Has to run before PyTorch is imported, since OpenMP reads the environment when it is
    loaded; processes that are started later inherit it. What the user has set stays."""
    if not any(name in os.environ for name in USER_WAIT_VARIABLES):
        os.environ.update(SPIN_VARIABLES)
    if count_usable_cores() < count_affinity_cores():
        os.environ.setdefault("OMP_NUM_THREADS", str(count_usable_cores()))


@contextmanager
def restore_default_spinning() -> Iterator[None]:
    """Start processes without what `limit_thread_pools` has set of spinning, as another library would be started by
    itself."""
    bounded = {name: os.environ.pop(name) for name, value in SPIN_VARIABLES.items() if os.environ.get(name) == value}
    try:
        yield
    finally:
        os.environ.update(bounded)


def count_usable_cores() -> int:
    """Cores that this process may use: those it is bound to, and no more than a container's share of the machine's
    time."""
    count = count_affinity_cores()
    try:
        with open(CGROUP_CPU_FILE) as file:
            quota, period = file.read().split()
        return max(1, min(count, math.ceil(int(quota) / int(period))))
    except (OSError, ValueError):  # no such file, or "max"
        return count


def count_affinity_cores() -> int:
    """Cores that this process is bound to."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def default_worker_count() -> int:
    """Processes that decode images: one a core, at most eight."""
    return min(count_usable_cores(), 8)


def synchronize_device(device: str) -> None:
    """Wait until a GPU has finished the work it was given; return at once on a CPU."""
    if device.startswith("cuda"):
        import torch

        torch.cuda.synchronize(device)


def get_peak_memory(device: str) -> int:
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


class ContentionMonitor:
    """Measures the share of this process's cores that other work takes, and calls `tell` once when this process is
    slower for it.

    Other work is what is busy on the cores less what this process and those that it started use; with `siblings` also
    less what processes of the same parent use, as those of a distributed run. Works on Linux alone; elsewhere every
    figure is None.
    """

    SECONDS, WINDOWS = 3.0, 2  # a figure is of at least so long; it takes so many of them one after the other to tell
    SHARE, FULL = 0.2, 0.9  # of the cores: other work at least, and everything together at least

    def __init__(self, tell: Callable[[str], None] = lambda text: None, siblings: bool = False) -> None:
        self.tell, self.root = tell, os.getppid() if siblings else os.getpid()
        self.marked, self.crowded, self.share = read_cpu_ticks(self.root), 0, None

    def measure(self) -> float | None:
        """Share of the cores, 0 to 1, that other work took since the last call (or construction); None where it cannot
        be read."""
        self.share, _ = self.shares()
        return self.share

    def poll(self) -> None:
        """Measure, at most every `SECONDS`, and tell once the cores were full, with other work on them, in `WINDOWS`
        figures in a row."""
        if self.marked is None or self.crowded >= self.WINDOWS or time.monotonic() - self.marked[0] < self.SECONDS:
            return
        self.share, busy = self.shares()
        self.crowded = (
            self.crowded + 1 if self.share is not None and self.share >= self.SHARE and busy >= self.FULL else 0
        )
        if self.share is not None and self.crowded == self.WINDOWS:
            self.tell(describe_contention(self.share))

    def shares(self) -> tuple[float | None, float]:
        """Shares of the cores since the last call: of other work, and of all work."""
        before, now = self.marked, read_cpu_ticks(self.root)
        self.marked = now
        if before is None or now is None or now[1] <= before[1]:
            return None, 0.0
        total, idle, own = (b - a for a, b in zip(before[1:], now[1:], strict=True))
        busy = 1 - idle / total
        return min(1.0, max(0.0, busy - own / total)), busy


def describe_contention(share: float) -> str:
    """What is said of a share of the cores that other work takes."""
    return (
        f"other work takes {share:.0%} of this machine's {count_affinity_cores()} cores: this process is slower for it"
    )


def read_cpu_ticks(root: int) -> tuple[float, int, int, int] | None:
    """The clock in seconds, and since boot, in ticks: all time of the cores that this process may use, their idle time,
    and what the process `root` and its descendants used. None where /proc cannot be read."""
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
    """Processor time of a process and of its children that have ended, in ticks; 0 where it has ended itself."""
    try:
        with open(f"/proc/{process}/stat") as file:
            return sum(int(field) for field in file.read().rpartition(")")[2].split()[11:15])
    except OSError:
        return 0


def list_descendants(process: int) -> list[int]:
    """The processes that a process started, and those that they started."""
    try:
        children: list[int] = []
        for thread in os.listdir(f"/proc/{process}/task"):
            with open(f"/proc/{process}/task/{thread}/children") as file:
                children += map(int, file.read().split())
    except OSError:
        return []
    return [process for child in children for process in (child, *list_descendants(child))]
