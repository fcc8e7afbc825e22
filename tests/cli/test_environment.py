"""Closed streams, limited encodings, launcher variables without a launcher, and missing shared memory."""

from __future__ import annotations

import io
import json
import multiprocessing
import os
import subprocess
import sys

import pytest

from vitreous.cli import console
from vitreous.data import shared_memory
from vitreous.errors import UsageError
from vitreous.jobs.train import train
from vitreous.progress import ProgressDisplay, is_main_process, write_line

QUICK_OPTIONS = {"model": "ViT-32x2/8", "epochs": 1, "batch_size": 8, "device": "cpu", "precision": "fp32"}


def run_shell(line: str, **environment: str) -> subprocess.CompletedProcess[bytes]:
    """Run a shell line in which `vitreous` is this package."""
    line = line.replace("vitreous", f"{sys.executable} -m vitreous", 1)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **environment}
    return subprocess.run(["sh", "-c", line], capture_output=True, env=environment, timeout=120)


@pytest.mark.parametrize("closed", [">&-", "2>&-", "<&- >&- 2>&-"])
def test_commands_work_with_closed_streams(closed):
    result = run_shell(f"vitreous completion bash {closed}")  # imports no PyTorch, so it is quick
    assert (result.returncode, result.stderr) == (0, b"")
    assert (result.stdout == b"") == (">&-" in closed.split())


def test_characters_outside_the_encoding_are_replaced(monkeypatch):
    for encoding in ("ascii", "latin-1"):
        stream = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
        monkeypatch.setattr(sys, "stdout", stream)
        console.prepare_streams()
        write_line("IMAGE … → 中", sys.stdout)
        assert stream.buffer.getvalue() == b"IMAGE ... -> \\u4e2d\n"  # type: ignore[attr-defined]
        assert json.loads('"\\u4e2d"') == "中"


def test_training_works_without_standard_streams(monkeypatch, photo_folder, tmp_path):
    monkeypatch.setattr(sys, "stderr", None)
    assert not ProgressDisplay().terminal
    assert train(str(photo_folder), out=str(tmp_path / "run"), workers=0, **QUICK_OPTIONS)["steps"] > 0
    closed = io.StringIO()
    closed.close()
    write_line("dropped", closed)


def test_a_rank_without_a_launcher_is_ignored(monkeypatch, photo_folder, tmp_path):
    monkeypatch.setenv("RANK", "1")
    assert is_main_process()
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert train(str(photo_folder), out=str(tmp_path / "run"), workers=0, progress=False, **QUICK_OPTIONS)["steps"] > 0
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(UsageError, match="WORLD_SIZE is 4 without MASTER_ADDR and MASTER_PORT"):
        train(str(photo_folder), out=str(tmp_path / "other"), workers=0, progress=False, **QUICK_OPTIONS)


@pytest.fixture
def fresh_probe():
    """Reset the cached probe and its notes before and after the test."""
    for function in (shared_memory.can_share_locks, shared_memory.print_note_once):
        function.cache_clear()
    yield
    for function in (shared_memory.can_share_locks, shared_memory.print_note_once):
        function.cache_clear()


def test_without_locks_images_are_loaded_in_the_main_process(monkeypatch, photo_folder, tmp_path, capsys, fresh_probe):
    def refuse() -> None:
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(multiprocessing, "Lock", refuse)
    train(str(photo_folder), out=str(tmp_path / "run"), workers=2, progress=False, **QUICK_OPTIONS)
    assert capsys.readouterr().err.count("without worker processes") == 1


def test_workers_are_limited_by_shared_memory(monkeypatch, capsys, fresh_probe):
    monkeypatch.setattr(shared_memory, "get_free_shared_memory", lambda: 4_000_000)
    assert [shared_memory.limit_workers(4, size) for size in (0, 1000, 1_000_000, 3_000_000)] == [4, 4, 2, 0]
    assert shared_memory.limit_workers(0, 1000) == 0
    error = capsys.readouterr().err
    assert "/dev/shm has 4.0 MB free, so 2 of 4 worker processes are started; enlarge it" in error
    monkeypatch.setattr(shared_memory, "get_free_shared_memory", lambda: None)
    assert shared_memory.limit_workers(4, 1 << 40) == 4
