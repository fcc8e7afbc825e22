"""Child processes that survive a stop signal to their process group, so that the parent process can save its work.

`timeout`, Slurm, systemd and Ctrl-C in a terminal send SIGTERM or SIGINT to every process of a group simultaneously.
Only the parent process has the state to save. It starts its children inside `block_stop_signals`; a Python child then
calls `ignore_group_signals`.
"""

from __future__ import annotations

import os
import signal
import subprocess
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)
CAN_BLOCK_SIGNALS = hasattr(signal, "pthread_sigmask")  # False on Windows


@contextmanager
def block_stop_signals() -> Iterator[None]:
    """Block SIGTERM and SIGINT in this thread during the block. Child processes and threads started in the block
    inherit the mask.

    A signal that arrives during the block is handled after it.
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
    """In a child process: ignore SIGINT, and ignore SIGTERM unless the parent process has sent it
    (`Process.terminate`)."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if not hasattr(signal, "sigwaitinfo"):  # on macOS and Windows the sender of a signal cannot be determined
        signal.signal(signal.SIGTERM, signal.SIG_IGN if CAN_BLOCK_SIGNALS else signal.SIG_DFL)
        return
    signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    threading.Thread(target=exit_on_parent_signal, args=(os.getppid(),), name="parent's SIGTERM", daemon=True).start()


def exit_on_parent_signal(parent: int) -> None:
    """Wait for a SIGTERM from the process `parent`, then exit with code 143. A SIGTERM from another process is
    ignored."""
    while signal.sigwaitinfo((signal.SIGTERM,)).si_pid != parent:
        pass
    os._exit(128 + signal.SIGTERM)


def run_shielded_process(
    command: Sequence[str], timeout: float, stdin_text: str = "", environment: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a program that survives stop signals to the process group; return its outputs. `stdin_text` is written to its
    stdin.

    After `timeout` seconds, the program is killed and TimeoutExpired is raised.
    """
    pipe = subprocess.PIPE
    with block_stop_signals():
        process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True, env=environment)
    with process:
        try:
            output, errors = process.communicate(stdin_text, timeout=timeout)
        except BaseException:
            process.kill()
            raise
    return subprocess.CompletedProcess(command, process.returncode, output, errors)
