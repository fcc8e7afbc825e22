"""Child processes that survive a stop signal to their process group, so that the parent can save its work.

`timeout`, Slurm, systemd and a terminal's Ctrl-C send SIGTERM or SIGINT to every process of a group simultaneously.
Only the parent has the state to save. It starts its children inside `block_stop_signals`; a Python child then calls
`ignore_group_signals`.
"""

from __future__ import annotations

import os
import signal
import subprocess
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)
CAN_BLOCK_SIGNALS = hasattr(signal, "pthread_sigmask")  # not on Windows


@contextmanager
def block_stop_signals() -> Iterator[None]:
    """Block SIGTERM and SIGINT in this thread; child processes and threads that it starts meanwhile inherit the mask.

    A signal that arrives in between is handled when the context exits.
    """
    if not CAN_BLOCK_SIGNALS:
        yield
        return
    previous = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, previous)


def ignore_group_signals() -> None:
    """In a child process: ignore SIGINT, and SIGTERM unless the parent process has sent it (`Process.terminate`)."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if not hasattr(signal, "sigwaitinfo"):  # macOS, Windows: the sender of a signal is unknown
        signal.signal(signal.SIGTERM, signal.SIG_IGN if CAN_BLOCK_SIGNALS else signal.SIG_DFL)
        return
    signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    threading.Thread(target=exit_on_parent_signal, args=(os.getppid(),), name="parent's SIGTERM", daemon=True).start()


def exit_on_parent_signal(parent: int) -> None:
    """Wait for a SIGTERM from the process `parent`, then exit with 143; a SIGTERM from another process is dropped."""
    while signal.sigwaitinfo((signal.SIGTERM,)).si_pid != parent:
        pass
    os._exit(128 + signal.SIGTERM)


def run_shielded_process(
    command: Sequence[str], seconds: float, text: str = "", environment: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a program that survives stop signals to the group; `text` is its stdin. Raises TimeoutExpired after
    `seconds`, with the program killed."""
    pipe = subprocess.PIPE
    with block_stop_signals():
        process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True, env=environment)
    with process:
        try:
            output, errors = process.communicate(text, timeout=seconds)
        except BaseException:
            process.kill()
            raise
    return subprocess.CompletedProcess(command, process.returncode, output, errors)
