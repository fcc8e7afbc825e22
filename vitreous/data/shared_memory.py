"""Limit the number of worker processes by the free shared memory."""

from __future__ import annotations

import multiprocessing
import os
import sys
from functools import cache

from vitreous.progress import is_main_process, write_line

SHARED_MEMORY_FOLDER = "/dev/shm"
MIN_QUEUED_BATCHES = 2  # minimum batches of a worker in shared memory: one being written, one being read


def limit_workers(workers: int, batch_bytes: int = 0) -> int:
    """Limit the number of worker processes to those whose batches of `batch_bytes` fit in free shared memory; 0 if
    processes cannot share locks. A reduction is printed on stderr, once."""
    if not workers:
        return 0
    if not can_share_locks():
        print_note_once(f"{SHARED_MEMORY_FOLDER} is not writable, so images are read without worker processes")
        return 0
    free = get_free_shared_memory()
    room = workers if free is None or not batch_bytes else free // (MIN_QUEUED_BATCHES * batch_bytes)
    if room < workers:
        print_note_once(
            f"{SHARED_MEMORY_FOLDER} has {(free or 0) / 1e6:.1f} MB free, so {room} of {workers} worker processes "
            f"are started; "
            "enlarge it (docker run --shm-size 1g)"
        )
    return min(workers, room)


@cache
def can_share_locks() -> bool:
    """Return whether processes can share a lock, which needs a writable /dev/shm."""
    try:
        multiprocessing.Lock()
    except OSError:
        return False
    return True


def get_free_shared_memory() -> int | None:
    """Return the free bytes of shared memory; None if the system has no such folder."""
    try:
        shared = os.statvfs(SHARED_MEMORY_FOLDER)
    except (OSError, AttributeError):
        return None
    return shared.f_bavail * shared.f_frsize


@cache
def print_note_once(text: str) -> None:
    """Print a note on stderr, once per process."""
    if is_main_process():
        write_line(f"note: {text}", sys.stderr)
