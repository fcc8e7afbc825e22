"""The allocator of long computations: glibc keeps what is freed, and its heap lies in huge pages. Other C libraries and
systems stay as they are."""

from __future__ import annotations

import ctypes
import os
import platform
import sys
from functools import cache
from pathlib import Path
from typing import Any

TRIM_THRESHOLD, MMAP_THRESHOLD, ARENA_MAX = -1, -3, -8  # options of glibc's mallopt
MADV_HUGEPAGE = 14
HUGE_PAGE_BYTES = 2**21  # bytes of a huge page
HEAP_CHUNK_BYTES = 2**29  # bytes that are asked of the heap at a time: glibc maps a gibibyte and more elsewhere
HEAP_PLUG_BYTES = (
    2**22
)  # bytes that keep what was asked for from being given back: more than any free piece of the heap has yet
OVERCOMMIT_FILE = "/proc/sys/vm/overcommit_memory"
HUGE_PAGES_FILE = "/sys/kernel/mm/transparent_hugepage/enabled"


def tune_allocator() -> None:
    """Have glibc keep freed memory, in one arena for all threads, and ask for huge pages (`reserve_huge_pages`).

    A training step frees and asks for the same large tensors over and over: each time that they go back to the system
    their pages are faulted in anew, 10 to 20 % of a step. What one thread has freed another can use; huge pages are of
    that arena alone.
    """
    if (libc := load_glibc()) is None:
        return
    libc.mallopt(TRIM_THRESHOLD, 2**31 - 1)
    libc.mallopt(MMAP_THRESHOLD, 2**30)
    libc.mallopt(ARENA_MAX, 1)
    reserve_huge_pages()


@cache
def reserve_huge_pages() -> int:
    """Have the heap's next bytes, half as many as the machine has, lie in huge pages where the system gives them on
    request; returns how many bytes, 0 for none. Once a process; `VITREOUS_HUGE_PAGES=0` leaves it out.

    With pages of 4 KiB a virtual machine looks up two tables for most lines of a large tensor. Address space is
    reserved, no memory: a page is there when it is first written.
    """
    libc = load_glibc()
    if libc is None or not can_request_huge_pages() or is_address_space_limited():
        return 0
    count = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2 // HEAP_CHUNK_BYTES
    below = libc.sbrk(0)  # where the heap ends, unless another allocator is loaded: its pieces lie elsewhere
    chunks = [chunk for _ in range(count) if (chunk := libc.malloc(HEAP_CHUNK_BYTES))]
    plug, above = libc.malloc(HEAP_PLUG_BYTES), libc.sbrk(0)
    in_heap = chunks and plug and plug > max(chunks) and above - below > (len(chunks) - 1) * HEAP_CHUNK_BYTES
    start, stop = -(-below // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES, (plug or 0) // HUGE_PAGE_BYTES * HUGE_PAGE_BYTES
    advised = in_heap and start < stop and libc.madvise(start, stop - start, MADV_HUGEPAGE) == 0
    for chunk in chunks:
        libc.free(chunk)
    if not advised and plug:
        libc.free(plug)
    return stop - start if advised else 0


def can_request_huge_pages() -> bool:
    """Whether the system gives huge pages to those who ask, and nobody has switched them off."""
    if os.environ.get("VITREOUS_HUGE_PAGES") == "0":
        return False
    try:
        return "[madvise]" in Path(HUGE_PAGES_FILE).read_text()
    except OSError:
        return False


def is_address_space_limited() -> bool:
    """Whether address space is not to be had for nothing: this process has a limit, or the system counts it as used."""
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
    """The C library with the types of what is called here; None where it is not glibc."""
    if sys.platform != "linux" or platform.libc_ver()[0] != "glibc":
        return None
    libc = ctypes.CDLL(None)
    libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
    libc.free.argtypes = [ctypes.c_void_p]
    libc.sbrk.restype, libc.sbrk.argtypes = ctypes.c_void_p, [ctypes.c_ssize_t]
    libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return libc
