"""Memory allocator settings for long computations: glibc keeps freed memory, and its heap uses huge pages. On systems
without glibc nothing changes."""

from __future__ import annotations

import ctypes
import os
import platform
import sys
from functools import cache
from pathlib import Path
from typing import Any

TRIM_THRESHOLD, MMAP_THRESHOLD, ARENA_MAX = -1, -3, -8  # options of glibc's mallopt
MADV_HUGEPAGE = 14  # advice of madvise that requests huge pages
HUGE_PAGE_BYTES = 2**21  # size of a huge page
HEAP_CHUNK_BYTES = 2**29  # bytes allocated at a time; glibc places blocks of a gibibyte or more outside of the heap
HEAP_END_BLOCK_BYTES = 2**22  # size of a block at the end of the heap; larger than any free block of the heap
OVERCOMMIT_FILE = "/proc/sys/vm/overcommit_memory"
HUGE_PAGES_FILE = "/sys/kernel/mm/transparent_hugepage/enabled"


def tune_allocator() -> None:
    """Make glibc keep freed memory, in one arena (heap) for all threads, and request huge pages (`reserve_huge_pages`).

    A training step frees and allocates the same large tensors repeatedly. If their memory returns to the system, its
    pages are faulted in again, which takes 10-20 % of a step. With a single arena, a thread can use memory that another
    thread has freed. Huge pages apply only to that arena.
    """
    if (libc := load_glibc()) is None:
        return
    libc.mallopt(TRIM_THRESHOLD, 2**31 - 1)
    libc.mallopt(MMAP_THRESHOLD, 2**30)
    libc.mallopt(ARENA_MAX, 1)
    reserve_huge_pages()


@cache
def reserve_huge_pages() -> int:
    """Request huge pages for the heap's next allocations, half of the machine's memory. Returns the number of bytes, 0
    if huge pages are not available.

    With pages of 4 KiB a virtual machine needs two page table walks for most cache lines of a large tensor. Only
    address space is reserved, not memory: a page is allocated when it is first written. Runs once per process;
    `VITREOUS_HUGE_PAGES=0` disables it.
    """
    libc = load_glibc()
    if libc is None or not can_request_huge_pages() or is_address_space_limited():
        return 0
    count = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2 // HEAP_CHUNK_BYTES
    old_heap_end = libc.sbrk(0)  # blocks of another allocator, if one is loaded, are not behind this address
    chunks = [chunk for _ in range(count) if (chunk := libc.malloc(HEAP_CHUNK_BYTES))]
    end_block, new_heap_end = libc.malloc(HEAP_END_BLOCK_BYTES), libc.sbrk(0)
    is_in_heap = (
        chunks
        and end_block
        and end_block > max(chunks)
        and new_heap_end - old_heap_end > (len(chunks) - 1) * HEAP_CHUNK_BYTES
    )
    start, stop = (
        -(-old_heap_end // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES,
        (end_block or 0) // HUGE_PAGE_BYTES * HUGE_PAGE_BYTES,
    )
    is_advised = is_in_heap and start < stop and libc.madvise(start, stop - start, MADV_HUGEPAGE) == 0
    for chunk in chunks:
        libc.free(chunk)
    if not is_advised and end_block:
        libc.free(end_block)
    return stop - start if is_advised else 0


def can_request_huge_pages() -> bool:
    """Return whether the system provides huge pages on request, and `VITREOUS_HUGE_PAGES` does not disable them."""
    if os.environ.get("VITREOUS_HUGE_PAGES") == "0":
        return False
    try:
        return "[madvise]" in Path(HUGE_PAGES_FILE).read_text()
    except OSError:
        return False


def is_address_space_limited() -> bool:
    """Return whether a process limit or the system's overcommit accounting limits address space; True if unknown."""
    import resource

    limits = (resource.RLIMIT_AS, resource.RLIMIT_DATA)
    if any(resource.getrlimit(limit)[0] != resource.RLIM_INFINITY for limit in limits):
        return True
    try:
        return Path(OVERCOMMIT_FILE).read_text().strip() == "2"
    except OSError:
        return True


@cache
def load_glibc() -> Any:
    """Load the C library and declare the types of its functions that are used here; None if it is not glibc."""
    if sys.platform != "linux" or platform.libc_ver()[0] != "glibc":
        return None
    libc = ctypes.CDLL(None)
    libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
    libc.free.argtypes = [ctypes.c_void_p]
    libc.sbrk.restype, libc.sbrk.argtypes = ctypes.c_void_p, [ctypes.c_ssize_t]
    libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return libc
