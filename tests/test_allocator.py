"""Huge pages: the heap requests them where the system provides them on request; this reserves no memory and can be
disabled."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from vitreous.system import allocator

#: prints the reserved address space, the memory used by the reservation in MiB, and MiB of huge pages of the heap after
#: a tensor of 64 MiB is allocated
PROBE_SCRIPT = """
import json, re, sys
import torch
from vitreous.system.allocator import reserve_huge_pages, tune_allocator, can_request_huge_pages

def kilobytes(field, heap):
    parts = [part for part in re.split(r"^(?=[0-9a-f]+-[0-9a-f]+ )", open("/proc/self/smaps").read(), flags=re.M) if part]
    parts = [part for part in parts if "[heap]" in part.splitlines()[0] or not heap]
    return sum(int(n) for part in parts for n in re.findall(rf"^{field}: +([0-9]+) kB", part, re.M))

LIMIT
before = kilobytes("Rss", False)
tune_allocator()
tune_allocator()
taken = kilobytes("Rss", False) - before
tensor = torch.ones(16 * 2**20)
huge = kilobytes("AnonHugePages", True)
again = [torch.ones(2**18 * n).sum().item() for n in range(1, 40)]
sound = again == [2**18 * n for n in range(1, 40)]
print(json.dumps([can_request_huge_pages(), reserve_huge_pages(), taken / 1024, huge / 1024, sound]))
"""


def run_probe_script(monkeypatch, switch: str | None = None, limit: str = "") -> list:
    """The values printed by `PROBE_SCRIPT` in a new process."""
    if switch is None:
        monkeypatch.delenv("VITREOUS_HUGE_PAGES", raising=False)
    else:
        monkeypatch.setenv("VITREOUS_HUGE_PAGES", switch)
    script = PROBE_SCRIPT.replace("LIMIT", limit)
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    return json.loads(result.stdout)


@pytest.mark.skipif(sys.platform != "linux", reason="read from /proc")
def test_large_tensors_use_huge_pages_on_request(monkeypatch):
    is_requested, reserved, used_memory, huge, sound = run_probe_script(monkeypatch)
    assert sound and used_memory < 4  # MiB: only address space is reserved
    if is_requested and allocator.load_glibc() is not None:
        assert reserved >= allocator.HEAP_CHUNK_BYTES
        assert huge > 32  # of 64 MiB; the system may have fewer
    else:
        assert reserved == 0


@pytest.mark.skipif(sys.platform != "linux", reason="read from /proc")
@pytest.mark.parametrize(
    "switch, limit", [("0", ""), (None, "import resource; resource.setrlimit(resource.RLIMIT_DATA, (2**34, 2**34))")]
)
def test_nothing_is_reserved_if_disabled_or_limited(switch, limit, monkeypatch):
    _, reserved, _, _, sound = run_probe_script(monkeypatch, switch, limit)
    assert sound and reserved == 0


@pytest.mark.skipif(sys.platform != "linux", reason="read from /proc")
def test_nothing_is_reserved_under_strict_overcommit(monkeypatch, tmp_path):
    monkeypatch.setattr(allocator, "OVERCOMMIT_FILE", str(tmp_path / "overcommit"))
    assert allocator.is_address_space_limited()  # the overcommit mode cannot be read
    for mode, limited in (("0", False), ("1", False), ("2", True)):
        (tmp_path / "overcommit").write_text(f"{mode}\n")
        assert allocator.is_address_space_limited() is limited


def test_huge_pages_are_requested_only_in_madvise_mode(monkeypatch, tmp_path):
    monkeypatch.delenv("VITREOUS_HUGE_PAGES", raising=False)
    monkeypatch.setattr(allocator, "HUGE_PAGES_FILE", str(tmp_path / "enabled"))
    assert not allocator.can_request_huge_pages()
    for text, expected in (
        ("always [madvise] never", True),
        ("[always] madvise never", False),
        ("always madvise [never]", False),
    ):
        (tmp_path / "enabled").write_text(text)
        assert allocator.can_request_huge_pages() is expected
    monkeypatch.setattr(allocator.sys, "platform", "darwin")
    allocator.load_glibc.cache_clear()
    try:
        assert allocator.load_glibc() is None
        allocator.tune_allocator()  # nothing to tune
    finally:
        allocator.load_glibc.cache_clear()
