"""Child processes and stop signals to the process group."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from vitreous.system.children import block_stop_signals, ignore_group_signals, run_shielded_process

pytest.importorskip("fcntl")  # the tests need fork


def fork_child(sleep: float = 30.0) -> int:
    """Fork a child that reacts only to its parent.

    The child stays inside the context, as a child of `multiprocessing` does: a signal may arrive before it has set its
    signal handlers.
    """
    with block_stop_signals():
        pid = os.fork()
        if pid == 0:
            try:
                ignore_group_signals()
                time.sleep(sleep)
            finally:
                os._exit(0)
    return pid


def is_running(pid: int) -> bool:
    return os.waitpid(pid, os.WNOHANG) == (0, 0)


def test_children_ignore_group_signals_and_obey_their_parent():
    pid = fork_child()
    for name in ("TERM", "INT", "TERM"):
        subprocess.run(["sh", "-c", f"kill -{name} {pid}"], check=True)
    time.sleep(0.3)
    assert is_running(pid)
    os.kill(pid, signal.SIGTERM)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 143


def test_signals_during_child_start_are_delivered_afterwards():
    received = []
    handler = signal.signal(signal.SIGTERM, lambda number, frame: received.append(number))
    try:
        with block_stop_signals():
            signal.pthread_kill(threading.get_ident(), signal.SIGTERM)  # threads of other libraries do not block it
            assert received == []
        assert received == [signal.SIGTERM]
    finally:
        signal.signal(signal.SIGTERM, handler)


def test_shielded_processes_survive_signals_and_time_out():
    kill_itself = "import os, signal; os.kill(os.getpid(), signal.SIGTERM); print(input())"
    done = run_shielded_process([sys.executable, "-c", kill_itself], 30, "an order")
    assert (done.returncode, done.stdout) == (0, "an order\n")
    with pytest.raises(subprocess.TimeoutExpired):
        run_shielded_process([sys.executable, "-c", "import time; time.sleep(60)"], 0.3)
