"""Kill a child process at any file change."""

from __future__ import annotations

import builtins
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

WRITE_FLAGS = os.O_WRONLY | os.O_RDWR | os.O_CREAT
CHANGE_EVENTS = {"os.mkdir", "open", "os.rename", "os.remove", "os.rmdir"}


def run_and_kill(folder: Path, work: Callable[[], object], kill_at: int = 0) -> int:
    """Run `work` in a forked child that is killed at its `kill_at`-th change below `folder` (0: not at all).

    Changes are opens, renames, removals, syncs, and writes, which are cut off at half. Returns the number of changes,
    or -1 if the child was killed. Raises AssertionError if it failed otherwise.
    """
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        count = 0

        def tick(tear: Callable[[], object] = lambda: None) -> None:
            nonlocal count
            count += 1
            if count == kill_at:
                tear()
                os.kill(os.getpid(), signal.SIGKILL)

        def hook(event: str, arguments: tuple) -> None:
            if event not in CHANGE_EVENTS or (event == "open" and not (arguments[2] or 0) & WRITE_FLAGS):
                return
            relative = event in ("os.remove", "os.rmdir") and arguments[1] not in (-1, None)  # shutil.rmtree's
            if relative or str(folder) in str(arguments[0]):
                tick()

        class Torn:
            def __init__(self, file):
                self.file = file

            def write(self, content):
                tick(lambda: (self.file.write(content[: len(content) // 2]), self.file.flush()))
                return self.file.write(content)

            def __getattr__(self, name):
                return getattr(self.file, name)

            def __enter__(self):
                return self

            def __exit__(self, *error):
                self.file.close()

        real_open, real_sync = builtins.open, os.fsync
        builtins.open = lambda file, mode="r", *a, **k: (  # type: ignore[assignment]
            Torn(real_open(file, mode, *a, **k)) if set(mode) & set("wa+") else real_open(file, mode, *a, **k)
        )
        os.fsync = lambda descriptor: (tick(), real_sync(descriptor))[1]
        sys.addaudithook(hook)
        try:
            work()
        except BaseException as error:
            os.write(writer, repr(error).encode())
            os._exit(1)
        os.write(writer, str(count).encode())
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as pipe:
        output = pipe.read()
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if kill_at and code == -signal.SIGKILL:
        return -1
    assert code == 0, output
    return int(output)
