"""How many worker processes the system's shared memory has room for."""

from __future__ import annotations

import multiprocessing
import os
import sys
from functools import cache

from vitreous.progress import speaks, write_line

SHARED = "/dev/shm"
WAITING = 2  # batches of a worker in shared memory at least: one that is made, one that is read


def usable_workers(workers: int, batch_bytes: int = 0) -> int:
    """Return how many of `workers` processes can hand over batches of that size; 0 where the system has no locks for
    them. Fewer than asked for are noted on stderr, once."""
    if not workers:
        return 0
    if not has_locks():
        note_once(f"{SHARED} cannot be written, so images are read without worker processes")
        return 0
    free = free_bytes()
    room = workers if free is None or not batch_bytes else free // (WAITING * batch_bytes)
    if room < workers:
        note_once(
            f"{SHARED} has {(free or 0) / 1e6:.1f} MB free, so {room} of {workers} worker processes are started; "
            "enlarge it (docker run --shm-size 1g)"
        )
    return min(workers, room)


@cache
def has_locks() -> bool:
    """Whether processes can share a lock, which a read-only or missing /dev/shm forbids."""
    try:
        multiprocessing.Lock()
    except OSError:
        return False
    return True


def free_bytes() -> int | None:
    """Free bytes of shared memory; None where the system has no such folder."""
    try:
        shared = os.statvfs(SHARED)
    except (OSError, AttributeError):
        return None
    return shared.f_bavail * shared.f_frsize


@cache
def note_once(text: str) -> None:
    """Print a note on stderr, once in a process."""
    if speaks():
        write_line(f"note: {text}", sys.stderr)
